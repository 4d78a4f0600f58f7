// The down projection and the merge of one token's experts in CUDA C++: what pair_down of triton_pairs.py does.
// Compiled at run time after common.cuh, see moe/kernels/cuda_down.py.
//
// The weights are on their way into shared memory while the kernel before is still reading its own: no register
// holds them meanwhile, so that the blocks of both are on a multiprocessor together.
//
// Constants given by the compiler: H hidden size, INNER intermediate size, E experts, K experts of a token, ROWS
// outputs of a block, RENORMALIZE, row_id_t. Sums are taken in an order that depends on these alone.

#define PER_LANE (E / 32)
#define REMOVED (-2147483647 - 1)

// -- choice of experts: as choose_experts of triton_topk.py, by one warp ----------------------------------

// Integers in the order of the logits, a NaN as minus infinity, -0 as 0: a maximum over them is exact.
static __device__ __forceinline__ int rank_key(float logit) {
  int bits = __float_as_int(logit != logit ? __int_as_float(0xff800000) : logit == 0.f ? 0.f : logit);
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
// The highest key and the lowest expert that has it, which is taken out.
static __device__ __forceinline__ int take_first(int* key, int lane, int& best) {
  int mine = key[0];
#pragma unroll
  for (int j = 1; j < PER_LANE; j++) mine = max(mine, key[j]);
  best = __reduce_max_sync(ALL, mine);
  int first = 0x7fffffff;
#pragma unroll
  for (int j = PER_LANE - 1; j >= 0; j--) first = key[j] == best ? lane * PER_LANE + j : first;
  const int expert = __reduce_min_sync(ALL, first);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) key[j] = lane * PER_LANE + j == expert ? REMOVED : key[j];
  return expert;
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
    const int expert = take_first(key, lane, best);
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

// `size` bytes, a multiple of 16, into shared memory by the bulk copy engine; `barrier` counts their arrival.
static __device__ __forceinline__ void copy(void* to, const void* from, int size, u32 barrier, u64 policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(size), "r"(barrier), "l"(policy) : "memory");
}
static __device__ __forceinline__ void arrival(u32 barrier) {
  u32 ready = 0;
  while (!ready)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ready) : "r"(barrier) : "memory");
}

#define PARTS (INNER / 256)
#define SLAB (ROWS * INNER)

// With 64 registers a thread, eight warps leave three quarters of a multiprocessor to the kernel before.
// A block takes ROWS outputs, a warp of it one expert, of whose weights it needs one slab of memory.
extern "C" __global__ void __maxnreg__(64)
pair_down(const u16* act, const float* logits, const row_id_t* row_ids, const u16* weights_in, u16* out) {
  extern __shared__ __align__(128) char slabs[];
  __shared__ __align__(16) float scores[E];
  __shared__ __align__(8) u64 arrived[K + 1];
  __shared__ float share[K];
  __shared__ float partial[K][ROWS];
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, first_row = blockIdx.x * ROWS;
  const u32 barrier = (u32)__cvta_generic_to_shared(arrived);
  if (warp == 0) {
    if (lane <= K) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + lane * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    const u64 policy = read_once();
    // Logits are older than the previous kernel, which has let this one start only after its own wait. An
    // ordinary load of them would queue behind all weights that the previous kernel has asked for here.
    if (lane == 0) copy(scores, logits, E * 4, barrier + K * 8, policy);
    arrival(barrier + K * 8);
    int id = 0;
    float logit[PER_LANE], weight = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) logit[j] = scores[lane * PER_LANE + j];
    choose_experts(logit, lane, id, weight);  // of padding, whose logits may be anything, any experts
    if (lane < K) {
      share[lane] = weight;
      copy(slabs + lane * (SLAB * 2), weights_in + ((u64)id * H + first_row) * INNER, SLAB * 2,
           barrier + lane * 8, policy);
    }
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  const bool real = *(volatile const row_id_t*)row_ids >= 0;
  float x[8 * PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    widen(load_fresh(act + warp * INNER + part * 256 + lane * 8), x + part * 8);
  arrival(barrier + warp * 8);
  const char* slab = slabs + warp * (SLAB * 2) + lane * 16;
  float v[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    v[row] = 0.f;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      v[row] = dot8(*(const uint4*)(slab + row * (INNER * 2) + part * 512), x + part * 8, v[row]);
  }
  const float sum = warp_sums<ROWS>(v, lane);
  if (lane < ROWS) partial[warp][lane] = sum * share[warp];
  __syncthreads();
  if (t < ROWS) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < K; k++) total += partial[k][t];
    out[first_row + t] = real ? rounded(total) : 0;
  }
}
