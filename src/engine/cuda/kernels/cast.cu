// y = x as real, rounded to the nearest, ties to even. x: [elements], f32; y: [elements], real.
//
// Any grid of 256 threads; a thread handles 4 elements at a time.
#include "real.cuh"

struct Cast {
    real *y;
    const float *x;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float v[N];
        load(v, x + i);
        store(y + i, v);
    }
};

extern "C" __global__ void __launch_bounds__(256)
cast(real *y, const float *x, size_t elements) {
    over_grid<4>(elements, aligned(x) && aligned(y), Cast{y, x});
}
