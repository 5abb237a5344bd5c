/* SPDX-License-Identifier: MIT */
/*
 * Rotary position settings of config.json, in the older form (rope_theta beside rope_scaling) and
 * that of transformers 5 (rope_parameters). Defaults follow transformers 5.8.1,
 * modeling_rope_utils.py. Owns no state; never accepts a scaling whose mathematics we lack.
 */
#include <math.h>
#include <string.h>

#include "model/spec_private.h"

#define ROPE_MAX_THETA     1e15
#define ROPE_MAX_FACTOR    1e6
#define ROPE_DEFAULT_THETA 10000.0

static xp_status_t rope_read_yarn(const config_reader_t *reader, const model_spec_t *spec,
                                  model_rope_t *rope)
{
    bool truncate = false;
    XP_TRY(config_double(reader, "original_max_position_embeddings", 1, SPEC_MAX_POSITIONS,
                         spec->max_positions, &rope->original_max_positions));
    XP_TRY(config_double(reader, "factor", 1e-3, ROPE_MAX_FACTOR,
                         spec->max_positions / rope->original_max_positions, &rope->factor));
    XP_TRY(config_double(reader, "beta_fast", 0, 1e6, 32, &rope->beta_fast));
    XP_TRY(config_double(reader, "beta_slow", 0, 1e6, 1, &rope->beta_slow));
    XP_TRY(config_double(reader, "mscale", 0, 1e3, 0, &rope->mscale));
    XP_TRY(config_double(reader, "mscale_all_dim", 0, 1e3, 0, &rope->mscale_all_dim));
    XP_TRY(config_double(reader, "attention_factor", 0, 1e3, 0, &rope->attention_factor));
    XP_TRY(config_bool(reader, "truncate", true, &truncate));
    if (!truncate)
        return xp_fail(XP_UNSUPPORTED, "%s: \"%struncate\": false is not supported", reader->where,
                       reader->prefix);
    /* transformers takes zero for "not given" here. */
    rope->beta_fast = rope->beta_fast > 0 ? rope->beta_fast : 32;
    rope->beta_slow = rope->beta_slow > 0 ? rope->beta_slow : 1;
    rope->scaling = MODEL_ROPE_YARN;
    return XP_OK;
}

static xp_status_t rope_read_llama3(const config_reader_t *reader, const model_spec_t *spec,
                                    model_rope_t *rope)
{
    XP_TRY(config_double(reader, "factor", 1e-3, ROPE_MAX_FACTOR, NAN, &rope->factor));
    XP_TRY(config_double(reader, "low_freq_factor", 1e-3, 1e6, NAN, &rope->low_freq_factor));
    XP_TRY(config_double(reader, "high_freq_factor", 1e-3, 1e6, NAN, &rope->high_freq_factor));
    XP_TRY(config_double(reader, "original_max_position_embeddings", 1, SPEC_MAX_POSITIONS,
                         spec->max_positions, &rope->original_max_positions));
    if (rope->high_freq_factor <= rope->low_freq_factor)
        return xp_fail(XP_INVALID, "%s: \"%shigh_freq_factor\" %g is not above low_freq_factor %g",
                       reader->where, reader->prefix, rope->high_freq_factor,
                       rope->low_freq_factor);
    rope->scaling = MODEL_ROPE_LLAMA3;
    return XP_OK;
}

static xp_status_t rope_read_scaling(const config_reader_t *reader, const model_spec_t *spec,
                                     model_rope_t *rope)
{
    const char *type;
    double partial = 0;
    XP_TRY(config_double(reader, "rope_theta", 1, ROPE_MAX_THETA, rope->theta, &rope->theta));
    XP_TRY(config_double(reader, "partial_rotary_factor", 0, 1, 1, &partial));
    if (partial != 1)
        return xp_fail(XP_UNSUPPORTED,
                       "%s: \"%spartial_rotary_factor\" %g is not supported, only 1", reader->where,
                       reader->prefix, partial);
    XP_TRY(config_string(reader, "rope_type", &type));
    if (!type)
        XP_TRY(config_string(reader, "type", &type));
    if (!type || strcmp(type, "default") == 0)
        return XP_OK;
    if (strcmp(type, "linear") == 0) {
        XP_TRY(config_double(reader, "factor", 1e-3, ROPE_MAX_FACTOR, NAN, &rope->factor));
        rope->scaling = MODEL_ROPE_LINEAR;
        return XP_OK;
    }
    if (strcmp(type, "llama3") == 0)
        return rope_read_llama3(reader, spec, rope);
    if (strcmp(type, "yarn") == 0)
        return rope_read_yarn(reader, spec, rope);
    return xp_fail(XP_UNSUPPORTED,
                   "%s: \"%srope_type\" \"%.64s\" is not supported; known are default, linear, "
                   "llama3, yarn",
                   reader->where, reader->prefix, type);
}

xp_status_t spec_read_rope(const config_reader_t *reader, model_spec_t *spec)
{
    model_rope_t rope = {.theta = ROPE_DEFAULT_THETA};
    json_t *scaling = NULL, *parameters = NULL;
    double partial = 0;
    XP_TRY(config_double(reader, "rope_theta", 1, ROPE_MAX_THETA, rope.theta, &rope.theta));
    XP_TRY(config_double(reader, "partial_rotary_factor", 0, 1, 1, &partial));
    if (partial != 1)
        return xp_fail(XP_UNSUPPORTED, "%s: \"partial_rotary_factor\" %g is not supported, only 1",
                       reader->where, partial);
    XP_TRY(config_object(reader, "rope_scaling", &scaling));
    XP_TRY(config_object(reader, "rope_parameters", &parameters));
    const char *prefix = "rope_scaling.";
    if (json_object_size(scaling) == 0) {
        scaling = parameters;
        prefix = "rope_parameters.";
    }
    /* With several layer types transformers 5 nests one set a type. */
    if (json_is_object(json_object_get(scaling, "full_attention"))) {
        scaling = json_object_get(scaling, "full_attention");
        prefix = "rope_parameters.full_attention.";
    }
    if (scaling) {
        config_reader_t inner = {.object = scaling, .where = reader->where, .prefix = prefix};
        XP_TRY(rope_read_scaling(&inner, spec, &rope));
    }
    spec->rope = rope;
    return XP_OK;
}
