// Causal grouped-query attention of the latest tokens of one sequence over the keys and values of all of them so far.
//
// Compile with -DHEAD_DIM=d, up to 256.
//
// qkv: [n, (heads + 2 × kv_heads) × d], the query heads of a token after RoPE, its key heads, its value heads. cache:
// [past + n, 2 × kv_heads × d], a token's key heads, its value heads. attended: [n, heads × d]. All are real. Scores are
// scaled by 1 / √d. Query head h uses key head h / (heads / kv_heads). A query sees `window` keys at most, the last of
// them its own.
//
// | kernel           | grid      | threads | what it does                                          |
// |------------------|-----------|---------|-------------------------------------------------------|
// | fill_cache       | n         | 256     | puts the keys and values of qkv behind the past rows  |
// | cached_attention | n × heads | 128     | reads the cache, which fill_cache has filled          |
//
// A warp takes every fourth key; its lanes own the columns of a head. Sums have a fixed order.

#include "block.cuh"
#include "real.cuh"

#define WARPS 4
// Columns of a head that a lane owns: lane, lane + 32, …
#define COLUMNS ((HEAD_DIM + 31) / 32)

#if HEAD_DIM > 256
#error HEAD_DIM must be at most 256
#endif

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

extern "C" __global__ void __launch_bounds__(256)
fill_cache(real *cache, const real *qkv, int heads, int kv_heads, int past) {
    int queries = heads * HEAD_DIM, width = 2 * kv_heads * HEAD_DIM;
    const real *from = qkv + (size_t)blockIdx.x * (queries + width) + queries;
    real *to = cache + (size_t)(past + blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
cached_attention(real *attended, const real *qkv, const real *cache, int heads, int kv_heads, int past, int window) {
    __shared__ float maxima[WARPS], sums[WARPS], results[WARPS][HEAD_DIM];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int head = blockIdx.x % heads, token = blockIdx.x / heads, key_head = head / (heads / kv_heads);
    const real *q = qkv + ((size_t)token * (heads + 2 * kv_heads) + head) * HEAD_DIM;
    float query[COLUMNS], result[COLUMNS];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        int d = lane + 32 * c;
        query[c] = d < HEAD_DIM ? to_float(q[d]) * (1 / sqrtf(HEAD_DIM)) : 0;
        result[c] = 0;
    }
    // The softmax so far, of this warp's keys.
    float most = -infinity(), sum = 0;
    int own = past + token;
    for (int key = max(0, own + 1 - window) + warp; key <= own; key += WARPS) {
        const real *k = cache + ((size_t)key * 2 * kv_heads + key_head) * HEAD_DIM, *v = k + kv_heads * HEAD_DIM;
        float score = 0;
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int d = lane + 32 * c;
            if (d < HEAD_DIM) score = fmaf(query[c], to_float(k[d]), score);
        }
        score = warp_sum(score);
        float next = fmaxf(most, score), shrink = expf(most - next), p = expf(score - next);
        sum = fmaf(sum, shrink, p);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int d = lane + 32 * c;
            if (d < HEAD_DIM) result[c] = fmaf(result[c], shrink, p * to_float(v[d]));
        }
        most = next;
    }
    if (lane == 0) maxima[warp] = most, sums[warp] = sum;
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        int d = lane + 32 * c;
        if (d < HEAD_DIM) results[warp][d] = result[c];
    }
    __syncthreads();
    // Warp 0 has a key, so that the largest score is not −∞.
    float largest = maxima[0], total = 0, factors[WARPS];
    #pragma unroll
    for (int w = 1; w < WARPS; w++) largest = fmaxf(largest, maxima[w]);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
        factors[w] = expf(maxima[w] - largest);
        total = fmaf(sums[w], factors[w], total);
    }
    real *to = attended + ((size_t)token * heads + head) * HEAD_DIM;
    for (int d = threadIdx.x; d < HEAD_DIM; d += 32 * WARPS) {
        float value = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) value = fmaf(results[w][d], factors[w], value);
        to[d] = to_real(value / total);
    }
}
