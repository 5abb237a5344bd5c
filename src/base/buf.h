/* SPDX-License-Identifier: MIT */
/* A growing byte buffer with a stated maximum. Always NUL-terminated after the first append. */
#ifndef XPOOL_BASE_BUF_H
#define XPOOL_BASE_BUF_H

#include <stdarg.h>
#include <stddef.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xp_buf {
    char *data; /* NULL until the first append */
    size_t length, capacity, maximum;
} xp_buf_t;

void xp_buf_init(xp_buf_t *buf, size_t maximum_bytes);
void xp_buf_fini(xp_buf_t *buf);
void xp_buf_clear(xp_buf_t *buf); /* keeps the memory */
/* XP_NO_MEMORY past the maximum; the buffer is unchanged then. */
xp_status_t xp_buf_append(xp_buf_t *buf, const void *bytes, size_t length);
xp_status_t xp_buf_append_text(xp_buf_t *buf, const char *text);
xp_status_t xp_buf_printf(xp_buf_t *buf, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Reads a whole file of at most maximum_bytes. `*data_out` is malloc'd and NUL-terminated. */
xp_status_t xp_file_read(const char *path, size_t maximum_bytes, char **data_out,
                         size_t *length_out);

#ifdef __cplusplus
}
#endif
#endif
