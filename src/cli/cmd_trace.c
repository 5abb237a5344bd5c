/* SPDX-License-Identifier: MIT */
/*
 * `xpool trace`: prints what observers have recorded (observe.folder), as JSON lines. Only reads;
 * the files may be in use, or their writers dead. Runs on the main thread.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cli/cli.h"
#include "observe/observe.h"

#define FOLLOW_PERIOD_NS 50000000

static const char help[] =
    "usage: xpool trace [--follow] FILE...\n\n"
    "Prints the records of observer files (observe.folder) as JSON lines: first one line a file,\n"
    "then one a record, oldest first, file after file.\n\n"
    "  --follow   one file only: goes on printing what is written, until interrupted\n\n"
    "Fields of a record: role, name, model, rank, layer, rows, sequence, time (seconds since\n"
    "1970), ns (duration), and by role\n"
    "  rank       step (decode, prefill, mixed), execution (eager, decode_graph, prefill_graph)\n"
    "  atnagent   request (sequence of the Instance Rank's call), lane, step\n"
    "  ffnagent   lane, graph_template, capacity; sequence is the Invocation's ticket\n";

static const char *named(const char *const *names, uint32_t count, uint32_t value)
{
    return value < count ? names[value] : "unknown";
}

static bool print_line(json_t *line)
{
    bool good = line && json_dumpf(line, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17)) == 0 &&
                putchar('\n') != EOF;
    json_decref(line);
    return good;
}

static bool print_header(const char *path, const observe_header_t *header)
{
    return print_line(json_pack("{s:s, s:s, s:s, s:I, s:I}", "file", path, "role",
                                observe_role_name(header->role), "name", header->name, "pid",
                                (json_int_t)header->pid, "capacity", (json_int_t)header->capacity));
}

static bool print_record(const observe_header_t *header, const observe_record_t *record)
{
    static const char *const steps[] = {"decode", "prefill", "mixed"};
    static const char *const executions[] = {"eager", "decode_graph", "prefill_graph"};
    double time = (double)((int64_t)record->end_ns + header->realtime_offset_ns) / 1e9;
    const char *model =
        record->instance < header->instances ? header->instance[record->instance] : "";
    json_t *line = json_pack(
        "{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:I}", "role", observe_role_name(header->role),
        "name", header->name, "model", model, "rank", (json_int_t)record->rank, "layer",
        (json_int_t)record->layer, "rows", (json_int_t)record->rows, "sequence",
        (json_int_t)record->sequence, "time", time, "ns", (json_int_t)record->duration_ns);
    if (header->role == OBSERVE_RANK)
        json_object_set_new(line, "execution",
                            json_string(named(executions, 3, record->execution)));
    if (header->role != OBSERVE_FFN)
        json_object_set_new(line, "step", json_string(named(steps, 3, record->step)));
    if (header->role == OBSERVE_ATN)
        json_object_set_new(line, "request", json_integer((json_int_t)record->request));
    if (record->lane != OBSERVE_NONE)
        json_object_set_new(line, "lane", json_integer(record->lane));
    if (record->graph_template != OBSERVE_NONE) {
        json_object_set_new(line, "graph_template", json_integer(record->graph_template));
        json_object_set_new(line, "capacity", json_integer(record->capacity));
    }
    return print_line(line);
}

static int trace_file(const char *path, bool follow)
{
    observe_reader_t *reader;
    if (observe_reader_open(path, &reader) != XP_OK) {
        fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
        return CLI_EXIT_FAILED;
    }
    const observe_header_t *header = observe_reader_header(reader);
    bool good = print_header(path, header);
    while (good) {
        observe_record_t record;
        if (observe_reader_next(reader, &record) == XP_OK) {
            good = print_record(header, &record);
            continue;
        }
        if (!follow)
            break;
        good = fflush(stdout) == 0;
        nanosleep(&(struct timespec){.tv_nsec = FOLLOW_PERIOD_NS}, NULL);
    }
    if (observe_reader_skipped(reader))
        fprintf(stderr, "xpool: %s: %" PRIu64 " older record(s) were overwritten\n", path,
                observe_reader_skipped(reader));
    observe_reader_close(reader);
    return good ? CLI_EXIT_OK : CLI_EXIT_FAILED;
}

int cmd_trace(int argc, char **argv)
{
    if (cli_wants_help(argc, argv, help))
        return CLI_EXIT_OK;
    bool follow = cli_take_flag(&argc, argv, "--follow");
    for (int i = 1; i < argc; i++)
        if (argv[i][0] == '-') {
            fprintf(stderr, "xpool trace: unknown option %s\n", argv[i]);
            return CLI_EXIT_USAGE;
        }
    if (argc < 2 || (follow && argc > 2)) {
        fprintf(stderr, "xpool trace: name %s (observe.folder holds them)\n",
                follow ? "one observer file to follow" : "observer files");
        return CLI_EXIT_USAGE;
    }
    int worst = CLI_EXIT_OK;
    for (int i = 1; i < argc; i++) {
        int code = trace_file(argv[i], follow);
        if (code)
            worst = code;
    }
    return worst;
}
