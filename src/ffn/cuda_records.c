/* SPDX-License-Identifier: MIT */
#include "ffn/cuda_records.h"

#include <string.h>

#include "base/clock.h"
#include "ffn/cuda/dispatch_steps.h"

#define RECORDS_TIE_NS (60 * XP_NS_PER_S)

xp_status_t ffn_cuda_records_open(const cuda_device_t *device, uint32_t capacity,
                                  ffn_cuda_records_t *records_out)
{
    ffn_cuda_records_t records = {
        .device = device, .capacity = capacity, .tie_took_ns = UINT64_MAX};
    const uint64_t bytes = (uint64_t)capacity * sizeof(*records.places);
    void *address;
    *records_out = records;
    if (capacity == 0)
        return XP_OK;
    XP_TRY(cuda_host_alloc(device, bytes, &address));
    memset(address, 0, bytes);
    records_out->places = address;
    return CUDA_CALL(device->driver, cuMemHostGetDevicePointer, &records_out->at, address, 0);
}

void ffn_cuda_records_close(ffn_cuda_records_t *records)
{
    if (records->places)
        cuda_host_free(records->device, records->places);
    *records = (ffn_cuda_records_t){0};
}

void ffn_cuda_records_tie(ffn_cuda_records_t *records, uint64_t before_ns, uint64_t after_ns,
                          uint64_t device_ns)
{
    const uint64_t took = after_ns - before_ns;
    if (took >= records->tie_took_ns && before_ns - records->tied_ns < RECORDS_TIE_NS)
        return;
    records->tied_ns = before_ns;
    records->tie_took_ns = took;
    records->clock_offset_ns = (int64_t)(before_ns + took / 2) - (int64_t)device_ns;
}

uint32_t ffn_cuda_records_take(ffn_cuda_records_t *records, ffn_cuda_record_t *records_out,
                               uint32_t limit, uint64_t *skipped_out)
{
    const uint64_t capacity = records->capacity;
    uint32_t count = 0;
    *skipped_out = 0;
    while (capacity && count < limit) {
        const uint64_t wanted = records->taken + 1;
        const ffn_cuda_record_place_t *place = &records->places[records->taken % capacity];
        const uint64_t index = PROTOCOL_LOAD_ACQUIRE(&place->index);
        /* An older one, or one that is being written. */
        if (index < wanted)
            break;
        if (index > wanted) {
            /* The device was round again: go on half a ring behind it. */
            const uint64_t next = index - 1 - capacity / 2;
            *skipped_out += next - records->taken;
            records->taken = next;
            continue;
        }
        ffn_cuda_record_t record;
        records->taken++;
        if (!ffn_cuda_record_unpack(place, wanted - 1, capacity, &record)) {
            *skipped_out += 1;
            continue;
        }
        /* A record has 56 bits of the device's clock, which counts from 1970; CLOCK_MONOTONIC has
         * no more for two years after a start. */
        record.end_ns = (record.end_ns + (uint64_t)records->clock_offset_ns) & UINT64_MAX >> 8;
        records_out[count++] = record;
    }
    return count;
}
