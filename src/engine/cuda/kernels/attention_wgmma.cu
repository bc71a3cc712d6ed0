// Causal grouped-query attention in bf16 with f32 sums for Hopper (sm_90a), with products of warpgroups (wgmma) and a
// backward pass that computes each product once (Dao, 2023: FlashAttention-2; Shah et al., 2024: FlashAttention-3).
//
// Compile with -DHEAD_DIM=64 or -DHEAD_DIM=128.
//
// Elements are the bits of bf16. qkv, dqkv: [batch × seq_len, (heads + 2 × kv_heads) × d], the query heads of a
// token after RoPE, its key heads, its value heads. attended, dattended: [batch × seq_len, heads × d]. log_sums,
// delta: [batch, heads, seq_len] in f32; log_sums are natural logarithms of the sums of exponentials. Scores are
// scaled by 1 / √d. Query head h uses key head h / (heads / kv_heads).
//
// | kernel             | grid                            | threads | dynamic shared bytes                |
// |--------------------|---------------------------------|---------|-------------------------------------|
// | attention_forward  | (heads, batch, ⌈seq_len / 64⌉)  | 128     | 73,728 (d = 64), 81,920 (d = 128)   |
// | attention_delta    | (heads, batch, ⌈seq_len / 32⌉)  | 128     | 0                                   |
// | attention_backward | heads × batch × ⌈seq_len / 128⌉ | 384     | 165,904 (d = 64), 164,880 (d = 128) |
//
// Blocks of attention_backward add to sums in device memory: query_sums, f32 [batch, heads, seq_len, d], and where
// heads share keys key_sums, f32 [batch, kv_heads, 2, seq_len, d], of keys and of values. turns is 0 before the launch,
// u32 [1 + (⌊n / QUERIES⌋ + sequences) × (heads + 2 × kv_heads)] for n tokens, with QUERIES = 128 for d = 64 and 64 for
// d = 128. Blocks take tickets and add in the order of their tickets, so that every sum has a fixed order,
// and a block waits only for blocks that have begun before it.

#include "attention_bf16.cuh"
#include "sequences.cuh"
#include "wgmma.cuh"

#if HEAD_DIM != 64 && HEAD_DIM != 128
#error HEAD_DIM must be 64 or 128
#endif

// Panels of a tile, bytes of a row in all of them, steps of 16 columns and columns of 8.
#define PANELS (HEAD_DIM / 64)
#define ROW (HEAD_DIM * 2)
#define STEPS (HEAD_DIM / 16)
#define COLUMNS (HEAD_DIM / 8)

#define FORWARD_KEYS (HEAD_DIM == 64 ? 128 : 64)

// Keys of a block of the backward pass: 64 of each of two warpgroups. The tiles of queries are as large as the
// registers allow, which hold scores, their gradients and both roundings.
#define KEYS 128
#define QUERIES (HEAD_DIM == 64 ? 128 : 64)
// Bytes of a tile of queries and their gradients, and of the gradients of scores.
#define STAGE (2 * QUERIES * ROW)
#define SCORES (KEYS * QUERIES * 2)

// Barriers; 0 is that of __syncthreads, and the next two are a warpgroup's own. STAGED and USED have one for each
// stage.
#define STAGED 3
#define USED 5
#define SCORED 7
#define TURN 8
#define ADDED 9
// Threads of the two warpgroups with the warp that keeps the turns, and with those that copy.
#define WITH_KEEPER 288
#define WITH_COPIERS 320

// Aligned to the swizzle of wgmma.cuh.
extern __shared__ __align__(1024) unsigned char shared[];

// A barrier of some of the threads.
template <int BARRIER, int COUNT>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(COUNT) : "memory");
}

// Reaches a barrier without waiting there.
template <int BARRIER, int COUNT>
__device__ __forceinline__ void arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(BARRIER), "n"(COUNT) : "memory");
}

// The same at the barrier of a stage.
template <int BARRIER>
__device__ __forceinline__ void meet_at(int stage) {
    if (stage == 0) meet<BARRIER, WITH_COPIERS>();
    else meet<BARRIER + 1, WITH_COPIERS>();
}

template <int BARRIER>
__device__ __forceinline__ void arrive_at(int stage) {
    if (stage == 0) arrive<BARRIER, WITH_COPIERS>();
    else arrive<BARRIER + 1, WITH_COPIERS>();
}

__device__ __forceinline__ void meet_own(int warpgroup) {
    if (warpgroup == 0) meet<1, 128>();
    else meet<2, 128>();
}

// Starts to copy rows first, first + 1, … of a matrix to a tile of ROWS rows, by COPIERS threads. Rows from seq_len on
// are 0; a copy of 0 bytes does not read its address.
template <int ROWS, int COPIERS>
__device__ __forceinline__ void copy_rows(unsigned tile, const bf16 *from, int row_width, int first, int seq_len,
                                          int thread) {
    const int rows = COPIERS / 8;
    int row = thread / 8, chunk = thread % 8;
    // The rows of all turns have the same remainder by 8, and so the same place of the chunk.
    unsigned to = tile + chunk_at(row, chunk);
    const bf16 *source = from + (long long)(first + row) * row_width + chunk * 8;
    #pragma unroll
    for (int turn = 0; turn < ROWS / rows; turn++) {
        int bytes = first + row + turn * rows < seq_len ? 16 : 0;
        #pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (panel * ROWS + turn * rows) * 128),
                         "l"(source + (long long)turn * rows * row_width + panel * 64), "r"(bytes)
                         : "memory");
        }
    }
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The left operand of a product from the result of another one, rounded.
template <int N>
__device__ __forceinline__ void round_products(unsigned (&a)[N / 2][4], const float (&d)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N; i += 2) {
        a[i / 2][0] = pack(d[i][0], d[i][1]);
        a[i / 2][1] = pack(d[i][2], d[i][3]);
        a[i / 2][2] = pack(d[i + 1][0], d[i + 1][1]);
        a[i / 2][3] = pack(d[i + 1][2], d[i + 1][3]);
    }
}

// Stores a warp's fragments of 16 rows to a tile of ROWS rows, from row on.
template <int N, int ROWS>
__device__ __forceinline__ void store_fragments(unsigned tile, int row, const unsigned (&a)[N][4], int lane) {
    row += lane % 16;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        unsigned to = tile + i / 4 * ROWS * 128 + chunk_at(row, i % 4 * 2 + lane / 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a[i][0]),
                     "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3])
                     : "memory");
    }
}

// Writes a warp's 16 rows of N × 8 columns, times a factor for the upper eight and one for the lower, to rows
// first, first + 1, … below seq_len. Through a tile's rows from row on, which no other warp uses, they leave in wide
// stores.
template <int N, int ROWS>
__device__ __forceinline__ void store_rows(bf16 *to, float (&sums)[N][4], float upper, float lower, unsigned tile,
                                           int row, int row_width, int first, int seq_len, int lane) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        #pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] *= j < 2 ? upper : lower;
    }
    unsigned a[N / 2][4];
    round_products<N>(a, sums);
    store_fragments<N / 2, ROWS>(tile, row, a, lane);
    __syncwarp();
    #pragma unroll
    for (int i = lane; i < 16 * N; i += 32) {
        int of_row = i / N, chunk = i % N;
        if (first + of_row >= seq_len) continue;
        unsigned from = tile + chunk / 8 * ROWS * 128 + chunk_at(row + of_row, chunk % 8);
        bf16 *into = to + (long long)(first + of_row) * row_width + chunk * 8;
        asm volatile("{\n.reg .b32 a, b, c, d;\nld.shared.v4.b32 {a, b, c, d}, [%0];\n"
                     "st.global.v4.b32 [%1], {a, b, c, d};\n}" ::"r"(from),
                     "l"(into)
                     : "memory");
    }
}

// A block has one warpgroup, and 64 queries. Scores of a tile of keys are computed beside the product of the
// probabilities before with their values.
extern "C" __global__ void __launch_bounds__(128, 2) attention_forward(
    bf16 *attended, float *log_sums, const bf16 *qkv, int seq_len, int heads, int kv_heads, const uint2 *spans) {
    const int N = FORWARD_KEYS / 8, TILE = FORWARD_KEYS * ROW;
    unsigned queries = (unsigned)__cvta_generic_to_shared(shared), keys = queries + 64 * ROW, values = keys + 2 * TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
    unsigned start = first_token(spans, blockIdx.y, seq_len);
    // The last queries have the most keys, so they start first.
    int first_query = (gridDim.z - 1 - blockIdx.z) * 64, tiles = min(first_query + 63, seq_len - 1) / FORWARD_KEYS + 1;
    if (first_query >= seq_len) return;
    // The lane's rows are this query and 8 more.
    int query = first_query + warp * 16 + lane / 4;
    int row_width = (heads + 2 * kv_heads) * HEAD_DIM;
    qkv += (size_t)start * row_width;
    const bf16 *of_key = qkv + (size_t)(heads + head / (heads / kv_heads)) * HEAD_DIM;
    const bf16 *of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    const float scale = 1 / sqrtf(HEAD_DIM), exponent = scale * LOG2_E;

    // The totals are of the lane's keys only. Maxima are not scaled.
    float scores[N][4], sums[COLUMNS][4], most[2] = {-infinity(), -infinity()}, total[2] = {0, 0}, correction[2];
    unsigned p[N / 2][4];
    auto copy_keys = [&](int tile) {
        copy_rows<FORWARD_KEYS, 128>(keys + tile % 2 * TILE, of_key, row_width, tile * FORWARD_KEYS, seq_len,
                                     threadIdx.x);
    };
    // The keys of a tile and the values before are there, and every warp has used the next ones' places.
    auto begin = [&](int tile) {
        wait_copies();
        publish();
        __syncthreads();
        if (tile < tiles) {
            copy_rows<FORWARD_KEYS, 128>(values + tile % 2 * TILE, of_value, row_width, tile * FORWARD_KEYS, seq_len,
                                         threadIdx.x);
        }
        if (tile + 1 < tiles) copy_keys(tile + 1);
        fence();
    };
    auto multiply_keys = [&](int tile) {
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply<0, 0>(scores, panel(queries + step / 4 * 64 * 128 + step % 4 * 32),
                           panel(keys + tile % 2 * TILE + step / 4 * FORWARD_KEYS * 128 + step % 4 * 32), step > 0);
        }
        close_group();
    };
    auto multiply_values = [&](int tile) {
        #pragma unroll
        for (int step = 0; step < FORWARD_KEYS / 16; step++) {
            multiply(sums, p[step], panel(values + tile % 2 * TILE + step * 2048, FORWARD_KEYS * 128),
                     tile > 0 || step > 0);
        }
        close_group();
    };
    // Scores become exponentials. They and the sums are corrected only when they have grown by 2^8: true if the sums
    // are still to be corrected.
    auto exponentiate = [&](int tile) {
        int first_key = tile * FORWARD_KEYS;
        if (first_key + FORWARD_KEYS - 1 > first_query) {
            #pragma unroll
            for (int i = 0; i < N; i++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (first_key + i * 8 + lane % 4 * 2 + j % 2 > query + j / 2 * 8) scores[i][j] = -infinity();
                }
            }
        }
        float maximum[2];
        bool lags = false;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float of_lane = most[half];
            #pragma unroll
            for (int i = 0; i < N; i++) {
                of_lane = fmaxf(of_lane, fmaxf(scores[i][half * 2], scores[i][half * 2 + 1]));
            }
            of_lane = fmaxf(of_lane, __shfl_xor_sync(~0u, of_lane, 1));
            of_lane = fmaxf(of_lane, __shfl_xor_sync(~0u, of_lane, 2));
            maximum[half] = of_lane;
            lags |= of_lane > most[half] + 8 / exponent;
        }
        lags = __any_sync(~0u, lags);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            if (lags) {
                correction[half] = exp2_approximate((most[half] - maximum[half]) * exponent);
                most[half] = maximum[half];
                total[half] *= correction[half];
            }
            float shift = most[half] * exponent;
            #pragma unroll
            for (int i = 0; i < N; i++) {
                #pragma unroll
                for (int j = half * 2; j < half * 2 + 2; j++) {
                    scores[i][j] = exp2_approximate(fmaf(scores[i][j], exponent, -shift));
                    total[half] += scores[i][j];
                }
            }
        }
        return lags;
    };

    copy_rows<64, 128>(queries, qkv + (size_t)head * HEAD_DIM, row_width, first_query, seq_len, threadIdx.x);
    copy_keys(0);
    begin(0);
    multiply_keys(0);
    wait_groups<0>();
    settle(scores);
    exponentiate(0);
    round_products<N>(p, scores);
    for (int tile = 1; tile < tiles; tile++) {
        begin(tile);
        multiply_keys(tile);
        multiply_values(tile - 1);
        wait_groups<1>();
        settle(scores);
        bool lags = exponentiate(tile);
        wait_groups<0>();
        settle(sums);
        settle(p);
        if (lags) {
            #pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] *= correction[j / 2];
            }
        }
        round_products<N>(p, scores);
    }
    begin(tiles);
    multiply_values(tiles - 1);
    wait_groups<0>();
    settle(sums);
    settle(p);

    float inverse[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = total[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        inverse[half] = 1 / sum;
        if (lane % 4 == 0 && query + half * 8 < seq_len) {
            log_sums[(size_t)start * heads + (size_t)head * seq_len + query + half * 8] = most[half] * scale + logf(sum);
        }
    }
    store_rows<COLUMNS, 64>(attended + ((size_t)start * heads + head) * HEAD_DIM, sums, inverse[0], inverse[1], queries,
                            warp * 16, heads * HEAD_DIM, first_query + warp * 16, seq_len, lane);
}

// Where a lane's part of a sum over blocks lies, f32 [seq_len, d] in device memory: four adjacent elements for each 16
// columns of a row. Eight rows and 16 columns are adjacent, so that a warp's access is wide; fewer rows at the end.
__device__ __forceinline__ size_t part_at(int row, int column, int seq_len, int lane) {
    int first = row - lane / 4, rows = min(8, seq_len - first);
    return (size_t)first * HEAD_DIM + column * rows + lane * 4;
}

// Adds a lane's rows `row` and 8 more below seq_len, N × 8 columns from `column` on.
template <int N>
__device__ __forceinline__ void add_part(float *sums, const float (&d)[N][4], int row, int column, int seq_len,
                                         bool first, int lane) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + half * 8 >= seq_len) continue;
        #pragma unroll
        for (int i = 0; i < N; i += 2) {
            float *to = sums + part_at(row + half * 8, column + i * 8, seq_len, lane);
            float a = d[i][half * 2], b = d[i][half * 2 + 1], c = d[i + 1][half * 2], e = d[i + 1][half * 2 + 1];
            if (first) {
                __stcg((float4 *)to, make_float4(a, b, c, e));
            } else {
                asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b),
                             "f"(c), "f"(e)
                             : "memory");
            }
        }
    }
}

// Adds the parts of the other blocks to d.
template <int N>
__device__ __forceinline__ void take_parts(float (&d)[N][4], const float *sums, int row, int column, int seq_len,
                                           int lane) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + half * 8 >= seq_len) continue;
        #pragma unroll
        for (int i = 0; i < N; i += 2) {
            float4 parts = __ldcg((const float4 *)(sums + part_at(row + half * 8, column + i * 8, seq_len, lane)));
            d[i][half * 2] += parts.x, d[i][half * 2 + 1] += parts.y;
            d[i + 1][half * 2] += parts.z, d[i + 1][half * 2 + 1] += parts.w;
        }
    }
}

// Waits until `turn` blocks have added.
__device__ __forceinline__ void wait_for_turn(const unsigned *turns, unsigned turn) {
    unsigned now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    } while (now != turn);
}

// Lets the next block add. All threads whose parts it adds to have met the caller since they added.
__device__ __forceinline__ void pass_turn(unsigned *turns, unsigned turn) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(turns), "r"(turn + 1) : "memory");
}

// dqkv from dattended: dV = Σ Pᵀ · dO, dK = scale × Σ dSᵀ · Q and dQ = scale × Σ dS · K, where dS is
// P · (dO · Vᵀ − delta).
//
// A block has a tile of keys for one query head, and takes the tiles of queries that see them in turn. It adds its
// part of dQ after the block of the next keys, and its dK and dV after that of the group's head before. Two warpgroups
// compute, one warp waits for turns and passes them on, and two warps copy.
extern "C" __global__ void __launch_bounds__(384, 1) attention_backward(
    bf16 *dqkv, float *query_sums, float *key_sums, unsigned *turns, const bf16 *dattended, const bf16 *qkv,
    const float *log_sums, const float *delta, int seq_len, int heads, int kv_heads,
    const uint2 *spans) {
    const int N = QUERIES / 8;
    unsigned keys = (unsigned)__cvta_generic_to_shared(shared), values = keys + KEYS * ROW;
    unsigned stages = values + KEYS * ROW, scores = stages + 2 * STAGE;
    unsigned at_numbers = 2 * KEYS * ROW + 2 * STAGE + 2 * SCORES;
    // log_sums and delta of two stages.
    float *numbers = (float *)(shared + at_numbers);
    unsigned *ticket = (unsigned *)(numbers + 4 * QUERIES);
    int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) *ticket = atomicAdd(turns, 1);
    __syncthreads();
    int blocks = (seq_len + KEYS - 1) / KEYS;
    // The last keys have the fewest queries. They come first, so that each block adds to a tile of queries one tile
    // after the block before it.
    int block = blocks - 1 - *ticket % blocks, of_head = *ticket / blocks;
    int sequence = of_head / heads, head = of_head % heads, group = heads / kv_heads, kv_head = head / group;
    unsigned start = first_token(spans, sequence, seq_len);
    int first_key = block * KEYS, begin = first_key / QUERIES, tiles = (seq_len + QUERIES - 1) / QUERIES;
    if (first_key >= seq_len) return;
    int row_width = (heads + 2 * kv_heads) * HEAD_DIM;
    size_t of_key = (size_t)(heads + kv_head) * HEAD_DIM, of_value = of_key + (size_t)kv_heads * HEAD_DIM;
    // Counters of the tiles of a sequence are after those of the ones before it, which have no more.
    turns += 1 + (start / QUERIES + sequence) * (heads + 2 * kv_heads);
    unsigned *query_turns = turns + head * tiles;
    size_t numbers_at = (size_t)start * heads + (size_t)head * seq_len;
    qkv += (size_t)start * row_width;

    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8) {
            for (int tile = begin; tile < tiles; tile++) {
                unsigned turn = tile * QUERIES / KEYS - block;
                if (lane == 0) wait_for_turn(query_turns + tile, turn);
                __syncwarp();
                arrive<TURN, WITH_KEEPER>();
                meet<ADDED, WITH_KEEPER>();
                if (lane == 0) pass_turn(query_turns + tile, turn);
            }
        } else if (warp >= 10) {
            int thread = threadIdx.x - 320;
            dattended += ((size_t)start * heads + head) * HEAD_DIM;
            log_sums += numbers_at;
            delta += numbers_at;
            copy_rows<KEYS, 64>(keys, qkv + of_key, row_width, first_key, seq_len, thread);
            copy_rows<KEYS, 64>(values, qkv + of_value, row_width, first_key, seq_len, thread);
            for (int tile = begin; tile < tiles; tile++) {
                int stage = (tile - begin) % 2, first_query = tile * QUERIES;
                unsigned to = stages + stage * STAGE;
                if (tile >= begin + 2) meet_at<USED>(stage);
                copy_rows<QUERIES, 64>(to, qkv + (size_t)head * HEAD_DIM, row_width, first_query, seq_len, thread);
                copy_rows<QUERIES, 64>(to + QUERIES * ROW, dattended, heads * HEAD_DIM, first_query, seq_len, thread);
                #pragma unroll
                for (int i = thread; i < 2 * QUERIES; i += 64) {
                    int query = first_query + i % QUERIES;
                    bool exists = query < seq_len;
                    const float *from = (i < QUERIES ? log_sums : delta) + (exists ? query : 0);
                    unsigned number = keys + at_numbers + (stage * 2 * QUERIES + i) * 4;
                    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(number), "l"(from),
                                 "r"(exists ? 4 : 0)
                                 : "memory");
                }
                wait_copies();
                publish();
                arrive_at<STAGED>(stage);
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const float scale = 1 / sqrtf(HEAD_DIM), exponent = scale * LOG2_E;
    int key = first_key + warp * 16 + lane / 4;
    unsigned of_own = warpgroup * 64 * 128;
    dqkv += (size_t)start * row_width;
    query_sums += numbers_at * HEAD_DIM;
    float dk[COLUMNS][4], dv[COLUMNS][4];
    for (int tile = begin; tile < tiles; tile++) {
        int stage = (tile - begin) % 2, first_query = tile * QUERIES;
        unsigned queries = stages + stage * STAGE, gradients = queries + QUERIES * ROW;
        unsigned of_stage = scores + stage * SCORES;
        meet_at<STAGED>(stage);
        // Rows are the warpgroup's keys, columns queries.
        float p[N][4], ds[N][4];
        fence();
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply<0, 0>(p, panel(keys + of_own + step / 4 * KEYS * 128 + step % 4 * 32),
                           panel(queries + step / 4 * QUERIES * 128 + step % 4 * 32), step > 0);
        }
        close_group();
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply<0, 0>(ds, panel(values + of_own + step / 4 * KEYS * 128 + step % 4 * 32),
                           panel(gradients + step / 4 * QUERIES * 128 + step % 4 * 32), step > 0);
        }
        close_group();
        wait_groups<1>();
        settle(p);
        const float *of_queries = numbers + stage * 2 * QUERIES + lane % 4 * 2;
        #pragma unroll
        for (int i = 0; i < N; i++) {
            float2 log_sum = *(const float2 *)(of_queries + i * 8);
            float shifts[2] = {log_sum.x * LOG2_E, log_sum.y * LOG2_E};
            #pragma unroll
            for (int j = 0; j < 4; j++) p[i][j] = exp2_approximate(fmaf(p[i][j], exponent, -shifts[j % 2]));
        }
        if (first_query < first_key + KEYS - 1) {
            #pragma unroll
            for (int i = 0; i < N; i++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (key + j / 2 * 8 > first_query + i * 8 + lane % 4 * 2 + j % 2) p[i][j] = 0;
                }
            }
        }
        wait_groups<0>();
        settle(ds);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            float2 along = *(const float2 *)(of_queries + QUERIES + i * 8);
            float deltas[2] = {along.x, along.y};
            #pragma unroll
            for (int j = 0; j < 4; j++) ds[i][j] = p[i][j] * (ds[i][j] - deltas[j % 2]);
        }
        unsigned rounded_p[N / 2][4], rounded_ds[N / 2][4];
        round_products<N>(rounded_p, p);
        round_products<N>(rounded_ds, ds);
        store_fragments<N / 2, KEYS>(of_stage, warp * 16, rounded_ds, lane);
        publish();
        fence();
        #pragma unroll
        for (int step = 0; step < QUERIES / 16; step++) {
            multiply(dv, rounded_p[step], panel(gradients + step * 2048, QUERIES * 128), tile > begin || step > 0);
        }
        #pragma unroll
        for (int step = 0; step < QUERIES / 16; step++) {
            multiply(dk, rounded_ds[step], panel(queries + step * 2048, QUERIES * 128), tile > begin || step > 0);
        }
        close_group();
        // Each warpgroup computes dQ of its half of the queries, or of its half of the columns.
        meet<SCORED, 256>();
        float dq[8][4];
        unsigned own_scores = of_stage + (HEAD_DIM == 64 ? warpgroup * KEYS * 128 : 0);
        unsigned own_keys = keys + (HEAD_DIM == 64 ? 0 : warpgroup * KEYS * 128);
        #pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            multiply<1, 1>(dq, panel(own_scores + step * 2048), panel(own_keys + step * 2048), step > 0);
        }
        close_group();
        wait_groups<1>();
        settle(dv);
        settle(dk);
        settle(rounded_p);
        settle(rounded_ds);
        if (tile + 2 < tiles) arrive_at<USED>(stage);
        wait_groups<0>();
        settle(dq);

        int of_warp = first_query + (HEAD_DIM == 64 ? warp : warp % 4) * 16;
        int columns = HEAD_DIM == 64 ? 0 : warpgroup * 64;
        bool first = tile * QUERIES / KEYS == block;
        meet<TURN, WITH_KEEPER>();
        if (block > 0) {
            add_part<8>(query_sums, dq, of_warp + lane / 4, columns, seq_len, first, lane);
        } else {
            if (!first) take_parts<8>(dq, query_sums, of_warp + lane / 4, columns, seq_len, lane);
            // Both warpgroups have read these scores, since they have met at TURN.
            unsigned through = HEAD_DIM == 64 ? own_scores : of_stage + of_own;
            store_rows<8, KEYS>(dqkv + (size_t)head * HEAD_DIM + columns, dq, scale, scale, through, warp % 4 * 16,
                                row_width, of_warp, seq_len, lane);
        }
        arrive<ADDED, WITH_KEEPER>();
    }

    // The group's heads in their order; the last one writes.
    unsigned member = head % group;
    size_t of_group = (size_t)start * kv_heads + (size_t)kv_head * seq_len;
    float *dk_sums = key_sums + 2 * of_group * HEAD_DIM, *dv_sums = dk_sums + (size_t)seq_len * HEAD_DIM;
    unsigned *key_turns = turns + heads * tiles + (kv_head * tiles + block) * 2 + warpgroup;
    if (member > 0) {
        if (threadIdx.x % 128 == 0) wait_for_turn(key_turns, member);
        meet_own(warpgroup);
    }
    if (member + 1 < group) {
        add_part<COLUMNS>(dk_sums, dk, key, 0, seq_len, member == 0, lane);
        add_part<COLUMNS>(dv_sums, dv, key, 0, seq_len, member == 0, lane);
        meet_own(warpgroup);
        if (threadIdx.x % 128 == 0) pass_turn(key_turns, member);
        return;
    }
    if (member > 0) {
        take_parts<COLUMNS>(dk, dk_sums, key, 0, seq_len, lane);
        take_parts<COLUMNS>(dv, dv_sums, key, 0, seq_len, lane);
    }
    // Every warpgroup has used the keys and values.
    meet<SCORED, 256>();
    int first = first_key + warp * 16;
    store_rows<COLUMNS, KEYS>(dqkv + of_key, dk, scale, scale, keys, warp * 16, row_width, first, seq_len, lane);
    store_rows<COLUMNS, KEYS>(dqkv + of_value, dv, 1, 1, values, warp * 16, row_width, first, seq_len, lane);
}
