// Causal grouped-query attention in bf16 with f32 sums, forward and backward, for sm_80 and later (Dao, 2023:
// FlashAttention-2). Products are mma.sync.m16n8k16; probabilities and gradients of scores pass from one
// product to the next in registers.
//
// Compile with -DHEAD_DIM=d, an even number up to 128.
//
// Elements are the bits of bf16. qkv, dqkv: [batch × seq_len, (heads + 2 × kv_heads) × d], the query heads of a
// token after RoPE, its key heads, its value heads. attended, dattended: [batch × seq_len, heads × d]. log_sums,
// delta: [batch, heads, seq_len] in f32; log_sums are natural logarithms of the sums of exponentials. Scores are
// scaled by 1 / √d. Query head h uses key head h / (heads / kv_heads).
//
// With DIM = d rounded up to a multiple of 16, and KEYS = 128 if DIM ≤ 64 and 64 otherwise:
//
// | kernel                     | grid                                 | threads | dynamic shared bytes               |
// |----------------------------|--------------------------------------|---------|------------------------------------|
// | attention_forward          | (heads, batch, ⌈seq_len / 128⌉)      | 128     | 384 × (DIM + 8)                    |
// | attention_delta            | (heads, batch, ⌈seq_len / 32⌉)       | 128     | 0                                  |
// | attention_backward_queries | (heads, batch, ⌈seq_len / 128⌉)      | 128     | 640 × (DIM + 8)                    |
// | attention_backward_keys    | (kv_heads, batch, ⌈seq_len / KEYS⌉)  | 128     | (4 × KEYS + 256) × (DIM + 8) + 512 |
//
// Every block has four warps. A warp owns 32 rows of the block's tile (16 keys in attention_backward_keys where
// DIM > 64), so that a fragment of the other operand, loaded once, serves two products. Sums have a fixed
// order, so that a run is bitwise repeatable.

#if HEAD_DIM < 2 || HEAD_DIM > 128 || HEAD_DIM % 2
#error HEAD_DIM must be an even number from 2 to 128
#endif

#include "attention_bf16.cuh"
#include "sequences.cuh"

#define THREADS 128
#define DIM ((HEAD_DIM + 15) / 16 * 16)
// Elements from row to row of a tile: an odd number of 16 bytes, so that neither ldmatrix nor the stores of
// fragments have bank conflicts.
#define STRIDE (DIM + 8)
// Steps of 16 elements along a head, and columns of 8.
#define STEPS (DIM / 16)
#define COLUMNS (DIM / 8)

// Rows of the tiles, see the kernels.
#define QUERIES 128
#define FORWARD_KEYS 32
#define BACKWARD_KEYS 32
#define BACKWARD_QUERIES 32
// Products of 16 rows that a warp of attention_backward_keys owns: twice the sums must fit the registers.
#define KEY_PRODUCTS (DIM <= 64 ? 2 : 1)
#define KEYS (64 * KEY_PRODUCTS)

extern __shared__ __align__(16) bf16 shared[];

__device__ __forceinline__ unsigned address_of(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most this many groups of the thread's copies are under way.
template <int GROUPS>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Starts to copy rows first, first + 1, … of a matrix to a tile. Rows from seq_len on are 0; a copy of 0 bytes
// does not read its address.
template <int ROWS>
__device__ __forceinline__ void copy_rows(bf16 *tile, const bf16 *from, int row_width, int first, int seq_len) {
    const int chunks = ROWS * CHUNKS;
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    // Where the columns differ from turn to turn, their addresses would fill the registers.
    #pragma unroll (THREADS % CHUNKS == 0 ? 16 : 1)
    for (int turn = 0; turn < (chunks + THREADS - 1) / THREADS; turn++) {
        if (chunks % THREADS != 0 && turn * THREADS + threadIdx.x >= chunks) break;
        int column = chunk * (COPY / 2);
        unsigned to = address_of(tile + row * STRIDE + column);
        const bf16 *source = from + (long long)(first + row) * row_width + column;
        int bytes = first + row < seq_len ? COPY : 0;
        if (COPY == 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(bytes)
                         : "memory");
        } else if (COPY == 8) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(source), "r"(bytes)
                         : "memory");
        } else {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(source), "r"(bytes)
                         : "memory");
        }
        row += THREADS / CHUNKS;
        chunk += THREADS % CHUNKS;
        if (THREADS % CHUNKS != 0 && chunk >= CHUNKS) chunk -= CHUNKS, row++;
    }
}

// Sets the columns from HEAD_DIM to DIM of the first rows of shared memory to 0. Copies never touch them.
template <int ROWS>
__device__ __forceinline__ void clear_padding() {
#if HEAD_DIM < DIM
    const int pairs = (DIM - HEAD_DIM) / 2;
    for (int i = threadIdx.x; i < ROWS * pairs; i += THREADS) {
        *(unsigned *)(shared + i / pairs * STRIDE + HEAD_DIM + i % pairs * 2) = 0;
    }
#endif
}

__device__ __forceinline__ void load_matrices(unsigned x[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_transposed_matrices(unsigned x[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// c [16, 8] += a [16, 16] · b [16, 8]. A lane has rows lane / 4 and lane / 4 + 8 of c, of which columns
// lane % 4 × 2 and the next.
__device__ __forceinline__ void mma(float c[4], const unsigned a[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The rows of a tile that a warp owns, as left operand of a product. Registers keep the whole operand where
// there are enough of them.
template <int M, bool KEPT>
struct Own {
    unsigned address;
    unsigned kept[M][KEPT ? STEPS : 1][4];

    // Reads the rows from the tile's row first on, which must be complete if they are kept.
    __device__ __forceinline__ void place(const bf16 *tile, int first, int lane) {
        address = address_of(tile + (first + lane % 16) * STRIDE + lane / 16 * 8);
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int step = 0; step < (KEPT ? STEPS : 0); step++) {
                load_matrices(kept[m][step], address + (m * 16 * STRIDE + step * 16) * 2);
            }
        }
    }

    __device__ __forceinline__ void fragment(unsigned a[4], int m, int step) const {
        if (KEPT) {
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = kept[m][KEPT ? step : 0][i];
        } else {
            load_matrices(a, address + (m * 16 * STRIDE + step * 16) * 2);
        }
    }
};

// products = own · otherᵀ, for the first N × 8 rows of other.
template <int M, int N, bool KEPT>
__device__ __forceinline__ void multiply_rows(float products[M][N][4], const Own<M, KEPT> &own, const bf16 *other,
                                              int lane) {
    unsigned from = address_of(other + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) products[m][n][i] = 0;
        }
    }
    #pragma unroll
    for (int step = 0; step < STEPS; step++) {
        unsigned a[M][4];
        #pragma unroll
        for (int m = 0; m < M; m++) own.fragment(a[m], m, step);
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            load_matrices(b, from + (n * 8 * STRIDE + step * 16) * 2);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                mma(products[m][n], a[m], b[0], b[1]);
                mma(products[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// The left operand of a product from the result of another one, rounded.
template <int M, int N>
__device__ __forceinline__ void round_products(unsigned a[M][N / 2][4], const float products[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            a[m][n / 2][0] = pack(products[m][n][0], products[m][n][1]);
            a[m][n / 2][1] = pack(products[m][n][2], products[m][n][3]);
            a[m][n / 2][2] = pack(products[m][n + 1][0], products[m][n + 1][1]);
            a[m][n / 2][3] = pack(products[m][n + 1][2], products[m][n + 1][3]);
        }
    }
}

// sums += a · other, for the first N × 8 rows of other.
template <int M, int N>
__device__ __forceinline__ void add_products(float sums[M][COLUMNS][4], const unsigned a[M][N / 2][4],
                                             const bf16 *other, int lane) {
    unsigned from = address_of(other + lane % 16 * STRIDE + lane / 16 * 8);
    #pragma unroll
    for (int step = 0; step < N / 2; step++) {
        #pragma unroll
        for (int column = 0; column < COLUMNS; column += 2) {
            unsigned b[4];
            load_transposed_matrices(b, from + (step * 16 * STRIDE + column * 8) * 2);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sums[m][column], a[m][step], b[0], b[1]);
                mma(sums[m][column + 1], a[m][step], b[2], b[3]);
            }
        }
    }
}

// Writes factors × sums to rows first, first + 1, … below seq_len. `own` is the warp's part of a tile that no
// warp reads any more; through it a row leaves in wide stores.
template <int M>
__device__ __forceinline__ void store_rows(bf16 *to, const float sums[M][COLUMNS][4], const float factors[M][2],
                                           bf16 *own, int row_width, int first, int seq_len, int lane) {
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            bf16 *row = own + (m * 16 + half * 8 + lane / 4) * STRIDE + lane % 4 * 2;
            float factor = factors[m][half];
            #pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                const float *pair = sums[m][column] + half * 2;
                *(unsigned *)(row + column * 8) = pack(pair[0] * factor, pair[1] * factor);
            }
        }
    }
    __syncwarp();
    #pragma unroll 4
    for (int i = lane; i < M * 16 * CHUNKS; i += 32) {
        int row = i / CHUNKS, column = i % CHUNKS * (COPY / 2);
        if (first + row >= seq_len) break;
        const bf16 *from = own + row * STRIDE + column;
        bf16 *into = to + (long long)(first + row) * row_width + column;
        if (COPY == 16) {
            *(uint4 *)into = *(const uint4 *)from;
        } else if (COPY == 8) {
            *(uint2 *)into = *(const uint2 *)from;
        } else {
            *(unsigned *)into = *(const unsigned *)from;
        }
    }
}

// Sets scores of keys after their query to −∞. Rows are queries, columns are keys.
template <int M, int N>
__device__ __forceinline__ void mask_keys(float scores[M][N][4], int first_query, int first_key, int lane) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                int query = first_query + m * 16 + i / 2 * 8 + lane / 4;
                int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
                if (key > query) scores[m][n][i] = -infinity();
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, DIM <= 64 ? 3 : 2) attention_forward(
    bf16 *attended, float *log_sums, const bf16 *qkv, int seq_len, int heads, int kv_heads, const uint2 *spans) {
    const int M = 2, N = FORWARD_KEYS / 8;
    bf16 *queries = shared, *keys = queries + QUERIES * STRIDE, *values = keys + FORWARD_KEYS * STRIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    // The last queries have the most keys, so they start first.
    int first_query = (gridDim.z - 1 - blockIdx.z) * QUERIES, first = first_query + warp * 32;
    if (first_query >= seq_len) return;
    int last_query = min(first_query + QUERIES, seq_len) - 1;
    // A warp whose queries do not exist has no key.
    int last = first < seq_len ? first + 31 : -1;
    int row_width = (heads + 2 * kv_heads) * HEAD_DIM;
    qkv += (size_t)start * row_width;
    const bf16 *of_key = qkv + (size_t)(heads + head / (heads / kv_heads)) * HEAD_DIM;
    const bf16 *of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM), exponent = scale * LOG2_E;

    clear_padding<QUERIES + 2 * FORWARD_KEYS>();
    copy_rows<QUERIES>(queries, qkv + (size_t)head * HEAD_DIM, row_width, first_query, seq_len);
    commit();
    copy_rows<FORWARD_KEYS>(keys, of_key, row_width, 0, seq_len);
    commit();
    wait<1>();
    __syncthreads();
    Own<M, DIM <= 64> own;
    own.place(queries, warp * 32, lane);

    // Of the lane's rows; the totals are of the lane's keys only. Maxima are not scaled.
    float sums[M][COLUMNS][4] = {}, most[M][2], total[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) most[m][half] = -infinity(), total[m][half] = 0;
    }
    for (int first_key = 0; first_key <= last_query; first_key += FORWARD_KEYS) {
        bool sees = first_key <= last;
        // The keys are there, and every warp has used the values before.
        wait<0>();
        __syncthreads();
        copy_rows<FORWARD_KEYS>(values, of_value, row_width, first_key, seq_len);
        commit();
        float scores[M][N][4];
        if (sees) {
            multiply_rows<M, N>(scores, own, keys, lane);
            if (first_key + FORWARD_KEYS - 1 > first) mask_keys<M, N>(scores, first, first_key, lane);
        }
        // The values are there, and every warp has used the keys.
        wait<0>();
        __syncthreads();
        if (first_key + FORWARD_KEYS <= last_query) {
            copy_rows<FORWARD_KEYS>(keys, of_key, row_width, first_key + FORWARD_KEYS, seq_len);
        }
        commit();
        if (!sees) continue;
        // Exponentials of up to 2^8 instead of 1 cost no accuracy, so that most tiles need no correction.
        float maximum[M][2];
        bool lags = false;
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                // Every query sees the first key of a tile that its warp uses, so the maximum is finite.
                float of_lane = most[m][half];
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    of_lane = fmaxf(of_lane, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
                }
                of_lane = fmaxf(of_lane, __shfl_xor_sync(~0u, of_lane, 1));
                of_lane = fmaxf(of_lane, __shfl_xor_sync(~0u, of_lane, 2));
                maximum[m][half] = of_lane;
                lags |= of_lane > most[m][half] + 8 / exponent;
            }
        }
        if (__any_sync(~0u, lags)) {
            #pragma unroll
            for (int m = 0; m < M; m++) {
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    float correction = exp2_approximate((most[m][half] - maximum[m][half]) * exponent);
                    most[m][half] = maximum[m][half];
                    total[m][half] *= correction;
                    #pragma unroll
                    for (int column = 0; column < COLUMNS; column++) {
                        sums[m][column][half * 2] *= correction;
                        sums[m][column][half * 2 + 1] *= correction;
                    }
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < M; m++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float shift = most[m][half] * exponent;
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    #pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; i++) {
                        scores[m][n][i] = exp2_approximate(fmaf(scores[m][n][i], exponent, -shift));
                        total[m][half] += scores[m][n][i];
                    }
                }
            }
        }
        unsigned p[M][N / 2][4];
        round_products<M, N>(p, scores);
        add_products<M, N>(sums, p, values, lane);
    }
    float inverse[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[m][half] = 1 / sum;
            int query = first + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && query < seq_len) {
                log_sums[(size_t)start * heads + (size_t)head * seq_len + query] = most[m][half] * scale + logf(sum);
            }
        }
    }
    store_rows<M>(attended + ((size_t)start * heads + head) * HEAD_DIM, sums, inverse, queries + warp * 32 * STRIDE,
                  heads * HEAD_DIM, first, seq_len, lane);
}

// The query part of dqkv: scale × Σ_keys dS · K with dS = P · (dattended · Vᵀ − delta). A block has the tile of
// queries that attention_forward's has.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_backward_queries(
    bf16 *dqkv, const bf16 *dattended, const bf16 *qkv, const float *log_sums, const float *delta, int seq_len,
    int heads, int kv_heads, const uint2 *spans) {
    const int M = 2, N = BACKWARD_KEYS / 8;
    bf16 *queries = shared, *gradients = queries + QUERIES * STRIDE;
    bf16 *keys = gradients + QUERIES * STRIDE, *values = keys + BACKWARD_KEYS * STRIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    int first_query = (gridDim.z - 1 - blockIdx.z) * QUERIES, first = first_query + warp * 32;
    if (first_query >= seq_len) return;
    int last_query = min(first_query + QUERIES, seq_len) - 1;
    int last = first < seq_len ? first + 31 : -1;
    int row_width = (heads + 2 * kv_heads) * HEAD_DIM;
    qkv += (size_t)start * row_width;
    const bf16 *of_key = qkv + (size_t)(heads + head / (heads / kv_heads)) * HEAD_DIM;
    const bf16 *of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM), exponent = scale * LOG2_E;

    clear_padding<2 * QUERIES + 2 * BACKWARD_KEYS>();
    copy_rows<QUERIES>(queries, qkv + (size_t)head * HEAD_DIM, row_width, first_query, seq_len);
    copy_rows<QUERIES>(gradients, dattended + ((size_t)start * heads + head) * HEAD_DIM, heads * HEAD_DIM,
                       first_query, seq_len);
    copy_rows<BACKWARD_KEYS>(values, of_value, row_width, 0, seq_len);
    commit();
    copy_rows<BACKWARD_KEYS>(keys, of_key, row_width, 0, seq_len);
    commit();
    // Of the lane's rows; the logarithms are to base 2.
    float log_sum[M][2], along[M][2], factors[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = first + m * 16 + half * 8 + lane / 4;
            size_t at = (size_t)start * heads + (size_t)head * seq_len + query;
            log_sum[m][half] = query < seq_len ? log_sums[at] * LOG2_E : 0;
            along[m][half] = query < seq_len ? delta[at] : 0;
            factors[m][half] = scale;
        }
    }
    wait<1>();
    __syncthreads();
    Own<M, DIM <= 64> own_queries, own_gradients;
    own_queries.place(queries, warp * 32, lane);
    own_gradients.place(gradients, warp * 32, lane);

    float sums[M][COLUMNS][4] = {};
    for (int first_key = 0; first_key <= last_query; first_key += BACKWARD_KEYS) {
        bool sees = first_key <= last, more = first_key + BACKWARD_KEYS <= last_query;
        float ds[M][N][4];
        if (sees) multiply_rows<M, N>(ds, own_gradients, values, lane);
        // The keys are there, and every warp has used the values.
        wait<0>();
        __syncthreads();
        if (more) copy_rows<BACKWARD_KEYS>(values, of_value, row_width, first_key + BACKWARD_KEYS, seq_len);
        commit();
        if (sees) {
            float scores[M][N][4];
            multiply_rows<M, N>(scores, own_queries, keys, lane);
            if (first_key + BACKWARD_KEYS - 1 > first) mask_keys<M, N>(scores, first, first_key, lane);
            #pragma unroll
            for (int m = 0; m < M; m++) {
                #pragma unroll
                for (int n = 0; n < N; n++) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = exp2_approximate(fmaf(scores[m][n][i], exponent, -log_sum[m][i / 2]));
                        ds[m][n][i] = p * (ds[m][n][i] - along[m][i / 2]);
                    }
                }
            }
            unsigned a[M][N / 2][4];
            round_products<M, N>(a, ds);
            add_products<M, N>(sums, a, keys, lane);
        }
        // The next values are there, and every warp has used the keys.
        wait<0>();
        __syncthreads();
        if (more) copy_rows<BACKWARD_KEYS>(keys, of_key, row_width, first_key + BACKWARD_KEYS, seq_len);
        commit();
    }
    store_rows<M>(dqkv + (size_t)start * row_width + (size_t)head * HEAD_DIM, sums, factors,
                  queries + warp * 32 * STRIDE, row_width, first, seq_len, lane);
}

// The key part of dqkv, scale × Σ_queries dSᵀ · Q, and the value part, Σ_queries Pᵀ · dattended. A block has a
// tile of keys of a key head; it adds the query heads of the group in their order. It copies the next queries
// while it uses these.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_backward_keys(
    bf16 *dqkv, const bf16 *dattended, const bf16 *qkv, const float *log_sums, const float *delta, int seq_len,
    int heads, int kv_heads, const uint2 *spans) {
    const int M = KEY_PRODUCTS, N = BACKWARD_QUERIES / 8, STAGE = 2 * BACKWARD_QUERIES * STRIDE;
    bf16 *keys = shared, *values = keys + KEYS * STRIDE, *stages = values + KEYS * STRIDE;
    // Two stages of log_sums and delta.
    float *numbers = (float *)(stages + 2 * STAGE);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.x, group = heads / kv_heads;
    // The first keys have the most queries, so they start first.
    int first_key = blockIdx.z * KEYS, first = first_key + warp * 16 * M;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    if (first_key >= seq_len) return;
    int row_width = (heads + 2 * kv_heads) * HEAD_DIM;
    qkv += (size_t)start * row_width;
    dattended += (size_t)start * heads * HEAD_DIM;
    size_t of_key = (size_t)(heads + kv_head) * HEAD_DIM, of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM), exponent = scale * LOG2_E;

    // Starts to copy a tile of queries of a head, all that belongs to it.
    auto copy_stage = [&](int stage, int head, int first_query) {
        bf16 *queries = stages + stage * STAGE;
        copy_rows<BACKWARD_QUERIES>(queries, qkv + (size_t)head * HEAD_DIM, row_width, first_query, seq_len);
        copy_rows<BACKWARD_QUERIES>(queries + BACKWARD_QUERIES * STRIDE, dattended + (size_t)head * HEAD_DIM,
                                    heads * HEAD_DIM, first_query, seq_len);
        if (threadIdx.x < 2 * BACKWARD_QUERIES) {
            int query = first_query + threadIdx.x % BACKWARD_QUERIES;
            bool exists = query < seq_len;
            const float *from = threadIdx.x < BACKWARD_QUERIES ? log_sums : delta;
            from += (size_t)start * heads + (size_t)head * seq_len + (exists ? query : 0);
            unsigned to = address_of(numbers + stage * 2 * BACKWARD_QUERIES + threadIdx.x);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0)
                         : "memory");
        }
    };

    clear_padding<2 * KEYS + 4 * BACKWARD_QUERIES>();
    copy_rows<KEYS>(keys, qkv + of_key, row_width, first_key, seq_len);
    copy_rows<KEYS>(values, qkv + of_value, row_width, first_key, seq_len);
    int head = kv_head * group, first_query = first_key, stage = 0;
    copy_stage(stage, head, first_query);
    commit();
    wait<0>();
    __syncthreads();
    Own<M, (DIM > 64)> own_keys;
    Own<M, false> own_values;
    own_keys.place(keys, warp * 16 * M, lane);
    own_values.place(values, warp * 16 * M, lane);

    float key_sums[M][COLUMNS][4] = {}, value_sums[M][COLUMNS][4] = {};
    while (head < (kv_head + 1) * group) {
        int next_head = head, next_query = first_query + BACKWARD_QUERIES;
        if (next_query >= seq_len) next_head++, next_query = first_key;
        // The stage is there, and every warp has used the other one.
        wait<0>();
        __syncthreads();
        if (next_head < (kv_head + 1) * group) copy_stage(1 - stage, next_head, next_query);
        commit();
        // Queries from seq_len on are 0, and so are their gradients: they add nothing.
        if (first_query + BACKWARD_QUERIES > first && first < seq_len) {
            const bf16 *queries = stages + stage * STAGE, *gradients = queries + BACKWARD_QUERIES * STRIDE;
            const float *of_stage = numbers + stage * 2 * BACKWARD_QUERIES + lane % 4 * 2;
            float p[M][N][4], ds[M][N][4];
            multiply_rows<M, N>(p, own_keys, queries, lane);
            multiply_rows<M, N>(ds, own_values, gradients, lane);
            bool diagonal = first_query < first + 16 * M - 1;
            #pragma unroll
            for (int n = 0; n < N; n++) {
                float2 log_sum = *(const float2 *)(of_stage + n * 8);
                float2 along = *(const float2 *)(of_stage + BACKWARD_QUERIES + n * 8);
                float shifts[2] = {log_sum.x * LOG2_E, log_sum.y * LOG2_E}, deltas[2] = {along.x, along.y};
                #pragma unroll
                for (int m = 0; m < M; m++) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int key = first + m * 16 + i / 2 * 8 + lane / 4;
                        int query = first_query + n * 8 + lane % 4 * 2 + i % 2;
                        float power = fmaf(p[m][n][i], exponent, -shifts[i % 2]);
                        p[m][n][i] = diagonal && key > query ? 0 : exp2_approximate(power);
                        ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - deltas[i % 2]);
                    }
                }
            }
            unsigned a[M][N / 2][4];
            round_products<M, N>(a, p);
            add_products<M, N>(value_sums, a, gradients, lane);
            round_products<M, N>(a, ds);
            add_products<M, N>(key_sums, a, queries, lane);
        }
        head = next_head;
        first_query = next_query;
        stage = 1 - stage;
    }
    float factors[M][2], ones[M][2];
    #pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = scale, ones[m][0] = ones[m][1] = 1;
    bf16 *to = dqkv + (size_t)start * row_width;
    int own_row = warp * 16 * M * STRIDE;
    store_rows<M>(to + of_key, key_sums, factors, keys + own_row, row_width, first, seq_len, lane);
    store_rows<M>(to + of_value, value_sums, ones, values + own_row, row_width, first, seq_len, lane);
}
