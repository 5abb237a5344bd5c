/* SPDX-License-Identifier: MIT */
/* What the parts of cuda_ffn_bench share: Lanes over distinct layers, times, rows of results. */
#ifndef XPOOL_BENCHES_FFN_BENCH_H
#define XPOOL_BENCHES_FFN_BENCH_H

#include "ffn_kit.h"

enum { MAX_LANES = 32 };

typedef struct bench_lanes {
    ffn_cuda_lane_t lane[MAX_LANES];
    cuda_address_t at[MAX_LANES], input[MAX_LANES], output, workspace;
    uint32_t count;
} bench_lanes_t;

extern double bench_copy_rate; /* bytes read plus bytes written, a second */

double bench_median(double *values, uint32_t count);
void bench_row(const char *metric, double value, const char *unit, double floor, double peer,
               const char *target, const char *note);
void bench_begin(ffn_kit_t *kit);
double bench_end_us(ffn_kit_t *kit);
void bench_lanes_make(ffn_kit_t *kit, const ffn_kit_model_t *m, uint32_t count, uint32_t max_rows,
                      uint32_t bulk, bench_lanes_t *l);
void bench_lanes_rows(ffn_kit_t *kit, bench_lanes_t *l, uint32_t rows);
void bench_lanes_free(ffn_kit_t *kit, bench_lanes_t *l);
ffn_cuda_signature_t bench_signature_dense(void);
ffn_cuda_signature_t bench_signature_moe(void);

/* Median and P99 of post to answer, and the mean over all, pauses left out, through a resident
 * kernel: the decode kernel without or with looking ahead, that of few rows. */
enum { BENCH_PLAIN, BENCH_AHEAD, BENCH_FEW };
typedef struct bench_resident {
    double p50_us, p99_us, mean_us;
    char samples[24]; /* tests/cuda/samples.h */
} bench_resident_t;
bench_resident_t bench_resident_us(ffn_kit_t *kit, bench_lanes_t *l, uint32_t kernel,
                                   uint32_t pause_ns);
/* The marks of the run before over `trace`: means, least and most over blocks, microseconds since
 * the command was seen. names: [FFN_CUDA_TRACE_MARKS]. */
void bench_trace_text(ffn_kit_t *kit, cuda_address_t trace, const char *const *names, char *text,
                      size_t size);

/* All ways to compute a layer for up to 64 rows, in turns: of experts, dense. */
void bench_few(ffn_kit_t *kit);
/* A bulk layer by launches, for 17 to 8192 rows. */
void bench_bulk_split(ffn_kit_t *kit);
#endif
