/* SPDX-License-Identifier: MIT */
/*
 * Steps of the launches around a Lane's products: pieces of an Invocation, what is gathered and
 * delivered, the words that end it, its record. One source for C and CUDA; in src/ffn/cuda/ many
 * threads share the copies, in a test one thread does all.
 */
#ifndef XPOOL_FFN_CUDA_DISPATCH_STEPS_H
#define XPOOL_FFN_CUDA_DISPATCH_STEPS_H

#include "ffn/cuda/dispatch.h"

#define FFN_CUDA_NO_LANE 0xffffu

/* What the launches of one Lane keep between them, in device memory. */
typedef struct ffn_cuda_run {
    uint64_t began_ns;
    uint64_t arrived; /* blocks of the publishing launch under way */
    uint64_t pad[14];
} ffn_cuda_run_t;

/* Arguments of the publishing launch; constant while the GraphTemplate exists. */
typedef struct ffn_cuda_publishing {
    const ffn_cuda_lane_t *lane;
    const ffn_cuda_answer_t *answer;
    ffn_cuda_run_t *run;
    uint64_t *done;
    ffn_cuda_counters_t *counters;
    uint32_t capacity;
    uint16_t lane_number, graph_template;
} ffn_cuda_publishing_t;

typedef struct ffn_cuda_slice {
    const char *from;
    char *to;
    uint64_t bytes; /* a multiple of 16 */
} ffn_cuda_slice_t;

PROTOCOL_FUNCTION uint32_t ffn_cuda_lane_hidden(const ffn_cuda_lane_t *lane)
{
    return lane->layers[lane->layer].signature->hidden;
}

/* Rows of a slice that exist: a slice past the Lane's rows is cut, whatever the scheduler wrote. */
PROTOCOL_FUNCTION uint32_t ffn_cuda_slice_rows(const ffn_cuda_lane_t *lane, uint32_t first,
                                               uint32_t count)
{
    const uint32_t left = lane->rows > first ? lane->rows - first : 0;
    return count < left ? count : left;
}

/* `piece` becomes the Invocation of rows [first, first + most) of `lane`. */
PROTOCOL_FUNCTION void ffn_cuda_piece_set(const ffn_cuda_lane_t *lane, ffn_cuda_lane_t *piece,
                                          uint32_t first, uint32_t most)
{
    const uint64_t skipped = (uint64_t)first * ffn_cuda_lane_hidden(lane);
    piece->layer = lane->layer;
    piece->rows = ffn_cuda_slice_rows(lane, first, most);
    piece->input = (const char *)lane->input + skipped * 2;
    piece->output = lane->output ? (char *)lane->output + skipped * 2 : 0;
    piece->partial = lane->partial ? lane->partial + skipped : 0;
}

PROTOCOL_FUNCTION ffn_cuda_slice_t ffn_cuda_source_slice(const ffn_cuda_lane_t *lane,
                                                         const ffn_cuda_source_t *source)
{
    const uint64_t row_bytes = (uint64_t)ffn_cuda_lane_hidden(lane) * 2;
    const uint32_t rows = ffn_cuda_slice_rows(lane, source->first, source->count);
    /* The Lane's input is its own where there are sources. */
    ffn_cuda_slice_t slice;
    slice.from = (const char *)source->rows;
    slice.to = (char *)(uintptr_t)lane->input + source->first * row_bytes;
    slice.bytes = rows * row_bytes;
    return slice;
}

PROTOCOL_FUNCTION ffn_cuda_slice_t ffn_cuda_consumer_slice(const ffn_cuda_lane_t *lane,
                                                           const ffn_cuda_consumer_t *consumer)
{
    const uint64_t row_bytes = (uint64_t)ffn_cuda_lane_hidden(lane) * (lane->output ? 2 : 4);
    const uint32_t rows = ffn_cuda_slice_rows(lane, consumer->first, consumer->count);
    ffn_cuda_slice_t slice;
    slice.from = (lane->output ? (const char *)lane->output : (const char *)lane->partial) +
                 consumer->first * row_bytes;
    slice.to = (char *)consumer->rows;
    slice.bytes = consumer->rows ? rows * row_bytes : 0;
    return slice;
}

/* The record of an Invocation, but for its times; before `done`, since the Lane may be filled anew
 * right after it. about: NULL leaves that part empty. */
PROTOCOL_FUNCTION void ffn_cuda_record_begin(const ffn_cuda_answer_t *about, uint32_t rows,
                                             ffn_cuda_record_t *record_out)
{
    ffn_cuda_record_t record = {0};
    record.rows = rows;
    if (about) {
        record.ticket = about->ticket;
        record.layer = about->layer_of_model;
        record.instance = (uint16_t)about->instance;
        record.rank = (uint16_t)about->rank;
        record.kind = (uint8_t)about->kind;
    }
    *record_out = record;
}

/* The words of the record of this number (from 0). */
PROTOCOL_FUNCTION void ffn_cuda_record_pack(const ffn_cuda_record_t *record, uint64_t number,
                                            uint64_t capacity,
                                            uint64_t words_out[FFN_CUDA_RECORD_WORDS])
{
    const uint64_t round = number / capacity & 0xff;
    words_out[0] = record->end_ns << 8 | round;
    words_out[1] = record->duration_ns << 8 | round;
    words_out[2] = record->ticket << 8 | round;
    words_out[3] = (uint64_t)record->layer << 40 | (uint64_t)record->rows << 8 | round;
    words_out[4] = (uint64_t)record->capacity << 32 | (uint64_t)(record->rank & 0xff) << 24 |
                   (uint64_t)record->kind << 16 | (uint64_t)record->resident << 8 | round;
    words_out[5] = (uint64_t)record->instance << 48 | (uint64_t)record->lane << 32 |
                   (uint64_t)record->graph_template << 16 | round;
}

/* Reader: takes the record of this number from its place, once its index was seen there. 0: it is
 * being written anew. */
PROTOCOL_FUNCTION int ffn_cuda_record_unpack(const ffn_cuda_record_place_t *place, uint64_t number,
                                             uint64_t capacity, ffn_cuda_record_t *record_out)
{
    uint64_t words[FFN_CUDA_RECORD_WORDS];
    for (int i = 0; i < FFN_CUDA_RECORD_WORDS; i++) {
        words[i] = PROTOCOL_LOAD_RELAXED(&place->words[i]);
        if ((words[i] & 0xff) != (number / capacity & 0xff))
            return 0;
    }
    record_out->end_ns = words[0] >> 8;
    record_out->duration_ns = words[1] >> 8;
    record_out->ticket = words[2] >> 8;
    record_out->layer = (uint32_t)(words[3] >> 40);
    record_out->rows = (uint32_t)(words[3] >> 8);
    record_out->capacity = (uint32_t)(words[4] >> 32);
    record_out->rank = (uint8_t)(words[4] >> 24);
    record_out->kind = (uint8_t)(words[4] >> 16);
    record_out->resident = (uint8_t)(words[4] >> 8);
    record_out->instance = (uint16_t)(words[5] >> 48);
    record_out->lane = (uint16_t)(words[5] >> 32);
    record_out->graph_template = (uint16_t)(words[5] >> 16);
    return 1;
}

/* Counts the Invocation and writes its record. Several may do so at once: each takes a place of its
 * own. release: pairs with the reader's acquire of `index`. */
PROTOCOL_FUNCTION void ffn_cuda_record_end(ffn_cuda_counters_t *counters,
                                           const ffn_cuda_record_t *record)
{
    if (record->resident) {
        PROTOCOL_ADD_RELAXED(&counters->resident_invocations, (uint64_t)1);
        PROTOCOL_ADD_RELAXED(&counters->resident_rows, (uint64_t)record->rows);
        PROTOCOL_ADD_RELAXED(&counters->resident_busy_ns, record->duration_ns);
    } else {
        PROTOCOL_ADD_RELAXED(&counters->invocations, (uint64_t)1);
        PROTOCOL_ADD_RELAXED(&counters->rows, (uint64_t)record->rows);
        PROTOCOL_ADD_RELAXED(&counters->busy_ns, record->duration_ns);
    }
    if (counters->record_capacity == 0)
        return;
    const uint64_t number = PROTOCOL_ADD_RELAXED(&counters->records_taken, (uint64_t)1);
    ffn_cuda_record_place_t *place = &counters->records[number % counters->record_capacity];
    uint64_t words[FFN_CUDA_RECORD_WORDS];
    ffn_cuda_record_pack(record, number, counters->record_capacity, words);
    for (int i = 0; i < FFN_CUDA_RECORD_WORDS; i++)
        PROTOCOL_STORE_RELAXED(&place->words[i], words[i]);
    PROTOCOL_PUBLISH(&place->index, number + 1);
}

/* All rows are written and visible to this thread: the consumers' words, the Lane's end, and the
 * books. now_ns: of the device's clock. */
PROTOCOL_FUNCTION void ffn_cuda_publish_words(const ffn_cuda_publishing_t *p, uint64_t now_ns)
{
    const ffn_cuda_answer_t *answer = p->answer;
    ffn_cuda_record_t record;
    const uint64_t ticket = answer->ticket;
    for (uint32_t i = 0; i < answer->consumer_count && i < FFN_CUDA_MAX_CONSUMERS; i++)
        if (answer->consumers[i].word)
            PROTOCOL_PUBLISH(answer->consumers[i].word, answer->consumers[i].value);
    ffn_cuda_record_begin(answer, p->lane->rows, &record);
    record.capacity = p->capacity;
    record.lane = p->lane_number;
    record.graph_template = p->graph_template;
    record.end_ns = now_ns;
    record.duration_ns = now_ns > p->run->began_ns ? now_ns - p->run->began_ns : 0;
    PROTOCOL_PUBLISH(p->done, ticket);
    ffn_cuda_record_end(p->counters, &record);
}
#endif
