// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME     ffn_decode_short
#define DECODE_ONE_COPY 1
#include "ffn/cuda/decode.cu"
