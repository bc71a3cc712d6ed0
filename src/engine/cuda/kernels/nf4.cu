// Weights of codes in 4 bits, as in engine/nf4.rs: w = table[code] · scale.
//
// weights: [elements], real; codes: two in a byte, the first in its upper half, from a multiple of 4 bytes on; scales: one for
// 64 weights, f32; table: [16], f32.
//
// Any grid of 256 threads; a thread writes 16 bytes at a time.
#include "real.cuh"

struct Dequantise {
    real *weights;
    const unsigned char *codes;
    const float *scales, *table;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        float v[N], scale = scales[i / 64];
        unsigned bytes = N == 8   ? *(const unsigned *)(codes + i / 2)
                         : N == 4 ? *(const unsigned short *)(codes + i / 2)
                                  : codes[i / 2];
        for (int j = 0; j < N; j++) {
            size_t element = N == 1 ? i % 2 : j;
            v[j] = table[bytes >> (element / 2 * 8 + (element % 2 ? 0 : 4)) & 15] * scale;
        }
        store(weights + i, v);
    }
};

extern "C" __global__ void __launch_bounds__(256)
dequantise(real *weights, const unsigned char *codes, const float *scales, const float *table, size_t elements) {
    __shared__ float of_codes[16];
    if (threadIdx.x < 16) of_codes[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
    over_grid<WIDE>(elements, aligned(weights), Dequantise{weights, codes, scales, of_codes});
}

// Scales of codes in 8 bits: scale = numbers[code] · factor + offset, each rounded as on the CPU.
//
// scales: [elements]; factors: one for 256 scales, and then the offset; numbers: [256]; all f32. Any grid.
extern "C" __global__ void __launch_bounds__(256)
dequantise_scales(float *scales, const unsigned char *codes, const float *factors, const float *numbers,
                  size_t elements) {
    float offset = factors[(elements + 255) / 256];
    size_t threads = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += threads)
        scales[i] = __fadd_rn(__fmul_rn(numbers[codes[i]], factors[i / 256]), offset);
}
