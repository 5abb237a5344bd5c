/* SPDX-License-Identifier: MIT */
#ifndef XPOOL_TESTS_CUDA_FFN_LOAD_H
#define XPOOL_TESTS_CUDA_FFN_LOAD_H

#include "ffn_kit.h"

/* Rows ffn.load.*: GB/s of a shard whose files, written into `folder`, are cached, by 1 to 8
 * readers. */
void ffn_load_measure(ffn_kit_t *kit, const char *folder);
#endif
