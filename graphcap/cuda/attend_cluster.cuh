// How the blocks of a cluster, each with one part of the same heads, join them; for attend.cu.

#pragma once
#include "attend_tiles.cuh"
#include "attend_softmax.cuh"

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
