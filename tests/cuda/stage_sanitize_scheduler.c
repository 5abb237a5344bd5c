/* SPDX-License-Identifier: MIT */
/*
 * The scheduler with the echo: Instances of all shapes whose lines a script of the host writes, and
 * whose answers it waits for, round by round; then a detach and a successor, nonsense, and the ways
 * in which the scheduler leaves. This FfnAgent is number 1 of 3.
 */
#include <stddef.h>
#include <string.h>

#include "stage_sanitize.h"
#include "ffn/cuda/tables.h"
#include "stage/scheduler_state.h"

#define FFN    1u
#define ROUNDS 4u
#define SEATS  9u

/* One Instance. */
typedef struct shape {
    const char *name;
    uint32_t tp, dp, group, direct;
    uint32_t hidden, max_rows;
    uint32_t rows[2]; /* of each DP rank */
    uint32_t device;  /* rows lie in device memory, whose end is theirs: one rank, complete rows */
    uint32_t mixed;   /* odd layers are this FfnAgent's alone */
} shape_t;

static const shape_t shapes[SEATS] = {
    {"alone, by the scheduler's warp", 1, 1, 2, 0, 72, 3, {3}, 1, 0},
    {"alone, several chunks", 1, 1, 2, 0, 1000, 70, {70}, 1, 0},
    {"alone, odd width", 1, 1, 2, 0, 33, 9, {7}, 1, 0},
    {"attention TP", 2, 1, 2, 0, 64, 9, {9}, 0, 0},
    {"attention DP", 1, 2, 2, 0, 1000, 8, {5, 8}, 0, 0},
    {"a partial to the rank", 1, 1, 3, 1, 1000, 6, {6}, 0, 0},
    {"a partial to two ranks", 2, 1, 6, 1, 64, 3, {2}, 0, 0},
    {"first of two, reduces; odd layers alone", 1, 2, 6, 0, 72, 4, {4, 1}, 0, 1},
    {"second of two", 1, 1, 3, 0, 64, 5, {5}, 0, 0},
};

typedef struct seat {
    const shape_t *shape;
    stage_instance_t *entry;
    stage_page_t *page;
    mailbox_arena_t *arena[2];
    uint16_t *input;             /* or NULL: device */
    cuda_address_t output_at;    /* device */
    stage_partials_t *partials;  /* of the first member */
    uint64_t arena_rows, stride; /* bytes from an arena to its rows; elements of a partial */
    uint64_t sequence;
    uint32_t layer, turn;
} seat_t;

static stage_table_t *table;
static seat_t seats[SEATS];
static uint32_t seat_count;

static uint32_t ranks_of(const seat_t *seat)
{
    return seat->shape->tp * seat->shape->dp;
}
static uint32_t rows_of(const seat_t *seat)
{
    return seat->shape->rows[0] + seat->shape->rows[1];
}
static uint32_t group_of(const seat_t *seat)
{
    return seat->shape->mixed && seat->layer % 2 ? 1u << FFN : seat->shape->group;
}
/* This FfnAgent's place in the group, and how many there are. */
static uint32_t member_of(const seat_t *seat)
{
    return (uint32_t)__builtin_popcount(group_of(seat) & ((1u << FFN) - 1));
}
static uint32_t members_of(const seat_t *seat)
{
    return (uint32_t)__builtin_popcount(group_of(seat));
}
static uint64_t *word_of(const seat_t *seat, uint32_t rank)
{
    return seat->shape->direct ? &mailbox_partial_at(seat->arena[rank], member_of(seat))->sequence
                               : &seat->arena[rank]->response.sequence;
}

static uint64_t up(uint64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static void seat_make(seat_t *seat, const shape_t *shape, uint32_t short_bytes)
{
    const uint32_t ranks = shape->tp * shape->dp, total = shape->max_rows * shape->dp;
    const uint64_t elements = (uint64_t)total * shape->hidden;
    const uint64_t own = up((uint64_t)shape->max_rows * shape->hidden * 2);
    stage_about_t about = {.members = shape->mixed ? shape->group | 1u << FFN : shape->group,
                           .uniform = shape->mixed ? 0 : shape->group,
                           .layers = 32,
                           .hidden = shape->hidden,
                           .dtype = FFN_CUDA_BF16,
                           .max_rows = shape->max_rows,
                           .tp = shape->tp,
                           .dp = shape->dp,
                           .direct = shape->direct};
    *seat = (seat_t){.shape = shape, .entry = &table->instance[seat_count++]};
    seat->page = sanitize_pinned(sizeof(*seat->page));
    seat->stride = elements;
    about.page = (uint64_t)(uintptr_t)seat->page;
    if (shape->mixed) {
        uint32_t *groups = sanitize_pinned(32 * sizeof(*groups));
        for (uint32_t layer = 0; layer < 32; layer++)
            groups[layer] = layer % 2 ? 1u << FFN : shape->group;
        about.groups = (uint64_t)(uintptr_t)groups;
    }
    about.partial_bytes = up(elements * 4);
    seat->arena_rows = SANITIZE_ARENA;
    if (shape->device) {
        uint16_t *input = malloc(elements * 2);
        CHECK(input && ranks == 1);
        for (uint64_t i = 0; i < elements; i++)
            input[i] = sanitize_value(0, i);
        about.input = sanitize_device(elements * 2, input);
        free(input);
        seat->output_at = sanitize_device(elements * 2 - short_bytes, NULL);
        seat->arena[0] = sanitize_pinned(SANITIZE_ARENA);
        seat->arena_rows = seat->output_at - (uint64_t)(uintptr_t)seat->arena[0];
    } else {
        const uint64_t bytes = SANITIZE_ARENA + own + 2 * about.partial_bytes;
        seat->input = sanitize_pinned(elements * 2);
        about.input = (uint64_t)(uintptr_t)seat->input;
        for (uint32_t rank = 0; rank < ranks; rank++)
            seat->arena[rank] = sanitize_pinned(bytes);
    }
    for (uint32_t rank = 0; rank < ranks; rank++)
        about.arenas[rank] = (uint64_t)(uintptr_t)seat->arena[rank];
    about.output_offset = seat->arena_rows;
    about.partial_offset = SANITIZE_ARENA + own;
    if (!shape->direct && __builtin_popcount(shape->group) > 1) {
        seat->partials = sanitize_pinned(STAGE_HEADER_BYTES + 2 * elements * 4);
        about.partials[__builtin_ctz(shape->group)] = (uint64_t)(uintptr_t)seat->partials;
        about.partial_stride = elements;
    }
    seat->entry->about = about;
    seat->turn = 1;
    seat->entry->wanted = transport_slot_word(1, TRANSPORT_SLOT_ATTACHED);
}

static void table_make(uint64_t timeout_ns, uint32_t own_elements)
{
    table = sanitize_pinned(sizeof(*table));
    table->magic = STAGE_TABLE_MAGIC;
    table->instances = SEATS;
    table->ffn = FFN;
    table->submission_timeout_ns = timeout_ns;
    table->echo_lanes = 2;
    table->own_elements = own_elements;
    table->notes = 1;
    seat_count = 0;
}

/* The order is posted; whoever was there has gone when it is answered. */
static bool seat_order(seat_t *seat, uint32_t state)
{
    const uint32_t wanted = transport_slot_word(++seat->turn, state);
    PROTOCOL_STORE_RELEASE(&seat->entry->wanted, wanted);
    SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(&seat->entry->now) == wanted);
    return true;
}

/* The lines of ranks [from, to) of the next Invocation. */
static void seat_put(seat_t *seat, uint32_t from, uint32_t to)
{
    const shape_t *shape = seat->shape;
    for (uint32_t rank = from; rank < to; rank++) {
        stage_line_t value = {.sequence = seat->sequence,
                              .layer = seat->layer,
                              .rows = shape->rows[rank / shape->tp],
                              .kind = seat->layer % 2,
                              .dp_rows = {shape->rows[0], shape->rows[1]}};
        stage_line_fill(&seat->page->lines[rank], &value);
        stage_line_publish(&seat->page->lines[rank], &value);
    }
}

static float seat_input(const seat_t *seat, uint64_t i)
{
    return sanitize_float(sanitize_value(seat->input ? seat->sequence : 0, i));
}
/* What the other member of the group gives. */
static float seat_other(const seat_t *seat, uint64_t i)
{
    return (float)((i * 3 + seat->sequence) % 101) * 0.23f;
}

static bool seat_reduces(const seat_t *seat)
{
    return seat->partials && members_of(seat) > 1 && member_of(seat) == 0;
}

/* The other member's partial is there. */
static void seat_add(seat_t *seat)
{
    float *rows = (float *)((char *)seat->partials + STAGE_HEADER_BYTES) + seat->stride;
    for (uint64_t i = 0; i < (uint64_t)rows_of(seat) * seat->shape->hidden; i++)
        rows[i] = seat_other(seat, i);
    PROTOCOL_STORE_RELEASE(&seat->partials->ready[1].sequence, seat->sequence);
}

static void seat_ask(seat_t *seat, uint32_t layer)
{
    const uint64_t elements = (uint64_t)rows_of(seat) * seat->shape->hidden;
    seat->sequence += 1 + layer % 3; /* other layers are others' */
    seat->layer = layer;
    for (uint64_t i = 0; seat->input && i < elements; i++)
        seat->input[i] = sanitize_value(seat->sequence, i);
    seat_put(seat, 0, ranks_of(seat));
}

static bool seat_is_second(const seat_t *seat)
{
    return seat->partials && members_of(seat) > 1 && member_of(seat) == 1;
}

static bool seat_wait(const seat_t *seat)
{
    if (seat_is_second(seat)) {
        SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(&seat->partials->ready[1].sequence) == seat->sequence);
        return true;
    }
    for (uint32_t rank = 0; rank < ranks_of(seat); rank++)
        SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(word_of(seat, rank)) == seat->sequence);
    return true;
}

/* Element i of all rows, as this FfnAgent gives it. */
static float seat_own(const seat_t *seat, uint64_t i)
{
    const uint32_t member = member_of(seat);
    return seat_input(seat, i) * (float)(member + 1) + (member ? 0.0f : (float)seat->layer);
}

static bool seat_check(const seat_t *seat)
{
    const shape_t *shape = seat->shape;
    if (seat_is_second(seat)) {
        const float *rows =
            (const float *)((const char *)seat->partials + STAGE_HEADER_BYTES) + seat->stride;
        for (uint64_t i = 0; i < (uint64_t)rows_of(seat) * shape->hidden; i++)
            SANITIZE_MUST(rows[i] == seat_own(seat, i));
        return true;
    }
    for (uint32_t rank = 0; rank < ranks_of(seat) && !shape->device; rank++) {
        const uint64_t first = rank / shape->tp ? (uint64_t)shape->rows[0] * shape->hidden : 0;
        const uint64_t count = (uint64_t)shape->rows[rank / shape->tp] * shape->hidden;
        const char *base = (const char *)seat->arena[rank];
        const float *partial = (const float *)(base + seat->entry->about.partial_offset +
                                               member_of(seat) * seat->entry->about.partial_bytes);
        const uint16_t *output = (const uint16_t *)(base + seat->arena_rows);
        for (uint64_t i = 0; i < count; i++) {
            const float own = seat_own(seat, first + i);
            if (shape->direct)
                SANITIZE_MUST(partial[i] == own);
            else
                SANITIZE_MUST(
                    output[i] ==
                    sanitize_bf16(seat_reduces(seat) ? own + seat_other(seat, first + i) : own));
        }
    }
    return true;
}

static void check_device(const seat_t *seat)
{
    const uint64_t elements = (uint64_t)seat->shape->max_rows * seat->shape->hidden;
    const uint64_t asked = (uint64_t)rows_of(seat) * seat->shape->hidden;
    uint16_t *output = malloc(elements * 2);
    CHECK(output);
    sanitize_read(seat->output_at, output, elements * 2);
    for (uint64_t i = 0; i < elements; i++)
        CHECK(output[i] == (i < asked ? sanitize_bf16(seat_own(seat, i)) : 0));
    free(output);
}

/* ---- rounds --------------------------------------------------------------------------------- */
/* So many turns of the scheduler, as it tells now and then. */
static bool turns_pass(uint64_t turns)
{
    const volatile uint64_t *now = &table->counts.turns;
    const uint64_t begin = *now;
    SANITIZE_UNTIL(*now >= begin + turns);
    return true;
}

static bool rounds_script(void)
{
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < SEATS; i++)
            seat_ask(&seats[i], round * 5 + i % 2);
        for (uint32_t i = 0; i < SEATS; i++)
            if (!seat_reduces(&seats[i]) && !seat_wait(&seats[i]))
                return false;
        for (uint32_t i = 0; i < SEATS; i++) {
            if (!seat_reduces(&seats[i]))
                continue;
            if (!turns_pass(2 * STAGE_LOOK_TURNS))
                return false;
            for (uint32_t rank = 0; rank < ranks_of(&seats[i]); rank++)
                SANITIZE_MUST(*word_of(&seats[i], rank) != seats[i].sequence);
            seat_add(&seats[i]);
            if (!seat_wait(&seats[i]))
                return false;
        }
        for (uint32_t i = 0; i < SEATS; i++)
            if (!seat_check(&seats[i]))
                return false;
    }
    /* One goes, another comes to its place and begins anew. */
    seat_t *seat = &seats[3];
    if (!seat_order(seat, TRANSPORT_SLOT_EMPTY))
        return false;
    memset(seat->page, 0, sizeof(*seat->page));
    seat->sequence = 0;
    memset(seat->arena[0], 0, SANITIZE_ARENA);
    memset(seat->arena[1], 0, SANITIZE_ARENA);
    if (!seat_order(seat, TRANSPORT_SLOT_ATTACHED))
        return false;
    seat_ask(seat, 9);
    if (!seat_wait(seat) || !seat_check(seat))
        return false;
    /* More rows than the Instance may have: it alone is dropped. */
    seat = &seats[5];
    stage_line_t value = {.sequence = seat->sequence + 1, .layer = 1, .rows = 7, .dp_rows = {7}};
    stage_line_fill(&seat->page->lines[0], &value);
    stage_line_publish(&seat->page->lines[0], &value);
    SANITIZE_UNTIL(transport_slot_state(PROTOCOL_LOAD_ACQUIRE(&seat->entry->now)) ==
                   TRANSPORT_SLOT_DROPPED);
    SANITIZE_MUST(seat->entry->reason == XP_PEER && seat->arena[0]->closed == XP_PEER);
    PROTOCOL_STORE_RELEASE(&table->shutdown, 1u);
    return true;
}

/* life: whether the kernel is given the page of life words. */
static void run(bool (*script)(void), bool life)
{
    uint64_t life_at = life ? (uint64_t)(uintptr_t)sanitize_life : 0;
    void *parameters[] = {&table, &life_at};
    sanitize_play(script, SANITIZE_SCHEDULER, STAGE_THREADS, parameters);
    CHECK(table->running == 0);
}

static void rounds(uint32_t own_elements)
{
    table_make(20 * XP_NS_PER_S, own_elements);
    for (uint32_t i = 0; i < SEATS; i++)
        seat_make(&seats[i], &shapes[i], 0);
    run(rounds_script, true);
    for (uint32_t i = 0; i < SEATS; i++)
        if (shapes[i].device)
            check_device(&seats[i]);
    CHECK(table->failure.kind == STAGE_FAILURE_NONE && table->counts.dropped == 1);
    CHECK(table->counts.invocations == SEATS * ROUNDS + 1 && table->counts.abandoned == 0);
    CHECK(table->counts.lanes_peak >= 1 && table->counts.lanes_peak <= 2);
    sanitize_free();
    for (uint32_t i = 0; i < SEATS; i++)
        sanitize_case("scheduler, %u elements by its own warp: %s, %u Invocations", own_elements,
                      shapes[i].name, ROUNDS);
    sanitize_case("scheduler: a successor, nonsense, shutdown");
}

/* ---- other ends ----------------------------------------------------------------------------- */
static bool late_script(void)
{
    seats[0].sequence = 1;
    seats[0].layer = 3;
    seat_put(&seats[0], 0, 1); /* the second rank never comes */
    return true;
}
static bool disagree_script(void)
{
    seats[0].sequence = 1;
    seats[0].layer = 3;
    seat_put(&seats[0], 0, 1);
    seats[0].layer = 4;
    seat_put(&seats[0], 1, 2);
    return true;
}
static bool life_script(void)
{
    seat_ask(&seats[0], 3);
    if (!seat_wait(&seats[0]) || !seat_check(&seats[0]))
        return false;
    life_word_end(&sanitize_life->word[0]);
    return true;
}
static bool stop_script(void)
{
    seat_ask(&seats[0], 3);
    if (!seat_wait(&seats[0]))
        return false;
    PROTOCOL_STORE_RELEASE(&table->stop, 1u);
    return true;
}
static bool closed_script(void)
{
    seats[0].sequence = 1;
    seats[0].layer = 3;
    seat_put(&seats[0], 0, 1);
    mailbox_close(seats[0].arena[1], XP_CANCELLED); /* by who would have been the second rank */
    SANITIZE_UNTIL(transport_slot_state(PROTOCOL_LOAD_ACQUIRE(&seats[0].entry->now)) ==
                   TRANSPORT_SLOT_DROPPED);
    SANITIZE_MUST(seats[0].entry->reason == XP_CANCELLED);
    PROTOCOL_STORE_RELEASE(&table->stop, 1u);
    return true;
}

static void end_by(const char *name, bool (*script)(void), bool life, uint64_t timeout_ns,
                   uint32_t kind)
{
    table_make(timeout_ns, 4096);
    seat_make(&seats[0], &shapes[3], 0);
    run(script, life);
    const stage_failure_t *failure = &table->failure;
    CHECK(failure->kind == kind);
    if (kind == STAGE_FAILURE_RANK)
        CHECK(failure->a == 0 && failure->b == 1 && failure->sequence_a == 1 &&
              failure->layer_a == 3 && failure->waited_ns >= timeout_ns &&
              failure->status == XP_TIMEOUT);
    if (kind == STAGE_FAILURE_DISAGREE)
        CHECK(failure->layer_a + failure->layer_b == 7 && failure->a != failure->b);
    sanitize_life->word[0] = 0;
    sanitize_free();
    sanitize_case("scheduler: %s", name);
}

void sanitize_scheduler(void)
{
    rounds(4096);
    rounds(0);
    end_by("a rank that does not come", late_script, true, 20 * XP_NS_PER_MS, STAGE_FAILURE_RANK);
    end_by("ranks that disagree", disagree_script, true, 20 * XP_NS_PER_S, STAGE_FAILURE_DISAGREE);
    end_by("its process ends", life_script, true, 20 * XP_NS_PER_S, STAGE_FAILURE_NONE);
    end_by("stop, without life words", stop_script, false, 20 * XP_NS_PER_S, STAGE_FAILURE_NONE);
    end_by("an Instance closes", closed_script, true, 20 * XP_NS_PER_S, STAGE_FAILURE_NONE);
}

/* ---- planted -------------------------------------------------------------------------------- */
static bool short_script(void)
{
    seat_ask(&seats[0], 3);
    const bool answered = seat_wait(&seats[0]);
    PROTOCOL_STORE_RELEASE(&table->stop, 1u);
    return answered;
}

void sanitize_short_rows(void)
{
    table_make(20 * XP_NS_PER_S, 4096);
    seat_make(&seats[0], &shapes[0], 16);
    uint64_t life_at = (uint64_t)(uintptr_t)sanitize_life;
    void *parameters[] = {&table, &life_at};
    bool good;
    const xp_status_t status =
        sanitize_try(short_script, SANITIZE_SCHEDULER, STAGE_THREADS, parameters, &good);
    printf("planted-rows: the launch %s\n", status == XP_OK ? "ended" : "failed");
}
