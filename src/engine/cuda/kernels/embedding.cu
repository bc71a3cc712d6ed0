// Embedding: rows of a table by token.
//
// x, dx: [n, hidden]; table, dtable: [vocabulary, hidden]; all f32. Grid n, 256 threads.
#include "real.cuh"

struct Scaled {
    float *to;
    const float *from;
    float scale;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N];
        load(v, from + i);
        for (int j = 0; j < N; j++) v[j] *= scale;
        store(to + i, v);
    }
};

// x[i] = scale · table[tokens[i]]; tokens: [n].
extern "C" __global__ void __launch_bounds__(256)
embedding_forward(float *x, const float *table, const unsigned *tokens, int hidden, float scale) {
    const float *from = table + (size_t)tokens[blockIdx.x] * hidden;
    float *to = x + (size_t)blockIdx.x * hidden;
    bool packs = hidden % 4 == 0 && aligned(x) && aligned(table);
    over_block<4>(hidden, packs, Scaled{to, from, scale});
}

struct AddOccurrences {
    float *to;
    const float *dx;
    const unsigned *order;
    unsigned first, last;
    int hidden;
    float scale;

    template <int N> __device__ __forceinline__ void at(int i) {
        float sum[N] = {}, total[N];
        // Several loads must be under way, because a frequent token has thousands of occurrences.
#pragma unroll 4
        for (unsigned k = first; k < last; k++) {
            float v[N];
            load(v, dx + (size_t)order[k] * hidden + i);
            for (int j = 0; j < N; j++) sum[j] += v[j];
        }
        load(total, to + i);
        for (int j = 0; j < N; j++) total[j] += sum[j] * scale;
        store(to + i, total);
    }
};

// dtable[token] += scale · Σ dx over the token's occurrences, without atomics, so that the order is fixed. rows[b] is the
// b-th of *count distinct tokens, which occurs at order[starts[b]..starts[b + 1]]; block b adds these in
// their order. rows, order: [n]; starts: [n + 1].
extern "C" __global__ void __launch_bounds__(256)
embedding_backward(float *dtable, const float *dx, const unsigned *order, const unsigned *starts,
                   const unsigned *rows, const unsigned *count, int hidden, float scale) {
    if (blockIdx.x >= *count) return;
    float *to = dtable + (size_t)rows[blockIdx.x] * hidden;
    bool packs = hidden % 4 == 0 && aligned(dtable) && aligned(dx);
    over_block<4>(hidden, packs, AddOccurrences{to, dx, order, starts[blockIdx.x],
                                                starts[blockIdx.x + 1], hidden, scale});
}
