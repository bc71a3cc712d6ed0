// Biases of linear layers: y = x · wᵀ + b, row by row.
//
// y, dy: [n, width], real; sum: [n, width], f32; b: [width], f32.
//
// kernel           grid          threads
// add_bias         n             256
// add_bias_to_sum  n             256
// row_sums         ⌈n / rows⌉    256
#include "real.cuh"

template <typename T> struct Add {
    T *y;
    const float *b;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N], bias[N];
        load(v, y + i);
        load(bias, b + i);
        for (int j = 0; j < N; j++) v[j] += bias[j];
        store(y + i, v);
    }
};

template <typename T> __device__ __forceinline__ void add(T *y, const float *b, int width) {
    T *row = y + (size_t)blockIdx.x * width;
    bool packs = width % 4 == 0 && aligned(y) && aligned(b);
    over_block<4>(width, packs, Add<T>{row, b});
}

extern "C" __global__ void __launch_bounds__(256) add_bias(real *y, const float *b, int width) { add(y, b, width); }

extern "C" __global__ void __launch_bounds__(256) add_bias_to_sum(float *sum, const float *b, int width) {
    add(sum, b, width);
}

// Block k has the rows from k · rows; partial: [blocks, width], f32, gets the sums of dy over the rows of each
// block, the gradient of b in parts. column_sums adds them up.
extern "C" __global__ void __launch_bounds__(256)
row_sums(float *partial, const real *dy, int n, int width, int rows) {
    int first = blockIdx.x * rows, last = min(n, first + rows);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0;
        for (int row = first; row < last; row++) sum += to_float(dy[(size_t)row * width + i]);
        partial[(size_t)blockIdx.x * width + i] = sum;
    }
}
