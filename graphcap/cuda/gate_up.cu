// The gate and up projections of one token's experts in CUDA C++: what pair_gate_up of triton_pairs.py does.
// Compiled at run time, see moe/kernels/cuda_gate_up.py.
//
// Which weights to read stands in the logits of the kernel directly before, so that none can be on its way
// earlier. One warp of a block finds the expert while the others wait for it: a multiprocessor compares 64
// integers a cycle, so that 16 warps which find it each by itself would get in each other's way.
//
// Constants given by the compiler: H hidden size, INNER intermediate size, E experts, K experts of a token, ROWS
// of gate and as many of up a block takes, DEPTH loads of weights a thread starts before it uses the first,
// REGISTERS of a thread, RENORMALIZE, row_id_t. Sums are taken in an order that depends on these alone.

#include "choice.cuh"
#include "common.cuh"

#define GROUP (H / 8)  // threads that share a row
#define WARPS (GROUP / 32)
#define BLOCKS (INNER / ROWS)  // of a pair

// Of the thread and its block: asked for a second time, so that no register holds them through the products.
static __device__ __forceinline__ u32 own_thread() {
  u32 r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}
static __device__ __forceinline__ u32 own_block() {
  u32 r;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
  return r;
}

// By one warp; a volatile load, so that it goes out with those of the logits.
static __device__ __forceinline__ bool is_real(const row_id_t* row_ids) {
  return *(volatile const row_id_t*)row_ids >= 0;
}

static __device__ __forceinline__ void write_routing(const float* logits, const row_id_t* row_ids,
                                                     float* weights, int* ids, int lane) {
  const bool real = is_real(row_ids);
  float logit[PER_LANE], weight = 0.f;
  int id = 0;
  load_logits(logits, logit, lane);
  choose_experts(logit, lane, id, weight);  // of padding, whose logits may be anything, any experts
  if (lane < K) {
    weights[lane] = real ? weight : 0.f;
    ids[lane] = real ? id : -1;
  }
}

// The token's expert in `slot` of K, -1 for padding.
static __device__ __forceinline__ int expert_of(const float* logits, const row_id_t* row_ids, int slot,
                                                int lane) {
  const bool real = is_real(row_ids);
  float logit[PER_LANE];
  load_logits(logits, logit, lane);
  int key[PER_LANE], best;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) key[j] = rank_key(logit[j]);
  int expert = first_of(key, lane, best);
#pragma unroll 1
  for (int taken = 0; taken < slot; taken++) {
    remove(key, lane, expert);
    expert = first_of(key, lane, best);
  }
  return real ? expert : -1;
}

// A block takes ROWS outputs of one pair: one half of its threads their gate rows, the other their up rows. A
// thread keeps to 8 columns. The last block writes the routing.
extern "C" __global__ void __maxnreg__(REGISTERS)
pair_gate_up(const u16* hidden, const float* logits, const row_id_t* row_ids, const u16* weights_in, u16* act,
             float* weights, int* ids) {
  __shared__ float partial[2 * WARPS][ROWS];
  __shared__ int chosen;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, half = t / GROUP, column = t % GROUP * 8;
  const int slot = blockIdx.x / BLOCKS, first_row = blockIdx.x % BLOCKS * ROWS;
  wait_for_previous();
  let_next_start();
  if (slot == K) {
    if (warp == 0) write_routing(logits, row_ids, weights, ids, lane);
    return;
  }
  const uint4 x8 = load_fresh(hidden + column);
  if (warp == 0) {
    const int expert = expert_of(logits, row_ids, slot, lane);
    if (lane == 0) chosen = expert;
  }
  __syncthreads();
  const int expert = chosen;
  if (expert < 0) return;

  const u64 policy = read_once();
  const u16* row = weights_in + (((u64)expert * 2 + half) * INNER + first_row) * H + column;
  uint4 w[DEPTH];
#pragma unroll
  for (int r = 0; r < DEPTH; r++) w[r] = load_weight(row + r * H, policy);
  float x[8];
  widen(x8, x);
#pragma unroll
  for (int start = 0; start < ROWS; start += 8) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int r = start + i;
      v[i] = dot8(w[r % DEPTH], x, 0.f);
      if (r + DEPTH < ROWS) w[r % DEPTH] = load_weight(row + (r + DEPTH) * H, policy);
    }
    const float all = warp_sums<8>(v, lane);
    if (lane < 8) partial[warp][start + lane] = all;
  }
  __syncthreads();
  const u32 output = own_thread();
  if (output < ROWS) {
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      gate += partial[i][output];
      up += partial[WARPS + i][output];
    }
    // Blocks are in the order of the pairs and of their outputs.
    act[own_block() * ROWS + output] = rounded(__fdividef(gate, 1.f + __expf(-gate)) * up);
  }
}
