// C = A · Bᵀ in bf16 with f32 sums: A [m, k], B [n, k], C [m, n] f32; m, n and k are multiples of 64, 64
// and 32. One block of 128 threads per 64 × 64 tile of C; k in steps of 32, two stages in shared memory.
#define STEP 32
#define PAD 8

__device__ unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

__device__ void fetch(unsigned short (*tile)[STEP + PAD], const unsigned short *from, int k) {
    for (int i = threadIdx.x; i < 64 * STEP / 8; i += 128) {
        int row = i / (STEP / 8), column = i % (STEP / 8) * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
            "r"(shared_address(&tile[row][column])), "l"(from + (size_t)row * k + column));
    }
}

extern "C" __global__ void __launch_bounds__(128) matmul(float *c, const unsigned short *a,
                                                         const unsigned short *b, int n, int k) {
    __shared__ __align__(16) unsigned short as[2][64][STEP + PAD], bs[2][64][STEP + PAD];
    const unsigned short *from_a = a + (size_t)blockIdx.y * 64 * k;
    const unsigned short *from_b = b + (size_t)blockIdx.x * 64 * k;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[8][4] = {};
    fetch(as[0], from_a, k);
    fetch(bs[0], from_b, k);
    asm volatile("cp.async.commit_group;");
    for (int step = 0; step < k / STEP; step++) {
        if (step + 1 < k / STEP) {
            fetch(as[(step + 1) % 2], from_a + (step + 1) * STEP, k);
            fetch(bs[(step + 1) % 2], from_b + (step + 1) * STEP, k);
        }
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        for (int at = 0; at < STEP; at += 16) {
            unsigned x[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                : "r"(shared_address(&as[step % 2][warp * 16 + lane % 16][at + lane / 16 * 8])));
            for (int tile = 0; tile < 8; tile++) {
                unsigned y[2];
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                    : "=r"(y[0]), "=r"(y[1])
                    : "r"(shared_address(&bs[step % 2][tile * 8 + lane % 8][at + lane / 8 % 2 * 8])));
                float *d = sums[tile];
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
            }
        }
        __syncthreads();
    }
    for (int tile = 0; tile < 8; tile++) {
        for (int i = 0; i < 4; i++) {
            int row = blockIdx.y * 64 + warp * 16 + lane / 4 + i / 2 * 8;
            int column = blockIdx.x * 64 + tile * 8 + lane % 4 * 2 + i % 2;
            c[(size_t)row * n + column] = sums[tile][i];
        }
    }
}

// The softmax of each row of 32 · width numbers, one warp per row, by shuffles.
extern "C" __global__ void softmax(float *x, int width) {
    float *row = x + ((size_t)blockIdx.x * blockDim.y + threadIdx.y) * 32 * width;
    float most = -__int_as_float(0x7f800000);
    for (int i = threadIdx.x; i < 32 * width; i += 32) most = fmaxf(most, row[i]);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    float sum = 0;
    for (int i = threadIdx.x; i < 32 * width; i += 32) sum += exp2f((row[i] - most) * 1.44269504f);
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    for (int i = threadIdx.x; i < 32 * width; i += 32) {
        row[i] = exp2f((row[i] - most) * 1.44269504f) / sum;
    }
}
