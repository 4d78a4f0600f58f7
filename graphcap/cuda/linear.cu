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
// and holds what was rounded).

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

extern "C" __global__ void __launch_bounds__(COLUMNS / 8)
project(const u16* x_in, const u16* delta, const u16* norm, const u16* weight, const u16* bias,
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
  wait_for_previous();
  let_next_start();
  float x[8];
  widen(load_fresh(x_in + t * 8), x);
#if RESIDUAL
  if (t < ROWS && first + t < OUTPUTS)
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(stream) : "l"((u16*)out + first + t));
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
