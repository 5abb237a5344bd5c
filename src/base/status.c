/* SPDX-License-Identifier: MIT */
/* The per-thread error record. Never allocates, never logs. */
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local xp_error_t error_record;

const xp_error_t *xp_error_last(void)
{
    return &error_record;
}

void xp_error_clear(void)
{
    error_record.status = XP_OK;
    error_record.file = "";
    error_record.line = 0;
    error_record.text[0] = '\0';
}

xp_status_t xp_fail_at(xp_status_t status, const char *file, int line, const char *format, ...)
{
    /* The arguments may point into the record itself (re-wrapping a message). */
    char text[XP_ERROR_TEXT_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    memcpy(error_record.text, text, sizeof(text));
    error_record.status = status;
    error_record.file = file;
    error_record.line = line;
    return status;
}

xp_status_t xp_fail_errno_at(xp_status_t status, const char *file, int line, const char *format,
                             ...)
{
    int saved_errno = errno;
    char text[XP_ERROR_TEXT_MAX - 128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    char reason[96];
    const char *reason_text = strerror_r(saved_errno, reason, sizeof(reason));
    xp_fail_at(status, file, line, "%s: %s", text, reason_text);
    errno = saved_errno;
    return status;
}

xp_status_t xp_fail_context(xp_status_t status, const char *format, ...)
{
    char context[XP_ERROR_TEXT_MAX / 2];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(context, sizeof(context), format, arguments);
    va_end(arguments);
    char text[XP_ERROR_TEXT_MAX];
    snprintf(text, sizeof(text), "%s: %.*s", context,
             (int)(XP_ERROR_TEXT_MAX - strlen(context) - 3), error_record.text);
    memcpy(error_record.text, text, sizeof(text));
    error_record.status = status;
    return status;
}

const char *xp_status_name(xp_status_t status)
{
    static const char *const names[XP_STATUS_COUNT] = {
        [XP_OK] = "ok",
        [XP_RETRY] = "retry",
        [XP_TIMEOUT] = "timeout",
        [XP_CLOSED] = "closed",
        [XP_CANCELLED] = "cancelled",
        [XP_INVALID] = "invalid",
        [XP_NOT_FOUND] = "not found",
        [XP_UNSUPPORTED] = "unsupported",
        [XP_NO_MEMORY] = "no memory",
        [XP_IO] = "i/o error",
        [XP_PEER] = "peer failure",
        [XP_FATAL] = "fatal",
    };
    return (unsigned)status < XP_STATUS_COUNT ? names[status] : "unknown status";
}

void xp_assert_fail(const char *condition, const char *file, int line)
{
    fprintf(stderr, "xpool: invariant broken: %s (%s:%d); please report this\n", condition, file,
            line);
    abort();
}
