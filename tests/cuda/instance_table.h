/* SPDX-License-Identifier: MIT */
/*
 * What the layers of one checkpoint answer to a pool of rows, computed by the FFN runtime of the
 * processors: a file that the Instance of instance.c compares with. Rows of which a choice of
 * experts hangs on the last bits are not in the pool.
 */
#ifndef XPOOL_TESTS_CUDA_INSTANCE_TABLE_H
#define XPOOL_TESTS_CUDA_INSTANCE_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

typedef struct table_options {
    const char *path; /* checkpoint */
    const char *out;
    xp_dtype_t dtype; /* of rows and weights: F32, BF16, F16 */
    bool dummy;
    uint32_t rows, threads;
    uint64_t seed;
} table_options_t;

/* Writes the file; it appears under its name when complete. */
xp_status_t table_make(const table_options_t *options);

typedef struct table {
    uint32_t hidden, layers, rows;
    xp_dtype_t dtype;
    const float *input; /* [rows][hidden], exact in dtype */
    const float *want;  /* [layers][rows][hidden] */
    void *map;
    uint64_t bytes;
} table_t;

xp_status_t table_open(const char *path, table_t *table_out);
void table_close(table_t *table); /* accepts all zero */

/* Whether an answer is the wanted one but for rounding: as a row, and in each element. */
bool table_near(const table_t *table, uint32_t layer, uint32_t row, const float *got);
#endif
