// Reductions over the threads of a block: shuffles inside of each warp, then over the warps' results in shared
// memory. blockDim.x is a multiple of 32 and at most 1024; every thread of the block calls them and gets the
// result. Additions have a fixed order, so that a run is bitwise repeatable.
#pragma once

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
    // The sum of two lanes is the same in both, so all lanes get the same bits.
    for (int by = 16; by > 0; by /= 2) value += __shfl_xor_sync(~0u, value, by);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int by = 16; by > 0; by /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, by));
    return value;
}

// T: float or double.
template <typename T>
__device__ __forceinline__ T block_sum(T value) {
    __shared__ T partial[32];
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_sum(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = warp_sum(lane < blockDim.x / 32 ? partial[lane] : T(0));
    // The next reduction may write only after every thread has read.
    __syncthreads();
    return value;
}

// NaN may be lost, because fmaxf prefers numbers.
__device__ __forceinline__ float block_max(float value) {
    __shared__ float partial[32];
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_max(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = warp_max(partial[min(lane, blockDim.x / 32 - 1)]);
    __syncthreads();
    return value;
}
