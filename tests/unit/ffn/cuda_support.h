/* SPDX-License-Identifier: MIT */
/*
 * The CUDA runtime over the fake driver: its kernels as functions on the host, over the very tables
 * that the device would read. So a wrong address, width or order of a table shows as a wrong
 * result. A layer is computed in float, a row at a time, in the order of its parts.
 */
#ifndef XPOOL_TESTS_FFN_CUDA_SUPPORT_H
#define XPOOL_TESTS_FFN_CUDA_SUPPORT_H

#include <pthread.h>

#include "support.h"

#include "../cuda/fake_driver.h"
#include "base/clock.h"
#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/kernels.h"
#include "ffn/cuda/usage.h"
#include "ffn/cuda_layout.h"
#include "ffn/cuda_runtime.h"
#include "ffn/dummy.h"
#include "ffn/route.h"
#include "kernels/kernels.h"

CUDA_IMAGE_DECLARE(ffn_dispatch);

/* A build without nvcc has no device code to load, which the loader refuses. */
#define SKIP_WITHOUT_DEVICE_CODE()                                                                 \
    do {                                                                                           \
        if (cuda_image_ffn_dispatch.begin == cuda_image_ffn_dispatch.end)                          \
            skip();                                                                                \
    } while (0)

/* ---- arithmetic ------------------------------------------------------------------------------
 */
static inline float fake_load(const void *at, uint64_t i, uint32_t dtype)
{
    float value;
    const xp_dtype_t plain = cuda_dtype_plain(dtype);
    const size_t bytes = xp_dtype_row_bytes(plain, 1);
    kernels_convert(plain, (const uint8_t *)at + i * bytes, XP_DTYPE_F32, &value, 1);
    return value;
}

/* Of row `first / count` of a matrix of `count` columns. */
static inline float fake_dot(const void *matrix, uint64_t first, uint32_t dtype, const float *x,
                             uint32_t count)
{
    static __thread float row[8192];
    const xp_dtype_t plain = cuda_dtype_plain(dtype);
    double sum = 0;
    assert_true(count <= sizeof(row) / sizeof(row[0]));
    kernels_convert(plain, (const uint8_t *)matrix + first * xp_dtype_row_bytes(plain, 1),
                    XP_DTYPE_F32, row, count);
    for (uint32_t k = 0; k < count; k++)
        sum += (double)row[k] * x[k];
    return (float)sum;
}

static inline void fake_part(const ffn_cuda_signature_t *s, const ffn_cuda_part_t *part,
                             uint32_t width, const float *x, float weight, float *out)
{
    float *act = calloc(width, sizeof(*act));
    for (uint32_t i = 0; i < width; i++) {
        const float gate = fake_dot(part->gate, (uint64_t)i * s->hidden, s->dtype, x, s->hidden);
        const float up = fake_dot(part->up, (uint64_t)i * s->hidden, s->dtype, x, s->hidden);
        act[i] = (float)reference_activation((model_activation_t)s->activation, gate) * up;
    }
    for (uint32_t h = 0; h < s->hidden; h++)
        out[h] += weight * fake_dot(part->down, (uint64_t)h * width, s->dtype, act, width);
    free(act);
}

/* The whole layer of a Lane, from the tables alone. */
static inline void fake_layer(const ffn_cuda_lane_t *lane)
{
    const ffn_cuda_layer_t *layer = lane->layers + lane->layer;
    const ffn_cuda_signature_t *s = layer->signature;
    float *x = calloc(s->hidden, sizeof(*x)), *out = calloc(s->hidden, sizeof(*out));
    uint32_t rows_of[MODEL_MAX_EXPERTS] = {0}, distinct = 0;
    for (uint32_t row = 0; row < lane->rows; row++) {
        for (uint32_t k = 0; k < s->hidden; k++) {
            x[k] = fake_load(lane->input, (uint64_t)row * s->hidden + k, s->dtype);
            out[k] = 0;
        }
        if (s->experts == 0)
            fake_part(s, layer->parts, s->intermediate, x, 1, out);
        else {
            float logits[MODEL_MAX_EXPERTS], weights[MODEL_MAX_TOP_K];
            uint32_t chosen[MODEL_MAX_TOP_K];
            const model_ffn_t rule = {.kind = MODEL_FFN_MOE,
                                      .experts = s->experts,
                                      .top_k = s->top_k,
                                      .router = (model_router_t)s->router,
                                      .normalize_top_k = s->normalize,
                                      .routed_scale = s->routed_scale,
                                      .groups = s->groups,
                                      .top_groups = s->top_groups};
            for (uint32_t e = 0; e < s->experts; e++)
                logits[e] =
                    fake_dot(layer->router, (uint64_t)e * s->hidden, s->router_dtype, x, s->hidden);
            ffn_route_row(&rule, logits, layer->bias, chosen, weights);
            for (uint32_t i = 0; i < s->top_k; i++) {
                rows_of[chosen[i]]++;
                fake_part(s, &layer->parts[chosen[i]], s->intermediate, x, weights[i], out);
            }
            if (s->shared_intermediate)
                fake_part(s, &layer->parts[s->experts], s->shared_intermediate, x, 1, out);
        }
        const uint64_t at = (uint64_t)row * s->hidden;
        if (lane->output)
            kernels_convert(XP_DTYPE_F32, out, cuda_dtype_plain(s->dtype),
                            (uint16_t *)lane->output + at, s->hidden);
        else
            memcpy(lane->partial + at, out, s->hidden * sizeof(*out));
    }
    assert_true((layer->usage != NULL) == (s->experts != 0));
    for (uint32_t e = 0; e < s->experts; e++) {
        distinct += rows_of[e] != 0;
        ffn_cuda_usage_expert(layer->usage, e, rows_of[e]);
    }
    ffn_cuda_usage_execution(layer->usage, lane->rows, distinct);
    free(x);
    free(out);
}

/* ---- kernels ---------------------------------------------------------------------------------
 */
#define FAKE_ARGUMENT(type, launch, i)                                                             \
    ({                                                                                             \
        type fake_value_;                                                                          \
        memcpy(&fake_value_, (launch)->values[i], sizeof(fake_value_));                            \
        fake_value_;                                                                               \
    })

static uint32_t fake_decodes, fake_bulks, fake_pieces, fake_fews;
static const void *fake_products; /* where the latest bulk layer had its sums */
static bool fake_device_breaks;   /* launches of decode end the context */

/* The device's clock: it counts from 1970 on a GPU, which is more than 56 bits. */
static uint64_t fake_clock_ns(void)
{
    return xp_monotonic_ns() + 1790000000000000000u;
}

static void fake_run_nothing(const fake_launch_t *launch)
{
    (void)launch;
}
static void fake_run_decode(const fake_launch_t *launch)
{
    const ffn_cuda_lane_t *lane = FAKE_ARGUMENT(const ffn_cuda_lane_t *, launch, 0);
    assert_true(lane->rows <= ffn_cuda_decode_rows(lane->layers[lane->layer].signature));
    fake_decodes++;
    fake_layer(lane);
}
/* The last launch of a bulk layer does all of it. */
static void fake_run_bulk_reduce(const fake_launch_t *launch)
{
    const ffn_cuda_lane_t *lane = FAKE_ARGUMENT(const ffn_cuda_lane_t *, launch, 0);
    assert_true(lane->rows <= lane->workspace.bulk_rows);
    assert_true(lane->rows <= launch->blocks);
    fake_bulks++;
    fake_products = lane->workspace.products;
    fake_layer(lane);
}
/* Products of few rows; the launch that sums does all of it. */
static void fake_run_few(const fake_launch_t *launch)
{
    const ffn_cuda_lane_t *lane = FAKE_ARGUMENT(const ffn_cuda_lane_t *, launch, 0);
    assert_true(lane->rows <= ffn_cuda_few_rows(lane->layers[lane->layer].signature));
    fake_fews += FAKE_ARGUMENT(uint32_t, launch, 1);
}
static void fake_run_gather(const fake_launch_t *launch)
{
    const ffn_cuda_lane_t *lane = FAKE_ARGUMENT(const ffn_cuda_lane_t *, launch, 0);
    const ffn_cuda_answer_t *answer = FAKE_ARGUMENT(const ffn_cuda_answer_t *, launch, 1);
    FAKE_ARGUMENT(ffn_cuda_run_t *, launch, 2)->began_ns = fake_clock_ns();
    for (uint32_t i = 0; i < answer->source_count; i++) {
        const ffn_cuda_slice_t slice = ffn_cuda_source_slice(lane, &answer->sources[i]);
        memcpy(slice.to, slice.from, slice.bytes);
    }
}
static void fake_run_piece(const fake_launch_t *launch)
{
    fake_pieces++;
    ffn_cuda_piece_set(FAKE_ARGUMENT(const ffn_cuda_lane_t *, launch, 0),
                       FAKE_ARGUMENT(ffn_cuda_lane_t *, launch, 1),
                       FAKE_ARGUMENT(uint32_t, launch, 2), FAKE_ARGUMENT(uint32_t, launch, 3));
}
static void fake_run_publish(const fake_launch_t *launch)
{
    const ffn_cuda_publishing_t p = FAKE_ARGUMENT(ffn_cuda_publishing_t, launch, 0);
    for (uint32_t i = 0; i < p.answer->consumer_count; i++) {
        const ffn_cuda_slice_t slice = ffn_cuda_consumer_slice(p.lane, &p.answer->consumers[i]);
        if (slice.bytes)
            memcpy(slice.to, slice.from, slice.bytes);
    }
    ffn_cuda_publish_words(&p, fake_clock_ns());
}
/* Of the library's products of gate and up, into gate's. */
static void fake_run_activate(const fake_launch_t *launch)
{
    uint16_t *gate = FAKE_ARGUMENT(uint16_t *, launch, 0);
    const uint16_t *up = FAKE_ARGUMENT(const uint16_t *, launch, 1);
    const uint64_t elements = FAKE_ARGUMENT(uint64_t, launch, 2);
    const uint32_t dtype = FAKE_ARGUMENT(uint32_t, launch, 3);
    const uint32_t activation = FAKE_ARGUMENT(uint32_t, launch, 4);
    for (uint64_t i = 0; i < elements; i++) {
        const float value =
            (float)reference_activation((model_activation_t)activation, fake_load(gate, i, dtype)) *
            fake_load(up, i, dtype);
        kernels_convert(XP_DTYPE_F32, &value, cuda_dtype_plain(dtype), gate + i, 1);
    }
}
static void fake_run_fill(const fake_launch_t *launch)
{
    uint8_t *to = FAKE_ARGUMENT(uint8_t *, launch, 0);
    const xp_dtype_t dtype = cuda_dtype_plain(FAKE_ARGUMENT(uint32_t, launch, 1));
    const uint32_t padded = FAKE_ARGUMENT(uint32_t, launch, 2);
    const uint32_t pitch = FAKE_ARGUMENT(uint32_t, launch, 3);
    const uint32_t rows = FAKE_ARGUMENT(uint32_t, launch, 4);
    const uint32_t columns = FAKE_ARGUMENT(uint32_t, launch, 5);
    const uint64_t first_row = FAKE_ARGUMENT(uint64_t, launch, 6);
    const uint64_t first_column = FAKE_ARGUMENT(uint64_t, launch, 7);
    const uint64_t whole = FAKE_ARGUMENT(uint64_t, launch, 8);
    const uint64_t seed = FAKE_ARGUMENT(uint64_t, launch, 9);
    const float scale = FAKE_ARGUMENT(float, launch, 10);
    const size_t bytes = xp_dtype_row_bytes(dtype, 1);
    for (uint64_t r = 0; r < padded; r++)
        for (uint64_t c = 0; c < pitch; c++) {
            const uint64_t element = (first_row + r) * whole + first_column + c;
            const float value =
                r < rows && c < columns ? ffn_dummy_value(seed, element, scale) : 0.0f;
            kernels_convert(XP_DTYPE_F32, &value, dtype, to + (r * pitch + c) * bytes, 1);
        }
}
static void fake_run_digest(const fake_launch_t *launch)
{
    const uint64_t *words = FAKE_ARGUMENT(const uint64_t *, launch, 0);
    const uint64_t count = FAKE_ARGUMENT(uint64_t, launch, 1);
    const uint64_t first = FAKE_ARGUMENT(uint64_t, launch, 2);
    uint64_t *sum = FAKE_ARGUMENT(uint64_t *, launch, 3);
    for (uint64_t i = 0; i < count; i++)
        *sum += ffn_dummy_mix(words[i] ^ ffn_dummy_mix(first + i + 1));
}
static void fake_run_clock(const fake_launch_t *launch)
{
    *FAKE_ARGUMENT(uint64_t *, launch, 0) = fake_clock_ns();
}

static uint32_t fake_decoding; /* not 0: launches of decode are still under way */
static uint32_t fake_stuck;    /* launches of the resident kernel beside it */

/* ---- the resident kernel: it runs whenever the host looks whether it still does ---------------
 */
static struct fake_resident {
    pthread_mutex_t lock;
    ffn_cuda_queue_t *queue; /* NULL: it is not there */
    uint64_t sequence;
    uint32_t cuts;        /* executed */
    bool few;             /* which one it is */
    uint32_t commands[2]; /* executed, by the decode kernel and that of few rows */
} fake_resident = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Without a queue: one Lane's layer. */
static void fake_run_one_or_resident(const fake_launch_t *launch)
{
    if (!FAKE_ARGUMENT(ffn_cuda_queue_t *, launch, 1)) {
        fake_run_decode(launch);
        return;
    }
    /* All multiprocessors are the kernel's: what decodes would wait for it, and it for nobody. */
    fake_stuck += __atomic_load_n(&fake_decoding, __ATOMIC_ACQUIRE);
    pthread_mutex_lock(&fake_resident.lock);
    fake_resident.queue = FAKE_ARGUMENT(ffn_cuda_queue_t *, launch, 1);
    fake_resident.sequence = 1;
    fake_resident.cuts = 0;
    fake_resident.few = false;
    pthread_mutex_unlock(&fake_resident.lock);
}

static void fake_run_few_resident(const fake_launch_t *launch)
{
    fake_stuck += __atomic_load_n(&fake_decoding, __ATOMIC_ACQUIRE);
    pthread_mutex_lock(&fake_resident.lock);
    fake_resident.queue = FAKE_ARGUMENT(ffn_cuda_queue_t *, launch, 0);
    fake_resident.sequence = 1;
    fake_resident.cuts = 0;
    fake_resident.few = true;
    pthread_mutex_unlock(&fake_resident.lock);
}

static void fake_resident_command(ffn_cuda_queue_t *queue, const ffn_cuda_command_t *command)
{
    ffn_cuda_record_t record;
    const uint64_t began = fake_clock_ns();
    const uint32_t rows = command->lane->rows;
    assert_true(fake_resident.few ? rows > FFN_CUDA_DENSE_ROWS && rows <= FEW_ROWS_MOST
                                  : rows <= FFN_CUDA_DENSE_ROWS);
    fake_resident.commands[fake_resident.few]++;
    fake_layer(command->lane);
    if (command < queue->cuts)
        __atomic_store_n(&queue->answered, fake_resident.sequence, __ATOMIC_RELEASE);
    else
        __atomic_store_n(&queue->cuts_answered, fake_resident.cuts, __ATOMIC_RELEASE);
    if (command->answer)
        PROTOCOL_PUBLISH(command->answer, command->answer_value);
    ffn_cuda_record_begin(command->about, command->lane->rows, &record);
    record.resident = 1;
    record.lane = record.graph_template = FFN_CUDA_NO_LANE;
    record.end_ns = fake_clock_ns();
    record.duration_ns = record.end_ns - began;
    if (command->done)
        PROTOCOL_PUBLISH(command->done, command->done_value);
    if (queue->counters)
        ffn_cuda_record_end(queue->counters, &record);
}

/* Whether it still runs; executes what is queued, leaves when told to. */
static bool fake_resident_turn(void)
{
    pthread_mutex_lock(&fake_resident.lock);
    ffn_cuda_queue_t *queue = fake_resident.queue;
    while (queue) {
        ffn_cuda_command_t *entry =
            &queue->entries[(fake_resident.sequence - 1) % FFN_CUDA_QUEUE_ENTRIES];
        ffn_cuda_command_t *cut = &queue->cuts[fake_resident.cuts % FFN_CUDA_QUEUE_ENTRIES];
        uint64_t seen = PROTOCOL_LOAD_ACQUIRE(&entry->sequence);
        uint64_t word = PROTOCOL_LOAD_ACQUIRE(&cut->sequence);
        const uint64_t sequence = fake_resident.sequence, number = fake_resident.cuts + 1;
        /* In the middle of the command, or after the one before it. */
        if ((seen == sequence && word == FFN_CUDA_CUT_WORD(number, sequence)) ||
            (sequence > 1 && word == FFN_CUDA_CUT_WORD(number, sequence - 1))) {
            assert_true(queue->aside != NULL);
            fake_resident.cuts++;
            fake_resident_command(queue, cut);
        } else if (seen == fake_resident.sequence) {
            assert_true(entry->cuts <= fake_resident.cuts);
            fake_resident_command(queue, entry);
            fake_resident.sequence++;
        } else if (__atomic_load_n(&queue->stop, __ATOMIC_ACQUIRE)) {
            if (seen != FFN_CUDA_QUEUE_LEFT)
                PROTOCOL_CAS(&entry->sequence, &seen, FFN_CUDA_QUEUE_LEFT);
            else if (PROTOCOL_CAS(&cut->sequence, &word, FFN_CUDA_QUEUE_LEFT))
                queue = fake_resident.queue = NULL;
        } else {
            break;
        }
    }
    const bool runs = queue != NULL;
    pthread_mutex_unlock(&fake_resident.lock);
    return runs;
}

/* Streams in the order in which create makes them: decode's is the second, the resident kernel's
 * the fourth. */
static bool fake_busy(cuda_stream_t stream)
{
    if (stream == &fake.stream[1])
        return __atomic_load_n(&fake_decoding, __ATOMIC_ACQUIRE);
    return stream == &fake.stream[3] && fake_resident_turn();
}

static const fake_kernel_t fake_ffn_kernels[] = {
    {"ffn_decode", fake_run_one_or_resident, {8, 8, 4}},
    {"ffn_bulk_route_8", fake_run_nothing, {8}},
    {"ffn_bulk_route_16", fake_run_nothing, {8}},
    {"ffn_bulk_route_32", fake_run_nothing, {8}},
    {"ffn_bulk_plan", fake_run_nothing, {8, sizeof(ffn_cuda_map_t)}},
    {"ffn_bulk_reduce", fake_run_bulk_reduce, {8}},
    {"ffn_reduce", fake_run_nothing, {8}},
    {"ffn_activate", fake_run_activate, {8, 8, 8, 4, 4}},
    {"ffn_grouped_gate_bf16", fake_run_nothing, {8}},
    {"ffn_grouped_down_bf16", fake_run_nothing, {8}},
    {"ffn_grouped_gate_f16", fake_run_nothing, {8}},
    {"ffn_grouped_down_f16", fake_run_nothing, {8}},
    {"ffn_few_route", fake_run_nothing, {8}},
    {"ffn_few_bf16", fake_run_few, {8, 4}},
    {"ffn_few_f16", fake_run_few, {8, 4}},
    {"ffn_few_resident", fake_run_few_resident, {8}},
    {"ffn_gather", fake_run_gather, {8, 8, 8}},
    {"ffn_piece", fake_run_piece, {8, 8, 4, 4}},
    {"ffn_publish", fake_run_publish, {sizeof(ffn_cuda_publishing_t)}},
    {"ffn_fill", fake_run_fill, {8, 4, 4, 4, 4, 4, 8, 8, 8, 8, 4}},
    {"ffn_digest", fake_run_digest, {8, 8, 8, 8}},
    {"ffn_clock", fake_run_clock, {8}},
};

static inline void fake_ffn_reset(void)
{
    fake_reset(fake_ffn_kernels, sizeof(fake_ffn_kernels) / sizeof(fake_ffn_kernels[0]));
    fake.busy = fake_busy;
    fake_resident.queue = NULL;
    fake_resident.commands[0] = fake_resident.commands[1] = 0;
    fake_decodes = fake_bulks = fake_pieces = fake_fews = 0;
    fake_decoding = fake_stuck = 0;
    fake_device_breaks = false;
}

static inline void device_ok(cuda_device_t *device)
{
    if (cuda_device_open(&fake_driver, 0, device) != XP_OK)
        fail_msg("device: %s", xp_error_last()->text);
}

static inline fixture_t *family_of(model_architecture_t architecture, xp_dtype_t dtype)
{
    synth_options_t options;
    model_synth_defaults(architecture, &options);
    options.layers = 3;
    options.dtype = dtype;
    return fixture_synth(&options);
}
#endif
