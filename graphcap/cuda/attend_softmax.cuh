// The arithmetic of attend.cu: heads normed and rotated, scores, and a softmax that takes tile after tile.

#pragma once
#include "attend_tiles.cuh"

// -- norm and rotation ----------------------------------------------------------------------------------

// A lane has values 8 * eight + 0..7 of a head, LANES lanes a head. `Turn` is older than the previous kernel.
struct Turn {
  uint4 norm, cos, sin;
};

static __device__ __forceinline__ uint4 load_old(const u16* at) { return load_valid(at, true); }
static __device__ __forceinline__ Turn load_turn(const u16* norm, const u16* angles, int eight) {
  const int angle = eight < ROTARY / 8 ? eight % (HALF_ROTARY / 8) * 8 : 0;
  return {load_old(norm + eight * 8), load_old(angles + angle), load_old(angles + HALF_ROTARY + angle)};
}
// An address that is computed here, and not where it is used.
static __device__ __forceinline__ const u16* ready(const u16* at) {
  asm volatile("" : "+l"(at));
  return at;
}
// Of the query that a lane norms in pass `i`; heads beyond the last one are the last one again and are not stored.
static __device__ __forceinline__ const u16* query_of(const u16* qkv, int head, int heads, int i, int eight) {
  return ready(qkv + (head + min((int)threadIdx.x / LANES + i * AT_ONCE, heads - 1)) * D + eight * 8);
}
static __device__ __forceinline__ float head_sum(float sum) {
#pragma unroll
  for (int step = 1; step < LANES; step <<= 1) sum += __shfl_xor_sync(ALL, sum, step);
  return sum;
}
static __device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    even = fmaf(low(word(a, i)), low(word(b, i)), even);
    odd = fmaf(high(word(a, i)), high(word(b, i)), odd);
  }
  return even + odd;
}
// `head`, normed and rotated, rounded where the Triton kernel rounds.
static __device__ __forceinline__ void norm_and_rotate(uint4& head, const Turn& turn, float eps, int eight) {
  const float scale = rsqrtf(head_sum(dot(head, head)) / D + eps);
  const bool first = eight < HALF_ROTARY / 8, turns = eight < ROTARY / 8;
  const int partner = first ? eight + HALF_ROTARY / 8 : turns ? eight - HALF_ROTARY / 8 : eight;
  const u32 sign = first ? 0x80008000u : 0u;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32& two = word(head, i);
    two = product(pair_of(low(two) * scale, high(two) * scale), word(turn.norm, i));
    const u32 other = __shfl_sync(ALL, two, partner, LANES), cos = word(turn.cos, i), sin = word(turn.sin, i) ^ sign;
    const u32 turned = pair_of(fmaf(low(two), low(cos), low(other) * low(sin)),
                               fmaf(high(two), high(cos), high(other) * high(sin)));
    if (turns) two = turned;
  }
}

// -- the products ---------------------------------------------------------------------------------------

// sum (16, 8) += a (16, 16) @ b (16, 8)
static __device__ __forceinline__ void multiply(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Scores of a warp's own tokens: a lane has tokens g and g + 8 of a group, heads 2 * c and 2 * c + 1.
static __device__ __forceinline__ void write_scores(
    float (*scores)[PITCH], const Tile& tile, const uint4* q, float scale, int start, int end, int warp, int lane) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < OWN_GROUPS; i++) {
    float chain[KEY_CHAINS][4];  // several short ones: each product waits for the one before
#pragma unroll
    for (int k = 0; k < KEY_CHAINS; k++) chain[k][0] = chain[k][1] = chain[k][2] = chain[k][3] = 0.f;
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
      const uint4 &a = tile.key[i][0][j], &b = tile.key[i][1][j];
      multiply(chain[2 * j % KEY_CHAINS], a.x, b.x, a.y, b.y, q[j].x, q[j].y);
      multiply(chain[(2 * j + 1) % KEY_CHAINS], a.z, b.z, a.w, b.w, q[j].z, q[j].w);
    }
#pragma unroll
    for (int k = KEY_CHAINS / 2; k; k /= 2) {
#pragma unroll
      for (int n = 0; n < k; n++) {
#pragma unroll
        for (int r = 0; r < 4; r++) chain[n][r] += chain[n + k][r];
      }
    }
    const int at = (warp * OWN_GROUPS + i) * 16 + g;
    const bool one = start + at < end, other = start + at + 8 < end;
    scores[2 * c][at] = one ? chain[0][0] * scale : BELOW;
    scores[2 * c + 1][at] = one ? chain[0][1] * scale : BELOW;
    scores[2 * c][at + 8] = other ? chain[0][2] * scale : BELOW;
    scores[2 * c + 1][at + 8] = other ? chain[0][3] * scale : BELOW;
  }
}

// A softmax that is under way: of head g the top of its scores and a quad's share of the sum; results of a lane's
// values, two in turn for head 2 * c and for head 2 * c + 1, in the order of the tensor cores.
struct Softmax {
  float top, weight, total[WORDS][4];
};

// The tile's first token is valid, so that the top is a number. A lane's tokens are 4 * c + 0..3 of each group.
template <bool FIRST>
static __device__ __forceinline__ void take_tile(
    Softmax& softmax, const float (*scores)[PITCH], const Tile& tile, int lane) {
  const int g = lane >> 2, c = lane & 3;
  float4 p[GROUPS];
  float top = BELOW;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    p[i] = *(const float4*)&scores[g][i * 16 + c * 4];
    top = fmaxf(top, fmaxf(fmaxf(p[i].x, p[i].y), fmaxf(p[i].z, p[i].w)));
  }
  top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
  top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
  float weight = 0.f;
  if (!FIRST) {
    top = fmaxf(top, softmax.top);
    const float shrink = exp2_of(softmax.top - top);
    weight = softmax.weight * shrink;
    const float one = __shfl_sync(ALL, shrink, c * 8), other = __shfl_sync(ALL, shrink, c * 8 + 4);
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      softmax.total[w][0] *= one; softmax.total[w][1] *= other;
      softmax.total[w][2] *= one; softmax.total[w][3] *= other;
    }
  }
  float second[WORDS][4];  // half of the groups: two short chains
#pragma unroll
  for (int w = 0; w < WORDS; w++) second[w][0] = second[w][1] = second[w][2] = second[w][3] = 0.f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    p[i].x = exp2_of(p[i].x - top); p[i].y = exp2_of(p[i].y - top);
    p[i].z = exp2_of(p[i].z - top); p[i].w = exp2_of(p[i].w - top);
    weight += (p[i].x + p[i].y) + (p[i].z + p[i].w);
    const u32 b0 = pair_of(p[i].x, p[i].y), b1 = pair_of(p[i].z, p[i].w);
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const u32 v0 = tile.value[i][0][w], v1 = tile.value[i][1][w], v2 = tile.value[i][2][w], v3 = tile.value[i][3][w];
      multiply(i % 2 ? second[w] : softmax.total[w], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
               __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632), b0, b1);
    }
  }
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
#pragma unroll
    for (int r = 0; r < 4; r++) softmax.total[w][r] += second[w][r];
  }
  softmax.top = top;
  softmax.weight = weight;
}
