/* SPDX-License-Identifier: MIT */
/*
 * What an Instance of instance.c tells the script that started it, and what it is told: one file,
 * mapped by both, that outlives a SIGKILL. tests/cuda/soak_on_device has the same struct; every
 * field is written by one side. Times are of CLOCK_MONOTONIC, 0: not yet.
 */
#ifndef XPOOL_TESTS_CUDA_INSTANCE_BOARD_H
#define XPOOL_TESTS_CUDA_INSTANCE_BOARD_H

#include <stdint.h>

#define BOARD_MAGIC 0x0144524142505801ull

typedef enum board_state {
    BOARD_STARTING = 0,
    BOARD_OPEN,       /* admitted by the daemon */
    BOARD_EXECUTABLE, /* graphs are being captured */
    BOARD_SERVING,    /* passes */
    BOARD_ENDED       /* the passes are over */
} board_state_t;

typedef enum board_order {
    BOARD_MIXED = 0, /* anything that a pass can be */
    BOARD_DECODE,    /* captured passes of order_rows rows */
    BOARD_PREFILL,   /* eager passes of many rows */
    BOARD_REST       /* none */
} board_order_t;

typedef struct board {
    uint64_t magic;
    uint32_t pid, state;
    uint64_t began_ns, open_ns, executable_ns, serving_ns;
    uint64_t beat_ns;  /* end of the last pass */
    uint64_t ended_ns; /* the pass that met the end stopped waiting */
    uint64_t told_ns;  /* on_end */
    uint64_t closed_ns;
    uint64_t passes, graph_passes, eager_passes, prefill_passes;
    uint64_t calls, rows; /* layers, and rows of all of them */
    uint64_t wrong;       /* rows that the reference does not have */
    uint64_t apart;       /* rows near the reference, of other bits than before */
    uint64_t dirty;       /* padding rows that were written */
    uint64_t unchecked;   /* rows, with --no-check */
    uint64_t longest_pass_ns;
    uint32_t told_kind;         /* xpool_end_t */
    uint32_t ended_status;      /* xpool_status_t of the call that met the end */
    uint32_t kernel_after;      /* after a failure: 1 a kernel of its own ran, 2 it did not */
    uint32_t late;              /* 1: a pass did not end within its limit */
    uint32_t gpu, mps;          /* on a GPU; as a client of an MPS controller */
    uint32_t order, order_rows; /* the script's */
    char told_text[512];
    char ended_text[512];
    char fault[256]; /* the first wrong row, or what else is wrong */
} board_t;
#endif
