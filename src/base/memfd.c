/* SPDX-License-Identifier: MIT */
/*
 * Anonymous shared memory and the process's table of mappings. The table has one owner at a time
 * (its mutex); it is never touched on a message path.
 */
#include "base/memfd.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Arenas of 64 Instances of 8 ranks, the Generations' arenas and doorbells, and room. */
#define MEMFD_MAPPINGS_MAX 1024

typedef struct memfd_mapping {
    void *address; /* NULL: free entry */
    uint64_t bytes;
    dev_t device;
    ino_t inode;
    bool writable;
    uint32_t users;
} memfd_mapping_t;

static memfd_mapping_t mappings[MEMFD_MAPPINGS_MAX];
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

static xp_status_t memfd_create_sealed(const char *name, uint64_t bytes, int seals, int *fd_out)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot create shared memory %s", name);
    if (ftruncate(fd, (off_t)bytes) != 0) {
        xp_status_t status =
            xp_fail_errno(XP_NO_MEMORY, "cannot size shared memory %s to %llu bytes", name,
                          (unsigned long long)bytes);
        close(fd);
        return status;
    }
    if (fcntl(fd, F_ADD_SEALS, seals) != 0) {
        xp_status_t status = xp_fail_errno(XP_IO, "cannot seal shared memory %s", name);
        close(fd);
        return status;
    }
    *fd_out = fd;
    return XP_OK;
}

xp_status_t xp_memfd_create(const char *name, uint64_t bytes, int *fd_out)
{
    return memfd_create_sealed(name, bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, fd_out);
}

xp_status_t xp_memfd_create_fillable(const char *name, uint64_t bytes, int *fd_out)
{
    return memfd_create_sealed(name, bytes, F_SEAL_SHRINK | F_SEAL_GROW, fd_out);
}

xp_status_t xp_memfd_freeze(int fd)
{
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SEAL) != 0)
        return xp_fail_errno(XP_IO, "cannot freeze shared memory");
    return XP_OK;
}

xp_status_t xp_memfd_check_frozen(int fd, uint64_t bytes)
{
    const int wanted = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & wanted) != wanted)
        return xp_fail(XP_PEER, "a received descriptor is no frozen memory");
    if (fstat(fd, &info) != 0 || (uint64_t)info.st_size != bytes)
        return xp_fail(XP_PEER, "received frozen memory has another size than the %llu bytes told",
                       (unsigned long long)bytes);
    return XP_OK;
}

xp_status_t xp_memfd_check(int fd, uint64_t *bytes_out)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return xp_fail_errno(XP_PEER, "a received descriptor is not usable");
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return xp_fail(XP_PEER, "a received descriptor is no shared memory of sealed size");
    *bytes_out = (uint64_t)info.st_size;
    return XP_OK;
}

static xp_status_t memfd_map(int fd, uint64_t bytes, bool writable, void **address_out)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return xp_fail_errno(XP_IO, "cannot inspect shared memory");
    if (bytes == 0 || (uint64_t)info.st_size < bytes)
        return xp_fail(XP_PEER, "shared memory has %llu bytes where %llu are expected",
                       (unsigned long long)info.st_size, (unsigned long long)bytes);

    xp_status_t status = XP_OK;
    memfd_mapping_t *entry = NULL;
    pthread_mutex_lock(&mappings_lock);
    for (uint32_t i = 0; i < MEMFD_MAPPINGS_MAX; i++) {
        memfd_mapping_t *candidate = &mappings[i];
        if (!candidate->address) {
            if (!entry)
                entry = candidate;
        } else if (candidate->device == info.st_dev && candidate->inode == info.st_ino &&
                   candidate->bytes >= bytes && candidate->writable == writable) {
            candidate->users++;
            *address_out = candidate->address;
            goto done;
        }
    }
    if (!entry) {
        status =
            xp_fail(XP_NO_MEMORY, "more than %d shared memories are mapped", MEMFD_MAPPINGS_MAX);
        goto done;
    }
    /* Kernels before 6.7 take no shared mapping of frozen memory; a private one that nobody writes
     * to is the same pages. */
    void *address = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                         writable ? MAP_SHARED : MAP_PRIVATE, fd, 0);
    if (address == MAP_FAILED) {
        status = xp_fail_errno(XP_NO_MEMORY, "cannot map %llu bytes of shared memory",
                               (unsigned long long)bytes);
        goto done;
    }
    *entry = (memfd_mapping_t){.address = address,
                               .bytes = bytes,
                               .device = info.st_dev,
                               .inode = info.st_ino,
                               .writable = writable,
                               .users = 1};
    *address_out = address;
done:
    pthread_mutex_unlock(&mappings_lock);
    return status;
}

xp_status_t xp_memfd_map(int fd, uint64_t bytes, void **address_out)
{
    return memfd_map(fd, bytes, true, address_out);
}

xp_status_t xp_memfd_map_frozen(int fd, uint64_t bytes, void **address_out)
{
    return memfd_map(fd, bytes, false, address_out);
}

void xp_memfd_unmap(void *address)
{
    if (!address)
        return;
    bool found = false;
    pthread_mutex_lock(&mappings_lock);
    for (uint32_t i = 0; i < MEMFD_MAPPINGS_MAX && !found; i++) {
        memfd_mapping_t *entry = &mappings[i];
        if (entry->address != address)
            continue;
        found = true;
        if (--entry->users == 0) {
            munmap(entry->address, entry->bytes);
            *entry = (memfd_mapping_t){0};
        }
    }
    pthread_mutex_unlock(&mappings_lock);
    XP_ASSERT(found);
}

xp_status_t xp_fd_duplicate(int fd, int *fd_out)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return xp_fail_errno(XP_IO, "cannot duplicate descriptor %d", fd);
    *fd_out = copy;
    return XP_OK;
}
