/* SPDX-License-Identifier: MIT */
/*
 * Statuses and the error record.
 *
 * A fallible function returns xp_status_t. The function that *detects* an error calls xp_fail(),
 * which stores message and place once, in a record of the calling thread, and returns the status;
 * callers pass the status on unchanged. Only apps and loop callbacks log (xp_log_error(), log.h).
 * Outputs come last in the parameter list and are written only on XP_OK.
 */
#ifndef XPOOL_BASE_STATUS_H
#define XPOOL_BASE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum xp_status {
    XP_OK = 0,
    XP_RETRY,       /* not now, nothing happened: try again later (queue full, would block) */
    XP_TIMEOUT,     /* a deadline passed; the operation may still be in flight */
    XP_CLOSED,      /* the object was closed for good by its owner: terminal, not a failure */
    XP_CANCELLED,   /* the caller itself gave this request up */
    XP_INVALID,     /* bad input: give up this request, keep everything else */
    XP_NOT_FOUND,   /* the named thing does not exist */
    XP_UNSUPPORTED, /* valid, but not something this build or version does */
    XP_NO_MEMORY,   /* a budget or the system is out of memory; nothing is half done */
    XP_IO,          /* the operating system refused; errno text is in the message */
    XP_PEER,        /* a peer broke the protocol or died: drop this peer */
    XP_FATAL,       /* canonical failure: end this Generation */
    XP_STATUS_COUNT
} xp_status_t;

#define XP_ERROR_TEXT_MAX 1024

/* The last error recorded by this thread. `file` is a static string. */
typedef struct xp_error {
    xp_status_t status;
    const char *file;
    int line;
    char text[XP_ERROR_TEXT_MAX];
} xp_error_t;

/* Records an error for this thread and returns `status`. Text is cut at XP_ERROR_TEXT_MAX. */
xp_status_t xp_fail_at(xp_status_t status, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5), cold));
/* The value is the argument itself, so that the compiler sees a constant that is not XP_OK. */
static inline xp_status_t xp_fail_value(xp_status_t recorded, xp_status_t status)
{
    (void)recorded;
    return status;
}
#define xp_fail(status, ...)                                                                       \
    xp_fail_value(xp_fail_at((status), __FILE__, __LINE__, __VA_ARGS__), (status))

/* As xp_fail, with ": <strerror(errno)>" appended. */
xp_status_t xp_fail_errno_at(xp_status_t status, const char *file, int line, const char *format,
                             ...) __attribute__((format(printf, 4, 5), cold));
#define xp_fail_errno(status, ...)                                                                 \
    xp_fail_value(xp_fail_errno_at((status), __FILE__, __LINE__, __VA_ARGS__), (status))

/* Puts "context: " before the recorded message (adds the file or model name on the way up). */
xp_status_t xp_fail_context(xp_status_t status, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));

const xp_error_t *xp_error_last(void); /* never NULL; text "" when nothing was recorded */
void xp_error_clear(void);
const char *xp_status_name(xp_status_t status); /* "ok", "retry", ... */

/* Passes a non-OK status on. XP_TRY_GOTO is for functions with a clean-up ladder. */
#define XP_TRY(expression)                                                                         \
    do {                                                                                           \
        xp_status_t xp_try_status_ = (expression);                                                 \
        if (xp_try_status_ != XP_OK)                                                               \
            return xp_try_status_;                                                                 \
    } while (0)
#define XP_TRY_GOTO(status_variable, label, expression)                                            \
    do {                                                                                           \
        (status_variable) = (expression);                                                          \
        if ((status_variable) != XP_OK)                                                            \
            goto label;                                                                            \
    } while (0)

/* An invariant. Stays on in release builds; never used for input, peers or devices. */
#define XP_ASSERT(condition)                                                                       \
    ((condition) ? (void)0 : xp_assert_fail(#condition, __FILE__, __LINE__))
void xp_assert_fail(const char *condition, const char *file, int line)
    __attribute__((noreturn, cold));

#ifdef __cplusplus
}
#endif
#endif
