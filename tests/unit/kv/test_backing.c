/* SPDX-License-Identifier: MIT */
/*
 * Both kinds of backing: memory really comes and goes (smaps, the fake driver's objects), the range
 * never moves, nothing old is ever seen, and every call that fails leaves things as they were.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../cuda/fake_driver.h"
#include "cuda/device.h"
#include "kv/backing.h"

#define MIB (1u << 20)

/* Kilobytes that smaps counts as resident in mappings whose line holds `name`. */
static uint64_t resident_bytes(const char *name)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    bool ours = false;
    uint64_t sum = 0, kilobytes;
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        unsigned long long from, to;
        if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
            ours = strstr(line, name) != NULL;
        else if (ours && sscanf(line, "Rss: %lu", &kilobytes) == 1)
            sum += kilobytes * 1024;
    }
    fclose(file);
    return sum;
}

static uint64_t file_bytes(const kv_backing_t *backing)
{
    struct stat info;
    assert_int_equal(fstat(kv_backing_fd(backing), &info), 0);
    return (uint64_t)info.st_blocks * 512;
}

static bool all_are(const kv_backing_t *backing, uint64_t from, uint64_t to, unsigned char value)
{
    const unsigned char *at = (const unsigned char *)(uintptr_t)kv_backing_address(backing);
    for (uint64_t i = from; i < to; i++)
        if (at[i] != value)
            return false;
    return true;
}

static kv_backing_t *make(uint64_t bundle_bytes, uint32_t ceiling)
{
    kv_backing_options_t options = {
        .name = "xpool-kv:test", .bundle_bytes = bundle_bytes, .ceiling_bundles = ceiling};
    kv_backing_t *backing;
    assert_int_equal(kv_backing_create_memfd(&options, &backing), XP_OK);
    return backing;
}

static void memory_follows_the_size(void **state)
{
    (void)state;
    kv_backing_t *backing = make(MIB, 64);
    void *base = (void *)(uintptr_t)kv_backing_address(backing);
    assert_int_equal(resident_bytes("xpool-kv:test"), 0);
    const uint32_t sizes[] = {1, 40, 17, 64, 0, 3};
    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        assert_int_equal(kv_backing_resize(backing, sizes[i]), XP_OK);
        assert_int_equal(kv_backing_mapped(backing), sizes[i]);
        /* Taken by the grant, not by the first touch. */
        assert_int_equal(file_bytes(backing), sizes[i] * (uint64_t)MIB);
        memset(base, 0x5a, sizes[i] * (size_t)MIB);
        assert_int_equal(file_bytes(backing), sizes[i] * (uint64_t)MIB);
        assert_int_equal(resident_bytes("xpool-kv:test"), sizes[i] * (uint64_t)MIB);
    }
    assert_int_equal(kv_backing_resize(backing, 65), XP_INVALID);
    assert_int_equal(kv_backing_mapped(backing), 3);
    assert_int_equal(kv_backing_resident_bytes(backing), 3u * MIB);
    assert_ptr_equal(base, (void *)(uintptr_t)kv_backing_address(backing));
    kv_backing_destroy(backing);
    assert_int_equal(resident_bytes("xpool-kv:test"), 0);
}

static void nothing_old_is_seen(void **state)
{
    (void)state;
    /* A bundle that is no whole number of the system's pages: its neighbour shares one. */
    const uint64_t bundle = 10000;
    kv_backing_t *backing = make(bundle, 9);
    unsigned char *base = (unsigned char *)(uintptr_t)kv_backing_address(backing);
    assert_int_equal(kv_backing_resize(backing, 9), XP_OK);
    assert_true(all_are(backing, 0, 9 * bundle, 0));
    memset(base, 0xee, 9 * bundle);
    assert_int_equal(kv_backing_resize(backing, 4), XP_OK);
    assert_true(all_are(backing, 0, 4 * bundle, 0xee)); /* what stays is untouched */
    assert_true(all_are(backing, 4 * bundle, 9 * bundle, 0));
    assert_int_equal(kv_backing_resize(backing, 7), XP_OK);
    assert_true(all_are(backing, 4 * bundle, 9 * bundle, 0));
    kv_backing_destroy(backing);
}

static void reading_ahead_costs_nothing(void **state)
{
    (void)state;
    kv_backing_options_t options = {
        .name = "xpool-kv:ahead", .bundle_bytes = MIB, .ceiling_bundles = 4, .behind_bytes = 6000};
    kv_backing_t *backing;
    assert_int_equal(kv_backing_create_memfd(&options, &backing), XP_OK);
    assert_int_equal(kv_backing_resize(backing, 2), XP_OK);
    assert_true(all_are(backing, 0, 4 * MIB + 6000, 0));
    assert_int_equal(resident_bytes("xpool-kv:ahead"), 2 * MIB);
    assert_int_equal(file_bytes(backing), 2 * MIB); /* no more than it has */
    kv_backing_destroy(backing);
}

static uint64_t room_left(void *context)
{
    return *(uint64_t *)context;
}

static void shortage_is_an_error_before_it_is_a_fault(void **state)
{
    (void)state;
    uint64_t room = 70u * MIB;
    kv_backing_options_t options = {.name = "xpool-kv:short",
                                    .bundle_bytes = MIB,
                                    .ceiling_bundles = 64,
                                    .room_bytes = room_left,
                                    .room_context = &room};
    kv_backing_t *backing;
    assert_int_equal(kv_backing_create_memfd(&options, &backing), XP_OK);
    assert_int_equal(kv_backing_resize(backing, 5), XP_OK);
    assert_int_equal(kv_backing_resize(backing, 12), XP_NO_MEMORY);
    assert_non_null(strstr(xp_error_last()->text, "devices.<name>.memory"));
    assert_int_equal(kv_backing_mapped(backing), 5);
    assert_int_equal(file_bytes(backing), 5u * MIB);
    room = 0; /* giving back asks nobody */
    assert_int_equal(kv_backing_resize(backing, 1), XP_OK);
    assert_int_equal(file_bytes(backing), MIB);
    kv_backing_destroy(backing);
}

static void sizes_are_checked(void **state)
{
    (void)state;
    kv_backing_t *backing;
    kv_backing_options_t options = {.name = "xpool-kv:bad", .ceiling_bundles = 1};
    assert_int_equal(kv_backing_create_memfd(&options, &backing), XP_INVALID);
    options = (kv_backing_options_t){
        .name = "xpool-kv:bad", .bundle_bytes = 1ull << 60, .ceiling_bundles = 1u << 20};
    assert_int_equal(kv_backing_create_memfd(&options, &backing), XP_INVALID);
    options.bundle_bytes = 4096;
    options.ceiling_bundles = 0;
    assert_int_equal(kv_backing_create_memfd(&options, &backing), XP_INVALID);
    kv_backing_destroy(NULL);
}

/* ---- device ---------------------------------------------------------------------------------- */

#define UNIT (2 * (uint64_t)FAKE_GRANULARITY)

static cuda_device_t device;

/* What src/kv/clear.cu does. */
static void clear_run(const fake_launch_t *launch)
{
    uint64_t address, count;
    memcpy(&address, launch->values[0], sizeof(address));
    memcpy(&count, launch->values[1], sizeof(count));
    assert_true(launch->blocks > 0 && launch->threads <= 1024);
    memset((void *)(uintptr_t)address, 0, count * 16);
}
static const fake_kernel_t kernels[] = {{"kv_clear", clear_run, {8, 8}}};

static int device_open(void **state)
{
    (void)state;
    fake_reset(kernels, 1);
    return cuda_device_open(&fake_driver, 0, &device) == XP_OK ? 0 : -1;
}

static int device_close(void **state)
{
    (void)state;
    cuda_device_close(&device);
    return fake.contexts == 0 && fake_objects() == 0 ? 0 : -1;
}

static xp_status_t make_cuda(uint32_t ceiling, uint32_t ready, kv_backing_t **backing_out)
{
    kv_backing_options_t options = {
        .name = "kv", .bundle_bytes = UNIT, .ceiling_bundles = ceiling, .ready_bundles = ready};
    return kv_backing_create_cuda(&options, &device, backing_out);
}

static void device_memory_follows_the_size(void **state)
{
    (void)state;
    kv_backing_t *backing;
    assert_int_equal(make_cuda(12, 2, &backing), XP_OK);
    unsigned char *base = (unsigned char *)(uintptr_t)kv_backing_address(backing);
    const uint32_t sizes[] = {1, 9, 4, 12, 0, 3};
    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        const uint32_t before = kv_backing_mapped(backing);
        assert_int_equal(kv_backing_resize(backing, sizes[i]), XP_OK);
        assert_int_equal(fake.mapped, sizes[i]);
        assert_true(fake.handles >= (int)sizes[i] && fake.handles <= (int)sizes[i] + 2);
        assert_int_equal(kv_backing_resident_bytes(backing), (uint64_t)fake.handles * UNIT);
        if (sizes[i] > before)
            assert_true(all_are(backing, before * UNIT, sizes[i] * UNIT, 0));
        if (before < sizes[i])
            memset(base, 0x77, sizes[i] * UNIT);
        else
            assert_true(all_are(backing, 0, sizes[i] * UNIT, 0x77));
    }
    kv_backing_trim(backing);
    assert_int_equal(fake.handles, 3);
    kv_backing_destroy(backing);
}

static void ready_handles_save_creations(void **state)
{
    (void)state;
    kv_backing_t *backing;
    assert_int_equal(make_cuda(8, 3, &backing), XP_OK);
    assert_true(kv_backing_prepare(backing));
    assert_true(kv_backing_prepare(backing));
    assert_false(kv_backing_prepare(backing)); /* full with this one */
    assert_int_equal(fake.handles, 3);
    assert_int_equal(kv_backing_resident_bytes(backing), 3 * UNIT);
    fake.fail_name = "cuMemCreate"; /* a grant of three creates nothing */
    assert_int_equal(kv_backing_resize(backing, 3), XP_OK);
    assert_string_equal(fake.fail_name, "cuMemCreate");
    assert_int_equal(fake.handles, 3);
    assert_int_equal(kv_backing_resize(backing, 4), XP_NO_MEMORY);
    assert_int_equal(kv_backing_mapped(backing), 3);
    fake.fail_name = NULL;
    assert_int_equal(kv_backing_resize(backing, 8), XP_OK);
    assert_false(kv_backing_prepare(backing)); /* nothing above the ceiling is ever needed */
    kv_backing_destroy(backing);
}

/* Creation and a history of sizes, every call into the driver failed in turn. */
static void every_failed_call_leaves_a_prefix(kv_clearing_t way)
{
    const uint32_t sizes[] = {2, 20, 3, 24};
    kv_backing_clearing(way);
    for (uint64_t n = 1;; n++) {
        const int contexts = fake.contexts;
        fake.fail_at = n;
        kv_backing_t *backing = NULL;
        xp_status_t status = make_cuda(24, 1, &backing);
        if (status != XP_OK)
            assert_null(backing);
        for (uint32_t i = 0; backing && i < sizeof(sizes) / sizeof(*sizes); i++) {
            const uint32_t before = kv_backing_mapped(backing);
            unsigned char *base = (unsigned char *)(uintptr_t)kv_backing_address(backing);
            status = kv_backing_resize(backing, sizes[i]);
            if (status != XP_OK) {
                assert_true(status == XP_NO_MEMORY || status == XP_IO);
                assert_string_not_equal(xp_error_last()->text, "");
                assert_true(sizes[i] > before ? kv_backing_mapped(backing) == before
                                              : kv_backing_mapped(backing) >= sizes[i]);
                assert_int_equal(fake.mapped, kv_backing_mapped(backing));
                assert_int_equal(kv_backing_resize(backing, sizes[i]), XP_OK);
            }
            assert_int_equal(fake.mapped, sizes[i]);
            if (sizes[i] > before)
                assert_true(all_are(backing, before * UNIT, sizes[i] * UNIT, 0));
            memset(base, 0x31, sizes[i] * UNIT); /* all of it is accessible */
        }
        kv_backing_destroy(backing);
        assert_int_equal(fake_objects(), 0);
        assert_int_equal(fake.contexts, contexts);
        if (fake.fail_at != 0) {
            fake.fail_at = 0;
            assert_true(n > 20);
            return;
        }
    }
}

/* In one piece; in pieces of eight bundles; by the driver's memset, a piece at once or two. */
static void whole_grants_that_fail(void **state)
{
    (void)state;
    every_failed_call_leaves_a_prefix((kv_clearing_t){.blocks = 16, .piece_mib = 256});
}
static void grants_in_pieces_that_fail(void **state)
{
    (void)state;
    every_failed_call_leaves_a_prefix((kv_clearing_t){.blocks = 8, .piece_mib = 1});
}
static void grants_by_memset_that_fail(void **state)
{
    (void)state;
    every_failed_call_leaves_a_prefix((kv_clearing_t){.memset_mib = 1});
    every_failed_call_leaves_a_prefix((kv_clearing_t){.piece_mib = 1});
}

/* What a faulting kernel leaves behind is no shortage, which would be asked again for ever. */
static void a_lost_device_is_no_shortage(void **state)
{
    (void)state;
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess",
                                        "cuLaunchKernel", "cuStreamQuery"};
    kv_backing_clearing((kv_clearing_t){.blocks = 16, .piece_mib = 256});
    for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
        kv_backing_t *backing;
        assert_int_equal(make_cuda(8, 0, &backing), XP_OK);
        fake.fail_name = calls[i];
        fake.fail_result = CUDA_RESULT_ILLEGAL_ADDRESS;
        assert_int_equal(kv_backing_resize(backing, 4), XP_FATAL);
        assert_string_equal(fake.failed, calls[i]);
        assert_int_equal(kv_backing_mapped(backing), 0);
        fake.fail_name = NULL;
        fake.fail_result = 0;
        kv_backing_destroy(backing);
        assert_int_equal(fake_objects(), 0);
    }
}

static void device_sizes_are_checked(void **state)
{
    (void)state;
    kv_backing_t *backing;
    kv_backing_options_t options = {
        .name = "kv", .bundle_bytes = FAKE_GRANULARITY + 4096, .ceiling_bundles = 2};
    assert_int_equal(kv_backing_create_cuda(&options, &device, &backing), XP_INVALID);
    assert_non_null(strstr(xp_error_last()->text, "multiple of 65536"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_follows_the_size),
        cmocka_unit_test(nothing_old_is_seen),
        cmocka_unit_test(reading_ahead_costs_nothing),
        cmocka_unit_test(shortage_is_an_error_before_it_is_a_fault),
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test_setup_teardown(device_memory_follows_the_size, device_open, device_close),
        cmocka_unit_test_setup_teardown(ready_handles_save_creations, device_open, device_close),
        cmocka_unit_test_setup_teardown(whole_grants_that_fail, device_open, device_close),
        cmocka_unit_test_setup_teardown(grants_in_pieces_that_fail, device_open, device_close),
        cmocka_unit_test_setup_teardown(grants_by_memset_that_fail, device_open, device_close),
        cmocka_unit_test_setup_teardown(a_lost_device_is_no_shortage, device_open, device_close),
        cmocka_unit_test_setup_teardown(device_sizes_are_checked, device_open, device_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
