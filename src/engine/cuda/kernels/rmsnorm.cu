// RMSNorm (Zhang and Sennrich, 2019): y = x · r · w with r = 1 / √(mean x² + ε), row by row.
//
// x, y, dx, dy: [n, width]; w, dw: [width]; inverse: [n], keeps r. All f32.
#include "block.cuh"

// One block per row.
extern "C" __global__ void rmsnorm_forward(float *y, float *inverse, const float *x, const float *w,
                                           int width, float eps) {
    size_t row = (size_t)blockIdx.x * width;
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares += x[row + i] * x[row + i];
    float r = 1 / sqrtf(block_sum(squares) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[row + i] = x[row + i] * r * w[i];
    if (threadIdx.x == 0) inverse[blockIdx.x] = r;
}

// dw = Σ over rows of dy · x · r, added to dw where add is not 0. One thread per column, which
// adds the rows in their order.
extern "C" __global__ void rmsnorm_backward_weight(float *dw, const float *dy, const float *x,
                                                   const float *inverse, int n, int width, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum = 0;
    for (int row = 0; row < n; row++) {
        size_t at = (size_t)row * width + i;
        sum += dy[at] * x[at] * inverse[row];
    }
    dw[i] = add ? dw[i] + sum : sum;
}

// dx += dy · w · r − x · r³ · mean(dy · w · x). Replaces dy by y, which the weight gradient of the next
// layer needs; so it runs after rmsnorm_backward_weight. One block per row.
extern "C" __global__ void rmsnorm_backward_input(float *dy_to_y, float *dx, const float *x,
                                                  const float *inverse, const float *w, int width) {
    size_t row = (size_t)blockIdx.x * width;
    float r = inverse[blockIdx.x];
    float product = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        product += dy_to_y[row + i] * w[i] * x[row + i];
    }
    float along = block_sum(product) * r * r * r / width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        dx[row + i] += dy_to_y[row + i] * w[i] * r - x[row + i] * along;
        dy_to_y[row + i] = x[row + i] * r * w[i];
    }
}
