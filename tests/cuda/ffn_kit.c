/* SPDX-License-Identifier: MIT */
/* Helpers of the FFN's device tests; everything that can block has a limit. */
#include "ffn_kit.h"

#include <math.h>
#include <string.h>

#include "ffn/route.h"

CUDA_IMAGE_DECLARE(tests_ffn_device);

#define KIT_PINNED_BYTES ((uint64_t)16 << 20)
#define KIT_WAIT_NS      20000000000ull
#define KIT_TIE          2e-5f /* logits nearer than this may swap */

void ffn_kit_open(ffn_kit_t *kit, uint32_t blocks)
{
    static const char *const names[FFN_KIT_KERNELS] = {
        "test_fill",      "test_post",       "test_leave",     "test_stop",
        "test_read_bulk", "test_read_async", "test_read_load", "test_planted"};
    const cuda_driver_t *driver;
    memset(kit, 0, sizeof(*kit));
    if (cuda_driver_load(&driver) != XP_OK) {
        printf("skipped: %s\n", xp_error_last()->text);
        exit(FFN_KIT_SKIP);
    }
    CHECK_OK(cuda_device_open(driver, 0, &kit->device));
    xp_status_t status = ffn_cuda_kernels_load(&kit->device, blocks, &kit->kernels);
    if (status == XP_UNSUPPORTED) {
        printf("skipped: %s\n", xp_error_last()->text);
        exit(FFN_KIT_SKIP);
    }
    CHECK_OK(status);
    CHECK_OK(cuda_module_load(&kit->device, &cuda_image_tests_ffn_device, names, FFN_KIT_KERNELS,
                              &kit->module, kit->function));
    for (uint32_t i = FFN_KIT_READ_BULK; i <= FFN_KIT_READ_ASYNC; i++)
        CHECK_OK(CUDA_CALL(driver, cuFuncSetAttribute, kit->function[i],
                           CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, FFN_KIT_READ_SHARED));
    CHECK_OK(cuda_stream_create(&kit->device, false, &kit->stream));
    CHECK_OK(cuda_stream_create(&kit->device, true, &kit->side));
    CHECK_OK(cuda_event_create(&kit->device, true, &kit->start));
    CHECK_OK(cuda_event_create(&kit->device, true, &kit->end));
    CHECK_OK(cuda_host_alloc(&kit->device, KIT_PINNED_BYTES, &kit->pinned));
}

void ffn_kit_close(ffn_kit_t *kit)
{
    cuda_host_free(&kit->device, kit->pinned);
    cuda_event_destroy(&kit->device, kit->end);
    cuda_event_destroy(&kit->device, kit->start);
    cuda_stream_destroy(&kit->device, kit->side);
    cuda_stream_destroy(&kit->device, kit->stream);
    cuda_module_unload(&kit->module);
    ffn_cuda_kernels_unload(&kit->kernels);
    cuda_device_close(&kit->device);
}

void ffn_kit_wait(ffn_kit_t *kit, cuda_stream_t stream)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&kit->device, stream, &clock, xp_monotonic_ns() + KIT_WAIT_NS));
}

cuda_address_t ffn_kit_alloc(ffn_kit_t *kit, uint64_t bytes)
{
    cuda_address_t address;
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemAlloc, &address, bytes ? bytes : 256));
    ffn_kit_set(kit, address, 0, bytes ? bytes : 256);
    return address;
}

void ffn_kit_free(ffn_kit_t *kit, cuda_address_t address)
{
    if (address)
        CUDA_IGNORE(kit->device.driver, cuMemFree, address);
}

void ffn_kit_set(ffn_kit_t *kit, cuda_address_t to, uint8_t value, uint64_t bytes)
{
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemsetD8Async, to, value, bytes, kit->side));
    ffn_kit_wait(kit, kit->side);
}

void ffn_kit_write(ffn_kit_t *kit, cuda_address_t to, const void *from, uint64_t bytes)
{
    for (uint64_t done = 0, piece; done < bytes; done += piece) {
        piece = bytes - done < KIT_PINNED_BYTES ? bytes - done : KIT_PINNED_BYTES;
        memcpy(kit->pinned, (const char *)from + done, piece);
        CHECK_OK(CUDA_CALL(kit->device.driver, cuMemcpyHtoDAsync, to + done, kit->pinned, piece,
                           kit->side));
        ffn_kit_wait(kit, kit->side);
    }
}

void ffn_kit_read(ffn_kit_t *kit, cuda_address_t from, void *to, uint64_t bytes)
{
    for (uint64_t done = 0, piece; done < bytes; done += piece) {
        piece = bytes - done < KIT_PINNED_BYTES ? bytes - done : KIT_PINNED_BYTES;
        CHECK_OK(CUDA_CALL(kit->device.driver, cuMemcpyDtoHAsync, kit->pinned, from + done, piece,
                           kit->side));
        ffn_kit_wait(kit, kit->side);
        memcpy((char *)to + done, kit->pinned, piece);
    }
}

void ffn_kit_fill(ffn_kit_t *kit, cuda_address_t to, uint64_t count, uint64_t seed, float scale,
                  ffn_cuda_dtype_t dtype)
{
    uint32_t type = dtype;
    void *parameters[] = {&to, &count, &seed, &scale, &type};
    if (count == 0)
        return;
    CHECK_OK(CUDA_CALL(kit->device.driver, cuLaunchKernel, kit->function[FFN_KIT_FILL], 1024, 1, 1,
                       256, 1, 1, 0, kit->side, parameters, NULL));
    ffn_kit_wait(kit, kit->side);
}

double ffn_kit_elapsed(ffn_kit_t *kit)
{
    float milliseconds;
    CHECK_OK(
        CUDA_CALL(kit->device.driver, cuEventElapsedTime, &milliseconds, kit->start, kit->end));
    return milliseconds;
}

/* ---- models ------------------------------------------------------------------------------------
 */
static uint32_t kit_part_width(const ffn_cuda_signature_t *s, uint32_t part)
{
    return s->experts && part == s->experts ? s->shared_intermediate : s->intermediate;
}

static uint64_t kit_matrix_seed(const ffn_kit_model_t *model, uint32_t layer, uint32_t part,
                                uint32_t which)
{
    return model->seed + ((uint64_t)layer * 1024 + part) * 8 + which;
}

/* Rows of unit-variance inputs give outputs of about unit size. */
static float kit_scale(uint32_t inner)
{
    return 2.5f / sqrtf((float)inner);
}

void ffn_kit_model_make(ffn_kit_t *kit, const ffn_cuda_signature_t *signature, uint32_t layers,
                        uint64_t seed, bool bias, ffn_kit_model_t *model_out)
{
    const ffn_cuda_signature_t *s = signature;
    ffn_kit_model_t m = {.signature = *s, .layers = layers, .seed = seed, .bias = bias};
    CHECK_OK(ffn_cuda_signature_check(s));
    m.parts = s->experts ? s->experts + (s->shared_intermediate != 0) : 1;
    uint64_t bytes = 0; /* of a layer */
    for (uint32_t p = 0; p < m.parts; p++)
        bytes += (uint64_t)3 * s->hidden * kit_part_width(s, p) * 2;
    m.weights = ffn_kit_alloc(kit, bytes * layers);
    const uint64_t router_bytes =
        (uint64_t)s->experts * s->hidden * (s->router_dtype == FFN_CUDA_F32 ? 4 : 2);
    m.routers = ffn_kit_alloc(kit, router_bytes * layers);
    m.biases = ffn_kit_alloc(kit, (uint64_t)s->experts * 4 * layers);
    const uint64_t usage_bytes = ffn_cuda_usage_bytes(s->experts);
    m.usage = ffn_kit_alloc(kit, usage_bytes * layers);
    m.signature_at = ffn_kit_alloc(kit, sizeof(*s));
    m.layer_at = ffn_kit_alloc(kit, layers * sizeof(ffn_cuda_layer_t));
    m.part_at = ffn_kit_alloc(kit, (uint64_t)layers * m.parts * sizeof(ffn_cuda_part_t));
    m.part = calloc((size_t)layers * m.parts, sizeof(*m.part));
    ffn_cuda_layer_t *table = calloc(layers, sizeof(*table));
    CHECK(m.part && table);
    cuda_address_t at = m.weights;
    for (uint32_t l = 0; l < layers; l++) {
        for (uint32_t p = 0; p < m.parts; p++) {
            const uint64_t width = kit_part_width(s, p), count = width * s->hidden;
            const void **into[3] = {(const void **)&m.part[l * m.parts + p].gate,
                                    (const void **)&m.part[l * m.parts + p].up,
                                    (const void **)&m.part[l * m.parts + p].down};
            for (uint32_t i = 0; i < 3; i++, at += count * 2) {
                *into[i] = (void *)(uintptr_t)at;
                ffn_kit_fill(kit, at, count, kit_matrix_seed(&m, l, p, i),
                             kit_scale(i == 2 ? (uint32_t)width : s->hidden),
                             (ffn_cuda_dtype_t)s->dtype);
            }
        }
        ffn_kit_fill(kit, m.routers + l * router_bytes, (uint64_t)s->experts * s->hidden,
                     kit_matrix_seed(&m, l, 1000, 3), kit_scale(s->hidden),
                     (ffn_cuda_dtype_t)s->router_dtype);
        ffn_kit_fill(kit, m.biases + (uint64_t)l * s->experts * 4, s->experts,
                     kit_matrix_seed(&m, l, 1000, 4), 0.2f, FFN_CUDA_F32);
        table[l] = (ffn_cuda_layer_t){
            .signature = (void *)(uintptr_t)m.signature_at,
            .parts = (const ffn_cuda_part_t *)(uintptr_t)m.part_at + (size_t)l * m.parts,
            .router = (void *)(uintptr_t)(m.routers + l * router_bytes),
            .bias = bias ? (const float *)(uintptr_t)m.biases + (size_t)l * s->experts : NULL,
            .next = (l + 1) % layers,
            .usage =
                usage_bytes ? (ffn_cuda_usage_t *)(uintptr_t)(m.usage + l * usage_bytes) : NULL,
        };
    }
    ffn_kit_write(kit, m.signature_at, s, sizeof(*s));
    ffn_kit_write(kit, m.layer_at, table, layers * sizeof(*table));
    ffn_kit_write(kit, m.part_at, m.part, (uint64_t)layers * m.parts * sizeof(*m.part));
    free(table);
    *model_out = m;
}

void ffn_kit_model_free(ffn_kit_t *kit, ffn_kit_model_t *m)
{
    const cuda_address_t all[] = {m->weights,  m->routers, m->biases, m->signature_at,
                                  m->layer_at, m->part_at, m->usage};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        ffn_kit_free(kit, all[i]);
    free(m->part);
    *m = (ffn_kit_model_t){0};
}

/* ---- reference ---------------------------------------------------------------------------------
 */
float ffn_kit_to_float(uint16_t value, ffn_cuda_dtype_t dtype)
{
    union {
        uint32_t bits;
        float value;
    } wide = {.bits = (uint32_t)value << 16};
    if (dtype == FFN_CUDA_BF16)
        return wide.value;
    _Float16 half;
    memcpy(&half, &value, 2);
    return (float)half;
}

/* As the device rounds it. */
static float kit_rounded(float value, uint32_t dtype)
{
    union {
        float value;
        uint32_t bits;
    } wide = {.value = value};
    if (dtype == FFN_CUDA_F32)
        return value;
    if (dtype == FFN_CUDA_F16)
        return (float)(_Float16)value;
    wide.bits += 0x7fff + (wide.bits >> 16 & 1);
    wide.bits &= 0xffff0000u;
    return wide.value;
}

static double kit_dot(const float *x, uint32_t count, uint64_t seed, uint64_t row, float scale,
                      uint32_t dtype)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += (double)x[i] * kit_rounded(ffn_kit_value(seed, row * count + i) * scale, dtype);
    return sum;
}

static void kit_part(const ffn_kit_model_t *m, uint32_t layer, uint32_t part, const float *x,
                     float weight, double *output)
{
    const ffn_cuda_signature_t *s = &m->signature;
    const uint32_t width = kit_part_width(s, part);
    float *act = malloc(width * sizeof(*act));
    CHECK(act);
    for (uint32_t i = 0; i < width; i++) {
        const double gate = kit_dot(x, s->hidden, kit_matrix_seed(m, layer, part, 0), i,
                                    kit_scale(s->hidden), s->dtype);
        const double up = kit_dot(x, s->hidden, kit_matrix_seed(m, layer, part, 1), i,
                                  kit_scale(s->hidden), s->dtype);
        const double inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate);
        act[i] = (float)(s->activation ? 0.5 * gate * (1 + tanh(inner)) * up
                                       : gate / (1 + exp(-gate)) * up);
    }
    for (uint32_t h = 0; h < s->hidden; h++)
        output[h] += weight * kit_dot(act, width, kit_matrix_seed(m, layer, part, 2), h,
                                      kit_scale(width), s->dtype);
    free(act);
}

static int kit_compare(const void *a, const void *b)
{
    const uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

/* Chosen experts ascending, with weights; false when a small change of the logits changes the set.
 */
static bool kit_route(const ffn_kit_model_t *m, uint32_t layer, const float *x, uint32_t *chosen,
                      float *weights)
{
    const ffn_cuda_signature_t *s = &m->signature;
    const model_ffn_t rule = {
        .kind = MODEL_FFN_MOE,
        .experts = s->experts,
        .top_k = s->top_k,
        .router = s->router ? MODEL_ROUTER_SIGMOID : MODEL_ROUTER_SOFTMAX,
        .normalize_top_k = s->normalize,
        .routed_scale = s->routed_scale,
        .correction_bias = m->bias,
        .groups = s->groups,
        .top_groups = s->top_groups,
    };
    float logits[FFN_CUDA_MAX_EXPERTS], work[FFN_CUDA_MAX_EXPERTS], bias[FFN_CUDA_MAX_EXPERTS];
    uint32_t sorted[FFN_CUDA_MAX_TOP_K], other[FFN_CUDA_MAX_TOP_K];
    float unused[FFN_CUDA_MAX_TOP_K];
    CHECK_OK(ffn_route_check(&rule));
    for (uint32_t e = 0; e < s->experts; e++) {
        logits[e] = (float)kit_dot(x, s->hidden, kit_matrix_seed(m, layer, 1000, 3), e,
                                   kit_scale(s->hidden), s->router_dtype);
        bias[e] = ffn_kit_value(kit_matrix_seed(m, layer, 1000, 4), e) * 0.2f;
    }
    memcpy(work, logits, sizeof(work));
    ffn_route_row(&rule, work, m->bias ? bias : NULL, chosen, weights);
    memcpy(sorted, chosen, s->top_k * sizeof(*sorted));
    qsort(sorted, s->top_k, sizeof(*sorted), kit_compare);
    bool fair = true;
    for (uint32_t trial = 0; trial < 16; trial++) {
        for (uint32_t e = 0; e < s->experts; e++)
            work[e] = logits[e] + KIT_TIE * ffn_kit_value(trial + 77, e);
        ffn_route_row(&rule, work, m->bias ? bias : NULL, other, unused);
        qsort(other, s->top_k, sizeof(*other), kit_compare);
        fair = fair && memcmp(other, sorted, s->top_k * sizeof(*other)) == 0;
    }
    return fair;
}

static float *kit_input(const ffn_kit_model_t *m, uint64_t seed, uint32_t row)
{
    const ffn_cuda_signature_t *s = &m->signature;
    float *x = malloc(s->hidden * sizeof(*x));
    CHECK(x);
    for (uint32_t i = 0; i < s->hidden; i++)
        x[i] = kit_rounded(ffn_kit_value(seed, (uint64_t)row * s->hidden + i), s->dtype);
    return x;
}

bool ffn_kit_reference(const ffn_kit_model_t *m, uint32_t layer, uint64_t input_seed, uint32_t row,
                       float *output)
{
    const ffn_cuda_signature_t *s = &m->signature;
    uint32_t chosen[FFN_CUDA_MAX_TOP_K];
    float weights[FFN_CUDA_MAX_TOP_K];
    float *x = kit_input(m, input_seed, row);
    double *sum = calloc(s->hidden, sizeof(*sum));
    bool fair = true;
    CHECK(sum);
    if (s->experts) {
        fair = kit_route(m, layer, x, chosen, weights);
        for (uint32_t i = 0; i < s->top_k && fair; i++)
            kit_part(m, layer, chosen[i], x, weights[i], sum);
    }
    if (fair && m->parts > s->experts)
        kit_part(m, layer, s->experts, x, 1.0f, sum);
    for (uint32_t h = 0; h < s->hidden; h++)
        output[h] = (float)sum[h];
    free(sum);
    free(x);
    return fair;
}

void ffn_kit_chosen(const ffn_kit_model_t *m, uint32_t layer, uint64_t input_seed, uint32_t row,
                    uint32_t *chosen_out)
{
    float weights[FFN_CUDA_MAX_TOP_K];
    float *x = kit_input(m, input_seed, row);
    kit_route(m, layer, x, chosen_out, weights);
    free(x);
}

double ffn_kit_error(const float *got, const float *want, uint32_t count)
{
    double difference = 0, size = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!isfinite(got[i]))
            return INFINITY;
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
    }
    return size > 0 ? sqrt(difference / size) : (difference > 0 ? INFINITY : 0);
}

void ffn_kit_row(const char *metric, double value, const char *unit, double floor,
                 const char *target, const char *note)
{
    char floor_text[32] = "null";
    if (!isnan(floor))
        snprintf(floor_text, sizeof(floor_text), "%.4f", floor);
    printf("{\"metric\": \"%s\", \"value\": %.4f, \"unit\": \"%s\", \"floor\": %s, \"peer\": "
           "null, \"target\": %s%s%s, \"note\": \"%s\"}\n",
           metric, value, unit, floor_text, target ? "\"" : "", target ? target : "null",
           target ? "\"" : "", note);
}
