// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME ffn_decode_wide
#define DECODE_LEAN 1
#define DECODE_PASS_TILES 9u
#include "ffn/cuda/decode.cu"
