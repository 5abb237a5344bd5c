// SPDX-License-Identifier: MIT
// A candidate for the decode kernel, which tests load in its place: see README.md.
#define DECODE_NAME   ffn_decode_wide
#define DECODE_BOUNDS __maxnreg__(DECODE_MOST_REGISTERS)
#define DECODE_LEAN 1
#define DECODE_PASS_TILES 8u
#include "ffn/cuda/decode.cu"
