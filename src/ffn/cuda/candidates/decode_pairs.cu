// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME   ffn_decode_pairs
#define DECODE_BOUNDS __maxnreg__(DECODE_MOST_REGISTERS)
#define DECODE_PAIRS 2
#include "ffn/cuda/decode.cu"
