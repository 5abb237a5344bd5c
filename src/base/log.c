/* SPDX-License-Identifier: MIT */
/* Log lines to stderr. Holds process-wide settings that are set before threads start. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOG_LINE_MAX 2048

static struct {
    xp_log_level_t level;
    xp_log_format_t format;
    bool colored;
    char role[32];
    char name[96];
} log_state = {.level = XP_LOG_INFO};

static const char *const level_names[] = {"debug", "info", "warn", "error"};
static const char *const level_colors[] = {"\033[2m", "", "\033[33m", "\033[31m"};

void xp_log_configure(xp_log_level_t level, xp_log_format_t format, xp_log_color_t color)
{
    log_state.level = level;
    log_state.format = format;
    const char *no_color = getenv("NO_COLOR");
    log_state.colored =
        color == XP_COLOR_ALWAYS ||
        (color == XP_COLOR_AUTO && isatty(STDERR_FILENO) && !(no_color && no_color[0]));
}

void xp_log_identify(const char *role, const char *name)
{
    snprintf(log_state.role, sizeof(log_state.role), "%s", role ? role : "");
    snprintf(log_state.name, sizeof(log_state.name), "%s", name ? name : "");
}

bool xp_log_enabled(xp_log_level_t level)
{
    return level >= log_state.level;
}

/* Appends `text` as the inside of a JSON string; stops where `size` ends. */
static size_t append_json(char *out, size_t at, size_t size, const char *text)
{
    for (; *text && at + 8 < size; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            out[at++] = '\\';
            out[at++] = (char)c;
        } else if (c < 0x20) {
            at += (size_t)snprintf(out + at, size - at, "\\u%04x", c);
        } else {
            out[at++] = (char)c;
        }
    }
    out[at] = '\0';
    return at;
}

void xp_log_write(xp_log_level_t level, const char *format, ...)
{
    if (!xp_log_enabled(level))
        return;
    char message[LOG_LINE_MAX - 512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);

    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct tm tm;
    gmtime_r(&now.tv_sec, &tm);
    char when[40];
    size_t used = strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(when + used, sizeof(when) - used, ".%03ldZ", now.tv_nsec / 1000000);

    char line[LOG_LINE_MAX];
    size_t length;
    if (log_state.format == XP_LOG_JSON) {
        length = (size_t)snprintf(line, sizeof(line),
                                  "{\"time\":\"%s\",\"level\":\"%s\",\"role\":\"%s\",\"name\":\"",
                                  when, level_names[level], log_state.role);
        length = append_json(line, length, sizeof(line) - 64, log_state.name);
        length += (size_t)snprintf(line + length, sizeof(line) - length,
                                   "\",\"pid\":%d,\"message\":\"", (int)getpid());
        length = append_json(line, length, sizeof(line) - 8, message);
        length += (size_t)snprintf(line + length, sizeof(line) - length, "\"}\n");
    } else {
        const char *color = log_state.colored ? level_colors[level] : "";
        length = (size_t)snprintf(line, sizeof(line), "%s%s %-5s %s%s%s%s %s%s\n", color, when,
                                  level_names[level], log_state.role, log_state.name[0] ? "[" : "",
                                  log_state.name, log_state.name[0] ? "]" : "", message,
                                  color[0] ? "\033[0m" : "");
        if (length >= sizeof(line)) {
            length = sizeof(line) - 1;
            line[length - 1] = '\n';
        }
    }
    ssize_t written = write(STDERR_FILENO, line, length);
    (void)written; /* nowhere left to report to */
}

void xp_log_error(const char *what)
{
    const xp_error_t *error = xp_error_last();
    xp_log_write(XP_LOG_ERROR, "%s: %s", what, error->text);
    xp_log_write(XP_LOG_DEBUG, "recorded at %s:%d, status %s", error->file ? error->file : "?",
                 error->line, xp_status_name(error->status));
}
