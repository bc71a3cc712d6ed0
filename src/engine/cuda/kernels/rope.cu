// Rotary position embedding (Su et al., 2021) in the layout of Hugging Face's Llama: element i of a
// head rotates together with element i + head_dim / 2.
//
// x: [n, row], of which the first heads × head_dim elements of each row rotate in place; row r is at
// position r mod seq_len. table: [seq_len, head_dim], the cosines of a position's head_dim / 2
// angles, then their sines. All f32; one block per row.

__device__ void turn(float *x, int row, int heads, const float *table, int seq_len, int head_dim,
                     float direction) {
    int half = head_dim / 2;
    const float *cosines = table + (size_t)(blockIdx.x % seq_len) * head_dim;
    const float *sines = cosines + half;
    float *of_row = x + (size_t)blockIdx.x * row;
    for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
        int pair = i % half;
        float *a = of_row + i / half * head_dim + pair, *b = a + half;
        float cosine = cosines[pair], sine = direction * sines[pair];
        float turned = *a * cosine - *b * sine;
        *b = *b * cosine + *a * sine;
        *a = turned;
    }
}

extern "C" __global__ void rope_forward(float *x, int row, int heads, const float *table, int seq_len,
                                        int head_dim) {
    turn(x, row, heads, table, seq_len, head_dim, 1);
}

// The inverse rotation, which is the transpose.
extern "C" __global__ void rope_backward(float *x, int row, int heads, const float *table,
                                         int seq_len, int head_dim) {
    turn(x, row, heads, table, seq_len, head_dim, -1);
}
