// The choice of one token's experts, by one warp: as choose_experts of triton_topk.py.
//
// Constants given by the compiler: E experts, a multiple of 128; K experts of a token; RENORMALIZE.

#pragma once
#include "common.cuh"

#define PER_LANE (E / 32)
#define REMOVED (-2147483647 - 1)

// Integers in the order of the logits, a NaN as minus infinity, -0 as 0: a maximum over them is exact.
static __device__ __forceinline__ int rank_key(float logit) {
  const int bits = __float_as_int(fmaxf(logit + 0.f, __int_as_float(0xff800000)));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
static __device__ __forceinline__ float ranked_logit(int key) {
  return __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
}
// Expert lane * PER_LANE + j lies in key[j] of a lane.
static __device__ __forceinline__ void load_logits(const float* logits, float* logit, int lane) {
#pragma unroll
  for (int j = 0; j < PER_LANE; j += 4) {
    const uint4 four = load_fresh(logits + lane * PER_LANE + j);
    logit[j] = __uint_as_float(four.x); logit[j + 1] = __uint_as_float(four.y);
    logit[j + 2] = __uint_as_float(four.z); logit[j + 3] = __uint_as_float(four.w);
  }
}
// The highest key and the lowest expert that has it.
static __device__ __forceinline__ int first_of(const int* key, int lane, int& best) {
  int mine = key[0];
#pragma unroll
  for (int j = 1; j < PER_LANE; j++) mine = max(mine, key[j]);
  best = __reduce_max_sync(ALL, mine);
  int first = 0x7fffffff;
#pragma unroll
  for (int j = PER_LANE - 1; j >= 0; j--) first = key[j] == best ? lane * PER_LANE + j : first;
  return __reduce_min_sync(ALL, first);
}
static __device__ __forceinline__ void remove(int* key, int lane, int expert) {
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) key[j] = lane * PER_LANE + j == expert ? REMOVED : key[j];
}
// Lane k < K ends with the k-th expert and its weight.
static __device__ __forceinline__ void choose_experts(const float* logit, int lane, int& id, float& weight) {
  int key[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) key[j] = rank_key(logit[j]);
  float top = 0.f, mine = 0.f;
#pragma unroll
  for (int k = 0; k < K; k++) {
    int best;
    const int expert = first_of(key, lane, best);
    remove(key, lane, expert);
    const float value = ranked_logit(best);
    if (k == 0) top = value;
    if (lane == k) { id = expert; mine = __expf(value - top); }
  }
  float total;
  if (RENORMALIZE) {
    total = lane < K ? mine : 0.f;
  } else {
    total = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) total += __expf(logit[j] - top);
  }
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) total += __shfl_xor_sync(ALL, total, step);
  weight = mine / total;
}
