/* SPDX-License-Identifier: MIT */
/*
 * Kernels, control stream, life words and geometry: what both sides of the CUDA Transport share.
 * Everything is taken by transport_control_init(), before any kernel spins.
 */
#include "transport/cuda_control.h"

#include <string.h>

#include "base/memfd.h"
#include "transport/arena.h"

CUDA_IMAGE_DECLARE(transport_cuda_kernels);

_Static_assert(sizeof(transport_slot_t) == 2 * MAILBOX_LINE, "a slot is two lines");
_Static_assert(sizeof(transport_slot_t) <= TRANSPORT_CONTROL_READ_MAX, "a slot is read at once");
_Static_assert(sizeof(mailbox_arena_t) <= TRANSPORT_CONTROL_READ_MAX, "a header is read at once");

xp_status_t transport_cuda_geometry_check(const transport_geometry_t *geometry, xp_status_t status)
{
    XP_TRY(transport_sizes_check(geometry, status));
    if (geometry->dtype != XP_DTYPE_BF16 && geometry->dtype != XP_DTYPE_F16)
        return xp_fail(status, "Transport on a CUDA device carries bf16 or f16 rows, not %s",
                       xp_dtype_name(geometry->dtype));
    if (geometry->partials > MAILBOX_MAX_PARTIALS)
        return xp_fail(status, "%u areas for partials; allowed are 0 to %d", geometry->partials,
                       MAILBOX_MAX_PARTIALS);
    return XP_OK;
}

mailbox_arena_t transport_cuda_header(const transport_geometry_t *geometry)
{
    return (mailbox_arena_t){
        .magic = MAILBOX_MAGIC,
        .abi = MAILBOX_ABI,
        .bytes = transport_arena_bytes(geometry),
        .hidden = geometry->hidden,
        .max_rows = geometry->max_rows,
        .dtype = (uint32_t)geometry->dtype,
        .dp_size = geometry->dp_size,
        .input_offset = transport_arena_input_offset(geometry),
        .output_offset = transport_arena_output_offset(geometry),
        .partial_offset = transport_arena_partial_offset(geometry),
        .partials = geometry->partials,
    };
}

xp_status_t transport_cuda_header_check(const mailbox_arena_t *header,
                                        const transport_geometry_t *expected)
{
    if (header->magic != MAILBOX_MAGIC)
        return xp_fail(XP_PEER, "descriptor is no Transport arena (magic %#x)", header->magic);
    if (header->abi != MAILBOX_ABI)
        return xp_fail(XP_PEER, "Transport arena has ABI %u, this build %u", header->abi,
                       MAILBOX_ABI);
    if (header->hidden != expected->hidden || header->max_rows != expected->max_rows ||
        header->dtype != (uint32_t)expected->dtype || header->dp_size != expected->dp_size ||
        header->partials != expected->partials)
        return xp_fail(XP_PEER,
                       "Transport arena is %u x %u, dtype %u, DP %u, %u partials; planned are %u x "
                       "%u, dtype %u, DP %u, %u partials",
                       header->max_rows, header->hidden, header->dtype, header->dp_size,
                       header->partials, expected->max_rows, expected->hidden,
                       (unsigned)expected->dtype, expected->dp_size, expected->partials);
    return XP_OK;
}

uint64_t transport_cuda_arena_bytes(const cuda_device_t *device,
                                    const transport_geometry_t *geometry)
{
    return cuda_vmm_round_up(device, transport_arena_bytes(geometry));
}

xp_status_t transport_control_init(const cuda_device_t *device, transport_control_t *control_out)
{
    static const char *const names[TRANSPORT_KERNEL_COUNT] = {
#define X(enumerator, kernel) #kernel,
        TRANSPORT_KERNELS(X)
#undef X
    };
    transport_control_t control = {.device = device};
    xp_status_t status;
    XP_TRY_GOTO(status, fail, cuda_device_use(device));
    XP_TRY_GOTO(status, fail,
                cuda_module_load(device, &cuda_image_transport_cuda_kernels, names,
                                 TRANSPORT_KERNEL_COUNT, &control.module, control.kernels));
    XP_TRY_GOTO(status, fail,
                cuda_host_alloc(device, TRANSPORT_CONTROL_READ_MAX, &control.staging));
    XP_TRY_GOTO(status, fail, cuda_stream_create(device, true, &control.stream));
    *control_out = control;
    return XP_OK;
fail:
    transport_control_fini(&control);
    return status;
}

void transport_control_fini(transport_control_t *control)
{
    if (control->device) {
        cuda_stream_destroy(control->device, control->stream);
        cuda_host_free(control->device, control->staging);
        cuda_module_unload(&control->module);
    }
    *control = (transport_control_t){0};
}

xp_status_t transport_control_launch(transport_control_t *control, transport_kernel_t kernel,
                                     void **parameters)
{
    return cuda_launch(control->device, control->kernels[kernel], 1, 1, control->stream,
                       parameters);
}

xp_status_t transport_control_wait(transport_control_t *control, uint64_t deadline_ns)
{
    xp_clock_t clock = xp_clock_system();
    return cuda_stream_wait(control->device, control->stream, &clock, deadline_ns);
}

xp_status_t transport_control_read(transport_control_t *control, cuda_address_t from,
                                   uint64_t bytes, uint64_t deadline_ns, void *to)
{
    XP_ASSERT(bytes <= TRANSPORT_CONTROL_READ_MAX);
    XP_TRY(CUDA_CALL(control->device->driver, cuMemcpyDtoHAsync, control->staging, from, bytes,
                     control->stream));
    XP_TRY(transport_control_wait(control, deadline_ns));
    memcpy(to, control->staging, bytes);
    return XP_OK;
}

xp_status_t transport_control_post(transport_control_t *control, cuda_address_t word,
                                   uint32_t value)
{
    void *parameters[] = {&word, &value};
    return transport_control_launch(control, TRANSPORT_KERNEL_POST, parameters);
}

xp_status_t transport_cuda_life_open(const cuda_device_t *device, int life_fd, uint32_t index,
                                     transport_cuda_life_t *life_out)
{
    transport_cuda_life_t life = {.device = device, .index = index};
    XP_TRY(transport_life_map(life_fd, &life.page));
    xp_status_t status = cuda_host_register(device, life.page, sizeof(*life.page), &life.address);
    if (status != XP_OK)
        goto unmap;
    status = transport_life_hold(life.page, index, &life.hold);
    if (status != XP_OK)
        goto unregister;
    *life_out = life;
    return XP_OK;
unregister:
    cuda_host_unregister(device, life.page);
unmap:
    xp_memfd_unmap(life.page);
    return status;
}

cuda_address_t transport_cuda_life_word(const transport_cuda_life_t *life)
{
    return life->address + offsetof(life_page_t, word) + sizeof(uint32_t) * life->index;
}

void transport_cuda_life_close(transport_cuda_life_t *life)
{
    if (life->device) {
        transport_life_release(life->hold);
        cuda_host_unregister(life->device, life->page);
        xp_memfd_unmap(life->page);
    }
    *life = (transport_cuda_life_t){0};
}
