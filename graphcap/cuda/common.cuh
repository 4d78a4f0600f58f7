// What the kernels here share. Constants given by the compiler: HALF 1 for float16 and 0 for bfloat16, PDL.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define ALL 0xffffffffu

static __device__ __forceinline__ void wait_for_previous() {
  if (PDL) asm volatile("griddepcontrol.wait;" ::: "memory");
}
static __device__ __forceinline__ void let_next_start() {
  if (PDL) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// What the previous kernels wrote: past the first-level cache, which is not coherent.
static __device__ __forceinline__ uint4 load_fresh(const void* at) {
  uint4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at));
  return r;
}

// Weights: read once, so that they must not drive the activations out of the second-level cache. Not .nc:
// the assembler would move such loads behind `wait_for_previous`, which they are to be before.
static __device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
static __device__ __forceinline__ uint4 load_weight(const void* at, u64 policy) {
  uint4 r;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%5;"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at), "l"(policy));
  return r;
}

static __device__ __forceinline__ float low(u32 pair) {
#if HALF
  float f;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(f) : "r"(pair));
  return f;
#else
  return __uint_as_float(pair << 16);
#endif
}
static __device__ __forceinline__ float high(u32 pair) {
#if HALF
  float f;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(f) : "r"(pair));
  return f;
#else
  return __uint_as_float(pair & 0xffff0000u);
#endif
}
static __device__ __forceinline__ u16 rounded(float f) {
  u16 r;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f));
#endif
  return r;
}

static __device__ __forceinline__ void widen(uint4 eight, float* x) {
  x[0] = low(eight.x); x[1] = high(eight.x); x[2] = low(eight.y); x[3] = high(eight.y);
  x[4] = low(eight.z); x[5] = high(eight.z); x[6] = low(eight.w); x[7] = high(eight.w);
}
static __device__ __forceinline__ float dot8(uint4 w, const float* x, float sum) {
  sum = fmaf(low(w.x), x[0], sum); sum = fmaf(high(w.x), x[1], sum);
  sum = fmaf(low(w.y), x[2], sum); sum = fmaf(high(w.y), x[3], sum);
  sum = fmaf(low(w.z), x[4], sum); sum = fmaf(high(w.z), x[5], sum);
  sum = fmaf(low(w.w), x[6], sum); sum = fmaf(high(w.w), x[7], sum);
  return sum;
}

// N values a lane -> lane l holds the warp's sum of value l % N: each exchange halves the values.
template <int N> struct Fold {
  static __device__ __forceinline__ void run(float* v, int lane) {
    const bool upper = lane & (N / 2);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float send = upper ? v[i] : v[i + N / 2], keep = upper ? v[i + N / 2] : v[i];
      v[i] = keep + __shfl_xor_sync(ALL, send, N / 2);
    }
    Fold<N / 2>::run(v, lane);
  }
};
template <> struct Fold<1> {
  static __device__ __forceinline__ void run(float*, int) {}
};
template <int N> static __device__ __forceinline__ float warp_sums(float* v, int lane) {
  Fold<N>::run(v, lane);
  float sum = v[0];
#pragma unroll
  for (int step = N; step < 32; step <<= 1) sum += __shfl_xor_sync(ALL, sum, step);
  return sum;
}
