// Writes the rows in which a new version of a graph differs to their places; no search reads that memory.
extern "C" __global__ void scatter(const Changes* m, int) {
    const u32 *rows = (const u32*)m->rows, *words = (const u32*)m->words;
    u32 width = m->width, all = (u32)m->count * width, stride = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += stride)
        ((u32*)m->graph)[(u64)rows[i / width] * width + i % width] = words[i];
}
