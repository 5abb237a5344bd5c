// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME        ffn_decode_dense6
#define DECODE_DENSE_TILES 6u
#include "ffn/cuda/decode.cu"
