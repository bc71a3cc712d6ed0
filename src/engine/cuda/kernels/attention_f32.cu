// Causal grouped-query attention in f32, forward and backward (Dao, 2023: FlashAttention-2). It is the
// reference for attention_bf16.cu and reaches the exactness of the CPU engine, so it has no fast exponential.
// In bf16 it is for heads that are larger than that one's, and for sliding windows.
//
// Compile with -DHEAD_DIM=d, an even number up to 256.
//
// qkv, dqkv: [batch × seq_len, (heads + 2 × kv_heads) × d], the query heads of a token after RoPE, its key
// heads, its value heads. attended, dattended: [batch × seq_len, heads × d]. log_sums, delta:
// [batch, heads, seq_len]; log_sums are natural logarithms of the sums of exponentials. These two are f32, the
// others real. Scores are scaled by 1 / √d. Query head h uses key head h / (heads / kv_heads). A query sees
// `window` keys at most, the last of them its own.
//
// With STRIDE = 4 × (⌈d / 4⌉ | 1) and tiles = ⌈seq_len / 32⌉:
//
// | kernel                     | grid                           | threads | dynamic shared bytes  |
// |----------------------------|--------------------------------|---------|-----------------------|
// | attention_forward          | (heads, batch, tiles)          | 128     | 384 × STRIDE + 4608   |
// | attention_delta            | (heads, batch, tiles)          | 128     | 0                     |
// | attention_backward_queries | (heads, batch, tiles)          | 128     | 512 × STRIDE + 4608   |
// | attention_backward_keys    | (kv_heads, batch, tiles)       | 128     | 512 × STRIDE + 4608   |
//
// A tile has 32 rows. A warp owns 8 rows of the block's tile; its lanes are the 32 rows of the other tile,
// then the columns of the result. Sums have a fixed order, so that a run is bitwise repeatable.

#include "real.cuh"
#include "sequences.cuh"

#define TILE 32
#define ROWS 8
#define THREADS 128
// Lanes read rows with 16-byte accesses. A stride of an odd number of 16 bytes has no bank conflicts.
#define STRIDE (4 * (((HEAD_DIM + 3) / 4) | 1))
// Rows of probabilities; 16-byte accesses need a multiple of 4.
#define P_STRIDE (TILE + 4)
// Columns of the result that a lane owns: lane, lane + 32, …
#define COLUMNS ((HEAD_DIM + 31) / 32)

#if HEAD_DIM < 2 || HEAD_DIM > 256 || HEAD_DIM % 2
#error HEAD_DIM must be an even number from 2 to 256
#endif

extern __shared__ __align__(16) float shared[];

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Two elements from an even one on.
__device__ __forceinline__ float2 load_pair(const float *from) { return *(const float2 *)from; }

__device__ __forceinline__ float2 load_pair(const unsigned short *from) {
    float2 pair;
    from_bf16_pair(pair.x, pair.y, *(const unsigned *)from);
    return pair;
}

// Copies rows first, first + 1, … of a matrix to a tile. Rows from seq_len on and the columns from HEAD_DIM to
// the next multiple of 4 are 0.
__device__ __forceinline__ void load_tile(float *tile, const real *from, size_t row_width, int first,
                                          int seq_len) {
    const int pairs = (HEAD_DIM + 3) / 4 * 2;
    for (int i = threadIdx.x; i < TILE * pairs; i += THREADS) {
        int row = i / pairs, column = i % pairs * 2;
        float2 value = make_float2(0, 0);
        if (first + row < seq_len && column < HEAD_DIM) {
            value = load_pair(from + (size_t)(first + row) * row_width + column);
        }
        *(float2 *)(tile + row * STRIDE + column) = value;
    }
}

// products[r] = row r of own · the lane's row of other.
__device__ __forceinline__ void multiply_rows(float products[ROWS], const float *own, const float *other,
                                              int lane) {
    #pragma unroll
    for (int r = 0; r < ROWS; r++) products[r] = 0;
    #pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += 4) {
        float4 b = *(const float4 *)(other + lane * STRIDE + d);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 a = *(const float4 *)(own + r * STRIDE + d);
            products[r] = fmaf(a.x, b.x, products[r]);
            products[r] = fmaf(a.y, b.y, products[r]);
            products[r] = fmaf(a.z, b.z, products[r]);
            products[r] = fmaf(a.w, b.w, products[r]);
        }
    }
}

// sums[r] += Σ_j of p, which the lanes j hold, times row j of other. scratch is the warp's own.
__device__ __forceinline__ void add_rows(float sums[ROWS][COLUMNS], const float p[ROWS], const float *other,
                                         float *scratch, int lane) {
    // The lanes may still read the probabilities of the call before.
    __syncwarp();
    #pragma unroll
    for (int r = 0; r < ROWS; r++) scratch[r * P_STRIDE + lane] = p[r];
    __syncwarp();
    #pragma unroll 2
    for (int j = 0; j < TILE; j += 4) {
        float b[4][COLUMNS];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            #pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                int column = lane + 32 * c;
                b[i][c] = column < HEAD_DIM ? other[(j + i) * STRIDE + column] : 0;
            }
        }
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 a = *(const float4 *)(scratch + r * P_STRIDE + j);
            #pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                sums[r][c] = fmaf(a.x, b[0][c], sums[r][c]);
                sums[r][c] = fmaf(a.y, b[1][c], sums[r][c]);
                sums[r][c] = fmaf(a.z, b[2][c], sums[r][c]);
                sums[r][c] = fmaf(a.w, b[3][c], sums[r][c]);
            }
        }
    }
}

// Writes factors[r] × sums[r] to rows first, first + 1, … below seq_len.
__device__ __forceinline__ void store_rows(real *to, const float sums[ROWS][COLUMNS], const float factors[ROWS],
                                           size_t row_width, int first, int seq_len, int lane) {
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (first + r >= seq_len) break;
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int column = lane + 32 * c;
            if (column < HEAD_DIM) to[(size_t)(first + r) * row_width + column] = to_real(sums[r][c] * factors[r]);
        }
    }
}

// The tile of the first key that a query sees.
__device__ __forceinline__ int first_tile(int query, int window) { return max(0, query - window + 1) / TILE; }

// Whether a query sees a key. Both exist.
__device__ __forceinline__ bool sees(int query, int key, int window) { return key <= query && query - key < window; }

extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(
    real *attended, float *log_sums, const real *qkv, int seq_len, int heads, int kv_heads, int window,
    const uint2 *spans) {
    float *queries = shared, *keys = queries + TILE * STRIDE, *values = keys + TILE * STRIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
    float *scratch = values + TILE * STRIDE + warp * ROWS * P_STRIDE;
    // The last queries have the most keys, so they start first.
    int query_tile = gridDim.z - 1 - blockIdx.z;
    size_t row_width = (size_t)(heads + 2 * kv_heads) * HEAD_DIM;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    if (query_tile * TILE >= seq_len) return;
    qkv += (size_t)start * row_width;
    const real *of_key = qkv + (size_t)(heads + head / (heads / kv_heads)) * HEAD_DIM;
    const real *of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM);
    int first = query_tile * TILE + warp * ROWS;

    float sums[ROWS][COLUMNS] = {}, most[ROWS], total[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) most[r] = -infinity(), total[r] = 0;
    load_tile(queries, qkv + (size_t)head * HEAD_DIM, row_width, query_tile * TILE, seq_len);
    for (int key_tile = first_tile(query_tile * TILE, window); key_tile <= query_tile; key_tile++) {
        // Every warp has read the keys and values before.
        __syncthreads();
        load_tile(keys, of_key, row_width, key_tile * TILE, seq_len);
        load_tile(values, of_value, row_width, key_tile * TILE, seq_len);
        __syncthreads();
        float p[ROWS];
        multiply_rows(p, queries + warp * ROWS * STRIDE, keys, lane);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float score = sees(first + r, key_tile * TILE + lane, window) ? p[r] * scale : -infinity();
            float maximum = score;
            #pragma unroll
            for (int by = 16; by > 0; by /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, by));
            maximum = fmaxf(maximum, most[r]);
            // The first tiles may be before the query's window.
            float shift = maximum == -infinity() ? 0 : maximum;
            float correction = expf(most[r] - shift);
            most[r] = maximum;
            p[r] = expf(score - shift);
            // Of the lane's keys only.
            total[r] = total[r] * correction + p[r];
            #pragma unroll
            for (int c = 0; c < COLUMNS; c++) sums[r][c] *= correction;
        }
        add_rows(sums, p, values, scratch, lane);
    }
    float inverse[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) total[r] += __shfl_xor_sync(~0u, total[r], by);
        inverse[r] = 1 / total[r];
        if (lane == r && first + r < seq_len) {
            log_sums[(size_t)start * heads + (size_t)head * seq_len + first + r] = most[r] + logf(total[r]);
        }
    }
    store_rows(attended + ((size_t)start * heads + head) * HEAD_DIM, sums, inverse, (size_t)heads * HEAD_DIM, first,
               seq_len, lane);
}

// delta = Σ_d dattended · attended for each token and head. A block has 32 tokens of a head, a warp per token in
// turn.
extern "C" __global__ void __launch_bounds__(THREADS) attention_delta(
    float *delta, const real *dattended, const real *attended, int seq_len, int heads,
    const uint2 *spans) {
    int lane = threadIdx.x % 32, head = blockIdx.x, first = blockIdx.z * TILE;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    for (int token = first + threadIdx.x / 32; token < min(first + TILE, seq_len); token += THREADS / 32) {
        size_t at = ((size_t)(start + token) * heads + head) * HEAD_DIM;
        float sum = 0;
        #pragma unroll
        for (int d = lane; d < HEAD_DIM; d += 32) {
            sum = fmaf(to_float(dattended[at + d]), to_float(attended[at + d]), sum);
        }
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (lane == 0) delta[(size_t)start * heads + (size_t)head * seq_len + token] = sum;
    }
}

// The query part of dqkv: scale × Σ_keys dS · K with dS = P · (dattended · Vᵀ − delta). A block has the tile of
// queries that attention_forward's has.
extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_queries(
    real *dqkv, const real *dattended, const real *qkv, const float *log_sums, const float *delta, int seq_len,
    int heads, int kv_heads, int window, const uint2 *spans) {
    float *queries = shared, *gradients = queries + TILE * STRIDE;
    float *keys = gradients + TILE * STRIDE, *values = keys + TILE * STRIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
    float *scratch = values + TILE * STRIDE + warp * ROWS * P_STRIDE;
    int query_tile = gridDim.z - 1 - blockIdx.z;
    size_t row_width = (size_t)(heads + 2 * kv_heads) * HEAD_DIM;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    if (query_tile * TILE >= seq_len) return;
    qkv += (size_t)start * row_width;
    const real *of_key = qkv + (size_t)(heads + head / (heads / kv_heads)) * HEAD_DIM;
    const real *of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM);
    int first = query_tile * TILE + warp * ROWS;

    float log_sum[ROWS], along[ROWS], factors[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        size_t at = (size_t)start * heads + (size_t)head * seq_len + first + r;
        log_sum[r] = first + r < seq_len ? log_sums[at] : 0;
        along[r] = first + r < seq_len ? delta[at] : 0;
        factors[r] = scale;
    }
    float sums[ROWS][COLUMNS] = {};
    load_tile(queries, qkv + (size_t)head * HEAD_DIM, row_width, query_tile * TILE, seq_len);
    load_tile(gradients, dattended + ((size_t)start * heads + head) * HEAD_DIM, (size_t)heads * HEAD_DIM,
              query_tile * TILE, seq_len);
    for (int key_tile = first_tile(query_tile * TILE, window); key_tile <= query_tile; key_tile++) {
        __syncthreads();
        load_tile(keys, of_key, row_width, key_tile * TILE, seq_len);
        load_tile(values, of_value, row_width, key_tile * TILE, seq_len);
        __syncthreads();
        float scores[ROWS], ds[ROWS];
        multiply_rows(scores, queries + warp * ROWS * STRIDE, keys, lane);
        multiply_rows(ds, gradients + warp * ROWS * STRIDE, values, lane);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            bool seen = sees(first + r, key_tile * TILE + lane, window);
            ds[r] = seen ? expf(scores[r] * scale - log_sum[r]) * (ds[r] - along[r]) : 0;
        }
        add_rows(sums, ds, keys, scratch, lane);
    }
    store_rows(dqkv + (size_t)start * row_width + (size_t)head * HEAD_DIM, sums, factors, row_width, first, seq_len,
               lane);
}

// The key part of dqkv, scale × Σ_queries dSᵀ · Q, and the value part, Σ_queries Pᵀ · dattended. A block has a
// tile of keys of a key head; it adds the query heads of the group in their order.
extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_keys(
    real *dqkv, const real *dattended, const real *qkv, const float *log_sums, const float *delta, int seq_len,
    int heads, int kv_heads, int window, const uint2 *spans) {
    float *keys = shared, *values = keys + TILE * STRIDE;
    float *queries = values + TILE * STRIDE, *gradients = queries + TILE * STRIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.x, group = heads / kv_heads;
    float *scratch = gradients + TILE * STRIDE + warp * ROWS * P_STRIDE;
    // The first keys have the most queries, so they start first.
    int key_tile = blockIdx.z;
    size_t row_width = (size_t)(heads + 2 * kv_heads) * HEAD_DIM;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    if (key_tile * TILE >= seq_len) return;
    qkv += (size_t)start * row_width;
    size_t of_key = (size_t)(heads + kv_head) * HEAD_DIM, of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM);
    int first = key_tile * TILE + warp * ROWS;

    float key_sums[ROWS][COLUMNS] = {}, value_sums[ROWS][COLUMNS] = {};
    load_tile(keys, qkv + of_key, row_width, key_tile * TILE, seq_len);
    load_tile(values, qkv + of_value, row_width, key_tile * TILE, seq_len);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query_tile = key_tile; query_tile * TILE < seq_len; query_tile++) {
            if (first_tile(query_tile * TILE, window) > key_tile) break;
            __syncthreads();
            load_tile(queries, qkv + (size_t)head * HEAD_DIM, row_width, query_tile * TILE, seq_len);
            load_tile(gradients, dattended + ((size_t)start * heads + head) * HEAD_DIM, (size_t)heads * HEAD_DIM,
                      query_tile * TILE, seq_len);
            __syncthreads();
            int query = query_tile * TILE + lane;
            float log_sum = 0, along = 0;
            if (query < seq_len) {
                size_t at = (size_t)start * heads + (size_t)head * seq_len + query;
                log_sum = log_sums[at];
                along = delta[at];
            }
            float p[ROWS], ds[ROWS];
            multiply_rows(p, keys + warp * ROWS * STRIDE, queries, lane);
            multiply_rows(ds, values + warp * ROWS * STRIDE, gradients, lane);
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                bool seen = query < seq_len && sees(query, first + r, window);
                p[r] = seen ? expf(p[r] * scale - log_sum) : 0;
                ds[r] = seen ? p[r] * (ds[r] - along) : 0;
            }
            add_rows(value_sums, p, gradients, scratch, lane);
            add_rows(key_sums, ds, queries, scratch, lane);
        }
    }
    float factors[ROWS], ones[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) factors[r] = scale, ones[r] = 1;
    real *to = dqkv + (size_t)start * row_width;
    store_rows(to + of_key, key_sums, factors, row_width, first, seq_len, lane);
    store_rows(to + of_value, value_sums, ones, row_width, first, seq_len, lane);
}
