/* SPDX-License-Identifier: MIT */
/*
 * An Instance Rank's kernels, each delivery and each end of a wait, and those by which hosts reach
 * device words. Nothing is mapped larger than it is used: rows, lines, arena and state are
 * allocations of their own.
 */
#include <stddef.h>
#include <string.h>

#include "stage_sanitize.h"
#include "ffn/cuda/tables.h"
#include "stage/table.h"

#define RANK    3u    /* whose line it is */
#define UNKNOWN 0xeeu /* what nobody has written */

typedef struct delivery {
    const char *name;
    uint32_t targets, partials; /* stages; members that answer with a partial, or 0: the response */
    uint32_t relayed;           /* into the arena */
    uint32_t dp, dp_size, carries;
    uint32_t hidden, captured, rows;
    uint32_t dtype;
    uint32_t odd; /* tensors begin one element off */
    uint32_t blocks, threads;
} delivery_t;

static const delivery_t deliveries[] = {
    {"direct, 1 member", 1, 0, 0, 0, 1, 1, 64, 3, 3, FFN_CUDA_BF16, 0, 1, 256},
    {"direct, 1 member, padded, many blocks", 1, 0, 0, 0, 1, 1, 1000, 40, 23, FFN_CUDA_BF16, 0, 5,
     512},
    {"direct, 1 member, off alignment", 1, 0, 0, 0, 1, 1, 72, 9, 9, FFN_CUDA_F16, 1, 3, 64},
    {"direct, 2 members, complete", 2, 0, 0, 0, 1, 1, 1000, 9, 8, FFN_CUDA_BF16, 0, 3, 128},
    {"direct, 2 members, partials", 2, 2, 0, 0, 1, 1, 1000, 16, 16, FFN_CUDA_BF16, 0, 2, 512},
    {"direct, 2 members, partials, F16, off alignment", 2, 2, 0, 0, 1, 1, 64, 5, 4, FFN_CUDA_F16, 1,
     1, 256},
    {"direct, 3 members, partials, odd width", 3, 3, 0, 0, 1, 1, 1001, 4, 4, FFN_CUDA_BF16, 0, 2,
     96},
    {"direct, attention DP, second rank", 2, 2, 0, 1, 2, 1, 72, 8, 5, FFN_CUDA_BF16, 0, 2, 256},
    {"direct, attention DP, odd width", 1, 0, 0, 1, 2, 1, 1001, 3, 2, FFN_CUDA_BF16, 0, 2, 256},
    {"direct, attention TP, second rank", 1, 0, 0, 0, 1, 0, 64, 6, 6, FFN_CUDA_BF16, 0, 1, 256},
    {"direct, no rows", 2, 0, 0, 0, 1, 1, 64, 4, 0, FFN_CUDA_BF16, 0, 1, 256},
    {"relay", 1, 0, 1, 0, 1, 1, 1000, 9, 7, FFN_CUDA_BF16, 0, 2, 512},
    {"relay, attention DP", 1, 0, 1, 1, 2, 1, 64, 4, 4, FFN_CUDA_BF16, 0, 1, 256},
};

/* All that one delivery uses. */
typedef struct scene {
    const delivery_t *d;
    cuda_address_t page[3], stage[3], arena, output, partial, state, live, in, out;
    stage_put_t put;
    stage_take_t take;
    transport_patience_t patience;
    transport_live_t record;
    uint64_t row_bytes, stage_bytes, tensor_bytes, elements; /* elements: of the captured rows */
    uint32_t direct;
} scene_t;

static transport_patience_t patience_of(uint64_t limit_ns)
{
    uint32_t *notice = sanitize_pinned(sizeof(*notice));
    return (transport_patience_t){.life = (uint64_t)(uintptr_t)&sanitize_life->word[0],
                                  .notice = (uint64_t)(uintptr_t)notice,
                                  .limit_ns = limit_ns,
                                  .pause_ns = limit_ns};
}

static void scene_make(const delivery_t *d, scene_t *s)
{
    const uint32_t slots = d->dp_size * d->captured;
    *s = (scene_t){.d = d, .patience = patience_of(10 * XP_NS_PER_S)};
    s->row_bytes = d->hidden * 2;
    s->elements = (uint64_t)d->captured * d->hidden;
    s->tensor_bytes = s->elements * 2 + d->odd * 2;
    s->stage_bytes = d->relayed ? s->elements * 2 : slots * s->row_bytes;
    s->record = (transport_live_t){.rows = d->rows, .kind = 1, .slo_deadline_ns = 77};
    for (uint32_t i = 0; i < d->dp_size; i++)
        s->record.dp_rows[i] = i == d->dp ? d->rows : d->captured - 1;
    s->arena = sanitize_device(SANITIZE_ARENA, NULL);
    s->output = sanitize_device(s->elements * 2, NULL);
    if (d->partials)
        s->partial = sanitize_device(d->partials * s->elements * 4, NULL);
    s->state = sanitize_device(sizeof(transport_device_state_t), NULL);
    s->live = sanitize_device(sizeof(s->record), &s->record);
    s->in = sanitize_device(s->tensor_bytes, NULL) + d->odd * 2;
    s->out = sanitize_device(s->tensor_bytes, NULL) + d->odd * 2;
    s->put = (stage_put_t){.count = d->targets,
                           .captured = d->captured,
                           .dp = d->dp,
                           .dp_size = d->dp_size,
                           .carries = d->carries,
                           .relayed = d->relayed,
                           .gathered = !d->relayed,
                           .max_rows = d->captured,
                           .row_bytes = s->row_bytes};
    for (uint32_t t = 0; t < d->targets; t++) {
        s->page[t] = d->relayed ? s->arena : sanitize_device(sizeof(stage_page_t), NULL);
        s->stage[t] = sanitize_device(s->stage_bytes, NULL);
        s->put.targets[t].line =
            s->page[t] + (d->relayed ? offsetof(mailbox_arena_t, request)
                                     : offsetof(stage_page_t, lines) + RANK * sizeof(stage_line_t));
        s->put.targets[t].input = s->stage[t];
    }
    s->take = (stage_take_t){.output = s->output,
                             .partial = s->partial,
                             .partial_stride = s->elements,
                             .members = d->partials,
                             .dtype = d->dtype,
                             .narrow = d->hidden % 8 != 0,
                             .captured = d->captured,
                             .row_bytes = s->row_bytes};
    s->direct = ((1u << d->partials) - 1) | (d->relayed ? STAGE_ANSWER_STATUS : 0);
}

/* Rows that nobody has written yet, and input rows of their own for each turn. */
static void turn_begin(scene_t *s, uint32_t turn)
{
    static uint8_t unknown[1 << 18];
    uint16_t *in = malloc(s->elements * 2);
    CHECK(in && s->stage_bytes <= sizeof(unknown) && s->tensor_bytes <= sizeof(unknown));
    memset(unknown, UNKNOWN, sizeof(unknown));
    for (uint32_t t = 0; t < s->d->targets; t++)
        kit_write(&sanitize_kit, s->stage[t], unknown, s->stage_bytes);
    kit_write(&sanitize_kit, s->out, unknown, s->elements * 2);
    for (uint64_t i = 0; i < s->elements; i++)
        in[i] = kit_value(turn, i);
    kit_write(&sanitize_kit, s->in, in, s->elements * 2);
    s->put.layer = 5 + turn;
    free(in);
}

static void check_stages(const scene_t *s, uint32_t turn, uint64_t sequence)
{
    const delivery_t *d = s->d;
    uint8_t *stage = malloc(s->stage_bytes);
    CHECK(stage);
    uint64_t from = 0, bytes = d->carries ? d->rows * s->row_bytes : 0;
    for (uint32_t i = 0; i < d->dp && !d->relayed; i++)
        from += s->record.dp_rows[i] * s->row_bytes;
    for (uint32_t t = 0; t < d->targets; t++) {
        sanitize_read(s->stage[t], stage, s->stage_bytes);
        for (uint64_t b = 0; b < s->stage_bytes; b += 2) {
            uint16_t got, want = UNKNOWN << 8 | UNKNOWN;
            memcpy(&got, stage + b, 2);
            if (b >= from && b < from + bytes)
                want = kit_value(turn, (b - from) / 2);
            CHECK(got == want);
        }
        stage_line_t line;
        uint64_t brief;
        sanitize_read(s->put.targets[t].line, &line, sizeof(line));
        CHECK(line.sequence == sequence && line.layer == 5 + turn && line.rows == d->rows);
        CHECK(line.kind == 1 && line.slo_deadline_ns == 77);
        for (uint32_t i = 0; i < MAILBOX_MAX_DP; i++)
            CHECK(line.dp_rows[i] == (d->dp_size > 1 ? s->record.dp_rows[i] : i ? 0 : d->rows));
        if (d->relayed)
            continue;
        /* 10 bits of layer, 17 of rows, 2 of kind; all of it in the line where ranks differ. */
        const uint64_t low = sequence & 0xffffffffu;
        const uint64_t want =
            line.rows == line.dp_rows[0]
                ? low | (uint64_t)(5 + turn) << 32 | (uint64_t)d->rows << 42 | (uint64_t)1 << 59
                : low | (uint64_t)1 << 63;
        sanitize_read(s->page[t] + offsetof(stage_page_t, briefs) + RANK * MAILBOX_LINE, &brief, 8);
        CHECK(brief == want);
    }
    free(stage);
}

static void answer(const scene_t *s, uint32_t turn, uint64_t sequence)
{
    const delivery_t *d = s->d;
    if (d->partials) {
        float *partials = malloc(d->partials * s->elements * 4);
        CHECK(partials);
        for (uint32_t m = 0; m < d->partials; m++)
            for (uint64_t i = 0; i < s->elements; i++)
                partials[m * s->elements + i] = sanitize_partial(turn, m, i);
        kit_write(&sanitize_kit, s->partial, partials, d->partials * s->elements * 4);
        free(partials);
        for (uint32_t m = 0; m < d->partials; m++)
            kit_write(&sanitize_kit,
                      s->arena + MAILBOX_PARTIALS_START + m * sizeof(mailbox_partial_t), &sequence,
                      8);
        return;
    }
    uint16_t *rows = malloc(s->elements * 2);
    CHECK(rows);
    for (uint64_t i = 0; i < s->elements; i++)
        rows[i] = kit_value(turn + 100, i);
    kit_write(&sanitize_kit, s->output, rows, s->elements * 2);
    kit_write(&sanitize_kit, s->arena + offsetof(mailbox_arena_t, response), &sequence, 8);
    free(rows);
}

static uint16_t rounded(float value, uint32_t dtype)
{
    if (dtype == FFN_CUDA_BF16)
        return sanitize_bf16(value);
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof(bits));
    return bits;
}

static void check_output(const scene_t *s, uint32_t turn)
{
    const delivery_t *d = s->d;
    uint16_t *out = malloc(s->elements * 2);
    CHECK(out);
    sanitize_read(s->out, out, s->elements * 2);
    for (uint64_t i = 0; i < s->elements; i++) {
        uint16_t want = kit_value(turn + 100, i);
        float sum = sanitize_partial(turn, 0, i);
        for (uint32_t m = 1; m < d->partials; m++)
            sum += sanitize_partial(turn, m, i);
        if (i >= (uint64_t)d->rows * d->hidden)
            want = UNKNOWN << 8 | UNKNOWN;
        else if (d->partials)
            want = rounded(sum, d->dtype);
        CHECK(out[i] == want);
    }
    free(out);
}

static void check_state(const scene_t *s, uint64_t sequence, uint64_t requests)
{
    transport_device_state_t state;
    sanitize_read(s->state, &state, sizeof(state));
    CHECK(state.status == XP_OK && state.phase == TRANSPORT_PHASE_IDLE && state.arrived == 0);
    CHECK(state.sequence == sequence && state.requests == requests && state.looks >= requests);
    CHECK(state.total_rows == requests * s->d->rows);
}

static void call(scene_t *s, uint32_t threads)
{
    void *parameters[] = {&s->put, &s->take, &s->arena,  &s->state,   &s->live,
                          &s->in,  &s->out,  &s->direct, &s->patience};
    sanitize_launch(SANITIZE_CALL, 1, threads, parameters);
}

static void deliver(const delivery_t *d)
{
    scene_t s;
    const uint64_t first = 6; /* the sequence before */
    scene_make(d, &s);
    transport_device_state_t state = {.sequence = first};
    kit_write(&sanitize_kit, s.state, &state, sizeof(state));
    for (uint32_t turn = 0; turn < 3; turn++) {
        const uint64_t sequence = first + 1 + turn;
        turn_begin(&s, turn);
        if (turn == 0) {
            void *put[] = {&s.put, &s.state, &s.live, &s.in};
            void *wait[] = {&s.arena, &s.state, &s.direct, &s.patience};
            void *take[] = {&s.take, &s.state, &s.out};
            sanitize_launch(SANITIZE_PUT, d->blocks, d->threads, put);
            check_stages(&s, turn, sequence);
            answer(&s, turn, sequence);
            sanitize_launch(SANITIZE_WAIT, 1, 32, wait);
            sanitize_launch(SANITIZE_TAKE, d->blocks, d->threads, take);
        } else {
            answer(&s, turn, sequence);
            call(&s, turn == 1 ? 256 : 1024);
            check_stages(&s, turn, sequence);
        }
        check_output(&s, turn);
        check_state(&s, sequence, turn + 1);
    }
    sanitize_free();
    sanitize_case("%s: %u rows of %u", d->name, d->rows, d->hidden);
}

/* ---- ends of a wait ------------------------------------------------------------------------- */
typedef struct ending {
    const char *name;
    uint32_t direct, response, partial, answer; /* last sequences of: response, first partial */
    uint32_t closed, ended, notice;
    uint32_t status, phase; /* wanted */
} ending_t;

#define LIVE_SEQUENCE 5u

static const ending_t endings[] = {
    {"answered before", .response = 5, .phase = TRANSPORT_PHASE_ANSWERED},
    {"both partials before", .direct = 1, .partial = 5, .phase = TRANSPORT_PHASE_ANSWERED},
    {"answered, then closed", .response = 5, .closed = XP_FATAL, .phase = TRANSPORT_PHASE_ANSWERED},
    {"closed", .response = 4, .closed = XP_FATAL, .status = XP_FATAL,
     .phase = TRANSPORT_PHASE_LIVE},
    {"closed for no reason that exists", .closed = 9999, .status = XP_PEER,
     .phase = TRANSPORT_PHASE_LIVE},
    {"closed with one of two partials", .direct = 3, .partial = 5, .closed = XP_CLOSED,
     .status = XP_CLOSED, .phase = TRANSPORT_PHASE_LIVE},
    {"no answer within the patience", .response = 4, .status = XP_TIMEOUT,
     .phase = TRANSPORT_PHASE_LIVE},
    {"one of two partials within the patience", .direct = 3, .partial = 5, .status = XP_TIMEOUT,
     .phase = TRANSPORT_PHASE_LIVE},
    {"the process has ended", .ended = 1, .status = XP_CANCELLED, .phase = TRANSPORT_PHASE_LIVE},
    {"notice of the end", .notice = TRANSPORT_NOTICE_END | XP_FATAL, .status = XP_FATAL,
     .phase = TRANSPORT_PHASE_LIVE},
    {"a pause that lasts", .notice = 1, .status = XP_TIMEOUT, .phase = TRANSPORT_PHASE_LIVE},
    {"an answer that is too new", .response = 6, .status = XP_PEER, .phase = TRANSPORT_PHASE_LIVE},
    {"refused by the relay", .direct = STAGE_ANSWER_STATUS, .response = 5, .answer = XP_INVALID,
     .status = XP_INVALID, .phase = TRANSPORT_PHASE_IDLE},
};

static void check_ending(const ending_t *e, const scene_t *s)
{
    transport_device_state_t state;
    uint16_t out[256];
    CHECK(s->elements <= 256);
    sanitize_read(s->state, &state, sizeof(state));
    sanitize_read(s->out, out, s->elements * 2);
    CHECK(state.status == e->status && state.sequence == LIVE_SEQUENCE && state.looks > 0);
    /* take has followed */
    CHECK(state.phase ==
          (e->phase == TRANSPORT_PHASE_ANSWERED ? (uint32_t)TRANSPORT_PHASE_IDLE : e->phase));
    for (uint64_t i = 0; i < s->elements; i++)
        CHECK((out[i] == 0xffff) == (e->status != XP_OK));
}

static void end_wait(const ending_t *e)
{
    static const delivery_t plain = {"", 1, 0, 0, 0, 1, 1, 64, 2, 2, FFN_CUDA_BF16, 0, 2, 64};
    static const delivery_t with_partial = {"", 1, 1, 0, 0, 1, 1, 64, 2, 2, FFN_CUDA_BF16,
                                            0,  2, 64};
    scene_t s;
    scene_make(e->direct & STAGE_ANSWER_MEMBERS ? &with_partial : &plain, &s);
    mailbox_arena_t header = {.closed = e->closed};
    const uint64_t partial = e->partial;
    header.response.sequence = e->response;
    header.response.status = e->answer;
    kit_write(&sanitize_kit, s.arena, &header, sizeof(header));
    kit_write(&sanitize_kit, s.arena + MAILBOX_PARTIALS_START, &partial, sizeof(partial));
    s.patience = patience_of(2 * XP_NS_PER_MS);
    *(uint32_t *)(uintptr_t)s.patience.notice = e->notice;
    if (e->ended)
        life_word_end(&sanitize_life->word[0]);
    s.direct = e->direct;
    for (uint32_t by_call = 0; by_call < 2; by_call++) {
        transport_device_state_t state = {.sequence = LIVE_SEQUENCE - by_call,
                                          .phase =
                                              by_call ? TRANSPORT_PHASE_IDLE : TRANSPORT_PHASE_LIVE,
                                          .rows = 2};
        void *wait[] = {&s.arena, &s.state, &s.direct, &s.patience};
        void *take[] = {&s.take, &s.state, &s.out};
        turn_begin(&s, 0);
        kit_write(&sanitize_kit, s.state, &state, sizeof(state));
        if (by_call) {
            call(&s, 256);
        } else {
            sanitize_launch(SANITIZE_WAIT, 1, 32, wait);
            sanitize_launch(SANITIZE_TAKE, 2, 64, take);
        }
        check_ending(e, &s);
    }
    sanitize_life->word[0] = 0;
    sanitize_free();
    sanitize_case("wait: %s", e->name);
}

/* A put while a request is live is refused and writes nothing. */
static void put_twice(void)
{
    scene_t s;
    scene_make(&deliveries[3], &s);
    transport_device_state_t state = {.sequence = 8, .phase = TRANSPORT_PHASE_LIVE};
    kit_write(&sanitize_kit, s.state, &state, sizeof(state));
    turn_begin(&s, 0);
    void *put[] = {&s.put, &s.state, &s.live, &s.in};
    sanitize_launch(SANITIZE_PUT, 3, 128, put);
    sanitize_read(s.state, &state, sizeof(state));
    CHECK(state.status == XP_INVALID && state.sequence == 8 && state.arrived == 0);
    for (uint32_t t = 0; t < 2; t++) {
        stage_line_t line;
        uint8_t first[16];
        sanitize_read(s.put.targets[t].line, &line, sizeof(line));
        sanitize_read(s.stage[t], first, sizeof(first));
        CHECK(line.sequence == 0 && first[0] == UNKNOWN && first[15] == UNKNOWN);
    }
    sanitize_free();
    sanitize_case("put: refused while a request is live");
}

/* ---- words of hosts ------------------------------------------------------------------------- */
static void host_words(void)
{
    stage_instance_t entry = {.reason = 7, .invocations = 3};
    stage_about_t about;
    for (uint32_t i = 0; i < sizeof(about); i++)
        ((uint8_t *)&about)[i] = (uint8_t)(i * 7 + 1);
    cuda_address_t at = sanitize_device(sizeof(entry), &entry);
    for (uint32_t wanted = 0; wanted < 10; wanted += 5) {
        void *parameters[] = {&at, &about, &wanted};
        sanitize_launch(SANITIZE_DESCRIBE, 1, 1, parameters);
        sanitize_read(at, &entry, sizeof(entry));
        CHECK(memcmp(&entry.about, &about, sizeof(about)) == 0 && entry.reason == 0);
        CHECK(entry.wanted == wanted && entry.invocations == 3);
    }

    static uint8_t old[sizeof(stage_page_t)];
    static stage_page_t page;
    const stage_page_t none = {0};
    stage_head_t head = {.magic = STAGE_MAGIC, .bytes = 12345, .generation = 3, .ranks = 4};
    memset(old, UNKNOWN, sizeof(old));
    cuda_address_t page_at = sanitize_device(sizeof(page), old);
    void *start[] = {&page_at, &head};
    sanitize_launch(SANITIZE_PAGE_START, 1, 64, start);
    sanitize_read(page_at, &page, sizeof(page));
    CHECK(memcmp(&page.head, &head, sizeof(head)) == 0);
    CHECK(memcmp(page.lines, none.lines, sizeof(page.lines)) == 0);
    CHECK(memcmp(page.briefs, none.briefs, sizeof(page.briefs)) == 0);

    stage_partials_t partials;
    memset(&partials, UNKNOWN, sizeof(partials));
    cuda_address_t partials_at = sanitize_device(sizeof(partials), &partials);
    uint64_t bytes = 1 << 20;
    uint32_t words[] = {2, 1, 3, 64, 1000};
    void *clear[] = {&partials_at, &bytes, &words[0], &words[1], &words[2], &words[3], &words[4]};
    sanitize_launch(SANITIZE_PARTIALS_START, 1, 128, clear);
    sanitize_read(partials_at, &partials, sizeof(partials));
    CHECK(partials.magic == STAGE_PARTIALS_MAGIC && partials.abi == STAGE_ABI);
    CHECK(partials.bytes == bytes && partials.instance == 2 && partials.ffn == 1);
    CHECK(partials.members == 3 && partials.rows == 64 && partials.hidden == 1000);
    for (uint32_t m = 0; m < STAGE_MAX_MEMBERS; m++)
        CHECK(partials.ready[m].sequence == 0);

    uint32_t word = 0, value = 41;
    cuda_address_t word_at = sanitize_device(sizeof(word), NULL);
    void *post[] = {&word_at, &value};
    sanitize_launch(SANITIZE_POST, 1, 1, post);
    sanitize_read(word_at, &word, sizeof(word));
    CHECK(word == 41);

    mailbox_arena_t header;
    cuda_address_t arena_at = sanitize_device(sizeof(header), NULL);
    for (uint32_t reason = XP_FATAL, turn = 0; turn < 2; turn++, reason = XP_PEER) {
        void *close[] = {&arena_at, &reason};
        sanitize_launch(SANITIZE_CLOSE, 1, 1, close);
    }
    sanitize_read(arena_at, &header, sizeof(header));
    CHECK(header.closed == XP_FATAL); /* the first reason stays */
    sanitize_free();
    sanitize_case("words of hosts");
}

void sanitize_launches(void)
{
    for (uint32_t i = 0; i < sizeof(deliveries) / sizeof(deliveries[0]); i++)
        deliver(&deliveries[i]);
    for (uint32_t i = 0; i < sizeof(endings) / sizeof(endings[0]); i++)
        end_wait(&endings[i]);
    put_twice();
    host_words();
}
