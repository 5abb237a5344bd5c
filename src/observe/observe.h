/* SPDX-License-Identifier: MIT */
/*
 * Observers: what a process of the data plane did, one fixed-size record a layer and step, in a
 * ring in a mapped file that anyone may read while it is written or after its writer was killed.
 *
 * A file is `<folder>/<role>-<name>-<pid>.observe`: a header of OBSERVE_HEADER_BYTES, then
 * `capacity` records. Its blocks are taken at start, so a full disk is an error there and never a
 * fault later. A record's `index` is written last: 0 or another number than its place in the ring
 * asks for means that the writer was inside it.
 *
 * One thread at a time writes an observer. Writing costs one record's stores: no allocation, no
 * system call. All writers accept NULL (off) and do nothing.
 */
#ifndef XPOOL_OBSERVE_OBSERVE_H
#define XPOOL_OBSERVE_OBSERVE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define OBSERVE_MAGIC         0x31565253424f5058ull /* "XPOBSRV1" */
#define OBSERVE_ABI           1u
#define OBSERVE_HEADER_BYTES  16384u
#define OBSERVE_MAX_INSTANCES 64
#define OBSERVE_MAX_RECORDS   (1u << 24)
#define OBSERVE_NONE          UINT16_MAX /* lane, graph_template: does not apply */

typedef enum observe_role {
    OBSERVE_RANK = 1, /* Instance Rank: one FFN call */
    OBSERVE_ATN,      /* AtnAgent: one Submission carried and answered */
    OBSERVE_FFN,      /* FfnAgent: one shard of an Invocation executed */
} observe_role_t;

/* Field by role; what a role does not know is 0 (or OBSERVE_NONE).
 *             RANK                 ATN                      FFN
 * sequence    of the Transport     of the slot's            ticket of the Invocation
 *             request              Submission
 * request     as sequence          of the Transport         0
 *                                  request
 * duration    call to answer       Submission to answer     execute
 * rows        of this rank         of this rank             of all attention DP ranks */
typedef struct observe_record {
    uint64_t index;       /* 1, 2, ...; written last */
    uint64_t end_ns;      /* CLOCK_MONOTONIC */
    uint64_t duration_ns; /* that long before */
    uint64_t sequence, request;
    uint32_t layer, rows;
    uint32_t capacity; /* FFN: rows of the Execution Capacity used */
    uint16_t instance, rank;
    uint16_t lane, graph_template;
    uint8_t step;      /* transport_kind_t */
    uint8_t execution; /* RANK: 0 eager, 1 decode graph, 2 prefill graph */
    uint8_t reserved[2];
} observe_record_t;
_Static_assert(sizeof(observe_record_t) == 64, "a record is one cache line");

typedef struct observe_header {
    uint64_t magic;
    uint32_t abi, role; /* observe_role_t */
    uint32_t pid, capacity;
    uint64_t written;           /* records written since start; release after each */
    int64_t realtime_offset_ns; /* CLOCK_REALTIME minus CLOCK_MONOTONIC at start */
    char name[96];              /* device, or model id and rank */
    uint32_t instances, reserved;
    char instance[OBSERVE_MAX_INSTANCES][96]; /* model ids by a record's `instance` */
} observe_header_t;
_Static_assert(sizeof(observe_header_t) <= OBSERVE_HEADER_BYTES, "the header fits");

/* ---- writing ------------------------------------------------------------------------------ */
typedef struct observe observe_t;

/* Makes folder and file. `*observe_out` is NULL, with XP_OK, when `folder` is "". */
xp_status_t observe_open(const char *folder, observe_role_t role, const char *name,
                         uint32_t capacity, observe_t **observe_out);
void observe_close(observe_t *observe); /* accepts NULL; the file stays */
/* Names the model behind a record's `instance`. Before the first record. */
void observe_name_instance(observe_t *observe, uint32_t instance, const char *model_id);

/* Writes a copy of `record`; `index` and, where 0, `end_ns` are filled in. */
void observe_write(observe_t *observe, const observe_record_t *record);

/* ---- reading ------------------------------------------------------------------------------ */
typedef struct observe_reader observe_reader_t;

/* XP_INVALID when the file is no observer's, XP_UNSUPPORTED for another ABI. */
xp_status_t observe_reader_open(const char *path, observe_reader_t **reader_out);
void observe_reader_close(observe_reader_t *reader); /* accepts NULL */
const observe_header_t *observe_reader_header(const observe_reader_t *reader);
/* The next whole record, oldest first. XP_RETRY: none is there now. Records that were overwritten
 * before they were read, or in which the writer died, are skipped and counted. */
xp_status_t observe_reader_next(observe_reader_t *reader, observe_record_t *record_out);
uint64_t observe_reader_skipped(const observe_reader_t *reader);
const char *observe_role_name(uint32_t role); /* "rank", "atnagent", "ffnagent", "unknown" */
#endif
