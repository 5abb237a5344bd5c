/* SPDX-License-Identifier: MIT */
/* Owns the courier's table in device memory and its resident kernel. One thread. */
#include "stage/courier_host.h"

#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

#define COURIER_START_NS (10 * XP_NS_PER_S)
#define COURIER_STOP_NS  (1 * XP_NS_PER_S)
#define COURIER_NAP_NS   (50 * XP_NS_PER_US)

struct stage_courier {
    const cuda_device_t *device;
    stage_control_t *control;
    const transport_cuda_life_t *life;
    cuda_module_t module;
    cuda_function_t kernel;
    cuda_stream_t resident;
    cuda_address_t table;
    bool launched;
    uint32_t turns[FABRIC_MAX_INSTANCES];
    stage_courier_table_t image;
};
_Static_assert(sizeof(stage_courier_table_t) <= STAGE_CONTROL_BYTES, "the table is moved at once");

static xp_status_t courier_make(stage_courier_t *courier, stage_heap_t *heap)
{
    static const char *const names[] = {XPOOL_NVSHMEM_COURIER};
    const cuda_image_t image = stage_heap_image(heap);
    XP_TRY(cuda_module_load(courier->device, &image, names, 1, &courier->module, &courier->kernel));
    XP_TRY(stage_heap_module_ready(heap, &courier->module));
    XP_TRY(cuda_stream_create(courier->device, true, &courier->resident));
    return CUDA_CALL(courier->device->driver, cuMemAlloc, &courier->table,
                     sizeof(stage_courier_table_t));
}

xp_status_t stage_courier_create(const cuda_device_t *device, stage_control_t *control,
                                 stage_heap_t *heap, const transport_cuda_life_t *life,
                                 stage_courier_t **courier_out)
{
    stage_courier_t *courier = calloc(1, sizeof(*courier));
    if (!courier)
        return xp_fail(XP_NO_MEMORY, "no memory for the courier");
    courier->device = device;
    courier->control = control;
    courier->life = life;
    courier->image.magic = STAGE_COURIER_MAGIC;
    courier->image.own_life = life ? life->index : 0;
    xp_status_t status = courier_make(courier, heap);
    if (status != XP_OK) {
        stage_courier_destroy(courier);
        return status;
    }
    *courier_out = courier;
    return XP_OK;
}

xp_status_t stage_courier_add(stage_courier_t *courier, const stage_route_t *route)
{
    XP_ASSERT(!courier->launched && route->unit < FABRIC_MAX_INSTANCES);
    if (courier->image.routes == STAGE_ROUTES_MAX)
        return xp_fail(XP_UNSUPPORTED,
                       "more than %u ways to other hosts from cuda:%d; spread the models over more "
                       "devices",
                       STAGE_ROUTES_MAX, courier->device->ordinal);
    courier->image.route[courier->image.routes++] = *route;
    return XP_OK;
}

xp_status_t stage_courier_launch(stage_courier_t *courier)
{
    cuda_address_t life = courier->life ? courier->life->address : 0;
    void *parameters[] = {&courier->table, &life};
    XP_TRY(stage_control_write(courier->control, courier->table, &courier->image,
                               sizeof(courier->image), xp_monotonic_ns() + COURIER_START_NS));
    XP_TRY(cuda_launch(courier->device, courier->kernel, 1, STAGE_COURIER_THREADS,
                       courier->resident, parameters));
    courier->launched = true;
    return XP_OK;
}

xp_status_t stage_courier_order(stage_courier_t *courier, uint32_t instance, bool attach,
                                uint64_t deadline_ns)
{
    if (!courier->launched)
        return XP_OK;
    cuda_address_t unit = courier->table + offsetof(stage_courier_table_t, unit) +
                          instance * sizeof(stage_courier_unit_t);
    uint32_t wanted = transport_slot_word(++courier->turns[instance],
                                          attach ? TRANSPORT_SLOT_ATTACHED : TRANSPORT_SLOT_EMPTY);
    XP_TRY(stage_control_post(courier->control, unit + offsetof(stage_courier_unit_t, wanted),
                              wanted));
    for (;;) {
        uint32_t now;
        XP_TRY(stage_control_read(courier->control, unit + offsetof(stage_courier_unit_t, now),
                                  sizeof(now), deadline_ns, &now));
        if (now == wanted)
            return XP_OK;
        if (xp_monotonic_ns() >= deadline_ns)
            return xp_fail(XP_TIMEOUT, "the courier of cuda:%d does not answer",
                           courier->device->ordinal);
        struct timespec nap = {.tv_nsec = COURIER_NAP_NS};
        nanosleep(&nap, NULL);
    }
}

xp_status_t stage_courier_stop(stage_courier_t *courier, uint64_t deadline_ns)
{
    if (!courier->launched)
        return XP_OK;
    XP_TRY(stage_control_post(courier->control,
                              courier->table + offsetof(stage_courier_table_t, stop), 1));
    xp_clock_t clock = xp_clock_system();
    XP_TRY(cuda_stream_wait(courier->device, courier->resident, &clock, deadline_ns));
    courier->launched = false;
    return XP_OK;
}

void stage_courier_destroy(stage_courier_t *courier)
{
    if (!courier)
        return;
    xp_status_t status = stage_courier_stop(courier, xp_monotonic_ns() + COURIER_STOP_NS);
    /* A kernel that does not leave keeps its memory; the end of the process takes both. */
    if (status == XP_OK || status == XP_FATAL) {
        if (courier->table)
            CUDA_IGNORE(courier->device->driver, cuMemFree, courier->table);
        cuda_stream_destroy(courier->device, courier->resident);
        cuda_module_unload(&courier->module);
    }
    free(courier);
}
