/* SPDX-License-Identifier: MIT */
/*
 * What the plug-in of provider `nvshmem` offers: a table of plain C functions over the NVSHMEM host
 * library, and the device code that was linked with NVSHMEM's device library. It is an object of
 * its own (libxpool_nvshmem.so), loaded at run time by stage/heap.c, since NVSHMEM's headers are
 * C++ and its library comes from a Python wheel that need not be there.
 *
 * Functions that return int give 0 for success. Those marked *collective* return when every PE has
 * called them, and none may be called while a kernel of this process stays on its device.
 */
#ifndef XPOOL_STAGE_NVSHMEM_PLUGIN_H
#define XPOOL_STAGE_NVSHMEM_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define XPOOL_NVSHMEM_ABI      2u  /* also of what the kernels are given: stage/atn.c */
#define XPOOL_NVSHMEM_ID_BYTES 128 /* of a unique id, its version included */
#define XPOOL_NVSHMEM_SYMBOL   "xpool_nvshmem_plugin"

/* Kernels of the image. */
#define XPOOL_NVSHMEM_RELAY    "stage_relay_nvshmem"
#define XPOOL_NVSHMEM_DESCRIBE "stage_relay_describe"
#define XPOOL_NVSHMEM_COURIER  "stage_courier"

typedef enum xpool_nvshmem_sharing {
    XPOOL_NVSHMEM_ALONE = 0, /* one PE a GPU */
    XPOOL_NVSHMEM_FULL,      /* several PEs a GPU, all of the library works */
    XPOOL_NVSHMEM_LIMITED,   /* several PEs a GPU, point-to-point synchronisation does not work */
    XPOOL_NVSHMEM_UNKNOWN
} xpool_nvshmem_sharing_t;

typedef struct xpool_nvshmem_plugin {
    uint32_t abi, bytes; /* XPOOL_NVSHMEM_ABI, sizeof(xpool_nvshmem_plugin_t) */
    const char *release; /* of NVSHMEM that it was built with, "3.4.5" */
    const unsigned char *image, *image_end;
    /* By PE 0 only, once: a fresh id, which the others need to join. */
    int (*make_id)(unsigned char *id_out);
    /* Collective. The device's context is the calling thread's. */
    int (*join)(const unsigned char *id, int pe, int pes);
    xpool_nvshmem_sharing_t (*sharing)(void);
    /* Collective; the same bytes everywhere. NULL: no memory. */
    void *(*take)(uint64_t bytes);
    /* Where the PE's copy of a symmetric address is mapped here; NULL: it is not. */
    void *(*peer)(void *symmetric, int pe);
    /* Tells device code (a CUmodule) of what was joined; once for each module, before its first
     * launch. */
    int (*module_ready)(void *module);
} xpool_nvshmem_plugin_t;

const xpool_nvshmem_plugin_t *xpool_nvshmem_plugin(void);

#ifdef __cplusplus
}
#endif
#endif
