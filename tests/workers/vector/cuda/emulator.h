// Enough of CUDA to run the kernels' text on a CPU, one block after the other, each thread a fiber.
//
// A fiber runs until a barrier or a shuffle; then the next one does. When all fibers of a warp, or of
// the block, wait at the same kind of barrier, they go on. Where some can never arrive the launch
// fails, as a real device would hang. `order` chooses which fiber runs first at each turn and which
// warps rest, so that results which depend on it show. Shared memory is filled with junk before each
// block, and a guard behind it is looked at after. A block's threads do not run at the same time: what
// this cannot find is a missing barrier between accesses that are in order here for every `order`.

#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __noinline__
#define __launch_bounds__(...)
#define __shared__  // `extern __shared__ T room[]` is then the array below
#define __popc __builtin_popcount

struct Dim { int x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

enum { SHARED_WORDS = 1 << 13, THREADS_MAX = 256, STACK_BYTES = 64 << 10 };
static const unsigned long long JUNK = 0xA5A5A5A5A5A5A5A5ull;
alignas(16) unsigned long long room[SHARED_WORDS];

enum Wait { NOTHING, WARP_BARRIER, BLOCK_BARRIER, OVER };
struct Fiber {
    ucontext_t context;
    jmp_buf at;
    bool begun;
    Wait wait;
    unsigned long long value;  // what it shows to others
    char stack[STACK_BYTES];
};
static Fiber* fibers;
static int current;
static jmp_buf scheduler;
typedef void (*Kernel)(const void*, int);
static Kernel kernel;
static const void* structure;
static int number;

static void body() {
    kernel(structure, number);
    fibers[current].wait = OVER;
    _longjmp(scheduler, 1);
}

static void resume(int i) {
    Fiber& fiber = fibers[i];
    current = threadIdx.x = i;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
    setcontext(&fiber.context);
}

static void wait_at(Wait barrier) {
    Fiber& fiber = fibers[current];
    fiber.wait = barrier;
    if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

// Let go those of `first` to `last` that wait at a barrier, if all that are not over do.
static bool let_go(int first, int last, Wait barrier) {
    bool any = false;
    for (int i = first; i < last; i++) {
        any |= fibers[i].wait == barrier;
        if (fibers[i].wait != barrier && fibers[i].wait != OVER) return false;
    }
    for (int i = first; any && i < last; i++)
        if (fibers[i].wait == barrier) fibers[i].wait = NOTHING;
    return any;
}

static bool run_block(unsigned order) {
    int threads = blockDim.x;
    for (int i = 0; i < threads; i++) fibers[i].begun = false, fibers[i].wait = NOTHING;
    for (;;) {
        bool ran = false, over = true;
        for (int n = 0; n < threads; n++) {
            int i = order & 1 ? threads - 1 - n : n;
            i ^= order >> 1 & (threads - 1);  // whole warps of a power of two
            if (i < threads && fibers[i].wait == NOTHING) {
                bool rests = order >> 8 + (i / 32) % 16 & 1;  // its warp, until the next turn
                if (!rests) resume(i);
                ran = true;
            }
            over &= fibers[n].wait == OVER;
        }
        order = order * 1664525u + 1013904223u * (order != 0);
        for (int first = 0; first < threads; first += 32)
            ran |= let_go(first, first + 32, WARP_BARRIER);
        ran |= let_go(0, threads, BLOCK_BARRIER);
        if (over) return true;
        if (!ran) return false;
    }
}

static void __syncthreads() { wait_at(BLOCK_BARRIER); }

static void __syncwarp() { wait_at(WARP_BARRIER); }

static int __syncthreads_or(int value) {
    fibers[current].value = value != 0;
    wait_at(BLOCK_BARRIER);
    bool any = false;
    for (int i = 0; i < blockDim.x; i++) any |= fibers[i].wait != OVER && fibers[i].value;
    wait_at(BLOCK_BARRIER);
    return any;
}

static unsigned __ballot_sync(unsigned, bool vote) {
    fibers[current].value = vote;
    wait_at(WARP_BARRIER);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++)
        votes |= (unsigned)(fibers[(current & ~31) + lane].value != 0) << lane;
    wait_at(WARP_BARRIER);
    return votes;
}

static unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float __shfl_xor_sync(unsigned, float value, int distance) {
    fibers[current].value = __float_as_uint(value);
    wait_at(WARP_BARRIER);
    unsigned other = fibers[current ^ distance].value;
    wait_at(WARP_BARRIER);
    return __uint_as_float(other);
}

template <class T, class V> static T atomicAdd(T* place, V value) {
    T before = *place;
    *place = before + (T)value;
    return before;
}

static unsigned atomicCAS(unsigned* place, unsigned expected, unsigned value) {
    unsigned before = *place;
    if (before == expected) *place = value;
    return before;
}

static float widened(unsigned short bits) {  // of a half
    unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
    if (rest >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    if (rest < 0x400u) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
}

static void prefetch_line(const unsigned*) {}

// Run a launch; 0, or which rule was broken: 1 a barrier that not all reach, 2 shared memory.
static int emulate(Kernel which, int grid, int threads, int shared_bytes, const void* to, int n,
                   unsigned order) {
    if (!fibers) fibers = (Fiber*)malloc(sizeof(Fiber) * THREADS_MAX);
    int words = (shared_bytes + 7) / 8;
    if (threads > THREADS_MAX || threads % 32 || words >= SHARED_WORDS) return 2;
    kernel = which, structure = to, number = n;
    blockDim.x = threads, gridDim.x = grid;
    for (int block = 0; block < grid; block++) {
        blockIdx.x = order & 1 ? grid - 1 - block : block;
        for (int i = 0; i < SHARED_WORDS; i++) room[i] = JUNK;
        if (!run_block(order ? order + block : 0)) return 1;
        for (int i = words; i < SHARED_WORDS; i++) if (room[i] != JUNK) return 2;
    }
    return 0;
}
