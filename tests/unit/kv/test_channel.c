/* SPDX-License-Identifier: MIT */
/* The KV control channel: making, checking what a peer passes, cells, seqlock, geometry. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memfd.h"
#include "kv/channel.h"

static const uint64_t pools[2] = {1 << 20, 1 << 20};

static kv_group_plan_t plan(void)
{
    return (kv_group_plan_t){.partition_count = 2,
                             .pools = {0, 1},
                             .bundle_bytes = 16 * 100,
                             .token_bytes = 100,
                             .bundle_tokens = 16,
                             .page_tokens = 16,
                             .floor_bundles = 1,
                             .ceiling_bundles = 10,
                             .reserved_bundles = 10,
                             .elastic = true};
}

static void what_the_daemon_makes_a_rank_maps(void **state)
{
    kv_group_plan_t groups[2] = {plan(), plan()};
    kv_channel_t *channel, *mapped;
    int fd;
    groups[1].instance = 1;
    assert_int_equal(kv_channel_create(7, pools, 2, groups, 2, &fd, &channel), XP_OK);
    assert_int_equal(channel->partition_count, 4);
    assert_int_equal(channel->groups[1].first_partition, 2);
    assert_int_equal(channel->partitions[3].pool, 1);
    assert_int_equal(channel->partitions[3].group, 1);
    assert_int_equal(kv_channel_map(fd, 3, &mapped), XP_OK);
    kv_group_command_publish(&channel->groups[1], 5, 9, true);
    kv_command_t command = kv_group_command(&mapped->groups[1]);
    assert_true(command.sequence == 5 && command.bundles == 9 && command.trim);
    kv_partition_complete(&mapped->partitions[3], 5, 8);
    assert_true(kv_partition_completion(&channel->partitions[3]) == KV_CELL(5, 8));
    assert_int_equal(kv_channel_map(fd, 4, &mapped), XP_PEER);
    kv_channel_unmap(mapped);
    kv_channel_unmap(channel);
    close(fd);
}

static void a_plan_without_sense_is_refused(void **state)
{
    kv_channel_t *channel;
    int fd;
    kv_group_plan_t group;
    for (int mistake = 0; mistake < 8; mistake++) {
        group = plan();
        switch (mistake) {
        case 0:
            group.partition_count = 0;
            break;
        case 1:
            group.pools[1] = 2;
            break;
        case 2:
            group.bundle_bytes++;
            break;
        case 3:
            group.floor_bundles = 0;
            break;
        case 4:
            group.floor_bundles = 11;
            break;
        case 5:
            group.ceiling_bundles = 11;
            break;
        case 6:
            group.page_tokens = 5;
            break;
        default:
            group.partition_count = KV_MAX_RANKS + 1;
            break;
        }
        assert_int_equal(kv_channel_create(1, pools, 2, &group, 1, &fd, &channel), XP_INVALID);
    }
    kv_group_plan_t many[KV_MAX_GROUPS];
    for (uint32_t g = 0; g < KV_MAX_GROUPS; g++)
        many[g] = plan(); /* two ranks each: more than the partitions */
    assert_int_equal(kv_channel_create(1, pools, 2, many, KV_MAX_GROUPS, &fd, &channel),
                     XP_INVALID);
}

static void what_a_rank_is_passed_is_checked(void **state)
{
    kv_channel_t *channel, *mapped;
    int fd, small;
    kv_group_plan_t group = plan();
    assert_int_equal(kv_channel_create(1, pools, 2, &group, 1, &fd, &channel), XP_OK);
    assert_int_equal(xp_memfd_create("small", 64, &small), XP_OK);
    assert_int_equal(kv_channel_map(small, 0, &mapped), XP_PEER);
    close(small);
    channel->abi++;
    assert_int_equal(kv_channel_map(fd, 0, &mapped), XP_PEER);
    channel->abi--;
    channel->groups[0].bundle_tokens = 0;
    assert_int_equal(kv_channel_map(fd, 0, &mapped), XP_PEER);
    channel->groups[0].bundle_tokens = 16;
    channel->partitions[0].group = 1;
    assert_int_equal(kv_channel_map(fd, 0, &mapped), XP_PEER);
    kv_channel_unmap(channel);
    close(fd);
}

/* ---- the report's seqlock ---------------------------------------------------------------------
 */

typedef struct writer {
    kv_group_entry_t *group;
    uint64_t rounds;
} writer_t;

static void *write_reports(void *context)
{
    writer_t *writer = context;
    for (uint64_t i = 1; i <= writer->rounds; i++) {
        kv_report_t report;
        uint64_t *words = (uint64_t *)&report;
        for (uint32_t w = 0; w < KV_REPORT_WORDS; w++)
            words[w] = i;
        kv_group_report_write(writer->group, &report);
    }
    return NULL;
}

static void a_report_is_read_whole(void **state)
{
    kv_channel_t *channel;
    int fd;
    kv_group_plan_t group = plan();
    assert_int_equal(kv_channel_create(1, pools, 2, &group, 1, &fd, &channel), XP_OK);
    writer_t writer = {.group = &channel->groups[0], .rounds = 200000};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, write_reports, &writer), 0);
    uint64_t last = 0;
    while (last < writer.rounds) {
        kv_report_t report;
        if (!kv_group_report_read(&channel->groups[0], &report))
            continue;
        const uint64_t *words = (const uint64_t *)&report;
        for (uint32_t w = 1; w < KV_REPORT_WORDS; w++)
            assert_true(words[w] == words[0]);
        assert_true(words[0] >= last);
        last = words[0];
    }
    pthread_join(thread, NULL);
    /* A leader that died in the middle: no report, and the next Instance begins anew. */
    channel->groups[0].report_sequence |= 1;
    kv_report_t report;
    assert_false(kv_group_report_read(&channel->groups[0], &report));
    kv_channel_reset_group(channel, &channel->groups[0], 0);
    assert_true(kv_group_report_read(&channel->groups[0], &report));
    assert_int_equal(report.live_bundles, 0);
    kv_channel_unmap(channel);
    close(fd);
}

static void bells_never_block(void **state)
{
    int bell;
    assert_int_equal(kv_bell_create(&bell), XP_OK);
    kv_bell_clear(bell);
    for (int i = 0; i < 3; i++)
        kv_bell_ring(bell);
    uint64_t count;
    assert_int_equal(read(bell, &count, sizeof(count)), sizeof(count));
    assert_int_equal(count, 3);
    kv_bell_clear(bell);
    close(bell);
}

static void bundles_are_whole_pages_and_granules(void **state)
{
    const uint64_t tokens[] = {64, 100, 512, 1000, 1152 * 61, 12288, 98304, 262144};
    for (size_t t = 0; t < sizeof(tokens) / sizeof(tokens[0]); t++) {
        uint32_t bundle = kv_bundle_tokens(tokens[t], 16, 1 << 20, 4096);
        uint64_t bytes = bundle * tokens[t];
        assert_true(bundle >= 16 && bundle % 16 == 0 && bytes % 4096 == 0);
        assert_true(bytes <= 1 << 20 || bundle / 16 <= 4096);
        assert_true(bytes >= 1 << 19 || tokens[t] * 16 > 1 << 19);
    }
    assert_int_equal(kv_bundle_tokens(262144, 16, 1 << 20, 4096), 16);
    assert_int_equal(kv_bundle_tokens(512, 16, 1 << 20, 4096), 2048);
    assert_int_equal(kv_bundle_tokens(100, 16, 0, 4096), 1024);
}

/* On a GPU a token may have padding, so that bundles of whole tokens are no larger than handles
 * should be: Qwen3-30B-A3B and Qwen3-14B need none, DeepSeek-V2-Lite and GLM-4.7-Flash a little. */
static void strides_of_tokens_leave_small_bundles(void **state)
{
    const uint64_t granule = 2u << 20;
    const uint64_t tokens[] = {98304, 163840, 31104, 54144, 576 * 2, 2, 999};
    for (size_t t = 0; t < sizeof(tokens) / sizeof(tokens[0]); t++) {
        uint64_t stride = kv_token_stride(tokens[t], granule);
        assert_true(stride >= tokens[t] && stride % (tokens[t] & -tokens[t]) == 0);
        assert_true(tokens[t] < 1000 || (stride - tokens[t]) * 40 < tokens[t]);
        assert_int_equal(kv_token_stride(stride, granule), stride);
        uint64_t bytes = stride * kv_bundle_tokens(stride, 16, 32u << 20, granule);
        assert_true(bytes % granule == 0 && bytes <= 64u << 20);
    }
    assert_int_equal(kv_token_stride(98304, granule), 98304);
    assert_int_equal(kv_token_stride(163840, granule), 163840);
    assert_int_equal(kv_token_stride(31104, granule), 31744);
    assert_int_equal(kv_token_stride(54144, granule), 55296);
    /* Any other: a sixteenth at most. */
    for (uint64_t token = 2; token < 1u << 20; token += 62) {
        uint64_t stride = kv_token_stride(token, granule);
        assert_true(stride >= token && (stride - token) * 16 < token);
        assert_true(stride * kv_bundle_tokens(stride, 16, 32u << 20, granule) <= 64u << 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_the_daemon_makes_a_rank_maps),
        cmocka_unit_test(a_plan_without_sense_is_refused),
        cmocka_unit_test(what_a_rank_is_passed_is_checked),
        cmocka_unit_test(a_report_is_read_whole),
        cmocka_unit_test(bells_never_block),
        cmocka_unit_test(bundles_are_whole_pages_and_granules),
        cmocka_unit_test(strides_of_tokens_leave_small_bundles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
