// Dropout of the inputs of an adapter, with the numbers of engine/dropout.rs: the upper 24 bits of an element's random number
// below `dropped` make it 0, and the others are multiplied by `factor`.
//
// x, y, dx, dy: [n, width], real; keys: for each row of seq_len tokens the lower and the upper half of its key. 256 threads.
//
// kernel            grid
// dropout           n
// dropout_backward  n
#include "random.cuh"
#include "real.cuh"

template <bool ADDS> struct Dropout {
    real *to;
    const real *from;
    unsigned long long key, first;
    unsigned dropped;
    float factor;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N], sum[N] = {};
        load(v, from + i);
        if (ADDS) load(sum, to + i);
        for (int j = 0; j < N; j++) {
            bool drops = (unsigned)(nth(key, first + i + j + 1) >> 40) < dropped;
            sum[j] += v[j] * (drops ? 0.0f : factor);
        }
        store(to + i, sum);
    }
};

template <bool ADDS>
__device__ __forceinline__ void drop(real *to, const real *from, int width, int seq_len, const unsigned *keys,
                                     int adapter, unsigned dropped, float factor) {
    size_t at = (size_t)blockIdx.x * width;
    const unsigned *of_row = keys + blockIdx.x / seq_len * 2;
    unsigned long long key = nth((unsigned long long)of_row[1] << 32 | of_row[0], adapter + 1);
    unsigned long long first = (unsigned long long)(blockIdx.x % seq_len) * width;
    bool packs = width % 4 == 0 && aligned(to) && aligned(from);
    over_block<4>(width, packs, Dropout<ADDS>{to + at, from + at, key, first, dropped, factor});
}

// y = x with the dropout of the adapter of this number.
extern "C" __global__ void __launch_bounds__(256)
dropout(real *y, const real *x, int width, int seq_len, const unsigned *keys, int adapter, unsigned dropped,
        float factor) {
    drop<false>(y, x, width, seq_len, keys, adapter, dropped, factor);
}

// dx += dy with the same dropout.
extern "C" __global__ void __launch_bounds__(256)
dropout_backward(real *dx, const real *dy, int width, int seq_len, const unsigned *keys, int adapter,
                 unsigned dropped, float factor) {
    drop<true>(dx, dy, width, seq_len, keys, adapter, dropped, factor);
}
