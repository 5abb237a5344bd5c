/* SPDX-License-Identifier: MIT */
/*
 * `xpool model inspect` and `xpool model synth`: what a checkpoint is, and making small ones. Runs
 * in the main thread, starts nothing, needs no configuration.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "cli/cli.h"
#include "model/checkpoint.h"
#include "model/inventory.h"
#include "model/synth.h"

static int model_report(void)
{
    fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
    return CLI_EXIT_FAILED;
}

static void model_print_bytes(uint64_t bytes, char out[48])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    unsigned unit = 0;
    while (value >= 1024 && unit < 4) {
        value /= 1024;
        unit++;
    }
    if (unit == 0)
        snprintf(out, 48, "%" PRIu64 " B", bytes);
    else
        snprintf(out, 48, "%.2f %s", value, units[unit]);
}

/* ---- inspect ----------------------------------------------------------------------------------
 */

typedef struct inspect {
    const model_spec_t *spec;
    const checkpoint_t *checkpoint; /* NULL: a folder with configuration only */
    uint64_t parameters, tensors_needed;
    uint64_t attention_bytes, ffn_bytes;
    size_t tensors;
    uint32_t dense_layers, moe_layers;
} inspect_t;

static bool inspect_is_ffn(const checkpoint_tensor_t *tensor, void *context)
{
    return checkpoint_tensor_is_ffn(tensor);
}

static xp_status_t inspect_tensor(void *context, const inventory_tensor_t *tensor)
{
    inspect_t *inspect = context;
    const checkpoint_tensor_t *found;
    inspect->tensors_needed++;
    inspect->parameters += tensor->shape[0] * (tensor->dimensions == 2 ? tensor->shape[1] : 1);
    if (!inspect->checkpoint)
        return XP_OK;
    return checkpoint_tensor_require(inspect->checkpoint, tensor->name, tensor->dimensions,
                                     tensor->shape, &found);
}

static const char *inspect_rope_name(model_rope_scaling_t scaling)
{
    static const char *const names[] = {"none", "linear", "llama3", "yarn"};
    return names[scaling];
}

static void inspect_print_ffn(const model_ffn_t *ffn, uint32_t layers)
{
    const char *activation = ffn->activation == MODEL_ACT_SILU ? "silu" : "gelu_tanh";
    if (ffn->kind == MODEL_FFN_DENSE) {
        printf("  %u dense, intermediate %u, %s\n", layers, ffn->intermediate, activation);
        return;
    }
    printf("  %u MoE, %u experts of %u, top %u, %s%s%s, %s", layers, ffn->experts,
           ffn->intermediate, ffn->top_k,
           ffn->router == MODEL_ROUTER_SOFTMAX ? "softmax" : "sigmoid",
           ffn->correction_bias ? " + correction bias" : "",
           ffn->normalize_top_k ? ", renormalised" : "", activation);
    if (ffn->routed_scale != 1)
        printf(", scaled %g", ffn->routed_scale);
    if (ffn->groups > 1)
        printf(", %u of %u groups", ffn->top_groups, ffn->groups);
    if (ffn->shared_intermediate)
        printf(", shared expert of %u", ffn->shared_intermediate);
    printf("\n");
}

static void inspect_print(const inspect_t *inspect, const char *path)
{
    const model_spec_t *spec = inspect->spec;
    const model_ffn_t *dense = NULL, *moe = NULL;
    char text[48];
    for (uint32_t i = 0; i < spec->layers; i++) {
        if (spec->ffn[i].kind == MODEL_FFN_DENSE)
            dense = &spec->ffn[i];
        else
            moe = &spec->ffn[i];
    }
    printf("%s\n", path);
    printf("architecture   %s (%s%s)\n", spec->architecture_name,
           spec->is_gguf ? "GGUF" : "Hugging Face",
           model_architecture_has_native_engine(spec->architecture) ? ""
                                                                    : ", no native engine yet");
    printf("layers         %u of hidden size %u, vocabulary %u%s\n", spec->layers, spec->hidden,
           spec->vocab, spec->tied_embeddings ? ", tied embeddings" : "");
    if (spec->kv_lora_rank)
        printf("attention      MLA, %u heads of %u + %u, values %u, q rank %u, kv rank %u\n",
               spec->heads, spec->qk_nope_head_dim, spec->qk_rope_head_dim, spec->v_head_dim,
               spec->q_lora_rank, spec->kv_lora_rank);
    else
        printf("attention      GQA, %u heads and %u key/value heads of %u%s%s\n", spec->heads,
               spec->kv_heads, spec->head_dim, spec->qkv_bias ? ", QKV bias" : "",
               spec->qk_norm ? ", q/k norm" : "");
    printf("rotary         theta %g, scaling %s\n", spec->rope.theta,
           inspect_rope_name(spec->rope.scaling));
    printf("context        %u tokens\n", spec->max_positions);
    printf("FFN layers\n");
    if (dense)
        inspect_print_ffn(dense, inspect->dense_layers);
    if (moe)
        inspect_print_ffn(moe, inspect->moe_layers);
    printf("parameters     %" PRIu64 "\n", inspect->parameters);
    if (inspect->checkpoint) {
        printf("tensors        %zu\n", inspect->tensors);
        model_print_bytes(inspect->attention_bytes, text);
        printf("attention side %s\n", text);
        model_print_bytes(inspect->ffn_bytes, text);
        printf("FFN side       %s\n", text);
    } else {
        printf("weights        none here\n");
    }
    printf("KV a token     %" PRIu64 " bytes in f32, %" PRIu64 " in bf16\n",
           model_kv_bytes_per_token(spec, XP_DTYPE_F32),
           model_kv_bytes_per_token(spec, XP_DTYPE_BF16));
    printf("end tokens    ");
    for (uint32_t i = 0; i < spec->eos_count; i++)
        printf(" %d", spec->eos_tokens[i]);
    printf("%s\n", spec->eos_count ? "" : " none");
}

/* Names and paths may hold anything, so they are escaped. */
static void inspect_json_text(const char *text)
{
    putchar('"');
    for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
        if (*at == '"' || *at == '\\')
            printf("\\%c", *at);
        else if (*at < 0x20)
            printf("\\u%04x", *at);
        else
            putchar(*at);
    }
    putchar('"');
}

static void inspect_json_ffn(const model_ffn_t *ffn)
{
    bool moe = ffn->kind == MODEL_FFN_MOE;
    printf("{\"kind\": \"%s\", \"activation\": \"%s\", \"intermediate\": %u", moe ? "moe" : "dense",
           ffn->activation == MODEL_ACT_SILU ? "silu" : "gelu_tanh", ffn->intermediate);
    if (moe)
        printf(", \"experts\": %u, \"top_k\": %u, \"router\": \"%s\", \"normalize_top_k\": %s, "
               "\"routed_scale\": %.17g, \"correction_bias\": %s, \"groups\": %u, "
               "\"top_groups\": %u, \"shared_intermediate\": %u",
               ffn->experts, ffn->top_k,
               ffn->router == MODEL_ROUTER_SOFTMAX ? "softmax" : "sigmoid",
               ffn->normalize_top_k ? "true" : "false", ffn->routed_scale,
               ffn->correction_bias ? "true" : "false", ffn->groups, ffn->top_groups,
               ffn->shared_intermediate);
    printf("}");
}

static void inspect_json(const inspect_t *inspect, const char *path)
{
    const model_spec_t *spec = inspect->spec;
    printf("{\"path\": ");
    inspect_json_text(path);
    printf(", \"architecture\": \"%s\", \"format\": \"%s\", \"native_engine\": %s, "
           "\"layers\": %u, \"hidden\": %u, \"vocab\": %u, \"heads\": %u, \"kv_heads\": %u, "
           "\"head_dim\": %u, ",
           spec->architecture_name, spec->is_gguf ? "gguf" : "safetensors",
           model_architecture_has_native_engine(spec->architecture) ? "true" : "false",
           spec->layers, spec->hidden, spec->vocab, spec->heads, spec->kv_heads, spec->head_dim);
    printf("\"qkv_bias\": %s, \"o_bias\": %s, \"qk_norm\": %s, \"tied_embeddings\": %s, "
           "\"norm_epsilon\": %.17g, \"rope_theta\": %.17g, \"rope_scaling\": \"%s\", "
           "\"max_positions\": %u, \"sliding_window\": %u, ",
           spec->qkv_bias ? "true" : "false", spec->o_bias ? "true" : "false",
           spec->qk_norm ? "true" : "false", spec->tied_embeddings ? "true" : "false",
           spec->norm_epsilon, spec->rope.theta, inspect_rope_name(spec->rope.scaling),
           spec->max_positions, spec->sliding_window);
    if (spec->kv_lora_rank)
        printf("\"q_lora_rank\": %u, \"kv_lora_rank\": %u, \"qk_nope_head_dim\": %u, "
               "\"qk_rope_head_dim\": %u, \"v_head_dim\": %u, ",
               spec->q_lora_rank, spec->kv_lora_rank, spec->qk_nope_head_dim,
               spec->qk_rope_head_dim, spec->v_head_dim);
    printf("\"bos_token\": %d, \"pad_token\": %d, \"eos_tokens\": [", spec->bos_token,
           spec->pad_token);
    for (uint32_t i = 0; i < spec->eos_count; i++)
        printf("%s%d", i ? ", " : "", spec->eos_tokens[i]);
    printf("], \"dtype\": \"%s\", \"ffn\": [", xp_dtype_name(spec->checkpoint_dtype));
    for (uint32_t i = 0; i < spec->layers; i++) {
        printf("%s", i ? ", " : "");
        inspect_json_ffn(&spec->ffn[i]);
    }
    printf("], \"parameters\": %" PRIu64 ", ", inspect->parameters);
    if (inspect->checkpoint)
        printf("\"tensors\": %zu, \"attention_bytes\": %" PRIu64 ", \"ffn_bytes\": %" PRIu64 ", ",
               inspect->tensors, inspect->attention_bytes, inspect->ffn_bytes);
    else
        printf("\"tensors\": null, \"attention_bytes\": null, \"ffn_bytes\": null, ");
    printf("\"kv_bytes_per_token\": {\"f32\": %" PRIu64 ", \"bf16\": %" PRIu64 "}}\n",
           model_kv_bytes_per_token(spec, XP_DTYPE_F32),
           model_kv_bytes_per_token(spec, XP_DTYPE_BF16));
}

static const char inspect_help[] =
    "usage: xpool model inspect PATH [--json]\n"
    "\n"
    "Says what the checkpoint at PATH (a Hugging Face folder, or a GGUF file) is: architecture,\n"
    "sizes, FFN kinds, bytes on the attention side and on the FFN side, KV bytes a token. Checks\n"
    "that every tensor is there with the right shape; reads no weights.\n";

int cmd_model_inspect(int argc, char **argv)
{
    if (cli_wants_help(argc, argv, inspect_help))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    if (argc < 2) {
        fprintf(stderr, "xpool: which checkpoint? usage: xpool model inspect PATH [--json]\n");
        return CLI_EXIT_USAGE;
    }
    if (argv[1][0] == '-' ? cli_leftover(argc, argv, 1) : cli_leftover(argc, argv, 2))
        return CLI_EXIT_USAGE;
    int result = CLI_EXIT_FAILED;
    checkpoint_t *checkpoint = NULL;
    inspect_t inspect = {0};
    model_spec_t *spec = calloc(1, sizeof(*spec));
    if (!spec) {
        fprintf(stderr, "xpool: no memory\n");
        return CLI_EXIT_FAILED;
    }
    if (model_spec_load(argv[1], spec) != XP_OK) {
        result = model_report();
        goto done;
    }
    inspect.spec = spec;
    xp_status_t status = checkpoint_open(argv[1], spec, &checkpoint);
    if (status != XP_OK && status != XP_NOT_FOUND) {
        result = model_report();
        goto done;
    }
    inspect.checkpoint = checkpoint;
    if (model_inventory_visit(spec, inspect_tensor, &inspect) != XP_OK) {
        result = model_report();
        goto done;
    }
    if (checkpoint) {
        inspect.tensors = checkpoint_tensor_count(checkpoint);
        inspect.ffn_bytes = checkpoint_bytes(checkpoint, inspect_is_ffn, NULL);
        inspect.attention_bytes = checkpoint_bytes(checkpoint, NULL, NULL) - inspect.ffn_bytes;
    }
    for (uint32_t i = 0; i < spec->layers; i++) {
        inspect.dense_layers += spec->ffn[i].kind == MODEL_FFN_DENSE;
        inspect.moe_layers += spec->ffn[i].kind == MODEL_FFN_MOE;
    }
    if (json)
        inspect_json(&inspect, argv[1]);
    else
        inspect_print(&inspect, argv[1]);
    result = CLI_EXIT_OK;
done:
    checkpoint_close(checkpoint);
    free(spec);
    return result;
}

/* ---- synth ------------------------------------------------------------------------------------
 */

static const char synth_help[] =
    "usage: xpool model synth --arch ARCH --out DIR [options]\n"
    "\n"
    "Writes a small checkpoint with seeded random weights, a tokenizer and a chat template.\n"
    "ARCH is llama, qwen2, qwen3, qwen3-moe, deepseek-v2 or glm4-moe-lite.\n"
    "\n"
    "  --seed N               0\n"
    "  --layers N             4\n"
    "  --hidden N             128\n"
    "  --heads N              4\n"
    "  --kv-heads N           2 (MLA: as heads)\n"
    "  --head-dim N           32\n"
    "  --intermediate N       256, dense FFN width\n"
    "  --moe-intermediate N   64, width of one expert\n"
    "  --experts N            8\n"
    "  --top-k N              2\n"
    "  --dense-layers N       0 (MLA: 1), first layers of a MoE model that are dense\n"
    "  --groups N             1 (MLA: 4), groups of experts\n"
    "  --top-groups N         1 (MLA: 2), groups a token may use\n"
    "  --shared-experts N     0 (deepseek-v2: 2, glm4-moe-lite: 1)\n"
    "  --routed-scale X       1 (deepseek-v2: 2.5, glm4-moe-lite: 1.8)\n"
    "  --norm-topk BOOL       true (deepseek-v2: false), renormalise the chosen experts' weights\n"
    "  --vocab N              512, at least 259\n"
    "  --context N            2048 (with --rope llama3: 16384)\n"
    "  --rope KIND            none, linear, llama3 or yarn (deepseek-v2: none or yarn)\n"
    "  --tied                 input and output embeddings are one matrix\n"
    "  --dtype TYPE           f32, bf16 or f16\n"
    "  --format FORMAT        safetensors or gguf\n"
    "  --shards N             1, safetensors files\n"
    "  --quant TYPE           gguf only: q8_0, q4_0, q4_1, q4_k or q6_k\n"
    "  --force                replace a checkpoint that --out holds\n";

/* Reads one number option; false after printing what is wrong. */
static bool synth_take_number(int *argc, char **argv, const char *name, uint64_t maximum,
                              uint64_t *value)
{
    const char *text = cli_take_option(argc, argv, name);
    if (!text)
        return true;
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (end == text || *end || errno || text[0] == '-' || number > maximum) {
        fprintf(stderr, "xpool: %s \"%s\" is no whole number from 0 to %" PRIu64 "\n", name, text,
                maximum);
        return false;
    }
    *value = number;
    return true;
}

/* Reads a positive factor; false after printing what is wrong. */
static bool synth_take_factor(int *argc, char **argv, const char *name, double *value)
{
    const char *text = cli_take_option(argc, argv, name);
    if (!text)
        return true;
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end || !(number >= 1e-3 && number <= 1e3)) {
        fprintf(stderr, "xpool: %s \"%s\" is no number from 0.001 to 1000\n", name, text);
        return false;
    }
    *value = number;
    return true;
}

/* Finds a word in a NULL-terminated list; false after printing what is allowed. */
static bool synth_take_word(int *argc, char **argv, const char *name, const char *const *words,
                            unsigned *index)
{
    const char *text = cli_take_option(argc, argv, name);
    if (!text)
        return true;
    for (unsigned i = 0; words[i]; i++) {
        if (strcmp(text, words[i]) == 0) {
            *index = i;
            return true;
        }
    }
    fprintf(stderr, "xpool: %s \"%s\" is not one of", name, text);
    for (unsigned i = 0; words[i]; i++)
        fprintf(stderr, " %s", words[i]);
    fprintf(stderr, "\n");
    return false;
}

static bool synth_take_options(int *argc, char **argv, synth_options_t *options)
{
    static const char *const ropes[] = {"none", "linear", "llama3", "yarn", NULL};
    static const char *const dtypes[] = {"f32", "f16", "bf16", NULL};
    static const char *const formats[] = {"safetensors", "gguf", NULL};
    static const char *const quants[] = {"q8_0", "q4_0", "q4_1", "q4_k", "q6_k", NULL};
    static const char *const booleans[] = {"false", "true", NULL};
    const struct {
        const char *name;
        uint32_t *value;
    } numbers[] = {
        {"--layers", &options->layers},
        {"--hidden", &options->hidden},
        {"--heads", &options->heads},
        {"--kv-heads", &options->kv_heads},
        {"--head-dim", &options->head_dim},
        {"--intermediate", &options->intermediate},
        {"--moe-intermediate", &options->moe_intermediate},
        {"--experts", &options->experts},
        {"--top-k", &options->top_k},
        {"--dense-layers", &options->dense_layers},
        {"--groups", &options->groups},
        {"--top-groups", &options->top_groups},
        {"--shared-experts", &options->shared_experts},
        {"--vocab", &options->vocab},
        {"--context", &options->context},
        {"--shards", &options->shards},
    };
    uint32_t heads = options->heads, kv_heads = options->kv_heads, context = options->context;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        uint64_t value = *numbers[i].value;
        if (!synth_take_number(argc, argv, numbers[i].name, UINT32_MAX, &value))
            return false;
        *numbers[i].value = (uint32_t)value;
    }
    /* MLA has as many key/value heads as heads; they follow unless they were given too. */
    if (kv_heads == heads && options->kv_heads == kv_heads)
        options->kv_heads = options->heads;
    unsigned rope = options->rope, dtype = 0, format = 0, quant = UINT32_MAX;
    unsigned normalize = options->normalize_top_k;
    if (!synth_take_number(argc, argv, "--seed", UINT64_MAX, &options->seed) ||
        !synth_take_factor(argc, argv, "--routed-scale", &options->routed_scale) ||
        !synth_take_word(argc, argv, "--rope", ropes, &rope) ||
        !synth_take_word(argc, argv, "--dtype", dtypes, &dtype) ||
        !synth_take_word(argc, argv, "--format", formats, &format) ||
        !synth_take_word(argc, argv, "--quant", quants, &quant) ||
        !synth_take_word(argc, argv, "--norm-topk", booleans, &normalize))
        return false;
    options->rope = (model_rope_scaling_t)rope;
    /* Llama 3 stretches a context of 8192, so a shorter one would make no sense. */
    if (rope == MODEL_ROPE_LLAMA3 && options->context == context)
        options->context = 16384;
    options->dtype = (xp_dtype_t)(XP_DTYPE_F32 + dtype);
    options->gguf = format == 1;
    options->normalize_top_k = normalize != 0;
    if (quant != UINT32_MAX)
        options->quant = (xp_dtype_t)(XP_DTYPE_Q8_0 + quant);
    options->tied = cli_take_flag(argc, argv, "--tied");
    options->force = cli_take_flag(argc, argv, "--force");
    return true;
}

typedef struct synth_bar {
    uint64_t start_ns, shown_ns;
    bool shown;
} synth_bar_t;

/* A bar on a terminal, and only when the work takes more than half a second. */
static void synth_progress(void *context, uint64_t done, uint64_t total)
{
    synth_bar_t *bar = context;
    uint64_t now = xp_monotonic_ns();
    if (now - bar->start_ns < XP_NS_PER_S / 2 || now - bar->shown_ns < XP_NS_PER_S / 10)
        return;
    bar->shown_ns = now;
    bar->shown = true;
    unsigned filled = total ? (unsigned)(done * 30 / total) : 30;
    filled = filled > 30 ? 30 : filled;
    fprintf(stderr, "\r[%.*s%*s] %3u %%", (int)filled, "##############################",
            (int)(30 - filled), "", total ? (unsigned)(done * 100 / total) : 100);
}

int cmd_model_synth(int argc, char **argv)
{
    if (cli_wants_help(argc, argv, synth_help))
        return CLI_EXIT_OK;
    const char *name = cli_take_option(&argc, argv, "--arch");
    const char *folder = cli_take_option(&argc, argv, "--out");
    if (!name || !folder) {
        fprintf(stderr, "xpool: --arch and --out are needed; xpool model synth --help\n");
        return CLI_EXIT_USAGE;
    }
    model_architecture_t architecture = model_synth_architecture(name);
    if (architecture == MODEL_ARCH_COUNT) {
        fprintf(stderr, "xpool: --arch \"%s\" is not one of", name);
        for (unsigned i = 0; i < MODEL_ARCH_COUNT; i++)
            fprintf(stderr, " %s", model_synth_architecture_name((model_architecture_t)i));
        fprintf(stderr, "\n");
        return CLI_EXIT_USAGE;
    }
    synth_options_t options;
    model_synth_defaults(architecture, &options);
    if (!synth_take_options(&argc, argv, &options) || cli_leftover(argc, argv, 1))
        return CLI_EXIT_USAGE;
    synth_bar_t bar = {.start_ns = xp_monotonic_ns()};
    if (isatty(STDERR_FILENO)) {
        options.progress = synth_progress;
        options.progress_context = &bar;
    }
    xp_status_t status = model_synth_write(&options, folder);
    if (bar.shown)
        fprintf(stderr, "\r%*s\r", 40, "");
    if (status != XP_OK)
        return model_report();
    printf("wrote %s\n", folder);
    return CLI_EXIT_OK;
}
