/* SPDX-License-Identifier: MIT */
/*
 * TOML text to a tree of plain C nodes, by toml++. The only C++ file of the module: exceptions are
 * switched off in the parser and nothing thrown (out of memory) leaves this file. Runs on the
 * thread that loads the configuration; never does I/O.
 */
#include "config/tree.h"

/* toml++ asserts on some malformed texts, and with NDEBUG assumes that they do not occur. Its
 * assertions stay on here and are thrown, to be caught below: a file must not end the program. */
#undef NDEBUG
namespace
{
struct parser_gave_up {
};
} // namespace
#define TOML_ASSERT(expr) (static_cast<bool>(expr) ? static_cast<void>(0) : throw parser_gave_up{})

#define TOML_EXCEPTIONS            0
#define TOML_HEADER_ONLY           1
#define TOML_ENABLE_FORMATTERS     0
#define TOML_ENABLE_WINDOWS_COMPAT 0
#define TOML_UNRELEASED_FEATURES   0
#include <toml++/toml.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

namespace
{

struct conversion {
    config_arena_t *arena;
    const config_origin_t *origin;
    config_toml_error_t *error;
    bool out_of_memory;
};

void fail_at(conversion &state, const toml::source_region &region, const char *text)
{
    state.error->line = static_cast<uint32_t>(region.begin.line);
    state.error->column = static_cast<uint32_t>(region.begin.column);
    std::snprintf(state.error->text, sizeof(state.error->text), "%s", text);
}

config_node_t *fail_memory(conversion &state)
{
    state.out_of_memory = true;
    return nullptr;
}

config_node_t *convert(conversion &state, const toml::node &node, unsigned depth);

bool convert_table(conversion &state, const toml::table &table, config_node_t *result,
                   unsigned depth)
{
    /* toml++ keeps tables sorted by key; users read errors in the order of their file. */
    struct entry {
        const toml::key *key;
        const toml::node *node;
    };
    std::vector<entry> entries;
    entries.reserve(table.size());
    for (auto it = table.cbegin(); it != table.cend(); ++it)
        entries.push_back(entry{&it->first, &it->second});
    std::stable_sort(entries.begin(), entries.end(), [](const entry &a, const entry &b) {
        const auto &left = a.key->source().begin;
        const auto &right = b.key->source().begin;
        return left.line != right.line ? left.line < right.line : left.column < right.column;
    });
    for (const entry &item : entries) {
        config_node_t *child = convert(state, *item.node, depth + 1);
        if (!child)
            return false;
        std::string_view key = item.key->str();
        child->key = config_arena_copy(state.arena, key.data(), key.size());
        if (!child->key) {
            fail_memory(state);
            return false;
        }
        child->key_length = key.size();
        child->key_line = static_cast<uint32_t>(item.key->source().begin.line);
        child->key_column = static_cast<uint32_t>(item.key->source().begin.column);
        config_node_append(result, child);
    }
    return true;
}

config_node_t *convert(conversion &state, const toml::node &node, unsigned depth)
{
    if (depth > CONFIG_TREE_MAX_DEPTH) {
        fail_at(state, node.source(), "tables and lists are nested too deeply");
        return nullptr;
    }
    config_node_t *result = config_node_create(state.arena, CONFIG_NODE_DATE, state.origin);
    if (!result)
        return fail_memory(state);
    result->line = static_cast<uint32_t>(node.source().begin.line);
    result->column = static_cast<uint32_t>(node.source().begin.column);
    if (const auto *text = node.as_string()) {
        const std::string &value = text->get();
        result->kind = CONFIG_NODE_STRING;
        result->text = config_arena_copy(state.arena, value.data(), value.size());
        result->length = value.size();
        if (!result->text)
            return fail_memory(state);
    } else if (const auto *integer = node.as_integer()) {
        result->kind = CONFIG_NODE_INTEGER;
        result->integer = integer->get();
    } else if (const auto *real = node.as_floating_point()) {
        result->kind = CONFIG_NODE_FLOAT;
        result->real = real->get();
    } else if (const auto *boolean = node.as_boolean()) {
        result->kind = CONFIG_NODE_BOOLEAN;
        result->boolean = boolean->get();
    } else if (const auto *list = node.as_array()) {
        result->kind = CONFIG_NODE_LIST;
        for (const toml::node &item : *list) {
            config_node_t *child = convert(state, item, depth + 1);
            if (!child)
                return nullptr;
            config_node_append(result, child);
        }
    } else if (const auto *table = node.as_table()) {
        result->kind = CONFIG_NODE_TABLE;
        if (!convert_table(state, *table, result, depth))
            return nullptr;
    }
    return result;
}

} // namespace

extern "C" xp_status_t config_toml_parse(config_arena_t *arena, const char *text, size_t length,
                                         const config_origin_t *origin, config_node_t **root_out,
                                         config_toml_error_t *error_out)
{
    *error_out = config_toml_error_t{};
    if (length > CONFIG_TREE_MAX_BYTES) {
        std::snprintf(error_out->text, sizeof(error_out->text), "larger than %d bytes",
                      CONFIG_TREE_MAX_BYTES);
        return XP_INVALID;
    }
    if (!config_toml_precheck(text, length, error_out))
        return XP_INVALID;
    try {
        conversion state{arena, origin, error_out, false};
        toml::parse_result parsed = toml::parse(std::string_view(text, length));
        if (!parsed) {
            std::string_view description = parsed.error().description();
            error_out->line = static_cast<uint32_t>(parsed.error().source().begin.line);
            error_out->column = static_cast<uint32_t>(parsed.error().source().begin.column);
            std::snprintf(error_out->text, sizeof(error_out->text), "%.*s",
                          static_cast<int>(std::min<size_t>(description.size(), 255)),
                          description.data());
            for (char *c = error_out->text; *c; c++)
                if (static_cast<unsigned char>(*c) < 0x20)
                    *c = ' ';
            return XP_INVALID;
        }
        config_node_t *root = convert(state, parsed.table(), 0);
        if (!root)
            return state.out_of_memory ? xp_fail(XP_NO_MEMORY, "no memory for the configuration")
                                       : XP_INVALID;
        *root_out = root;
        return XP_OK;
    } catch (const std::bad_alloc &) {
        return xp_fail(XP_NO_MEMORY, "no memory to parse the configuration");
    } catch (...) {
        std::snprintf(error_out->text, sizeof(error_out->text), "the TOML parser gave up");
        return XP_INVALID;
    }
}
