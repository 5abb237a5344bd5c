/* SPDX-License-Identifier: MIT */
/*
 * What the Transport's device tests share: a device with buffers and kernels of the tests, checks
 * that say what failed, and samples. A failed check ends the process with exit code 1; no GPU
 * is 77.
 */
#ifndef XPOOL_TESTS_CUDA_KIT_H
#define XPOOL_TESTS_CUDA_KIT_H

#include <stdio.h>
#include <stdlib.h>

#include "transport/cuda_transport.h"

#define KIT_SKIP 77

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s; last error: %s\n", __FILE__, __LINE__, #condition, \
                    xp_error_last()->text);                                                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define CHECK_OK(expression) CHECK((expression) == XP_OK)

enum {
    KIT_ECHO = 0,
    KIT_NONSENSE,
    KIT_ROUND_TRIPS,
    KIT_PING_PONG,
    KIT_COMPUTE,
    KIT_ECHO_ONCE,
    KIT_ANSWER_AHEAD,
    KIT_KERNELS
};

typedef struct kit {
    cuda_device_t device;
    cuda_module_t module;
    cuda_function_t kernels[KIT_KERNELS];
    cuda_stream_t stream, side;
    cuda_address_t hold; /* device word: slots that the echo leaves without answer */
    uint64_t pinned_bytes;
    void *pinned; /* host */
} kit_t;

void kit_open(kit_t *kit, uint64_t pinned_bytes); /* exits with KIT_SKIP where there is no GPU */
void kit_close(kit_t *kit);
cuda_address_t kit_alloc(kit_t *kit, uint64_t bytes);
void kit_free(kit_t *kit, cuda_address_t address);
/* Through the pinned buffer, on `side`, with a limit of 10 s; work on kit->stream goes on. */
void kit_write(kit_t *kit, cuda_address_t to, const void *from, uint64_t bytes);
void kit_read(kit_t *kit, cuda_address_t from, void *to, uint64_t bytes);
void kit_hold(kit_t *kit, uint32_t mask);
uint64_t kit_in(double seconds); /* a deadline */
transport_tensor_t kit_tensor(cuda_address_t data, uint64_t rows, uint64_t width);
uint16_t kit_value(uint64_t seed, uint64_t index);

typedef struct kit_summary {
    double p50_us, p99_us, max_us;
    char
        samples[24]; /* the name under which they are kept (samples.h), until they get a metric's */
} kit_summary_t;
kit_summary_t kit_summarise(uint32_t *samples_ns, uint32_t count); /* sorts */
/* The samples of a summary, from whatever process it came, become those of the metric. */
void kit_samples(const kit_summary_t *times, const char *metric);
/* One row of a results file, as a line of JSON on stdout. floor < 0: null. */
void kit_row(const char *metric, double value, const char *unit, double floor, const char *target,
             const char *note);
#endif
