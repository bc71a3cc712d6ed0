// Gradients: their sums over micro-batches and their squared norms.
//
// g, sum, squares: [elements], f32. partial: [blocks], f64. The sums have an order that depends on the grid,
// on the number of elements and on whether addresses are multiples of 16 only.
//
// Grid of at most 1024 blocks of 256 threads, which should depend on the number of elements only; a thread
// handles 4 elements at a time. sum_partials: one block of 256 threads.
#include "block.cuh"
#include "real.cuh"

__device__ __forceinline__ void add_square(double &sum, float x) { sum += (double)x * (double)x; }

struct Norm {
    const float *g;
    double squares;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float v[N];
        load(v, g + i);
        for (int j = 0; j < N; j++) add_square(squares, v[j]);
    }
};

// partial[block] = Σ g² over the block's elements.
extern "C" __global__ void __launch_bounds__(256)
squared_norm(double *partial, const float *g, size_t elements) {
    Norm norm = {g, 0};
    over_grid<4>(elements, aligned(g), norm);
    double squares = block_sum(norm.squares);
    if (threadIdx.x == 0) partial[blockIdx.x] = squares;
}

struct Add {
    float *sum;
    const float *g;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float v[N], total[N];
        load(v, g + i);
        load(total, sum + i);
        for (int j = 0; j < N; j++) total[j] += v[j];
        store(sum + i, total);
    }
};

// sum += g.
extern "C" __global__ void __launch_bounds__(256)
add_gradient(float *sum, const float *g, size_t elements) {
    over_grid<4>(elements, aligned(sum) && aligned(g), Add{sum, g});
}

struct AddMeasuring {
    float *sum;
    const float *g;
    double own, of_sum;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float v[N], total[N];
        load(v, g + i);
        load(total, sum + i);
        for (int j = 0; j < N; j++) {
            total[j] += v[j];
            add_square(own, v[j]);
            add_square(of_sum, total[j]);
        }
        store(sum + i, total);
    }
};

// sum += g; partial_own[block] = Σ g² and partial_sum[block] = Σ sum² with the new sum.
extern "C" __global__ void __launch_bounds__(256)
add_gradient_measuring(float *sum, double *partial_own, double *partial_sum, const float *g,
                       size_t elements) {
    AddMeasuring of_thread = {sum, g, 0, 0};
    over_grid<4>(elements, aligned(sum) && aligned(g), of_thread);
    double own = block_sum(of_thread.own);
    double of_sum = block_sum(of_thread.of_sum);
    if (threadIdx.x == 0) {
        partial_own[blockIdx.x] = own;
        partial_sum[blockIdx.x] = of_sum;
    }
}

struct AddSquares {
    float *squares;
    const float *g;
    float factor;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float v[N], total[N];
        load(v, g + i);
        load(total, squares + i);
        for (int j = 0; j < N; j++) {
            total[j] = __fadd_rn(total[j], __fmul_rn(factor, __fmul_rn(v[j], v[j])));
        }
        store(squares + i, total);
    }
};

// squares += *factor · g², each operation rounded on its own as in the CPU engine.
extern "C" __global__ void __launch_bounds__(256)
add_squares(float *squares, const float *g, const float *factor, size_t elements) {
    over_grid<4>(elements, aligned(squares) && aligned(g), AddSquares{squares, g, *factor});
}

// *result += Σ partial, [blocks], in an order that depends on the number of blocks only.
extern "C" __global__ void __launch_bounds__(256)
sum_partials(double *result, const double *partial, int blocks) {
    double sum = 0;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *result += sum;
}
