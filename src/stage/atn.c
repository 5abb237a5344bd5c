/* SPDX-License-Identifier: MIT */
/*
 * The relay of an AtnAgent: owns the resident kernel (a Transport server), a relay arena for each
 * of its Instance Ranks, and the mappings of the stages. One thread uses the object.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fabric/records.h"
#include "ffn/cuda_records.h"
#include "stage/control.h"
#include "stage/relay.h"

#define ATN_START_NS (10 * XP_NS_PER_S)
#define ATN_OPEN_NS  (1 * XP_NS_PER_S) /* for the header of a stage, while the kernel runs */

/* The plug-in's kernels are built apart. */
_Static_assert(XPOOL_NVSHMEM_ABI == 2 && sizeof(stage_relay_slot_t) == 408 &&
                   sizeof(stage_relay_t) == 10120,
               "raise XPOOL_NVSHMEM_ABI when these change");

CUDA_IMAGE_DECLARE(stage_relay);

typedef struct atn_rank {
    uint32_t instance, rank;
    cuda_block_t arena; /* the relay's */
    uint32_t slot;
    bool attached;
} atn_rank_t;

enum { ATN_KERNEL_RELAY, ATN_KERNEL_DESCRIBE, ATN_KERNELS };

struct stage_atn {
    const cuda_device_t *device;
    const fabric_plan_t *plan;
    stage_heap_t *heap; /* or NULL */
    stage_control_t control;
    cuda_module_t module;
    cuda_function_t kernels[ATN_KERNELS];
    cuda_address_t table; /* stage_relay_t, and the groups behind it */
    cuda_address_t groups[FABRIC_MAX_INSTANCES];
    ffn_cuda_records_t records;
    transport_cuda_server_t *server;
    uint32_t count;
    atn_rank_t ranks[TRANSPORT_RESIDENT_SLOTS];
    cuda_block_t stages[FABRIC_MAX_INSTANCES][STAGE_MAX_MEMBERS];
};

static bool atn_serves(const fabric_plan_instance_t *instance, uint32_t atn)
{
    for (uint32_t rank = 0; rank < fabric_plan_ranks(instance); rank++)
        if (instance->rank_atn[rank] == atn)
            return true;
    return false;
}

/* A block without a handle is not this object's to free: it lies on the heap. */
static xp_status_t atn_make_arena(const stage_atn_t *atn, uint32_t instance, uint32_t rank,
                                  const transport_geometry_t *geometry, cuda_block_t *block_out)
{
    if (!atn->heap)
        return cuda_block_create(atn->device, transport_cuda_arena_bytes(atn->device, geometry),
                                 block_out);
    *block_out = (cuda_block_t){
        .device = atn->device,
        .address = stage_heap_at(atn->heap,
                                 stage_heap_offset(atn->plan, STAGE_HEAP_RELAY, instance, rank, 0)),
        .bytes = transport_cuda_plain_bytes(geometry),
    };
    return XP_OK;
}

/* The ranks of this AtnAgent, each with a relay arena. */
static xp_status_t atn_make_ranks(stage_atn_t *atn, uint32_t index)
{
    for (uint32_t i = 0; i < atn->plan->instance_count; i++) {
        const fabric_plan_instance_t *plan = &atn->plan->instances[i];
        XP_TRY(stage_plan_check(plan));
        for (uint32_t rank = 0; rank < fabric_plan_ranks(plan); rank++) {
            if (plan->rank_atn[rank] != index)
                continue;
            if (atn->count == TRANSPORT_RESIDENT_SLOTS)
                return xp_fail(
                    XP_UNSUPPORTED,
                    "AtnAgent %u has more than %d Instance Ranks; spread the models over "
                    "more attention devices",
                    index, TRANSPORT_RESIDENT_SLOTS);
            atn_rank_t *own = &atn->ranks[atn->count++];
            own->instance = i;
            own->rank = rank;
            transport_geometry_t geometry = stage_geometry(plan);
            XP_TRY(atn_make_arena(atn, i, rank, &geometry, &own->arena));
            /* FfnAgents look at the header when they attach it, which may be before the rank comes.
             */
            mailbox_arena_t header = transport_cuda_header(&geometry);
            XP_TRY(CUDA_CALL(atn->device->driver, cuMemsetD8Async, own->arena.address, 0,
                             MAILBOX_HEADER_BYTES, atn->control.stream));
            XP_TRY(stage_control_write(&atn->control, own->arena.address, &header, sizeof(header),
                                       xp_monotonic_ns() + ATN_START_NS));
        }
    }
    return atn->count ? XP_OK : xp_fail(XP_INVALID, "AtnAgent %u serves no Instance Rank", index);
}

static xp_status_t atn_load(stage_atn_t *atn)
{
    static const char *const names[ATN_KERNELS] = {"stage_relay", "stage_relay_describe"};
    static const char *const plugin_names[ATN_KERNELS] = {XPOOL_NVSHMEM_RELAY,
                                                          XPOOL_NVSHMEM_DESCRIBE};
    if (!atn->heap)
        return cuda_module_load(atn->device, &cuda_image_stage_relay, names, ATN_KERNELS,
                                &atn->module, atn->kernels);
    cuda_image_t image = stage_heap_image(atn->heap);
    XP_TRY(cuda_module_load(atn->device, &image, plugin_names, ATN_KERNELS, &atn->module,
                            atn->kernels));
    return stage_heap_module_ready(atn->heap, &atn->module);
}

/* The kernel takes the ring from the table once, so before it starts. */
static xp_status_t atn_make_records(stage_atn_t *atn, uint32_t records)
{
    XP_TRY(ffn_cuda_records_open(atn->device, records, &atn->records));
    const ffn_cuda_counters_t counters = {.records = (void *)(uintptr_t)atn->records.at,
                                          .record_capacity = records};
    return stage_control_write(&atn->control, atn->table + offsetof(stage_relay_t, counters),
                               &counters, sizeof(counters), xp_monotonic_ns() + ATN_START_NS);
}

static xp_status_t atn_make(stage_atn_t *atn, uint32_t index, const transport_cuda_life_t *life,
                            uint32_t records)
{
    XP_TRY(stage_control_init(atn->device, &atn->control));
    XP_TRY(atn_load(atn));
    uint64_t bytes = sizeof(stage_relay_t), at = bytes;
    for (uint32_t i = 0; i < atn->plan->instance_count; i++)
        bytes += sizeof(uint32_t) * atn->plan->instances[i].layers;
    XP_TRY(CUDA_CALL(atn->device->driver, cuMemAlloc, &atn->table, bytes));
    XP_TRY(atn_make_records(atn, records));
    for (uint32_t i = 0; i < atn->plan->instance_count; i++) {
        uint32_t groups[MODEL_MAX_LAYERS];
        const fabric_plan_instance_t *plan = &atn->plan->instances[i];
        if (!atn_serves(plan, index))
            continue;
        XP_TRY(stage_plan_check(plan));
        memcpy(groups, plan->layer_group, sizeof(*groups) * plan->layers);
        atn->groups[i] = atn->table + at;
        XP_TRY(stage_control_write(&atn->control, atn->groups[i], groups,
                                   sizeof(*groups) * plan->layers,
                                   xp_monotonic_ns() + ATN_START_NS));
        at += sizeof(*groups) * plan->layers;
    }
    XP_TRY(atn_make_ranks(atn, index));
    return transport_cuda_server_create(atn->device, life, atn->count,
                                        atn->kernels[ATN_KERNEL_RELAY], atn->table, &atn->server);
}

xp_status_t stage_atn_create(const cuda_device_t *device, const fabric_plan_t *plan, uint32_t index,
                             const transport_cuda_life_t *life, stage_heap_t *heap,
                             uint32_t records, stage_atn_t **atn_out)
{
    stage_atn_t *atn = calloc(1, sizeof(*atn));
    if (!atn)
        return xp_fail(XP_NO_MEMORY, "no memory for the relay of AtnAgent %u", index);
    atn->device = device;
    atn->plan = plan;
    atn->heap = heap;
    xp_status_t status = atn_make(atn, index, life, records);
    if (status != XP_OK) {
        stage_atn_destroy(atn);
        return status;
    }
    *atn_out = atn;
    return XP_OK;
}

static xp_status_t atn_find(const stage_atn_t *atn, uint32_t instance, uint32_t rank,
                            const atn_rank_t **rank_out)
{
    for (uint32_t i = 0; i < atn->count; i++)
        if (atn->ranks[i].instance == instance && atn->ranks[i].rank == rank) {
            *rank_out = &atn->ranks[i];
            return XP_OK;
        }
    return xp_fail(XP_NOT_FOUND, "rank %u of Instance %u is not this AtnAgent's", rank, instance);
}

static xp_status_t atn_find_attached(const stage_atn_t *atn, uint32_t instance, uint32_t rank,
                                     atn_rank_t **rank_out)
{
    const atn_rank_t *found = NULL;
    XP_TRY(atn_find(atn, instance, rank, &found));
    if (!found->attached)
        return xp_fail(XP_NOT_FOUND, "rank %u of %.48s is not attached", rank,
                       atn->plan->instances[instance].id);
    *rank_out = (atn_rank_t *)found;
    return XP_OK;
}

xp_status_t stage_atn_export(const stage_atn_t *atn, uint32_t instance, uint32_t rank, int *fd_out)
{
    const atn_rank_t *found = NULL;
    XP_TRY(atn_find(atn, instance, rank, &found));
    if (atn->heap)
        return xp_fail(XP_INVALID, "relay arenas of the symmetric heap are not exported");
    return cuda_vmm_export(atn->device, found->arena.handle, fd_out);
}

xp_status_t stage_atn_open(stage_atn_t *atn, uint32_t instance, uint32_t ffn, int stage_fd)
{
    if (atn->heap || instance >= atn->plan->instance_count || !atn->groups[instance] ||
        ffn >= STAGE_MAX_MEMBERS || !(stage_members(&atn->plan->instances[instance]) >> ffn & 1))
        return xp_fail(XP_INVALID, "no stage of FfnAgent %u for Instance %u is used here", ffn,
                       instance);
    if (atn->stages[instance][ffn].handle)
        return xp_fail(XP_INVALID, "the stage of FfnAgent %u for %.48s is open already", ffn,
                       atn->plan->instances[instance].id);
    const fabric_plan_instance_t *plan = &atn->plan->instances[instance];
    cuda_block_t block;
    stage_head_t head;
    XP_TRY(cuda_block_import(atn->device, stage_fd, stage_page_bytes(plan), &block));
    xp_status_t status = stage_control_read(&atn->control, block.address, sizeof(head),
                                            xp_monotonic_ns() + ATN_OPEN_NS, &head);
    if (status == XP_OK)
        status = stage_head_check(&head, plan, instance, atn->plan->generation, ffn);
    if (status != XP_OK) {
        cuda_block_destroy(&block);
        return status;
    }
    atn->stages[instance][ffn] = block;
    return XP_OK;
}

xp_status_t stage_atn_attach(stage_atn_t *atn, uint32_t instance, uint32_t rank, int arena_fd,
                             uint32_t life_index, uint64_t deadline_ns)
{
    const atn_rank_t *found = NULL;
    XP_TRY(atn_find(atn, instance, rank, &found));
    atn_rank_t *own = (atn_rank_t *)found;
    const fabric_plan_instance_t *plan = &atn->plan->instances[instance];
    if (own->attached)
        return xp_fail(XP_INVALID, "rank %u of %.48s is attached already", rank, plan->id);
    transport_geometry_t geometry = stage_geometry(plan);
    stage_relay_slot_t slot = {
        .uniform = stage_uniform_group(plan),
        .layers = plan->layers,
        .hidden = plan->hidden,
        .tp = plan->atn_tp,
        .dp = plan->atn_dp,
        .rank = rank,
        .direct = plan->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL,
        .instance = instance,
        .observed = atn->records.capacity > 0,
        .groups = atn->groups[instance],
        .arena = own->arena.address,
        .output = own->arena.address + transport_cuda_output_offset(&geometry),
        .partial = own->arena.address + transport_cuda_partial_offset(&geometry),
        .partial_stride = transport_cuda_partial_bytes(&geometry) / sizeof(float),
    };
    XP_TRY(stage_dtype(plan, &slot.dtype));
    for (uint32_t left = stage_members(plan); left; left &= left - 1) {
        uint32_t ffn = fabric_group_first(left);
        cuda_address_t stage = atn->stages[instance][ffn].address;
        slot.pe[ffn] = atn->plan->atn_count + ffn;
        if (atn->heap) {
            uint64_t at = stage_heap_offset(atn->plan, STAGE_HEAP_PAGE, instance, ffn, 0);
            stage = stage_heap_at(atn->heap, at);
            if (!stage_heap_peer(atn->heap, at, slot.pe[ffn]))
                slot.bounce = own->arena.address + transport_cuda_input_offset(&geometry);
        }
        if (!stage)
            return xp_fail(XP_INVALID, "%.48s: the stage of FfnAgent %u is not open", plan->id,
                           ffn);
        slot.line[ffn] = stage + offsetof(stage_page_t, lines) + rank * sizeof(stage_line_t);
        slot.input[ffn] = stage + STAGE_HEADER_BYTES;
    }
    uint32_t index;
    XP_TRY(transport_cuda_server_next(atn->server, &index));
    cuda_address_t at = atn->table + offsetof(stage_relay_t, slot) + index * sizeof(slot);
    mailbox_arena_t header = transport_cuda_header(&geometry);
    cuda_address_t clock_at = atn->table + offsetof(stage_relay_t, clock_ns);
    uint64_t clock_ns;
    void *parameters[] = {&at, &slot, &header, &clock_at};
    const uint64_t before_ns = xp_monotonic_ns();
    XP_TRY(cuda_launch(atn->device, atn->kernels[ATN_KERNEL_DESCRIBE], 1, 32, atn->control.stream,
                       parameters));
    XP_TRY(stage_control_wait(&atn->control, deadline_ns));
    const uint64_t after_ns = xp_monotonic_ns();
    XP_TRY(stage_control_read(&atn->control, clock_at, sizeof(clock_ns), deadline_ns, &clock_ns));
    ffn_cuda_records_tie(&atn->records, before_ns, after_ns, clock_ns);
    XP_TRY(transport_cuda_server_attach(atn->server, arena_fd, &geometry, life_index, deadline_ns,
                                        &own->slot));
    own->attached = true;
    return XP_OK;
}

/* Nobody gets rows before every rank has come through here: an answer with rows after the last one
 * needs the lines of all. So the rows found in the arenas of others are what the former Generation
 * left, or were handed on since. An error's answer may come meanwhile, without rows: then the
 * header that is read again before rows are copied is not that of the answer that lacks, which is
 * refused. */
static xp_status_t atn_level(const stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             const int *arena_fds, uint64_t deadline_ns, uint32_t *from_out)
{
    const fabric_plan_instance_t *plan = &atn->plan->instances[instance];
    transport_geometry_t geometry = stage_geometry(plan);
    uint64_t answered[FABRIC_MAX_RANKS];
    uint32_t ranks = fabric_plan_ranks(plan), most = 0, from = rank - rank % plan->atn_tp;
    for (uint32_t r = 0; r < ranks; r++) {
        XP_TRY(transport_cuda_server_look(atn->server, arena_fds[r], &geometry, deadline_ns,
                                          &answered[r]));
        if (answered[r] > answered[most])
            most = r;
    }
    *from_out = rank;
    if (answered[rank] == answered[most])
        return XP_OK;
    uint32_t end = from + plan->atn_tp;
    while (from < end && answered[from] != answered[most])
        from++;
    if (from == end || answered[from] != answered[rank] + 1)
        return xp_fail(XP_PEER,
                       "%.48s: rank %u had the answer to request %llu, rank %u that to %llu, when "
                       "the Generation failed",
                       plan->id, most, (unsigned long long)answered[most], rank,
                       (unsigned long long)answered[rank]);
    *from_out = from;
    return transport_cuda_server_carry(atn->server, arena_fds[from], arena_fds[rank], &geometry,
                                       deadline_ns);
}

xp_status_t stage_atn_resume(stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             const int *arena_fds, uint32_t ranks, uint32_t life_index,
                             uint64_t deadline_ns, uint32_t *from_out)
{
    const atn_rank_t *own = NULL;
    uint32_t from = rank;
    XP_TRY(atn_find(atn, instance, rank, &own));
    const fabric_plan_instance_t *plan = &atn->plan->instances[instance];
    if (own->attached)
        return xp_fail(XP_INVALID, "rank %u of %.48s is attached already", rank, plan->id);
    if (ranks != fabric_plan_ranks(plan))
        return xp_fail(XP_INVALID, "%u arenas for %.48s of %u ranks", ranks, plan->id,
                       fabric_plan_ranks(plan));
    if (ranks > 1)
        XP_TRY(atn_level(atn, instance, rank, arena_fds, deadline_ns, &from));
    XP_TRY(stage_atn_attach(atn, instance, rank, arena_fds[rank], life_index, deadline_ns));
    *from_out = from;
    return XP_OK;
}

xp_status_t stage_atn_detach(stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             uint64_t deadline_ns)
{
    atn_rank_t *own;
    XP_TRY(atn_find_attached(atn, instance, rank, &own));
    XP_TRY(transport_cuda_server_detach(atn->server, own->slot, deadline_ns));
    own->attached = false;
    return XP_OK;
}

xp_status_t stage_atn_report(stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             uint64_t deadline_ns, transport_cuda_report_t *report_out)
{
    atn_rank_t *own;
    XP_TRY(atn_find_attached(atn, instance, rank, &own));
    return transport_cuda_server_report(atn->server, own->slot, deadline_ns, report_out);
}

uint64_t stage_atn_observe(stage_atn_t *atn, observe_t *observe)
{
    enum { AT_ONCE = 256 };
    ffn_cuda_record_t records[AT_ONCE];
    uint64_t lost = 0, skipped;
    uint32_t count;
    do {
        count = ffn_cuda_records_take(&atn->records, records, AT_ONCE, &skipped);
        lost += skipped;
        for (uint32_t i = 0; i < count; i++) {
            const observe_record_t record = {.end_ns = records[i].end_ns,
                                             .duration_ns = records[i].duration_ns,
                                             .sequence = records[i].ticket,
                                             .request = records[i].ticket,
                                             .layer = records[i].layer,
                                             .rows = records[i].rows,
                                             .instance = records[i].instance,
                                             .rank = records[i].rank,
                                             .lane = OBSERVE_NONE,
                                             .graph_template = OBSERVE_NONE,
                                             .step = records[i].kind};
            observe_write(observe, &record);
        }
    } while (count == AT_ONCE);
    return lost;
}

xp_status_t stage_atn_close_all(stage_atn_t *atn, xp_status_t reason)
{
    xp_status_t first = XP_OK;
    for (uint32_t i = 0; i < atn->count; i++) {
        xp_status_t status =
            atn->ranks[i].attached
                ? transport_cuda_server_close(atn->server, atn->ranks[i].slot, reason)
                : XP_OK;
        if (first == XP_OK)
            first = status;
    }
    return first;
}

void stage_atn_destroy(stage_atn_t *atn)
{
    if (!atn)
        return;
    /* The server's destroy ends the kernel; one that does not leave keeps its memory. */
    xp_status_t status =
        atn->server ? transport_cuda_server_stop(atn->server, xp_monotonic_ns() + 1 * XP_NS_PER_S)
                    : XP_OK;
    transport_cuda_server_destroy(atn->server);
    if (status == XP_OK || status == XP_FATAL) {
        for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++)
            for (uint32_t ffn = 0; ffn < STAGE_MAX_MEMBERS; ffn++)
                cuda_block_destroy(&atn->stages[i][ffn]);
        for (uint32_t i = 0; i < atn->count; i++)
            cuda_block_destroy(&atn->ranks[i].arena);
        ffn_cuda_records_close(&atn->records);
        if (atn->table)
            CUDA_IGNORE(atn->device->driver, cuMemFree, atn->table);
        cuda_module_unload(&atn->module);
        stage_control_fini(&atn->control);
    }
    free(atn);
}
