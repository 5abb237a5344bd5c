/* SPDX-License-Identifier: MIT */
/*
 * An Instance Rank on a GPU over the fake driver: what is queued for a call, which rows count, what
 * is refused, and that nothing is left whichever driver call fails. Kernels are counted; those of
 * the data plane itself are tested in tests/unit/stage.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>

#include "../cuda/fake_driver.h"

static xp_status_t fake_load(const cuda_driver_t **driver_out)
{
    *driver_out = &fake_driver;
    return XP_OK;
}
#define cuda_driver_load fake_load
#include "library/device.c"
#include "stage/records.h"
#undef cuda_driver_load

#define HIDDEN 16
#define ROWS   8
#define LAYERS 3
#define SOON   (xp_monotonic_ns() + 5 * XP_NS_PER_S)

/* In place of the device code, so that these tests need no nvcc. */
static const unsigned char code[1];
extern const cuda_image_t cuda_image_transport_cuda_kernels, cuda_image_stage_kernels;
const cuda_image_t cuda_image_transport_cuda_kernels = {"transport_cuda_kernels", code, code + 1};
const cuda_image_t cuda_image_stage_kernels = {"stage_kernels", code, code + 1};

/* ---- kernels ----------------------------------------------------------------------------------
 */

static uint32_t lives, calls, closes;
static transport_live_t live_written;
static uint32_t next_status; /* what the next call ends with */
static uint32_t notice;      /* as a launch saw it last */
static uint64_t pause_limit_ns;

static void run_nothing(const fake_launch_t *launch)
{
}
static void run_live(const fake_launch_t *launch)
{
    lives++;
    memcpy(&live_written, launch->values[1], sizeof(live_written));
    memcpy(fake_pointer(launch, 0), &live_written, sizeof(live_written));
}
static void run_call(const fake_launch_t *launch)
{
    transport_device_state_t *state = fake_pointer(launch, 3);
    const transport_live_t *live = fake_pointer(launch, 4);
    transport_patience_t patience;
    memcpy(&patience, launch->values[8], sizeof(patience));
    notice = *(const uint32_t *)(uintptr_t)patience.notice;
    pause_limit_ns = patience.pause_ns;
    calls++;
    if (state->status != XP_OK)
        return;
    state->requests++;
    state->total_rows += live->rows;
    state->status = next_status;
}
static void run_arena_start(const fake_launch_t *launch)
{
    memcpy(fake_pointer(launch, 0), launch->values[1], sizeof(mailbox_arena_t));
}
static void run_close(const fake_launch_t *launch)
{
    closes++;
    mailbox_close(fake_pointer(launch, 0), (uint32_t)fake_argument(launch, 1));
}

#define PLAIN(name)                                                                                \
    {                                                                                              \
        name, run_nothing,                                                                         \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }
static const fake_kernel_t kernels[] = {
    {"stage_call", run_call, {sizeof(stage_put_t), 48, 8, 8, 8, 8, 8, 4, 32}},
    {"transport_live_write", run_live, {8, sizeof(transport_live_t)}},
    {"transport_arena_start", run_arena_start, {8, sizeof(mailbox_arena_t)}},
    {"transport_close", run_close, {8, 4}},
    PLAIN("stage_put"),
    PLAIN("stage_wait"),
    PLAIN("stage_take"),
    PLAIN("stage_describe"),
    PLAIN("stage_page_start"),
    PLAIN("stage_partials_start"),
    PLAIN("stage_post"),
    PLAIN("stage_close"),
    PLAIN("transport_put"),
    PLAIN("transport_wait"),
    PLAIN("transport_take"),
    PLAIN("transport_call"),
    PLAIN("transport_recover"),
    PLAIN("transport_slot_describe"),
    PLAIN("transport_post"),
    PLAIN("transport_carry"),
};

/* ---- what the daemon would send ---------------------------------------------------------------
 */

static fabric_plan_t plan;

static void make_plan(uint32_t dp)
{
    plan = (fabric_plan_t){.magic = FABRIC_PLAN_MAGIC,
                           .version = FABRIC_PLAN_VERSION,
                           .bytes = sizeof(plan),
                           .generation = 1,
                           .atn_count = 2,
                           .ffn_count = 2,
                           .lanes = 2,
                           .submission_timeout_ns = XP_NS_PER_S,
                           .instance_count = 1,
                           .weights_count = 1,
                           .provider = FABRIC_PROVIDER_P2P};
    fabric_plan_instance_t *instance = &plan.instances[0];
    snprintf(instance->id, sizeof(instance->id), "m");
    instance->hidden = HIDDEN;
    instance->layers = LAYERS;
    instance->max_rows = ROWS;
    instance->dtype = XP_DTYPE_BF16;
    instance->atn_tp = 1;
    instance->atn_dp = dp;
    instance->delivery = FABRIC_DELIVERY_SINGLE_COMPLETE;
    for (uint32_t l = 0; l < LAYERS; l++)
        instance->layer_group[l] = l == 0 ? 1 : 2; /* both FfnAgents are members */
}

static uint64_t pause_ns;

static xp_status_t say_plane(library_device_t *device)
{
    wire_descriptors_t fds = {.count = 2};
    assert_int_equal(transport_life_make(&fds.fds[0]), XP_OK);
    fds.fds[1] = memfd_create("plan", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(write(fds.fds[1], &plan, sizeof(plan)), sizeof(plan));
    assert_int_equal(fcntl(fds.fds[1], F_ADD_SEALS, F_SEAL_WRITE), 0);
    xpw_DevicePlane plane = {.life_index = 5, .pause_ns = pause_ns};
    xp_status_t status = library_device_plane(device, &plane, &fds);
    wire_descriptors_close(&fds);
    return status;
}

static xp_status_t say_admitted(library_device_t *device)
{
    xpw_Admitted admitted = {.hidden = HIDDEN, .max_rows = ROWS};
    xpw_ArenaOffer offer;
    int fd = -1;
    XP_TRY(library_device_admit(device, &admitted, 0, XP_NS_PER_S, &offer, &fd));
    assert_int_equal(offer.hidden, HIDDEN);
    assert_int_equal(offer.dtype, XP_DTYPE_BF16);
    close(fd);
    return XP_OK;
}

static xp_status_t say_stage(library_device_t *device, uint32_t ffn)
{
    const fabric_plan_instance_t *instance = &plan.instances[0];
    uint64_t rows = (uint64_t)ROWS * instance->atn_dp;
    stage_page_t page = {.head = {.magic = STAGE_MAGIC,
                                  .abi = STAGE_ABI,
                                  .bytes = STAGE_HEADER_BYTES + rows * HIDDEN * 2,
                                  .generation = 1,
                                  .ffn = ffn,
                                  .ranks = instance->atn_dp,
                                  .dp_size = instance->atn_dp,
                                  .hidden = HIDDEN,
                                  .max_rows = ROWS,
                                  .dtype = XP_DTYPE_BF16}};
    wire_descriptors_t fds = {.count = 1};
    fds.fds[0] = memfd_create("stage", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fds.fds[0], FAKE_GRANULARITY), 0);
    assert_int_equal(write(fds.fds[0], &page, sizeof(page)), sizeof(page));
    xpw_StageGrant grant = {.kind = xpw_StageKind_STAGE_ROWS, .ffn = ffn};
    xp_status_t status = library_device_stage(device, &grant, &fds);
    wire_descriptors_close(&fds);
    return status;
}

static xp_status_t open_rank(library_device_t **device_out)
{
    library_device_t *device;
    XP_TRY(library_device_create(1, &device));
    xp_status_t status = library_device_use(device);
    if (status == XP_OK)
        status = say_plane(device);
    if (status == XP_OK)
        status = say_admitted(device);
    for (uint32_t f = 0; f < 2 && status == XP_OK; f++)
        status = say_stage(device, f);
    if (status != XP_OK) {
        library_device_destroy(device);
        return status;
    }
    *device_out = device;
    return XP_OK;
}

static library_device_t *rank_of(uint32_t dp)
{
    library_device_t *device = NULL;
    fake_reset(kernels, sizeof(kernels) / sizeof(kernels[0]));
    make_plan(dp);
    lives = calls = closes = next_status = 0;
    if (open_rank(&device) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    return device;
}

static uint16_t rows[ROWS * HIDDEN];

static xpool_ffn_call_t call_of(uint32_t count)
{
    return (xpool_ffn_call_t){.struct_bytes = sizeof(xpool_ffn_call_t),
                              .layer = 1,
                              .rows = count,
                              .dtype = XPOOL_BF16,
                              .step = XPOOL_PREFILL,
                              .input = rows,
                              .output = rows};
}

/* ---- tests ------------------------------------------------------------------------------------
 */

static void the_record_is_written_when_other_rows_count(void **state)
{
    library_device_t *device = rank_of(1);
    xpool_ffn_call_t call = call_of(3);
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(lives, 1);
    assert_int_equal(live_written.rows, 3);
    assert_int_equal(live_written.kind, XPOOL_PREFILL);
    call.layer = 2;
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(lives, 1); /* it holds what is needed */
    call.rows = 2;
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(lives, 2);

    /* A step's own count stays, whatever the shapes of its calls. */
    xpool_live_t live = {.struct_bytes = sizeof(live), .rows = 1, .step = XPOOL_DECODE};
    assert_int_equal(library_device_live(device, &live, NULL), XP_OK);
    assert_int_equal(lives, 3);
    call = call_of(ROWS);
    call.live_on_device = 1;
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(lives, 3);
    assert_int_equal(live_written.rows, 1);

    /* Once somebody else may write it, it is always written. */
    uint64_t record = 0;
    assert_int_equal(library_device_live(device, NULL, &record), XP_OK);
    assert_true(record != 0);
    assert_memory_equal((void *)(uintptr_t)record, &live_written, sizeof(live_written));
    call.live_on_device = 0;
    for (int i = 0; i < 2; i++)
        assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(lives, 5);
    assert_int_equal(calls, 6);
    library_device_destroy(device);
    assert_int_equal(fake_objects(), 0);
}

static void a_captured_call_reads_the_record_of_its_replay(void **state)
{
    library_device_t *device = rank_of(1);
    cuda_stream_t stream;
    assert_int_equal(cuda_stream_create(&device->device, false, &stream), XP_OK);
    xpool_ffn_call_t call = call_of(ROWS);
    call.stream = stream;
    cuda_graph_exec_t graph;
    assert_int_equal(cuda_capture_begin(&device->device, stream), XP_OK);
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(cuda_capture_end(&device->device, stream, &graph), XP_OK);
    assert_int_equal(lives + calls, 0);
    xpool_live_t live = {
        .struct_bytes = sizeof(live), .rows = 5, .step = XPOOL_DECODE, .stream = stream};
    for (uint32_t i = 1; i <= 3; i++) {
        assert_int_equal(library_device_live(device, &live, NULL), XP_OK);
        assert_int_equal(cuda_graph_launch(&device->device, graph, stream), XP_OK);
        assert_int_equal(calls, i);
        assert_int_equal(lives, i < 3 ? 1 : 2); /* the second one says what is there already */
        assert_int_equal(live_written.rows, i < 3 ? 5 : 4);
        live.rows = i == 2 ? 4 : 5;
    }
    /* On another stream nothing is known of what that one has seen. */
    live.stream = NULL;
    assert_int_equal(library_device_live(device, &live, NULL), XP_OK);
    assert_int_equal(lives, 3);
    cuda_graph_destroy(&device->device, graph);
    cuda_stream_destroy(&device->device, stream);
    library_device_destroy(device);
    assert_int_equal(fake_objects(), 0);
}

static void data_parallel_ranks_tell_the_counts_of_all(void **state)
{
    library_device_t *device = rank_of(2);
    xpool_live_t live = {.struct_bytes = sizeof(live), .rows = 3};
    assert_int_equal(library_device_live(device, &live, NULL), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "needs dp_rows"));
    uint32_t counts[2] = {4, 7};
    live.dp_rows = counts;
    assert_int_equal(library_device_live(device, &live, NULL), XP_INVALID);
    counts[0] = 3;
    assert_int_equal(library_device_live(device, &live, NULL), XP_OK);
    assert_int_equal(live_written.dp_rows[1], 7);
    library_device_destroy(device);
}

static void what_is_wrong_is_refused_and_nothing_queued(void **state)
{
    library_device_t *device = rank_of(1);
    xpool_ffn_call_t call = call_of(1);
    call.dtype = XPOOL_F32;
    assert_int_equal(library_device_ffn(device, &call), XP_INVALID);
    assert_non_null(
        strstr(xp_error_last()->text, "tensors of float32 on a GPU: the plan has bfloat16"));
    call = call_of(1);
    call.output = NULL;
    assert_int_equal(library_device_ffn(device, &call), XP_INVALID);
    call = call_of(1);
    call.layer = LAYERS;
    assert_int_equal(library_device_ffn(device, &call), XP_INVALID);
    xpool_live_t live = {.struct_bytes = sizeof(live), .rows = ROWS + 1};
    assert_int_equal(library_device_live(device, &live, NULL), XP_INVALID);
    assert_int_equal(calls, 0);
    assert_int_equal(say_plane(device), XP_PEER);
    assert_int_equal(say_admitted(device), XP_PEER);
    assert_int_not_equal(say_stage(device, 1), XP_OK); /* twice */
    library_device_destroy(device);

    /* Not admitted yet. */
    fake_reset(kernels, sizeof(kernels) / sizeof(kernels[0]));
    assert_int_equal(library_device_create(0, &device), XP_OK);
    assert_int_equal(library_device_finish(device, SOON), XP_RETRY);
    assert_int_equal(library_device_live(device, NULL, NULL), XP_RETRY);
    call = call_of(1);
    assert_int_not_equal(library_device_ffn(device, &call), XP_OK);
    library_device_close(device, XP_FATAL);
    library_device_destroy(device);
    assert_int_equal(library_device_create(2, &device), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "no device cuda:2"));
    assert_int_equal(fake.contexts, 0);
}

static void the_verdict_is_what_the_kernels_met(void **state)
{
    library_device_t *device = rank_of(1);
    xpool_ffn_call_t call = call_of(1);
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(library_device_finish(device, SOON), XP_OK);
    next_status = XP_TIMEOUT;
    assert_int_equal(library_device_ffn(device, &call), XP_OK); /* queued */
    assert_int_equal(library_device_finish(device, SOON), XP_TIMEOUT);
    assert_non_null(strstr(xp_error_last()->text, "no answer from the FFN tier"));
    assert_int_equal(library_device_ffn(device, &call), XP_TIMEOUT); /* it is over */
    library_device_close(device, XP_FATAL);
    assert_int_equal(closes, 1);
    library_device_destroy(device);
    assert_int_equal(fake_objects(), 0);
}

static library_device_t *marking;

/* The stream comes to its copy: until then the mark is open, whatever its place in the ring held.
 */
static void mark_is_open(void)
{
    assert_int_equal(marking->marks[marking->mark_count % MARKS].status, MARK_OPEN);
}

static void a_mark_tells_how_its_pass_ended(void **state)
{
    library_device_t *device = rank_of(1);
    cuda_stream_t stream;
    uint64_t first, second, mark;
    assert_int_equal(cuda_stream_create(&device->device, false, &stream), XP_OK);
    xpool_ffn_call_t call = call_of(1);
    call.stream = stream;
    assert_int_equal(library_device_look(device, 0, SOON), XP_INVALID); /* nobody made it */
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(library_device_mark(device, stream, &first), XP_OK);
    next_status = XP_TIMEOUT;
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(library_device_mark(device, stream, &second), XP_OK);
    assert_int_equal(library_device_look(device, first, SOON), XP_OK);
    assert_int_equal(library_device_look(device, second, SOON), XP_TIMEOUT);
    assert_non_null(strstr(xp_error_last()->text, "no answer from the FFN tier"));
    /* What was asked after it changes nothing of what the first pass was. */
    assert_int_equal(library_device_look(device, first, SOON), XP_OK);

    /* A stream that has not passed its mark yet. */
    device->marks[first % MARKS].status = MARK_OPEN;
    assert_int_equal(library_device_look(device, first, SOON), XP_RETRY);

    marking = device;
    fake.before_read = mark_is_open;
    for (uint32_t i = 0; i < MARKS; i++)
        assert_int_equal(library_device_mark(device, stream, &mark), XP_OK);
    fake.before_read = NULL;
    assert_int_equal(library_device_look(device, second, SOON), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "are kept"));

    cuda_graph_exec_t graph;
    assert_int_equal(cuda_capture_begin(&device->device, stream), XP_OK);
    assert_int_equal(library_device_mark(device, stream, &mark), XP_INVALID);
    assert_int_equal(cuda_capture_end(&device->device, stream, &graph), XP_OK);
    cuda_graph_destroy(&device->device, graph);
    cuda_stream_destroy(&device->device, stream);
    library_device_destroy(device);
    assert_int_equal(fake_objects(), 0);
}

static void calls_are_counted_by_how_they_come(void **state)
{
    library_device_t *device = rank_of(1);
    library_device_counts_t counts;
    cuda_stream_t stream;
    cuda_graph_exec_t graph;
    assert_int_equal(cuda_stream_create(&device->device, false, &stream), XP_OK);
    xpool_live_t live = {
        .struct_bytes = sizeof(live), .rows = 2, .step = XPOOL_DECODE, .stream = stream};
    assert_int_equal(library_device_live(device, &live, NULL), XP_OK);
    xpool_ffn_call_t call = call_of(ROWS);
    call.stream = stream;
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    call.step = XPOOL_DECODE;
    call.live_on_device = 1;
    assert_int_equal(library_device_live(device, &live, NULL), XP_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(cuda_capture_begin(&device->device, stream), XP_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(cuda_capture_end(&device->device, stream, &graph), XP_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(cuda_graph_launch(&device->device, graph, stream), XP_OK);
    library_device_counts(device, SOON, &counts);
    assert_int_equal(counts.eager_prefill, 1);
    assert_int_equal(counts.eager_decode, 2);
    assert_int_equal(counts.captured, 3);
    assert_int_equal(counts.replayed, 2 * 3);
    assert_int_equal(counts.calls, 3 + 2 * 3);
    assert_int_equal(counts.rows, ROWS + (2 + 2 * 3) * 2); /* live ones, not the tensors' */
    assert_int_equal(library_device_count_anew(device, SOON), XP_OK);
    assert_int_equal(cuda_graph_launch(&device->device, graph, stream), XP_OK);
    library_device_counts(device, SOON, &counts);
    assert_int_equal(counts.eager_prefill + counts.eager_decode, 0);
    assert_int_equal(counts.replayed, 3);
    assert_int_equal(counts.rows, 3 * 2);
    cuda_graph_destroy(&device->device, graph);
    cuda_stream_destroy(&device->device, stream);
    library_device_destroy(device);
    assert_int_equal(fake_objects(), 0);
}

/* What the host tells reaches launches that are under way, without one of its own. */
static void a_pause_and_the_end_are_told_by_the_notice(void **state)
{
    library_device_t *device = rank_of(1);
    xpool_ffn_call_t call = call_of(1);
    assert_false(
        library_device_pause(device, true)); /* the daemon has not said that there are any */
    library_device_destroy(device);
    pause_ns = 7 * XP_NS_PER_S;
    device = rank_of(1);
    pause_ns = 0;
    assert_false(library_device_pause(device, false));
    for (uint32_t pause = 1; pause <= 2; pause++) {
        assert_true(library_device_pause(device, true));
        assert_false(library_device_pause(device, true));
        assert_true(library_device_paused(device));
        assert_int_equal(library_device_ffn(device, &call), XP_OK);
        assert_true(transport_notice_paused(notice));
        assert_true(pause_limit_ns == 7 * XP_NS_PER_S);
        assert_true(library_device_pause(device, false));
        assert_int_equal(library_device_ffn(device, &call), XP_OK);
        assert_int_equal(notice, 2 * pause);
    }
    assert_true(library_device_pause(device, true));
    library_device_close(device, XP_CLOSED);
    assert_int_equal(closes, 1);
    assert_int_equal(library_device_ffn(device, &call), XP_OK);
    assert_int_equal(transport_notice_end(notice), XP_CLOSED);
    library_device_destroy(device);
    assert_int_equal(fake_objects(), 0);
}

static void the_engines_own_context_stays_current(void **state)
{
    library_device_t *device = rank_of(1);
    cuda_context_t other = (cuda_context_t)(uintptr_t)0x77, now = NULL;
    fake_driver.cuCtxSetCurrent(other);
    xpool_ffn_call_t call = call_of(1);
    xpool_live_t live = {.rows = 1, .step = XPOOL_DECODE};
    library_device_counts_t counts;
    uint64_t mark;
    for (int i = 0; i < 8; i++) {
        xp_status_t status = XP_OK;
        if (i == 0)
            status = library_device_ffn(device, &call);
        else if (i == 1)
            status = library_device_live(device, &live, NULL);
        else if (i == 2)
            status = library_device_finish(device, SOON);
        else if (i == 3)
            status = library_device_mark(device, NULL, &mark);
        else if (i == 4)
            status = library_device_look(device, mark, SOON);
        else if (i == 5)
            library_device_counts(device, SOON, &counts);
        else if (i == 6)
            status = library_device_count_anew(device, SOON);
        else
            library_device_close(device, XP_CLOSED);
        assert_int_equal(status, XP_OK);
        fake_driver.cuCtxGetCurrent(&now);
        assert_ptr_equal(now, other);
    }
    library_device_destroy(device);
    fake_driver.cuCtxGetCurrent(&now);
    assert_ptr_equal(now, other);
}

static void nothing_is_left_whichever_call_fails(void **state)
{
    uint32_t failures = 0;
    for (uint64_t n = 1;; n++) {
        library_device_t *device = NULL;
        fake_reset(kernels, sizeof(kernels) / sizeof(kernels[0]));
        make_plan(1);
        fake.fail_at = n;
        xp_status_t status = open_rank(&device);
        if (status == XP_OK) {
            library_device_destroy(device);
            assert_int_equal(fake_objects(), 0);
            if (!fake.failed)
                break;
            continue; /* a call on the way out, of which nothing depends */
        }
        failures++;
        assert_int_equal(fake_objects(), 0);
        assert_int_equal(fake.contexts, 0);
        if (!strstr(xp_error_last()->text, fake.failed))
            fail_msg("call %llu (%s) failed: %s", (unsigned long long)n, fake.failed,
                     xp_error_last()->text);
    }
    assert_true(failures > 30);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_record_is_written_when_other_rows_count),
        cmocka_unit_test(a_captured_call_reads_the_record_of_its_replay),
        cmocka_unit_test(data_parallel_ranks_tell_the_counts_of_all),
        cmocka_unit_test(what_is_wrong_is_refused_and_nothing_queued),
        cmocka_unit_test(the_verdict_is_what_the_kernels_met),
        cmocka_unit_test(a_mark_tells_how_its_pass_ended),
        cmocka_unit_test(calls_are_counted_by_how_they_come),
        cmocka_unit_test(a_pause_and_the_end_are_told_by_the_notice),
        cmocka_unit_test(the_engines_own_context_stays_current),
        cmocka_unit_test(nothing_is_left_whichever_call_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
