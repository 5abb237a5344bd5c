/* SPDX-License-Identifier: MIT */
/*
 * Runs one checkpoint through the native engine in one process: test aid of engine_hf.py, no part
 * of the program. Standard input: {"prompts": [[ids...], ...], "new_tokens": N, "concurrent":
 * bool}. Writes float32 logits [prompt tokens][vocab] of every prompt, one after the other, to the
 * file named by --logits, and prints {"vocab": V, "greedy": [[ids...], ...], "logprobs": [[...],
 * ...]}.
 *
 *   engine_forward CHECKPOINT --logits FILE [--ffn runtime|reference] [--dtype float32]
 *                  [--threads N] [--prefill-rows N] [--kernels plain|avx2|avx512]
 */
#include <jansson.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../unit/engine/reference_ffn.h"
#include "engine/engine.h"
#include "ffn/ffn.h"
#include "kernels/kernels.h"

static void die(const char *what)
{
    fprintf(stderr, "engine_forward: %s: %s\n", what, xp_error_last()->text);
    exit(1);
}

static xp_status_t runtime_call(void *context, uint32_t layer, uint32_t rows, uint32_t kind,
                                uint64_t slo_deadline_ns, const float *in, float *out)
{
    (void)kind;
    (void)slo_deadline_ns;
    return ffn_runtime_execute(context, 0, 0, layer, rows, in, out);
}

static const char *option(int argc, char **argv, const char *name, const char *fallback)
{
    for (int i = 2; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return fallback;
}

static uint32_t read_ids(const json_t *prompt, int32_t *ids)
{
    for (size_t i = 0; i < json_array_size(prompt); i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(prompt, i));
    return (uint32_t)json_array_size(prompt);
}

/* Drains until `open` requests have finished; tokens are appended to each request's arrays. */
static void collect(engine_t *engine, size_t count, const uint64_t *requests, json_t **tokens,
                    json_t **logprobs, size_t open)
{
    static engine_event_t events[64];
    while (open > 0) {
        struct pollfd wait = {.fd = engine_event_fd(engine), .events = POLLIN};
        if (poll(&wait, 1, 120000) <= 0) {
            fprintf(stderr, "engine_forward: no event within 120 s\n");
            exit(1);
        }
        uint32_t got = engine_drain(engine, events, 64);
        for (uint32_t i = 0; i < got; i++) {
            size_t at = 0;
            while (at < count && requests[at] != events[i].request)
                at++;
            if (at == count)
                continue;
            if (events[i].type == ENGINE_EVENT_TOKEN && events[i].token >= 0) {
                json_array_append_new(tokens[at], json_integer(events[i].token));
                json_array_append_new(logprobs[at], json_real(events[i].logprob.logprob));
            } else if (events[i].type == ENGINE_EVENT_FINISH) {
                if (events[i].finish == ENGINE_FINISH_ERROR) {
                    fprintf(stderr, "engine_forward: %s\n", events[i].error);
                    exit(1);
                }
                open--;
            }
        }
    }
}

static void generate(engine_t *engine, const json_t *prompts, uint32_t new_tokens, bool concurrent,
                     json_t *greedy, json_t *logprobs)
{
    const size_t count = json_array_size(prompts);
    uint64_t *requests = calloc(count, sizeof *requests);
    json_t **tokens = calloc(count, sizeof *tokens), **values = calloc(count, sizeof *values);
    int32_t *ids = malloc(engine_max_context(engine) * sizeof *ids);
    engine_sampling_t sampling;
    engine_sampling_default(&sampling);
    sampling.temperature = 0;
    sampling.ignore_eos = true;
    sampling.want_logprobs = true;
    sampling.max_new_tokens = new_tokens;
    for (size_t i = 0; i < count; i++) {
        tokens[i] = json_array();
        values[i] = json_array();
        uint32_t length = read_ids(json_array_get(prompts, i), ids);
        if (engine_submit(engine, ids, length, &sampling, &requests[i]) != XP_OK)
            die("submit");
        if (!concurrent)
            collect(engine, i + 1, requests, tokens, values, 1);
        json_array_append_new(greedy, tokens[i]);
        json_array_append_new(logprobs, values[i]);
    }
    if (concurrent)
        collect(engine, count, requests, tokens, values, count);
    free(ids);
    free(tokens);
    free(values);
    free(requests);
}

static void write_logits(engine_t *engine, const json_t *prompts, const char *path)
{
    const uint32_t vocab = engine_spec(engine)->vocab;
    FILE *file = fopen(path, "wb");
    int32_t *ids = malloc(engine_max_context(engine) * sizeof *ids);
    for (size_t i = 0; file && i < json_array_size(prompts); i++) {
        uint32_t length = read_ids(json_array_get(prompts, i), ids);
        float *logits = malloc((size_t)length * vocab * sizeof *logits);
        if (engine_forward(engine, ids, length, logits) != XP_OK)
            die("forward");
        if (fwrite(logits, (size_t)vocab * sizeof *logits, length, file) != length)
            exit(1);
        free(logits);
    }
    if (!file || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
    free(ids);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: engine_forward CHECKPOINT [options]\n");
        return 2;
    }
    const char *logits = option(argc, argv, "--logits", NULL);
    const char *kernels = option(argc, argv, "--kernels", NULL);
    const bool use_runtime = strcmp(option(argc, argv, "--ffn", "runtime"), "runtime") == 0;
    const bool float32 = strcmp(option(argc, argv, "--dtype", "auto"), "float32") == 0;
    const uint32_t threads = (uint32_t)atoi(option(argc, argv, "--threads", "1"));
    if (kernels)
        setenv("XPOOL_KERNELS", kernels, 1);
    if (kernels_select() != XP_OK)
        die("kernels");
    json_error_t error;
    json_t *input = json_loadf(stdin, 0, &error);
    if (!input) {
        fprintf(stderr, "engine_forward: standard input: %s\n", error.text);
        return 1;
    }
    const json_t *prompts = json_object_get(input, "prompts");
    const uint32_t new_tokens = (uint32_t)json_integer_value(json_object_get(input, "new_tokens"));

    engine_config_t config = {.model_id = "engine-forward",
                              .path = argv[1],
                              .dtype = float32 ? XP_DTYPE_F32 : XP_DTYPE_AUTO,
                              .threads = threads,
                              .decode_rows = 32,
                              .prefill_rows =
                                  (uint32_t)atoi(option(argc, argv, "--prefill-rows", "128")),
                              .prefix_cache = true,
                              .queue_limit = 1024,
                              .clock = xp_clock_system()};
    reference_ffn_t reference;
    ffn_runtime_t *runtime = NULL;
    if (use_runtime) {
        ffn_runtime_config_t runtime_config = {
            .threads = threads, .lanes = 1, .max_rows = config.decode_rows + config.prefill_rows};
        ffn_install_t install = {.model_id = "engine-forward",
                                 .path = argv[1],
                                 .dtype = config.dtype,
                                 .tp_size = 1,
                                 .readers = 1};
        if (ffn_runtime_create(&runtime_config, &runtime) != XP_OK ||
            ffn_runtime_install(runtime, &install) != XP_OK)
            die("FFN");
        config.ffn = (engine_ffn_t){.call = runtime_call, .context = runtime};
    } else {
        reference_ffn_load(&reference, argv[1]);
        config.ffn = (engine_ffn_t){.call = reference_ffn_call, .context = &reference};
    }
    engine_t *engine;
    if (engine_create(&config, &engine) != XP_OK)
        die(argv[1]);
    if (logits)
        write_logits(engine, prompts, logits);
    json_t *greedy = json_array(), *logprobs = json_array();
    if (new_tokens > 0) {
        if (engine_start(engine) != XP_OK)
            die("start");
        generate(engine, prompts, new_tokens, json_is_true(json_object_get(input, "concurrent")),
                 greedy, logprobs);
    }
    json_t *output = json_pack("{s:i,s:o,s:o}", "vocab", (int)engine_spec(engine)->vocab, "greedy",
                               greedy, "logprobs", logprobs);
    json_dumpf(output, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(output);
    json_decref(input);
    engine_destroy(engine);
    if (use_runtime)
        ffn_runtime_destroy(runtime);
    else
        reference_ffn_free(&reference);
    return 0;
}
