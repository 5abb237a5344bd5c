// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME ffn_decode_pairs3
#define DECODE_PAIRS 3
#include "ffn/cuda/decode.cu"
