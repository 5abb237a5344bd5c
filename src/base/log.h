/* SPDX-License-Identifier: MIT */
/*
 * Logging: one line an event, to stderr, never in library code below the apps and loop callbacks.
 *
 * Text form:  2026-11-29T19:30:01.123Z info  ffnagent[cpu:1] message
 * JSON form: {"time":"...","level":"info","role":"ffnagent","name":"cpu:1","pid":1,"message":"..."}
 * Thread-safe: a line is composed in a local buffer and written by one write(2).
 */
#ifndef XPOOL_BASE_LOG_H
#define XPOOL_BASE_LOG_H

#include <stdbool.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum xp_log_level {
    XP_LOG_DEBUG = 0,
    XP_LOG_INFO,
    XP_LOG_WARNING,
    XP_LOG_ERROR,
} xp_log_level_t;

typedef enum xp_log_format { XP_LOG_TEXT = 0, XP_LOG_JSON } xp_log_format_t;
typedef enum xp_log_color { XP_COLOR_AUTO = 0, XP_COLOR_ALWAYS, XP_COLOR_NEVER } xp_log_color_t;

/* Sets the process-wide form; call before threads start. */
void xp_log_configure(xp_log_level_t level, xp_log_format_t format, xp_log_color_t color);
/* Who is speaking, e.g. ("ffnagent", "cpu:1"); both are copied (31 bytes each). */
void xp_log_identify(const char *role, const char *name);

bool xp_log_enabled(xp_log_level_t level);
void xp_log_write(xp_log_level_t level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#define xp_log_debug(...) xp_log_write(XP_LOG_DEBUG, __VA_ARGS__)
#define xp_log_info(...)  xp_log_write(XP_LOG_INFO, __VA_ARGS__)
#define xp_log_warn(...)  xp_log_write(XP_LOG_WARNING, __VA_ARGS__)
#define xp_log_err(...)   xp_log_write(XP_LOG_ERROR, __VA_ARGS__)

/* Logs "what: <recorded message>" of this thread's last error. */
void xp_log_error(const char *what);

#ifdef __cplusplus
}
#endif
#endif
