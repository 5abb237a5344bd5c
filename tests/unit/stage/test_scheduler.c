/* SPDX-License-Identifier: MIT */
/* The scheduler's steps, turn by turn, on one thread: shapes, endings, refusals, order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "stage_rig.h"

static rig_t rig;

static void make(bool dispatch, uint32_t policy)
{
    rig_make(&rig, dispatch, policy);
    for (uint32_t f = 0; f < rig.ffns; f++)
        for (uint32_t i = 0; i < rig.instances; i++)
            rig_order(&rig, f, i, TRANSPORT_SLOT_ATTACHED);
}
static int teardown(void **state)
{
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}
static void shape(uint32_t i, uint32_t tp, uint32_t dp, uint32_t delivery, uint32_t group)
{
    rig.instance[i].tp = tp;
    rig.instance[i].dp = dp;
    rig.instance[i].delivery = delivery;
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
        rig.instance[i].group[layer] = group;
    if (rig.instances <= i)
        rig.instances = i + 1;
}
static void turns(uint32_t count)
{
    for (uint32_t n = 0; n < count; n++)
        for (uint32_t f = 0; f < rig.ffns; f++) {
            rig.now_ns += 10;
            rig_turn(&rig, f, rig.now_ns);
            if (rig.ffn[f].dispatch)
                rig_runtime(&rig, f);
        }
}
#define SETTLE (2 * STAGE_LOOK_TURNS * RIG_INSTANCES)

static void attach_all(void)
{
    turns(SETTLE);
    for (uint32_t f = 0; f < rig.ffns; f++)
        for (uint32_t i = 0; i < rig.instances; i++) {
            assert_true(rig_ordered(&rig, f, i));
            assert_int_equal(transport_slot_state(rig.ffn[f].table->instance[i].now),
                             TRANSPORT_SLOT_ATTACHED);
        }
}

/* One layer of one Instance from put to take. */
static void pass(uint32_t i, uint32_t layer, const uint32_t *dp_rows, uint64_t number)
{
    uint32_t ranks = rig_ranks(&rig.instance[i]);
    for (uint32_t r = 0; r < ranks; r++)
        rig_put(&rig, i, r, layer, dp_rows, number);
    for (uint32_t n = 0, over = 0; over != ranks; n++) {
        assert_true(n < 2000);
        turns(1);
        over = 0;
        for (uint32_t r = 0; r < ranks; r++)
            over +=
                rig.instance[i].rank[r].state.phase != TRANSPORT_PHASE_LIVE || rig_look(&rig, i, r);
    }
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(rig_take(&rig, i, r), 0);
    turns(4);
}

static const uint32_t rows_of[][RIG_RANKS] = {{1, 2, 3, 4}, {0, 3, 0, 1}, {6, 6, 6, 6},
                                              {0, 0, 0, 0}, {5, 0, 0, 0}, {0, 0, 0, 6}};
#define ROWS_OF (sizeof(rows_of) / sizeof(rows_of[0]))

/* Execution by the echo, the decode kernel, the host's launches, the kernel of few rows: the lease.
 */
static const uint32_t lease_of[] = {0, 1, 0, 3};

/* Every delivery kind, attention shape and group, with each execution. */
static void test_shapes(void **state)
{
    static const uint32_t attention[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {1, 4}, {4, 1}};
    static const uint32_t groups[] = {1, 4, 3, 6, 7};
    for (int execution = 0; execution < 4; execution++)
        for (uint32_t delivery = 0; delivery < 3; delivery++)
            for (uint32_t a = 0; a < 6; a++)
                for (uint32_t g = 0; g < 5; g++) {
                    rig.ffns = 3;
                    shape(0, attention[a][0], attention[a][1], delivery, groups[g]);
                    make(execution > 0, FABRIC_POLICY_FIFO);
                    for (uint32_t f = 0; f < 3; f++)
                        rig.ffn[f].lease = lease_of[execution];
                    attach_all();
                    for (uint32_t n = 0; n < ROWS_OF; n++)
                        pass(0, n % RIG_LAYERS, rows_of[n], n);
                    turns(SETTLE);
                    for (uint32_t f = 0; f < 3; f++) {
                        const stage_counts_t *counts = &rig.ffn[f].table->counts;
                        bool member = groups[g] >> f & 1;
                        assert_int_equal(counts->invocations, member ? ROWS_OF : 0);
                        assert_int_equal(counts->lanes_in_use, 0);
                        assert_int_equal(rig.ffn[f].table->failure.kind, STAGE_FAILURE_NONE);
                        if (member && execution == 2)
                            assert_int_equal(counts->host, ROWS_OF);
                        if (member && execution == 1)
                            assert_true(counts->resident > 0 && counts->host > 0);
                        if (member && execution == 3)
                            assert_true(counts->resident > 0 && counts->host > 0);
                    }
                    teardown(NULL);
                }
    rig.ffns = 1; /* for the last teardown */
    shape(0, 1, 1, 0, 1);
    make(false, 0);
}

/* Layers of one Instance on different groups: each stage sees only its own layers' sequences. */
static void test_layers_on_different_groups(void **state)
{
    rig.ffns = 3;
    shape(0, 2, 2, FABRIC_DELIVERY_SINGLE_COMPLETE, 1);
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
        rig.instance[0].group[layer] = 1 + layer % 7;
    make(true, FABRIC_POLICY_FIFO);
    attach_all();
    for (uint32_t n = 0; n < 3 * RIG_LAYERS; n++)
        pass(0, n % RIG_LAYERS, rows_of[n % ROWS_OF], n);
}

/* Large rows: several chunks, and a short job goes between them. */
static void test_chunks(void **state)
{
    rig.ffns = 1;
    shape(0, 1, 1, 0, 1);
    shape(1, 1, 1, 0, 1);
    make(false, 0);
    attach_all();
    stage_scheduler_t *s = rig.ffn[0].scheduler;
    for (uint32_t i = 0; i < 2; i++) {
        s->work[i].phase = STAGE_JOB;
        s->work[i].job = STAGE_JOB_ECHO;
        s->work[i].members = 1;
        s->work[i].job_next = 0;
        s->work[i].urgent = i;
        s->work[i].rows = i ? 1 : 3 * STAGE_JOB_CHUNK / RIG_HIDDEN - 1;
        s->jobs |= 1u << i;
    }
    s->jobs = 1;
    assert_true(stage_scheduler_chunk(s));
    assert_false(stage_scheduler_chunk(s)); /* one at a time */
    assert_int_equal(s->chunk.end - s->chunk.begin, STAGE_JOB_CHUNK);
    s->jobs = 3;
    stage_scheduler_chunk_done(s, 1);
    assert_true(stage_scheduler_chunk(s));
    assert_int_equal(s->chunk.instance, 1);
    stage_scheduler_chunk_done(s, 1);
    assert_int_equal(s->jobs, 1);
    for (int n = 0; n < 2; n++) {
        assert_true(stage_scheduler_chunk(s));
        assert_int_equal(s->chunk.instance, 0);
        stage_scheduler_chunk_done(s, 1);
    }
    assert_int_equal(s->jobs, 0);
    assert_int_equal(s->chunk.end, (3 * STAGE_JOB_CHUNK / RIG_HIDDEN - 1) * RIG_HIDDEN);
}

/* A brief says what its line says, or that it does not. */
static void test_briefs(void **state)
{
    static const uint64_t sequences[] = {1,          0x7fffffff, 0x80000000,
                                         0xffffffff, 1ull << 32, (1ull << 40) + 5};
    for (uint32_t n = 0; n < 6; n++)
        for (uint32_t step = 1; step <= 3000; step += 2999) {
            const stage_line_t said = {.sequence = sequences[n] + step,
                                       .layer = MAILBOX_LAYER_LIMIT - 1,
                                       .rows = MAILBOX_MAX_ROWS,
                                       .kind = MAILBOX_KIND_COUNT - 1,
                                       .dp_rows = {MAILBOX_MAX_ROWS}};
            stage_line_t line = said, read;
            assert_true(stage_brief_read(stage_brief_make(&line), sequences[n], &read));
            assert_memory_equal(&said, &read, sizeof(said));
            /* An older one, and the same one. */
            assert_false(stage_brief_read(stage_brief_make(&line), line.sequence + 1, &read));
            assert_false(stage_brief_read(stage_brief_make(&line), line.sequence, &read));
            line.dp_rows[0]--;
            assert_false(stage_brief_read(stage_brief_make(&line), sequences[n], &read));
            line = said;
            line.layer++;
            assert_false(stage_brief_read(stage_brief_make(&line), sequences[n], &read));
            line = said;
            line.rows = line.dp_rows[0] = 1u << STAGE_BRIEF_ROWS_BITS;
            assert_false(stage_brief_read(stage_brief_make(&line), sequences[n], &read));
            line = said;
            line.kind = 4;
            assert_false(stage_brief_read(stage_brief_make(&line), sequences[n], &read));
        }
}

/* The short way of a rank and a member that are alone leaves everything as the general steps do. */
static void test_alone_is_as_the_general_steps(void **state)
{
    for (int execution = 0; execution < 4; execution++)
        for (uint32_t rows = 0; rows <= RIG_ROWS; rows += RIG_ROWS / 2) {
            const int resident = execution == (rows <= RIG_DECODE ? 1 : 3);
            rig.ffns = 1;
            shape(0, 1, 1, 0, 1);
            make(execution > 0, FABRIC_POLICY_DEADLINE);
            rig.ffn[0].lease = lease_of[execution];
            attach_all();
            pass(0, 1, rows_of[0], 1);
            turns(SETTLE + 1);
            stage_scheduler_t *s = rig.ffn[0].scheduler;
            rig_put(&rig, 0, 0, 2, &rows, 2);
            assert_true(stage_scheduler_line_changed(s, 0));
            assert_true(s->turn % STAGE_LOOK_TURNS != 0);
            const uint32_t changed[STAGE_LINES / 32] = {1};
            stage_scheduler_t before = *s, after[2];
            ffn_cuda_lane_t lane[2];
            ffn_cuda_answer_t answer[2];
            ffn_cuda_command_t command[2];
            for (int general = 0; general < 2; general++) {
                *s = before;
                s->work[0].alone = !general;
                if (resident)
                    rig.ffn[0].queue->entries[before.poster.commands].sequence = 0;
                assert_true(stage_scheduler_turn(s, changed, 0, 77));
                assert_int_equal(s->work[0].phase, execution ? STAGE_RUNNING : STAGE_JOB);
                assert_int_equal(s->work[0].lane_held, 1);
                s->work[0].alone = 0;
                memset(&s->incoming, 0, sizeof(s->incoming)); /* only the general steps use it */
                after[general] = *s;
                if (!execution)
                    continue;
                lane[general] = *s->dispatch->lanes[s->work[0].lane].lane;
                answer[general] = *s->dispatch->lanes[s->work[0].lane].answer;
                command[general] = rig.ffn[0].queue->entries[before.poster.commands];
            }
            assert_memory_equal(&after[0], &after[1], sizeof(after[0]));
            assert_int_equal(s->counts.resident - before.counts.resident, resident);
            assert_int_equal(s->counts.host - before.counts.host, execution && !resident);
            if (execution) {
                assert_memory_equal(&lane[0], &lane[1], sizeof(lane[0]));
                assert_memory_equal(&answer[0], &answer[1], sizeof(answer[0]));
                assert_memory_equal(&command[0], &command[1], sizeof(command[0]));
            }
            /* What is not quite so common is left to the general steps. */
            *s = before;
            s->closing = 1;
            assert_true(stage_scheduler_turn(s, changed, 0, 77));
            assert_int_equal(s->work[0].phase, STAGE_IDLE);
            teardown(NULL);
        }
    rig.ffns = 1; /* for the last teardown */
    shape(0, 1, 1, 0, 1);
    make(false, 0);
}

static void two_ranks(void)
{
    rig.ffns = 1;
    shape(0, 2, 1, 0, 1);
    shape(1, 1, 1, 0, 1);
    make(false, 0);
    attach_all();
}

static void test_disagreement_names_both(void **state)
{
    two_ranks();
    rig_put(&rig, 0, 1, 3, (const uint32_t[]){2}, 0);
    turns(2);
    rig_put(&rig, 0, 0, 4, (const uint32_t[]){2}, 0);
    turns(2);
    const stage_failure_t *failure = &rig.ffn[0].table->failure;
    assert_int_equal(failure->kind, STAGE_FAILURE_DISAGREE);
    assert_int_equal(failure->instance, 0);
    assert_int_equal(failure->a, 1);
    assert_int_equal(failure->b, 0);
    assert_int_equal(failure->layer_a, 3);
    assert_int_equal(failure->layer_b, 4);
    assert_false(rig_turn(&rig, 0, rig.now_ns)); /* it leaves */
}

static void test_row_counts_must_agree(void **state)
{
    rig.ffns = 1;
    shape(0, 1, 2, 0, 1);
    make(false, 0);
    attach_all();
    rig_put(&rig, 0, 0, 0, (const uint32_t[]){2, 1}, 0);
    rig_put(&rig, 0, 1, 0, (const uint32_t[]){3, 1}, 0);
    turns(2);
    assert_int_equal(rig.ffn[0].table->failure.kind, STAGE_FAILURE_DISAGREE);
}

/* Nonsense from an Instance costs nobody else anything. */
static void test_bad_lines_drop_their_instance(void **state)
{
    for (int what = 0; what < 5; what++) {
        two_ranks();
        stage_line_t *line = &((stage_page_t *)rig.ffn[0].stage[0])->lines[1];
        pass(0, 0, (const uint32_t[]){1}, 0);
        *line = (stage_line_t){.layer = what == 0 ? RIG_LAYERS : 0,
                               .rows = what == 1   ? RIG_ROWS + 1
                                       : what == 2 ? 1
                                                   : 0,
                               .kind = what == 3 ? MAILBOX_KIND_COUNT : 0};
        line->dp_rows[0] = what == 1 ? RIG_ROWS + 1 : 0;
        stage_line_t value = *line;
        value.sequence = what == 4 ? 0 : 2;
        stage_line_publish(line, &value);
        turns(SETTLE);
        assert_int_equal(transport_slot_state(rig.ffn[0].table->instance[0].now),
                         TRANSPORT_SLOT_DROPPED);
        assert_int_equal(rig.ffn[0].table->instance[0].reason, XP_PEER);
        assert_int_equal(rig.ffn[0].table->counts.dropped, 1);
        for (uint32_t r = 0; r < 2; r++)
            assert_int_equal(mailbox_closed((mailbox_arena_t *)rig.instance[0].rank[r].arena),
                             XP_PEER);
        pass(1, 2, (const uint32_t[]){6}, 1);
        /* Detached and attached again, it works. */
        rig_order(&rig, 0, 0, TRANSPORT_SLOT_EMPTY);
        turns(SETTLE);
        assert_true(rig_ordered(&rig, 0, 0));
        for (uint32_t r = 0; r < 2; r++) {
            memset(rig.instance[0].rank[r].arena, 0, 4096);
            memset(&rig.instance[0].rank[r].state, 0, sizeof(transport_device_state_t));
        }
        rig_order(&rig, 0, 0, TRANSPORT_SLOT_ATTACHED);
        attach_all();
        pass(0, 0, (const uint32_t[]){2}, 0);
        if (what < 4)
            teardown(NULL);
    }
}

/* What one member finds wrong ends the Instance for the others too, long before they would call
 * that member late, which is the end of the Generation. */
static void test_an_instance_that_a_member_dropped_is_waited_for_by_nobody(void **state)
{
    for (int what = 0; what < 3; what++) {
        rig.ffns = 2;
        shape(0, 2, 1, FABRIC_DELIVERY_REPLICATED_COMPLETE, 3);
        shape(1, 1, 1, 0, 1);
        make(true, 0);
        attach_all();
        pass(0, 0, (const uint32_t[]){1}, 0);
        stage_scheduler_t *s = rig.ffn[0].scheduler;
        const uint32_t lanes = s->lanes_free;
        for (uint32_t r = 0; r < (what == 2 ? 1u : 2u); r++)
            rig_put(&rig, 0, r, 1, (const uint32_t[]){3}, 1);
        if (what < 2) { /* the other member's copy of the second rank's line is bad */
            stage_line_t *line = &((stage_page_t *)rig.ffn[1].stage[0])->lines[1];
            line->layer = RIG_LAYERS;
            rig_turn(&rig, 0, rig.now_ns);
            assert_true(rig_runtime(&rig, 0));
            rig_turn(&rig, 0, rig.now_ns);
            assert_int_equal(s->work[0].phase, STAGE_PARTIALS);
        } else { /* the second rank ends instead of coming */
            rig_turn(&rig, 0, rig.now_ns);
            assert_int_equal(s->work[0].phase, STAGE_GATHERING);
            mailbox_close((mailbox_arena_t *)rig.instance[0].rank[1].arena, XP_CLOSED);
        }
        for (uint32_t n = 0; what < 2 && n < SETTLE; n++)
            rig_turn(&rig, 1, rig.now_ns);
        rig.now_ns += what == 1 ? 2000000 : 200000; /* late as well: closed counts first */
        turns(2 * SETTLE);
        for (uint32_t f = 0; f < 2; f++) {
            assert_int_equal(rig.ffn[f].table->failure.kind, STAGE_FAILURE_NONE);
            if (what == 2 && f == 1)
                continue; /* its wait has just begun */
            assert_int_equal(transport_slot_state(rig.ffn[f].table->instance[0].now),
                             TRANSPORT_SLOT_DROPPED);
            assert_int_equal(rig.ffn[f].table->instance[0].reason, what == 2 ? XP_CLOSED : XP_PEER);
        }
        assert_int_equal(s->lanes_free, lanes);
        pass(1, 2, (const uint32_t[]){6}, 1);
        if (what < 2)
            teardown(NULL);
    }
}

/* A layer whose group this FfnAgent does not belong to is nonsense in its stage. */
static void test_foreign_layer(void **state)
{
    rig.ffns = 2;
    shape(0, 1, 1, 0, 1);
    rig.instance[0].group[5] = 2;
    make(false, 0);
    attach_all();
    stage_line_t *line = &((stage_page_t *)rig.ffn[0].stage[0])->lines[0];
    line->layer = 5;
    stage_line_publish(line, &(stage_line_t){.sequence = 1, .layer = 5});
    turns(4);
    assert_int_equal(rig.ffn[0].table->instance[0].reason, XP_PEER);
}

static void renew(uint32_t i)
{
    for (uint32_t r = 0; r < rig_ranks(&rig.instance[i]); r++) {
        memset(rig.instance[i].rank[r].arena, 0, 4096);
        memset(&rig.instance[i].rank[r].state, 0, sizeof(transport_device_state_t));
    }
}

/* Detach in every phase; the Lane comes back, and the next Instance starts anew. */
static void test_abandon(void **state)
{
    for (int when = 0; when < 5; when++) {
        rig.ffns = 2;
        shape(0, 2, 1, FABRIC_DELIVERY_REPLICATED_COMPLETE, 3);
        shape(1, 1, 1, 0, 1);
        make(true, 0);
        attach_all();
        pass(0, 0, (const uint32_t[]){1}, 0);
        stage_scheduler_t *s = rig.ffn[0].scheduler;
        uint32_t lanes = s->lanes_free;
        if (when == 1) /* QUEUED */
            s->lanes_free = 0;
        rig_put(&rig, 0, 0, 1, (const uint32_t[]){3}, 1);
        if (when > 0)
            rig_put(&rig, 0, 1, 1, (const uint32_t[]){3}, 1);
        for (int n = 0; n < 3; n++)
            rig_turn(&rig, 0, rig.now_ns);
        static const uint32_t phases[] = {STAGE_GATHERING, STAGE_QUEUED, STAGE_RUNNING,
                                          STAGE_PARTIALS, STAGE_RUNNING};
        if (when == 3) { /* the other member never delivers */
            assert_true(rig_runtime(&rig, 0));
            rig_turn(&rig, 0, rig.now_ns);
        }
        assert_int_equal(s->work[0].phase, phases[when]);
        if (when == 4) /* both members execute, and are detached in between */
            for (int n = 0; n < 3; n++)
                rig_turn(&rig, 1, rig.now_ns);
        for (uint32_t f = 0; f < 2; f++)
            rig_order(&rig, f, 0, TRANSPORT_SLOT_EMPTY);
        for (uint32_t n = 0; n < SETTLE; n++)
            for (uint32_t f = 0; f < 2; f++)
                rig_turn(&rig, f, rig.now_ns);
        /* Not while the runtime may still write. */
        assert_int_equal(rig_ordered(&rig, 0, 0), phases[when] != STAGE_RUNNING);
        s->lanes_free = when == 1 ? lanes : s->lanes_free;
        turns(SETTLE);
        assert_true(rig_ordered(&rig, 0, 0) && rig_ordered(&rig, 1, 0));
        assert_int_equal(s->lanes_free, lanes);
        assert_int_equal(s->counts.abandoned, 1);
        renew(0);
        for (uint32_t f = 0; f < 2; f++)
            rig_order(&rig, f, 0, TRANSPORT_SLOT_ATTACHED);
        attach_all();
        for (uint32_t n = 0; n < 3; n++)
            pass(0, n, (const uint32_t[]){n}, n);
        pass(1, 0, (const uint32_t[]){1}, 0);
        if (when < 4)
            teardown(NULL);
    }
}

static void late(uint32_t kind, uint32_t f, uint32_t a, uint32_t b)
{
    const stage_failure_t *failure = &rig.ffn[f].table->failure;
    assert_int_equal(failure->kind, STAGE_FAILURE_NONE);
    rig.now_ns += 2000000;
    for (uint32_t n = 0; n < SETTLE; n++)
        rig_turn(&rig, f, rig.now_ns);
    assert_int_equal(failure->kind, kind);
    assert_int_equal(failure->status, XP_TIMEOUT);
    assert_int_equal(failure->a, a);
    assert_int_equal(failure->b, b);
    assert_true(failure->waited_ns >= 1000000);
}

static void test_late_rank(void **state)
{
    two_ranks();
    rig_put(&rig, 0, 0, 3, (const uint32_t[]){2}, 0);
    turns(2);
    late(STAGE_FAILURE_RANK, 0, 0, 1);
}

static void test_late_member(void **state)
{
    rig.ffns = 3;
    shape(0, 1, 1, FABRIC_DELIVERY_SINGLE_COMPLETE, 6);
    make(true, 0);
    attach_all();
    rig_put(&rig, 0, 0, 3, (const uint32_t[]){2}, 0);
    rig_turn(&rig, 1, rig.now_ns);
    assert_true(rig_runtime(&rig, 1));
    rig_turn(&rig, 1, rig.now_ns);
    late(STAGE_FAILURE_MEMBER, 1, 0, 2); /* FfnAgent 2 */
}

static void test_late_execution(void **state)
{
    rig.ffns = 1;
    shape(0, 1, 1, 0, 1);
    make(true, 0);
    attach_all();
    rig_put(&rig, 0, 0, 3, (const uint32_t[]){2}, 0);
    rig_turn(&rig, 0, rig.now_ns);
    late(STAGE_FAILURE_EXECUTION, 0, 0, 0);
}

static void test_late_lane(void **state)
{
    rig.ffns = 1;
    shape(0, 1, 1, 0, 1);
    make(false, 0);
    attach_all();
    rig.ffn[0].scheduler->lanes_free = 0;
    rig_put(&rig, 0, 0, 3, (const uint32_t[]){2}, 0);
    rig_turn(&rig, 0, rig.now_ns);
    late(STAGE_FAILURE_LANE, 0, 0, 0);
}

static void test_runtime_failure(void **state)
{
    rig.ffns = 1;
    shape(0, 1, 1, 0, 1);
    make(true, 0);
    attach_all();
    rig.ffn[0].failure = XP_IO;
    turns(SETTLE);
    assert_int_equal(rig.ffn[0].table->failure.kind, STAGE_FAILURE_RUNTIME);
    assert_int_equal(rig.ffn[0].table->failure.status, XP_IO);
}

static void test_capacity(void **state)
{
    rig.ffns = 1;
    shape(0, 2, 1, 0, 1);
    make(true, 0);
    rig.ffn[0].scheduler->own_dispatch.buffer_rows = 2;
    attach_all();
    pass(0, 0, (const uint32_t[]){2}, 0);
    for (uint32_t r = 0; r < 2; r++)
        rig_put(&rig, 0, r, 5, (const uint32_t[]){3}, 1);
    rig_turn(&rig, 0, rig.now_ns);
    const stage_failure_t *failure = &rig.ffn[0].table->failure;
    assert_int_equal(failure->kind, STAGE_FAILURE_CAPACITY);
    assert_int_equal(failure->layer_a, 5);
    assert_int_equal(failure->rows_a, 3);
}

static void test_stop_and_end(void **state)
{
    for (int what = 0; what < 2; what++) {
        rig.ffns = 1;
        shape(0, 1, 1, 0, 1);
        make(true, 0);
        attach_all();
        rig_put(&rig, 0, 0, 3, (const uint32_t[]){2}, 0);
        turns(1);
        PROTOCOL_STORE_RELEASE(what ? &rig.ffn[0].table->ended : &rig.ffn[0].table->stop, 1u);
        uint32_t n = 0;
        while (rig_turn(&rig, 0, rig.now_ns))
            assert_true(n++ < STAGE_LOOK_TURNS);
        if (!what)
            teardown(NULL);
    }
}

static void test_shutdown_finishes_what_it_took(void **state)
{
    rig.ffns = 1;
    shape(0, 1, 1, 0, 1);
    shape(1, 1, 1, 0, 1);
    make(true, 0);
    attach_all();
    rig_put(&rig, 0, 0, 3, (const uint32_t[]){2}, 0);
    rig_turn(&rig, 0, rig.now_ns);
    PROTOCOL_STORE_RELEASE(&rig.ffn[0].table->shutdown, 1u);
    for (uint32_t n = 0; n < SETTLE; n++)
        assert_true(rig_turn(&rig, 0, rig.now_ns));
    rig_put(&rig, 1, 0, 3, (const uint32_t[]){2}, 0); /* too late */
    for (uint32_t n = 0; n < SETTLE; n++)
        assert_true(rig_turn(&rig, 0, rig.now_ns));
    assert_true(rig_runtime(&rig, 0));
    uint32_t n = 0;
    while (rig_turn(&rig, 0, rig.now_ns))
        assert_true(n++ < SETTLE);
    assert_true(rig_look(&rig, 0, 0));
    assert_int_equal(rig_take(&rig, 0, 0), 0);
    assert_false(rig_look(&rig, 1, 0));
    assert_int_equal(rig.ffn[0].table->failure.kind, STAGE_FAILURE_NONE);
}

/* More Invocations than Lanes; the lease comes and goes; the queue's end is refused. */
static void test_lanes_and_lease(void **state)
{
    rig.ffns = 1;
    for (uint32_t i = 0; i < 4; i++)
        shape(i, 1, 1, 0, 1);
    make(true, 0);
    attach_all();
    for (uint32_t n = 0; n < 60; n++) {
        /* As the host does: an even lease ends, an odd one begins, each of the other kernel. */
        if (n % 10 == 0 && n) {
            memset(rig.ffn[0].queue, 0, sizeof(*rig.ffn[0].queue));
            rig.ffn[0].commands = 0;
            PROTOCOL_STORE_RELEASE(&rig.ffn[0].lease, rig.ffn[0].lease + 1);
            turns(SETTLE);
            assert_int_equal(rig.ffn[0].ring->lease_seen, rig.ffn[0].lease);
        }
        if (n == 15)
            rig.ffn[0].queue->entries[rig.ffn[0].commands].sequence = FFN_CUDA_QUEUE_LEFT;
        for (uint32_t i = 0; i < 4; i++)
            rig_put(&rig, i, 0, n % RIG_LAYERS, (const uint32_t[]){1 + i}, n);
        turns(20);
        for (uint32_t i = 0; i < 4; i++) {
            assert_true(rig_look(&rig, i, 0));
            assert_int_equal(rig_take(&rig, i, 0), 0);
        }
    }
    const stage_counts_t *counts = &rig.ffn[0].scheduler->counts;
    assert_int_equal(counts->lanes_peak, RIG_LANES);
    assert_int_equal(counts->invocations, 240);
    assert_true(counts->resident > 0 && counts->host > 0);
    assert_int_equal(counts->resident + counts->host, 240);
}

/* A short Invocation that comes while a long one is executed is posted into it, a long one behind
 * it. */
static void test_cuts(void **state)
{
    rig.ffns = 1;
    for (uint32_t i = 0; i < 2; i++)
        shape(i, 1, 1, 0, 1);
    make(true, 0);
    rig.ffn[0].lease = 1;
    attach_all();
    const stage_counts_t *counts = &rig.ffn[0].scheduler->counts;
    for (uint32_t n = 0; n < 8; n++) {
        const uint32_t first = n % 2 ? 1 : RIG_DECODE, second = n % 2 ? RIG_DECODE : 1;
        rig_put(&rig, 0, 0, n % RIG_LAYERS, &first, n);
        for (uint32_t t = 0; t < STAGE_LOOK_TURNS; t++)
            rig_turn(&rig, 0, rig.now_ns += 10); /* nothing is executed */
        rig_put(&rig, 1, 0, n % RIG_LAYERS, &second, n);
        for (uint32_t t = 0; t < STAGE_LOOK_TURNS; t++)
            rig_turn(&rig, 0, rig.now_ns += 10);
        assert_int_equal(counts->resident, 2 * (n + 1));
        assert_int_equal(counts->cuts, n / 2 + 1);
        turns(20);
        for (uint32_t i = 0; i < 2; i++) {
            assert_true(rig_look(&rig, i, 0));
            assert_int_equal(rig_take(&rig, i, 0), 0);
        }
    }
}

/* The choice is that of fabric_policy_choose(), the processors' Coordinator's. */
static void test_policies(void **state)
{
    static stage_scheduler_t s;
    for (uint32_t policy = 0; policy < 3; policy++) {
        uint64_t random_state = 99, dice = 5;
        fabric_waiting_t waiting[FABRIC_MAX_INSTANCES];
        uint32_t count = 0;
        memset(&s, 0, sizeof(s));
        s.policy = policy;
        s.random_state = random_state;
        for (uint32_t n = 0; n < 2000; n++) {
            while (count < 10 || (count < FABRIC_MAX_INSTANCES && stage_random_next(&dice) % 2)) {
                uint32_t i = (uint32_t)(stage_random_next(&dice) % FABRIC_MAX_INSTANCES);
                if (s.queued >> i & 1)
                    continue;
                s.queued |= 1ull << i;
                s.work[i].arrival = s.arrivals++;
                s.work[i].passes = 0;
                s.work[i].line.slo_deadline_ns = stage_random_next(&dice) % 50;
                waiting[count++] = (fabric_waiting_t){.arrival = s.work[i].arrival,
                                                      .deadline_ns = s.work[i].line.slo_deadline_ns,
                                                      .instance = i};
            }
            /* By Instance, as the scheduler's bits are. */
            for (uint32_t a = 1; a < count; a++)
                for (uint32_t b = a; b && waiting[b].instance < waiting[b - 1].instance; b--) {
                    fabric_waiting_t swap = waiting[b];
                    waiting[b] = waiting[b - 1];
                    waiting[b - 1] = swap;
                }
            uint32_t expected =
                fabric_policy_choose((fabric_policy_t)policy, &random_state, waiting, count);
            assert_int_equal(stage_scheduler_choose(&s), waiting[expected].instance);
            s.queued &= ~(1ull << waiting[expected].instance);
            waiting[expected] = waiting[--count];
        }
    }
    rig.ffns = 0;
}

/* No line waits behind busy ones: 128 lines, all live, are all taken within a bounded number of
 * turns. */
static void test_bounded_turns(void **state)
{
    rig.ffns = 1;
    for (uint32_t i = 0; i < 4; i++)
        shape(i, 2, 2, 0, 1);
    make(false, 0);
    attach_all();
    stage_scheduler_t *s = rig.ffn[0].scheduler;
    assert_int_equal(s->line_count, 16);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t r = 0; r < 4; r++)
            rig_put(&rig, i, r, 0, (const uint32_t[]){1, 1}, 0);
    uint64_t before = s->arrivals;
    rig_turn(&rig, 0, rig.now_ns);
    assert_true(s->arrivals - before <= STAGE_EVENTS / 4);
    turns(1);
    assert_int_equal(s->arrivals - before, 4);
}

static void test_values(void **state)
{
    for (uint32_t bits = 0; bits < 65536; bits++)
        for (uint32_t dtype = 0; dtype < 2; dtype++) {
            float value = stage_value((uint16_t)bits, dtype);
            if (value == value)
                assert_int_equal(stage_bits(value, dtype), bits);
            else
                assert_true(stage_value(stage_bits(value, dtype), dtype) != value);
        }
    assert_int_equal(stage_bits(1.00390625f, FFN_CUDA_BF16), 0x3f80); /* ties to even */
    assert_int_equal(stage_bits(1.01171875f, FFN_CUDA_BF16), 0x3f82);
    assert_int_equal(stage_bits(3.4e38f, FFN_CUDA_BF16), 0x7f80);
}

/* Narrow and wide ways give the same, for all kinds and any number of threads. */
/* Counts that the caller's device wrote are nobody's to trust: rows stay within the stage. */
static void test_counts_beyond_the_stage(void **state)
{
    const stage_put_t put = {.dp = 2, .dp_size = 3, .gathered = 1, .max_rows = 8, .row_bytes = 16};
    transport_live_t live = {.rows = 1, .dp_rows = {3, 8, 1}};
    assert_int_equal(stage_put_offset(&put, &live), 11 * 16);
    live.dp_rows[0] = UINT32_MAX;
    live.dp_rows[1] = 9;
    assert_int_equal(stage_put_offset(&put, &live), 16 * 16);
}

static void test_jobs(void **state)
{
    enum { N = 1000 };
    static _Alignas(16) uint16_t rows[N], to16[2][2][N];
    static _Alignas(16) float partial[3][N], to32[2][2][N];
    for (uint32_t i = 0; i < N; i++) {
        rows[i] = stage_bits((float)i * 0.37f - 100.0f, FFN_CUDA_BF16);
        for (uint32_t m = 0; m < 3; m++)
            partial[m][i] = (float)(i * (m + 1)) * 0.1f - 30.0f;
    }
    for (uint32_t kind = STAGE_JOB_COPY; kind <= STAGE_JOB_ECHO; kind++)
        for (uint32_t wide = 0; wide < 2; wide++) {
            if (wide && kind == STAGE_JOB_REDUCE)
                continue;
            for (uint32_t narrow = 0; narrow < 2; narrow++) {
                stage_job_t job = {.kind = kind,
                                   .dtype = FFN_CUDA_BF16,
                                   .wide = wide,
                                   .narrow = narrow,
                                   .member = wide,
                                   .members = 3,
                                   .layer = 5,
                                   .consumers = 2,
                                   .from =
                                       kind == STAGE_JOB_REDUCE || (kind == STAGE_JOB_COPY && wide)
                                           ? (const void *)partial
                                           : rows,
                                   .stride = N,
                                   .elements = N};
                for (uint32_t c = 0; c < 2; c++)
                    job.to[c] = (stage_job_to_t){.rows = wide ? (void *)to32[narrow][c]
                                                              : (void *)to16[narrow][c],
                                                 .begin = c * 400,
                                                 .count = c ? 600 : 400};
                for (uint32_t thread = 0; thread < 7; thread++) {
                    stage_job_run(&job, 0, 520, thread, 7);
                    stage_job_run(&job, 520, N, thread, 7);
                }
            }
            assert_memory_equal(to16[0], to16[1], sizeof(to16[0]));
            assert_memory_equal(to32[0], to32[1], sizeof(to32[0]));
            if (kind == STAGE_JOB_REDUCE)
                for (uint32_t i = 0; i < N; i++)
                    assert_int_equal(
                        to16[0][i >= 400][i >= 400 ? i - 400 : i],
                        stage_bits(partial[0][i] + partial[1][i] + partial[2][i], FFN_CUDA_BF16));
        }
    rig.ffns = 0;
}

/* One consumer of whole rows: the way of decoding, for both types, any part and number of threads.
 */
static void test_plain_jobs(void **state)
{
    enum { N = 4096 };
    static const uint32_t threads[] = {1, 3, 32, 448};
    static _Alignas(16) uint16_t rows[N], to[2][N];
    for (uint32_t dtype = 0; dtype < 2; dtype++)
        for (uint32_t kind = 0; kind < 2; kind++)
            for (uint32_t t = 0; t < 4; t++) {
                memset(to, 0, sizeof(to));
                for (uint32_t i = 0; i < N; i++)
                    rows[i] = stage_bits((float)i * 0.37f - 700.0f, dtype);
                for (uint32_t narrow = 0; narrow < 2; narrow++) {
                    stage_job_t job = {.kind = kind ? STAGE_JOB_ECHO : STAGE_JOB_COPY,
                                       .dtype = dtype,
                                       .narrow = narrow,
                                       .layer = 5,
                                       .consumers = 1,
                                       .from = rows};
                    job.to[0] = (stage_job_to_t){.rows = to[narrow], .count = N - 8};
                    assert_int_equal(stage_job_is_plain(&job, N - 8), !narrow);
                    assert_false(stage_job_is_plain(&job, N));
                    for (uint32_t thread = 0; thread < threads[t]; thread++) {
                        stage_job_run(&job, 0, 264, thread, threads[t]);
                        stage_job_run(&job, 264, N - 8, thread, threads[t]);
                    }
                }
                assert_memory_equal(to[0], to[1], sizeof(to[0]));
                for (uint32_t i = 0; i < 8; i++)
                    assert_int_equal(to[0][N - 8 + i], 0);
            }
}

/* A status is read where a relay answers, and only there; closed ends every wait. */
static void test_answers(void **state)
{
    static rig_arena_t memory;
    mailbox_arena_t *arena = (mailbox_arena_t *)&memory;
    for (uint32_t relay = 0; relay < 2; relay++) {
        const uint32_t direct = relay ? STAGE_ANSWER_STATUS : 0;
        transport_device_state_t device = {.phase = TRANSPORT_PHASE_LIVE, .sequence = 7 + relay};
        uint32_t missing = direct;
        assert_false(stage_device_wait_answer(arena, &device, direct, &missing));
        mailbox_response_publish(arena, 7 + relay, XP_RETRY);
        assert_true(stage_device_wait_answer(arena, &device, direct, &missing));
        assert_int_equal(device.status, relay ? XP_RETRY : XP_OK);
        assert_int_equal(device.phase, relay ? TRANSPORT_PHASE_IDLE : TRANSPORT_PHASE_ANSWERED);
    }
    transport_device_state_t device = {.phase = TRANSPORT_PHASE_LIVE, .sequence = 9};
    uint32_t missing = 3;
    mailbox_partial_publish(mailbox_partial_at(arena, 1), 9, XP_OK);
    assert_false(stage_device_wait_look(arena, &device, 3, &missing));
    assert_int_equal(missing, 1);
    mailbox_partial_publish(mailbox_partial_at(arena, 0), 9, XP_OK);
    assert_true(stage_device_wait_look(arena, &device, 3, &missing));
    assert_int_equal(device.phase, TRANSPORT_PHASE_ANSWERED);
    device.sequence = 10;
    missing = 3;
    mailbox_close(arena, XP_FATAL);
    assert_false(stage_device_wait_answer(arena, &device, 3, &missing));
    assert_true(stage_device_wait_look(arena, &device, 3, &missing));
    assert_int_equal(device.status, XP_FATAL);
    /* Answered and closed after the look for the answer, before that for the close: it is answered.
     */
    for (uint32_t relay = 0; relay < 2; relay++) {
        const uint32_t direct = relay ? STAGE_ANSWER_STATUS : 1;
        device = (transport_device_state_t){.phase = TRANSPORT_PHASE_LIVE, .sequence = 11 + relay};
        missing = direct;
        assert_false(stage_device_wait_answer(arena, &device, direct, &missing));
        mailbox_partial_publish(mailbox_partial_at(arena, 0), 11 + relay, XP_OK);
        mailbox_response_publish(arena, 11 + relay, XP_OK);
        assert_true(stage_device_wait_closed(arena, &device, direct, &missing));
        assert_int_equal(device.status, XP_OK);
        assert_int_equal(device.phase, TRANSPORT_PHASE_ANSWERED);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_shapes, teardown),
        cmocka_unit_test_teardown(test_layers_on_different_groups, teardown),
        cmocka_unit_test(test_briefs),
        cmocka_unit_test_teardown(test_alone_is_as_the_general_steps, teardown),
        cmocka_unit_test_teardown(test_chunks, teardown),
        cmocka_unit_test_teardown(test_disagreement_names_both, teardown),
        cmocka_unit_test_teardown(test_row_counts_must_agree, teardown),
        cmocka_unit_test_teardown(test_bad_lines_drop_their_instance, teardown),
        cmocka_unit_test_teardown(test_an_instance_that_a_member_dropped_is_waited_for_by_nobody,
                                  teardown),
        cmocka_unit_test_teardown(test_foreign_layer, teardown),
        cmocka_unit_test_teardown(test_abandon, teardown),
        cmocka_unit_test_teardown(test_late_rank, teardown),
        cmocka_unit_test_teardown(test_late_member, teardown),
        cmocka_unit_test_teardown(test_late_execution, teardown),
        cmocka_unit_test_teardown(test_late_lane, teardown),
        cmocka_unit_test_teardown(test_runtime_failure, teardown),
        cmocka_unit_test_teardown(test_capacity, teardown),
        cmocka_unit_test_teardown(test_stop_and_end, teardown),
        cmocka_unit_test_teardown(test_shutdown_finishes_what_it_took, teardown),
        cmocka_unit_test_teardown(test_lanes_and_lease, teardown),
        cmocka_unit_test_teardown(test_cuts, teardown),
        cmocka_unit_test_teardown(test_policies, teardown),
        cmocka_unit_test_teardown(test_bounded_turns, teardown),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_counts_beyond_the_stage),
        cmocka_unit_test(test_jobs),
        cmocka_unit_test(test_plain_jobs),
        cmocka_unit_test(test_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
