// Random numbers of keys: SplitMix64, as in util/random.rs.
#pragma once

// The number at a place of the key's stream, which begins at place 1.
__device__ __forceinline__ unsigned long long nth(unsigned long long key, unsigned long long place) {
    unsigned long long bits = key + place * 0x9e3779b97f4a7c15ull;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    return bits ^ (bits >> 31);
}
