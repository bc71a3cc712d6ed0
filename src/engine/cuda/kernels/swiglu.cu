// SwiGLU (Shazeer, 2020): h = silu(gate) · up with silu(x) = x · σ(x).
//
// gate_up: [n, 2 · inner], the gates of a row, then its ups; h, dh: [n, inner]; elements = n · inner. All
// real.
//
// Any grid of 256 threads; a thread handles 16 bytes of each tensor at a time.
#include "real.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Where the gate of element i of h lies in gate_up. A division of 64 bits is slow.
__device__ __forceinline__ size_t gate_of(size_t i, size_t elements, int inner) {
    size_t row = elements <= 0xffffffffu ? (unsigned)i / (unsigned)inner : i / inner;
    return i + row * inner;
}

struct Forward {
    real *h;
    const real *gate_up;
    size_t elements;
    int inner;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        size_t from = gate_of(i, elements, inner);
        float gate[N], up[N];
        load(gate, gate_up + from);
        load(up, gate_up + from + inner);
        for (int j = 0; j < N; j++) gate[j] = gate[j] * sigmoid(gate[j]) * up[j];
        store(h + i, gate);
    }
};

extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(real *h, const real *gate_up, size_t elements, int inner) {
    bool packs = inner % WIDE == 0 && aligned(h) && aligned(gate_up);
    over_grid<WIDE>(elements, packs, Forward{h, gate_up, elements, inner});
}

struct Backward {
    real *dh_to_h, *gate_up;
    size_t elements;
    int inner;

    template <int N> __device__ __forceinline__ void at(size_t i) {
        size_t from = gate_of(i, elements, inner);
        float gate[N], up[N], dh[N];
        load(gate, gate_up + from);
        load(up, gate_up + from + inner);
        load(dh, dh_to_h + i);
        for (int j = 0; j < N; j++) {
            float s = sigmoid(gate[j]);
            float silu = gate[j] * s;
            gate[j] = dh[j] * up[j] * (s + silu * (1 - s));
            float h = silu * up[j];
            up[j] = dh[j] * silu;
            dh[j] = h;
        }
        store(gate_up + from, gate);
        store(gate_up + from + inner, up);
        store(dh_to_h + i, dh);
    }
};

// Takes dh and replaces it by h, which the weight gradient needs; replaces gate_up by
// its gradient: dup = dh · silu(gate), dgate = dh · up · (σ + silu · (1 − σ)).
extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(real *dh_to_h, real *gate_up, size_t elements, int inner) {
    bool packs = inner % WIDE == 0 && aligned(dh_to_h) && aligned(gate_up);
    over_grid<WIDE>(elements, packs, Backward{dh_to_h, gate_up, elements, inner});
}
