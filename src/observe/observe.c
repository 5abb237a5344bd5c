/* SPDX-License-Identifier: MIT */
/* The ring of records in a mapped file: its one writer, and readers that never disturb it. */
#include "observe/observe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"

#define OBSERVE_WORDS (sizeof(observe_record_t) / sizeof(uint64_t))

struct observe {
    observe_header_t *header;
    observe_record_t *records;
    uint64_t bytes, written;
};

struct observe_reader {
    const observe_header_t *header;
    const observe_record_t *records;
    observe_header_t copy; /* of what does not change, checked */
    uint64_t bytes, next, skipped;
};

const char *observe_role_name(uint32_t role)
{
    static const char *const names[] = {"unknown", "rank", "atnagent", "ffnagent"};
    return role < sizeof(names) / sizeof(names[0]) ? names[role] : names[0];
}

static uint64_t observe_bytes(uint32_t capacity)
{
    return OBSERVE_HEADER_BYTES + (uint64_t)capacity * sizeof(observe_record_t);
}

/* ---- writing ----------------------------------------------------------------------------------
 */

static xp_status_t observe_make_folder(const char *folder)
{
    char path[1024];
    if (strlen(folder) >= sizeof(path))
        return xp_fail(XP_INVALID, "observe.folder is longer than %zu bytes", sizeof(path) - 1);
    snprintf(path, sizeof(path), "%s", folder);
    for (char *at = path + 1;; at++) {
        char kept = *at;
        if (kept != '/' && kept != '\0')
            continue;
        *at = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return xp_fail_errno(XP_IO, "cannot make the folder %s (observe.folder)", path);
        *at = kept;
        if (!kept)
            return XP_OK;
    }
}

static xp_status_t observe_make_file(const char *path, uint64_t bytes, int *fd_out)
{
    /* A file of this name is a dead process's whose pid came round again. */
    unlink(path);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot create %s", path);
    int error = posix_fallocate(fd, 0, (off_t)bytes);
    if (error) {
        close(fd);
        unlink(path);
        return xp_fail(XP_IO, "no room for the %llu bytes of %s (observe.records): %s",
                       (unsigned long long)bytes, path, strerror(error));
    }
    *fd_out = fd;
    return XP_OK;
}

xp_status_t observe_open(const char *folder, observe_role_t role, const char *name,
                         uint32_t capacity, observe_t **observe_out)
{
    if (!folder[0]) {
        *observe_out = NULL;
        return XP_OK;
    }
    if (capacity == 0 || capacity > OBSERVE_MAX_RECORDS)
        return xp_fail(XP_INVALID, "observe.records is %u, allowed are 1 to %u", capacity,
                       OBSERVE_MAX_RECORDS);
    XP_TRY(observe_make_folder(folder));
    char plain[96], path[1280];
    snprintf(plain, sizeof(plain), "%s", name);
    for (char *at = plain; *at; at++)
        if (*at == '/' || (unsigned char)*at <= ' ')
            *at = '_';
    int length = snprintf(path, sizeof(path), "%s/%s-%s-%ld.observe", folder,
                          observe_role_name(role), plain, (long)getpid());
    if (length < 0 || (size_t)length >= sizeof(path))
        return xp_fail(XP_INVALID, "observe.folder %s is too long a path", folder);
    observe_t *observe = calloc(1, sizeof(*observe));
    if (!observe)
        return xp_fail(XP_NO_MEMORY, "no memory for an observer");
    observe->bytes = observe_bytes(capacity);
    int fd = -1;
    xp_status_t status;
    XP_TRY_GOTO(status, fail, observe_make_file(path, observe->bytes, &fd));
    /* Populated, so that the first round of the ring does not fault page by page. */
    void *address =
        mmap(NULL, observe->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    close(fd);
    if (address == MAP_FAILED) {
        status = xp_fail_errno(XP_NO_MEMORY, "cannot map %s", path);
        unlink(path);
        goto fail;
    }
    observe->header = address;
    observe->records = (observe_record_t *)((char *)address + OBSERVE_HEADER_BYTES);
    observe_header_t *header = observe->header;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    header->realtime_offset_ns =
        (int64_t)now.tv_sec * (int64_t)XP_NS_PER_S + now.tv_nsec - (int64_t)xp_monotonic_ns();
    header->abi = OBSERVE_ABI;
    header->role = role;
    header->pid = (uint32_t)getpid();
    header->capacity = capacity;
    snprintf(header->name, sizeof(header->name), "%s", name);
    __atomic_store_n(&header->magic, OBSERVE_MAGIC, __ATOMIC_RELEASE);
    *observe_out = observe;
    return XP_OK;
fail:
    free(observe);
    return status;
}

void observe_close(observe_t *observe)
{
    if (!observe)
        return;
    munmap(observe->header, observe->bytes);
    free(observe);
}

void observe_name_instance(observe_t *observe, uint32_t instance, const char *model_id)
{
    if (!observe || instance >= OBSERVE_MAX_INSTANCES)
        return;
    snprintf(observe->header->instance[instance], sizeof(observe->header->instance[0]), "%s",
             model_id);
    if (observe->header->instances <= instance)
        observe->header->instances = instance + 1;
}

void observe_write(observe_t *observe, const observe_record_t *record)
{
    if (!observe)
        return;
    uint64_t index = observe->written + 1;
    observe_record_t *slot = &observe->records[observe->written % observe->header->capacity];
    observe_record_t filled = *record;
    filled.index = 0;
    if (!filled.end_ns)
        filled.end_ns = xp_monotonic_ns();
    uint64_t words[OBSERVE_WORDS], *at = (uint64_t *)slot;
    memcpy(words, &filled, sizeof(words));
    /* acquire: the fields are written after the index was taken back. A reader that saw one of
     * them, each by an acquire load, then sees the changed index. */
    __atomic_exchange_n(&slot->index, 0, __ATOMIC_ACQ_REL);
    for (uint32_t i = 1; i < OBSERVE_WORDS; i++)
        __atomic_store_n(&at[i], words[i], __ATOMIC_RELEASE);
    /* release: a reader that acquires the index, or `written`, sees the fields. */
    __atomic_store_n(&slot->index, index, __ATOMIC_RELEASE);
    observe->written = index;
    __atomic_store_n(&observe->header->written, index, __ATOMIC_RELEASE);
}

/* ---- reading ----------------------------------------------------------------------------------
 */

static xp_status_t reader_check(observe_reader_t *reader, const char *path, uint64_t bytes)
{
    if (bytes < OBSERVE_HEADER_BYTES ||
        __atomic_load_n(&reader->header->magic, __ATOMIC_ACQUIRE) != OBSERVE_MAGIC)
        return xp_fail(XP_INVALID, "%s is no file of an observer", path);
    reader->copy = *reader->header;
    observe_header_t *copy = &reader->copy;
    if (copy->abi != OBSERVE_ABI)
        return xp_fail(XP_UNSUPPORTED, "%s has observer ABI %u, this program reads %u", path,
                       copy->abi, OBSERVE_ABI);
    if (copy->capacity == 0 || copy->capacity > OBSERVE_MAX_RECORDS ||
        bytes < observe_bytes(copy->capacity) || copy->instances > OBSERVE_MAX_INSTANCES)
        return xp_fail(XP_INVALID, "%s is damaged: %u records in %llu bytes", path, copy->capacity,
                       (unsigned long long)bytes);
    copy->name[sizeof(copy->name) - 1] = '\0';
    for (uint32_t i = 0; i < OBSERVE_MAX_INSTANCES; i++)
        copy->instance[i][sizeof(copy->instance[i]) - 1] = '\0';
    return XP_OK;
}

xp_status_t observe_reader_open(const char *path, observe_reader_t **reader_out)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO, "cannot open %s", path);
    observe_reader_t *reader = calloc(1, sizeof(*reader));
    xp_status_t status;
    if (!reader) {
        status = xp_fail(XP_NO_MEMORY, "no memory to read %s", path);
        goto fail;
    }
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < OBSERVE_HEADER_BYTES) {
        status = xp_fail(XP_INVALID, "%s is no file of an observer", path);
        goto fail;
    }
    reader->bytes = (uint64_t)info.st_size;
    void *address = mmap(NULL, reader->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        status = xp_fail_errno(XP_NO_MEMORY, "cannot map %s", path);
        goto fail;
    }
    reader->header = address;
    reader->records = (const observe_record_t *)((const char *)address + OBSERVE_HEADER_BYTES);
    reader->next = 1;
    status = reader_check(reader, path, reader->bytes);
    if (status != XP_OK) {
        munmap(address, reader->bytes);
        goto fail;
    }
    close(fd);
    *reader_out = reader;
    return XP_OK;
fail:
    close(fd);
    free(reader);
    return status;
}

void observe_reader_close(observe_reader_t *reader)
{
    if (!reader)
        return;
    munmap((void *)(uintptr_t)reader->header, reader->bytes);
    free(reader);
}

const observe_header_t *observe_reader_header(const observe_reader_t *reader)
{
    return &reader->copy;
}

uint64_t observe_reader_skipped(const observe_reader_t *reader)
{
    return reader->skipped;
}

xp_status_t observe_reader_next(observe_reader_t *reader, observe_record_t *record_out)
{
    uint32_t capacity = reader->copy.capacity;
    for (;;) {
        /* acquire: pairs with observe_write's last store. */
        uint64_t written = __atomic_load_n(&reader->header->written, __ATOMIC_ACQUIRE);
        if (reader->next > written)
            return XP_RETRY;
        uint64_t oldest = written > capacity ? written - capacity + 1 : 1;
        if (reader->next < oldest) {
            reader->skipped += oldest - reader->next;
            reader->next = oldest;
        }
        const observe_record_t *slot = &reader->records[(reader->next - 1) % capacity];
        uint64_t before = __atomic_load_n(&slot->index, __ATOMIC_ACQUIRE);
        uint64_t words[OBSERVE_WORDS];
        const uint64_t *at = (const uint64_t *)slot;
        for (uint32_t i = 1; i < OBSERVE_WORDS; i++)
            words[i] = __atomic_load_n(&at[i], __ATOMIC_ACQUIRE);
        uint64_t after = __atomic_load_n(&slot->index, __ATOMIC_RELAXED);
        uint64_t wanted = reader->next++;
        if (before == wanted && after == wanted) {
            words[0] = wanted;
            memcpy(record_out, words, sizeof(words));
            return XP_OK;
        }
        reader->skipped++;
    }
}
