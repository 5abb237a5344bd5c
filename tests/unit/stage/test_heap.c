/* SPDX-License-Identifier: MIT */
/*
 * What the symmetric heap is without a device: where things lie in it, where library and plug-in
 * are looked for, what is swept up after killed processes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stage/control.h"
#include "stage/heap.h"

#define HIDDEN 16
#define LAYERS 4

static fabric_plan_t plan;

static void plan_make(uint32_t delivery, uint32_t dp)
{
    memset(&plan, 0, sizeof(plan));
    plan.atn_count = 2;
    plan.ffn_count = 2;
    plan.provider = FABRIC_PROVIDER_NVSHMEM;
    plan.instance_count = 1;
    fabric_plan_instance_t *instance = &plan.instances[0];
    instance->hidden = HIDDEN;
    instance->layers = LAYERS;
    instance->max_rows = 100;
    instance->dtype = XP_DTYPE_BF16;
    instance->atn_tp = 1;
    instance->atn_dp = dp;
    instance->delivery = delivery;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        instance->layer_group[layer] = 3;
}

static void ok(xp_status_t status)
{
    if (status != XP_OK)
        fail_msg("%s", xp_error_last()->text);
}
static void says(const char *text)
{
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" does not say \"%s\"", xp_error_last()->text, text);
}

/* What lies in the heap: whole, apart, and the same for whoever asks. */
static void test_heap_layout(void **state)
{
    static const uint32_t providers[] = {FABRIC_PROVIDER_NVSHMEM, FABRIC_PROVIDER_NVSHMEM_FAR};
    for (int far = 0; far < 2; far++) {
        plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 2);
        plan.provider = providers[far];
        plan.instances[0].rank_atn[1] = 1;
        plan.instances[1] = plan.instances[2] = plan.instances[0];
        plan.instance_count = 3;
        plan.instances[1].delivery = FABRIC_DELIVERY_DIRECT_PARTIAL;
        plan.instances[1].hidden = 1000;
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            plan.instances[2].layer_group[layer] = layer % 2 ? 2 : 1;
        const uint64_t total = stage_heap_bytes(&plan);
        assert_int_equal(total % STAGE_GRANULARITY_BYTES, 0);
        stage_bytes_t bytes;
        stage_ffn_bytes(&plan, 0, &bytes);
        assert_true(bytes.stages == total + STAGE_HEAP_OWN_BYTES);
        for (uint32_t pe = 0; pe < 4; pe++) {
            static unsigned char taken[8 << 20];
            assert_true(total <= sizeof(taken));
            memset(taken, 0, sizeof(taken));
            uint32_t things = 0;
            for (uint32_t i = 0; i < 3; i++)
                for (uint32_t kind = 0; kind <= STAGE_HEAP_MIRROR; kind++)
                    for (uint32_t owner = 0; owner < 3; owner++)
                        for (uint32_t further = 0; further < 3; further++) {
                            const fabric_plan_instance_t *one = &plan.instances[i];
                            uint64_t at = stage_heap_offset(&plan, kind, i, owner, further);
                            if (at == STAGE_HEAP_NOWHERE ||
                                (kind == STAGE_HEAP_RELAY ? one->rank_atn[owner] != pe
                                                          : owner + 2 != pe))
                                continue;
                            transport_geometry_t geometry = stage_geometry(one);
                            uint64_t size =
                                kind == STAGE_HEAP_PAGE       ? stage_page_bytes(one)
                                : kind == STAGE_HEAP_PARTIALS ? stage_partials_bytes(one, owner)
                                : kind == STAGE_HEAP_MIRROR   ? stage_partials_bytes(one, further)
                                                            : transport_cuda_plain_bytes(&geometry);
                            assert_true(size && at % 4096 == 0 && at + size <= total);
                            for (uint64_t byte = at; byte < at + size; byte++)
                                assert_int_equal(taken[byte]++, 0);
                            things++;
                        }
            /* Three relay arenas; three stages, and partials of the first member, or its mirror,
             * and two outboxes of each Instance. */
            assert_int_equal(things, pe < 2 ? 3 : !far ? (pe == 2 ? 4 : 3) : 3 + 1 + 6);
        }
        assert_true(stage_heap_offset(&plan, STAGE_HEAP_PAGE, 3, 0, 0) == STAGE_HEAP_NOWHERE);
        assert_true(stage_heap_offset(&plan, STAGE_HEAP_PAGE, 0, 2, 0) == STAGE_HEAP_NOWHERE);
        assert_true(stage_heap_offset(&plan, STAGE_HEAP_RELAY, 0, 2, 0) == STAGE_HEAP_NOWHERE);
        assert_true(stage_heap_offset(&plan, STAGE_HEAP_PARTIALS, 1, 0, 0) == STAGE_HEAP_NOWHERE);
        assert_true(stage_heap_offset(&plan, STAGE_HEAP_PARTIALS, 2, 0, 0) == STAGE_HEAP_NOWHERE);
    }
}

static void test_heap_is_found(void **state)
{
    stage_heap_place_t place;
    stage_heap_t *heap;
    char folder[] = "/tmp/xpool-heap-XXXXXX", path_of[PATH_MAX], python[PATH_MAX];
    const char *pythons[] = {python};
    assert_non_null(mkdtemp(folder));
    unsetenv("VIRTUAL_ENV");
    unsetenv(STAGE_HEAP_ROOT_VARIABLE);
    unsetenv(STAGE_HEAP_PLUGIN_VARIABLE);
    assert_int_equal(stage_heap_find("/nonexistent", NULL, 0, &place), XP_UNSUPPORTED);
    says(
        "no lib/libnvshmem_host.so.3 in /nonexistent (fabric.nvshmem_root, or XPOOL_NVSHMEM_ROOT)");
    snprintf(python, sizeof(python), "%s/bin/python", folder);
    static const char *const parts[] = {"lib",
                                        "lib/python3.11",
                                        "lib/python3.11/site-packages",
                                        "lib/python3.11/site-packages/nvidia",
                                        "lib/python3.11/site-packages/nvidia/nvshmem",
                                        "lib/python3.11/site-packages/nvidia/nvshmem/lib"};
    for (int i = 0; i < 6; i++) {
        snprintf(path_of, sizeof(path_of), "%s/%s", folder, parts[i]);
        assert_int_equal(mkdir(path_of, 0700), 0);
    }
    snprintf(path_of, sizeof(path_of), "%s/%s/libnvshmem_host.so.3", folder, parts[5]);
    fclose(fopen(path_of, "w"));
    setenv(STAGE_HEAP_PLUGIN_VARIABLE, "/nonexistent.so", 1);
    assert_int_equal(stage_heap_find("", pythons, 1, &place), XP_UNSUPPORTED);
    says("no plug-in /nonexistent.so");
    setenv(STAGE_HEAP_PLUGIN_VARIABLE, "/proc/self/exe", 1);
    ok(stage_heap_find("", pythons, 1, &place));
    assert_string_equal(place.host, path_of);
    assert_string_equal(place.plugin, "/proc/self/exe");
    /* Neither of them is what its name says. */
    plan_make(FABRIC_DELIVERY_SINGLE_COMPLETE, 1);
    assert_int_equal(stage_heap_open(&place, &plan, &heap), XP_UNSUPPORTED);
    says("cannot load NVSHMEM");
    assert_string_equal(getenv("NVSHMEM_DISABLE_NVLS"), "1");
    assert_string_equal(getenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"), "lo");
    unlink(path_of);
    for (int i = 5; i >= 0; i--) {
        snprintf(path_of, sizeof(path_of), "%s/%s", folder, parts[i]);
        assert_int_equal(rmdir(path_of), 0);
    }
    assert_int_equal(rmdir(folder), 0);
    unsetenv(STAGE_HEAP_PLUGIN_VARIABLE);
}

static void test_heap_sweep(void **state)
{
    static const char *const names[] = {"/tmp/nvshmem-socket-2000000001-5",
                                        "/tmp/nvshmem-socket-5-2000000001",
                                        "/tmp/nvshmem-socket-2000000002-5"};
    for (int i = 0; i < 3; i++)
        fclose(fopen(names[i], "w"));
    stage_heap_sweep(2000000001);
    assert_int_not_equal(access(names[0], F_OK), 0);
    assert_int_not_equal(access(names[1], F_OK), 0);
    assert_int_equal(access(names[2], F_OK), 0);
    assert_int_equal(unlink(names[2]), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heap_layout),
        cmocka_unit_test(test_heap_is_found),
        cmocka_unit_test(test_heap_sweep),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
