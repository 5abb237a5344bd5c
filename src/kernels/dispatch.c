/* SPDX-License-Identifier: MIT */
/*
 * Chooses the kernels variant of this process and forwards the elementwise kernels to it.
 *
 * The choice is made once, before threads start; tests may switch between calls. Reads one
 * environment variable, XPOOL_KERNELS.
 */
#include "kernels/dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/quant.h"

static const char *const dispatch_names[KERNELS_VARIANT_COUNT] = {
    [KERNELS_PLAIN] = "plain",
    [KERNELS_AVX2] = "avx2",
    [KERNELS_AVX512] = "avx512",
};

/* NULL until the first selection. Atomic because a program that never selects meets its first use
 * on several threads at once; they all store the same address, and the tables are constant. */
static _Atomic(const kernels_ops_t *) dispatch_ops;

static const kernels_ops_t *dispatch_table(kernels_variant_t variant)
{
    switch (variant) {
#if defined(__x86_64__)
    case KERNELS_AVX2:
        return &kernels_ops_avx2;
    case KERNELS_AVX512:
        return &kernels_ops_avx512;
#endif
    default:
        return &kernels_ops_plain;
    }
}

const char *kernels_variant_name(kernels_variant_t variant)
{
    return (unsigned)variant < KERNELS_VARIANT_COUNT ? dispatch_names[variant] : "?";
}

#if defined(__x86_64__)
/* clang 14 does not know "f16c" in __builtin_cpu_supports(). */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

bool kernels_variant_supported(kernels_variant_t variant)
{
    switch (variant) {
    case KERNELS_PLAIN:
        return true;
#if defined(__x86_64__)
    case KERNELS_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case KERNELS_AVX512:
        return kernels_variant_supported(KERNELS_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
#endif
    default:
        return false;
    }
}

xp_status_t kernels_select_variant(kernels_variant_t variant)
{
    if (!kernels_variant_supported(variant))
        return xp_fail(XP_INVALID, "kernels variant %s is not supported by this processor",
                       kernels_variant_name(variant));
    atomic_store_explicit(&dispatch_ops, dispatch_table(variant), memory_order_relaxed);
    return XP_OK;
}

static kernels_variant_t dispatch_best(void)
{
    if (kernels_variant_supported(KERNELS_AVX512))
        return KERNELS_AVX512;
    return kernels_variant_supported(KERNELS_AVX2) ? KERNELS_AVX2 : KERNELS_PLAIN;
}

xp_status_t kernels_select(void)
{
    XP_TRY(kernels_select_variant(dispatch_best()));
    const char *wanted = getenv("XPOOL_KERNELS");
    if (!wanted || !*wanted)
        return XP_OK;
    for (unsigned v = 0; v < KERNELS_VARIANT_COUNT; v++)
        if (!strcmp(wanted, dispatch_names[v]))
            return kernels_select_variant((kernels_variant_t)v);
    return xp_fail(XP_INVALID, "XPOOL_KERNELS=%s: allowed are plain, avx2 and avx512", wanted);
}

const kernels_ops_t *kernels_ops_selected(void)
{
    const kernels_ops_t *ops = atomic_load_explicit(&dispatch_ops, memory_order_relaxed);
    if (__builtin_expect(ops != NULL, 1))
        return ops;
    ops = dispatch_table(dispatch_best());
    atomic_store_explicit(&dispatch_ops, ops, memory_order_relaxed);
    return ops;
}

kernels_variant_t kernels_selected(void)
{
    return kernels_ops_selected()->variant;
}

void kernels_dequantize_row(const kernels_matrix_t *w, uint32_t row, float *out)
{
    XP_ASSERT(row < w->rows);
    size_t row_bytes = xp_dtype_row_bytes(w->dtype, w->columns);
    const uint8_t *data = w->data;
    if (w->packed && row < w->rows / KERNELS_PANEL * KERNELS_PANEL)
        kernels_pack_decode_lane(w->dtype, data + row / KERNELS_PANEL * KERNELS_PANEL * row_bytes,
                                 0, w->columns, row % KERNELS_PANEL, out);
    else
        quant_decode_row(w->dtype, data + row * row_bytes, 0, w->columns, out);
}

static float dispatch_load(xp_dtype_t dtype, const uint8_t *in, size_t i)
{
    float value;
    if (dtype == XP_DTYPE_BF16)
        return quant_from_bf16(quant_load_u16(in + 2 * i));
    if (dtype == XP_DTYPE_F16)
        return quant_from_f16(quant_load_u16(in + 2 * i));
    memcpy(&value, in + 4 * i, sizeof(value));
    return value;
}

static void dispatch_store(xp_dtype_t dtype, uint8_t *out, size_t i, float value)
{
    if (dtype == XP_DTYPE_F32) {
        memcpy(out + 4 * i, &value, sizeof(value));
        return;
    }
    uint16_t half = dtype == XP_DTYPE_BF16 ? quant_to_bf16(value) : quant_to_f16(value);
    memcpy(out + 2 * i, &half, sizeof(half));
}

void kernels_convert(xp_dtype_t from, const void *in, xp_dtype_t to, void *out, size_t count)
{
    XP_ASSERT(from != XP_DTYPE_AUTO && !xp_dtype_is_quantized(from) && to != XP_DTYPE_AUTO &&
              !xp_dtype_is_quantized(to));
    if (from == to) {
        memmove(out, in, count * xp_dtype_block_bytes(from));
        return;
    }
    for (size_t i = 0; i < count; i++)
        dispatch_store(to, out, i, dispatch_load(from, in, i));
}

void kernels_silu_mul(const float *gate, const float *up, float *y, size_t count)
{
    kernels_ops_selected()->silu_mul(gate, up, y, count);
}

void kernels_gelu_tanh_mul(const float *gate, const float *up, float *y, size_t count)
{
    kernels_ops_selected()->gelu_tanh_mul(gate, up, y, count);
}

void kernels_rms_norm(const float *x, const float *weight, double epsilon, float *y, size_t count)
{
    kernels_ops_selected()->rms_norm(x, weight, epsilon, y, count);
}

void kernels_add(float *y, const float *x, size_t count)
{
    kernels_ops_selected()->add(y, x, count);
}

void kernels_axpy(float *y, float a, const float *x, size_t count)
{
    kernels_ops_selected()->axpy(y, a, x, count);
}

float kernels_dot(const float *a, const float *b, size_t count)
{
    return kernels_ops_selected()->dot(a, b, count);
}

void kernels_softmax(float *x, size_t count)
{
    kernels_ops_selected()->softmax(x, count);
}
