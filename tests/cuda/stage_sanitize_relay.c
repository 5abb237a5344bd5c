/* SPDX-License-Identifier: MIT */
/*
 * The relay: a script of the host plays the Instances, whose requests it writes into their arenas,
 * and the FfnAgents, whose stages the relay fills and who answer into its relay arenas.
 */
#include <stddef.h>
#include <string.h>

#include "ffn/cuda/tables.h"
#include "stage/relay.h"
#include "stage_sanitize.h"

#define LAYERS  16u
#define ROUNDS  4u
#define MEMBERS 3u /* FfnAgents at most */
#define PLACES  32u

typedef struct shape {
    const char *name;
    uint32_t group, direct, tp, dp, rank;
    uint32_t hidden, max_rows, rows;
    uint32_t device; /* rows lie in device memory, whose end is theirs */
    uint32_t mixed;  /* odd layers are FfnAgent 1's alone */
    uint32_t odd;    /* rows begin one element off 16 bytes */
} shape_t;

static const shape_t shapes[] = {
    {"complete", 1, 0, 1, 1, 0, 1000, 9, 9, 1, 0, 0},
    {"2 partials", 3, 1, 1, 1, 0, 1000, 4, 3, 1, 0, 0},
    {"complete, 2 members", 5, 0, 1, 1, 0, 64, 6, 5, 0, 0, 0},
    {"3 partials, odd width", 7, 1, 1, 1, 0, 33, 5, 5, 0, 0, 0},
    {"attention DP, second rank", 2, 0, 1, 2, 1, 72, 4, 3, 0, 0, 0},
    {"attention TP, second rank", 3, 1, 2, 1, 1, 64, 4, 4, 0, 0, 0},
    {"groups by layer, off alignment", 3, 1, 1, 1, 0, 64, 3, 3, 0, 1, 1},
};
#define SLOTS (sizeof(shapes) / sizeof(shapes[0]))

typedef struct slot {
    const shape_t *shape;
    mailbox_arena_t *arena, *answers; /* the Instance's, the relay's */
    stage_page_t *page[MEMBERS];
    uint16_t *input, *output, *stage[MEMBERS], *complete; /* NULL: in device memory */
    float *partials;
    cuda_address_t input_at, output_at, stage_at[MEMBERS], complete_at, partials_at;
    uint64_t stride, sequence;
    uint32_t layer, dp_rows[2];
} slot_t;

static transport_resident_t *table;
static slot_t slots[SLOTS];
static cuda_address_t context;
static ffn_cuda_record_place_t *places;

static uint32_t group_of(const slot_t *s)
{
    return s->shape->mixed && s->layer % 2 ? 2 : s->shape->group;
}
static bool is_direct(const slot_t *s)
{
    return s->shape->direct && __builtin_popcount(group_of(s)) > 1;
}

/* What the FfnAgents answer with. */
static uint16_t complete_value(const slot_t *s, uint64_t i)
{
    return kit_value(s->shape->device ? 0 : s->sequence + 50, i);
}
static float partial_value(const slot_t *s, uint32_t member, uint64_t i)
{
    return sanitize_partial(s->shape->device ? 0 : s->sequence, member, i);
}
static uint16_t input_value(const slot_t *s, uint64_t i)
{
    return kit_value(s->shape->device ? 1 : s->sequence, i);
}

/* Rows: pinned, or in device memory with what they hold for good. */
static void *rows_make(const slot_t *s, uint64_t elements, uint32_t odd, cuda_address_t *at_out)
{
    if (s->shape->device) {
        *at_out = sanitize_device(elements * 2, NULL);
        return NULL;
    }
    uint16_t *rows = (uint16_t *)sanitize_pinned((elements + odd) * 2) + odd;
    *at_out = (cuda_address_t)(uintptr_t)rows;
    return rows;
}

static void partials_make(slot_t *s, uint32_t members)
{
    const uint64_t bytes = members * s->stride * sizeof(float);
    s->partials = s->shape->device ? malloc(bytes) : sanitize_pinned(bytes);
    CHECK(s->partials);
    s->partials_at = (cuda_address_t)(uintptr_t)s->partials;
    if (!s->shape->device)
        return;
    for (uint32_t m = 0; m < members; m++)
        for (uint64_t i = 0; i < s->stride; i++)
            s->partials[m * s->stride + i] = partial_value(s, m, i);
    s->partials_at = sanitize_device(bytes, s->partials);
    free(s->partials);
    s->partials = NULL;
}

static void write_rows(const slot_t *s, cuda_address_t at, uint64_t elements,
                       uint16_t (*value)(const slot_t *s, uint64_t i))
{
    uint16_t *rows = malloc(elements * 2);
    CHECK(rows);
    for (uint64_t i = 0; i < elements; i++)
        rows[i] = value(s, i);
    kit_write(&sanitize_kit, at, rows, elements * 2);
    free(rows);
}

/* Describes the slot as an AtnAgent does, by a launch, before the relay runs. */
static void slot_make(slot_t *s, uint32_t index, const shape_t *shape)
{
    const uint64_t elements = (uint64_t)shape->max_rows * shape->hidden;
    const uint32_t members = (uint32_t)__builtin_popcount(shape->group);
    *s = (slot_t){.shape = shape, .stride = elements};
    s->arena = sanitize_pinned(SANITIZE_ARENA);
    s->answers = sanitize_pinned(SANITIZE_ARENA);
    memset(s->answers, 0xee, SANITIZE_ARENA); /* an earlier Instance's */
    s->input = rows_make(s, elements, shape->odd, &s->input_at);
    s->output = rows_make(s, elements, 0, &s->output_at);
    s->complete = rows_make(s, elements, shape->odd, &s->complete_at);
    partials_make(s, members);
    stage_relay_slot_t value = {.uniform = shape->mixed ? 0 : shape->group,
                                .layers = LAYERS,
                                .hidden = shape->hidden,
                                .dtype = FFN_CUDA_BF16,
                                .tp = shape->tp,
                                .dp = shape->dp,
                                .rank = shape->rank,
                                .direct = shape->direct,
                                .instance = index + 10,
                                .observed = 1,
                                .arena = (uint64_t)(uintptr_t)s->answers,
                                .output = s->complete_at,
                                .partial = s->partials_at,
                                .partial_stride = elements};
    if (shape->mixed) {
        uint32_t *groups = sanitize_pinned(LAYERS * sizeof(*groups));
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            groups[layer] = layer % 2 ? 2 : shape->group;
        value.groups = (uint64_t)(uintptr_t)groups;
    }
    for (uint32_t left = shape->group; left; left &= left - 1) {
        const uint32_t f = (uint32_t)__builtin_ctz(left);
        s->page[f] = sanitize_pinned(sizeof(stage_page_t));
        s->stage[f] = rows_make(s, elements * shape->dp, 0, &s->stage_at[f]);
        value.line[f] = (uint64_t)(uintptr_t)&s->page[f]->lines[shape->rank];
        value.input[f] = s->stage_at[f];
    }
    if (shape->device) {
        write_rows(s, s->input_at, elements, input_value);
        write_rows(s, s->complete_at, elements, complete_value);
    }
    mailbox_arena_t header = {.magic = MAILBOX_MAGIC, .abi = MAILBOX_ABI, .hidden = shape->hidden};
    cuda_address_t slot_at = context + offsetof(stage_relay_t, slot) + index * sizeof(value);
    cuda_address_t clock_at = context + offsetof(stage_relay_t, clock_ns);
    void *parameters[] = {&slot_at, &value, &header, &clock_at};
    sanitize_launch(SANITIZE_RELAY_DESCRIBE, 1, 32, parameters);
    CHECK(memcmp(s->answers, &header, sizeof(header)) == 0);
    for (uint32_t m = 0; m < MAILBOX_MAX_PARTIALS; m++)
        CHECK(mailbox_partial_at(s->answers, m)->sequence == 0);
    transport_slot_t *slot = &table->slot[index];
    slot->hidden = shape->hidden;
    slot->max_rows = shape->max_rows;
    slot->dp_size = shape->dp;
    slot->life = 1 + index;
    slot->arena = (uint64_t)(uintptr_t)s->arena;
    slot->row_bytes = shape->hidden * 2;
    slot->input_offset = s->input_at - slot->arena;
    slot->output_offset = s->output_at - slot->arena;
    slot->wanted = transport_slot_word(1, TRANSPORT_SLOT_ATTACHED);
}

static void make(void)
{
    stage_relay_t relay = {0};
    table = sanitize_pinned(sizeof(*table));
    table->magic = TRANSPORT_RESIDENT_MAGIC;
    table->slots = SLOTS;
    places = sanitize_pinned(PLACES * sizeof(*places));
    relay.counters.records = places;
    relay.counters.record_capacity = PLACES;
    context = sanitize_device(sizeof(relay), &relay);
    for (uint32_t i = 0; i < SLOTS; i++)
        slot_make(&slots[i], i, &shapes[i]);
}

/* ---- script --------------------------------------------------------------------------------- */
static void request(slot_t *s, uint32_t layer)
{
    const shape_t *shape = s->shape;
    mailbox_request_t *record = &s->arena->request;
    s->sequence++;
    s->layer = layer;
    s->dp_rows[0] = shape->dp > 1 ? shape->max_rows - 1 : shape->rows;
    s->dp_rows[1] = shape->dp > 1 ? shape->rows : 0;
    for (uint64_t i = 0; s->input && i < (uint64_t)shape->rows * shape->hidden; i++)
        s->input[i] = input_value(s, i);
    record->slo_deadline_ns = 99;
    record->layer = layer;
    record->rows = shape->rows;
    record->kind = layer % 3;
    record->dp_rows[0] = s->dp_rows[0];
    record->dp_rows[1] = s->dp_rows[1];
    mailbox_request_publish(s->arena, s->sequence);
}

/* Until the stages have it; what they have. */
static bool arrived(const slot_t *s)
{
    const shape_t *shape = s->shape;
    const uint64_t before = shape->rank / shape->tp ? (uint64_t)s->dp_rows[0] * shape->hidden : 0;
    for (uint32_t left = group_of(s); left; left &= left - 1) {
        const uint32_t f = (uint32_t)__builtin_ctz(left);
        const uint64_t *brief = &s->page[f]->briefs[shape->rank].word;
        SANITIZE_UNTIL((uint32_t)PROTOCOL_LOAD_ACQUIRE(brief) == (uint32_t)s->sequence);
        const stage_line_t *line = &s->page[f]->lines[shape->rank];
        SANITIZE_MUST(line->sequence == s->sequence && line->layer == s->layer);
        SANITIZE_MUST(line->rows == shape->rows && line->kind == s->layer % 3);
        SANITIZE_MUST(line->slo_deadline_ns == 99 && line->dp_rows[2] == 0);
        SANITIZE_MUST(line->dp_rows[0] == s->dp_rows[0] && line->dp_rows[1] == s->dp_rows[1]);
        for (uint64_t i = 0; s->stage[f] && i < (uint64_t)shape->rows * shape->hidden; i++)
            SANITIZE_MUST(s->stage[f][before + i] ==
                          (shape->rank % shape->tp ? 0 : input_value(s, i)));
    }
    return true;
}

static void answer(const slot_t *s)
{
    const uint64_t elements = (uint64_t)s->shape->rows * s->shape->hidden;
    if (!is_direct(s)) {
        for (uint64_t i = 0; s->complete && i < elements; i++)
            s->complete[i] = complete_value(s, i);
        PROTOCOL_STORE_RELEASE(&s->answers->response.sequence, s->sequence);
        return;
    }
    /* The last one first. */
    for (uint32_t m = (uint32_t)__builtin_popcount(group_of(s)); m-- > 0;) {
        for (uint64_t i = 0; s->partials && i < elements; i++)
            s->partials[m * s->stride + i] = partial_value(s, m, i);
        PROTOCOL_STORE_RELEASE(&mailbox_partial_at(s->answers, m)->sequence, s->sequence);
    }
}

static uint16_t wanted(const slot_t *s, uint64_t i)
{
    float sum = partial_value(s, 0, i);
    for (uint32_t m = 1; m < (uint32_t)__builtin_popcount(group_of(s)); m++)
        sum += partial_value(s, m, i);
    return is_direct(s) ? sanitize_bf16(sum) : complete_value(s, i);
}

static bool answered(const slot_t *s, uint32_t status)
{
    SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(&s->arena->response.sequence) == s->sequence);
    SANITIZE_MUST(s->arena->response.status == status);
    for (uint64_t i = 0;
         status == XP_OK && s->output && i < (uint64_t)s->shape->rows * s->shape->hidden; i++)
        SANITIZE_MUST(s->output[i] == wanted(s, i));
    return true;
}

static bool rounds_script(void)
{
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < SLOTS; i++)
            request(&slots[i], round * 3 + i % 2);
        for (uint32_t i = 0; i < SLOTS; i++)
            if (!arrived(&slots[i]))
                return false;
        for (uint32_t i = SLOTS; i-- > 0;)
            answer(&slots[i]);
        for (uint32_t i = 0; i < SLOTS; i++)
            if (!answered(&slots[i], XP_OK))
                return false;
    }
    /* A layer that is none is refused, a closed relay arena says why; the Instance's arena is
     * detached at the end. */
    request(&slots[2], LAYERS);
    if (!answered(&slots[2], XP_INVALID))
        return false;
    request(&slots[3], 2);
    if (!arrived(&slots[3]))
        return false;
    mailbox_close(slots[3].answers, XP_FATAL);
    if (!answered(&slots[3], XP_FATAL))
        return false;
    const uint32_t word = transport_slot_word(2, TRANSPORT_SLOT_EMPTY);
    PROTOCOL_STORE_RELEASE(&table->slot[4].wanted, word);
    SANITIZE_UNTIL(PROTOCOL_LOAD_ACQUIRE(&table->slot[4].now) == word);
    PROTOCOL_STORE_RELEASE(&table->stop, 1u);
    return true;
}

/* Our process ends while a request is in flight. */
static bool life_script(void)
{
    request(&slots[2], 2);
    if (!arrived(&slots[2]))
        return false;
    life_word_end(&sanitize_life->word[0]);
    return true;
}

static void check_device(slot_t *s)
{
    const uint64_t elements = (uint64_t)s->shape->max_rows * s->shape->hidden;
    const uint64_t asked = (uint64_t)s->shape->rows * s->shape->hidden;
    uint16_t *rows = malloc(elements * 2);
    CHECK(rows);
    sanitize_read(s->output_at, rows, elements * 2);
    for (uint64_t i = 0; i < elements; i++)
        CHECK(rows[i] == (i < asked ? wanted(s, i) : 0));
    for (uint32_t left = s->shape->group; left; left &= left - 1) {
        sanitize_read(s->stage_at[__builtin_ctz(left)], rows, elements * 2);
        for (uint64_t i = 0; i < elements; i++)
            CHECK(rows[i] == (i < asked ? input_value(s, i) : 0));
    }
    free(rows);
}

static void check_records(uint64_t count)
{
    stage_relay_t relay;
    sanitize_read(context, &relay, sizeof(relay));
    CHECK(relay.counters.invocations == count && relay.counters.records_taken == count);
    CHECK(relay.clock_ns > 0);
    for (uint64_t i = 0; i < count; i++)
        CHECK(places[i % PLACES].index == i + 1);
}

static void run(bool (*script)(void))
{
    uint64_t life = (uint64_t)(uintptr_t)sanitize_life;
    void *parameters[] = {&table, &life, &context};
    sanitize_play(script, SANITIZE_RELAY, (uint32_t)(SLOTS + 1) * 32, parameters);
    CHECK(table->running == 0);
}

void sanitize_relay(void)
{
    make();
    run(rounds_script);
    for (uint32_t i = 0; i < SLOTS; i++) {
        const uint64_t more = i == 2 || i == 3;
        if (shapes[i].device)
            check_device(&slots[i]);
        CHECK(table->slot[i].requests == ROUNDS + more);
        CHECK(table->slot[i].total_rows == (ROUNDS + more) * shapes[i].rows);
        sanitize_case("relay: %s, %u requests", shapes[i].name, ROUNDS);
    }
    check_records(SLOTS * ROUNDS);
    sanitize_case("relay: a layer too many, a closed relay arena, a detach, stop");
    sanitize_free();
    make();
    run(life_script);
    CHECK(slots[2].arena->response.sequence == 0);
    sanitize_life->word[0] = 0;
    sanitize_free();
    sanitize_case("relay: its process ends");
}
