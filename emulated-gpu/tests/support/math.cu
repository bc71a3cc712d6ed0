// One function of CUDA's library per row of y: [functions, n], f32.

#define ROW(i, e) y[(size_t)(i) * n + at] = (e)

extern "C" __global__ void functions(float *y, const float *x, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    float a = x[at], b = fabsf(a) + 0.5f;
    ROW(0, sinf(a));
    ROW(1, cosf(a));
    ROW(2, expf(a));
    ROW(3, exp2f(a));
    ROW(4, logf(b));
    ROW(5, log2f(b));
    ROW(6, powf(b, 1.7f));
    ROW(7, tanhf(a));
    ROW(8, erff(a));
    ROW(9, rsqrtf(b));
    ROW(10, cbrtf(a));
    ROW(11, fmodf(a, 0.7f));
    ROW(12, (float)exp((double)a));
    ROW(13, (float)log((double)b));
    ROW(14, atanf(a));
    ROW(15, (float)((double)a / (double)b));
    ROW(16, roundf(a));
    ROW(17, rintf(a));
    ROW(18, log1pf(b));
    ROW(19, expm1f(a));
}
