/* SPDX-License-Identifier: MIT */
/* Checks of a plan from a peer, the layout made from it, and joining with the wrong one. */
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

#include "base/memfd.h"
#include "fabric/fabric.h"
#include "fabric/internal.h"
#include "fabric/records.h"

static fabric_plan_t plan;

static fabric_plan_instance_t *make_plan(void)
{
    memset(&plan, 0, sizeof(plan));
    plan.magic = FABRIC_PLAN_MAGIC;
    plan.version = FABRIC_PLAN_VERSION;
    plan.bytes = sizeof(plan);
    plan.atn_count = 2;
    plan.ffn_count = 3;
    plan.lanes = 2;
    plan.submission_timeout_ns = 1;
    plan.instance_count = 3;
    plan.weights_count = 3;
    for (uint32_t i = 0; i < 3; i++) {
        fabric_plan_instance_t *instance = &plan.instances[i];
        snprintf(instance->id, sizeof(instance->id), "m%u", i);
        instance->weights = i;
        instance->hidden = 10 + i * 32;
        instance->layers = 3;
        instance->max_rows = 5;
        instance->dtype = XP_DTYPE_F32;
        instance->atn_tp = instance->atn_dp = 1;
        instance->delivery = FABRIC_DELIVERY_SINGLE_COMPLETE;
        instance->layer_group[0] = 1;
        instance->layer_group[1] = 6;
        instance->layer_group[2] = 7;
    }
    plan.instances[1].atn_dp = 2;
    plan.instances[1].rank_atn[1] = 1;
    return &plan.instances[1];
}

#define REFUSED(change)                                                                            \
    do {                                                                                           \
        fabric_plan_instance_t *instance = make_plan();                                            \
        (void)instance;                                                                            \
        change;                                                                                    \
        assert_int_equal(fabric_plan_check(&plan, sizeof(plan)), XP_INVALID);                      \
    } while (0)

static void test_check(void **state)
{
    make_plan();
    assert_int_equal(fabric_plan_check(&plan, sizeof(plan)), XP_OK);
    assert_int_equal(fabric_plan_check(&plan, sizeof(plan) - 1), XP_INVALID);
    assert_int_equal(fabric_plan_check(NULL, sizeof(plan)), XP_INVALID);
    REFUSED(plan.magic = 0);
    REFUSED(plan.version++);
    REFUSED(plan.bytes--);
    REFUSED(plan.atn_count = 0);
    REFUSED(plan.atn_count = FABRIC_MAX_ATN + 1);
    REFUSED(plan.ffn_count = 0);
    REFUSED(plan.ffn_count = FABRIC_MAX_FFN + 1);
    REFUSED(plan.ffn_count = 2); /* groups name a third */
    REFUSED(plan.lanes = 0);
    REFUSED(plan.lanes = FABRIC_MAX_LANES + 1);
    REFUSED(plan.policy = 3);
    REFUSED(plan.submission_timeout_ns = 0);
    REFUSED(plan.spin_ns = UINT32_MAX);
    REFUSED(plan.instance_count = FABRIC_MAX_INSTANCES + 1);
    REFUSED(plan.weights_count = FABRIC_MAX_INSTANCES + 1);
    REFUSED(plan.weights_count = 1);
    REFUSED(instance->id[0] = 0);
    REFUSED(memset(instance->id, 'x', sizeof(instance->id)));
    REFUSED(instance->hidden = 0);
    REFUSED(instance->hidden = UINT32_MAX);
    REFUSED(instance->layers = 0);
    REFUSED(instance->layers = MODEL_MAX_LAYERS + 1);
    REFUSED(instance->layers = 4); /* the fourth has no group */
    REFUSED(instance->max_rows = 0);
    REFUSED(instance->max_rows = FABRIC_MAX_ROWS);
    REFUSED(instance->dtype = XP_DTYPE_BF16);
    REFUSED(instance->atn_tp = 0);
    REFUSED(instance->atn_dp = 0);
    REFUSED(instance->atn_tp = 5);
    REFUSED((instance->atn_tp = 65536, instance->atn_dp = 65536));
    REFUSED(instance->rank_atn[1] = 2);
    REFUSED(instance->delivery = 3);
    REFUSED((instance->atn_tp = 2, instance->delivery = FABRIC_DELIVERY_SINGLE_COMPLETE));
    REFUSED(instance->form = 3);
    REFUSED(instance->form = FABRIC_FORM_EAGER);
    REFUSED(instance->layer_group[1] = 0);
    REFUSED(instance->layer_group[1] = 8);
}

typedef struct range {
    uint64_t begin, end;
} range_t;

static int compare_ranges(const void *a, const void *b)
{
    const range_t *left = a, *right = b;
    return left->begin < right->begin ? -1 : left->begin > right->begin;
}

/* No two things in the arena overlap, all lie within it, on lines of their own. */
static void test_layout(void **state)
{
    static range_t ranges[256];
    uint32_t count = 0;
    fabric_layout_t layout;
    make_plan();
    fabric_layout_compute(&plan, &layout);
    ranges[count++] = (range_t){0, sizeof(fabric_header_t)};
    ranges[count++] = (range_t){layout.plan, layout.plan + sizeof(plan)};
    ranges[count++] = (range_t){layout.pes, layout.pes + 5 * sizeof(fabric_pe_record_t)};
    ranges[count++] =
        (range_t){layout.instances, layout.instances + 3 * sizeof(fabric_instance_record_t)};
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t rank = 0; rank < fabric_plan_ranks(&plan.instances[i]); rank++) {
            uint64_t slot = fabric_slot_offset(&layout, i, rank);
            ranges[count++] = (range_t){slot, slot + sizeof(fabric_slot_t)};
        }
        uint64_t bytes = 5 * plan.instances[i].hidden * sizeof(float);
        if (i != 1) { /* two ranks: long form, no slot areas */
            ranges[count++] = (range_t){layout.slot_input[i], layout.slot_input[i] + bytes};
            ranges[count++] = (range_t){layout.slot_output[i], layout.slot_output[i] + bytes};
        }
    }
    uint64_t rows = 2 * 5 * plan.instances[1].hidden * sizeof(float);
    uint64_t partial = rows; /* Instance 1 has the most rows x width */
    for (uint32_t lane = 0; lane < plan.lanes; lane++) {
        uint64_t at = fabric_lane_offset(&layout, lane);
        ranges[count++] = (range_t){at, at + sizeof(fabric_lane_t)};
        at = fabric_lane_input(&layout, lane);
        ranges[count++] = (range_t){at, at + rows};
        at = fabric_lane_output(&layout, lane);
        ranges[count++] = (range_t){at, at + rows};
        for (uint32_t member = 0; member < 3; member++) {
            at = fabric_lane_partial(&layout, lane, member);
            ranges[count++] = (range_t){at, at + partial};
        }
    }
    qsort(ranges, count, sizeof(ranges[0]), compare_ranges);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(ranges[i].begin % MAILBOX_LINE, 0);
        assert_true(ranges[i].end <= layout.bytes);
        assert_true(i == 0 || ranges[i - 1].end <= ranges[i].begin);
    }
    uint64_t bytes;
    assert_int_equal(fabric_shm_bytes(&plan, &bytes), XP_OK);
    assert_true(bytes >= layout.bytes);
}

/* One AtnAgent, groups of one, no long form: no Lane areas are taken. */
static void test_layout_is_lean(void **state)
{
    fabric_layout_t layout;
    make_plan();
    plan.instances[1].atn_dp = 1;
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t layer = 0; layer < 3; layer++)
            plan.instances[i].layer_group[layer] = 1u << layer;
    fabric_layout_compute(&plan, &layout);
    assert_int_equal(layout.lane_rows_bytes, 0);
    assert_int_equal(layout.lane_partial_bytes, 0);
}

static void test_join(void **state)
{
    fabric_descriptors_t made, swapped;
    fabric_t *fabric;
    make_plan();
    assert_int_equal(fabric_shm_make(&plan, &made), XP_OK);
    struct stat info;
    uint64_t bytes;
    assert_int_equal(fabric_shm_bytes(&plan, &bytes), XP_OK);
    fstat(made.arena_fd, &info);
    uint64_t taken = (uint64_t)info.st_size;
    fstat(made.doorbell_fd, &info);
    assert_int_equal(taken + (uint64_t)info.st_size, bytes);

    assert_int_equal(fabric_attach("nvshmem", &plan, &made, 0, &fabric), XP_UNSUPPORTED);
    assert_int_equal(fabric_attach(NULL, &plan, &made, 0, &fabric), XP_UNSUPPORTED);
    assert_int_equal(fabric_attach("shm", &plan, &made, 5, &fabric), XP_INVALID);
    swapped = (fabric_descriptors_t){made.doorbell_fd, made.arena_fd};
    assert_int_equal(fabric_attach("shm", &plan, &swapped, 0, &fabric), XP_PEER);
    swapped = (fabric_descriptors_t){made.arena_fd, made.arena_fd};
    assert_int_equal(fabric_attach("shm", &plan, &swapped, 0, &fabric), XP_PEER);
    plan.seed++; /* another plan of the same size */
    assert_int_equal(fabric_attach("shm", &plan, &made, 0, &fabric), XP_PEER);
    plan.seed--;
    void *address;
    assert_int_equal(xp_memfd_map(made.arena_fd, FABRIC_PAGE, &address), XP_OK);
    fabric_header_t *header = address;
    header->abi++;
    assert_int_equal(fabric_attach("shm", &plan, &made, 0, &fabric), XP_PEER);
    header->abi--;
    header->bytes++;
    assert_int_equal(fabric_attach("shm", &plan, &made, 0, &fabric), XP_PEER);
    header->bytes--;
    xp_memfd_unmap(address);

    assert_int_equal(fabric_attach("shm", &plan, &made, 0, &fabric), XP_OK);
    fabric_atn_t *atn;
    fabric_ffn_t *ffn;
    assert_int_equal(fabric_ffn_create(fabric, xp_clock_system(), NULL, NULL, &ffn), XP_INVALID);
    assert_int_equal(fabric_atn_create(fabric, xp_clock_system(), &atn), XP_OK);
    assert_int_equal(fabric_atn_attach(atn, 1, 1, NULL), XP_NOT_FOUND); /* on the other AtnAgent */
    assert_int_equal(fabric_atn_attach(atn, 0, 0, NULL), XP_INVALID);
    assert_int_equal(fabric_atn_detach(atn, 9, 0), XP_NOT_FOUND);
    assert_int_equal(fabric_atn_detach(atn, 0, 0), XP_NOT_FOUND);
    fabric_atn_destroy(atn);
    fabric_detach(fabric);
    fabric_detach(NULL);
    fabric_atn_destroy(NULL);
    fabric_ffn_destroy(NULL);
    assert_int_equal(fabric_attach("shm", &plan, &made, 2, &fabric), XP_OK);
    assert_int_equal(fabric_atn_create(fabric, xp_clock_system(), &atn), XP_INVALID);
    fabric_detach(fabric);
    close(made.arena_fd);
    close(made.doorbell_fd);
}

/* Failures before the canonical one has claimed the word may use up the texts, but nothing else. */
static void test_failure_word(void **state)
{
    fabric_descriptors_t made;
    fabric_t *fabric;
    make_plan();
    assert_int_equal(fabric_shm_make(&plan, &made), XP_OK);
    assert_int_equal(fabric_attach("shm", &plan, &made, FABRIC_PE_OBSERVER, &fabric), XP_OK);
    fabric_header_t *header = fabric_local(fabric, 0);
    uint32_t pe = 0;
    assert_int_equal(fabric_failure(fabric, &pe), XP_OK);
    header->failure_taken = 1000; /* that many died between taking a text and claiming */
    assert_true(fabric_fail(fabric, 3, "a reason"));
    assert_int_equal(fabric_failure(fabric, &pe), XP_FATAL);
    assert_int_equal(pe, 3);
    assert_non_null(strstr(xp_error_last()->text, "too many failed at once"));
    header->failure = 0;
    header->failure_taken = 3;
    char long_text[400];
    memset(long_text, 'x', sizeof(long_text));
    long_text[sizeof(long_text) - 1] = 0;
    assert_true(fabric_fail(fabric, 1, long_text));
    assert_false(fabric_fail(fabric, 2, "a later one"));
    assert_int_equal(fabric_failure(fabric, &pe), XP_FATAL);
    assert_int_equal(pe, 1);
    assert_int_equal(strlen(xp_error_last()->text), FABRIC_FAILURE_TEXT - 1);
    header->failure = 0;
    assert_true(fabric_fail(fabric, FABRIC_PE_OBSERVER, NULL));
    assert_int_equal(fabric_failure(fabric, &pe), XP_FATAL);
    assert_int_equal(pe, FABRIC_PE_OBSERVER);
    fabric_pe_counters_t counters;
    fabric_counters(fabric, 99, &counters);
    assert_int_equal(counters.invocations, 0);
    uint64_t invocations = 1, rows = 1;
    fabric_instance_counters(fabric, 99, &invocations, &rows);
    assert_int_equal(invocations + rows, 0);
    fabric_detach(fabric);
    close(made.arena_fd);
    close(made.doorbell_fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check),          cmocka_unit_test(test_layout),
        cmocka_unit_test(test_layout_is_lean), cmocka_unit_test(test_join),
        cmocka_unit_test(test_failure_word),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
