/* SPDX-License-Identifier: MIT */
/*
 * Counter-based random numbers: Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers:
 * as easy as 1, 2, 3", SC 2011). A number depends only on (seed, position), never on what else
 * runs.
 */
#ifndef XPOOL_ENGINE_RANDOM_H
#define XPOOL_ENGINE_RANDOM_H

#include <stdint.h>

static inline void engine_philox(const uint32_t key_in[2], const uint32_t counter_in[4],
                                 uint32_t out[4])
{
    uint32_t key[2] = {key_in[0], key_in[1]};
    uint32_t c[4] = {counter_in[0], counter_in[1], counter_in[2], counter_in[3]};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b,
                            (uint32_t)(a >> 32) ^ c[3] ^ key[1], (uint32_t)a};
        for (int i = 0; i < 4; i++)
            c[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    for (int i = 0; i < 4; i++)
        out[i] = c[i];
}

/* Uniform in [0, 1) with 53 bits. */
static inline double engine_random_unit(uint64_t seed, uint64_t position)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t out[4];
    engine_philox(key, counter, out);
    uint64_t bits = ((uint64_t)out[1] << 32 | out[0]) >> 11;
    return (double)bits * 0x1p-53;
}
#endif
