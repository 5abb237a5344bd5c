/* SPDX-License-Identifier: MIT */
/*
 * Provider `shm`: all PEs on one host, their copies of the arena one memfd, doorbells on a second.
 * A put to several PEs is one copy, direct never fails. Owns the two mappings of its PE.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memfd.h"
#include "fabric/provider.h"
#include "transport/doorbell.h"

typedef struct shm_provider {
    fabric_provider_t base;
    doorbell_page_t *doorbells;
    uint32_t pe, pes;
} shm_provider_t;

static shm_provider_t *shm_of(fabric_provider_t *provider)
{
    return (shm_provider_t *)provider;
}

static xp_status_t shm_bytes(const fabric_plan_t *plan, uint64_t *bytes_out)
{
    fabric_layout_t layout;
    XP_TRY(fabric_plan_check(plan, sizeof(*plan)));
    fabric_layout_compute(plan, &layout);
    *bytes_out = layout.bytes + MAILBOX_HEADER_BYTES;
    return XP_OK;
}

static xp_status_t shm_make_arena(const fabric_plan_t *plan, int *fd_out)
{
    xp_status_t status;
    fabric_layout_t layout;
    void *address;
    int fd;
    XP_TRY(fabric_plan_check(plan, sizeof(*plan)));
    fabric_layout_compute(plan, &layout);
    XP_TRY(xp_memfd_create("xpool-fabric", layout.bytes, &fd));
    status = xp_memfd_map(fd, layout.bytes, &address);
    if (status != XP_OK) {
        close(fd);
        return status;
    }
    memcpy((char *)address + layout.plan, plan, sizeof(*plan));
    fabric_header_t *header = address;
    header->abi = FABRIC_ABI;
    header->bytes = layout.bytes;
    header->plan_digest = fabric_plan_digest(plan);
    header->generation = plan->generation;
    header->plan_offset = layout.plan;
    header->plan_bytes = sizeof(*plan);
    header->magic = FABRIC_ARENA_MAGIC;
    xp_memfd_unmap(address);
    *fd_out = fd;
    return XP_OK;
}

static xp_status_t shm_make(const fabric_plan_t *plan, fabric_descriptors_t *descriptors_out)
{
    fabric_descriptors_t made = {-1, -1};
    XP_TRY(shm_make_arena(plan, &made.arena_fd));
    xp_status_t status =
        transport_doorbell_make(plan->atn_count + plan->ffn_count, &made.doorbell_fd);
    if (status != XP_OK) {
        close(made.arena_fd);
        return status;
    }
    *descriptors_out = made;
    return XP_OK;
}

static void shm_unmap(fabric_provider_t *provider)
{
    if (!provider)
        return;
    xp_memfd_unmap(shm_of(provider)->doorbells);
    xp_memfd_unmap(provider->base);
    free(provider);
}

static xp_status_t shm_map(const fabric_plan_t *plan, const fabric_descriptors_t *descriptors,
                           uint32_t pe, fabric_provider_t **provider_out)
{
    xp_status_t status;
    fabric_layout_t layout;
    uint64_t bytes;
    void *address;
    fabric_layout_compute(plan, &layout);
    XP_TRY(xp_memfd_check(descriptors->arena_fd, &bytes));
    if (bytes != layout.bytes)
        return xp_fail(XP_PEER, "Fabric arena has %llu bytes, its plan needs %llu",
                       (unsigned long long)bytes, (unsigned long long)layout.bytes);
    shm_provider_t *shm = calloc(1, sizeof(*shm));
    if (!shm)
        return xp_fail(XP_NO_MEMORY, "no memory for the Fabric provider shm");
    shm->base.ops = &fabric_shm_ops;
    shm->pe = pe;
    shm->pes = plan->atn_count + plan->ffn_count;
    XP_TRY_GOTO(status, fail, xp_memfd_map(descriptors->arena_fd, bytes, &address));
    shm->base.base = address;
    XP_TRY_GOTO(status, fail,
                transport_doorbell_map(descriptors->doorbell_fd, shm->pes - 1, &shm->doorbells));
    *provider_out = &shm->base;
    return XP_OK;
fail:
    shm_unmap(&shm->base);
    return status;
}

static void shm_put(fabric_provider_t *provider, uint32_t targets, uint64_t offset,
                    const void *source, size_t bytes)
{
    (void)targets;
    if (bytes)
        memcpy(provider->base + offset, source, bytes);
}

static void *shm_direct(fabric_provider_t *provider, uint32_t targets, uint64_t offset)
{
    (void)targets;
    return provider->base + offset;
}

static void shm_publish(fabric_provider_t *provider, uint32_t targets, uint64_t offset,
                        const void *record, size_t bytes)
{
    (void)targets;
    char *to = provider->base + offset;
    uint64_t sequence;
    memcpy(&sequence, record, sizeof(sequence));
    if (bytes > sizeof(sequence))
        memcpy(to + sizeof(sequence), (const char *)record + sizeof(sequence),
               bytes - sizeof(sequence));
    /* release: pairs with the acquire load of the record's first word (fabric_word). */
    PROTOCOL_PUBLISH((uint64_t *)(void *)to, sequence);
}

static void shm_signal(fabric_provider_t *provider, uint32_t targets)
{
    shm_provider_t *shm = shm_of(provider);
    for (; targets; targets &= targets - 1)
        transport_bell_ring(&shm->doorbells->lines[__builtin_ctz(targets)].bell);
}

static uint32_t shm_observe(const fabric_provider_t *provider)
{
    const shm_provider_t *shm = (const shm_provider_t *)provider;
    return mailbox_bell_observe(&shm->doorbells->lines[shm->pe].bell);
}

static bool shm_wait(fabric_provider_t *provider, transport_waiter_t *waiter, uint32_t seen,
                     uint64_t deadline_ns)
{
    shm_provider_t *shm = shm_of(provider);
    return transport_bell_wait(waiter, &shm->doorbells->lines[shm->pe].bell, seen, deadline_ns);
}

static uint32_t shm_everyone(const shm_provider_t *shm)
{
    return shm->pes == 32 ? UINT32_MAX : (1u << shm->pes) - 1;
}

static bool shm_fail(fabric_provider_t *provider, uint32_t pe, const char *text)
{
    fabric_header_t *header = (fabric_header_t *)(void *)provider->base;
    bool first = false;
    if (!PROTOCOL_LOAD_ACQUIRE(&header->failure)) {
        uint32_t taken = PROTOCOL_ADD_RELAXED(&header->failure_taken, 1u);
        uint32_t index = taken < FABRIC_FAILURE_TEXTS ? taken : FABRIC_FAILURE_TEXTS;
        if (index < FABRIC_FAILURE_TEXTS)
            snprintf(header->failure_texts[index], FABRIC_FAILURE_TEXT, "%s", text);
        /* The release half of the swap pairs with the acquire load in fabric_failure. */
        uint64_t none = 0;
        first = PROTOCOL_CAS(&header->failure, &none, ((uint64_t)pe + 1) << 8 | index);
    }
    shm_signal(provider, shm_everyone(shm_of(provider)));
    return first;
}

static void shm_shutdown(fabric_provider_t *provider)
{
    fabric_header_t *header = (fabric_header_t *)(void *)provider->base;
    PROTOCOL_STORE_TOTAL(&header->shutdown, 1u);
    shm_signal(provider, shm_everyone(shm_of(provider)));
}

const fabric_provider_ops_t fabric_shm_ops = {
    .name = "shm",
    .bytes = shm_bytes,
    .make = shm_make,
    .map = shm_map,
    .unmap = shm_unmap,
    .put = shm_put,
    .direct = shm_direct,
    .publish = shm_publish,
    .signal = shm_signal,
    .observe = shm_observe,
    .wait = shm_wait,
    .fail = shm_fail,
    .shutdown = shm_shutdown,
};

const fabric_provider_ops_t *fabric_provider_find(const char *name)
{
    static const fabric_provider_ops_t *const providers[] = {&fabric_shm_ops};
    for (size_t i = 0; i < sizeof(providers) / sizeof(providers[0]); i++)
        if (name && strcmp(providers[i]->name, name) == 0)
            return providers[i];
    return NULL;
}

xp_status_t fabric_shm_bytes(const fabric_plan_t *plan, uint64_t *bytes_out)
{
    return shm_bytes(plan, bytes_out);
}

xp_status_t fabric_shm_make(const fabric_plan_t *plan, fabric_descriptors_t *descriptors_out)
{
    return shm_make(plan, descriptors_out);
}

xp_status_t fabric_shm_renew(const fabric_plan_t *plan, fabric_descriptors_t *descriptors)
{
    int arena;
    XP_TRY(shm_make_arena(plan, &arena));
    xp_status_t status = transport_doorbell_renew(descriptors->doorbell_fd);
    if (status != XP_OK) {
        close(arena);
        return status;
    }
    close(descriptors->arena_fd);
    descriptors->arena_fd = arena;
    return XP_OK;
}
