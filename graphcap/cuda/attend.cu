// One token's attention in CUDA C++: what _attend_kernel of triton_fused_attention.py does, with the same results in
// the same places. Compiled at run time, see decode/kernels/cuda_attend.py.
//
// A block takes up to 8 query heads of one key-value head, and one split of the tokens that the cache holds, or the new
// token. Scores are keys times queries, and the result values times probabilities, by the tensor cores: the heads are
// the 8 columns of both products. Sums over values of a head may be taken in any order, and so may those over tokens:
// the order is such that what a lane loads, 16 bytes at a time, is what it has to give to the tensor cores. A warp
// makes the scores of its own tokens for all values of a head, and the result of its own values for all tokens: scores
// alone pass through shared memory, one barrier a tile. Its work after the wait is a chain of few short links.
//
// Of a lane, in what follows: g = lane / 4 and c = lane % 4.
//
// Constants given by the compiler: KV_HEADS; GROUP query heads of each; D values of a head, the first ROTARY rotated;
// PAGE tokens of a block of the cache and CAPACITY of a sequence's table; KEY_BLOCK, KEY_TOKEN, KEY_HEAD, VALUE_BLOCK,
// VALUE_TOKEN and VALUE_HEAD, strides of the cache in values; SPLITS; TOKENS of a tile, WARPS; slot_t; CLUSTER 1: the parts
// of a head are the blocks of a cluster, which joins them itself, and 0: another kernel does.

#include "common.cuh"

#define HEADS (KV_HEADS * GROUP)
#define COLUMNS 8                                    // heads of a block
#define BLOCKS ((GROUP + COLUMNS - 1) / COLUMNS)     // that share one key-value head
#define PAIRS (KV_HEADS * BLOCKS)
#define CHUNKS (D / 32)                              // 16 bytes each: values 32 * j + 8 * c + 0..7 of a head
#define PARTS (1 + SPLITS)                           // the new token and the splits
#define HALF_ROTARY (ROTARY / 2)
#define LANES (D / 8)                                // that norm and rotate one head
#define PASSES ((COLUMNS * LANES + WARPS * 32 - 1) / (WARPS * 32))
#define AT_ONCE (WARPS * 32 / LANES)                 // heads of one pass
#define SPACED (D + 32)                              // a query in shared memory: two lie on different banks
#define OWN_GROUPS (TOKENS / WARPS / 16)             // of 16 tokens, whose scores a warp makes
#define GROUPS (TOKENS / 16)
#define OWN_VALUES (D / WARPS)                       // of a head, whose result a warp makes
#define WORDS (OWN_VALUES / 16)                      // two values each: OWN_VALUES / 8 values in a row of a lane
#define WHOLE_PAGES (PAGE % 16 == 0)                 // 16 tokens of a group lie in one block of the cache
#define PITCH (TOKENS + 12)                          // floats; few banks are met twice, see `attend`
#define KEY_CHAINS (OWN_GROUPS >= 4 || CHUNKS == 1 ? 1 : OWN_GROUPS >= 2 || CHUNKS == 2 ? 2 : 4)
#define AHEAD (OWN_GROUPS * D <= 128)                // registers hold two tiles
#define BELOW __int_as_float(0xff800000)
#if CLUSTER  // a part lies in its block's shared memory
#define CLUSTERS __cluster_dims__(PARTS, 1, 1)
#define PART_OF(block) ((block) % PARTS)
#define PAIR_OF(block) ((block) / PARTS)
#define COLUMN_PITCH D
#define LSE_PITCH 1
#else
#define CLUSTERS
#define PART_OF(block) ((block) / PAIRS)
#define PAIR_OF(block) ((block) % PAIRS)
#define COLUMN_PITCH (PARTS * D)
#define LSE_PITCH PARTS
#endif

// -- rounding by two ------------------------------------------------------------------------------------

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

static __device__ __forceinline__ u32 pair_of(float first, float second) {
  u32 r;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
// Both are of the model's type: rounded once, as their product in float32 would be.
static __device__ __forceinline__ u32 product(u32 a, u32 b) {
  u32 r;
  asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
static __device__ __forceinline__ u32 word(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}
static __device__ __forceinline__ u32& word(uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// -- loads ----------------------------------------------------------------------------------------------

// Volatile, so that they stay before `wait_for_previous`.
static __device__ __forceinline__ int load_int(const int* at) {
  int r;
  asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}
static __device__ __forceinline__ long long load_index(const int* at) { return load_int(at); }
static __device__ __forceinline__ long long load_index(const long long* at) {
  long long r;
  asm volatile("ld.volatile.global.s64 %0, [%1];" : "=l"(r) : "l"(at) : "memory");
  return r;
}
// Zeros where not `valid`: the cache may hold anything there, NaN too, and is not read.
static __device__ __forceinline__ uint4 load_valid(const u16* at, bool valid) {
  uint4 r;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(at), "r"((u32)valid));
  return r;
}
// WORDS of them.
static __device__ __forceinline__ void load_words(u32* to, const u16* at, bool valid) {
#if WORDS == 1
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0;\n@p ld.global.cg.u32 %0, [%1]; }"
               : "=&r"(to[0]) : "l"(at), "r"((u32)valid));
#elif WORDS == 2
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;\n"
               "@p ld.global.cg.v2.u32 {%0,%1}, [%2]; }"
               : "=&r"(to[0]), "=&r"(to[1]) : "l"(at), "r"((u32)valid));
#else
#pragma unroll
  for (int i = 0; i < WORDS; i += 4) {
    const uint4 four = load_valid(at + i * 2, valid);
    to[i] = four.x; to[i + 1] = four.y; to[i + 2] = four.z; to[i + 3] = four.w;
  }
#endif
}

struct Tile {
  uint4 key[OWN_GROUPS][2][CHUNKS];  // of tokens g and g + 8 of a group
  u32 value[GROUPS][4][WORDS];       // of tokens 4 * c + 0..3 of a group
};
// Blocks of the cache where the groups of a tile lie.
struct Pages {
  int key[OWN_GROUPS], value[GROUPS];
};

static __device__ __forceinline__ int page_of(const int* table, int token) {
  return load_int(table + (u32)min(token, CAPACITY - 1) / PAGE);  // of a token that is none any entry
}
static __device__ __forceinline__ Pages find_pages(const int* table, int start, int warp) {
  Pages found;
#if WHOLE_PAGES
#pragma unroll
  for (int i = 0; i < OWN_GROUPS; i++) found.key[i] = page_of(table, start + (warp * OWN_GROUPS + i) * 16);
#pragma unroll
  for (int i = 0; i < GROUPS; i++) found.value[i] = page_of(table, start + i * 16);
#endif
  return found;
}
// Of token `inside` of the group that begins with `first`, in the keys or values of a head.
template <long long BLOCK, long long TOKEN>
static __device__ __forceinline__ const u16* place(
    const u16* cache, const int* table, int page, int first, int inside, bool valid) {
#if WHOLE_PAGES
  return cache + page * BLOCK + ((u32)first % PAGE + inside) * TOKEN;
#else
  const u32 token = valid ? first + inside : 0;
  return cache + load_int(table + token / PAGE) * BLOCK + token % PAGE * TOKEN;
#endif
}
static __device__ __forceinline__ void load_tile(
    Tile& tile, const u16* keys, const u16* values, const int* table, const Pages& pages, int start, int end,
    int warp, int lane) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < OWN_GROUPS; i++) {
    const int first = start + (warp * OWN_GROUPS + i) * 16;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      const bool valid = first + g + upper * 8 < end;
      const u16* at = place<KEY_BLOCK, KEY_TOKEN>(keys, table, pages.key[i], first, g + upper * 8, valid) + c * 8;
#pragma unroll
      for (int j = 0; j < CHUNKS; j++) tile.key[i][upper][j] = load_valid(at + j * 32, valid);
    }
  }
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const int first = start + i * 16;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const bool valid = first + c * 4 + r < end;
      const u16* at = place<VALUE_BLOCK, VALUE_TOKEN>(values, table, pages.value[i], first, c * 4 + r, valid);
      load_words(tile.value[i][r], at + warp * OWN_VALUES + g * (WORDS * 2), valid);
    }
  }
}

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

// -- the kernel -----------------------------------------------------------------------------------------

// The new token: what it is alone, `partial` and `lse` of its first head on, and its place in the cache. It reads no
// other token. False: it is padding, and nothing is written.
static __device__ __forceinline__ bool take_new_token(
    const u16* qkv, const u16* q_norm, const u16* k_norm, const u16* cos_sin, const long long* positions,
    const slot_t* slots, u16* keys, u16* values, float* partial, float* lse, float eps, float scale, int kv_head,
    int first_head) {
  const int eight = threadIdx.x % LANES, heads = min(COLUMNS, GROUP - first_head), head = kv_head * GROUP + first_head;
  const long long slot = load_index(slots), position = load_index(positions);
  const Turn q_turn = load_turn(q_norm, cos_sin + (slot < 0 ? 0 : position) * ROTARY, eight);
  const Turn k_turn = {load_old(k_norm + eight * 8), q_turn.cos, q_turn.sin};
  const u16 *query[PASSES], *new_key = ready(qkv + (HEADS + kv_head) * D + eight * 8);
#pragma unroll
  for (int i = 0; i < PASSES; i++) query[i] = query_of(qkv, head, heads, i, eight);
  wait_for_previous();
  let_next_start();
  if (slot < 0) return false;
  uint4 q[PASSES], key = load_fresh(new_key);
#pragma unroll
  for (int i = 0; i < PASSES; i++) q[i] = load_fresh(query[i]);
  const uint4 value = load_fresh(new_key + KV_HEADS * D);
  float x[8];
  widen(value, x);
  norm_and_rotate(key, k_turn, eps, eight);
  if (threadIdx.x < LANES && first_head == 0) {
    const long long block = slot / PAGE, inside = slot % PAGE;
    *(uint4*)(keys + block * KEY_BLOCK + inside * KEY_TOKEN + eight * 8) = key;
    *(uint4*)(values + block * VALUE_BLOCK + inside * VALUE_TOKEN + eight * 8) = value;
  }
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int mine = threadIdx.x / LANES + i * AT_ONCE;
    norm_and_rotate(q[i], q_turn, eps, eight);
    const float score = head_sum(dot(q[i], key));
    if (mine >= heads) continue;
    if (eight == 0) lse[mine * LSE_PITCH] = score * scale;
    float* out = partial + mine * COLUMN_PITCH + eight * 8;  // a softmax over one token is 1
    *(float4*)out = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(out + 4) = make_float4(x[4], x[5], x[6], x[7]);
  }
  return true;
}
// `scale` times what the tensor cores left for one head: 2 * WORDS values in a row.
static __device__ __forceinline__ void store_total(float* out, const float (*total)[4], int column, float scale) {
#pragma unroll
  for (int w = 0; w < WORDS; w += 2) {
    const float a = total[w][column] * scale, b = total[w][column + 2] * scale;
#if WORDS == 1
    asm volatile("st.v2.f32 [%0], {%1,%2};" ::"l"(out), "f"(a), "f"(b) : "memory");
#else
    asm volatile("st.v4.f32 [%0], {%1,%2,%3,%4};"
                 ::"l"(out + w * 2), "f"(a), "f"(b), "f"(total[w + 1][column] * scale),
                   "f"(total[w + 1][column + 2] * scale) : "memory");
#endif
  }
}

// A split of the cached tokens: `partial` and `lse` of its first head on. False: it has no token, and nothing is written.
static __device__ __forceinline__ bool take_split(
    const u16* qkv, const u16* q_norm, const u16* cos_sin, const long long* positions, const slot_t* slots,
    const int* table, const int* lengths, const u16* keys, const u16* values, float* partial, float* lse, float eps,
    float scale, int part, int kv_head, int first_head) {
  // Scores of a head lie PITCH apart, 12 banks of 32: warps write them one each to a bank, and read them 16 bytes at a
  // time, of which the last of one head and the first of the next share banks. Two, so that a warp may write the next
  // tile's while another one still reads.
  __shared__ __align__(16) float scores[2][COLUMNS][PITCH];
  __shared__ __align__(16) u16 queries[COLUMNS][SPACED];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;

  // All of this is older than the previous kernel, which has let this one start only after its own wait. No load waits
  // for another one to tell whether it is of use: blocks of the cache are looked up as if every split were of one tile.
  Pages pages = find_pages(table, (part - 1) * TOKENS, warp);
  const long long position = load_index(positions), slot = load_index(slots);
  const int given = load_int(lengths);
  const int cached = slot < 0 ? 0 : min(given, CAPACITY) - 1;
  const u16* angles = cos_sin + (slot < 0 ? 0 : position) * ROTARY;
  const int eight = threadIdx.x % LANES;
  const Turn turn = load_turn(q_norm, angles, eight);
  // As `_shares` has it.
  const int split = (cached + SPLITS - 1) / SPLITS, share = max((split + TOKENS - 1) / TOKENS, 1) * TOKENS;
  int start = (part - 1) * share;
  const int end = min(start + share, cached);
  if (share != TOKENS) pages = find_pages(table, start, warp);
  Tile tile;
  load_tile(tile, keys, values, table, pages, start, end, warp, lane);
  if (start + TOKENS < end) pages = find_pages(table, start + TOKENS, warp);
  const int heads = min(COLUMNS, GROUP - first_head), head = kv_head * GROUP + first_head;
  const u16* query[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) query[i] = query_of(qkv, head, heads, i, eight);
  const bool none = start >= end;  // padding too
  wait_for_previous();
  let_next_start();
  if (none) return false;

  uint4 mine[PASSES], q[CHUNKS];
#pragma unroll
  for (int i = 0; i < PASSES; i++) mine[i] = load_fresh(query[i]);
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int column = threadIdx.x / LANES + i * AT_ONCE;
    norm_and_rotate(mine[i], turn, eps, eight);
    if (column < COLUMNS) *(uint4*)&queries[column][eight * 8] = mine[i];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) q[j] = *(const uint4*)&queries[g][j * 32 + c * 8];
  Softmax softmax;
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
#pragma unroll
    for (int r = 0; r < 4; r++) softmax.total[w][r] = 0.f;
  }
  write_scores(scores[0], tile, q, scale, start, end, warp, lane);
#if AHEAD
  Tile next;
  if (start + TOKENS < end) {
    load_tile(next, keys, values, table, pages, start + TOKENS, end, warp, lane);
    pages = find_pages(table, start + 2 * TOKENS, warp);
  }
#endif
  __syncthreads();
  take_tile<true>(softmax, scores[0], tile, lane);
#pragma unroll 1
  for (int buffer = 1; (start += TOKENS) < end; buffer ^= 1) {
#if AHEAD
    tile = next;
    if (start + TOKENS < end) {
      load_tile(next, keys, values, table, pages, start + TOKENS, end, warp, lane);
      pages = find_pages(table, start + 2 * TOKENS, warp);
    }
#else
    load_tile(tile, keys, values, table, pages, start, end, warp, lane);
    pages = find_pages(table, start + TOKENS, warp);
#endif
    write_scores(scores[buffer], tile, q, scale, start, end, warp, lane);
    __syncthreads();
    take_tile<false>(softmax, scores[buffer], tile, lane);
  }

  float weight = softmax.weight + __shfl_xor_sync(ALL, softmax.weight, 1);
  weight += __shfl_xor_sync(ALL, weight, 2);
  const float inverse = __fdividef(1.f, weight);
  const float one = __shfl_sync(ALL, inverse, c * 8), other = __shfl_sync(ALL, inverse, c * 8 + 4);
  if (warp == 0 && c == 0 && g < heads) lse[g * LSE_PITCH] = softmax.top + __log2f(weight);
  float* out = partial + c * 2 * COLUMN_PITCH + warp * OWN_VALUES + g * (WORDS * 2);
  if (c * 2 < heads) store_total(out, softmax.total, 0, one);
  if (c * 2 + 1 < heads) store_total(out + COLUMN_PITCH, softmax.total, 1, other);
  return true;
}

#if CLUSTER
// -- joining by the blocks of a cluster -------------------------------------------------------------------

// Every thread of every block has come here, and what each has written before is seen by all.
static __device__ __forceinline__ void meet() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where `here`, in shared memory, lies in that of the block with part `part`.
static __device__ __forceinline__ u32 in_part(const void* here, int part) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"((u32)__cvta_generic_to_shared(here)), "r"(part));
  return r;
}
static __device__ __forceinline__ float load_far(u32 at) {
  float r;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
  return r;
}
static __device__ __forceinline__ float2 load_far_two(u32 at) {
  float2 r;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(at) : "memory");
  return r;
}

#define TWOS (COLUMNS * D / 2)

// out of the heads of a pair, in the order of the parts, whichever came first; each block its share. A part that is
// none has an lse of minus infinity and anything for a total; of padding all are none, and the result is 0.
static __device__ __forceinline__ void join(
    const float (*total)[D], const float* lse, u16* out, int part, int heads) {
  meet();
  for (int two = part * (WARPS * 32) + threadIdx.x; two < TWOS; two += PARTS * WARPS * 32) {
    const int column = two / (D / 2), d = two % (D / 2) * 2;
    if (column >= heads) break;
    float weight[PARTS], top = BELOW, sum = 0.f, a = 0.f, b = 0.f;
    float2 value[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) weight[i] = load_far(in_part(&lse[column], i));
#pragma unroll
    for (int i = 0; i < PARTS; i++) value[i] = load_far_two(in_part(&total[column][d], i));
#pragma unroll
    for (int i = 0; i < PARTS; i++) top = fmaxf(top, weight[i]);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const bool none = weight[i] == BELOW;
      const float share = none ? 0.f : exp2_of(weight[i] - top);
      sum += share;
      a = none ? a : fmaf(share, value[i].x, a);
      b = none ? b : fmaf(share, value[i].y, b);
    }
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    *(u32*)(out + column * D + d) = rounded(a * scale) | (u32)rounded(b * scale) << 16;
  }
  meet();  // nobody's shared memory is gone while another one reads it
}
#endif

extern "C" __global__ void CLUSTERS __launch_bounds__(WARPS * 32)
attend(const u16* qkv, const u16* q_norm, const u16* k_norm, const u16* cos_sin, const long long* positions,
       const slot_t* slots, const int* table, const int* lengths, u16* keys, u16* values, float* partial, float* lse,
       u16* out, float eps, float scale) {
  const int part = PART_OF(blockIdx.x), pair = PAIR_OF(blockIdx.x), kv_head = pair / BLOCKS;
  const int first_head = pair % BLOCKS * COLUMNS, head = kv_head * GROUP + first_head;
  keys += (long long)kv_head * KEY_HEAD;
  values += (long long)kv_head * VALUE_HEAD;
#if CLUSTER
  __shared__ __align__(16) float own_total[COLUMNS][D];
  __shared__ float own_lse[COLUMNS];
  partial = own_total[0];
  lse = own_lse;
#else
  partial += (head * PARTS + part) * D;
  lse += head * PARTS + part;
#endif
  const bool any = part == 0
      ? take_new_token(qkv, q_norm, k_norm, cos_sin, positions, slots, keys, values, partial, lse, eps, scale, kv_head,
                       first_head)
      : take_split(qkv, q_norm, cos_sin, positions, slots, table, lengths, keys, values, partial, lse, eps, scale, part,
                   kv_head, first_head);
#if CLUSTER
  if (!any && threadIdx.x < COLUMNS) own_lse[threadIdx.x] = BELOW;
  join(own_total, own_lse, out + head * D, part, min(COLUMNS, GROUP - first_head));
#endif
}
