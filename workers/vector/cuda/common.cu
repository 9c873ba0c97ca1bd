// Keys, sorted lists, visited tables and distances, shared by the kernels of walk.cu and knn.cu.
//
// One block works on one slot or row. Its threads share lists in dynamic shared memory. No result
// depends on the order in which the threads of a block run, nor on other blocks: keys are totally
// ordered, and a distance is summed in the order of workers/vector/kernels/distances.py. So results
// equal those of cores to the last bit. Python writes the constants and structures of layout.py before
// this text. `room` is a kernel's only shared memory, and barriers and shuffles are for whole warps:
// tests run the same text on the CPU (tests/workers/vector/cuda/emulator.h).

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define TEAM 8  // threads that compute a distance
#define ALL 0xFFFFFFFFu
#define LINE 32  // values of a line of the second cache

__device__ inline u64 key_of(float distance, u32 row) {
    u32 bits = __float_as_uint(distance + 0.0f);  // no negative zero
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (u64)row << 1;
}

__device__ inline u32 row_of(u64 key) { return (u32)key >> 1; }

__device__ inline float distance_of(u64 key) {
    u32 bits = (u32)(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

__device__ inline bool has_bit(const u32* bits, u32 row) { return bits[row >> 5] >> (row & 31) & 1; }

// Returns how many of `size` ascending keys are less than `key`, without flags.
__device__ inline int below(const u64* keys, int size, u64 key) {
    int low = 0;
    while (low < size) {
        int middle = (low + size) >> 1;
        if ((keys[middle] & ~FLAG) < key) low = middle + 1; else size = middle;
    }
    return low;
}

// Sorts keys in shared memory (Batcher's bitonic sort); their number is a power of two. Warps wait for
// each other only around exchanges between warps.
__device__ void sort(u64* keys, int size) {
    for (int run = 2; run <= size; run <<= 1)
        for (int reach = run >> 1; reach > 0; reach >>= 1) {
            for (int i = threadIdx.x; i < size; i += blockDim.x) {
                int other = i ^ reach;
                if (other < i) continue;
                u64 one = keys[i], two = keys[other];
                if ((one > two) == !(i & run)) { keys[i] = two; keys[other] = one; }
            }
            int next = reach > 1 ? reach >> 1 : run;
            if (reach < WARP && next < WARP) __syncwarp(); else __syncthreads();
        }
    __syncthreads();
}

// Merges the `count` keys of `fresh`, in any order, into the `size` ascending keys of `list`, and drops
// the largest ones. A row that is in the list already, or twice in `fresh`, counts once. All lists are in
// shared memory. `fresh` has room for a power of two, at most 32 keys for each thread; `spare` has room for
// `size` keys. Returns the place of the first new key, `size` if there is none. Call it after a barrier.
__device__ __noinline__ int merge(u64* list, int size, u64* fresh, int count, u64* spare) {
    int padded = 1;
    while (padded < count) padded <<= 1;
    for (int i = count + threadIdx.x; i < padded; i += blockDim.x) fresh[i] = EMPTY;
    __syncthreads();
    sort(fresh, padded);
    u32 known = 0;
    for (int i = threadIdx.x, n = 0; i < padded; i += blockDim.x, n++) {
        u64 key = fresh[i];
        int at = below(list, size, key);
        bool again = (at < size && (list[at] & ~FLAG) == key) || (i > 0 && fresh[i - 1] == key);
        known |= (u32)(key != EMPTY && again) << n;
    }
    if (__syncthreads_or(known != 0)) {
        for (int i = threadIdx.x, n = 0; i < padded; i += blockDim.x, n++)
            if (known >> n & 1) fresh[i] = EMPTY;
        __syncthreads();
        sort(fresh, padded);
    }
    int first = fresh[0] < LIMIT ? below(list, size, fresh[0]) : size;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        int at = i + below(fresh, padded, list[i] & ~FLAG);
        if (at < size) spare[at] = list[i];
    }
    for (int i = threadIdx.x; i < padded && fresh[i] < LIMIT; i += blockDim.x) {
        int at = i + below(list, size, fresh[i]);
        if (at < size) spare[at] = fresh[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) list[i] = spare[i];
    __syncthreads();
    return first;
}

// Inserts the rows of a list and their copies into the hits, nearest first; for one thread. It is not
// inlined, because it would take registers from the rest of `walk`.
__device__ __noinline__ void unfold(
    const u64* list, i64 size, const u32* chain, u64* hits, i64 k) {
    i64 kept = 0;
    for (i64 place = 0; place < size; place++) {
        u64 key = list[place] & ~FLAG;
        if (key >= LIMIT || (kept == k && key >= hits[k - 1])) return;
        while (kept < k || key < hits[k - 1]) {
            i64 at = kept < k ? kept++ : k - 1;
            for (; at > 0 && hits[at - 1] > key; at--) hits[at] = hits[at - 1];
            hits[at] = key;
            u32 following = chain[row_of(key)];
            if (following == NOWHERE) break;
            key = key_of(distance_of(key), following);
        }
    }
}

// Returns whether the table lacks a row, and adds the row if `keeps` is set. A full table reports each
// row as new: the merge drops repeated rows, but a row that is skipped would be lost. Atomics change the
// second-level cache; a plain load could read an outdated value from the first-level cache.
__device__ inline bool visit(u32* seen, u32 mask, u32 row, bool keeps) {
    u32 place = (u32)((u64)row * 0x9E3779B97F4A7C15ull >> 40) & mask;
    for (u32 tries = 0; tries <= mask; tries++) {
        u32 held = keeps ? atomicCAS(&seen[place], NOWHERE, row) : *(volatile u32*)&seen[place];
        if (held == row) return false;
        if (held == NOWHERE) return true;
        place = (place + 1) & mask;
    }
    return true;
}

struct Vectors {  // of an index, rows padded to 16 values
    const char* start;
    i64 row_bytes;
    int length;
    bool product, half;
};

#ifdef __CUDACC__
__device__ inline float widened(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline void prefetch_line(const u32* at) { asm volatile("prefetch.global.L2 [%0];" : : "l"(at)); }
#endif

// Starts the load of values from memory.
__device__ inline void prefetch(const u32* values, i64 count) {
    for (i64 i = 0; i < count; i += LINE) prefetch_line(values + i);
}

// Returns the `quad`-th four values of a row, whatever its storage.
__device__ inline float4 four(const char* row, int quad, bool half) {
    if (!half) return ((const float4*)row)[quad];
    ushort4 bits = ((const ushort4*)row)[quad];
    return make_float4(widened(bits.x), widened(bits.y), widened(bits.z), widened(bits.w));
}

template <bool PRODUCT>
__device__ inline float term(float left, float right, float sum) {
    if (PRODUCT) return fmaf(left, right, sum);
    float gap = left - right;
    return fmaf(gap, gap, sum);
}

template <bool PRODUCT>
__device__ inline float4 terms(float4 row, float4 query, float4 sum) {
    return make_float4(
        term<PRODUCT>(row.x, query.x, sum.x), term<PRODUCT>(row.y, query.y, sum.y),
        term<PRODUCT>(row.z, query.z, sum.z), term<PRODUCT>(row.w, query.w, sum.w));
}

__device__ inline float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ inline float4 plus_of(float4 a, int distance) {
    return make_float4(
        a.x + __shfl_xor_sync(ALL, a.x, distance), a.y + __shfl_xor_sync(ALL, a.y, distance),
        a.z + __shfl_xor_sync(ALL, a.z, distance), a.w + __shfl_xor_sync(ALL, a.w, distance));
}

// The sums of one thread of a team. Cores have four sums of 16 values, which they add as (0 + 1) + (2 + 3)
// and then as a tree over the 16. Here each half of a team has two of the four, with four values in each
// thread. All loads for 128 values of the row start before the first value is used, so a warp waits once
// for them. `quad` counts groups of four values.
template <bool HALF, bool PRODUCT, int STEPS>
__device__ inline void add_steps(const char* row, const float4* query, int quad, float4* sums) {
    const char* from = row + (HALF ? 8 : 16) * quad;
    float4 values[2 * STEPS];
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++) values[n] = four(from, 16 * (n >> 1) + 4 * (n & 1), HALF);
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
        sums[n & 1] = terms<PRODUCT>(values[n], query[quad + 16 * (n >> 1) + 4 * (n & 1)], sums[n & 1]);
}

template <bool HALF, bool PRODUCT>
__device__ inline float4 part_of(const char* row, const float4* query, int length) {
    int side = threadIdx.x % TEAM >> 2, part = threadIdx.x & 3, own = 8 * side + part, quads = length / 4;
    float4 sums[2] = {};
    int at = 0;
    for (; at + 32 <= quads; at += 32) add_steps<HALF, PRODUCT, 2>(row, query, at + own, sums);
    if (at + 16 <= quads) add_steps<HALF, PRODUCT, 1>(row, query, at + own, sums), at += 16;
    for (at += part; side == 0 && at < quads; at += 4)
        sums[0] = terms<PRODUCT>(four(row, at, HALF), query[at], sums[0]);
    return plus(sums[0], sums[1]);
}

// Computes a distance with a team of threads and 16-byte loads. All threads of the warp take part.
__device__ float distance(const Vectors& v, u32 row, const float* query) {
    const char* at = v.start + (u64)row * v.row_bytes;
    const float4* q = (const float4*)query;
    float4 sum = v.half ? v.product ? part_of<true, true>(at, q, v.length)
                                    : part_of<true, false>(at, q, v.length)
                        : v.product ? part_of<false, true>(at, q, v.length)
                                    : part_of<false, false>(at, q, v.length);
    sum = plus_of(plus_of(plus_of(sum, 4), 2), 1);
    float total = (sum.x + sum.z) + (sum.y + sum.w);
    return v.product ? -total : total;
}
