/* SPDX-License-Identifier: MIT */
/* Inverse frequencies for each RoPE scaling. Pure functions; any thread. */
#include "engine/rope.h"

#include <math.h>

static double yarn_correction_dim(double rotations, uint32_t dim, double base, double max_positions)
{
    return dim * log(max_positions / (rotations * 2.0 * M_PI)) / (2.0 * log(base));
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static void scale_llama3(const model_rope_t *rope, uint32_t half, float *inverse)
{
    float low_wavelength = (float)(rope->original_max_positions / rope->low_freq_factor);
    float high_wavelength = (float)(rope->original_max_positions / rope->high_freq_factor);
    for (uint32_t i = 0; i < half; i++) {
        float wavelength = (float)(2.0 * M_PI) / inverse[i];
        float slowed = inverse[i] / (float)rope->factor;
        if (wavelength > low_wavelength) {
            inverse[i] = slowed;
        } else if (!(wavelength < high_wavelength)) {
            float smooth =
                ((float)rope->original_max_positions / wavelength - (float)rope->low_freq_factor) /
                (float)(rope->high_freq_factor - rope->low_freq_factor);
            inverse[i] = (1.0f - smooth) * slowed + smooth * inverse[i];
        }
    }
}

/* YaRN blends interpolated (divided) and extrapolated (unchanged) frequencies along a ramp between
 * the dimensions that make beta_fast and beta_slow turns over the original context. */
static void scale_yarn(const model_rope_t *rope, uint32_t head_dim, const float *powers,
                       float *inverse)
{
    uint32_t half = head_dim / 2;
    double fast = rope->beta_fast > 0 ? rope->beta_fast : 32.0;
    double slow = rope->beta_slow > 0 ? rope->beta_slow : 1.0;
    double low =
        floor(yarn_correction_dim(fast, head_dim, rope->theta, rope->original_max_positions));
    double high =
        ceil(yarn_correction_dim(slow, head_dim, rope->theta, rope->original_max_positions));
    low = fmax(low, 0.0);
    high = fmin(high, head_dim - 1.0);
    if (low == high)
        high += 0.001;
    for (uint32_t i = 0; i < half; i++) {
        float ramp = ((float)i - (float)low) / (float)(high - low);
        ramp = fminf(fmaxf(ramp, 0.0f), 1.0f);
        float keep = 1.0f - ramp;
        float interpolated = 1.0f / ((float)rope->factor * powers[i]);
        float extrapolated = 1.0f / powers[i];
        inverse[i] = interpolated * (1.0f - keep) + extrapolated * keep;
    }
}

static double yarn_attention_factor(const model_rope_t *rope)
{
    if (rope->attention_factor > 0)
        return rope->attention_factor;
    if (rope->mscale > 0 && rope->mscale_all_dim > 0)
        return yarn_mscale(rope->factor, rope->mscale) /
               yarn_mscale(rope->factor, rope->mscale_all_dim);
    return yarn_mscale(rope->factor, 1.0);
}

xp_status_t engine_rope_frequencies(const model_rope_t *rope, uint32_t head_dim, float *inverse,
                                    float *scale_out)
{
    if (head_dim < 2 || head_dim % 2 || head_dim > 1024)
        return xp_fail(XP_UNSUPPORTED,
                       "head_dim %u: rotary embedding needs an even width of 2..1024", head_dim);
    if (rope->interleaved)
        return xp_fail(XP_UNSUPPORTED, "interleaved rotary embedding with grouped-query attention");
    if (!(rope->theta > 0))
        return xp_fail(XP_INVALID, "rope_theta %g is not positive", rope->theta);
    if (rope->scaling != MODEL_ROPE_NONE && !(rope->factor > 0))
        return xp_fail(XP_INVALID, "rope_scaling factor %g is not positive", rope->factor);

    uint32_t half = head_dim / 2;
    float powers[512];
    for (uint32_t i = 0; i < half; i++) {
        powers[i] = powf((float)rope->theta, (float)(2 * i) / (float)head_dim);
        inverse[i] = 1.0f / powers[i];
    }
    float scale = 1.0f;
    switch (rope->scaling) {
    case MODEL_ROPE_NONE:
        break;
    case MODEL_ROPE_LINEAR:
        for (uint32_t i = 0; i < half; i++)
            inverse[i] /= (float)rope->factor;
        break;
    case MODEL_ROPE_LLAMA3:
        if (!(rope->original_max_positions > 0) || !(rope->low_freq_factor > 0) ||
            !(rope->high_freq_factor > rope->low_freq_factor))
            return xp_fail(XP_INVALID,
                           "rope_scaling llama3: low_freq_factor %g, high_freq_factor "
                           "%g, original_max_position_embeddings %g do not fit",
                           rope->low_freq_factor, rope->high_freq_factor,
                           rope->original_max_positions);
        scale_llama3(rope, half, inverse);
        break;
    case MODEL_ROPE_YARN:
        if (!(rope->original_max_positions > 0) || !(rope->theta > 1))
            return xp_fail(XP_INVALID,
                           "rope_scaling yarn: original_max_position_embeddings %g, "
                           "rope_theta %g do not fit",
                           rope->original_max_positions, rope->theta);
        scale_yarn(rope, head_dim, powers, inverse);
        scale = (float)yarn_attention_factor(rope);
        break;
    default:
        return xp_fail(XP_UNSUPPORTED, "rope_scaling kind %d", (int)rope->scaling);
    }
    *scale_out = scale;
    return XP_OK;
}

void engine_rope_angles(const float *inverse, float scale, uint32_t half, uint32_t position,
                        float *cosine, float *sine)
{
    for (uint32_t i = 0; i < half; i++) {
        float angle = inverse[i] * (float)position;
        cosine[i] = cosf(angle) * scale;
        sine[i] = sinf(angle) * scale;
    }
}
