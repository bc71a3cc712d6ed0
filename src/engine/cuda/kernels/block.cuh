// Reductions over the threads of a block. blockDim.x is a power of two and at most 1024; every
// thread of the block calls them and gets the result. Additions have a fixed order, so
// that a run is bitwise repeatable.
#pragma once

__device__ float block_sum(float value) {
    __shared__ float partial[1024];
    partial[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    float sum = partial[0];
    // The next reduction may write only after every thread has read.
    __syncthreads();
    return sum;
}

// NaN may be lost, because fmaxf prefers numbers.
__device__ float block_max(float value) {
    __shared__ float partial[1024];
    partial[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            partial[threadIdx.x] = fmaxf(partial[threadIdx.x], partial[threadIdx.x + half]);
        }
        __syncthreads();
    }
    float most = partial[0];
    __syncthreads();
    return most;
}
