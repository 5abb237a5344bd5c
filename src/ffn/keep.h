/* SPDX-License-Identifier: MIT */
/*
 * A shard's memory from one process to the next: its name, the sum over its bytes, and the step
 * from memory that is being filled to memory that nobody can change any more.
 */
#ifndef XPOOL_FFN_KEEP_H
#define XPOOL_FFN_KEEP_H

#include "ffn/ffn.h"
#include "ffn/layout.h"

/* Another file, split, type, or form in which the kernels pack it gives another number. */
uint64_t keep_identity(const ffn_install_t *install, const layout_t *layout);

/* A sum over the 8-byte words and their places; `bytes` is a multiple of 8. */
uint64_t keep_content(const void *memory, uint64_t bytes, uint32_t readers);

/* The memory at *address, filled through `fd`, is frozen and mapped anew, readable only; what is
 * at the old address is gone. Fills bytes, identity and content of weights, whose fd is `fd`. */
xp_status_t keep_freeze(int fd, uint64_t bytes, uint64_t identity, uint32_t readers, void **address,
                        ffn_weights_t *weights_out);

/* Maps kept memory and compares both numbers. XP_INVALID: it is another shard's, or not whole. */
xp_status_t keep_adopt(const ffn_weights_t *kept, uint64_t bytes, uint64_t identity,
                       uint32_t readers, void **address_out);
#endif
