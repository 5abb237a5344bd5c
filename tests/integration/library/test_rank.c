/* SPDX-License-Identifier: MIT */
/*
 * An Instance Rank of libxpool against a made-up daemon: what it says and in which order, calls in
 * every dtype, every way in which it can end, and that none of them waits for ever.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <sys/wait.h>

#include "fake_daemon.h"
#include "model/digest.h"
#include "xpool/xpool.h"

#include "count_allocations.h"

#define CHECKPOINT XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"

typedef struct told {
    atomic_uint count[4];
    atomic_uint seconds;
    char text[4][512];
} told_t;

typedef struct fixture {
    char folder[64], file[128], socket[96];
    fake_daemon_t fake;
    bool started;
    xpool_config_t *config;
    xpool_rank_t *rank;
    told_t told;
} fixture_t;

static void on_end(void *context, uint32_t end, uint32_t seconds, const char *text)
{
    told_t *told = context;
    snprintf(told->text[end], sizeof(told->text[end]), "%s", text);
    atomic_store(&told->seconds, seconds);
    atomic_fetch_add(&told->count[end], 1);
}

static int setup_dp(void **state, uint32_t dp)
{
    fixture_t *f = calloc(1, sizeof(*f));
    strcpy(f->folder, "/tmp/xpool-library-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    snprintf(f->file, sizeof(f->file), "%s/c.toml", f->folder);
    snprintf(f->socket, sizeof(f->socket), "%s/d.sock", f->folder);
    FILE *out = fopen(f->file, "w");
    assert_non_null(out);
    fprintf(out,
            "[daemon]\nsocket = \"%s\"\nhttp = \"127.0.0.1:0\"\n"
            "[deadlines]\nregistration = 1\nstartup = 2\n"
            "[atn]\ndevices = [\"cpu:0\", \"cpu:2\"]\n[ffn]\ndevices = [\"cpu:1\"]\n"
            "[devices.\"cpu:0\"]\nmemory = \"256MiB\"\nthreads = 1\n"
            "[devices.\"cpu:1\"]\nmemory = \"256MiB\"\nthreads = 1\n"
            "[devices.\"cpu:2\"]\nmemory = \"256MiB\"\nthreads = 1\n"
            "[observe]\nfolder = \"%s/observe\"\nrecords = 100\n"
            "[[models]]\nid = \"m\"\nengine = \"sglang\"\npath = \"%s\"\nattention_dp = %u\n",
            f->socket, f->folder, CHECKPOINT, dp);
    fclose(out);
    f->fake.dp_size = dp;
    *state = f;
    if (xpool_config_open(f->file, &f->config) != XPOOL_OK) {
        print_message("%s\n", xpool_error());
        return -1;
    }
    return 0;
}

static int setup(void **state)
{
    return setup_dp(state, 1);
}

static int setup_dp2(void **state)
{
    return setup_dp(state, 2);
}

static void empty_folder(const char *path)
{
    char entry_path[512];
    DIR *folder = opendir(path);
    const struct dirent *entry;
    while (folder && (entry = readdir(folder)))
        if (entry->d_name[0] != '.') {
            snprintf(entry_path, sizeof(entry_path), "%s/%s", path, entry->d_name);
            unlink(entry_path);
        }
    if (folder)
        closedir(folder);
    rmdir(path);
}

static int teardown(void **state)
{
    fixture_t *f = *state;
    char observe[128];
    xpool_rank_close(f->rank);
    xpool_config_close(f->config);
    if (f->started)
        fake_stop(&f->fake);
    snprintf(observe, sizeof(observe), "%s/observe", f->folder);
    empty_folder(observe);
    empty_folder(f->folder);
    free(f);
    return 0;
}

static void start(fixture_t *f)
{
    fake_start(&f->fake, f->socket);
    f->started = true;
}

static xpool_rank_options_t options_of(fixture_t *f)
{
    return (xpool_rank_options_t){.struct_bytes = sizeof(xpool_rank_options_t),
                                  .model_id = "m",
                                  .engine = "test 1",
                                  .checkpoint = CHECKPOINT,
                                  .hidden = FAKE_HIDDEN,
                                  .layers = 4,
                                  .attention_tp = 1,
                                  .attention_dp = f->fake.dp_size,
                                  .decode_rows = 16,
                                  .prefill_rows = 32,
                                  .dtype = XPOOL_F32,
                                  .on_end = on_end,
                                  .context = &f->told};
}

static void open_rank(fixture_t *f)
{
    xpool_rank_options_t options = options_of(f);
    start(f);
    xpool_status_t status = xpool_rank_open(f->config, &options, &f->rank);
    if (status != XPOOL_OK)
        print_message("%s\n", xpool_error());
    assert_int_equal(status, XPOOL_OK);
    assert_int_equal(xpool_rank_wait_executable(f->rank, 0), XPOOL_OK);
}

static void wait_for(atomic_bool *flag)
{
    for (int i = 0; i < 500 && !atomic_load(flag); i++)
        fake_sleep_ms(10);
    assert_true(atomic_load(flag));
}

static void wait_told(fixture_t *f, xpool_end_t end)
{
    for (int i = 0; i < 500 && !atomic_load(&f->told.count[end]); i++)
        fake_sleep_ms(10);
    assert_int_equal(atomic_load(&f->told.count[end]), 1);
}

static xpool_ffn_call_t call_of(uint32_t rows, void *input, void *output)
{
    return (xpool_ffn_call_t){.struct_bytes = sizeof(xpool_ffn_call_t),
                              .layer = 3,
                              .rows = rows,
                              .dtype = XPOOL_F32,
                              .step = XPOOL_PREFILL,
                              .execution = XPOOL_DECODE_GRAPH,
                              .slo_deadline_ns = 77,
                              .input = input,
                              .output = output};
}

/* A call on another thread. */
typedef struct caller {
    fixture_t *f;
    pthread_t thread;
    xpool_status_t status;
    uint64_t took_ns;
    char error[1024];
} caller_t;

static void *caller_main(void *context)
{
    caller_t *caller = context;
    float rows[FAKE_HIDDEN] = {1};
    xpool_ffn_call_t call = call_of(1, rows, rows);
    uint64_t start_ns = xp_monotonic_ns();
    caller->status = xpool_rank_ffn(caller->f->rank, &call);
    caller->took_ns = xp_monotonic_ns() - start_ns;
    snprintf(caller->error, sizeof(caller->error), "%s", xpool_error());
    return NULL;
}

static void caller_start(fixture_t *f, caller_t *caller)
{
    memset(caller, 0, sizeof(*caller));
    caller->f = f;
    atomic_store(&f->fake.mute, true);
    assert_int_equal(pthread_create(&caller->thread, NULL, caller_main, caller), 0);
    fake_sleep_ms(50);
}

/* ---- the ordinary life ------------------------------------------------------------------------
 */

static void test_introduction(void **state)
{
    fixture_t *f = *state;
    uint8_t digest[MODEL_DIGEST_BYTES];
    open_rank(f);
    assert_int_equal(f->fake.hello.role, xpw_Role_ROLE_INSTANCE);
    assert_true(f->fake.hello.library);
    assert_string_equal(f->fake.hello.name, "m");
    assert_int_equal(f->fake.hello.rank, 0);
    const xpw_Workload *workload = &f->fake.workload;
    assert_string_equal(workload->engine, "test 1");
    assert_string_equal(workload->path, CHECKPOINT);
    assert_int_equal(model_checkpoint_digest(CHECKPOINT, digest), XP_OK);
    assert_memory_equal(workload->checkpoint, digest, sizeof(digest));
    assert_int_equal(workload->hidden, FAKE_HIDDEN);
    assert_int_equal(workload->layers, 4);
    assert_int_equal(workload->prefill_rows, 32);
}

static void test_calls(void **state)
{
    fixture_t *f = *state;
    open_rank(f);
    float in[FAKE_MAX_ROWS * FAKE_HIDDEN], out[FAKE_MAX_ROWS * FAKE_HIDDEN];
    for (uint32_t i = 0; i < FAKE_MAX_ROWS * FAKE_HIDDEN; i++)
        in[i] = (float)i / 16;
    for (uint32_t rows = 0; rows <= FAKE_MAX_ROWS; rows += 8) {
        xpool_ffn_call_t call = call_of(rows, rows ? in : NULL, rows ? out : NULL);
        memset(out, 0xff, sizeof(out));
        assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
        for (uint32_t i = 0; i < rows * FAKE_HIDDEN; i++)
            assert_float_equal(out[i], 2 * in[i] + 3, 0);
        assert_int_equal(f->fake.last_kind, TRANSPORT_PREFILL);
        assert_int_equal(f->fake.last_slo, 77);
    }
    /* The answer may go where the question was. */
    xpool_ffn_call_t call = call_of(2, in, in);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
    for (uint32_t i = 0; i < 2 * FAKE_HIDDEN; i++)
        assert_float_equal(in[i], 2 * ((float)i / 16) + 3, 0);
    xpool_rank_state_t info = {.struct_bytes = sizeof(info)};
    xpool_rank_state(f->rank, &info);
    assert_int_equal(info.max_rows, FAKE_MAX_ROWS);
    assert_int_equal(info.hidden, FAKE_HIDDEN);
    assert_int_equal(info.executable, 1);
    assert_int_equal(info.ended, 0);
    assert_int_equal(info.ffn_calls, 6);
    assert_int_equal(info.ffn_rows, 82);
    assert_true(info.ffn_wait_ns > 0);
}

static void test_half_precision(void **state)
{
    fixture_t *f = *state;
    open_rank(f);
    uint16_t rows[FAKE_HIDDEN];
    /* 1.5 as BF16 and as F16; 2 x 1.5 + 3 = 6. */
    static const struct {
        uint32_t dtype;
        uint16_t question, answer;
    } cases[] = {{XPOOL_BF16, 0x3fc0, 0x40c0}, {XPOOL_F16, 0x3e00, 0x4600}};
    for (uint32_t c = 0; c < 2; c++) {
        for (uint32_t i = 0; i < FAKE_HIDDEN; i++)
            rows[i] = cases[c].question;
        xpool_ffn_call_t call = call_of(1, rows, rows);
        call.dtype = cases[c].dtype;
        assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
        for (uint32_t i = 0; i < FAKE_HIDDEN; i++)
            assert_int_equal(rows[i], cases[c].answer);
    }
}

static void test_no_allocation(void **state)
{
    fixture_t *f = *state;
    if (!COUNTS)
        skip();
    open_rank(f);
    static uint16_t rows[4 * FAKE_HIDDEN];
    xpool_ffn_call_t call = call_of(4, rows, rows);
    call.dtype = XPOOL_BF16;
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
    uint64_t before = atomic_load(&allocations);
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
    assert_int_equal(atomic_load(&allocations), before);
}

static void test_wrong_arguments(void **state)
{
    fixture_t *f = *state;
    open_rank(f);
    float rows[FAKE_HIDDEN] = {0};
    xpool_ffn_call_t call = call_of(1, rows, rows);
#define EXPECT(field, value, words)                                                                \
    do {                                                                                           \
        xpool_ffn_call_t wrong = call;                                                             \
        wrong.field = value;                                                                       \
        assert_int_equal(xpool_rank_ffn(f->rank, &wrong), XPOOL_INVALID);                          \
        assert_non_null(strstr(xpool_error(), words));                                             \
    } while (0)
    EXPECT(struct_bytes, 8, "struct_bytes");
    EXPECT(layer, 4, "layer 4 of 4");
    EXPECT(rows, FAKE_MAX_ROWS + 1, "models[].prefill_rows");
    EXPECT(dtype, 3, "dtype 3");
    EXPECT(step, 3, "step 3");
    EXPECT(execution, 3, "execution 3");
    EXPECT(input, NULL, "without input or output");
    EXPECT(output, NULL, "without input or output");
#undef EXPECT
    assert_int_equal(xpool_rank_ffn(NULL, &call), XPOOL_INVALID);
    assert_int_equal(xpool_rank_ffn(f->rank, NULL), XPOOL_INVALID);
    assert_int_equal(atomic_load(&f->fake.requests), 0);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
}

static void test_wrong_options(void **state)
{
    fixture_t *f = *state;
    xpool_rank_t *rank = NULL;
    start(f);
#define EXPECT(field, value, status, words)                                                        \
    do {                                                                                           \
        xpool_rank_options_t wrong = options_of(f);                                                \
        wrong.field = value;                                                                       \
        assert_int_equal(xpool_rank_open(f->config, &wrong, &rank), status);                       \
        assert_non_null(strstr(xpool_error(), words));                                             \
        assert_null(rank);                                                                         \
    } while (0)
    EXPECT(struct_bytes, 4, XPOOL_INVALID, "struct_bytes");
    EXPECT(model_id, "other", XPOOL_NOT_FOUND, "models[].id");
    EXPECT(model_id, NULL, XPOOL_INVALID, "model_id");
    EXPECT(checkpoint, NULL, XPOOL_INVALID, "checkpoint");
    EXPECT(checkpoint, "/nowhere", XPOOL_NOT_FOUND, "/nowhere");
    EXPECT(attention_tp, 2, XPOOL_INVALID, "models[].attention_tp");
    EXPECT(rank, 1, XPOOL_INVALID, "rank 1");
    EXPECT(dtype, 9, XPOOL_INVALID, "dtype");
#undef EXPECT
}

static void test_data_parallel(void **state)
{
    fixture_t *f = *state;
    open_rank(f);
    float rows[2 * FAKE_HIDDEN] = {0};
    uint32_t dp_rows[2] = {2, 5};
    xpool_ffn_call_t call = call_of(2, rows, rows);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_INVALID); /* without dp_rows */
    call.dp_rows = dp_rows;
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
    assert_int_equal(f->fake.last_dp_rows[0], 2);
    assert_int_equal(f->fake.last_dp_rows[1], 5);
    /* An idle rank takes part with no rows. */
    dp_rows[0] = 0;
    call.rows = 0;
    call.input = call.output = NULL;
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
    call.rows = 1;
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_INVALID);
}

static void test_serving(void **state)
{
    fixture_t *f = *state;
    open_rank(f);
    xpool_serving_t serving = {.struct_bytes = sizeof(serving),
                               .host = "127.0.0.1",
                               .port = 1234,
                               .weight_bytes = 5,
                               .kv_bytes = 6,
                               .kv_tokens = 7,
                               .max_context = 8};
    xpool_serving_t wrong = serving;
    wrong.host = NULL;
    assert_int_equal(xpool_rank_serving(f->rank, &wrong), XPOOL_INVALID);
    wrong.port = 65536;
    assert_int_equal(xpool_rank_serving(f->rank, &wrong), XPOOL_INVALID);
    assert_int_equal(xpool_rank_serving(f->rank, &serving), XPOOL_OK);
    assert_int_equal(xpool_rank_serving(f->rank, &serving), XPOOL_INVALID); /* twice */
    wait_for(&f->fake.has_initialized);
    assert_string_equal(f->fake.initialized.host, "127.0.0.1");
    assert_int_equal(f->fake.initialized.port, 1234);
    assert_int_equal(f->fake.initialized.weight_bytes, 5);
    assert_int_equal(f->fake.initialized.kv_bytes, 6);
    assert_int_equal(f->fake.initialized.max_context, 8);
    wait_for(&f->fake.has_stats);
    xpool_rank_close(f->rank);
    f->rank = NULL;
    wait_for(&f->fake.has_bye);
    wait_for(&f->fake.has_hung_up);
    assert_int_equal(atomic_load(&f->told.count[XPOOL_END_FAILED]), 0);
}

static void test_configuration(void **state)
{
    fixture_t *f = *state;
    xpool_model_info_t info = {.struct_bytes = sizeof(info)};
    assert_int_equal(xpool_config_model_count(f->config), 1);
    assert_string_equal(xpool_config_model_id(f->config, 0), "m");
    assert_null(xpool_config_model_id(f->config, 1));
    assert_string_equal(xpool_config_model_path(f->config, "m"), CHECKPOINT);
    assert_null(xpool_config_model_path(f->config, "other"));
    assert_non_null(strstr(xpool_error(), "other"));
    if (xpool_config_model_info(f->config, "m", &info) != XPOOL_OK)
        fail_msg("%s", xpool_error());
    assert_int_equal(info.struct_bytes, sizeof(info));
    assert_string_equal(info.architecture, "Qwen3MoeForCausalLM");
    assert_string_equal(info.engine, "sglang");
    assert_true(info.hidden && info.layers && info.max_rows && info.kv_tokens && info.max_context);
    info.struct_bytes = 4;
    assert_int_equal(xpool_config_model_info(f->config, "m", &info), XPOOL_INVALID);
    static const struct {
        const char *name;
        int is_ffn;
    } tensors[] = {{"model.layers.0.mlp.gate.weight", 1},
                   {"model.layers.1.mlp.experts.3.down_proj.weight", 1},
                   {"model.layers.0.self_attn.q_proj.weight", 0},
                   {"model.layers.0.post_attention_layernorm.weight", 0},
                   {"model.embed_tokens.weight", 0},
                   {"model.layers.200.mlp.gate.weight", 0}};
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++)
        assert_int_equal(xpool_config_is_ffn_tensor(f->config, "m", tensors[i].name),
                         tensors[i].is_ffn);
    assert_int_equal(xpool_config_is_ffn_tensor(f->config, "other", "x"), -1);
    xpool_config_t *none = NULL;
    assert_int_equal(xpool_config_open("/nowhere.toml", &none), XPOOL_NOT_FOUND);
    unsetenv("XPOOL_CONFIG");
    assert_int_equal(xpool_config_open(NULL, &none), XPOOL_INVALID);
    assert_non_null(strstr(xpool_error(), "XPOOL_CONFIG"));
    assert_int_equal(setenv("XPOOL_CONFIG", f->file, 1), 0);
    assert_int_equal(xpool_config_open(NULL, &none), XPOOL_OK);
    xpool_config_close(none);
    unsetenv("XPOOL_CONFIG");
}

/* Signals are the engine's: no thread of ours takes one. */
static void test_signals(void **state)
{
    fixture_t *f = *state;
    DIR *folder;
    struct dirent *entry;
    char path[320], line[256];
    bool found = false;
    open_rank(f);
    folder = opendir("/proc/self/task");
    assert_non_null(folder);
    while ((entry = readdir(folder))) {
        unsigned long long blocked = 0;
        snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
        FILE *status = fopen(path, "r");
        while (status && fgets(line, sizeof(line), status))
            sscanf(line, "SigBlk: %llx", &blocked);
        if (status)
            fclose(status);
        /* SIGINT, SIGTERM, SIGCHLD and the rest; the C library keeps two real-time ones. */
        found = found || (blocked & 0x7fffffffull) == 0x7ffbfeffull;
    }
    closedir(folder);
    assert_true(found);
}

static void test_fork(void **state)
{
    fixture_t *f = *state;
    float rows[FAKE_HIDDEN] = {0};
    open_rank(f);
    xpool_ffn_call_t call = call_of(1, rows, rows);
    pid_t child = fork();
    if (child == 0) {
        bool good = xpool_rank_ffn(f->rank, &call) == XPOOL_INVALID &&
                    strstr(xpool_error(), "forked child") &&
                    xpool_rank_wait_executable(f->rank, 0) == XPOOL_INVALID &&
                    !xpool_config_model_path(f->config, "m");
        xpool_rank_close(f->rank);
        xpool_config_close(f->config);
        _exit(good ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
}

/* ---- not admitted -----------------------------------------------------------------------------
 */

static void expect_open(fixture_t *f, xpool_status_t expected, const char *words)
{
    xpool_rank_options_t options = options_of(f);
    assert_int_equal(xpool_rank_open(f->config, &options, &f->rank), expected);
    if (!strstr(xpool_error(), words))
        fail_msg("\"%s\" is not in \"%s\"", words, xpool_error());
    assert_null(f->rank);
    for (uint32_t end = 0; end < 4; end++)
        assert_int_equal(atomic_load(&f->told.count[end]), 0);
}

static void test_no_daemon(void **state)
{
    uint64_t start_ns = xp_monotonic_ns();
    expect_open(*state, XPOOL_TIMEOUT, "deadlines.registration");
    assert_true(xp_monotonic_ns() - start_ns < 3 * XP_NS_PER_S);
}

static void test_silent_daemon(void **state)
{
    fixture_t *f = *state;
    f->fake.answer = FAKE_SILENT;
    start(f);
    expect_open(f, XPOOL_TIMEOUT, "deadlines.registration");
}

static void test_refused(void **state)
{
    fixture_t *f = *state;
    f->fake.answer = FAKE_REFUSE;
    f->fake.reason = "hidden 64, the checkpoint has 256";
    start(f);
    expect_open(f, XPOOL_REFUSED, "the checkpoint has 256");
}

static void test_stopping(void **state)
{
    fixture_t *f = *state;
    f->fake.answer = FAKE_STOPPING;
    f->fake.reason = "the system is stopping";
    start(f);
    expect_open(f, XPOOL_CLOSED, "the system is stopping");
}

/* Its own reason is what counts, not the Stop that the daemon answers it with. */
static void test_cannot_record(void **state)
{
    fixture_t *f = *state;
    char path[128];
    snprintf(path, sizeof(path), "%s/observe", f->folder);
    FILE *file = fopen(path, "w"); /* where the folder should be */
    assert_non_null(file);
    fclose(file);
    start(f);
    expect_open(f, XPOOL_FAILED, "/observe/rank-m.0-");
    wait_for(&f->fake.has_fail_report);
}

static void test_not_executable(void **state)
{
    fixture_t *f = *state;
    f->fake.never_initialize = true;
    xpool_rank_options_t options = options_of(f);
    start(f);
    float rows[FAKE_HIDDEN] = {0};
    xpool_ffn_call_t call = call_of(1, rows, rows);
    assert_int_equal(xpool_rank_open(f->config, &options, &f->rank), XPOOL_OK);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_RETRY);
    assert_int_equal(xpool_rank_wait_executable(f->rank, 0.2), XPOOL_TIMEOUT);
    assert_non_null(strstr(xpool_error(), "not executable after 0.2 s"));
    assert_int_equal(xpool_rank_wait_executable(f->rank, -1), XPOOL_INVALID);
}

/* ---- ends -------------------------------------------------------------------------------------
 */

static xpw_Envelope failure_envelope(void)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_failure_tag};
    envelope.body.failure.generation = 1;
    strcpy(envelope.body.failure.who, "FfnAgent cpu:1");
    strcpy(envelope.body.failure.what, "its process (pid 4) died");
    strcpy(envelope.body.failure.when, "2026-01-01T00:00:00Z");
    return envelope;
}

static void expect_failed(fixture_t *f, caller_t *caller, const char *words)
{
    pthread_join(caller->thread, NULL);
    assert_int_equal(caller->status, XPOOL_FAILED);
    assert_true(caller->took_ns < 2 * XP_NS_PER_S);
    if (!strstr(caller->error, words))
        fail_msg("\"%s\" is not in \"%s\"", words, caller->error);
    wait_told(f, XPOOL_END_FAILED);
    assert_non_null(strstr(f->told.text[XPOOL_END_FAILED], words));
    xpool_rank_state_t info = {.struct_bytes = sizeof(info)};
    xpool_rank_state(f->rank, &info);
    assert_int_equal(info.ended, XPOOL_END_FAILED);
    assert_non_null(strstr(info.failure, words));
    /* Nothing after it waits. */
    float rows[FAKE_HIDDEN] = {0};
    xpool_ffn_call_t call = call_of(1, rows, rows);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_FAILED);
    assert_int_equal(xpool_rank_wait_executable(f->rank, 0), XPOOL_FAILED);
}

static void test_failure_in_a_call(void **state)
{
    fixture_t *f = *state;
    caller_t caller;
    open_rank(f);
    caller_start(f, &caller);
    xpw_Envelope failure = failure_envelope();
    fake_order(&f->fake, &failure);
    expect_failed(f, &caller, "FfnAgent cpu:1: its process (pid 4) died");
}

/* Its arena is in use: another one would take it from the call. */
static void test_admitted_twice(void **state)
{
    fixture_t *f = *state;
    caller_t caller;
    open_rank(f);
    caller_start(f, &caller);
    xpw_Envelope again = {.which_body = xpw_Envelope_admitted_tag};
    again.body.admitted = (xpw_Admitted){.generation = 1,
                                         .hidden = FAKE_HIDDEN,
                                         .max_rows = FAKE_MAX_ROWS,
                                         .dp_size = f->fake.dp_size};
    fake_order(&f->fake, &again);
    expect_failed(f, &caller, "a second Admitted");
}

/* The arena may be closed before the daemon's words have come. */
static void test_failure_seen_in_the_arena_first(void **state)
{
    fixture_t *f = *state;
    caller_t caller;
    open_rank(f);
    caller_start(f, &caller);
    transport_arena_close(f->fake.arena_fd, XP_FATAL);
    fake_sleep_ms(200);
    xpw_Envelope failure = failure_envelope();
    fake_order(&f->fake, &failure);
    expect_failed(f, &caller, "FfnAgent cpu:1: its process (pid 4) died");
}

static void test_daemon_dies(void **state)
{
    fixture_t *f = *state;
    caller_t caller;
    open_rank(f);
    caller_start(f, &caller);
    fake_order(&f->fake, NULL);
    expect_failed(f, &caller, "the daemon died");
}

static void test_no_answer(void **state)
{
    fixture_t *f = *state;
    caller_t caller;
    f->fake.submission_timeout_ns = 100 * XP_NS_PER_MS;
    open_rank(f);
    caller_start(f, &caller);
    pthread_join(caller.thread, NULL);
    assert_int_equal(caller.status, XPOOL_TIMEOUT);
    assert_non_null(strstr(caller.error, "FFN of layer 3"));
    wait_told(f, XPOOL_END_FAILED);
    wait_for(&f->fake.has_fail_report);
    assert_non_null(strstr(f->fake.fail_report, "FFN of layer 3"));
    float rows[FAKE_HIDDEN] = {0};
    xpool_ffn_call_t call = call_of(1, rows, rows);
    assert_int_not_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK);
    /* The Stop that answers it changes nothing. */
    fake_sleep_ms(100);
    xpool_rank_state_t info = {.struct_bytes = sizeof(info)};
    xpool_rank_state(f->rank, &info);
    assert_int_equal(info.ended, XPOOL_END_FAILED);
    assert_int_equal(atomic_load(&f->told.count[XPOOL_END_NOW]), 0);
}

static void test_ordered_end(void **state)
{
    fixture_t *f = *state;
    float rows[FAKE_HIDDEN] = {0};
    xpool_ffn_call_t call = call_of(1, rows, rows);
    open_rank(f);
    xpw_Envelope stop = {.which_body = xpw_Envelope_stop_tag};
    stop.body.stop.phase = xpw_StopPhase_STOP_QUIESCE;
    fake_order(&f->fake, &stop);
    stop.body.stop.phase = xpw_StopPhase_STOP_DRAIN;
    stop.body.stop.seconds = 17;
    fake_order(&f->fake, &stop);
    fake_order(&f->fake, &stop);
    wait_told(f, XPOOL_END_DRAIN);
    assert_int_equal(atomic_load(&f->told.seconds), 17);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_OK); /* open requests go on */
    stop.body.stop.phase = xpw_StopPhase_STOP_FINALIZE;
    fake_order(&f->fake, &stop);
    wait_told(f, XPOOL_END_NOW);
    assert_int_equal(atomic_load(&f->told.count[XPOOL_END_DRAIN]), 1);
    assert_int_equal(atomic_load(&f->told.count[XPOOL_END_FAILED]), 0);
    assert_int_equal(xpool_rank_wait_executable(f->rank, 0), XPOOL_CLOSED);
    transport_arena_close(f->fake.arena_fd, XP_CLOSED);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_CLOSED);
}

static void test_close_ends_a_call(void **state)
{
    fixture_t *f = *state;
    caller_t caller;
    open_rank(f);
    caller_start(f, &caller);
    float rows[FAKE_HIDDEN] = {0};
    xpool_ffn_call_t call = call_of(1, rows, rows);
    assert_int_equal(xpool_rank_ffn(f->rank, &call), XPOOL_RETRY); /* one thread at a time */
    xpool_rank_close(f->rank);
    f->rank = NULL;
    pthread_join(caller.thread, NULL);
    assert_int_equal(caller.status, XPOOL_CLOSED);
    assert_true(caller.took_ns < 2 * XP_NS_PER_S);
    wait_for(&f->fake.has_bye);
}

int main(void)
{
#define TEST(name, prepare) cmocka_unit_test_setup_teardown(name, prepare, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_introduction, setup),
        TEST(test_calls, setup),
        TEST(test_half_precision, setup),
        TEST(test_no_allocation, setup),
        TEST(test_wrong_arguments, setup),
        TEST(test_wrong_options, setup),
        TEST(test_data_parallel, setup_dp2),
        TEST(test_serving, setup),
        TEST(test_configuration, setup),
        TEST(test_signals, setup),
        TEST(test_fork, setup),
        TEST(test_no_daemon, setup),
        TEST(test_silent_daemon, setup),
        TEST(test_refused, setup),
        TEST(test_stopping, setup),
        TEST(test_cannot_record, setup),
        TEST(test_not_executable, setup),
        TEST(test_failure_in_a_call, setup),
        TEST(test_admitted_twice, setup),
        TEST(test_failure_seen_in_the_arena_first, setup),
        TEST(test_daemon_dies, setup),
        TEST(test_no_answer, setup),
        TEST(test_ordered_end, setup),
        TEST(test_close_ends_a_call, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
