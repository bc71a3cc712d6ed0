// Softmax and cross-entropy: −ln softmax(logits)[target], row by row, in nats, and two other
// losses of a token (TokenLoss in cpu-kernels).
//
// logits: [n, vocabulary], real; targets: [n], of which IGNORE carries no loss; losses: [n], f64.
//
// kernel         grid   threads
// cross_entropy  n      256; 1024 from a vocabulary of 8192, so that the second pass finds more in caches
// sum_losses     1      1024
#include "block.cuh"
#include "real.cuh"

#define IGNORE 0xffffffffu
#define LOWEST -3.402823466e38f

// Calls body.at<count>(i) over the elements of a row at any address: single elements up to a boundary of 16
// bytes, packs, then the rest.
template <typename Body>
__device__ __forceinline__ void over_row(const real *row, int len, Body &&body) {
    int head = min(len, (int)((16 - ((size_t)row & 15)) % 16 / sizeof(real)));
    int packed = head + (len - head) / WIDE * WIDE;
    if ((int)threadIdx.x < head) body.template at<1>(threadIdx.x);
    for (int i = head + threadIdx.x * WIDE; i < packed; i += blockDim.x * WIDE) {
        body.template at<WIDE>(i);
    }
    if (packed + (int)threadIdx.x < len) body.template at<1>(packed + threadIdx.x);
}

// The maximum of a thread's elements so far, and the sum of exponentials relative to it (Milakov and
// Gimelshein, 2018). A NaN is not a maximum but makes the sum NaN.
struct Exponentials {
    const real *row;
    float most, sum;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N], exponentials = 0;
        load(v, row + i);
        float above = most;
        for (int j = 0; j < N; j++) above = fmaxf(above, v[j]);
        if (above > most) {
            sum *= expf(most - above);
            most = above;
        }
        for (int j = 0; j < N; j++) exponentials += expf(v[j] - most);
        sum += exponentials;
    }
};

struct Gradient {
    real *row;
    float shift, inverse, of_target, spread;
    int target;

    template <int N> __device__ __forceinline__ void at(int i) {
        float v[N];
        load(v, row + i);
        for (int j = 0; j < N; j++) {
            v[j] = expf(v[j] - shift) * inverse - spread - (i + j == target ? of_target : 0.0f);
        }
        store(row + i, v);
    }
};

struct Zero {
    real *row;

    template <int N> __device__ __forceinline__ void at(int i) {
        float zero[N] = {};
        store(row + i, zero);
    }
};

// A row whose target is IGNORE has the loss 0. If gradient is not 0, replaces the logits by the gradient of the
// rows' summed loss: softmax(logits) − the target's unit vector, or 0 for a row with IGNORE. weights: f32, [n], factors of
// the gradient of each row, or null for 1. smoothing: share of the target that is spread over the vocabulary. dft: the loss
// has the target's probability as a factor, without a gradient.
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy(double *losses, real *logits, const unsigned *targets, const float *weights, int vocabulary,
              int gradient, float smoothing, int dft) {
    unsigned target = targets[blockIdx.x];
    real *row = logits + (size_t)blockIdx.x * vocabulary;
    if (target == IGNORE) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (gradient) over_row(row, vocabulary, Zero{row});
        return;
    }
    // Read before the reductions, after which a thread overwrites it.
    float chosen = to_float(row[target]);
    double wanted = chosen;
    Exponentials of_thread = {row, LOWEST, 0};
    over_row(row, vocabulary, of_thread);
    float shift = block_max(of_thread.most);
    float sum = block_sum(of_thread.sum * expf(of_thread.most - shift));
    if (smoothing) {
        Sum<real> total = {row, 0};
        over_row(row, vocabulary, total);
        wanted = (1 - (double)smoothing) * wanted + smoothing * ((double)block_sum(total.sum) / vocabulary);
    }
    float factor = dft ? expf(chosen - shift) / sum : 1;
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = factor * (log((double)sum) + ((double)shift - wanted));
    }
    if (!gradient) return;
    float weight = factor * (weights ? weights[blockIdx.x] : 1);
    over_row(row, vocabulary, Gradient{row, shift, weight / sum, weight * (1 - smoothing),
                                       weight * smoothing / vocabulary, (int)target});
}

// *total += Σ losses, [n], in an order that depends on n only.
extern "C" __global__ void __launch_bounds__(1024)
sum_losses(double *total, const double *losses, int n) {
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}
