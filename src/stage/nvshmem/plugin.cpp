// SPDX-License-Identifier: MIT
// The plug-in's table over the NVSHMEM host library. Only stage/heap.c calls it, from one thread;
// it keeps no state of its own and frees nothing: a process that has joined cannot join again, so
// its end is NVSHMEM's end too.
#include "stage/nvshmem/plugin.h"

#include <cstring>

#include <nvshmem_host.h>

#define XPOOL_TEXT_OF(x) #x
#define XPOOL_TEXT(x)    XPOOL_TEXT_OF(x)

__asm__(".section .rodata\n.balign 64\nxpool_nvshmem_image_begin:\n"
        ".incbin \"" XPOOL_NVSHMEM_IMAGE "\"\nxpool_nvshmem_image_end:\n.previous\n");
extern "C" const unsigned char xpool_nvshmem_image_begin[], xpool_nvshmem_image_end[];

// The library's own nvshmem_ptr: the headers declare it for device code, inline and without a body.
extern "C" void *xpool_nvshmem_host_ptr(const void *symmetric, int pe) __asm__("nvshmem_ptr");

namespace
{

static_assert(sizeof(nvshmemx_uniqueid_t) == XPOOL_NVSHMEM_ID_BYTES, "an id fits");

int make_id(unsigned char *id_out)
{
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    const int result = nvshmemx_get_uniqueid(&id);
    if (result == 0)
        std::memcpy(id_out, &id, sizeof(id));
    return result;
}

int join(const unsigned char *bytes, int pe, int pes)
{
    nvshmemx_uniqueid_t id;
    std::memcpy(&id, bytes, sizeof(id));
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    nvshmemx_init_init_attr_ver_only(attributes);
    const int result = nvshmemx_set_attr_uniqueid_args(pe, pes, &id, &attributes);
    return result ? result : nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

xpool_nvshmem_sharing_t sharing()
{
    switch (nvshmemx_init_status()) {
    case NVSHMEM_STATUS_IS_INITIALIZED:
        return XPOOL_NVSHMEM_ALONE;
    case NVSHMEM_STATUS_FULL_MPG:
        return XPOOL_NVSHMEM_FULL;
    case NVSHMEM_STATUS_LIMITED_MPG:
        return XPOOL_NVSHMEM_LIMITED;
    default:
        return XPOOL_NVSHMEM_UNKNOWN;
    }
}

void *take(uint64_t bytes)
{
    return nvshmem_malloc(bytes);
}

void *peer(void *symmetric, int pe)
{
    return xpool_nvshmem_host_ptr(symmetric, pe);
}

int module_ready(void *module)
{
    return nvshmemx_cumodule_init(static_cast<CUmodule>(module));
}

const xpool_nvshmem_plugin_t table = {
    XPOOL_NVSHMEM_ABI,
    sizeof(xpool_nvshmem_plugin_t),
    XPOOL_TEXT(NVSHMEM_VENDOR_MAJOR_VERSION) "." XPOOL_TEXT(
        NVSHMEM_VENDOR_MINOR_VERSION) "." XPOOL_TEXT(NVSHMEM_VENDOR_PATCH_VERSION),
    xpool_nvshmem_image_begin,
    xpool_nvshmem_image_end,
    make_id,
    join,
    sharing,
    take,
    peer,
    module_ready,
};

} // namespace

extern "C" __attribute__((visibility("default"))) const xpool_nvshmem_plugin_t *
xpool_nvshmem_plugin(void)
{
    return &table;
}
