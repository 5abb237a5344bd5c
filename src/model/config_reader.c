/* SPDX-License-Identifier: MIT */
/*
 * Typed reads from a JSON object. Owns nothing but the messages; any thread may use it. It never
 * guesses: a value of the wrong type or out of bounds is an error, not a default.
 */
#include "model/config_reader.h"

#include <math.h>

json_t *config_member(const config_reader_t *reader, const char *key)
{
    json_t *value = json_object_get(reader->object, key);
    return json_is_null(value) ? NULL : value;
}

static const char *config_type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

static xp_status_t config_wrong_type(const config_reader_t *reader, const char *key,
                                     const json_t *value, const char *wanted)
{
    return xp_fail(XP_INVALID, "%s: \"%s%s\" is %s, wanted %s", reader->where, reader->prefix, key,
                   config_type_name(value), wanted);
}

xp_status_t config_u32(const config_reader_t *reader, const char *key, const char *alias,
                       uint32_t minimum, uint32_t maximum, int64_t fallback, uint32_t *value_out)
{
    json_t *value = config_member(reader, key);
    if (!value && alias) {
        value = config_member(reader, alias);
        key = value ? alias : key;
    }
    if (!value) {
        if (fallback < 0)
            return xp_fail(XP_INVALID, "%s: \"%s%s\" is missing", reader->where, reader->prefix,
                           key);
        *value_out = (uint32_t)fallback;
        return XP_OK;
    }
    json_int_t number;
    if (json_is_integer(value)) {
        number = json_integer_value(value);
    } else if (json_is_real(value) && fabs(json_real_value(value)) < 1e15 &&
               floor(json_real_value(value)) == json_real_value(value)) {
        number = (json_int_t)json_real_value(value);
    } else {
        return config_wrong_type(reader, key, value, "an integer");
    }
    if (number < (json_int_t)minimum || number > (json_int_t)maximum)
        return xp_fail(XP_INVALID, "%s: \"%s%s\" is %" JSON_INTEGER_FORMAT ", allowed are %u to %u",
                       reader->where, reader->prefix, key, number, minimum, maximum);
    *value_out = (uint32_t)number;
    return XP_OK;
}

xp_status_t config_double(const config_reader_t *reader, const char *key, double minimum,
                          double maximum, double fallback, double *value_out)
{
    json_t *value = config_member(reader, key);
    if (!value) {
        if (isnan(fallback))
            return xp_fail(XP_INVALID, "%s: \"%s%s\" is missing", reader->where, reader->prefix,
                           key);
        *value_out = fallback;
        return XP_OK;
    }
    if (!json_is_number(value))
        return config_wrong_type(reader, key, value, "a number");
    double number = json_number_value(value);
    if (!(number >= minimum && number <= maximum))
        return xp_fail(XP_INVALID, "%s: \"%s%s\" is %g, allowed are %g to %g", reader->where,
                       reader->prefix, key, number, minimum, maximum);
    *value_out = number;
    return XP_OK;
}

xp_status_t config_bool(const config_reader_t *reader, const char *key, bool fallback,
                        bool *value_out)
{
    json_t *value = config_member(reader, key);
    if (value && !json_is_boolean(value))
        return config_wrong_type(reader, key, value, "true or false");
    *value_out = value ? json_is_true(value) : fallback;
    return XP_OK;
}

xp_status_t config_string(const config_reader_t *reader, const char *key, const char **text_out)
{
    json_t *value = config_member(reader, key);
    if (value && !json_is_string(value))
        return config_wrong_type(reader, key, value, "a string");
    *text_out = value ? json_string_value(value) : NULL;
    return XP_OK;
}

xp_status_t config_array(const config_reader_t *reader, const char *key, json_t **array_out)
{
    json_t *value = config_member(reader, key);
    if (value && !json_is_array(value))
        return config_wrong_type(reader, key, value, "an array");
    *array_out = value;
    return XP_OK;
}

xp_status_t config_object(const config_reader_t *reader, const char *key, json_t **object_out)
{
    json_t *value = config_member(reader, key);
    if (value && !json_is_object(value))
        return config_wrong_type(reader, key, value, "an object");
    *object_out = value;
    return XP_OK;
}

xp_status_t config_parse(const char *json, size_t length, const char *where, json_t **root_out)
{
    json_error_t error;
    json_t *root = json_loadb(json, length, 0, &error);
    if (!root)
        return xp_fail(XP_INVALID, "%s:%d:%d: not valid JSON: %s", where, error.line, error.column,
                       error.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return xp_fail(XP_INVALID, "%s: the JSON is no object", where);
    }
    *root_out = root;
    return XP_OK;
}
