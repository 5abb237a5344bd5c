/* SPDX-License-Identifier: MIT */
/* The selected variant, for the files of this folder. */
#ifndef XPOOL_KERNELS_DISPATCH_H
#define XPOOL_KERNELS_DISPATCH_H

#include "kernels/ops.h"

const kernels_ops_t *kernels_ops_selected(void);
#endif
