/* SPDX-License-Identifier: MIT */
/* A small scheduler for the runtime's device test: orders from mapped host memory, one block. */
#ifndef XPOOL_TESTS_CUDA_FFN_SCHEDULER_H
#define XPOOL_TESTS_CUDA_FFN_SCHEDULER_H

#include "ffn/cuda/dispatch.h"

#define FFN_SCHEDULER_SLOTS   4u
#define FFN_SCHEDULER_SAMPLES 4096u

/* One order: `count` Invocations of one model's layers in turn, one after the other. */
typedef struct ffn_order {
    uint64_t sequence;             /* n + 1, written last by the host */
    uint32_t model, layer, layers; /* from `layer` on, `layers` of them in turn */
    uint32_t rows, count;
    uint32_t resident; /* the resident kernel while it has its lease; else the host ring */
    uint32_t few;      /* that kernel is the one of few rows */
    uint32_t urgent, pause_ns;
    const void *input;
    void *output;
    float *partial;
    uint64_t output_step; /* bytes from one Invocation's output to the next one's, of `outputs` in
                             turn; 0: one place */
    uint32_t outputs, reserved;
} ffn_order_t;

/* Mapped host memory, one a slot; a slot has Lane `slot`. */
typedef struct ffn_order_line {
    ffn_order_t order;
    uint64_t answered;                       /* sequence of the last order done */
    uint32_t by_host;                        /* Invocations of it that went to the host ring */
    uint32_t cuts;                           /* that cut another one */
    uint32_t samples[FFN_SCHEDULER_SAMPLES]; /* nanoseconds, post to done; of its first ones */
} ffn_order_line_t;

typedef struct ffn_scheduler_page {
    ffn_order_line_t line[FFN_SCHEDULER_SLOTS];
    uint32_t quit;
    uint32_t ended; /* 1: quit, 2: the runtime has failed */
} ffn_scheduler_page_t;
#endif
