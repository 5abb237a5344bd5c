/* SPDX-License-Identifier: MIT */
/*
 * What the FFN's device tests and benchmarks share: a device, layers with seeded weights, Lanes,
 * the CPU reference. A failed check ends the process with exit code 1; no usable GPU is 77,
 * "skipped".
 */
#ifndef XPOOL_TESTS_CUDA_FFN_KIT_H
#define XPOOL_TESTS_CUDA_FFN_KIT_H

#include <stdio.h>
#include <stdlib.h>

#include "cuda/stream.h"
#include "ffn/cuda/kernels.h"
#include "ffn/cuda/library.h"
#include "ffn/cuda/usage.h"
#include "ffn_device.h"

#define FFN_KIT_SKIP 77

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: failed: %s; last error: %s\n", __FILE__, __LINE__, #condition,          \
                   xp_error_last()->text);                                                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define CHECK_OK(expression) CHECK((expression) == XP_OK)

enum {
    FFN_KIT_FILL = 0,
    FFN_KIT_POST,
    FFN_KIT_LEAVE,
    FFN_KIT_STOP,
    FFN_KIT_READ_BULK,
    FFN_KIT_READ_ASYNC,
    FFN_KIT_READ_LOAD,
    FFN_KIT_PLANTED,
    FFN_KIT_KERNELS
};
#define FFN_KIT_READ_SHARED (192 * 1024) /* bytes, of the first two */

typedef struct ffn_kit {
    cuda_device_t device;
    ffn_cuda_kernels_t kernels;
    cuda_module_t module;
    cuda_function_t function[FFN_KIT_KERNELS];
    cuda_stream_t stream, side;
    cuda_event_t start, end;
    void *pinned;
} ffn_kit_t;

/* Layers of one signature, with weights on the device. */
typedef struct ffn_kit_model {
    ffn_cuda_signature_t signature;
    uint32_t layers, parts;
    uint64_t seed;
    uint64_t part_bytes;
    cuda_address_t weights, routers, biases; /* contiguous, a layer after the other */
    cuda_address_t signature_at, layer_at, part_at;
    cuda_address_t usage;  /* [layers], each ffn_cuda_usage_bytes() */
    ffn_cuda_part_t *part; /* host copy: [layers][parts] */
    bool bias;
} ffn_kit_model_t;

void ffn_kit_open(ffn_kit_t *kit, uint32_t blocks);
void ffn_kit_close(ffn_kit_t *kit);
cuda_address_t ffn_kit_alloc(ffn_kit_t *kit, uint64_t bytes); /* zeroed */
void ffn_kit_free(ffn_kit_t *kit, cuda_address_t address);
void ffn_kit_write(ffn_kit_t *kit, cuda_address_t to, const void *from, uint64_t bytes);
void ffn_kit_read(ffn_kit_t *kit, cuda_address_t from, void *to, uint64_t bytes);
void ffn_kit_set(ffn_kit_t *kit, cuda_address_t to, uint8_t value, uint64_t bytes);
/* Waits for everything queued, at most 20 s. */
void ffn_kit_wait(ffn_kit_t *kit, cuda_stream_t stream);
void ffn_kit_fill(ffn_kit_t *kit, cuda_address_t to, uint64_t count, uint64_t seed, float scale,
                  ffn_cuda_dtype_t dtype);
/* Milliseconds between the two events. */
double ffn_kit_elapsed(ffn_kit_t *kit);

void ffn_kit_model_make(ffn_kit_t *kit, const ffn_cuda_signature_t *signature, uint32_t layers,
                        uint64_t seed, bool bias, ffn_kit_model_t *model_out);
void ffn_kit_model_free(ffn_kit_t *kit, ffn_kit_model_t *model);

/* output[hidden] of one row of the input that ffn_kit_fill(input, ..., seed, 1) made: FP32 weights
 * and activations, sums in double. Returns false when the choice of experts hangs on the last bits
 * of a logit, so that no comparison is fair. */
bool ffn_kit_reference(const ffn_kit_model_t *model, uint32_t layer, uint64_t input_seed,
                       uint32_t row, float *output);
/* The experts that the reference chooses for that row. */
void ffn_kit_chosen(const ffn_kit_model_t *model, uint32_t layer, uint64_t input_seed, uint32_t row,
                    uint32_t *chosen_out);
/* |got - want| / |want| over a row. */
double ffn_kit_error(const float *got, const float *want, uint32_t count);
float ffn_kit_to_float(uint16_t value, ffn_cuda_dtype_t dtype);
/* One row of a results file, as a line of JSON on stdout. floor NAN, target NULL: none. */
void ffn_kit_row(const char *metric, double value, const char *unit, double floor,
                 const char *target, const char *note);
#endif
