/* SPDX-License-Identifier: MIT */
/*
 * A plug-in of provider nvshmem for tests in one process: three PEs, AtnAgent 0 and FfnAgents 1 and
 * 2, each with its part of one block of memory. The test says which of them joins by the order.
 */
#ifndef XPOOL_TESTS_HEAP_PLUGIN_H
#define XPOOL_TESTS_HEAP_PLUGIN_H

#include <stdlib.h>
#include <string.h>

#include "stage/heap.h"

#define PES 3
static char *heap_memory; /* NULL: none */
static uint64_t heap_bytes;
static int joining, joined[PES], sharing_says;
static int heap_modules;

/* What a device call does with a symmetric address. */
static void *at_pe(uint64_t address, uint32_t pe)
{
    uint64_t offset = address - (uint64_t)(uintptr_t)heap_memory;
    assert_true(offset < heap_bytes * PES && pe < PES);
    return heap_memory + pe * heap_bytes + offset % heap_bytes;
}
static int plugin_make_id(unsigned char *id)
{
    memset(id, 0x5a, XPOOL_NVSHMEM_ID_BYTES);
    return 0;
}
static int plugin_join(const unsigned char *id, int pe, int pes)
{
    if (pes != PES || joined[pe] || id[0] != 0x5a || id[XPOOL_NVSHMEM_ID_BYTES - 1] != 0x5a)
        return 1;
    joined[pe] = 1;
    joining = pe;
    return 0;
}
static xpool_nvshmem_sharing_t plugin_sharing(void)
{
    return (xpool_nvshmem_sharing_t)sharing_says;
}
static void *plugin_take(uint64_t bytes)
{
    if (!heap_memory) {
        heap_bytes = bytes;
        heap_memory = aligned_alloc(4096, bytes * PES);
        memset(heap_memory, 0xab, bytes * PES);
    }
    return bytes == heap_bytes ? heap_memory + (uint64_t)joining * bytes : NULL;
}
static void *plugin_peer(void *symmetric, int pe)
{
    return at_pe((uint64_t)(uintptr_t)symmetric, (uint32_t)pe);
}
static int plugin_module_ready(void *module)
{
    heap_modules++;
    return module ? 0 : 1;
}
static const unsigned char plugin_code[1];
static const xpool_nvshmem_plugin_t plugin = {
    .abi = XPOOL_NVSHMEM_ABI,
    .bytes = sizeof(plugin),
    .release = "test",
    .image = plugin_code,
    .image_end = plugin_code + 1,
    .make_id = plugin_make_id,
    .join = plugin_join,
    .sharing = plugin_sharing,
    .take = plugin_take,
    .peer = plugin_peer,
    .module_ready = plugin_module_ready,
};

#endif
