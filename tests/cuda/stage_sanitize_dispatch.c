/* SPDX-License-Identifier: MIT */
/*
 * The scheduler with a dispatch: a script of the host stands for the FFN runtime and its kernels.
 * It sees what the scheduler fills a Lane with, computes in plain C, and says `done`. One request
 * after another, so that Lanes, tickets and places of the queue are known. The queue lies in device
 * memory, and is looked at when the scheduler has left.
 */
#include <string.h>

#include "ffn/cuda/dispatch.h"
#include "stage/table.h"
#include "stage_sanitize.h"

#define FFN         1u
#define HIDDEN      64u
#define MAX_ROWS    24u
#define DECODE_ROWS 16u
#define FIRST_LAYER 4u
#define LANES       3u

typedef struct guest {
    uint32_t tp, dp, group, direct;
    uint32_t instance;
    stage_page_t *page;
    mailbox_arena_t *arena[2];
    uint16_t *input, *output[2];
    float *partial[2], *scratch; /* this member's */
    uint32_t member, rows, layer;
    uint64_t sequence, ticket;
} guest_t;

enum { ALONE, SHORT, SPREAD, PARTIAL, PARTIALS, GUESTS };

static stage_table_t *table;
static guest_t guests[GUESTS];
static ffn_cuda_dispatch_t *dispatch;
static ffn_cuda_lane_t *lanes;
static ffn_cuda_answer_t *answers;
static uint64_t *dones;
static uint32_t *lease, *failure;
static uint64_t tickets;

static void guest_make(guest_t *g, uint32_t instance, uint32_t tp, uint32_t dp, uint32_t group,
                       uint32_t direct)
{
    const uint64_t elements = (uint64_t)MAX_ROWS * dp * HIDDEN, output_at = SANITIZE_ARENA,
                   partial_at = output_at + elements * 2;
    *g = (guest_t){.tp = tp, .dp = dp, .group = group, .direct = direct, .instance = instance};
    g->member = (uint32_t)__builtin_popcount(group & ((1u << FFN) - 1));
    g->page = sanitize_pinned(sizeof(*g->page));
    g->input = sanitize_pinned(elements * 2);
    g->scratch = direct && tp * dp > 1 ? sanitize_pinned(elements * 4) : NULL;
    stage_about_t about = {.members = group,
                           .uniform = group,
                           .layers = 8,
                           .hidden = HIDDEN,
                           .dtype = FFN_CUDA_BF16,
                           .max_rows = MAX_ROWS,
                           .tp = tp,
                           .dp = dp,
                           .direct = direct,
                           .page = (uint64_t)(uintptr_t)g->page,
                           .input = (uint64_t)(uintptr_t)g->input,
                           .scratch = (uint64_t)(uintptr_t)g->scratch,
                           .output_offset = output_at,
                           .partial_offset = partial_at,
                           .partial_bytes = elements * 4};
    for (uint32_t rank = 0; rank < tp * dp; rank++) {
        char *base = sanitize_pinned(partial_at + 2 * elements * 4);
        g->arena[rank] = (mailbox_arena_t *)base;
        g->output[rank] = (uint16_t *)(base + output_at);
        g->partial[rank] = (float *)(base + partial_at) + g->member * elements;
        about.arenas[rank] = (uint64_t)(uintptr_t)base;
    }
    table->instance[instance].about = about;
    table->instance[instance].wanted = transport_slot_word(1, TRANSPORT_SLOT_ATTACHED);
}

static cuda_address_t make(void)
{
    table = sanitize_pinned(sizeof(*table));
    dispatch = sanitize_pinned(sizeof(*dispatch));
    lanes = sanitize_pinned(LANES * sizeof(*lanes));
    answers = sanitize_pinned(LANES * sizeof(*answers));
    dones = sanitize_pinned(LANES * sizeof(*dones));
    lease = sanitize_pinned(sizeof(*lease));
    failure = sanitize_pinned(sizeof(*failure));
    const cuda_address_t queue = sanitize_device(sizeof(ffn_cuda_queue_t), NULL);
    *dispatch = (ffn_cuda_dispatch_t){.abi = FFN_CUDA_DISPATCH_ABI,
                                      .lane_count = LANES,
                                      .max_rows = MAX_ROWS * 2,
                                      .buffer_rows = MAX_ROWS * 2,
                                      .max_hidden = HIDDEN,
                                      .cuts = 1,
                                      .queue = (ffn_cuda_queue_t *)(uintptr_t)queue,
                                      .lease = lease,
                                      .failure = failure,
                                      .ring = sanitize_pinned(sizeof(ffn_cuda_ring_t))};
    for (uint32_t i = 0; i < LANES; i++)
        dispatch->lanes[i] = (ffn_cuda_dispatch_lane_t){
            .lane = &lanes[i],
            .answer = &answers[i],
            .done = &dones[i],
            .output = sanitize_pinned((uint64_t)MAX_ROWS * 2 * HIDDEN * 2)};
    dispatch->models[0] = (ffn_cuda_dispatch_model_t){.first_layer = FIRST_LAYER,
                                                      .layers = 8,
                                                      .hidden = HIDDEN,
                                                      .decode_rows = DECODE_ROWS,
                                                      .row_kib = 10,
                                                      .experts_kib = 1000};
    *lease = 1; /* of the decode kernel */
    tickets = 0;
    table->magic = STAGE_TABLE_MAGIC;
    table->instances = GUESTS;
    table->ffn = FFN;
    table->submission_timeout_ns = 20 * XP_NS_PER_S;
    table->dispatch = (uint64_t)(uintptr_t)dispatch;
    table->own_elements = 4096;
    guest_make(&guests[ALONE], ALONE, 1, 1, 2, 0);
    guest_make(&guests[SHORT], SHORT, 1, 1, 2, 0);
    guest_make(&guests[SPREAD], SPREAD, 1, 2, 2, 0);
    guest_make(&guests[PARTIAL], PARTIAL, 1, 1, 3, 1);
    guest_make(&guests[PARTIALS], PARTIALS, 2, 1, 6, 1);
    return queue;
}

/* ---- script --------------------------------------------------------------------------------- */
/* rows: of each DP rank; all of them are told by the guest. */
static void ask(guest_t *g, uint32_t rows, uint32_t layer)
{
    g->rows = rows * g->dp;
    g->layer = layer;
    g->sequence += 2;
    for (uint64_t i = 0; i < (uint64_t)g->rows * HIDDEN; i++)
        g->input[i] = sanitize_value(g->sequence + g->instance, i);
    for (uint32_t rank = 0; rank < g->tp * g->dp; rank++) {
        stage_line_t value = {.sequence = g->sequence, .layer = layer, .rows = rows};
        for (uint32_t dp = 0; dp < g->dp; dp++)
            value.dp_rows[dp] = rows;
        stage_line_fill(&g->page->lines[rank], &value);
        stage_line_publish(&g->page->lines[rank], &value);
    }
}

static uint64_t *word_of(const guest_t *g, uint32_t rank)
{
    return g->direct ? &mailbox_partial_at(g->arena[rank], g->member)->sequence
                     : &g->arena[rank]->response.sequence;
}

/* Until the Lane holds the guest's Invocation, all of it. Fields are in no order before the post,
 * which this script does not see; which of the ranks was found first is open. */
static bool given(guest_t *g, uint32_t lane)
{
    const volatile ffn_cuda_lane_t *own = &lanes[lane];
    const volatile ffn_cuda_answer_t *answer = &answers[lane];
    const bool spread = g->tp * g->dp > 1;
    const void *output = g->direct ? NULL : spread ? dispatch->lanes[lane].output : g->output[0];
    const float *partial = !g->direct ? NULL : spread ? g->scratch : g->partial[0];
    g->ticket = ++tickets;
    SANITIZE_UNTIL(answer->ticket == g->ticket && answer->instance == g->instance &&
                   answer->layer_of_model == g->layer && answer->rank < g->tp * g->dp);
    SANITIZE_UNTIL(own->layer == FIRST_LAYER + g->layer && own->rows == g->rows &&
                   own->input == g->input && own->output == output && own->partial == partial);
    SANITIZE_UNTIL(answer->consumer_count == g->tp * g->dp && answer->source_count == 0);
    for (uint32_t rank = 0; rank < g->tp * g->dp; rank++) {
        const volatile ffn_cuda_consumer_t *to = &answer->consumers[rank];
        const void *rows = !spread ? NULL : g->direct ? (void *)g->partial[rank] : g->output[rank];
        SANITIZE_UNTIL(to->word == word_of(g, rank) && to->value == g->sequence &&
                       to->rows == rows && to->count == g->rows / g->dp &&
                       to->first == rank / g->tp * to->count);
    }
    return true;
}

/* Stands for what any model computes. */
static float computed(const guest_t *g, uint64_t i)
{
    return 3 * sanitize_float(g->input[i]) + 0.3f * (float)g->layer;
}

/* host: the launches serve all consumers; the resident kernel one, whose word it got. */
static void execute(const guest_t *g, uint32_t lane, bool host)
{
    const ffn_cuda_lane_t *own = &lanes[lane];
    const bool spread = g->tp * g->dp > 1;
    for (uint64_t i = 0; i < (uint64_t)g->rows * HIDDEN; i++) {
        if (own->output)
            ((uint16_t *)own->output)[i] = sanitize_bf16(computed(g, i));
        else
            own->partial[i] = computed(g, i);
    }
    for (uint32_t c = 0; host && spread && c < answers[lane].consumer_count; c++) {
        const ffn_cuda_consumer_t *to = &answers[lane].consumers[c];
        const uint64_t bytes = own->output ? 2 : 4;
        memcpy(to->rows,
               (own->output ? (char *)own->output : (char *)own->partial) +
                   to->first * HIDDEN * bytes,
               to->count * HIDDEN * bytes);
    }
    for (uint32_t c = 0; (host || !spread) && c < answers[lane].consumer_count; c++)
        PROTOCOL_STORE_RELEASE(answers[lane].consumers[c].word, answers[lane].consumers[c].value);
    PROTOCOL_STORE_RELEASE(&dones[lane], g->ticket);
}

static bool answered(const guest_t *g)
{
    for (uint32_t rank = 0; rank < g->tp * g->dp; rank++) {
        const uint64_t own = (uint64_t)g->rows / g->dp * HIDDEN, first = rank / g->tp * own;
        SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(word_of(g, rank)) == g->sequence);
        for (uint64_t i = 0; i < own; i++)
            if (g->direct)
                SANITIZE_MUST(g->partial[rank][i] == computed(g, first + i));
            else
                SANITIZE_MUST(g->output[rank][i] == sanitize_bf16(computed(g, first + i)));
    }
    return true;
}

/* Its Lane is free again: the scheduler has counted it. */
static bool counted(uint64_t invocations)
{
    SANITIZE_UNTIL(*(volatile uint64_t *)&table->counts.invocations == invocations);
    return true;
}

static bool one(guest_t *g, uint32_t rows, uint32_t layer, bool host, uint64_t number)
{
    ask(g, rows, layer);
    if (!given(g, 0))
        return false;
    if (host) {
        const ffn_cuda_request_t *request = &dispatch->ring->entries[number];
        SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(&request->sequence) == number + 1);
        SANITIZE_MUST(request->lane == 0 && request->layer == FIRST_LAYER + layer);
        SANITIZE_MUST(request->rows == g->rows && request->urgent == 1);
        SANITIZE_MUST(request->input == (uint64_t)(uintptr_t)g->input);
    }
    execute(g, 0, host);
    return answered(g);
}

static bool script(void)
{
    /* The second one cuts the first, and ends before it. */
    ask(&guests[ALONE], 8, 1);
    if (!given(&guests[ALONE], 0))
        return false;
    ask(&guests[SHORT], 1, 7);
    if (!given(&guests[SHORT], 1))
        return false;
    execute(&guests[SHORT], 1, false);
    if (!answered(&guests[SHORT]) || !counted(1))
        return false;
    execute(&guests[ALONE], 0, false);
    if (!answered(&guests[ALONE]) || !counted(2))
        return false;
    /* Resident, and what the scheduler itself does after it: rows to two ranks. */
    if (!one(&guests[SPREAD], 4, 2, false, 0) || !counted(3) ||
        !one(&guests[PARTIAL], 5, 3, false, 0) || !counted(4) ||
        !one(&guests[PARTIALS], 6, 4, false, 0) || !counted(5))
        return false;
    /* To the host: too many rows, then no lease. */
    if (!one(&guests[ALONE], DECODE_ROWS + 4, 5, true, 0) || !counted(6))
        return false;
    PROTOCOL_STORE_RELEASE(lease, 2u);
    SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(&dispatch->ring->lease_seen) == 2);
    if (!one(&guests[ALONE], 2, 6, true, 1) || !counted(7) ||
        !one(&guests[SPREAD], 3, 0, true, 2) || !counted(8))
        return false;
    PROTOCOL_STORE_RELEASE(failure, (uint32_t)XP_IO); /* of the runtime */
    return true;
}

static void check_command(const ffn_cuda_command_t *command, const guest_t *g, uint32_t lane,
                          uint32_t rows, uint32_t layer, uint64_t ticket, const uint64_t *word,
                          uint32_t cuts)
{
    CHECK(command->lane == &lanes[lane] && command->about == &answers[lane]);
    CHECK(command->done == &dones[lane] && command->done_value == ticket);
    CHECK(command->rows == rows && command->layer == FIRST_LAYER + layer);
    CHECK(command->input == g->input && command->lane_number == lane && command->cuts == cuts);
    CHECK(command->answer == word && command->answer_value == 2);
}

static void check_queue(cuda_address_t at)
{
    static ffn_cuda_queue_t queue;
    sanitize_read(at, &queue, sizeof(queue));
    for (uint32_t i = 0; i < 6; i++)
        CHECK(queue.entries[i].sequence == (i < 4 ? i + 1 : 0));
    CHECK(queue.cuts[0].sequence == ((1u << FFN_CUDA_CUT_BITS) | 1) && queue.cuts[1].sequence == 0);
    check_command(&queue.entries[0], &guests[ALONE], 0, 8, 1, 1,
                  &guests[ALONE].arena[0]->response.sequence, 0);
    check_command(&queue.cuts[0], &guests[SHORT], 1, 1, 7, 2,
                  &guests[SHORT].arena[0]->response.sequence, 0);
    check_command(&queue.entries[1], &guests[SPREAD], 0, 8, 2, 3, NULL, 1);
    check_command(&queue.entries[2], &guests[PARTIAL], 0, 5, 3, 4,
                  &mailbox_partial_at(guests[PARTIAL].arena[0], 1)->sequence, 1);
    check_command(&queue.entries[3], &guests[PARTIALS], 0, 6, 4, 5, NULL, 1);
}

void sanitize_dispatch(void)
{
    const cuda_address_t queue = make();
    uint64_t life = (uint64_t)(uintptr_t)sanitize_life;
    void *parameters[] = {&table, &life};
    sanitize_play(script, SANITIZE_SCHEDULER, STAGE_THREADS, parameters);
    check_queue(queue);
    CHECK(table->failure.kind == STAGE_FAILURE_RUNTIME && table->failure.status == XP_IO);
    CHECK(table->counts.resident == 5 && table->counts.host == 3 && table->counts.cuts == 1);
    CHECK(table->counts.lanes_peak == 2 && table->counts.lanes_in_use == 0);
    sanitize_free();
    sanitize_case("scheduler: a command and its cut");
    sanitize_case("scheduler: resident, rows to several ranks");
    sanitize_case("scheduler: the host's ring, with and without a lease");
    sanitize_case("scheduler: failure of the runtime");
}
