/* SPDX-License-Identifier: MIT */
/* xpool_kv_* on a GPU, over the fake driver: memory follows the commands, what others use waits for
 * the device's work, every failed call leaves the range usable and is told to the daemon. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "../cuda/fake_driver.h"
#include "cuda/device.h"
#include "kv/channel.h"
#include "library/private.h"

/* Tokens of 1000 bytes in the engine, 1024 in the range; a bundle is one unit of the fake driver.
 */
enum { TOKEN_BYTES = 1000, STRIDE = 1024, BUNDLE_TOKENS = 64, FLOOR = 2, RESERVED = 12 };
#define BUNDLE_BYTES  ((uint64_t)BUNDLE_TOKENS * STRIDE)
#define TOKENS(count) ((uint32_t)((count)*BUNDLE_TOKENS))

static int channel_fd;
static kv_channel_t *channel;
static cuda_device_t device;
static xpool_kv_t *kv;
static uint32_t sequence;
/* What src/kv/clear.cu does. */
static void clear_run(const fake_launch_t *launch)
{
    uint64_t address, count;
    memcpy(&address, launch->values[0], sizeof(address));
    memcpy(&count, launch->values[1], sizeof(count));
    memset((void *)(uintptr_t)address, 0, count * 16);
}
static const fake_kernel_t kernels[] = {{"kv_clear", clear_run, {8, 8}}};

static cuda_stream_t working; /* a stream that is not done */

static bool is_busy(cuda_stream_t stream)
{
    return working && stream == working;
}

static int make(void **state)
{
    const uint64_t pool = 1u << 30;
    kv_group_plan_t plan = {.partition_count = 1,
                            .bundle_bytes = BUNDLE_BYTES,
                            .token_bytes = STRIDE,
                            .bundle_tokens = BUNDLE_TOKENS,
                            .page_tokens = 16,
                            .floor_bundles = FLOOR,
                            .ceiling_bundles = RESERVED,
                            .reserved_bundles = RESERVED,
                            .elastic = true};
    fake_reset(kernels, 1);
    fake.busy = is_busy;
    working = NULL;
    sequence = 0;
    kv = NULL;
    return kv_channel_create(7, &pool, 1, &plan, 1, &channel_fd, &channel) == XP_OK &&
                   cuda_device_open(&fake_driver, 0, &device) == XP_OK
               ? 0
               : -1;
}

static int unmake(void **state)
{
    xpool_kv_close(kv);
    int left = fake_objects();
    cuda_device_close(&device);
    close(channel_fd);
    kv_channel_unmap(channel);
    return left || fake.contexts;
}

static void command(uint32_t bundles)
{
    kv_group_command_publish(&channel->groups[0], ++sequence, bundles, false);
}

static xp_status_t open_kv(void)
{
    library_kv_place_t place = {
        .channel_fd = channel_fd, .daemon_bell = -1, .bell = -1, .name = "kv", .device = &device};
    return library_kv_open(&place, TOKEN_BYTES, &kv);
}

static xpool_status_t ask(xpool_kv_command_t *out)
{
    *out = (xpool_kv_command_t){.struct_bytes = sizeof(*out)};
    return xpool_kv_poll(kv, 1, 0, out);
}

static xpool_kv_info_t info(void)
{
    xpool_kv_info_t out = {.struct_bytes = sizeof(out)};
    assert_int_equal(xpool_kv_info(kv, &out), XPOOL_OK);
    return out;
}

static void expect_completion(uint32_t bundles)
{
    uint64_t cell = kv_partition_completion(&channel->partitions[0]);
    assert_int_equal(KV_CELL_SEQUENCE(cell), sequence);
    assert_int_equal(KV_CELL_VALUE(cell), bundles);
}

static bool all_are(uint32_t from, uint32_t to, unsigned char value)
{
    const unsigned char *at = info().address;
    for (size_t i = from * BUNDLE_BYTES; i < to * BUNDLE_BYTES; i++)
        if (at[i] != value)
            return false;
    return true;
}

static void commands_become_memory(void **state)
{
    xpool_kv_command_t out;
    command(FLOOR);
    if (open_kv() != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    assert_int_equal(info().device, 0);
    assert_int_equal(info().token_bytes, STRIDE);
    assert_int_equal(info().reserved_tokens, TOKENS(RESERVED));
    expect_completion(FLOOR);
    assert_int_equal(fake.mapped, FLOOR);
    void *address = info().address;
    memset(address, 7, FLOOR * BUNDLE_BYTES);

    /* Handles for the next grow are made when there is nothing else to do, one at a time. */
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(ask(&out), XPOOL_RETRY);
    assert_int_equal(fake.handles, FLOOR + KV_READY_BUNDLES_CUDA);

    command(9);
    assert_int_equal(ask(&out), XPOOL_OK);
    assert_int_equal(out.order, XPOOL_KV_GROW);
    assert_int_equal(out.tokens, TOKENS(9));
    assert_int_equal(xpool_kv_release(kv, out.tokens), XPOOL_OK);
    expect_completion(9);
    assert_int_equal(fake.mapped, 9);
    assert_true(all_are(0, FLOOR, 7) && all_are(FLOOR, 9, 0));
    memset(address, 8, 9 * BUNDLE_BYTES);

    command(3);
    assert_int_equal(ask(&out), XPOOL_OK);
    assert_int_equal(out.order, XPOOL_KV_SHRINK);
    assert_int_equal(xpool_kv_release_after(kv, out.tokens, NULL), XPOOL_OK);
    expect_completion(3);
    assert_int_equal(fake.mapped, 3);
    assert_int_equal(fake.handles, 3 + KV_READY_BUNDLES_CUDA); /* no more than is charged */
    command(5);
    assert_int_equal(ask(&out), XPOOL_OK);
    assert_true(all_are(0, 3, 8) && all_are(3, 5, 0));
    assert_ptr_equal(info().address, address);
}

static void memory_in_use_is_waited_for(void **state)
{
    xpool_kv_command_t out;
    cuda_stream_t stream;
    command(6);
    if (open_kv() != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    assert_int_equal(cuda_device_use(&device), XP_OK);
    assert_int_equal(device.driver->cuStreamCreateWithPriority(&stream, 1, 0), 0);
    command(2);
    assert_int_equal(ask(&out), XPOOL_OK);
    working = stream;
    assert_int_equal(xpool_kv_release_after(kv, out.tokens, stream), XPOOL_RETRY);
    assert_int_equal(fake.mapped, 6);
    assert_int_equal(info().mapped_tokens, TOKENS(6));
    assert_int_equal(KV_CELL_SEQUENCE(kv_partition_completion(&channel->partitions[0])), 1);
    /* Nothing is given back by this one, so nothing is waited for. */
    assert_int_equal(xpool_kv_release_after(kv, TOKENS(6), stream), XPOOL_OK);
    expect_completion(6);
    working = NULL;
    assert_int_equal(xpool_kv_release_after(kv, out.tokens, stream), XPOOL_OK);
    expect_completion(2);
    assert_int_equal(fake.mapped, 2);
    device.driver->cuStreamDestroy(stream);
}

/* Clearing that never ends: the memory is neither handed out nor told to be there. */
static void memory_that_is_not_cleared_ends_it(void **state)
{
    xpool_kv_command_t out;
    command(FLOOR);
    if (open_kv() != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    command(4);
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
        if (fake.stream[i].used)
            working = &fake.stream[i];
    assert_non_null(working);
    assert_int_equal(ask(&out), XPOOL_FAILED);
    assert_int_equal(KV_CELL_SEQUENCE(kv_partition_completion(&channel->partitions[0])), 1);
    /* What is mapped beyond goes with the process; here, so that nothing is left. */
    working = NULL;
    assert_int_equal(fake.mapped, 4);
    device.driver->cuMemUnmap((cuda_address_t)(uintptr_t)info().address + FLOOR * BUNDLE_BYTES,
                              2 * BUNDLE_BYTES);
    for (int i = FLOOR; i < 4; i++)
        device.driver->cuMemRelease((cuda_memory_handle_t)i + 1);
}

static void capture_is_told_with_what_is_free(void **state)
{
    uint64_t free_bytes;
    command(FLOOR);
    if (open_kv() != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    assert_int_equal(kv_partition_captured(&channel->partitions[0], &free_bytes), 0);
    fake.fail_name = "cuMemGetInfo";
    assert_int_not_equal(xpool_kv_captured(kv), XPOOL_OK);
    assert_int_equal(kv_partition_captured(&channel->partitions[0], &free_bytes), 0);
    fake.fail_name = NULL;
    assert_int_equal(xpool_kv_captured(kv), XPOOL_OK);
    assert_true(kv_partition_captured(&channel->partitions[0], &free_bytes) > 0);
    assert_int_equal(free_bytes, 1u << 30);
    assert_int_equal(fake.handles, FLOOR + KV_READY_BUNDLES_CUDA); /* they are taken by then */
}

/* A history of commands, every call into the driver failed in turn: what is mapped is a prefix that
 * can be used, the daemon is never told of less than that, and nothing is left in the end. */
static void every_failed_call_is_survived(void **state)
{
    const uint32_t goals[] = {7, 3, 10, 1};
    for (uint64_t n = 1;; n++) {
        xpool_kv_command_t out;
        kv_channel_reset_group(channel, &channel->groups[0], 0);
        sequence = 0;
        command(FLOOR);
        fake.fail_at = n;
        if (open_kv() != XP_OK) {
            assert_null(kv);
            assert_int_equal(fake_objects(), 0);
            assert_true(n < 100);
            continue;
        }
        for (uint32_t i = 0; i < sizeof(goals) / sizeof(goals[0]); i++) {
            command(goals[i]);
            xpool_status_t status;
            for (uint32_t tries = 0;
                 tries < 3 && (status = ask(&out), status != XPOOL_OK && status != XPOOL_RETRY);
                 tries++)
                assert_string_not_equal(xpool_error(), "");
            if (status == XPOOL_OK && out.order == XPOOL_KV_SHRINK)
                for (uint32_t tries = 0;
                     tries < 3 && xpool_kv_release_after(kv, out.tokens, NULL) != XPOOL_OK; tries++)
                    assert_string_not_equal(xpool_error(), "");
            const uint32_t mapped = info().mapped_tokens / BUNDLE_TOKENS;
            assert_int_equal(fake.mapped, mapped);
            memset(info().address, 5, mapped * BUNDLE_BYTES);
            uint64_t cell = kv_partition_completion(&channel->partitions[0]);
            assert_true(KV_CELL_SEQUENCE(cell) != sequence || KV_CELL_VALUE(cell) >= mapped);
        }
        const bool all = fake.fail_at != 0; /* no call was left to fail */
        fake.fail_at = 0;
        xpool_kv_close(kv);
        kv = NULL;
        assert_int_equal(fake_objects(), 0);
        if (all) {
            assert_true(n > 40);
            return;
        }
    }
}

static void another_size_is_refused(void **state)
{
    command(FLOOR);
    library_kv_place_t place = {
        .channel_fd = channel_fd, .daemon_bell = -1, .bell = -1, .name = "kv", .device = &device};
    assert_int_equal(library_kv_open(&place, 1100, &kv), XP_INVALID);
    assert_int_equal(library_kv_open(&place, 512, &kv), XP_INVALID);
    assert_non_null(strstr(xpool_error(), "512 bytes in the engine and 1024 in the plan"));
    assert_null(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(commands_become_memory, make, unmake),
        cmocka_unit_test_setup_teardown(memory_in_use_is_waited_for, make, unmake),
        cmocka_unit_test_setup_teardown(memory_that_is_not_cleared_ends_it, make, unmake),
        cmocka_unit_test_setup_teardown(capture_is_told_with_what_is_free, make, unmake),
        cmocka_unit_test_setup_teardown(every_failed_call_is_survived, make, unmake),
        cmocka_unit_test_setup_teardown(another_size_is_refused, make, unmake),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
