// LayerNorm (Ba et al., 2016): y = (x − μ) · r · w + b with the mean μ of x and r = 1 / √(variance of x + ε), row by row.
//
// x, dx: [n, width], f32; y, dy, dx_real: [n, width], real; weights: [2, width], f32, w and then b; statistics: [n, 2],
// f32, keeps r and μ.
//
// kernel              grid          threads
// layernorm_forward   n             256
// layernorm_backward  ⌈n / rows⌉    256 up to a width of 2048, 512 up to 4096, 1024 above
#include "block.cuh"
#include "real.cuh"

struct Squares {
    const float *x;
    float mean, sum;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N];
        load(v, x + i);
        for (int j = 0; j < N; j++) sum += (v[j] - mean) * (v[j] - mean);
    }
};

struct Scale {
    real *y;
    const float *x, *w, *b;
    float r, mean;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N], scale[N], shift[N];
        load(v, x + i);
        load(scale, w + i);
        load(shift, b + i);
        for (int j = 0; j < N; j++) v[j] = (v[j] - mean) * r * scale[j] + shift[j];
        store(y + i, v);
    }
};

extern "C" __global__ void __launch_bounds__(256)
layernorm_forward(real *y, float *statistics, const float *x, const float *weights, int width, float eps) {
    const float *from = x + (size_t)blockIdx.x * width;
    real *to = y + (size_t)blockIdx.x * width;
    bool packs = width % 4 == 0 && aligned(x) && aligned(y) && aligned(weights);
    Sum<float> sum = {from, 0};
    over_block<4>(width, packs, sum);
    float mean = block_sum(sum.sum) / width;
    Squares squares = {from, mean, 0};
    over_block<4>(width, packs, squares);
    float r = 1 / sqrtf(block_sum(squares.sum) / width + eps);
    over_block<4>(width, packs, Scale{to, from, weights, weights + width, r, mean});
    if (threadIdx.x == 0) {
        statistics[2 * blockIdx.x] = r;
        statistics[2 * blockIdx.x + 1] = mean;
    }
}

// dx += r · (w · dy − mean(w · dy) − normed · mean(w · dy · normed)) with normed = (x − μ) · r; dx_real, unless it is null,
// gets the new dx. Replaces dy by y, which the weight gradient of the next layer needs. Block k has the rows from
// k · rows; partial: [blocks, 2, width], f32, gets the sums of dy · normed and of dy over the rows of each block.
extern "C" __global__ void __launch_bounds__(1024, 1)
layernorm_backward(float *dx, real *dx_real, float *partial, real *dy_to_y, const float *x,
                   const float *statistics, const float *weights, int n, int width, int rows) {
    int first = blockIdx.x * rows, last = min(n, first + rows);
    float *dw = partial + (size_t)blockIdx.x * 2 * width, *db = dw + width;
    const float *w = weights, *b = weights + width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) dw[i] = db[i] = 0;
    for (int row = first; row < last; row++) {
        size_t at = (size_t)row * width;
        float r = statistics[2 * row], mean = statistics[2 * row + 1], sum = 0, product = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            float along = to_float(dy_to_y[at + i]) * w[i];
            sum += along;
            product += along * ((x[at + i] - mean) * r);
        }
        float shift = block_sum(sum) / width, along = block_sum(product) / width;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            float dy = to_float(dy_to_y[at + i]), normed = (x[at + i] - mean) * r;
            dw[i] += dy * normed;
            db[i] += dy;
            float sum = dx[at + i] + r * (dy * w[i] - shift - normed * along);
            dx[at + i] = sum;
            if (dx_real) dx_real[at + i] = to_real(sum);
            dy_to_y[at + i] = to_real(normed * w[i] + b[i]);
        }
    }
}
