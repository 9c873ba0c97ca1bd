// Lists of nearest neighbours, equal to those of workers/vector/graph/knn.py. `join` compares the rows of a
// group with each other; `descend` is a round of NN-descent. One block makes one row's list, from lists that
// do not change meanwhile.

struct Row {  // a block's row; all pointers but `v` to shared memory
    u32 row;
    Vectors v;
    float* query;
    u64 *list, *spare, *fresh;
    float* distances;
    u32 *count, *rest;
};

__device__ Row opened(const Lists* m, u64* room, u32 row) {
    Row r = {row, {(const char*)m->vectors, m->row_bytes, (int)m->length, m->metric != 0, m->stored != 0}};
    r.query = (float*)room;
    r.list = room + m->length / 2;
    r.spare = r.list + m->list_size;
    r.fresh = r.spare + m->list_size;
    r.distances = (float*)(r.fresh + TILE);
    r.count = (u32*)(r.distances + TILE);
    r.rest = r.count + 2;
    const u64* keys = (const u64*)m->keys + (u64)row * m->list_size;
    for (int i = threadIdx.x; i < m->list_size; i += blockDim.x) r.list[i] = keys[i];
    for (int i = threadIdx.x; i < m->length / 4; i += blockDim.x)
        ((float4*)r.query)[i] = four(r.v.start + (u64)row * m->row_bytes, i, r.v.half);
    __syncthreads();
    return r;
}

// Measures `count` candidates, at most TILE, and merges them.
__device__ void meet(const Lists* m, Row& r, const u32* candidates, int count) {
    int teams = blockDim.x / TEAM;
    for (int first = 0; first < count; first += teams) {
        int i = first + threadIdx.x / TEAM;
        float found = distance(r.v, candidates[i < count ? i : first], r.query);
        if (i < count && threadIdx.x % TEAM == 0) r.distances[i] = found;
    }
    if (threadIdx.x == 0) *r.count = 0;
    __syncthreads();
    u64 limit = r.list[m->list_size - 1] & ~FLAG;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        u64 key = key_of(r.distances[i], candidates[i]);
        if (candidates[i] != r.row && key < limit) r.fresh[atomicAdd(r.count, 1)] = key;
    }
    __syncthreads();
    int fresh = *r.count;
    __syncthreads();
    if (fresh) merge(r.list, m->list_size, r.fresh, fresh, r.spare);
}

__device__ void closed(const Lists* m, const Row& r) {
    u64* after = (u64*)m->after + (u64)r.row * m->list_size;
    for (int i = threadIdx.x; i < m->list_size; i += blockDim.x) after[i] = r.list[i];
}

// Compares each row with all rows of its group: places `spans` of `order`.
extern "C" __global__ void join(const Lists* m, int first) {
    extern __shared__ u64 room[];
    i64 place = (i64)first + blockIdx.x;
    const u32 *order = (const u32*)m->order, *span = (const u32*)m->spans + 2 * place;
    Row r = opened(m, room, order[place]);
    for (u32 at = span[0]; at < span[1]; at += TILE)
        meet(m, r, order + at, span[1] - at < TILE ? span[1] - at : TILE);
    closed(m, r);
}

// Compares each row with the rows two edges away, if at least one of the two edges is new.
extern "C" __global__ void descend(const Lists* m, int first) {
    extern __shared__ u64 room[];
    Row r = opened(m, room, first + blockIdx.x);
    u32 *met = r.rest, *found = met + MET, *total = r.count + 1;
    for (int i = threadIdx.x; i < MET; i += blockDim.x) met[i] = NOWHERE;
    if (threadIdx.x == 0) *total = 0;
    __syncthreads();
    if (threadIdx.x == 0) visit(met, MET - 1, r.row, true);
    for (int i = threadIdx.x; i < m->list_size; i += blockDim.x) {
        if (r.list[i] < LIMIT) visit(met, MET - 1, row_of(r.list[i]), true);
        r.list[i] |= FLAG;
    }
    __syncthreads();
    int sample = SAMPLE < m->list_size ? SAMPLE : m->list_size, sides = sample + SAMPLE;
    const u64 *keys = (const u64*)m->keys, *reverse = (const u64*)m->reverse;
    for (int i = threadIdx.x; i < sides * sides; i += blockDim.x) {
        int one = i / sides, two = i % sides;
        u64 near = one < sample ? keys[(u64)r.row * m->list_size + one]
                                : reverse[(u64)r.row * SAMPLE + one - sample];
        if (near >= LIMIT) continue;
        u64 between = row_of(near);
        u64 far = two < sample ? keys[between * m->list_size + two]
                               : reverse[between * SAMPLE + two - sample];
        if (far >= LIMIT || (near & far & FLAG)) continue;
        if (visit(met, MET - 1, row_of(far), true)) found[atomicAdd(total, 1)] = row_of(far);
    }
    __syncthreads();
    for (int at = 0; at < *total; at += TILE)
        meet(m, r, found + at, *total - at < TILE ? *total - at : TILE);
    closed(m, r);
    int fresh = 0;
    for (int i = threadIdx.x; i < m->list_size; i += blockDim.x) fresh += !(r.list[i] & FLAG);
    if (fresh) atomicAdd((u64*)m->changed, (u64)fresh);
}
