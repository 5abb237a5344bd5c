/* SPDX-License-Identifier: MIT */
/*
 * A plug-in of provider nvshmem without NVSHMEM and without a GPU, for tests of whole processes:
 * the symmetric heap is shared memory of PE 0, which the id names by process and descriptor, so
 * nothing is left in any folder but for a socket's name of each process, as the library may leave
 * one when it is killed. XPOOL_FAKE_NVSHMEM makes it behave: "limited" (several PEs a GPU without
 * full support), "far" (no other PE's memory is mapped), "refuse" (join fails), "hang" (join waits
 * for a PE that never comes).
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "stage/nvshmem/plugin.h"

#define HEADER_BYTES 4096
#define WAIT_MS      20000

typedef struct header {
    uint32_t joined, taken;
} header_t;

static int my_pe, pe_count, memory = -1;
static header_t *header;
static char *heap; /* of PE 0 */
static uint64_t heap_bytes;

static int behaves(const char *how)
{
    const char *says = getenv("XPOOL_FAKE_NVSHMEM");
    return says && strcmp(says, how) == 0;
}

static int wait_for(const uint32_t *word, uint32_t value)
{
    for (int ms = 0; ms < WAIT_MS; ms++) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) >= value)
            return 0;
        struct timespec nap = {.tv_nsec = 1000000};
        nanosleep(&nap, NULL);
    }
    return 1;
}

static int make_id(unsigned char *id_out)
{
    memory = memfd_create("fake-nvshmem", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, HEADER_BYTES) != 0)
        return 1;
    memset(id_out, 0, XPOOL_NVSHMEM_ID_BYTES);
    snprintf((char *)id_out, XPOOL_NVSHMEM_ID_BYTES, "/proc/%d/fd/%d", (int)getpid(), memory);
    return 0;
}

static int join(const unsigned char *id, int pe, int pes)
{
    if (behaves("refuse"))
        return 7;
    my_pe = pe;
    pe_count = pes;
    if (memory < 0)
        memory = open((const char *)id, O_RDWR | O_CLOEXEC);
    if (memory < 0)
        return 2;
    void *at = mmap(NULL, HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (at == MAP_FAILED)
        return 3;
    header = at;
    char socket[64];
    snprintf(socket, sizeof(socket), "/tmp/nvshmem-socket-%d-%d", (int)getpid(), (int)getppid());
    int left = open(socket, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (left >= 0)
        close(left);
    __atomic_add_fetch(&header->joined, 1, __ATOMIC_ACQ_REL);
    return wait_for(&header->joined, (uint32_t)pes + (behaves("hang") ? 1 : 0));
}

static xpool_nvshmem_sharing_t sharing(void)
{
    return behaves("limited") ? XPOOL_NVSHMEM_LIMITED : XPOOL_NVSHMEM_FULL;
}

static void *take(uint64_t bytes)
{
    uint64_t all = HEADER_BYTES + bytes * (uint64_t)pe_count;
    if (ftruncate(memory, (off_t)all) != 0)
        return NULL;
    char *at = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (at == MAP_FAILED)
        return NULL;
    heap = at + HEADER_BYTES;
    heap_bytes = bytes;
    memset(heap + (uint64_t)my_pe * bytes, 0xab, bytes);
    __atomic_add_fetch(&header->taken, 1, __ATOMIC_ACQ_REL);
    return wait_for(&header->taken, (uint32_t)pe_count) == 0 ? heap + (uint64_t)my_pe * bytes
                                                             : NULL;
}

static void *peer(void *symmetric, int pe)
{
    if (behaves("far") && pe != my_pe)
        return NULL;
    return (char *)symmetric + (int64_t)(pe - my_pe) * (int64_t)heap_bytes;
}

static int module_ready(void *module)
{
    return module ? 0 : 1;
}

static const unsigned char image[] = "no device code";

const xpool_nvshmem_plugin_t *xpool_nvshmem_plugin(void)
{
    static const xpool_nvshmem_plugin_t table = {XPOOL_NVSHMEM_ABI,
                                                 sizeof(xpool_nvshmem_plugin_t),
                                                 "fake",
                                                 image,
                                                 image + sizeof(image),
                                                 make_id,
                                                 join,
                                                 sharing,
                                                 take,
                                                 peer,
                                                 module_ready};
    return &table;
}
