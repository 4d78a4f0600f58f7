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

#include "attend_cluster.cuh"
#include "attend_softmax.cuh"
#include "attend_tiles.cuh"

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
