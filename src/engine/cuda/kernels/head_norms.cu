// RMSNorms of each head's queries and keys (Qwen 3): y = x · r · w with r = 1 / √(mean x² + ε), head by head.
//
// qkv, dqkv: [n, (heads + 2 · kv_heads) · HEAD_DIM], real: queries, keys, values; unnormed: [n, (heads + kv_heads) ·
// HEAD_DIM], real, keeps x; w: [2, HEAD_DIM], f32: of the queries, then of the keys. A warp takes a head.
//
// kernel               grid          threads
// head_norms_forward   n             256
// head_norms_backward  ⌈n / rows⌉    256
#include "block.cuh"
#include "real.cuh"

// Elements of a head in a lane.
#define PER_LANE ((HEAD_DIM + 31) / 32)
#define WARPS 8

extern "C" __global__ void __launch_bounds__(256)
head_norms_forward(real *qkv, real *unnormed, const float *w, int heads, int kv_heads, float eps) {
    int lane = threadIdx.x % 32, normed = heads + kv_heads;
    real *of_row = qkv + (size_t)blockIdx.x * (normed + kv_heads) * HEAD_DIM;
    real *kept = unnormed + (size_t)blockIdx.x * normed * HEAD_DIM;
    for (int head = threadIdx.x / 32; head < normed; head += WARPS) {
        const float *weights = w + (head < heads ? 0 : HEAD_DIM);
        float x[PER_LANE], sum = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            int i = j * 32 + lane;
            x[j] = i < HEAD_DIM ? to_float(of_row[head * HEAD_DIM + i]) : 0;
            sum += x[j] * x[j];
        }
        float r = 1 / sqrtf(warp_sum(sum) / HEAD_DIM + eps);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            int i = j * 32 + lane;
            if (i >= HEAD_DIM) continue;
            kept[head * HEAD_DIM + i] = to_real(x[j]);
            of_row[head * HEAD_DIM + i] = to_real(x[j] * r * weights[i]);
        }
    }
}

// Replaces the gradient of y in dqkv by that of x: dy · w · r − x · r³ · mean(dy · w · x). Block b has the rows from
// b · rows; partial: [blocks, 2 · HEAD_DIM], f32, gets the sums of dy · x · r over the rows and heads of each block:
// of the queries, then of the keys. column_sums adds them up.
extern "C" __global__ void __launch_bounds__(256)
head_norms_backward(real *dqkv, float *partial, const real *unnormed, const float *w, int n, int heads,
                    int kv_heads, int rows, float eps) {
    __shared__ float of_warps[WARPS][2 * HEAD_DIM];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, normed = heads + kv_heads;
    int first = blockIdx.x * rows, last = min(n, first + rows);
    float of_queries[PER_LANE] = {}, of_keys[PER_LANE] = {};
    for (int row = first; row < last; row++) {
        real *of_row = dqkv + (size_t)row * (normed + kv_heads) * HEAD_DIM;
        const real *kept = unnormed + (size_t)row * normed * HEAD_DIM;
        for (int head = warp; head < normed; head += WARPS) {
            const float *weights = w + (head < heads ? 0 : HEAD_DIM);
            float x[PER_LANE], dy[PER_LANE], scale[PER_LANE], squares = 0, product = 0;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) {
                int i = j * 32 + lane;
                bool inside = i < HEAD_DIM;
                x[j] = inside ? to_float(kept[head * HEAD_DIM + i]) : 0;
                dy[j] = inside ? to_float(of_row[head * HEAD_DIM + i]) : 0;
                scale[j] = inside ? weights[i] : 0;
                squares += x[j] * x[j];
                product += dy[j] * scale[j] * x[j];
            }
            float r = 1 / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
            float along = warp_sum(product) * r * r * r / HEAD_DIM;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) {
                int i = j * 32 + lane;
                float of_weight = dy[j] * x[j] * r;
                if (head < heads) of_queries[j] += of_weight;
                else of_keys[j] += of_weight;
                if (i < HEAD_DIM) {
                    of_row[head * HEAD_DIM + i] = to_real(dy[j] * scale[j] * r - x[j] * along);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int i = j * 32 + lane;
        if (i >= HEAD_DIM) continue;
        of_warps[warp][i] = of_queries[j];
        of_warps[warp][HEAD_DIM + i] = of_keys[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += blockDim.x) {
        float sum = 0;
        for (int other = 0; other < WARPS; other++) sum += of_warps[other][i];
        partial[(size_t)blockIdx.x * 2 * HEAD_DIM + i] = sum;
    }
}
