// What the kernel of attend.cu is made of: its sizes, from the constants there, and what a lane loads of the cache.

#pragma once
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
