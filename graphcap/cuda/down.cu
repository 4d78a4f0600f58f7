// The down projection and the merge of one token's experts in CUDA C++: what pair_down of triton_pairs.py does.
// Compiled at run time, see moe/kernels/cuda_down.py.
//
// The weights are on their way into shared memory while the kernel before is still reading its own: no register
// holds them meanwhile, so that the blocks of both are on a multiprocessor together.
//
// Constants given by the compiler: H hidden size, INNER intermediate size, E experts, K experts of a token, ROWS
// outputs of a block, RENORMALIZE, row_id_t. Sums are taken in an order that depends on these alone.

#include "choice.cuh"
#include "common.cuh"

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
