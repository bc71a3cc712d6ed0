// Embedding: rows of a table by token, and of another by position.
//
// x, dx: [n, hidden]; table, dtable: [vocabulary, hidden]; positions, dpositions: [seq_len or more, hidden]; all f32. Row r
// is at position places[r], or r mod seq_len where places is null. 256 threads.
//
// kernel              grid
// embedding_forward   n
// embedding_backward  n
// positions_backward  seq_len
#include "random.cuh"
#include "real.cuh"

// The noise of engine/noise.rs: −1 ≤ u < 1.
__device__ __forceinline__ float uniform(unsigned long long key, unsigned long long element) {
    return (float)(nth(key, element + 1) >> 40) * (1.0f / 8388608.0f) - 1.0f;
}

struct Scaled {
    float *to;
    const float *from, *position;
    float scale, magnitude;
    unsigned long long key, first;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N], p[N];
        load(v, from + i);
        for (int j = 0; j < N; j++) v[j] *= scale;
        if (position) {
            load(p, position + i);
            for (int j = 0; j < N; j++) v[j] += p[j];
        }
        if (magnitude) {
            for (int j = 0; j < N; j++) v[j] += uniform(key, first + i + j) * magnitude;
        }
        store(to + i, v);
    }
};

// x[i] = scale · table[tokens[i]] + the row of its position, unless positions is null, + noise; tokens: [n]. noise: for each
// sequence the lower and the upper half of its key, and the largest absolute value, f32; null for none.
extern "C" __global__ void __launch_bounds__(256)
embedding_forward(float *x, const float *table, const float *positions, const unsigned *tokens, int hidden,
                  int seq_len, float scale, const unsigned *noise, const unsigned *places) {
    const float *from = table + (size_t)tokens[blockIdx.x] * hidden;
    unsigned place = places ? places[blockIdx.x] : blockIdx.x % seq_len;
    const float *position = positions ? positions + (size_t)place * hidden : nullptr;
    float *to = x + (size_t)blockIdx.x * hidden;
    bool packs = hidden % 4 == 0 && aligned(x) && aligned(table) && aligned(positions);
    Scaled body = {to, from, position, scale, 0, 0, 0};
    if (noise) {
        const unsigned *of_row = noise + blockIdx.x / seq_len * 3;
        body.key = (unsigned long long)of_row[1] << 32 | of_row[0];
        body.magnitude = __uint_as_float(of_row[2]);
        body.first = (unsigned long long)(blockIdx.x % seq_len) * hidden;
    }
    over_block<4>(hidden, packs, body);
}

struct AddRows {
    float *to;
    const float *from;
    int rows;
    size_t stride;

    template <int N> __device__ __forceinline__ void at(int i) {
        float sum[N];
        load(sum, to + i);
        for (int row = 0; row < rows; row++) {
            float v[N];
            load(v, from + row * stride + i);
            for (int j = 0; j < N; j++) sum[j] += v[j];
        }
        store(to + i, sum);
    }
};

// dpositions[p] += Σ of dx over the sequences' rows at p, where each row of seq_len tokens is a sequence.
extern "C" __global__ void __launch_bounds__(256)
positions_backward(float *dpositions, const float *dx, int batch, int seq_len, int hidden) {
    size_t at = (size_t)blockIdx.x * hidden;
    bool packs = hidden % 4 == 0 && aligned(dpositions) && aligned(dx);
    over_block<4>(hidden, packs, AddRows{dpositions + at, dx + at, batch, (size_t)seq_len * hidden});
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
