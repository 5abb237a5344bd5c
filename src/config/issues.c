/* SPDX-License-Identifier: MIT */
/* The errors of one load, kept until all are found, then shown in the order of the file. */
#include "config/resolve.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add(config_issues_t *issues, const config_origin_t *origin, uint32_t line,
                uint32_t column, const char *format, va_list arguments)
{
    issues->total++;
    if (issues->count == CONFIG_MAX_ISSUES)
        return;
    config_issue_t *issue = &issues->items[issues->count];
    /* A value of the command line has a position too, in its own text: of no use to anyone. */
    bool in_file = origin && origin->kind == CONFIG_ORIGIN_FILE;
    issue->origin = origin;
    issue->line = in_file ? line : 0;
    issue->column = in_file ? column : 0;
    issue->order = issues->count++;
    vsnprintf(issue->text, sizeof(issue->text), format, arguments);
    /* Texts quote what was found; a report is one line an issue and safe for a terminal. */
    for (char *c = issue->text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

void config_issue_add(config_issues_t *issues, const config_node_t *node, bool at_key,
                      const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    bool key = at_key && node && node->key_line;
    add(issues, node ? node->origin : NULL,
        !node ? 0
        : key ? node->key_line
              : node->line,
        !node ? 0
        : key ? node->key_column
              : node->column,
        format, arguments);
    va_end(arguments);
}

void config_issue_add_at(config_issues_t *issues, const config_origin_t *origin, uint32_t line,
                         uint32_t column, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    add(issues, origin, line, column, format, arguments);
    va_end(arguments);
}

void config_origin_format(const config_origin_t *origin, uint32_t line, uint32_t column, char *out,
                          size_t size)
{
    if (!origin || origin->kind == CONFIG_ORIGIN_DEFAULT)
        snprintf(out, size, "default");
    else if (origin->kind == CONFIG_ORIGIN_CLI)
        snprintf(out, size, "cli");
    else if (origin->kind == CONFIG_ORIGIN_ENVIRONMENT)
        snprintf(out, size, "env %s", origin->name);
    else if (line)
        snprintf(out, size, "%s:%u:%u", origin->name, line, column);
    else
        snprintf(out, size, "%s", origin->name);
}

static int compare(const void *left, const void *right)
{
    const config_issue_t *a = left, *b = right;
    int kind_a = a->origin ? (int)a->origin->kind : 99;
    int kind_b = b->origin ? (int)b->origin->kind : 99;
    if (kind_a != kind_b)
        return kind_a < kind_b ? -1 : 1;
    if (a->line != b->line)
        return a->line < b->line ? -1 : 1;
    if (a->column != b->column)
        return a->column < b->column ? -1 : 1;
    return a->order < b->order ? -1 : a->order > b->order;
}

xp_status_t config_issues_report(config_issues_t *issues, xp_buf_t *text_out)
{
    qsort(issues->items, issues->count, sizeof(issues->items[0]), compare);
    uint32_t shown = issues->count < CONFIG_SHOWN_ISSUES ? issues->count : CONFIG_SHOWN_ISSUES;
    for (uint32_t i = 0; i < shown; i++) {
        const config_issue_t *issue = &issues->items[i];
        char where[CONFIG_MAX_PATH + 64] = "";
        if (issue->origin && issue->origin->kind != CONFIG_ORIGIN_DEFAULT)
            config_origin_format(issue->origin, issue->line, issue->column, where, sizeof(where));
        XP_TRY(xp_buf_printf(text_out, "%s%s%s%s", i ? "\n" : "", where, where[0] ? ": " : "",
                             issue->text));
    }
    if (issues->total > shown)
        XP_TRY(xp_buf_printf(text_out, "\n... and %u more", issues->total - shown));
    return XP_OK;
}

void config_warn(config_resolver_t *resolver, const char *format, ...)
{
    struct config_record *record = resolver->record;
    if (record->warning_count == CONFIG_MAX_WARNINGS)
        return;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    char *copy = config_arena_copy(&record->arena, text, strlen(text));
    if (copy)
        record->warnings[record->warning_count++] = copy;
    else
        resolver->out_of_memory = true;
}
