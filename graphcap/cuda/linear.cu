// A projection of one token in CUDA C++, with what comes before and after it in the same kernel: what
// triton_fused_linear.py does by row. Compiled at run time, see decode/kernels/cuda_linear.py.
//
//   total = x + delta; normed = rms_norm(total); out = normed @ weight.T + bias (+ out)
//
// A block has all its weights in registers, on their way before the kernel before has ended; a thread keeps
// to 8 columns. Every value is rounded where the separate operations round it; sums are taken in an order
// that depends on the constants alone.
//
// Constants given by the compiler: COLUMNS and OUTPUTS of the weight, ROWS of it a block takes; 1 or 0: NORM (otherwise
// x is taken as it is), DELTA, NORMED (it is written), BIAS, RESIDUAL (out is added to), FLOAT_OUT (out is float32
// and holds what was rounded), SLOT64 (slots are int64). PARTS: 0: x is read; otherwise x is what `attend_parts` left, in
// PARTS parts of heads of HEAD values, by an attend tile of TOKENS: it is joined here, as _attend_join_kernel of
// triton_fused_attention.py would join and round it.

#include "common.cuh"

static __device__ __forceinline__ float round_to(float f) {
  const u32 bits = rounded(f);
  return low(bits);
}
static __device__ __forceinline__ uint4 pack(const float* x) {
  uint4 r;
  r.x = rounded(x[0]) | (u32)rounded(x[1]) << 16; r.y = rounded(x[2]) | (u32)rounded(x[3]) << 16;
  r.z = rounded(x[4]) | (u32)rounded(x[5]) << 16; r.w = rounded(x[6]) | (u32)rounded(x[7]) << 16;
  return r;
}

#define WARPS (COLUMNS / 256)

#if PARTS
// Registers of a thread, and parts of 8 values that it can have on their way beside its weights.
#define REGISTERS (COLUMNS > 2048 ? 65536 / (COLUMNS / 8) : 255)
#define ROOM ((REGISTERS - 4 * ROWS - PARTS - 28) / 8)
#define DEEP (ROOM < 1 ? 1 : ROOM < PARTS ? ROOM : PARTS)

// How many parts there are of the token, of which 0 is the new one's; 0: it is padding. Slots and lengths are older
// than the kernel before, so that this is known when that one ends. See _shares of triton_fused_attention.py.
static __device__ __forceinline__ int parts_of(const int* slots, const int* lengths, int capacity, int lane) {
  int slot, length;  // of a slot the word that has its sign
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(slot) : "l"(slots + SLOT64));
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(length) : "l"(lengths));
  const int cached = slot < 0 ? -1 : max(min(length, capacity) - 1, 0), split = (cached + PARTS - 2) / (PARTS - 1);
  const int share = max((split + TOKENS - 1) / TOKENS, 1) * TOKENS;
  return __reduce_add_sync(ALL, lane == 0 ? cached >= 0 : lane < PARTS && (lane - 1) * share < cached);
}

static __device__ __forceinline__ float power_of_2(float f) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(f));
  return r;
}

// 8 columns of every part of a head. What lies where there is no part may be NaN: it has no weight, and no value.
struct Parts {
  const float* from;
  int there;
  float lse[PARTS];
  uint4 value[DEEP][2];

  __device__ __forceinline__ void ask(int part) {
    uint4 &a = value[part % DEEP][0], &b = value[part % DEEP][1];
    asm volatile("{ .reg .pred p; setp.lt.s32 p, %9, %10;"
                 "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                 "mov.b32 %4, 0; mov.b32 %5, 0; mov.b32 %6, 0; mov.b32 %7, 0;"
                 "@p ld.global.cg.v4.u32 {%0,%1,%2,%3},[%8];"
                 "@p ld.global.cg.v4.u32 {%4,%5,%6,%7},[%8+16]; }"
                 : "=&r"(a.x), "=&r"(a.y), "=&r"(a.z), "=&r"(a.w), "=&r"(b.x), "=&r"(b.y), "=&r"(b.z), "=&r"(b.w)
                 : "l"(from + part * HEAD), "r"(part), "r"(there));
  }
  // All that registers hold, without waiting for any of it.
  __device__ __forceinline__ void ask(const float* partial, const float* lses, int parts, int column) {
    const int head = column / HEAD;
    from = partial + head * (PARTS * HEAD) + column % HEAD;
    there = parts;
#pragma unroll
    for (int s = 0; s < PARTS; s++)
      asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(lse[s]) : "l"(lses + head * PARTS + s));
#pragma unroll
    for (int s = 0; s < DEEP; s++) ask(s);
  }
  __device__ __forceinline__ void join(float* x) {
    float top = __int_as_float(0xff800000), sum = 0.f;
#pragma unroll
    for (int s = 0; s < PARTS; s++) {
      if (s >= there) lse[s] = __int_as_float(0xff800000);
      top = fmaxf(top, lse[s]);
    }
    if (there == 0) top = 0.f;  // of padding: weights are zeros, and so is its result
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = 0.f;
#pragma unroll
    for (int s = 0; s < PARTS; s++) {
      const float weight = power_of_2(lse[s] - top);
      const uint4 a = value[s % DEEP][0], b = value[s % DEEP][1];
      sum += weight;
      x[0] = fmaf(__uint_as_float(a.x), weight, x[0]); x[1] = fmaf(__uint_as_float(a.y), weight, x[1]);
      x[2] = fmaf(__uint_as_float(a.z), weight, x[2]); x[3] = fmaf(__uint_as_float(a.w), weight, x[3]);
      x[4] = fmaf(__uint_as_float(b.x), weight, x[4]); x[5] = fmaf(__uint_as_float(b.y), weight, x[5]);
      x[6] = fmaf(__uint_as_float(b.z), weight, x[6]); x[7] = fmaf(__uint_as_float(b.w), weight, x[7]);
      if (s + DEEP < PARTS) ask(s + DEEP);
    }
    const float share = __fdividef(1.f, there == 0 ? 1.f : sum);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = round_to(x[i] * share);
  }
};
#endif

extern "C" __global__ void __launch_bounds__(COLUMNS / 8)
project(
#if PARTS
        const float* parts_in, const float* lse, const int* slots, const int* lengths, int capacity,
#else
        const u16* x_in,
#endif
        const u16* delta, const u16* norm, const u16* weight, const u16* bias,
        void* out, u16* total, u16* normed, float eps) {
  __shared__ float squares[WARPS], partial[WARPS][ROWS];
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, first = blockIdx.x * ROWS;
  const u64 policy = read_once();
  uint4 w[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)  // rows beyond the end read the last one again and are not stored
    w[r] = load_weight(weight + (u64)min(first + r, OUTPUTS - 1) * COLUMNS + t * 8, policy);
#if NORM
  const uint4 norm8 = *(const uint4*)(norm + t * 8);
#endif
#if RESIDUAL
  u16 stream = 0;
#endif
#if PARTS
  if (t < ROWS && first + t < OUTPUTS)
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(stream) : "l"((u16*)out + first + t));
  const int there = parts_of(slots, lengths, capacity, lane);
#endif
  wait_for_previous();
  let_next_start();
  float x[8];
#if PARTS
  Parts parts;
  parts.ask(parts_in, lse, there, t * 8);
#else
  widen(load_fresh(x_in + t * 8), x);
#endif
#if RESIDUAL && !PARTS
  if (t < ROWS && first + t < OUTPUTS)
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(stream) : "l"((u16*)out + first + t));
#endif
#if PARTS
  parts.join(x);
#endif
#if DELTA
  float d[8];
  widen(load_fresh(delta + t * 8), d);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = round_to(x[i] + d[i]);
  if (blockIdx.x == 0) *(uint4*)(total + t * 8) = pack(x);
#endif
#if NORM
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(x[i], x[i], sum);
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) sum += __shfl_xor_sync(ALL, sum, step);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += squares[i];
  const float scale = rsqrtf(sum / COLUMNS + eps);
  float g[8];
  widen(norm8, g);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = round_to(round_to(x[i] * scale) * g[i]);
#endif
#if NORMED
  if (blockIdx.x == 0) *(uint4*)(normed + t * 8) = pack(x);
#endif
#pragma unroll
  for (int start = 0; start < ROWS; start += 8) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = start + i < ROWS ? dot8(w[min(start + i, ROWS - 1)], x, 0.f) : 0.f;
    const float all = warp_sums<8>(v, lane);
    if (lane < 8 && start + lane < ROWS) partial[warp][start + lane] = all;
  }
  __syncthreads();
  if (t < ROWS && first + t < OUTPUTS) {
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) value += partial[i][t];
#if BIAS
    value += low(bias[first + t]);
#endif
#if RESIDUAL
    ((u16*)out)[first + t] = rounded(round_to(value) + low(stream));
#elif FLOAT_OUT
    ((float*)out)[first + t] = round_to(value);
#else
    ((u16*)out)[first + t] = rounded(value);
#endif
  }
}
