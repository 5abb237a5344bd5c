/* SPDX-License-Identifier: MIT */
/*
 * An FfnAgent's stages and scheduler: owns their device memory, the mappings of arenas and of other
 * members' partials, and the resident kernel. One thread uses the object. The scheduler trusts
 * nothing that Instances wrote; here the header of a received arena is compared with the plan.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "fabric/records.h"
#include "stage/control.h"
#include "stage/ffn_far.h"

#define FFN_START_NS (10 * XP_NS_PER_S)
#define FFN_STOP_NS  (1 * XP_NS_PER_S)
#define FFN_NAP_NS   (50 * XP_NS_PER_US)
/* Lanes of the echo: as many as an FfnAgent has by default. */
#define FFN_ECHO_LANES 4u
/* What a warp moves with all of its loads in flight twice. */
#define FFN_OWN_ELEMENTS 4096u

CUDA_IMAGE_DECLARE(stage_scheduler);

typedef struct ffn_instance {
    cuda_block_t page, partials, scratch;
    cuda_block_t foreign[STAGE_MAX_MEMBERS]; /* partials of other first members */
    cuda_block_t arenas[FABRIC_MAX_RANKS];
    stage_about_t about;
    uint32_t turn;
    int kept; /* descriptor of the page, when it is a former FfnAgent's; else -1 */
    bool attached, dropped;
} ffn_instance_t;

struct stage_ffn {
    stage_ffn_config_t config;
    stage_control_t control;
    cuda_module_t module;
    cuda_function_t scheduler;
    cuda_stream_t resident;
    cuda_address_t table; /* and the groups behind it */
    stage_far_t far;
    bool launched;
    stage_table_t image; /* as it was uploaded, or read last */
    ffn_instance_t instances[FABRIC_MAX_INSTANCES];
};

static bool ffn_is_member(const stage_ffn_t *ffn, uint32_t instance)
{
    return instance < ffn->config.plan->instance_count &&
           (stage_members(&ffn->config.plan->instances[instance]) >> ffn->config.ffn & 1);
}

static cuda_address_t ffn_entry(const stage_ffn_t *ffn, uint32_t instance)
{
    return ffn->table + offsetof(stage_table_t, instance) + instance * sizeof(stage_instance_t);
}

/* ---- making --------------------------------------------------------------------------------- */
static xp_status_t ffn_check(const stage_ffn_config_t *config)
{
    const fabric_plan_t *plan = config->plan;
    uint32_t lines = 0;
    if (config->ffn >= plan->ffn_count)
        return xp_fail(XP_INVALID, "FfnAgent %u; the plan has %u", config->ffn, plan->ffn_count);
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *instance = &plan->instances[i];
        XP_TRY(stage_plan_check(instance));
        if (stage_members(instance) >> config->ffn & 1)
            lines += fabric_plan_ranks(instance);
    }
    if (lines > STAGE_LINES_MAX)
        return xp_fail(XP_UNSUPPORTED,
                       "%u Instance Ranks use FfnAgent %u; one FFN device serves %u: spread the "
                       "models over more devices",
                       lines, config->ffn, STAGE_LINES_MAX);
    return XP_OK;
}

static stage_head_t ffn_head(const stage_ffn_t *ffn, uint32_t index)
{
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    return (stage_head_t){
        .magic = STAGE_MAGIC,
        .abi = STAGE_ABI,
        .bytes = stage_page_bytes(plan),
        .generation = ffn->config.plan->generation,
        .instance = index,
        .ffn = ffn->config.ffn,
        .ranks = fabric_plan_ranks(plan),
        .dp_size = plan->atn_dp,
        .hidden = plan->hidden,
        .max_rows = plan->max_rows,
        .dtype = plan->dtype,
    };
}

static xp_status_t ffn_clear_partials(stage_ffn_t *ffn, uint32_t index)
{
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    ffn_instance_t *instance = &ffn->instances[index];
    if (!instance->partials.address)
        return XP_OK;
    uint64_t bytes = stage_partials_bytes(plan, ffn->config.ffn);
    uint32_t members = stage_partials_members(plan, ffn->config.ffn);
    uint32_t rows = (uint32_t)stage_total_rows(plan), hidden = plan->hidden, own = ffn->config.ffn;
    void *start[] = {&instance->partials.address, &bytes, &index, &own, &members, &rows, &hidden};
    return stage_control_launch(&ffn->control, STAGE_KERNEL_PARTIALS_START, 128, start);
}

/* Nothing of the Instance's predecessor is left in stage and partials. */
static xp_status_t ffn_clear(stage_ffn_t *ffn, uint32_t index)
{
    stage_head_t head = ffn_head(ffn, index);
    void *parameters[] = {&ffn->instances[index].page.address, &head};
    XP_TRY(stage_control_launch(&ffn->control, STAGE_KERNEL_PAGE_START, 64, parameters));
    return ffn_clear_partials(ffn, index);
}

/* A block without a handle is not this object's to free: it lies on the heap. */
static cuda_block_t ffn_heap_block(const stage_ffn_t *ffn, stage_heap_kind_t kind, uint32_t index,
                                   uint64_t bytes)
{
    return (cuda_block_t){
        .device = ffn->config.device,
        .address = stage_heap_at(
            ffn->config.heap, stage_heap_offset(ffn->config.plan, kind, index, ffn->config.ffn, 0)),
        .bytes = bytes,
    };
}

/* Takes the stage over that a former FfnAgent made for the Instance: what lies in it stays, but for
 * the Generation. Not XP_OK: it is not what the plan says, or cannot be mapped. */
static xp_status_t ffn_adopt(stage_ffn_t *ffn, uint32_t index, int fd)
{
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    uint64_t deadline_ns = xp_monotonic_ns() + FFN_START_NS;
    stage_head_t found, head = ffn_head(ffn, index);
    cuda_block_t page;
    XP_TRY(cuda_block_import(ffn->config.device, fd, stage_page_bytes(plan), &page));
    int kept = -1;
    xp_status_t status;
    XP_TRY_GOTO(
        status, fail,
        stage_control_read(&ffn->control, page.address, sizeof(found), deadline_ns, &found));
    XP_TRY_GOTO(status, fail,
                stage_head_check(&found, plan, index, found.generation, ffn->config.ffn));
    XP_TRY_GOTO(status, fail,
                stage_control_write(&ffn->control, page.address, &head, sizeof(head), deadline_ns));
    kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    XP_TRY_GOTO(status, fail,
                kept >= 0 ? XP_OK : xp_fail_errno(XP_IO, "cannot keep the descriptor of a stage"));
    ffn->instances[index].page = page;
    ffn->instances[index].kept = kept;
    return XP_OK;
fail:
    cuda_block_destroy(&page);
    return status;
}

/* Stage and partials, all zero but for a stage that is taken over: who maps them must find nothing
 * of an earlier owner. */
static xp_status_t ffn_make_memory(stage_ffn_t *ffn, uint32_t index)
{
    const cuda_device_t *device = ffn->config.device;
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    ffn_instance_t *instance = &ffn->instances[index];
    uint64_t partials = stage_partials_bytes(plan, ffn->config.ffn);
    if (ffn->config.heap) {
        instance->page = ffn_heap_block(ffn, STAGE_HEAP_PAGE, index, stage_page_bytes(plan));
        if (partials)
            instance->partials = ffn_heap_block(ffn, STAGE_HEAP_PARTIALS, index, partials);
        return XP_OK; /* cleared when it was joined */
    }
    if (!ffn->config.kept || ffn->config.kept[index] < 0 ||
        ffn_adopt(ffn, index, ffn->config.kept[index]) != XP_OK) {
        XP_TRY(cuda_block_create(device, stage_page_bytes(plan), &instance->page));
        XP_TRY(CUDA_CALL(device->driver, cuMemsetD8Async, instance->page.address, 0,
                         instance->page.bytes, ffn->control.stream));
    }
    if (!partials)
        return XP_OK;
    XP_TRY(cuda_block_create(device, partials, &instance->partials));
    return CUDA_CALL(device->driver, cuMemsetD8Async, instance->partials.address, 0,
                     instance->partials.bytes, ffn->control.stream);
}

static xp_status_t ffn_not_mapped(const stage_ffn_t *ffn, uint32_t index, const char *role,
                                  uint32_t other)
{
    return xp_fail(XP_UNSUPPORTED,
                   "%.48s: the memory of %s %u cannot be mapped by FfnAgent %u; use "
                   "fabric.provider = \"nvshmem-far\"",
                   ffn->config.plan->instances[index].id, role, other, ffn->config.ffn);
}

/* Where the heap holds the partials of the other first members. */
static xp_status_t ffn_find_partials(stage_ffn_t *ffn, uint32_t index)
{
    const fabric_plan_t *plan = ffn->config.plan;
    for (uint32_t first = 0; first < plan->ffn_count; first++) {
        cuda_address_t *at = &ffn->instances[index].about.partials[first];
        if (first == ffn->config.ffn || !stage_partials_members(&plan->instances[index], first))
            continue;
        if (stage_heap_far(ffn->config.heap)) {
            if (stage_heap_offset(plan, STAGE_HEAP_MIRROR, index, ffn->config.ffn, first) !=
                STAGE_HEAP_NOWHERE)
                *at = stage_far_mirror(&ffn->far, index, first);
            continue;
        }
        *at = stage_heap_peer(ffn->config.heap,
                              stage_heap_offset(plan, STAGE_HEAP_PARTIALS, index, first, 0),
                              plan->atn_count + first);
        if (!*at)
            return ffn_not_mapped(ffn, index, "FfnAgent", first);
    }
    return XP_OK;
}

/* Memory of an Instance, and its constant description. */
static xp_status_t ffn_make_instance(stage_ffn_t *ffn, uint32_t index, uint32_t *groups)
{
    const cuda_device_t *device = ffn->config.device;
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    ffn_instance_t *instance = &ffn->instances[index];
    stage_about_t *about = &instance->about;
    uint64_t scratch = stage_scratch_bytes(plan, ffn->config.ffn);
    transport_geometry_t geometry = stage_geometry(plan);

    XP_TRY(ffn_make_memory(ffn, index));
    if (scratch)
        XP_TRY(cuda_block_create(device, scratch, &instance->scratch));

    memcpy(groups, plan->layer_group, sizeof(*groups) * plan->layers);
    *about = (stage_about_t){
        .members = stage_members(plan),
        .uniform = stage_uniform_group(plan),
        .weights = plan->weights,
        .layers = plan->layers,
        .hidden = plan->hidden,
        .max_rows = plan->max_rows,
        .tp = plan->atn_tp,
        .dp = plan->atn_dp,
        .direct = plan->delivery == FABRIC_DELIVERY_DIRECT_PARTIAL,
        .page = instance->page.address,
        .input = instance->page.address + STAGE_HEADER_BYTES,
        .partial_stride = stage_partial_stride(plan),
        .scratch = instance->scratch.address,
        .output_offset = transport_cuda_output_offset(&geometry),
        .partial_offset = transport_cuda_partial_offset(&geometry),
        .partial_bytes = transport_cuda_partial_bytes(&geometry),
    };
    about->partials[ffn->config.ffn] = instance->partials.address;
    if (ffn->config.heap)
        XP_TRY(ffn_find_partials(ffn, index));
    return stage_dtype(plan, &about->dtype);
}

static xp_status_t ffn_make(stage_ffn_t *ffn)
{
    static const char *const names[] = {"stage_scheduler"};
    const cuda_device_t *device = ffn->config.device;
    const fabric_plan_t *plan = ffn->config.plan;
    XP_TRY(stage_control_init(device, &ffn->control));
    XP_TRY(cuda_module_load(device, &cuda_image_stage_scheduler, names, 1, &ffn->module,
                            &ffn->scheduler));
    XP_TRY(cuda_stream_create(device, true, &ffn->resident));
    if (ffn->config.heap && stage_heap_far(ffn->config.heap)) {
        ffn->far = (stage_far_t){.plan = plan, .heap = ffn->config.heap, .ffn = ffn->config.ffn};
        XP_TRY(stage_courier_create(device, &ffn->control, ffn->config.heap, ffn->config.life,
                                    &ffn->far.courier));
    }

    uint64_t bytes = sizeof(stage_table_t), at = bytes;
    for (uint32_t i = 0; i < plan->instance_count; i++)
        bytes += ffn_is_member(ffn, i) ? sizeof(uint32_t) * plan->instances[i].layers : 0;
    XP_TRY(CUDA_CALL(device->driver, cuMemAlloc, &ffn->table, bytes));
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        uint32_t groups[MODEL_MAX_LAYERS];
        if (!ffn_is_member(ffn, i))
            continue;
        XP_TRY(ffn_make_instance(ffn, i, groups));
        if (ffn->far.courier)
            XP_TRY(stage_far_routes(&ffn->far, i));
        XP_TRY(stage_ffn_adopted(ffn, i) ? ffn_clear_partials(ffn, i) : ffn_clear(ffn, i));
        ffn->instances[i].about.groups = ffn->table + at;
        XP_TRY(stage_control_write(&ffn->control, ffn->table + at, groups,
                                   sizeof(uint32_t) * plan->instances[i].layers,
                                   xp_monotonic_ns() + FFN_START_NS));
        at += sizeof(uint32_t) * plan->instances[i].layers;
    }
    return stage_control_wait(&ffn->control, xp_monotonic_ns() + FFN_START_NS);
}

xp_status_t stage_ffn_create(const stage_ffn_config_t *config, stage_ffn_t **ffn_out)
{
    XP_TRY(ffn_check(config));
    stage_ffn_t *ffn = calloc(1, sizeof(*ffn));
    if (!ffn)
        return xp_fail(XP_NO_MEMORY, "no memory for the stages of FfnAgent %u", config->ffn);
    ffn->config = *config;
    for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++)
        ffn->instances[i].kept = -1;
    xp_status_t status = ffn_make(ffn);
    ffn->config.kept = NULL; /* the caller's */
    if (status != XP_OK) {
        stage_ffn_destroy(ffn);
        return status;
    }
    *ffn_out = ffn;
    return XP_OK;
}

static xp_status_t ffn_check_member(const stage_ffn_t *ffn, uint32_t instance)
{
    if (instance >= ffn->config.plan->instance_count)
        return xp_fail(XP_INVALID, "Instance %u; the plan has %u", instance,
                       ffn->config.plan->instance_count);
    if (!ffn_is_member(ffn, instance))
        return xp_fail(XP_NOT_FOUND, "FfnAgent %u is in no Execution Group of %.48s",
                       ffn->config.ffn, ffn->config.plan->instances[instance].id);
    return XP_OK;
}

xp_status_t stage_ffn_export(const stage_ffn_t *ffn, uint32_t instance, int *fd_out)
{
    XP_TRY(ffn_check_member(ffn, instance));
    if (ffn->config.heap)
        return xp_fail(XP_INVALID, "stages of the symmetric heap are not exported");
    if (!stage_ffn_adopted(ffn, instance))
        return cuda_vmm_export(ffn->config.device, ffn->instances[instance].page.handle, fd_out);
    int fd = fcntl(ffn->instances[instance].kept, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return xp_fail_errno(XP_IO, "cannot hand on the descriptor of a stage");
    *fd_out = fd;
    return XP_OK;
}

bool stage_ffn_adopted(const stage_ffn_t *ffn, uint32_t instance)
{
    return instance < FABRIC_MAX_INSTANCES && ffn->instances[instance].kept >= 0;
}

xp_status_t stage_ffn_export_partials(const stage_ffn_t *ffn, uint32_t instance, int *fd_out)
{
    XP_TRY(ffn_check_member(ffn, instance));
    if (!ffn->instances[instance].partials.handle)
        return xp_fail(XP_NOT_FOUND, "FfnAgent %u reduces nothing for %.48s", ffn->config.ffn,
                       ffn->config.plan->instances[instance].id);
    return cuda_vmm_export(ffn->config.device, ffn->instances[instance].partials.handle, fd_out);
}

xp_status_t stage_ffn_import_partials(stage_ffn_t *ffn, uint32_t instance, uint32_t first, int fd)
{
    XP_TRY(ffn_check_member(ffn, instance));
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[instance];
    if (ffn->config.heap || ffn->launched || first >= STAGE_MAX_MEMBERS ||
        first == ffn->config.ffn || !stage_partials_members(plan, first))
        return xp_fail(XP_INVALID, "%.48s: no partials of FfnAgent %u to map here, or too late",
                       plan->id, first);
    ffn_instance_t *own = &ffn->instances[instance];
    if (own->foreign[first].handle)
        return xp_fail(XP_INVALID, "%.48s: the partials of FfnAgent %u are mapped already",
                       plan->id, first);
    cuda_block_t block;
    stage_partials_t header;
    XP_TRY(cuda_block_import(ffn->config.device, fd, stage_partials_bytes(plan, first), &block));
    xp_status_t status = stage_control_read(&ffn->control, block.address, sizeof(header),
                                            xp_monotonic_ns() + FFN_START_NS, &header);
    if (status == XP_OK)
        status = stage_partials_check(&header, plan, instance, first);
    if (status != XP_OK) {
        cuda_block_destroy(&block);
        return status;
    }
    own->foreign[first] = block;
    own->about.partials[first] = block.address;
    return XP_OK;
}

/* Every group of several that reduces elsewhere needs its first member's partials. */
static xp_status_t ffn_check_partials(const stage_ffn_t *ffn, uint32_t index)
{
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    for (uint32_t layer = 0; layer < plan->layers; layer++) {
        uint32_t group = plan->layer_group[layer], first = fabric_group_first(group);
        if (!(group >> ffn->config.ffn & 1) || fabric_group_size(group) == 1 ||
            !stage_partials_members(plan, first))
            continue;
        if (!ffn->instances[index].about.partials[first])
            return xp_fail(XP_INVALID, "%.48s: the partials of FfnAgent %u were not imported",
                           plan->id, first);
    }
    return XP_OK;
}

xp_status_t stage_ffn_start(stage_ffn_t *ffn)
{
    const fabric_plan_t *plan = ffn->config.plan;
    stage_table_t *image = &ffn->image;
    if (ffn->launched)
        return xp_fail(XP_INVALID, "the scheduler of FfnAgent %u runs already", ffn->config.ffn);
    *image = (stage_table_t){
        .magic = STAGE_TABLE_MAGIC,
        .instances = plan->instance_count,
        .ffn = ffn->config.ffn,
        .policy = plan->policy,
        .seed = plan->seed,
        .submission_timeout_ns = plan->submission_timeout_ns,
        .dispatch = ffn->config.dispatch,
        .echo_lanes = FFN_ECHO_LANES,
        .own_life = ffn->config.life ? ffn->config.life->index : 0,
        .own_elements = ffn->config.own_elements ? ffn->config.own_elements : FFN_OWN_ELEMENTS,
        .notes = ffn->config.notes,
    };
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        if (!ffn_is_member(ffn, i))
            continue;
        XP_TRY(ffn_check_partials(ffn, i));
        image->instance[i].about = ffn->instances[i].about;
    }
    XP_TRY(stage_control_write(&ffn->control, ffn->table, image, sizeof(*image),
                               xp_monotonic_ns() + FFN_START_NS));
    if (ffn->far.courier)
        XP_TRY(stage_courier_launch(ffn->far.courier));
    cuda_address_t life = ffn->config.life ? ffn->config.life->address : 0;
    void *parameters[] = {&ffn->table, &life};
    XP_TRY(cuda_launch(ffn->config.device, ffn->scheduler, 1, STAGE_THREADS, ffn->resident,
                       parameters));
    ffn->launched = true;
    return XP_OK;
}

/* ---- Instances ------------------------------------------------------------------------------ */
static xp_status_t ffn_has_left(const stage_ffn_t *ffn, bool *left_out)
{
    const cuda_driver_t *driver = ffn->config.device->driver;
    int result = driver->cuStreamQuery(ffn->resident);
    if (result != CUDA_RESULT_SUCCESS && result != CUDA_RESULT_NOT_READY)
        return cuda_check_at(driver, result, "cuStreamQuery", __FILE__, __LINE__);
    *left_out = result == CUDA_RESULT_SUCCESS;
    return XP_OK;
}

/* Polls until the scheduler has answered the last order to this Instance with `wanted`. */
static xp_status_t ffn_await(stage_ffn_t *ffn, uint32_t index, uint32_t wanted,
                             uint64_t deadline_ns)
{
    for (;;) {
        struct {
            uint32_t now, reason;
        } seen;
        bool left = false; /* asked first: the answer below is then its last word */
        XP_TRY(ffn_has_left(ffn, &left));
        XP_TRY(stage_control_read(&ffn->control,
                                  ffn_entry(ffn, index) + offsetof(stage_instance_t, now),
                                  sizeof(seen), deadline_ns, &seen));
        bool answered = transport_slot_turn(seen.now) == ffn->instances[index].turn;
        if (answered && transport_slot_state(seen.now) == wanted)
            return XP_OK;
        if (answered)
            return xp_fail(XP_PEER, "%.48s was dropped at once: %s",
                           ffn->config.plan->instances[index].id,
                           seen.reason < XP_STATUS_COUNT ? xp_status_name((xp_status_t)seen.reason)
                                                         : "unknown");
        if (left)
            return xp_fail(XP_CLOSED,
                           "the scheduler of FfnAgent %u has left: what it used is "
                           "unmapped when the stages are destroyed",
                           ffn->config.ffn);
        if (xp_monotonic_ns() >= deadline_ns)
            return xp_fail(XP_TIMEOUT,
                           wanted == TRANSPORT_SLOT_ATTACHED
                               ? "the scheduler of FfnAgent %u does not take %.48s"
                               : "the scheduler of FfnAgent %u still executes for %.48s",
                           ffn->config.ffn, ffn->config.plan->instances[index].id);
        struct timespec nap = {.tv_nsec = FFN_NAP_NS};
        nanosleep(&nap, NULL);
    }
}

static xp_status_t ffn_order(stage_ffn_t *ffn, uint32_t index, uint32_t state)
{
    ffn_instance_t *instance = &ffn->instances[index];
    cuda_address_t entry = ffn_entry(ffn, index);
    uint32_t wanted = transport_slot_word(++instance->turn, state);
    void *parameters[] = {&entry, &instance->about, &wanted};
    return stage_control_launch(&ffn->control, STAGE_KERNEL_DESCRIBE, 1, parameters);
}

static void ffn_unmap_arenas(ffn_instance_t *instance)
{
    for (uint32_t rank = 0; rank < FABRIC_MAX_RANKS; rank++)
        cuda_block_destroy(&instance->arenas[rank]);
}

static xp_status_t ffn_map_arena(const stage_ffn_t *ffn, uint32_t index, uint32_t rank, int fd,
                                 uint64_t bytes, cuda_block_t *block_out)
{
    const fabric_plan_t *plan = ffn->config.plan;
    if (!ffn->config.heap)
        return cuda_block_import(ffn->config.device, fd, bytes, block_out);
    uint32_t atn = plan->instances[index].rank_atn[rank];
    cuda_address_t at =
        ffn->far.courier
            ? stage_far_outbox(&ffn->far, index, rank)
            : stage_heap_peer(ffn->config.heap,
                              stage_heap_offset(plan, STAGE_HEAP_RELAY, index, rank, 0), atn);
    if (!at)
        return ffn_not_mapped(ffn, index, "AtnAgent", atn);
    *block_out = (cuda_block_t){.device = ffn->config.device, .address = at, .bytes = bytes};
    return XP_OK;
}

/* The word with which this FfnAgent, or the group's first member for it, answers a rank: its last
 * value, in a mapped arena. */
static xp_status_t ffn_answered(stage_ffn_t *ffn, uint32_t index, const mailbox_arena_t *header,
                                uint32_t rank, uint64_t deadline_ns, uint64_t *answered_out)
{
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    uint32_t group = stage_uniform_group(plan);
    uint32_t member = fabric_group_size(group & ((1u << ffn->config.ffn) - 1));
    mailbox_partial_t partial = {.sequence = header->response.sequence};
    if (fabric_is_direct(plan, group))
        XP_TRY(stage_control_read(&ffn->control,
                                  ffn->instances[index].arenas[rank].address +
                                      MAILBOX_PARTIALS_START + member * sizeof(partial),
                                  sizeof(partial), deadline_ns, &partial));
    *answered_out = partial.sequence;
    return XP_OK;
}

static xp_status_t ffn_check_resume(const stage_ffn_t *ffn, uint32_t index)
{
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    if (!stage_ffn_adopted(ffn, index))
        return xp_fail(XP_UNSUPPORTED,
                       "FfnAgent %u could not take over the memory in which requests of %.48s wait",
                       ffn->config.ffn, plan->id);
    /* Else a sequence that this FfnAgent has not answered may be another group's. */
    if (!stage_uniform_group(plan))
        return xp_fail(XP_UNSUPPORTED,
                       "%.48s: its layers have different Execution Groups, and which requests "
                       "are open cannot be told",
                       plan->id);
    return XP_OK;
}

/* Is a line in the stage that is not answered? A rank may be putting the next one just now. */
static xp_status_t ffn_look_open(stage_ffn_t *ffn, uint32_t index, uint64_t deadline_ns,
                                 bool *open_out)
{
    stage_brief_t briefs[FABRIC_MAX_RANKS];
    const ffn_instance_t *instance = &ffn->instances[index];
    XP_TRY(stage_control_read(&ffn->control,
                              instance->page.address + offsetof(stage_page_t, briefs),
                              sizeof(briefs), deadline_ns, briefs));
    bool open = false;
    for (uint32_t r = 0; r < fabric_plan_ranks(&ffn->config.plan->instances[index]); r++)
        open = open || (uint32_t)briefs[r].word != (uint32_t)instance->about.taken;
    *open_out = open;
    return XP_OK;
}

/* resume: of a former Generation. Its stage stays as it is, and `about.taken` says from where on.
 */
static xp_status_t ffn_attach(stage_ffn_t *ffn, uint32_t index, const int *arena_fds,
                              uint32_t ranks, bool resume, uint64_t deadline_ns)
{
    XP_TRY(ffn_check_member(ffn, index));
    const fabric_plan_instance_t *plan = &ffn->config.plan->instances[index];
    ffn_instance_t *instance = &ffn->instances[index];
    if (!ffn->launched)
        return xp_fail(XP_INVALID, "the scheduler of FfnAgent %u is not started", ffn->config.ffn);
    if (instance->attached)
        return xp_fail(XP_INVALID, "%.48s is attached already", plan->id);
    if (ranks != fabric_plan_ranks(plan))
        return xp_fail(XP_INVALID, "%u arenas for %.48s of %u ranks", ranks, plan->id,
                       fabric_plan_ranks(plan));
    transport_geometry_t geometry = stage_geometry(plan);
    uint64_t bytes = transport_cuda_arena_bytes(ffn->config.device, &geometry);
    xp_status_t status;
    if (ffn->far.courier)
        XP_TRY(stage_far_clear(&ffn->far, &ffn->control, index, deadline_ns));
    for (uint32_t rank = 0; rank < ranks; rank++) {
        mailbox_arena_t header;
        XP_TRY_GOTO(status, fail,
                    ffn_map_arena(ffn, index, rank, arena_fds ? arena_fds[rank] : -1, bytes,
                                  &instance->arenas[rank]));
        instance->about.arenas[rank] = instance->arenas[rank].address;
        XP_TRY_GOTO(status, fail,
                    stage_control_read(&ffn->control, instance->arenas[rank].address,
                                       sizeof(header), deadline_ns, &header));
        XP_TRY_GOTO(status, fail, transport_cuda_header_check(&header, &geometry));
        uint64_t answered = 0;
        if (resume)
            XP_TRY_GOTO(status, fail,
                        ffn_answered(ffn, index, &header, rank, deadline_ns, &answered));
        if (rank && answered != instance->about.taken) {
            status = xp_fail(XP_PEER,
                             "%.48s: rank 0 had the answer to request %llu, rank %u that to %llu, "
                             "when the Generation failed",
                             plan->id, (unsigned long long)instance->about.taken, rank,
                             (unsigned long long)answered);
            goto fail;
        }
        instance->about.taken = answered;
    }
    /* Other members may have taken up what waits already, and put their parts here. */
    if (!resume)
        XP_TRY_GOTO(status, fail, ffn_clear(ffn, index));
    if (ffn->far.courier)
        XP_TRY_GOTO(status, fail, stage_courier_order(ffn->far.courier, index, true, deadline_ns));
    XP_TRY_GOTO(status, fail, ffn_order(ffn, index, TRANSPORT_SLOT_ATTACHED));
    /* From here on the scheduler may use the mappings: only a detach that it has confirmed unmaps
     * them. */
    instance->attached = true;
    instance->dropped = false;
    status = ffn_await(ffn, index, TRANSPORT_SLOT_ATTACHED, deadline_ns);
    if (status != XP_OK) {
        xp_error_t error = *xp_error_last();
        (void)stage_ffn_detach(ffn, index, xp_monotonic_ns() + FFN_STOP_NS);
        return xp_fail(status, "%s", error.text);
    }
    return XP_OK;
fail:
    ffn_unmap_arenas(instance);
    return status;
}

xp_status_t stage_ffn_attach(stage_ffn_t *ffn, uint32_t index, const int *arena_fds, uint32_t ranks,
                             uint64_t deadline_ns)
{
    return ffn_attach(ffn, index, arena_fds, ranks, false, deadline_ns);
}

xp_status_t stage_ffn_resume(stage_ffn_t *ffn, uint32_t index, const int *arena_fds, uint32_t ranks,
                             uint64_t deadline_ns, uint64_t *answered_out, bool *open_out)
{
    bool open;
    XP_TRY(ffn_check_member(ffn, index));
    XP_TRY(ffn_check_resume(ffn, index));
    XP_TRY(ffn_attach(ffn, index, arena_fds, ranks, true, deadline_ns));
    XP_TRY(ffn_look_open(ffn, index, deadline_ns, &open));
    *answered_out = ffn->instances[index].about.taken;
    *open_out = open;
    return XP_OK;
}

static xp_status_t ffn_check_attached(const stage_ffn_t *ffn, uint32_t index)
{
    XP_TRY(ffn_check_member(ffn, index));
    return ffn->instances[index].attached
               ? XP_OK
               : xp_fail(XP_NOT_FOUND, "%.48s is not attached at FfnAgent %u",
                         ffn->config.plan->instances[index].id, ffn->config.ffn);
}

xp_status_t stage_ffn_detach(stage_ffn_t *ffn, uint32_t index, uint64_t deadline_ns)
{
    XP_TRY(ffn_check_attached(ffn, index));
    if (ffn->launched) {
        XP_TRY(ffn_order(ffn, index, TRANSPORT_SLOT_EMPTY));
        XP_TRY(ffn_await(ffn, index, TRANSPORT_SLOT_EMPTY, deadline_ns));
        if (ffn->far.courier)
            XP_TRY(stage_courier_order(ffn->far.courier, index, false, deadline_ns));
    }
    ffn->instances[index].attached = false;
    ffn_unmap_arenas(&ffn->instances[index]);
    return XP_OK;
}

xp_status_t stage_ffn_close(stage_ffn_t *ffn, uint32_t index, xp_status_t reason)
{
    XP_TRY(ffn_check_attached(ffn, index));
    uint32_t word = (uint32_t)reason;
    for (uint32_t rank = 0; rank < FABRIC_MAX_RANKS; rank++) {
        cuda_address_t arena = ffn->instances[index].arenas[rank].address;
        void *parameters[] = {&arena, &word};
        if (arena)
            XP_TRY(stage_control_launch(&ffn->control, STAGE_KERNEL_CLOSE, 1, parameters));
    }
    return XP_OK;
}

/* ---- what the scheduler says ---------------------------------------------------------------- */
static xp_status_t ffn_read(stage_ffn_t *ffn, uint64_t deadline_ns)
{
    return stage_control_read(&ffn->control, ffn->table, sizeof(ffn->image), deadline_ns,
                              &ffn->image);
}

static xp_status_t ffn_failure(const stage_ffn_t *ffn, const stage_failure_t *failure)
{
    const fabric_plan_t *plan = ffn->config.plan;
    const char *id =
        failure->instance < plan->instance_count ? plan->instances[failure->instance].id : "?";
    unsigned long long waited_ms = failure->waited_ns / XP_NS_PER_MS;
    switch ((stage_failure_kind_t)failure->kind) {
    case STAGE_FAILURE_DISAGREE:
        return xp_fail(XP_FATAL,
                       "%.24s: rank %u (layer %u, request %llu, %u rows) and rank %u (layer %u, "
                       "request %llu, %u rows) disagree",
                       id, failure->a, failure->layer_a, (unsigned long long)failure->sequence_a,
                       failure->rows_a, failure->b, failure->layer_b,
                       (unsigned long long)failure->sequence_b, failure->rows_b);
    case STAGE_FAILURE_RANK:
        return xp_fail(XP_FATAL, "%.24s: rank %u did not submit layer %u within %llu ms of rank %u",
                       id, failure->b, failure->layer_a, waited_ms, failure->a);
    case STAGE_FAILURE_MEMBER:
        return xp_fail(XP_FATAL,
                       "%.24s: FfnAgent %u did not deliver its part of layer %u within %llu ms", id,
                       failure->b, failure->layer_a, waited_ms);
    case STAGE_FAILURE_EXECUTION:
        return xp_fail(XP_FATAL, "%.24s: FfnAgent %u did not end layer %u (%u rows) within %llu ms",
                       id, failure->b, failure->layer_a, failure->rows_a, waited_ms);
    case STAGE_FAILURE_LANE:
        return xp_fail(XP_FATAL, "%.24s: no Lane of FfnAgent %u came free for layer %u in %llu ms",
                       id, failure->b, failure->layer_a, waited_ms);
    case STAGE_FAILURE_CAPACITY:
        return xp_fail(XP_FATAL,
                       "%.24s: layer %u has more rows in all (%u of rank %u) than the Lanes of "
                       "FfnAgent %u hold",
                       id, failure->layer_a, failure->rows_a, failure->a, failure->b);
    case STAGE_FAILURE_RUNTIME:
        return xp_fail(XP_FATAL, "the execution of FfnAgent %u failed: %s", ffn->config.ffn,
                       failure->status < XP_STATUS_COUNT
                           ? xp_status_name((xp_status_t)failure->status)
                           : "unknown");
    default:
        return xp_fail(XP_FATAL, "the scheduler of FfnAgent %u left a failure of unknown kind %u",
                       ffn->config.ffn, failure->kind);
    }
}

xp_status_t stage_ffn_look(stage_ffn_t *ffn, uint64_t deadline_ns, uint64_t *dropped_out)
{
    if (!ffn->launched)
        return xp_fail(XP_INVALID, "the scheduler of FfnAgent %u is not started", ffn->config.ffn);
    /* Asked before the table is read: what the scheduler wrote before it left is then in it. */
    bool left = false;
    XP_TRY(ffn_has_left(ffn, &left));
    XP_TRY(ffn_read(ffn, deadline_ns));
    if (ffn->image.failure.kind != STAGE_FAILURE_NONE)
        return ffn_failure(ffn, &ffn->image.failure);
    if (left) {
        if (ffn->image.shutdown || ffn->image.stop)
            return xp_fail(XP_CLOSED, "the scheduler of FfnAgent %u has left", ffn->config.ffn);
        return xp_fail(XP_FATAL, "the scheduler of FfnAgent %u has left by itself",
                       ffn->config.ffn);
    }
    uint64_t dropped = 0;
    for (uint32_t i = 0; i < ffn->config.plan->instance_count; i++) {
        ffn_instance_t *instance = &ffn->instances[i];
        uint32_t now = ffn->image.instance[i].now;
        if (!instance->attached || instance->dropped ||
            transport_slot_state(now) != TRANSPORT_SLOT_DROPPED ||
            transport_slot_turn(now) != instance->turn)
            continue;
        instance->dropped = true;
        dropped |= 1ull << i;
    }
    *dropped_out = dropped;
    return XP_OK;
}

xp_status_t stage_ffn_fail(stage_ffn_t *ffn, bool keep)
{
    XP_TRY(stage_control_post(&ffn->control, ffn->table + offsetof(stage_table_t, stop), 1));
    xp_status_t first = XP_OK;
    for (uint32_t i = 0; !keep && i < ffn->config.plan->instance_count; i++) {
        xp_status_t status = ffn->instances[i].attached ? stage_ffn_close(ffn, i, XP_FATAL) : XP_OK;
        if (first == XP_OK)
            first = status;
    }
    return first;
}

xp_status_t stage_ffn_shutdown(stage_ffn_t *ffn)
{
    return stage_control_post(&ffn->control, ffn->table + offsetof(stage_table_t, shutdown), 1);
}

xp_status_t stage_ffn_counters(stage_ffn_t *ffn, uint64_t deadline_ns,
                               stage_ffn_counters_t *counters_out)
{
    XP_TRY(ffn_read(ffn, deadline_ns));
    const stage_counts_t *counts = &ffn->image.counts;
    *counters_out = (stage_ffn_counters_t){
        .invocations = counts->invocations,
        .rows = counts->rows,
        .resident = counts->resident,
        .host = counts->host,
        .abandoned = counts->abandoned,
        .dropped = counts->dropped,
        .queue_ns = counts->queue_ns,
        .execute_ns = counts->execute_ns,
        .lanes_peak = counts->lanes_peak,
        .lanes_in_use = counts->lanes_in_use,
        .turns = counts->turns,
        .longest_turn_ns = counts->longest_turn_ns,
        .cuts = counts->cuts,
        .noted = ffn->image.noted.count,
        .noted_taken_ns = ffn->image.noted.taken_ns,
        .noted_job_ns = ffn->image.noted.job_ns,
        .noted_answer_ns = ffn->image.noted.answer_ns,
        .noted_longest_ns = ffn->image.noted.longest_ns,
    };
    return XP_OK;
}

xp_status_t stage_ffn_instance_counters(stage_ffn_t *ffn, uint32_t instance, uint64_t deadline_ns,
                                        uint64_t *invocations_out, uint64_t *rows_out)
{
    XP_TRY(ffn_check_member(ffn, instance));
    XP_TRY(ffn_read(ffn, deadline_ns));
    *invocations_out = ffn->image.instance[instance].invocations;
    *rows_out = ffn->image.instance[instance].rows;
    return XP_OK;
}

/* ---- end ------------------------------------------------------------------------------------ */
xp_status_t stage_ffn_stop(stage_ffn_t *ffn, uint64_t deadline_ns)
{
    if (!ffn->launched)
        return XP_OK;
    XP_TRY(stage_control_post(&ffn->control, ffn->table + offsetof(stage_table_t, stop), 1));
    xp_clock_t clock = xp_clock_system();
    XP_TRY(cuda_stream_wait(ffn->config.device, ffn->resident, &clock, deadline_ns));
    if (ffn->far.courier)
        XP_TRY(stage_courier_stop(ffn->far.courier, deadline_ns));
    ffn->launched = false;
    return XP_OK;
}

void stage_ffn_destroy(stage_ffn_t *ffn)
{
    if (!ffn)
        return;
    xp_status_t status = stage_ffn_stop(ffn, xp_monotonic_ns() + FFN_STOP_NS);
    /* A kernel that does not leave keeps its memory; the end of the process takes both. */
    if (status == XP_OK || status == XP_FATAL) {
        stage_courier_destroy(ffn->far.courier);
        for (uint32_t i = 0; i < FABRIC_MAX_INSTANCES; i++) {
            ffn_instance_t *instance = &ffn->instances[i];
            ffn_unmap_arenas(instance);
            for (uint32_t first = 0; first < STAGE_MAX_MEMBERS; first++)
                cuda_block_destroy(&instance->foreign[first]);
            cuda_block_destroy(&instance->scratch);
            cuda_block_destroy(&instance->partials);
            cuda_block_destroy(&instance->page);
            if (instance->kept >= 0)
                close(instance->kept);
        }
        if (ffn->table)
            CUDA_IGNORE(ffn->config.device->driver, cuMemFree, ffn->table);
        cuda_stream_destroy(ffn->config.device, ffn->resident);
        cuda_module_unload(&ffn->module);
        stage_control_fini(&ffn->control);
    }
    free(ffn);
}
