// What the kernels of attention in bf16 have in common, and attention_delta. HEAD_DIM is even.
#pragma once

#include "sequences.cuh"

// Bytes of a copy: what the alignment of rows allows.
#define COPY (HEAD_DIM % 8 == 0 ? 16 : HEAD_DIM % 4 == 0 ? 8 : 4)
#define CHUNKS (HEAD_DIM * 2 / COPY)
// Tokens of a block of attention_delta, and lanes for each of them: a power of two.
#define DELTA_THREADS 128
#define DELTA_TOKENS 32
#define DELTA_LANES (CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS)

#define LOG2_E 1.4426950408889634f

typedef unsigned short bf16;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Σ of the products of two chunks of COPY bytes.
__device__ __forceinline__ float multiply_chunks(const bf16 *a, const bf16 *b) {
    const int words = COPY / 4;
    unsigned x[words], y[words];
    if (COPY == 16) {
        uint4 of_a = *(const uint4 *)a, of_b = *(const uint4 *)b;
        x[0] = of_a.x, x[1 % words] = of_a.y, x[2 % words] = of_a.z, x[3 % words] = of_a.w;
        y[0] = of_b.x, y[1 % words] = of_b.y, y[2 % words] = of_b.z, y[3 % words] = of_b.w;
    } else if (COPY == 8) {
        uint2 of_a = *(const uint2 *)a, of_b = *(const uint2 *)b;
        x[0] = of_a.x, x[1 % words] = of_a.y;
        y[0] = of_b.x, y[1 % words] = of_b.y;
    } else {
        x[0] = *(const unsigned *)a, y[0] = *(const unsigned *)b;
    }
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < words; i++) {
        sum = fmaf(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), sum);
        sum = fmaf(__uint_as_float(x[i] & 0xffff0000), __uint_as_float(y[i] & 0xffff0000), sum);
    }
    return sum;
}

// delta = Σ_d dattended · attended for each token and head. A block has DELTA_TOKENS tokens of a head,
// DELTA_LANES lanes per token in turn.
extern "C" __global__ void __launch_bounds__(DELTA_THREADS) attention_delta(
    float *delta, const bf16 *dattended, const bf16 *attended, int seq_len, int heads,
    const uint2 *spans) {
    int lane = threadIdx.x % DELTA_LANES, head = blockIdx.x;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    #pragma unroll
    for (int turn = 0; turn < DELTA_TOKENS; turn += DELTA_THREADS / DELTA_LANES) {
        int of_block = turn + threadIdx.x / DELTA_LANES, token = blockIdx.z * DELTA_TOKENS + of_block;
        bool exists = of_block < DELTA_TOKENS && token < seq_len;
        float sum = 0;
        if (exists) {
            size_t at = ((size_t)(start + token) * heads + head) * HEAD_DIM + lane * (COPY / 2);
            #pragma unroll
            for (int i = 0; lane + i < CHUNKS; i += DELTA_LANES) {
                sum += multiply_chunks(dattended + at + i * (COPY / 2), attended + at + i * (COPY / 2));
            }
        }
        #pragma unroll
        for (int by = DELTA_LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (lane == 0 && exists) delta[(size_t)start * heads + (size_t)head * seq_len + token] = sum;
    }
}
