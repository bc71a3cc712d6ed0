// Softmax and cross-entropy: −ln softmax(logits)[target], row by row, in nats.
//
// logits: [n, vocabulary], f32; targets: [n], of which IGNORE carries no loss; losses: [n], f64, 0
// for a row without a target. One block per row.
#include "block.cuh"

#define IGNORE 0xffffffffu

__device__ float row_max(const float *logits, int vocabulary) {
    float most = logits[0];
    for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) most = fmaxf(most, logits[i]);
    return block_max(most);
}

__device__ double row_loss(float sum, float shift, float chosen) {
    return log((double)sum) + ((double)shift - (double)chosen);
}

extern "C" __global__ void cross_entropy_forward(double *losses, const float *logits,
                                                 const unsigned *targets, int vocabulary) {
    unsigned target = targets[blockIdx.x];
    if (target == IGNORE) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        return;
    }
    const float *row = logits + (size_t)blockIdx.x * vocabulary;
    float shift = row_max(row, vocabulary);
    float exponentials = 0;
    for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) exponentials += expf(row[i] - shift);
    float sum = block_sum(exponentials);
    if (threadIdx.x == 0) losses[blockIdx.x] = row_loss(sum, shift, row[target]);
}

// The same, and replaces the logits by the gradient of the rows' summed loss, softmax(logits) − the
// target's unit vector; 0 for a row without a target.
extern "C" __global__ void cross_entropy_forward_backward(double *losses, float *logits,
                                                          const unsigned *targets, int vocabulary) {
    unsigned target = targets[blockIdx.x];
    float *row = logits + (size_t)blockIdx.x * vocabulary;
    if (target == IGNORE) {
        for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) row[i] = 0;
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        return;
    }
    // Every thread reads it before the first thread overwrites it after the reductions.
    float chosen = row[target];
    float shift = row_max(row, vocabulary);
    float exponentials = 0;
    for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) {
        row[i] = expf(row[i] - shift);
        exponentials += row[i];
    }
    float sum = block_sum(exponentials);
    for (int i = threadIdx.x; i < vocabulary; i += blockDim.x) {
        row[i] = row[i] / sum - (i == (int)target);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = row_loss(sum, shift, chosen);
}
