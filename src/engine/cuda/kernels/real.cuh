// The type of activations in memory, and loops over elements in packs of one access.
//
// With -DREAL_BF16=1 `real` holds the bits of bf16, otherwise it is f32. Arithmetic is always in f32.
#pragma once

#ifdef REAL_BF16
typedef unsigned short real;
#else
typedef float real;
#endif

// Elements of type real in an access of 16 bytes, the widest.
#define WIDE ((int)(16 / sizeof(real)))

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(unsigned short bits) {
    return __uint_as_float((unsigned)bits << 16);
}

// To the nearest, ties to even; NaN gives NaN.
__device__ __forceinline__ real to_real(float x) {
#ifdef REAL_BF16
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    return x;
#endif
}

__device__ __forceinline__ unsigned to_bf16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ void from_bf16_pair(float &low, float &high, unsigned pair) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
}

// load and store convert 1, 4 or 8 consecutive elements; the address is aligned to their bytes, at most
// to 16.

template <typename T>
__device__ __forceinline__ void load(float (&to)[1], const T *from) {
    to[0] = to_float(from[0]);
}

__device__ __forceinline__ void load(float (&to)[4], const float *from) {
    float4 v = *(const float4 *)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void load(float (&to)[8], const float *from) {
    float4 v = ((const float4 *)from)[0], u = ((const float4 *)from)[1];
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    to[4] = u.x, to[5] = u.y, to[6] = u.z, to[7] = u.w;
}

__device__ __forceinline__ void load(float (&to)[4], const unsigned short *from) {
    uint2 v = *(const uint2 *)from;
    from_bf16_pair(to[0], to[1], v.x);
    from_bf16_pair(to[2], to[3], v.y);
}

__device__ __forceinline__ void load(float (&to)[8], const unsigned short *from) {
    uint4 v = *(const uint4 *)from;
    from_bf16_pair(to[0], to[1], v.x);
    from_bf16_pair(to[2], to[3], v.y);
    from_bf16_pair(to[4], to[5], v.z);
    from_bf16_pair(to[6], to[7], v.w);
}

__device__ __forceinline__ void store(float *to, const float (&from)[1]) { to[0] = from[0]; }

#ifdef REAL_BF16
__device__ __forceinline__ void store(real *to, const float (&from)[1]) { to[0] = to_real(from[0]); }
#endif

__device__ __forceinline__ void store(float *to, const float (&from)[4]) {
    *(float4 *)to = make_float4(from[0], from[1], from[2], from[3]);
}

__device__ __forceinline__ void store(unsigned short *to, const float (&from)[4]) {
    *(uint2 *)to = make_uint2(to_bf16_pair(from[0], from[1]), to_bf16_pair(from[2], from[3]));
}

__device__ __forceinline__ void store(unsigned short *to, const float (&from)[8]) {
    *(uint4 *)to = make_uint4(to_bf16_pair(from[0], from[1]), to_bf16_pair(from[2], from[3]),
                              to_bf16_pair(from[4], from[5]), to_bf16_pair(from[6], from[7]));
}

// Whether packs may be read from an address. Null is aligned.
__device__ __forceinline__ bool aligned(const void *p) { return ((size_t)p & 15) == 0; }

// Calls body.at<count>(i) for the `count` elements from i, which together are `elements` elements, spread over
// the threads of the whole grid. The count is N, or 1 at the end and wherever `packs` is false, which
// says whether every address is aligned. Any grid is right. (NVRTC takes generic lambdas for host functions.)
template <int N, typename Body>
__device__ __forceinline__ void over_grid(size_t elements, bool packs, Body &&body) {
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    size_t threads = (size_t)gridDim.x * blockDim.x;
    size_t packed = packs ? elements / N * N : 0;
    for (size_t i = thread * N; i < packed; i += threads * N) body.template at<N>(i);
    for (size_t i = packed + thread; i < elements; i += threads) body.template at<1>(i);
}

// The same over the threads of a block. The number of elements is a multiple of N where `packs` is true.
template <int N, typename Body>
__device__ __forceinline__ void over_block(int elements, bool packs, Body &&body) {
    if (packs) {
        for (int i = threadIdx.x * N; i < elements; i += blockDim.x * N) body.template at<N>(i);
    } else {
        for (int i = threadIdx.x; i < elements; i += blockDim.x) body.template at<1>(i);
    }
}

// A body that adds up a thread's elements of x.
template <typename T> struct Sum {
    const T *x;
    float sum;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N];
        load(v, x + i);
        for (int j = 0; j < N; j++) sum += v[j];
    }
};
