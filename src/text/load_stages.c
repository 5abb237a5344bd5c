/* SPDX-License-Identifier: MIT */
/*
 * tokenizer.json: normalizer, pre_tokenizer, post_processor and decoder as stages of a tokenizer.
 * Runs on the loading thread. A kind that is not known here is refused by name, never skipped.
 */
#include "text/load_json.h"

#include <string.h>

static const char GPT2_PATTERN[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- members ---- */

xp_status_t load_text(const json_t *object, const char *what, const char *key, const char *fallback,
                      const char **text_out, size_t *length_out)
{
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value)) {
        *text_out = fallback;
        *length_out = fallback ? strlen(fallback) : 0;
        return XP_OK;
    }
    if (!json_is_string(value))
        return xp_fail(XP_INVALID, "%s: \"%s\" must be a string", what, key);
    *text_out = json_string_value(value);
    *length_out = json_string_length(value);
    return XP_OK;
}

xp_status_t load_bool(const json_t *object, const char *what, const char *key, bool fallback,
                      bool *value_out)
{
    const json_t *value = json_object_get(object, key);
    if (value && !json_is_null(value) && !json_is_boolean(value))
        return xp_fail(XP_INVALID, "%s: \"%s\" must be true or false", what, key);
    *value_out = value && !json_is_null(value) ? json_is_true(value) : fallback;
    return XP_OK;
}

xp_status_t load_uint(const json_t *object, const char *what, const char *key, uint32_t fallback,
                      uint32_t *value_out)
{
    const json_t *value = json_object_get(object, key);
    if (!value) {
        *value_out = fallback;
        return XP_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > INT32_MAX)
        return xp_fail(XP_INVALID, "%s: \"%s\" must be a whole number", what, key);
    *value_out = (uint32_t)json_integer_value(value);
    return XP_OK;
}

xp_status_t load_type(const json_t *object, const char *what, const char **type_out)
{
    const json_t *type = json_object_get(object, "type");
    if (!json_is_string(type))
        return xp_fail(XP_INVALID, "%s: an object with a \"type\" is expected", what);
    *type_out = json_string_value(type);
    return XP_OK;
}

xp_status_t load_character(const json_t *object, const char *what, const char *key,
                           const char *fallback, char character_out[8])
{
    const char *text = "";
    size_t length = 0, step;
    XP_TRY(load_text(object, what, key, fallback, &text, &length));
    if (!length || text_utf8_step(text, length, &step) != TEXT_STEP_VALID || step != length ||
        !text[0])
        return xp_fail(XP_INVALID, "%s: \"%s\" must be one character", what, key);
    memcpy(character_out, text, length);
    character_out[length] = '\0';
    return XP_OK;
}

xp_status_t load_pattern(const json_t *object, const char *what, text_regex_t **regex_out)
{
    const json_t *pattern = json_object_get(object, "pattern");
    const json_t *literal = json_object_get(pattern, "String");
    const json_t *regex = json_object_get(pattern, "Regex");
    const json_t *text = json_is_string(pattern) ? pattern : literal ? literal : regex;
    if (!json_is_string(text))
        return xp_fail(XP_INVALID, "%s: \"pattern\" must hold a String or a Regex", what);
    xp_status_t status = text_regex_create(json_string_value(text), json_string_length(text),
                                           text != regex, regex_out);
    return status == XP_OK ? XP_OK : xp_fail_context(status, "%s", what);
}

/* Calls `load` for each member of a Sequence. */
static xp_status_t load_sequence(tokenizer_t *tokenizer, const json_t *json, const char *what,
                                 const char *key, int depth,
                                 xp_status_t (*load)(tokenizer_t *, const json_t *, int))
{
    const json_t *list = json_object_get(json, key);
    if (!json_is_array(list))
        return xp_fail(XP_INVALID, "%s: Sequence needs the list \"%s\"", what, key);
    if (depth == LOAD_MAX_DEPTH)
        return xp_fail(XP_INVALID, "%s: nested more than %d deep", what, LOAD_MAX_DEPTH);
    for (size_t i = 0; i < json_array_size(list); i++)
        XP_TRY(load(tokenizer, json_array_get(list, i), depth + 1));
    return XP_OK;
}

/* ---- normalizers ---- */

xp_status_t load_normalizer(tokenizer_t *tokenizer, const json_t *json, int depth)
{
    static const char *const forms[] = {
        [TEXT_NFC] = "NFC", [TEXT_NFD] = "NFD", [TEXT_NFKC] = "NFKC", [TEXT_NFKD] = "NFKD"};
    const char *type = "", *content = "";
    size_t length = 0;
    if (!json || json_is_null(json))
        return XP_OK;
    XP_TRY(load_type(json, "normalizer", &type));
    if (!strcmp(type, "Sequence"))
        return load_sequence(tokenizer, json, "normalizer", "normalizers", depth, load_normalizer);
    if (tokenizer->normalizer_count == TEXT_MAX_STAGES)
        return xp_fail(XP_UNSUPPORTED, "more than %d normalizers", TEXT_MAX_STAGES);
    normalizer_t *normalizer = &tokenizer->normalizers[tokenizer->normalizer_count];
    *normalizer = (normalizer_t){0};
    for (int form = TEXT_NFC; form <= TEXT_NFKD; form++) {
        if (!strcmp(type, forms[form])) {
            normalizer->kind = NORMALIZER_FORM;
            normalizer->form = (text_form_t)form;
            tokenizer->normalizer_count++;
            return XP_OK;
        }
    }
    if (!strcmp(type, "Lowercase")) {
        normalizer->kind = NORMALIZER_LOWERCASE;
    } else if (!strcmp(type, "Prepend")) {
        normalizer->kind = NORMALIZER_PREPEND;
        XP_TRY(load_text(json, "normalizer Prepend", "prepend", "", &content, &length));
        XP_TRY(tokenizer_copy(tokenizer, content, length, &normalizer->content));
        normalizer->content_length = length;
    } else if (!strcmp(type, "Replace")) {
        normalizer->kind = NORMALIZER_REPLACE;
        XP_TRY(load_text(json, "normalizer Replace", "content", "", &content, &length));
        XP_TRY(tokenizer_copy(tokenizer, content, length, &normalizer->content));
        normalizer->content_length = length;
        XP_TRY(load_pattern(json, "normalizer Replace", &normalizer->regex));
    } else if (!strcmp(type, "Strip")) {
        normalizer->kind = NORMALIZER_STRIP;
        XP_TRY(load_bool(json, "normalizer Strip", "strip_left", true, &normalizer->left));
        XP_TRY(load_bool(json, "normalizer Strip", "strip_right", true, &normalizer->right));
    } else {
        return xp_fail(XP_UNSUPPORTED, "normalizer \"%.64s\" is not supported", type);
    }
    tokenizer->normalizer_count++;
    return XP_OK;
}

/* ---- pre-tokenizers ---- */

static xp_status_t take_stage(tokenizer_t *tokenizer, pretokenizer_t stage)
{
    if (tokenizer->pretokenizer_count == TEXT_MAX_STAGES) {
        text_regex_destroy(stage.regex);
        return xp_fail(XP_UNSUPPORTED, "more than %d pre-tokenizers", TEXT_MAX_STAGES);
    }
    tokenizer->pretokenizers[tokenizer->pretokenizer_count++] = stage;
    return XP_OK;
}

xp_status_t add_split(tokenizer_t *tokenizer, const char *pattern)
{
    pretokenizer_t stage = {.kind = PRETOKENIZER_SPLIT, .behavior = SPLIT_ISOLATED};
    XP_TRY(text_regex_create(pattern, strlen(pattern), false, &stage.regex));
    return take_stage(tokenizer, stage);
}

xp_status_t add_class(tokenizer_t *tokenizer, bool (*member)(uint32_t), split_behavior_t behavior)
{
    return take_stage(
        tokenizer,
        (pretokenizer_t){.kind = PRETOKENIZER_CLASS, .behavior = behavior, .member = member});
}

xp_status_t add_byte_level(tokenizer_t *tokenizer, bool add_prefix_space, bool use_regex)
{
    if (add_prefix_space)
        XP_TRY(take_stage(tokenizer, (pretokenizer_t){.kind = PRETOKENIZER_SPACE_PREFIX}));
    if (use_regex)
        XP_TRY(add_split(tokenizer, GPT2_PATTERN));
    return take_stage(tokenizer, (pretokenizer_t){.kind = PRETOKENIZER_BYTES});
}

static xp_status_t load_behavior(const json_t *json, const char *what, split_behavior_t *out)
{
    static const struct {
        const char *name;
        split_behavior_t behavior;
    } names[] = {
        {"Removed", SPLIT_REMOVED},
        {"Isolated", SPLIT_ISOLATED},
        {"MergedWithPrevious", SPLIT_PREVIOUS},
        {"MergedWithNext", SPLIT_NEXT},
        {"Contiguous", SPLIT_CONTIGUOUS},
    };
    const char *text = "";
    size_t length = 0;
    XP_TRY(load_text(json, what, "behavior", "Isolated", &text, &length));
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!strcmp(text, names[i].name)) {
            *out = names[i].behavior;
            return XP_OK;
        }
    }
    return xp_fail(XP_UNSUPPORTED, "%s: behavior \"%.64s\" is not supported", what, text);
}

static xp_status_t load_scheme(const json_t *json, const char *what, metaspace_scheme_t *out)
{
    const char *text = "";
    size_t length = 0;
    bool prefix = true;
    /* Older files say add_prefix_space. */
    XP_TRY(load_bool(json, what, "add_prefix_space", true, &prefix));
    XP_TRY(load_text(json, what, "prepend_scheme", prefix ? "always" : "never", &text, &length));
    if (!strcmp(text, "always"))
        *out = METASPACE_ALWAYS;
    else if (!strcmp(text, "first"))
        *out = METASPACE_FIRST;
    else if (!strcmp(text, "never"))
        *out = METASPACE_NEVER;
    else
        return xp_fail(XP_UNSUPPORTED, "%s: prepend_scheme \"%.64s\" is not supported", what, text);
    return XP_OK;
}

static xp_status_t load_metaspace(tokenizer_t *tokenizer, const json_t *json)
{
    static const char what[] = "pre-tokenizer Metaspace";
    pretokenizer_t stage = {.kind = PRETOKENIZER_METASPACE};
    XP_TRY(load_character(json, what, "replacement", "\xE2\x96\x81", stage.replacement));
    XP_TRY(load_scheme(json, what, &stage.scheme));
    XP_TRY(load_bool(json, what, "split", true, &stage.split));
    XP_TRY(text_regex_create(stage.replacement, strlen(stage.replacement), true, &stage.regex));
    return take_stage(tokenizer, stage);
}

xp_status_t load_pretokenizer(tokenizer_t *tokenizer, const json_t *json, int depth)
{
    const char *type = "";
    if (!json || json_is_null(json))
        return XP_OK;
    XP_TRY(load_type(json, "pre-tokenizer", &type));
    if (!strcmp(type, "Sequence"))
        return load_sequence(tokenizer, json, "pre-tokenizer", "pretokenizers", depth,
                             load_pretokenizer);
    if (!strcmp(type, "ByteLevel")) {
        bool prefix = true, regex = true;
        XP_TRY(load_bool(json, "pre-tokenizer ByteLevel", "add_prefix_space", true, &prefix));
        XP_TRY(load_bool(json, "pre-tokenizer ByteLevel", "use_regex", true, &regex));
        return add_byte_level(tokenizer, prefix, regex);
    }
    if (!strcmp(type, "Split")) {
        pretokenizer_t stage = {.kind = PRETOKENIZER_SPLIT};
        XP_TRY(load_behavior(json, "pre-tokenizer Split", &stage.behavior));
        XP_TRY(load_bool(json, "pre-tokenizer Split", "invert", false, &stage.invert));
        XP_TRY(load_pattern(json, "pre-tokenizer Split", &stage.regex));
        return take_stage(tokenizer, stage);
    }
    if (!strcmp(type, "Metaspace"))
        return load_metaspace(tokenizer, json);
    if (!strcmp(type, "Digits")) {
        bool individual = false;
        XP_TRY(load_bool(json, "pre-tokenizer Digits", "individual_digits", false, &individual));
        return add_class(tokenizer, text_is_numeric,
                         individual ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS);
    }
    if (!strcmp(type, "Punctuation")) {
        split_behavior_t behavior = SPLIT_ISOLATED;
        XP_TRY(load_behavior(json, "pre-tokenizer Punctuation", &behavior));
        return add_class(tokenizer, text_is_punctuation, behavior);
    }
    if (!strcmp(type, "WhitespaceSplit"))
        return add_class(tokenizer, text_is_space, SPLIT_REMOVED);
    return xp_fail(XP_UNSUPPORTED, "pre-tokenizer \"%.64s\" is not supported", type);
}

/* ---- post-processors ---- */

static xp_status_t add_specials(int32_t *list, size_t *count, const int32_t *ids, size_t added,
                                bool in_front)
{
    if (*count + added > TEXT_MAX_SPECIALS)
        return xp_fail(XP_UNSUPPORTED, "post-processor: more than %d special tokens",
                       TEXT_MAX_SPECIALS);
    size_t at = in_front ? 0 : *count;
    memmove(list + at + added, list + at, (*count - at) * sizeof(*list));
    if (added)
        memcpy(list + at, ids, added * sizeof(*list));
    *count += added;
    return XP_OK;
}

static xp_status_t take_ids(const json_t *ids, int32_t *list, size_t *count)
{
    if (!json_is_array(ids) && !json_is_integer(ids))
        return xp_fail(XP_INVALID, "post-processor: a special token without ids");
    size_t number = json_is_array(ids) ? json_array_size(ids) : 1;
    for (size_t i = 0; i < number; i++) {
        const json_t *id = json_is_array(ids) ? json_array_get(ids, i) : ids;
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= TEXT_MAX_TOKENS)
            return xp_fail(XP_INVALID, "post-processor: a special token's id is no token id");
        int32_t narrow = (int32_t)value;
        XP_TRY(add_specials(list, count, &narrow, 1, false));
    }
    return XP_OK;
}

static xp_status_t load_template(tokenizer_t *tokenizer, const json_t *json)
{
    static const char what[] = "post-processor TemplateProcessing";
    const json_t *single = json_object_get(json, "single");
    const json_t *specials = json_object_get(json, "special_tokens");
    int32_t prefix[TEXT_MAX_SPECIALS], suffix[TEXT_MAX_SPECIALS];
    size_t prefix_count = 0, suffix_count = 0, sequences = 0;
    if (!json_is_array(single))
        return xp_fail(XP_INVALID, "%s: \"single\" must be a list", what);
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *piece = json_array_get(single, i);
        const json_t *special = json_object_get(piece, "SpecialToken");
        const char *name = json_string_value(json_object_get(special, "id"));
        if (json_is_object(json_object_get(piece, "Sequence"))) {
            sequences++;
        } else if (name) {
            const json_t *ids = json_object_get(json_object_get(specials, name), "ids");
            XP_TRY(take_ids(ids, sequences ? suffix : prefix,
                            sequences ? &suffix_count : &prefix_count));
        } else {
            return xp_fail(XP_INVALID, "%s: \"single\" holds something unknown", what);
        }
    }
    if (sequences != 1)
        return xp_fail(XP_UNSUPPORTED, "%s: the text must occur once in \"single\"", what);
    XP_TRY(add_specials(tokenizer->prefix, &tokenizer->prefix_count, prefix, prefix_count, true));
    return add_specials(tokenizer->suffix, &tokenizer->suffix_count, suffix, suffix_count, false);
}

/* BERT's and RoBERTa's: "cls" in front, "sep" behind, each [token, id]. */
static xp_status_t load_cls_sep(tokenizer_t *tokenizer, const json_t *json)
{
    int32_t cls, sep;
    size_t cls_count = 0, sep_count = 0;
    XP_TRY(take_ids(json_array_get(json_object_get(json, "cls"), 1), &cls, &cls_count));
    XP_TRY(take_ids(json_array_get(json_object_get(json, "sep"), 1), &sep, &sep_count));
    XP_TRY(add_specials(tokenizer->prefix, &tokenizer->prefix_count, &cls, cls_count, true));
    return add_specials(tokenizer->suffix, &tokenizer->suffix_count, &sep, sep_count, false);
}

xp_status_t load_postprocessor(tokenizer_t *tokenizer, const json_t *json, int depth)
{
    const char *type = "";
    if (!json || json_is_null(json))
        return XP_OK;
    XP_TRY(load_type(json, "post-processor", &type));
    if (!strcmp(type, "Sequence"))
        return load_sequence(tokenizer, json, "post-processor", "processors", depth,
                             load_postprocessor);
    if (!strcmp(type, "ByteLevel")) /* changes offsets only, and those nobody asks for here */
        return XP_OK;
    if (!strcmp(type, "TemplateProcessing"))
        return load_template(tokenizer, json);
    if (!strcmp(type, "RobertaProcessing") || !strcmp(type, "BertProcessing"))
        return load_cls_sep(tokenizer, json);
    return xp_fail(XP_UNSUPPORTED, "post-processor \"%.64s\" is not supported", type);
}

/* ---- decoders ---- */

/* Which stages may still follow: streaming must give what decoding all at once gives, so only
 * orders are taken in which every stage looks at one token, or at the text from its beginning. */
typedef enum decoder_phase {
    PHASE_TOKENS = 0,
    PHASE_BYTES,
    PHASE_FUSED,
    PHASE_END
} decoder_phase_t;

static xp_status_t load_decoder_strip(tokenizer_t *tokenizer, const json_t *json,
                                      decoder_phase_t *phase)
{
    static const char what[] = "decoder Strip";
    decoder_t *decoder = &tokenizer->decoder;
    decoder_stage_t stage = {.kind = DECODER_STRIP};
    XP_TRY(load_character(json, what, "content", " ", stage.character));
    XP_TRY(load_uint(json, what, "start", 0, &stage.start));
    XP_TRY(load_uint(json, what, "stop", 0, &stage.stop));
    if (*phase == PHASE_TOKENS) {
        decoder->stages[decoder->stage_count++] = stage;
        return XP_OK;
    }
    if (*phase != PHASE_FUSED || stage.stop || stage.start > 200)
        return xp_fail(XP_UNSUPPORTED, "%s: this place or these counts are not supported", what);
    decoder->strip = stage.start;
    memcpy(decoder->strip_text, stage.character, sizeof(stage.character));
    *phase = PHASE_END;
    return XP_OK;
}

static xp_status_t load_decoder_stage(tokenizer_t *tokenizer, const json_t *json, int depth,
                                      decoder_phase_t *phase)
{
    decoder_t *decoder = &tokenizer->decoder;
    const char *type = "", *content = "";
    size_t length = 0;
    XP_TRY(load_type(json, "decoder", &type));
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(json, "decoders");
        if (!json_is_array(list) || depth == LOAD_MAX_DEPTH)
            return xp_fail(XP_INVALID, "decoder: Sequence needs the list \"decoders\"");
        for (size_t i = 0; i < json_array_size(list); i++)
            XP_TRY(load_decoder_stage(tokenizer, json_array_get(list, i), depth + 1, phase));
        return XP_OK;
    }
    if (!strcmp(type, "Fuse") && *phase <= PHASE_FUSED) {
        *phase = PHASE_FUSED;
        return XP_OK;
    }
    if (decoder->stage_count == TEXT_MAX_STAGES)
        return xp_fail(XP_UNSUPPORTED, "more than %d decoders", TEXT_MAX_STAGES);
    if (!strcmp(type, "Strip"))
        return load_decoder_strip(tokenizer, json, phase);
    bool known = !strcmp(type, "ByteFallback") || !strcmp(type, "ByteLevel") ||
                 !strcmp(type, "Metaspace") || !strcmp(type, "Replace");
    if (!known)
        return xp_fail(XP_UNSUPPORTED, "decoder \"%.64s\" is not supported", type);
    if (*phase != PHASE_TOKENS)
        return xp_fail(XP_UNSUPPORTED,
                       "decoder \"%.64s\" at this place of a Sequence is not supported", type);
    if (!strcmp(type, "ByteFallback")) {
        decoder->byte_fallback = true;
        *phase = PHASE_BYTES;
        return XP_OK;
    }
    decoder_stage_t stage = {0};
    if (!strcmp(type, "ByteLevel")) {
        stage.kind = DECODER_BYTE_LEVEL;
        decoder->lossy = true;
        *phase = PHASE_BYTES;
    } else if (!strcmp(type, "Metaspace")) {
        metaspace_scheme_t scheme = METASPACE_ALWAYS;
        stage.kind = DECODER_METASPACE;
        XP_TRY(load_character(json, "decoder Metaspace", "replacement", "\xE2\x96\x81",
                              stage.character));
        XP_TRY(load_scheme(json, "decoder Metaspace", &scheme));
        stage.drop_first = scheme != METASPACE_NEVER;
    } else {
        stage.kind = DECODER_REPLACE;
        XP_TRY(load_text(json, "decoder Replace", "content", "", &content, &length));
        XP_TRY(tokenizer_copy(tokenizer, content, length, &stage.content));
        stage.content_length = length;
        XP_TRY(load_pattern(json, "decoder Replace", &stage.regex));
    }
    decoder->stages[decoder->stage_count++] = stage;
    return XP_OK;
}

xp_status_t load_decoder(tokenizer_t *tokenizer, const json_t *json)
{
    decoder_phase_t phase = PHASE_TOKENS;
    if (!json || json_is_null(json)) {
        tokenizer->decoder.join = true;
        return XP_OK;
    }
    return load_decoder_stage(tokenizer, json, 0, &phase);
}
