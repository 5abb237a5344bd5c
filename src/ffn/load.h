/* SPDX-License-Identifier: MIT */
/* Fills a shard's memory from a checkpoint, or with seeded dummy weights. */
#ifndef XPOOL_FFN_LOAD_H
#define XPOOL_FFN_LOAD_H

#include "ffn/ffn.h"
#include "ffn/layout.h"

/* Reads (or makes up) every item of the layout at memory + offset, and packs it; `packed_out[i]`
 * says whether item i has the packed form. The caller is one of the readers. The first error ends
 * all. */
xp_status_t load_shard(const ffn_install_t *install, const checkpoint_t *checkpoint,
                       const layout_t *layout, uint8_t *memory, bool *packed_out);
#endif
