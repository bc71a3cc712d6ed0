// RMSNorm (Zhang and Sennrich, 2019): y = x · r · w with r = 1 / √(mean x² + ε), row by row. w = shift + weights: the
// shift is 0, and 1 in Gemma.
//
// x, dx: [n, width], f32; y, dy, dx_real: [n, width], real; weights: [width], f32; inverse: [n], f32, keeps r.
//
// kernel            grid           threads
// rmsnorm_forward   n              256
// rmsnorm_backward  ⌈n / rows⌉     256 up to a width of 2048, 512 up to 4096, 1024 above; fast up to 8192
// column_sums       ⌈width / 32⌉   1024
#include "block.cuh"
#include "real.cuh"

struct Squares {
    const float *x;
    float sum;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N];
        load(v, x + i);
        for (int j = 0; j < N; j++) sum += v[j] * v[j];
    }
};

struct Scale {
    real *y;
    const float *x, *weights;
    float r, shift;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N], scale[N];
        load(v, x + i);
        load(scale, weights + i);
        for (int j = 0; j < N; j++) v[j] = v[j] * r * (shift + scale[j]);
        store(y + i, v);
    }
};

extern "C" __global__ void __launch_bounds__(256)
rmsnorm_forward(real *y, float *inverse, const float *x, const float *weights, int width, float eps, float shift) {
    const float *from = x + (size_t)blockIdx.x * width;
    real *to = y + (size_t)blockIdx.x * width;
    bool packs = width % 4 == 0 && aligned(x) && aligned(y) && aligned(weights);
    Squares squares = {from, 0};
    over_block<4>(width, packs, squares);
    float r = 1 / sqrtf(block_sum(squares.sum) / width + eps);
    over_block<4>(width, packs, Scale{to, from, weights, r, shift});
    if (threadIdx.x == 0) inverse[blockIdx.x] = r;
}

struct Backward {
    float *dx;
    real *dx_real;
    // Of this block: [width].
    float *partial;
    real *dy_to_y;
    const float *x, *inverse, *weights;
    float shift;
    // The rows of this block.
    int first, last;
    int width;
};

// For width ≤ PACKS · 4 · blockDim.x: a thread keeps its columns of a row and their sums over the rows in
// registers, so that every element is read once.
template <int PACKS>
__device__ __forceinline__ void backward_in_registers(const Backward &of) {
    float sums[PACKS][4] = {};
    for (int row = of.first; row < of.last; row++) {
        size_t at = (size_t)row * of.width;
        float x[PACKS][4], dy[PACKS][4], dx[PACKS][4], w[4], product = 0;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int i = (p * blockDim.x + threadIdx.x) * 4;
            if (i >= of.width) continue;
            load(x[p], of.x + at + i);
            load(dy[p], of.dy_to_y + at + i);
            load(dx[p], of.dx + at + i);
            load(w, of.weights + i);
            for (int j = 0; j < 4; j++) product += dy[p][j] * (of.shift + w[j]) * x[p][j];
        }
        float r = of.inverse[row];
        float along = block_sum(product) * r * r * r / of.width;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int i = (p * blockDim.x + threadIdx.x) * 4;
            if (i >= of.width) continue;
            load(w, of.weights + i);
            for (int j = 0; j < 4; j++) {
                w[j] += of.shift;
                float normed = x[p][j] * r;
                sums[p][j] += dy[p][j] * normed;
                dx[p][j] += dy[p][j] * w[j] * r - x[p][j] * along;
                dy[p][j] = normed * w[j];
            }
            store(of.dx + at + i, dx[p]);
            if (of.dx_real) store(of.dx_real + at + i, dx[p]);
            store(of.dy_to_y + at + i, dy[p]);
        }
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int i = (p * blockDim.x + threadIdx.x) * 4;
        if (i < of.width) store(of.partial + i, sums[p]);
    }
}

// For any width and alignment.
__device__ __forceinline__ void backward_in_memory(const Backward &of) {
    for (int i = threadIdx.x; i < of.width; i += blockDim.x) of.partial[i] = 0;
    for (int row = of.first; row < of.last; row++) {
        size_t at = (size_t)row * of.width;
        float product = 0;
        for (int i = threadIdx.x; i < of.width; i += blockDim.x) {
            product += to_float(of.dy_to_y[at + i]) * (of.shift + of.weights[i]) * of.x[at + i];
        }
        float r = of.inverse[row];
        float along = block_sum(product) * r * r * r / of.width;
        for (int i = threadIdx.x; i < of.width; i += blockDim.x) {
            float x = of.x[at + i], dy = to_float(of.dy_to_y[at + i]), w = of.shift + of.weights[i];
            float normed = x * r;
            of.partial[i] += dy * normed;
            float dx = of.dx[at + i] + (dy * w * r - x * along);
            of.dx[at + i] = dx;
            if (of.dx_real) of.dx_real[at + i] = to_real(dx);
            of.dy_to_y[at + i] = to_real(normed * w);
        }
    }
}

// dx += dy · w · r − x · r³ · mean(dy · w · x); dx_real, unless it is null, gets the new dx. Replaces dy by y,
// which the weight gradient of the next layer needs. Block b has the rows from b · rows; partial:
// [blocks, width], f32, gets the sums of dy · x · r over the rows of each block.
extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_backward(float *dx, real *dx_real, float *partial, real *dy_to_y, const float *x,
                 const float *inverse, const float *weights, int n, int width, int rows, float shift) {
    int first = blockIdx.x * rows;
    Backward of = {dx, dx_real, partial + (size_t)blockIdx.x * width, dy_to_y, x, inverse, weights, shift,
                   first, min(n, first + rows), width};
    bool packs = width % 4 == 0 && aligned(dx) && aligned(dx_real) && aligned(partial) &&
                 aligned(dy_to_y) && aligned(x) && aligned(weights);
    int needed = packs ? (width / 4 + blockDim.x - 1) / blockDim.x : 0;
    if (needed == 1) {
        backward_in_registers<1>(of);
    } else if (needed == 2) {
        backward_in_registers<2>(of);
    } else {
        backward_in_memory(of);
    }
}

// sums[i] += Σ over b of partial[b · width + i]. A warp adds every 32nd row of 32 columns in their order
// (with 1024 threads), then the block adds the warps' sums in theirs.
extern "C" __global__ void __launch_bounds__(1024)
column_sums(float *sums, const float *partial, int blocks, int width) {
    __shared__ float of_warps[32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int i = blockIdx.x * 32 + lane;
    float sum = 0;
    if (i < width) {
        for (int b = warp; b < blocks; b += warps) sum += partial[(size_t)b * width + i];
    }
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && i < width) {
        for (int other = 1; other < warps; other++) sum += of_warps[other][lane];
        sums[i] += sum;
    }
}
