/* SPDX-License-Identifier: MIT */
/*
 * The plain C variant: correct everywhere, fast nowhere in particular.
 *
 * Pure functions, any thread. The inner loops run over the 16 lanes of a panel, so that a compiler
 * can use whatever vectors the target has.
 */
#include <math.h>

#include "kernels/ops.h"

static void plain_decode(xp_dtype_t dtype, const uint8_t *panel, uint32_t k0, uint32_t count,
                         float *tile, size_t stride, size_t ahead)
{
    (void)ahead;
    float values[KERNELS_K_BLOCK];
    for (uint32_t lane = 0; lane < KERNELS_PANEL; lane++) {
        kernels_pack_decode_lane(dtype, panel, k0, count, lane, values);
        for (uint32_t k = 0; k < count; k++)
            tile[k * stride + lane] = values[k];
    }
}

static void plain_micro(uint32_t rows, uint32_t panels, uint32_t k, const float *x,
                        const float *tile, float *c, size_t c_stride, bool accumulate)
{
    (void)panels; /* micro_panels is 1 */
    for (uint32_t r = 0; r < rows; r++) {
        const float *x_row = x + (size_t)r * KERNELS_X_STRIDE;
        float sum[KERNELS_PANEL] = {0};
        for (uint32_t i = 0; i < k; i++)
            for (uint32_t lane = 0; lane < KERNELS_PANEL; lane++)
                sum[lane] += x_row[i] * tile[i * KERNELS_PANEL + lane];
        float *out = c + r * c_stride;
        for (uint32_t lane = 0; lane < KERNELS_PANEL; lane++)
            out[lane] = accumulate ? out[lane] + sum[lane] : sum[lane];
    }
}

static void plain_silu_mul(const float *gate, const float *up, float *y, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void plain_gelu_tanh_mul(const float *gate, const float *up, float *y, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float x = gate[i];
        float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        y[i] = 0.5f * x * (1.0f + tanhf(inner)) * up[i];
    }
}

static void plain_rms_norm(const float *x, const float *weight, double epsilon, float *y,
                           size_t count)
{
    double sum = 0.0;
    for (size_t i = 0; i < count; i++)
        sum += (double)x[i] * (double)x[i];
    float scale = (float)(1.0 / sqrt(sum / (double)count + epsilon));
    for (size_t i = 0; i < count; i++)
        y[i] = x[i] * scale * weight[i];
}

static void plain_add(float *y, const float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] += x[i];
}

static void plain_axpy(float *y, float a, const float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] += a * x[i];
}

static float plain_dot(const float *a, const float *b, size_t count)
{
    float lanes[16] = {0};
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (size_t lane = 0; lane < 16; lane++)
            lanes[lane] += a[i + lane] * b[i + lane];
    for (size_t lane = 0; i < count; i++, lane++)
        lanes[lane] += a[i] * b[i];
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static void plain_softmax(float *x, size_t count)
{
    if (count == 0)
        return;
    float largest = x[0];
    for (size_t i = 1; i < count; i++)
        largest = x[i] > largest ? x[i] : largest;
    double sum = 0.0;
    for (size_t i = 0; i < count; i++) {
        x[i] = expf(x[i] - largest);
        sum += (double)x[i];
    }
    float scale = (float)(1.0 / sum);
    for (size_t i = 0; i < count; i++)
        x[i] *= scale;
}

const kernels_ops_t kernels_ops_plain = {
    .variant = KERNELS_PLAIN,
    .decode = plain_decode,
    .micro = plain_micro,
    .micro_rows = 4,
    .micro_panels = 1,
    .direct = NULL,
    .silu_mul = plain_silu_mul,
    .gelu_tanh_mul = plain_gelu_tanh_mul,
    .rms_norm = plain_rms_norm,
    .add = plain_add,
    .axpy = plain_axpy,
    .dot = plain_dot,
    .softmax = plain_softmax,
};
