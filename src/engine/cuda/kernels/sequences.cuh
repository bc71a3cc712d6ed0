// The sequences of a micro-batch, which do not see each other. Without spans each row of seq_len tokens is one. Otherwise
// sequence s has spans[s].y tokens, at most seq_len and perhaps none, from token spans[s].x on. Numbers by head and query
// are those of a sequence, [heads, tokens], then those of the next.
#pragma once

// The first token of a sequence; seq_len becomes its number of tokens.
__device__ __forceinline__ unsigned first_token(const uint2 *spans, int sequence, int &seq_len) {
    if (!spans) return sequence * seq_len;
    uint2 span = spans[sequence];
    seq_len = span.y;
    return span.x;
}
