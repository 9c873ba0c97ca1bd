// The extends of all active slots, as in workers/vector/traversal/steps.py. A block has one slot. In each
// extend it merges the distances of the last tasks, writes the next tasks and measures them. It waits for
// no other block. A turn is one captured graph: `turn_begin`, `walk`, `turn_end`. Only a slot's own state
// decides its course, so neither parking nor the end of a turn changes a result.
//
// `turn_begin` reads the host's entry of the ring: the active slots, and the admitted searches. A slot that
// ends writes its results to host memory directly, and `turn_end` lists the ended slots. The host reads
// them after the turn's event.

// An entry of the ring to the device, in words of 8 bytes: ACTIVE_COUNT, ADMITTED_COUNT, active slots,
// then records: slot, serial, the slot's row, its query, its warm start. An entry of the ring to the
// host: numbers of ended slots and of tasks, then slot | serial << 32.
#define WORDS(base, index, words) ((i64*)(base) + (i64)(index) * (words))

// A query crosses the bus once, into the slot's own row. Queries of a feed are on the device already.
__device__ void take_query(const Machine* m, u32 slot, i64* f, const i64* from) {
    i64* query = WORDS(m->queries, slot, m->dim_max / 2);
    for (int i = threadIdx.x; i < f[LENGTH] / 2; i += blockDim.x) query[i] = from[i];
    __syncthreads();
    if (threadIdx.x == 0) f[QUERY] = (i64)query;
}

extern "C" __global__ void turn_begin(const Machine* m, int) {
    const i64* in = WORDS(m->ring_in, *(i64*)m->turn % m->ring_depth, m->ring_in_words);
    const i64* records = in + 2 + m->slots;
    for (int i = blockIdx.x; i < in[1]; i += gridDim.x) {
        const i64* record = records + i * m->record_words;
        i64 slot = record[0], *f = WORDS(m->fields, slot, COUNT);
        for (int j = threadIdx.x; j < COUNT; j += blockDim.x) f[j] = record[2 + j];
        i64* warm = WORDS(m->warm, slot, m->top_m_max);
        const i64* warm_from = record + 2 + COUNT + m->dim_max / 2;
        __syncthreads();
        for (int j = threadIdx.x; j < f[WARM_COUNT]; j += blockDim.x) warm[j] = warm_from[j];
        if (f[FEED] == 0) take_query(m, slot, f, record + 2 + COUNT);
        if (threadIdx.x == 0) {
            f[WARM] = (i64)warm;
            ((i64*)m->serials)[slot] = record[1];
            ((int*)m->pending)[slot] = -1;
        }
        __syncthreads();
    }
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < in[0]; i += blockDim.x) ((u32*)m->active)[i] = in[2 + i];
        if (threadIdx.x == 0) *(u32*)m->active_count = in[0], *(u64*)m->tasks = 0;
    }
}

extern "C" __global__ void turn_end(const Machine* m, int) {
    if (threadIdx.x > 0) return;
    i64 turn = *(i64*)m->turn;
    i64* out = WORDS(m->ring_out, turn % m->ring_depth, m->ring_out_words);
    out[0] = *(u32*)m->ended_count;
    out[1] = *(i64*)m->tasks;
    *(u32*)m->ended_count = 0;
    *(i64*)m->turn = turn + 1;
}

// The list that a seeding slot measures: filter, warm start, entry points, rows without edges.
struct Seeds {
    const i64* listed;  // null: the rows from `offset` on
    i64 first, last, offset;
    int done, room;  // the field that counts measured rows; entries of the routing list for them
};

__device__ Seeds seeds_of(const Machine* m, const i64* f) {
    Seeds s = {0, 0, f[LOOSE_LAST] - f[LOOSE_FIRST], f[LOOSE_FIRST], LOOSE_DONE, 0};
    if (f[LIST_COUNT] > 0) {
        s.listed = (const i64*)f[LIST], s.last = f[LIST_COUNT], s.done = LIST_DONE;
    } else if (f[WARM_DONE] < f[WARM_COUNT]) {
        s.listed = (const i64*)f[WARM], s.last = f[WARM_COUNT], s.done = WARM_DONE;
        s.room = f[TOP_M];
    } else if (f[REPS_DONE] < f[REPS_COUNT]) {
        s.listed = (const i64*)f[REPS], s.last = f[REPS_COUNT], s.done = REPS_DONE;
        s.room = f[ENTRIES] > f[WARM_COUNT] ? f[ENTRIES] : f[WARM_COUNT];
    }
    s.first = f[s.done];
    if (s.last > s.first + m->seed_rows) s.last = s.first + m->seed_rows;
    return s;
}

__device__ bool may_return(const i64* f, u32 row) {
    if (f[ALIVE] && !has_bit((const u32*)f[ALIVE], row)) return false;
    return !f[ALLOWED] || has_bit((const u32*)f[ALLOWED], row);
}

struct Work {  // a block's slot; all in shared memory except `slot`
    u32 slot;
    i64* f;
    u64 *list, *hits, *spare, *fresh;
    u32* count;
};

// Returns a value that all threads of the block share, although it may change afterwards.
__device__ i64 status_of(const Work& w) {
    i64 status = w.f[STATUS];
    __syncthreads();
    return status;
}

// Merges the slot's distances into a list, `merge_max` at a time; returns the place of the first new key.
// Prefetches the edges of rows that enter the routing list.
__device__ int take_in(const Machine* m, Work& w, u64* list, int size, int pending, bool screens) {
    const u32* rows = (const u32*)m->rows + (u64)w.slot * m->tasks_max;
    const float* distances = (const float*)m->distances + (u64)w.slot * m->tasks_max;
    int first = size;
    for (int at = 0; at < pending; at += m->merge_max) {
        int last = at + m->merge_max < pending ? at + m->merge_max : pending;
        if (threadIdx.x == 0) *w.count = 0;
        __syncthreads();
        u64 limit = list[size - 1] & ~FLAG;
        for (int i = at + threadIdx.x; i < last; i += blockDim.x) {
            u64 key = rows[i] == NOWHERE ? EMPTY : key_of(distances[i], rows[i]);
            if (key >= limit || (screens && !may_return(w.f, rows[i]))) continue;
            w.fresh[atomicAdd(w.count, 1)] = key;
            if (!screens) prefetch((const u32*)w.f[GRAPH] + rows[i] * w.f[DEGREE], w.f[DEGREE]);
        }
        __syncthreads();
        int count = *w.count, place = size;
        __syncthreads();
        if (count) place = merge(list, size, w.fresh, count, w.spare);
        if (place < first) first = place;
    }
    return first;
}

// Replaces each row by the next one of its chain, by NOWHERE if that is too far for the hits; returns whether
// any is left. Chains ascend, so all rows behind one that is too far are too far.
__device__ bool follow(const Machine* m, Work& w, int pending) {
    u32* rows = (u32*)m->rows + (u64)w.slot * m->tasks_max;
    const float* distances = (const float*)m->distances + (u64)w.slot * m->tasks_max;
    u64 limit = w.hits[w.f[K] - 1] & ~FLAG;
    int some = 0;
    for (int i = threadIdx.x; i < pending; i += blockDim.x) {
        if (rows[i] != NOWHERE) rows[i] = ((const u32*)w.f[CHAIN])[rows[i]];
        if (rows[i] != NOWHERE && key_of(distances[i], rows[i]) >= limit) rows[i] = NOWHERE;
        some |= rows[i] != NOWHERE;
    }
    return __syncthreads_or(some);
}

// Returns whether an entry is left to expand.
__device__ bool is_open(const Work& w) {
    int open = 0;
    for (int i = threadIdx.x; i < w.f[TOP_M]; i += blockDim.x)
        open |= w.list[i] < LIMIT && !(w.list[i] & FLAG);
    return __syncthreads_or(open);
}

__device__ void seeded(const Machine* m, Work& w) {
    i64* f = w.f;
    if (f[LIST_COUNT] > 0) {
        if (threadIdx.x == 0 && f[LIST_DONE] >= f[LIST_COUNT]) f[STATUS] = DONE;
    } else if (f[WARM_DONE] >= f[WARM_COUNT] && f[REPS_DONE] >= f[REPS_COUNT] &&
               f[LOOSE_DONE] >= f[LOOSE_LAST] - f[LOOSE_FIRST]) {
        u32* seen = (u32*)m->visited + (u64)w.slot * m->visited_places;
        for (int i = threadIdx.x; i < f[TOP_M]; i += blockDim.x)  // the walk has measured these
            if (w.list[i] < LIMIT) visit(seen, f[HASH_MASK], row_of(w.list[i]), true);
        bool open = !f[WHOLE] && is_open(w);
        if (threadIdx.x == 0) f[STATUS] = open ? WALKING : DONE;
    }
    __syncthreads();
}

// Merges the measured distances, and decides whether the search continues.
__device__ void absorb(const Machine* m, Work& w, int pending) {
    i64* f = w.f;
    bool walking = f[STATUS] == WALKING;
    Seeds s = seeds_of(m, f);
    int size = walking ? f[TOP_M] : s.room, first = size;
    if (size) first = take_in(m, w, w.list, size, pending, false);
    if (f[SCREENED]) do take_in(m, w, w.hits, f[K], pending, true);
        while (size && f[CHAIN] && follow(m, w, pending));
    __syncthreads();
    if (threadIdx.x == 0) {
        f[EXTENDS] += 1;
        f[DISTANCES] += pending;
        f[STABLE] = walking && first == size ? f[STABLE] + 1 : 0;
        if (!walking) f[s.done] = s.last;
    }
    __syncthreads();
    if (!walking) {
        seeded(m, w);
    } else {
        bool goes_on = is_open(w) && !(f[PATIENCE] && f[STABLE] >= f[PATIENCE]);
        if (threadIdx.x == 0 && !goes_on) f[STATUS] = DONE;
        __syncthreads();
    }
}

// Clears hits that were met by chance: too few of them are nearer than the end of the list.
__device__ void doubt(Work& w) {
    i64* f = w.f;
    bool vain = f[NEEDED] && w.hits[f[NEEDED] - 1] > w.list[f[TOP_M] - 1];
    __syncthreads();
    for (int i = threadIdx.x; vain && i < f[K]; i += blockDim.x) w.hits[i] = EMPTY;
    __syncthreads();
}

// Reports to the host that the slot's search, or its feed, has ended.
__device__ void report(const Machine* m, Work& w) {
    i64* f = w.f;
    u64* top = (u64*)(m->host_top + w.slot * m->host_top_bytes);
    u64* found = (u64*)(m->host_found + w.slot * m->host_found_bytes);
    for (int i = threadIdx.x; f[FEED] == 0 && i < f[TOP_M]; i += blockDim.x) top[i] = w.list[i];
    for (int i = threadIdx.x; f[FEED] == 0 && i < f[K]; i += blockDim.x) found[i] = w.hits[i];
    if (threadIdx.x == 0) {
        i64* counts = WORDS(m->host_counts, w.slot, 2);
        i64* feed = (i64*)f[FEED];
        counts[0] = feed ? atomicAdd((u64*)&feed[FEED_EXTENDS], 0ull) : f[EXTENDS];
        counts[1] = feed ? atomicAdd((u64*)&feed[FEED_COMPUTED], 0ull) : f[DISTANCES];
        i64* out = WORDS(m->ring_out, *(i64*)m->turn % m->ring_depth, m->ring_out_words);
        out[2 + atomicAdd((u32*)m->ended_count, 1)] = w.slot | ((i64*)m->serials)[w.slot] << 32;
        f[STATUS] = FREE;
    }
    __syncthreads();
}

// Writes a query's hits to the feed and takes the next query; reports the end if there is none, or no feed.
// It is not inlined, because it would take registers from the code of each extend.
__device__ __noinline__ void finish(const Machine* m, Work w) {
    i64 *f = w.f, *feed = (i64*)f[FEED], place = f[FEED_PLACE], k = f[K];
    bool apart = f[CHAIN] && !f[SCREENED] && place >= 0;
    if (apart && threadIdx.x == 0) unfold(w.list, f[TOP_M], (const u32*)f[CHAIN], w.hits, k);
    __syncthreads();
    doubt(w);
    if (!feed) return report(m, w);
    for (int i = threadIdx.x; place >= 0 && i < k; i += blockDim.x) {
        u64 key = f[SCREENED] || f[CHAIN] ? w.hits[i] : i < f[TOP_M] ? w.list[i] : EMPTY;
        bool empty = key >= LIMIT;
        ((i64*)feed[FEED_ROWS])[place * k + i] = empty ? -1 : (i64)row_of(key);
        ((float*)feed[FEED_DISTANCES])[place * k + i] =
            empty ? __uint_as_float(0x7F800000u) : distance_of(key);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        if (place >= 0) {
            atomicAdd((u64*)&feed[FEED_EXTENDS], (u64)f[EXTENDS]);
            atomicAdd((u64*)&feed[FEED_COMPUTED], (u64)f[DISTANCES]);
        }
        f[FEED_PLACE] = (i64)atomicAdd((u64*)&feed[FEED_NEXT], 1ull);
    }
    __syncthreads();
    if (f[FEED_PLACE] >= feed[FEED_LAST]) return report(m, w);
    if (threadIdx.x == 0) {
        f[QUERY] = feed[FEED_QUERIES] + f[FEED_PLACE] * feed[FEED_QUERY_BYTES];
        f[STATUS] = FRESH;
    }
    __syncthreads();
}

__device__ void clear(const Machine* m, Work& w) {
    uint4* seen = (uint4*)(m->visited + 4 * w.slot * m->visited_places);
    for (int i = threadIdx.x; i < w.f[TOP_M]; i += blockDim.x) w.list[i] = EMPTY;
    for (int i = threadIdx.x; i < w.f[K]; i += blockDim.x) w.hits[i] = EMPTY;
    for (int i = threadIdx.x; i < (w.f[HASH_MASK] + 1) / 4; i += blockDim.x)
        seen[i] = make_uint4(NOWHERE, NOWHERE, NOWHERE, NOWHERE);
    for (int i = NEXT + threadIdx.x; i <= LOOSE_DONE; i += blockDim.x) w.f[i] = 0;
    if (threadIdx.x == 0) w.f[STATUS] = SEEDING;
    __syncthreads();
}

// Marks the nearest unexpanded entries as expanded; their new neighbours become tasks.
__device__ void expand(const Machine* m, Work& w, u32* rows) {
    i64* f = w.f;
    int degree = f[DEGREE], width = f[WIDTH] < f[TOP_M] ? f[WIDTH] : f[TOP_M], in_warp = threadIdx.x % WARP;
    if (threadIdx.x < WARP) {
        int taken = 0;
        for (int first = 0; first < f[TOP_M] && taken < width; first += WARP) {
            u64 key = first + in_warp < f[TOP_M] ? w.list[first + in_warp] : EMPTY;
            bool open = key < LIMIT && !(key & FLAG);
            u32 votes = __ballot_sync(ALL, open);
            int rank = taken + __popc(votes & ((1u << in_warp) - 1));
            if (open && rank < width) {
                w.list[first + in_warp] = key | FLAG;
                w.spare[rank] = key;
            }
            taken += __popc(votes);
        }
        if (in_warp == 0) w.spare[width] = taken < width ? taken : width;
    }
    __syncthreads();
    u32* seen = (u32*)m->visited + (u64)w.slot * m->visited_places;
    int taken = w.spare[width];
    bool keeps = f[DISTANCES] < f[HASH_MASK] >> 1;
    for (int i = threadIdx.x / WARP; i < taken; i += blockDim.x / WARP) {  // a warp has an entry
        u32 from = row_of(w.spare[i]);
        const u32* edges = (const u32*)f[GRAPH] + (u64)from * degree;
        for (int j = in_warp; j < degree; j += WARP) {
            u32 row = edges[j];
            if (row != from && visit(seen, f[HASH_MASK], row, keeps)) rows[atomicAdd(w.count, 1)] = row;
        }
    }
}

// Writes the slot's next tasks; returns their number.
__device__ int emit(const Machine* m, Work& w) {
    u32* rows = (u32*)m->rows + (u64)w.slot * m->tasks_max;
    if (threadIdx.x == 0) *w.count = 0;
    __syncthreads();
    if (w.f[STATUS] == WALKING) {
        expand(m, w, rows);
    } else {
        Seeds s = seeds_of(m, w.f);
        for (int i = threadIdx.x; i < s.last - s.first; i += blockDim.x)
            rows[i] = s.listed ? s.listed[s.first + i] : s.offset + s.first + i;
        if (threadIdx.x == 0) *w.count = s.last - s.first;
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd((u64*)m->tasks, (u64)*w.count);
    return *w.count;
}

// Measures the distances of the slot's tasks, each with a team of threads; in the last round some teams
// measure a row again. Each round reads the common values from shared memory, to save registers.
__device__ void measure(const Machine* m, Work& w, int count) {
    const u32* rows = (const u32*)m->rows + (u64)w.slot * m->tasks_max;
    float* distances = (float*)m->distances + (u64)w.slot * m->tasks_max;
    volatile const i64* f = w.f;
    for (int first = 0; first < count; first += blockDim.x / TEAM) {
        int i = first + threadIdx.x / TEAM;
        Vectors v = {(const char*)f[VECTORS], f[ROW_BYTES], (int)f[LENGTH], f[METRIC] != 0, f[STORED] != 0};
        float found = distance(v, rows[i < count ? i : first], (const float*)f[QUERY]);
        if (i < count && threadIdx.x % TEAM == 0) distances[i] = found;
    }
    __syncthreads();
}

// Copies the slot's state from the device's memory to shared memory, or back.
__device__ void load(const Machine* m, Work& w) {
    const i64* f = WORDS(m->fields, w.slot, COUNT);
    const u64* top = (const u64*)m->top + (u64)w.slot * m->top_m_max;
    const u64* found = (const u64*)m->found + (u64)w.slot * m->k_max;
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) w.f[i] = f[i];
    for (int i = threadIdx.x; i < f[TOP_M]; i += blockDim.x) w.list[i] = top[i];
    for (int i = threadIdx.x; i < f[K]; i += blockDim.x) w.hits[i] = found[i];
    __syncthreads();
}

__device__ void store(const Machine* m, Work& w) {
    i64* f = WORDS(m->fields, w.slot, COUNT);
    u64* top = (u64*)m->top + (u64)w.slot * m->top_m_max;
    u64* found = (u64*)m->found + (u64)w.slot * m->k_max;
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) f[i] = w.f[i];
    for (int i = threadIdx.x; i < w.f[TOP_M]; i += blockDim.x) top[i] = w.list[i];
    for (int i = threadIdx.x; i < w.f[K]; i += blockDim.x) found[i] = w.hits[i];
}

// Limits the registers, so that the largest block fits, and eight of the smallest fit side by side.
extern "C" __global__ void __launch_bounds__(1024, 1) walk(const Machine* m, int extends) {
    extern __shared__ u64 room[];
    if (blockIdx.x >= *(u32*)m->active_count) return;
    Work w = {((u32*)m->active)[blockIdx.x], (i64*)room, room + COUNT + 1};
    w.hits = w.list + m->list_places;
    w.spare = w.hits + m->list_places;
    w.fresh = w.spare + m->list_places;
    w.count = (u32*)(w.fresh + m->merge_max);
    if (WORDS(m->fields, w.slot, COUNT)[STATUS] == FREE) return;
    load(m, w);
    int pending = ((int*)m->pending)[w.slot];
    for (; extends > 0; extends--) {
        if (pending >= 0) absorb(m, w, pending);
        if (status_of(w) == DONE) finish(m, w);
        if (status_of(w) == FRESH) clear(m, w);
        if (status_of(w) == FREE) break;
        pending = emit(m, w);
        measure(m, w, pending);
    }
    store(m, w);
    if (threadIdx.x == 0) ((int*)m->pending)[w.slot] = pending;
}
