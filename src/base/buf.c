/* SPDX-License-Identifier: MIT */
/* Bounded buffers and whole-file reads. */
#include "base/buf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void xp_buf_init(xp_buf_t *buf, size_t maximum_bytes)
{
    *buf = (xp_buf_t){.maximum = maximum_bytes};
}

void xp_buf_fini(xp_buf_t *buf)
{
    free(buf->data);
    *buf = (xp_buf_t){.maximum = buf->maximum};
}

void xp_buf_clear(xp_buf_t *buf)
{
    buf->length = 0;
    if (buf->data)
        buf->data[0] = '\0';
}

static xp_status_t buf_reserve(xp_buf_t *buf, size_t extra)
{
    if (extra > buf->maximum - buf->length)
        return xp_fail(XP_NO_MEMORY, "buffer would pass its limit of %zu bytes", buf->maximum);
    size_t needed = buf->length + extra + 1;
    if (needed <= buf->capacity)
        return XP_OK;
    size_t capacity = buf->capacity ? buf->capacity : 256;
    while (capacity < needed)
        capacity *= 2;
    char *data = realloc(buf->data, capacity);
    if (!data)
        return xp_fail(XP_NO_MEMORY, "no memory for a buffer of %zu bytes", capacity);
    buf->data = data;
    buf->capacity = capacity;
    return XP_OK;
}

xp_status_t xp_buf_append(xp_buf_t *buf, const void *bytes, size_t length)
{
    XP_TRY(buf_reserve(buf, length));
    if (length)
        memcpy(buf->data + buf->length, bytes, length);
    buf->length += length;
    buf->data[buf->length] = '\0';
    return XP_OK;
}

xp_status_t xp_buf_append_text(xp_buf_t *buf, const char *text)
{
    return xp_buf_append(buf, text, strlen(text));
}

xp_status_t xp_buf_printf(xp_buf_t *buf, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0)
        return xp_fail(XP_INVALID, "format error");
    XP_TRY(buf_reserve(buf, (size_t)length));
    va_start(arguments, format);
    vsnprintf(buf->data + buf->length, (size_t)length + 1, format, arguments);
    va_end(arguments);
    buf->length += (size_t)length;
    return XP_OK;
}

xp_status_t xp_file_read(const char *path, size_t maximum_bytes, char **data_out,
                         size_t *length_out)
{
    xp_status_t status;
    char *data = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO, "cannot open %s", path);
    struct stat info;
    if (fstat(fd, &info) != 0) {
        status = xp_fail_errno(XP_IO, "cannot stat %s", path);
        goto fail;
    }
    if (S_ISDIR(info.st_mode)) {
        status = xp_fail(XP_INVALID, "%s is a folder, not a file", path);
        goto fail;
    }
    /* Pipes and /proc files report size 0, so read to the end rather than trust st_size. */
    size_t capacity = (size_t)(info.st_size > 0 ? info.st_size : 0) + 4096, length = 0;
    data = malloc(capacity + 1);
    if (!data) {
        status = xp_fail(XP_NO_MEMORY, "no memory to read %s", path);
        goto fail;
    }
    for (;;) {
        ssize_t got = read(fd, data + length, capacity - length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            status = xp_fail_errno(XP_IO, "cannot read %s", path);
            goto fail;
        }
        if (got == 0)
            break;
        length += (size_t)got;
        if (length > maximum_bytes) {
            status = xp_fail(XP_INVALID, "%s is larger than the limit of %zu bytes", path,
                             maximum_bytes);
            goto fail;
        }
        if (length == capacity) {
            capacity *= 2;
            char *larger = realloc(data, capacity + 1);
            if (!larger) {
                status = xp_fail(XP_NO_MEMORY, "no memory to read %s", path);
                goto fail;
            }
            data = larger;
        }
    }
    close(fd);
    data[length] = '\0';
    *data_out = data;
    *length_out = length;
    return XP_OK;
fail:
    free(data);
    close(fd);
    return status;
}
