/* SPDX-License-Identifier: MIT */
/*
 * The smallest engine that leaves its FFN to CrossPool: it opens one Instance Rank, runs the FFN of
 * chosen layers on rows from a file or a seed, and prints what came back. No attention, no tokens:
 * it shows the order of the calls of xpool/xpool.h, and tests use it as somebody else's engine.
 *
 *   cc -std=c99 engine.c $(pkg-config --cflags --libs xpool) -lpthread -o engine
 *   XPOOL_CONFIG=xpool.toml ./engine --model tiny --rows 4
 *
 * C99 with POSIX sockets and threads; also compiles as C++17.
 */
#define _POSIX_C_SOURCE 200809L

#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <xpool/xpool.h>

#define MAX_RANKS 8

static const char usage_text[] =
    "usage: engine --model ID [OPTION VALUE]... [--serve] [--quiet]\n"
    "\n"
    "  --config FILE       the daemon's configuration; otherwise XPOOL_CONFIG names it\n"
    "  --rank N            Instance Rank (0)\n"
    "  --layer N           only this layer; otherwise every layer, in order\n"
    "  --rows N            rows of a call (1)\n"
    "  --dtype NAME        f32, f16 or bf16 (f32)\n"
    "  --seed N            of the rows, when there is no input (1)\n"
    "  --input FILE        raw rows in that dtype: rows x hidden\n"
    "  --output FILE       raw answers, one block of rows x hidden a layer\n"
    "  --steps N           so many rounds over the layers; 0: until told to end (1)\n"
    "  --step-kind N       0 decode, 1 prefill, 2 mixed (0)\n"
    "  --execution N       0 eager, 1 decode graph, 2 prefill graph (0)\n"
    "  --dp-rows A,B,...   rows of every attention DP rank\n"
    "  --serve             answer /health, count as served, stay until told to end\n"
    "  --quiet             no line a call\n"
    "What the engine says of itself; by default what the configuration and the checkpoint say:\n"
    "  --checkpoint PATH  --engine NAME  --hidden N  --layers N  --tp N  --dp N\n"
    "  --decode-rows N  --prefill-rows N\n";

typedef struct options {
    const char *config, *model, *checkpoint, *engine, *input, *output, *dp_rows;
    uint32_t rank, rows, seed, dtype, steps, step_kind, execution;
    long layer;                                             /* -1: all */
    long hidden, layers, tp, dp, decode_rows, prefill_rows; /* -1: as the configuration says */
    int serve, quiet;
} options_t;

/* ---- command line --------------------------------------------------------------------------- */

static void usage_error(const char *what, const char *word)
{
    fprintf(stderr, "engine: %s \"%s\"\n%s", what, word, usage_text);
    exit(2);
}

static long number(const char *name, const char *text)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (!*text || *end || value < 0 || value > 0x7fffffffL)
        usage_error(name, text);
    return value;
}

static uint32_t dtype_named(const char *name)
{
    if (strcmp(name, "f32") == 0)
        return XPOOL_F32;
    if (strcmp(name, "f16") == 0)
        return XPOOL_F16;
    if (strcmp(name, "bf16") == 0)
        return XPOOL_BF16;
    usage_error("--dtype", name);
    return XPOOL_F32;
}

static void take_option(options_t *options, const char *name, const char *value)
{
    struct text_option {
        const char *name;
        const char **to;
    } texts[] = {{"--config", &options->config},   {"--model", &options->model},
                 {"--input", &options->input},     {"--output", &options->output},
                 {"--engine", &options->engine},   {"--checkpoint", &options->checkpoint},
                 {"--dp-rows", &options->dp_rows}, {NULL, NULL}};
    struct count_option {
        const char *name;
        uint32_t *to;
    } counts[] = {{"--rank", &options->rank},
                  {"--rows", &options->rows},
                  {"--seed", &options->seed},
                  {"--steps", &options->steps},
                  {"--step-kind", &options->step_kind},
                  {"--execution", &options->execution},
                  {NULL, NULL}};
    struct claim_option {
        const char *name;
        long *to;
    } claims[] = {{"--layer", &options->layer},
                  {"--hidden", &options->hidden},
                  {"--layers", &options->layers},
                  {"--tp", &options->tp},
                  {"--dp", &options->dp},
                  {"--decode-rows", &options->decode_rows},
                  {"--prefill-rows", &options->prefill_rows},
                  {NULL, NULL}};
    int i;
    for (i = 0; texts[i].name; i++)
        if (strcmp(name, texts[i].name) == 0) {
            *texts[i].to = value;
            return;
        }
    for (i = 0; counts[i].name; i++)
        if (strcmp(name, counts[i].name) == 0) {
            *counts[i].to = (uint32_t)number(name, value);
            return;
        }
    for (i = 0; claims[i].name; i++)
        if (strcmp(name, claims[i].name) == 0) {
            *claims[i].to = number(name, value);
            return;
        }
    if (strcmp(name, "--dtype") == 0)
        options->dtype = dtype_named(value);
    else
        usage_error("unknown option", name);
}

static void read_options(int argc, char **argv, options_t *options)
{
    int i;
    memset(options, 0, sizeof(*options));
    options->rows = options->seed = options->steps = 1;
    options->layer = options->hidden = options->layers = options->tp = options->dp = -1;
    options->decode_rows = options->prefill_rows = -1;
    options->engine = "example 1.0";
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(usage_text, stdout);
            exit(0);
        }
        if (strcmp(argv[i], "--serve") == 0)
            options->serve = 1;
        else if (strcmp(argv[i], "--quiet") == 0)
            options->quiet = 1;
        else if (i + 1 < argc) {
            take_option(options, argv[i], argv[i + 1]);
            i++;
        } else
            usage_error("no value for", argv[i]);
    }
    if (!options->model)
        usage_error("which model?", "--model");
}

/* ---- being told to end ---------------------------------------------------------------------- */

typedef struct ending {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t kind; /* 0 or xpool_end_t */
} ending_t;

/* On the library's thread: only note it. The main thread sees it between two calls, and a call in
 * flight ends by itself. */
static void on_end(void *context, uint32_t end, uint32_t seconds, const char *text)
{
    static const char *const names[] = {"", "failed", "drain", "now"};
    ending_t *ending = (ending_t *)context;
    printf("end %s within %u s: %s\n", end <= XPOOL_END_NOW ? names[end] : "?", (unsigned)seconds,
           text);
    fflush(stdout);
    pthread_mutex_lock(&ending->lock);
    if (ending->kind != XPOOL_END_FAILED)
        ending->kind = end;
    pthread_cond_broadcast(&ending->changed);
    pthread_mutex_unlock(&ending->lock);
}

static uint32_t told_to_end(ending_t *ending, int wait)
{
    uint32_t kind;
    pthread_mutex_lock(&ending->lock);
    while (wait && !ending->kind)
        pthread_cond_wait(&ending->changed, &ending->lock);
    kind = ending->kind;
    pthread_mutex_unlock(&ending->lock);
    return kind;
}

/* ---- /health: all that the daemon asks of an engine's HTTP server ------------------------------
 */

static void *health_main(void *context)
{
    static const char answer[] =
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";
    int listener = *(int *)context;
    for (;;) {
        char request[1024];
        int peer = accept(listener, NULL, NULL);
        if (peer < 0)
            return NULL;
        if (read(peer, request, sizeof(request)) > 0 && write(peer, answer, sizeof(answer) - 1) < 0)
            perror("engine: /health");
        close(peer);
    }
}

/* The port, or 0. */
static uint32_t start_health(int *listener)
{
    struct sockaddr_in address;
    socklen_t length = sizeof(address);
    pthread_t thread;
    memset(&address, 0, sizeof(address));
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *listener = socket(AF_INET, SOCK_STREAM, 0);
    if (*listener < 0 || bind(*listener, (struct sockaddr *)&address, length) != 0 ||
        listen(*listener, 8) != 0 ||
        getsockname(*listener, (struct sockaddr *)&address, &length) != 0 ||
        pthread_create(&thread, NULL, health_main, listener) != 0)
        return 0;
    pthread_detach(thread);
    return ntohs(address.sin_port);
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Small whole multiples of 1/64 in about [-1, 1]: exact in every dtype. */
static void seeded_rows(uint32_t seed, uint32_t dtype, size_t elements, void *rows)
{
    uint32_t state = seed * 2654435761u + 1;
    size_t i;
    for (i = 0; i < elements; i++) {
        float value;
        uint32_t bits;
        state = state * 1664525u + 1013904223u;
        value = (float)((int)(state >> 25) - 64) / 64.0f;
        memcpy(&bits, &value, sizeof(bits));
        if (dtype == XPOOL_F32)
            ((float *)rows)[i] = value;
        else if (dtype == XPOOL_BF16)
            ((uint16_t *)rows)[i] = (uint16_t)(bits >> 16);
        else if (value == 0)
            ((uint16_t *)rows)[i] = 0;
        else
            ((uint16_t *)rows)[i] =
                (uint16_t)((bits >> 16 & 0x8000u) | (((bits >> 23 & 0xffu) - 112u) << 10) |
                           (bits >> 13 & 0x3ffu));
    }
}

static int read_rows(const char *path, size_t bytes, void *rows)
{
    FILE *file = fopen(path, "rb");
    int good = file && fread(rows, 1, bytes, file) == bytes;
    if (!good)
        fprintf(stderr, "engine: %s does not hold %lu bytes\n", path, (unsigned long)bytes);
    if (file)
        fclose(file);
    return good;
}

/* ---- the engine ----------------------------------------------------------------------------- */

static int report(const char *what, xpool_status_t status)
{
    printf("error %d: %s: %s\n", (int)status, what, xpool_error());
    fflush(stdout);
    return status == XPOOL_CLOSED ? 0 : 1;
}

typedef struct engine {
    const options_t *options;
    xpool_model_info_t info;
    xpool_config_t *config;
    xpool_rank_t *rank;
    ending_t ending;
    void *input, *answer;
    size_t bytes; /* of one call's rows */
    uint32_t dp_rows[MAX_RANKS];
    FILE *output;
} engine_t;

static uint32_t or_default(long claimed, uint32_t value)
{
    return claimed < 0 ? value : (uint32_t)claimed;
}

static xpool_status_t open_rank(engine_t *engine)
{
    const options_t *options = engine->options;
    xpool_rank_options_t rank;
    memset(&rank, 0, sizeof(rank));
    rank.struct_bytes = sizeof(rank);
    rank.model_id = options->model;
    rank.rank = options->rank;
    rank.engine = options->engine;
    rank.checkpoint = options->checkpoint ? options->checkpoint
                                          : xpool_config_model_path(engine->config, options->model);
    rank.hidden = or_default(options->hidden, engine->info.hidden);
    rank.layers = or_default(options->layers, engine->info.layers);
    rank.attention_tp = or_default(options->tp, engine->info.attention_tp);
    rank.attention_dp = or_default(options->dp, engine->info.attention_dp);
    rank.decode_rows = or_default(options->decode_rows, engine->info.decode_rows);
    rank.prefill_rows = or_default(options->prefill_rows, engine->info.prefill_rows);
    rank.dtype = options->dtype;
    rank.on_end = on_end;
    rank.context = &engine->ending;
    return xpool_rank_open(engine->config, &rank, &engine->rank);
}

static int prepare_rows(engine_t *engine)
{
    const options_t *options = engine->options;
    const char *at = options->dp_rows;
    uint32_t i;
    size_t elements = (size_t)options->rows * engine->info.hidden;
    engine->bytes = elements * (options->dtype == XPOOL_F32 ? 4 : 2);
    engine->input = calloc(1, engine->bytes + 1);
    engine->answer = calloc(1, engine->bytes + 1);
    if (!engine->input || !engine->answer)
        return 0;
    for (i = 0; at && i < MAX_RANKS; i++) {
        engine->dp_rows[i] = (uint32_t)strtoul(at, NULL, 10);
        at = strchr(at, ',');
        at = at ? at + 1 : NULL;
    }
    if (!options->input) {
        seeded_rows(options->seed, options->dtype, elements, engine->input);
        return 1;
    }
    return read_rows(options->input, engine->bytes, engine->input);
}

/* 0 goes on, 1 failed, 2 an ordered end. */
static int call_layer(engine_t *engine, uint32_t layer)
{
    const options_t *options = engine->options;
    xpool_ffn_call_t call;
    xpool_status_t status;
    struct timespec before, after;
    memset(&call, 0, sizeof(call));
    call.struct_bytes = sizeof(call);
    call.layer = layer;
    call.rows = options->rows;
    call.dtype = options->dtype;
    call.step = options->step_kind;
    call.execution = options->execution;
    call.dp_rows = options->dp_rows ? engine->dp_rows : NULL;
    call.input = engine->input;
    call.output = engine->answer;
    clock_gettime(CLOCK_MONOTONIC, &before);
    status = xpool_rank_ffn(engine->rank, &call);
    clock_gettime(CLOCK_MONOTONIC, &after);
    if (status != XPOOL_OK)
        return report("xpool_rank_ffn", status) ? 1 : 2;
    if (engine->output &&
        fwrite(engine->answer, 1, engine->bytes, engine->output) != engine->bytes) {
        perror("engine: --output");
        return 1;
    }
    if (!options->quiet) {
        printf("layer %u rows %u %.1f us\n", (unsigned)layer, (unsigned)options->rows,
               (double)(after.tv_sec - before.tv_sec) * 1e6 +
                   (double)(after.tv_nsec - before.tv_nsec) / 1e3);
        fflush(stdout);
    }
    return 0;
}

static int run_steps(engine_t *engine)
{
    const options_t *options = engine->options;
    uint32_t first = options->layer < 0 ? 0 : (uint32_t)options->layer;
    uint32_t last = options->layer < 0 ? engine->info.layers : first + 1;
    uint32_t step, layer;
    for (step = 0; options->steps == 0 || step < options->steps; step++) {
        if (told_to_end(&engine->ending, 0))
            return told_to_end(&engine->ending, 0) == XPOOL_END_FAILED;
        for (layer = first; layer < last; layer++) {
            int end = call_layer(engine, layer);
            if (end)
                return end == 1;
        }
    }
    return 0;
}

static int serve(engine_t *engine)
{
    static int listener;
    xpool_serving_t serving;
    xpool_status_t status;
    memset(&serving, 0, sizeof(serving));
    serving.struct_bytes = sizeof(serving);
    serving.host = "127.0.0.1";
    serving.port = start_health(&listener);
    serving.kv_tokens = engine->info.kv_tokens;
    serving.max_context = engine->info.max_context;
    if (!serving.port) {
        perror("engine: cannot answer /health");
        return 1;
    }
    status = xpool_rank_serving(engine->rank, &serving);
    if (status != XPOOL_OK)
        return report("xpool_rank_serving", status);
    printf("serving %u\n", (unsigned)serving.port);
    fflush(stdout);
    return 0;
}

static int run(engine_t *engine)
{
    const options_t *options = engine->options;
    xpool_rank_state_t state;
    int code;
    xpool_status_t status = xpool_config_open(options->config, &engine->config);
    if (status != XPOOL_OK)
        return report("xpool_config_open", status);
    engine->info.struct_bytes = sizeof(engine->info);
    status = xpool_config_model_info(engine->config, options->model, &engine->info);
    if (status != XPOOL_OK)
        return report("xpool_config_model_info", status);
    if (!prepare_rows(engine))
        return 1;
    status = open_rank(engine);
    if (status != XPOOL_OK)
        return report("xpool_rank_open", status);
    printf("admitted %s rank %u\n", options->model, (unsigned)options->rank);
    fflush(stdout);
    status = xpool_rank_wait_executable(engine->rank, 0);
    if (status != XPOOL_OK)
        return report("xpool_rank_wait_executable", status);
    printf("executable\n");
    fflush(stdout);
    if (options->serve && (code = serve(engine)) != 0)
        return code;
    code = run_steps(engine);
    memset(&state, 0, sizeof(state));
    state.struct_bytes = sizeof(state);
    xpool_rank_state(engine->rank, &state);
    printf("calls %llu rows %llu\n", (unsigned long long)state.ffn_calls,
           (unsigned long long)state.ffn_rows);
    fflush(stdout);
    if (code == 0 && options->serve)
        code = told_to_end(&engine->ending, 1) == XPOOL_END_FAILED;
    return code;
}

int main(int argc, char **argv)
{
    static engine_t engine;
    options_t options;
    int code;
    read_options(argc, argv, &options);
    engine.options = &options;
    pthread_mutex_init(&engine.ending.lock, NULL);
    pthread_cond_init(&engine.ending.changed, NULL);
    if (options.output) {
        engine.output = fopen(options.output, "wb");
        if (!engine.output) {
            perror(options.output);
            return 1;
        }
    }
    code = run(&engine);
    if (engine.output && fclose(engine.output) != 0)
        code = 1;
    xpool_rank_close(engine.rank);
    xpool_config_close(engine.config);
    free(engine.input);
    free(engine.answer);
    return code;
}
