// Rotary position embedding (Su et al., 2021) in the layout of Hugging Face's Llama: element i of a
// head rotates together with element i + rotary_dim / 2.
//
// x: [n, row], real, of which the first rotary_dim elements of each of the first heads of a row rotate in place. Row r is at
// position positions[r], or r mod seq_len where positions is null. table: [seq_len, rotary_dim], f32, the cosines of a position's rotary_dim / 2
// angles, then their sines. direction: 1, or −1 for the inverse rotation, which is the transpose.
//
// Grid n, 256 threads.
#include "real.cuh"

struct Rotate {
    real *x;
    const float *cosines, *sines;
    int half, head_dim;
    float direction;

    // Pairs from the i-th of the row on, all of one head.
    template <int N> __device__ __forceinline__ void at(int i) {
        int head = i / half, pair = i - head * half;
        real *first = x + head * head_dim + pair, *second = first + half;
        float a[N], b[N], cosine[N], sine[N];
        load(a, first);
        load(b, second);
        load(cosine, cosines + pair);
        load(sine, sines + pair);
        for (int j = 0; j < N; j++) {
            float turned = a[j] * cosine[j] - b[j] * (direction * sine[j]);
            b[j] = b[j] * cosine[j] + a[j] * (direction * sine[j]);
            a[j] = turned;
        }
        store(first, a);
        store(second, b);
    }
};

extern "C" __global__ void __launch_bounds__(256)
rope(real *x, int row, int heads, const float *table, int seq_len, int head_dim, int rotary_dim, float direction,
     const unsigned *positions) {
    int half = rotary_dim / 2;
    unsigned position = positions ? positions[blockIdx.x] : blockIdx.x % seq_len;
    const float *cosines = table + (size_t)position * rotary_dim;
    real *of_row = x + (size_t)blockIdx.x * row;
    bool packs = half % WIDE == 0 && head_dim % WIDE == 0 && row % WIDE == 0 && aligned(x) && aligned(table);
    Rotate rotate = {of_row, cosines, cosines + half, half, head_dim, direction};
    over_block<WIDE>(heads * half, packs, rotate);
}
