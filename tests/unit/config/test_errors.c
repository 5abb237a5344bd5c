/* SPDX-License-Identifier: MIT */
/* Every kind of mistake: where it is said to be, what was found, what is allowed. */
#include "config_test.h"

typedef struct mistake {
    const char *file;    /* NULL: none */
    const char *setting; /* KEY=VALUE on the command line, or NULL */
    const char *message; /* a whole line of the report */
} mistake_t;

static const mistake_t mistakes[] = {
    /* syntax */
    {"[daemon\n", NULL, "f.toml:1:8: "},
    {"a = 1\na = 2\n", NULL, "f.toml:2:"},
    {"x = \"\xff\"\n", NULL, "f.toml:1:"},
    {"a = [\n[1],\n]\n[:models]\n", NULL, "f.toml:4:1: a table's header must begin with a key"},
    {"\xef\xbb\xbf  [[ .a]]\n", NULL, "f.toml:1:3: a table's header must begin with a key"},
    {"[]\n", NULL, "f.toml:1:2: "},
    {"cache.root = \xc3\xa9\n", NULL, "f.toml:1:14: "},
    {"cache.root\xc2\xa0= 1\n", NULL, "f.toml:1:11: "},
    {"[\"\xc3\xa9\"]\n", NULL,
     "f.toml:1:2: \"\xc3\xa9\": unknown key; xpool help settings lists the known ones"},
    {"[a.]\n", NULL, "f.toml:1:4: "},
    {"[[]]\n", NULL, "f.toml:1:3: "},
    /* unknown keys, with the nearest known one */
    {"[scheduler]\nffn_concurency = 3\n", NULL,
     "f.toml:2:1: scheduler.ffn_concurency: unknown key; did you mean scheduler.ffn_concurrency?"},
    {"[deamon]\nhttp = 3\n", NULL, "f.toml:1:2: deamon: unknown key; did you mean daemon?"},
    {"[[model]]\nid = 'a'\n", NULL, "f.toml:1:3: model: unknown key; did you mean models?"},
    {"ffn_concurrency = 3\n", NULL,
     "f.toml:1:1: ffn_concurrency: unknown key; did you mean scheduler.ffn_concurrency?"},
    {"\"daemon.http\" = \"127.0.0.1:1\"\n", NULL,
     "f.toml:1:1: \"daemon.http\": unknown key; did you mean daemon.http?"},
    {"[daemon.http]\nport = 1\n", NULL,
     "f.toml:1:1: daemon.http: found a table, allowed: HOST:PORT, such as 127.0.0.1:8000 or "
     "[::1]:8000"},
    {"zzzzzzzzzz = 1\n", NULL,
     "f.toml:1:1: zzzzzzzzzz: unknown key; xpool help settings lists the known ones"},
    {TEST_MODEL "dtyp = 'auto'\n", NULL,
     "f.toml:4:1: models[0].dtyp: unknown key; did you mean models[].dtype?"},
    {"[devices.\"cpu:0\"]\nthread = 1\n", NULL,
     "f.toml:2:1: devices.\"cpu:0\".thread: unknown key; did you mean devices.\"cpu:N\".threads?"},
    {NULL, "scheduler.ffn_polcy=fifo",
     "cli: scheduler.ffn_polcy: unknown key; did you mean scheduler.ffn_policy?"},
    {"scheduler = 5\n", NULL, "f.toml:1:13: scheduler: found integer 5, allowed: a table"},
    /* wrong types */
    {"daemon.http = 8200\n", NULL,
     "f.toml:1:15: daemon.http: found integer 8200, allowed: HOST:PORT, such as 127.0.0.1:8000 or "
     "[::1]:8000"},
    {"scheduler.ffn_concurrency = \"4\"\n", NULL,
     "f.toml:1:29: scheduler.ffn_concurrency: found string \"4\", allowed: an integer from 1 to "
     "16"},
    {"scheduler.ffn_concurrency = 4.0\n", NULL,
     "f.toml:1:29: scheduler.ffn_concurrency: found number 4, allowed: an integer from 1 to 16"},
    {"deadlines.stop = true\n", NULL,
     "f.toml:1:18: deadlines.stop: found true, allowed: a number from 0.1 to 86400"},
    {"devices.allow_shared_roles = 1\n", NULL,
     "f.toml:1:30: devices.allow_shared_roles: found integer 1, allowed: true or false"},
    {"atn.devices = \"cpu:0\"\n", NULL,
     "f.toml:1:15: atn.devices: found string \"cpu:0\", allowed: a list of 1 to 16 different "
     "device "
     "names such as [\"cpu:0\"] or [\"cuda:0\"]"},
    {"atn.devices = [0]\n", NULL,
     "f.toml:1:16: atn.devices: found integer 0, allowed: device names such as \"cpu:0\" or "
     "\"cuda:0\""},
    {"deadlines.stop = 2020-01-01\n", NULL,
     "f.toml:1:18: deadlines.stop: found a date, allowed: a number from 0.1 to 86400"},
    {"models = 1\n", NULL,
     "f.toml:1:1: models: found a single value, allowed: a list of tables; begin each model with "
     "[[models]]"},
    {"models = ['a']\n", NULL, "f.toml:1:11: models[0]: found string \"a\", allowed: a table"},
    {TEST_MODEL "slo = 5\n", NULL, "f.toml:4:7: models[0].slo: found integer 5, allowed: a table"},
    {TEST_MODEL "engine_args = 'x'\n", NULL,
     "f.toml:4:15: models[0].engine_args: found string \"x\", allowed: a list of at most 64 "
     "strings"},
    {TEST_MODEL "chat_template = \"a\\u0000b\"\n", NULL,
     "f.toml:4:17: models[0].chat_template: found string \"a\", allowed: a string of at most 63 "
     "bytes"},
    {NULL, "cache.root=\xff\xfe",
     "cli: cache.root: found string \"\xff\xfe\", allowed: a path of at most 1023 bytes"},
    {NULL, "devices.allow_shared_roles=yes",
     "cli: devices.allow_shared_roles: found string \"yes\", allowed: true or false"},
    /* bounds */
    {"scheduler.ffn_concurrency = 0\n", NULL,
     "f.toml:1:29: scheduler.ffn_concurrency: found integer 0, allowed: an integer from 1 to 16"},
    {"scheduler.ffn_concurrency = -1\n", NULL,
     "f.toml:1:29: scheduler.ffn_concurrency: found integer -1, allowed: an integer from 1 to 16"},
    {"atn.device_memory_utilization = 1.5\n", NULL,
     "f.toml:1:33: atn.device_memory_utilization: found number 1.5, allowed: a number from 0.01 to "
     "1"},
    {"deadlines.stop = nan\n", NULL,
     "f.toml:1:18: deadlines.stop: found number nan, allowed: a number from 0.1 to 86400"},
    {"deadlines.stop = inf\n", NULL,
     "f.toml:1:18: deadlines.stop: found number inf, allowed: a number from 0.1 to 86400"},
    {TEST_MODEL "port = 65536\n", NULL,
     "f.toml:4:8: models[0].port: found integer 65536, allowed: an integer from 0 to 65535"},
    /* sizes */
    {"devices.\"cpu:0\".memory = \"8GB\"\n", NULL,
     "f.toml:1:26: devices.\"cpu:0\".memory: found string \"8GB\", allowed: bytes, or a string "
     "such "
     "as \"512MiB\" or \"8GiB\", from 1MiB to 64TiB"},
    {"devices.\"cpu:0\".memory = 1024\n", NULL,
     "f.toml:1:26: devices.\"cpu:0\".memory: found integer 1024, allowed: bytes, or a string such "
     "as \"512MiB\" or \"8GiB\", from 1MiB to 64TiB"},
    {"ffn.device_memory_extra_margin_bytes = \"99999999999999999999GiB\"\n", NULL,
     "f.toml:1:40: ffn.device_memory_extra_margin_bytes: found string "
     "\"99999999999999999999GiB\", allowed: bytes, or a string such as \"512MiB\" or \"8GiB\", "
     "from "
     "0 to 1TiB"},
    /* choices and addresses */
    {"scheduler.ffn_policy = \"deadlin\"\n", NULL,
     "f.toml:1:24: scheduler.ffn_policy: found string \"deadlin\", allowed: one of fifo, random, "
     "deadline (did you mean deadline?)"},
    {"fabric.provider = \"tcp\"\n", NULL,
     "f.toml:1:19: fabric.provider: found string \"tcp\", allowed: one of auto, shm, nvshmem, p2p, "
     "ucx, p2p-relay, nvshmem-far"},
    {"gateway.http = \"localhost\"\n", NULL,
     "f.toml:1:16: gateway.http: found string \"localhost\", allowed: HOST:PORT, such as "
     "127.0.0.1:8000 or [::1]:8000"},
    {"gateway.http = \"127.0.0.1:8200\"\n", NULL,
     "f.toml:1:16: gateway.http: 127.0.0.1:8200 is daemon.http too"},
    /* devices */
    {"atn.devices = []\n", NULL,
     "f.toml:1:15: atn.devices: found an empty list, allowed: a list of 1 to 16 different device "
     "names such as [\"cpu:0\"] or [\"cuda:0\"]"},
    {"atn.devices = [\"cpu:0\", \"cpu:0\"]\n", NULL,
     "f.toml:1:25: atn.devices: cpu:0 is listed twice"},
    {"atn.devices = [\"gpu:0\"]\n", NULL,
     "f.toml:1:16: atn.devices: found \"gpu:0\", allowed: device names such as cpu:0 or cuda:0"},
    {"atn.devices = [\"cpu:00\"]\n", NULL,
     "f.toml:1:16: atn.devices: found \"cpu:00\", allowed: device names such as cpu:0 or cuda:0"},
    {NULL, "atn.devices=cpu:0,cpu:0", "cli: atn.devices: cpu:0 is listed twice"},
    {"atn.devices = [\"cpu:2\"]\nffn.devices = [\"cpu:1\", \"cpu:2\"]\n", NULL,
     "f.toml:2:15: ffn.devices: cpu:2 is in atn.devices too (f.toml:1:15); a device has one role "
     "unless devices.allow_shared_roles is true"},
    {"atn.devices = [\"cpu:1\"]\n", NULL,
     "f.toml:1:15: ffn.devices: cpu:1 is in atn.devices too (f.toml:1:15); a device has one role "
     "unless devices.allow_shared_roles is true"},
    {"[atn]\ndevices = ['cuda:0']\n[devices]\natn_cuda_devices = [0]\n", NULL,
     "f.toml:4:1: devices.atn_cuda_devices: atn.devices means the same and is set too "
     "(f.toml:2:11); keep one"},
    {"[ffn]\ndevices = ['cuda:0']\n", "devices.ffn_cuda_devices=[1]",
     "cli: devices.ffn_cuda_devices: ffn.devices means the same and is set too (f.toml:2:11); keep "
     "one"},
    {"devices.atn_cuda_devices = [0, 0]\n", NULL,
     "f.toml:1:32: devices.atn_cuda_devices: cuda:0 is listed twice"},
    {"devices.atn_cuda_devices = [-1]\n", NULL,
     "f.toml:1:29: devices.atn_cuda_devices: found integer -1, allowed: device names such as "
     "\"cpu:0\" or \"cuda:0\", or N for cuda:N"},
    {"devices.\"cpu:x\".threads = 1\n", NULL,
     "f.toml:1:9: devices.\"cpu:x\": no device name, allowed: names such as \"cpu:0\" or "
     "\"cuda:0\""},
    {"devices.\"cuda:0\".threads = 1\n", NULL,
     "f.toml:1:18: devices.\"cuda:0\".threads: unknown key; did you mean "
     "devices.\"cpu:N\".threads?"},
    {"devices.\"cpu:0\" = 1\n", NULL,
     "f.toml:1:19: devices.\"cpu:0\": found integer 1, allowed: a table"},
    {"devices.\"cpu:0\".cpus = []\n", NULL,
     "f.toml:1:24: devices.\"cpu:0\".cpus: found an empty list, allowed: a list of different CPU "
     "numbers, at most 256, such as [0, 1, 6] or \"0-3,6\""},
    {"devices.\"cpu:0\".cpus = [0, 1, 0]\n", NULL,
     "f.toml:1:31: devices.\"cpu:0\".cpus: found integer 0, allowed: a list of different CPU "
     "numbers, at most 256, such as [0, 1, 6] or \"0-3,6\""},
    {"devices.\"cpu:0\".cpus = \"3-1\"\n", NULL,
     "f.toml:1:24: devices.\"cpu:0\".cpus: found string \"3-1\", allowed: a list of different CPU "
     "numbers, at most 256, such as [0, 1, 6] or \"0-3,6\""},
    /* models */
    {"[[models]]\npath = \"qwen3-moe\"\n", NULL,
     "f.toml:1:1: models[0].id: not set, every model needs one"},
    {TEST_MODEL "[[models]]\nid = \"a\"\npath = \"qwen3-moe\"\n", NULL,
     "f.toml:5:6: models[1].id: \"a\" is the id of models[0] too (f.toml:2:6)"},
    {"[[models]]\nid = \"a b\"\npath = \"qwen3-moe\"\n", NULL,
     "f.toml:2:6: models[0].id: found string \"a b\", allowed: 1 to 95 visible ASCII characters "
     "without quotes or backslashes"},
    {"[[models]]\nid = \"a\"\n", NULL,
     "f.toml:2:6: models[0].path: not set, and vendor.model_base_uri is empty"},
    {"[[models]]\nid = \"a\"\npath = \"nowhere\"\n", NULL,
     "f.toml:3:8: models[0].path: " TEST_FOLDER "/nowhere: No such file or directory"},
    {"vendor.model_base_uri = \"/srv/none\"\n[[models]]\nid = \"a\"\n", NULL,
     "f.toml:3:6: models[0].path: /srv/none/a: No such file or directory"},
    {"[[models]]\nid = \"a\"\npath = \"s3://bucket/a\"\n", NULL,
     "f.toml:3:8: models[0].path: found string \"s3://bucket/a\", allowed: a path or file:// (the "
     "scheme s3:// is not supported)"},
    {"[[models]]\nid = \"a\"\npath = \"\"\n", NULL,
     "f.toml:3:8: models[0].path: found an empty string, allowed: a path or file:// (the path is "
     "empty)"},
    {"vendor.model_base_uri = \"hf://org\"\n", NULL,
     "f.toml:1:25: vendor.model_base_uri: found string \"hf://org\", allowed: an absolute path or "
     "file:// (the scheme hf:// is not supported)"},
    {"vendor.model_base_uri = \"models\"\n", NULL,
     "f.toml:1:25: vendor.model_base_uri: found string \"models\", allowed: an absolute path or "
     "file://"},
    {"vendor.model_base_uri = \"file://host/models\"\n", NULL,
     "f.toml:1:25: vendor.model_base_uri: found string \"file://host/models\", allowed: an "
     "absolute "
     "path or file:// (file:// must name a path of this host, as file:///srv/x)"},
    {TEST_MODEL "port = 9\n[[models]]\nid = 'b'\npath = 'qwen3-moe'\nport = 9\n", NULL,
     "f.toml:8:8: models[1].port: 9 is the port of models[0] too"},
    {TEST_MODEL "port = 8000\n", NULL,
     "f.toml:4:8: models[0].port: 8000 is the port of gateway.http too"},
    {TEST_MODEL "port = 8200\n", NULL,
     "f.toml:4:8: models[0].port: 8200 is the port of daemon.http too"},
    {"[[models]]\nid = '--help'\npath = 'qwen3-moe'\n", NULL,
     "f.toml:2:6: models[0].id: \"--help\" begins with '-' and would be taken for an option"},
    {TEST_MODEL "attention_tp = 2\n", NULL,
     "f.toml:4:16: models[0].attention_tp: attention_tp x attention_dp is 2, but atn.devices has "
     "1"},
    {TEST_MODEL "attention_tp = 4\nattention_dp = 4\n", NULL,
     "f.toml:4:16: models[0].attention_tp: attention_tp x attention_dp is 16, allowed: at most 8"},
    {TEST_MODEL "ffn_tp_size = 2\n", NULL,
     "f.toml:4:15: models[0].ffn_tp_size: found 2, but ffn.devices has 1"},
    {TEST_MODEL "decode_rows = 100\nprefill_rows = 8100\n", NULL,
     "f.toml:5:16: models[0].prefill_rows: decode_rows + prefill_rows is 8200, allowed: at most "
     "8192"},
    {TEST_MODEL "kv_floor_tokens = 3\nkv_ceiling_tokens = 2\n", NULL,
     "f.toml:4:19: models[0].kv_floor_tokens: 3 is above kv_ceiling_tokens, 2"},
    {"ffn.device_memory_calibration = \"none.json\"\n", NULL,
     "f.toml:1:33: ffn.device_memory_calibration: " TEST_FOLDER
     "/none.json: No such file or directory"},
    /* the command line's own mistakes */
    {NULL, "models[1].id=a", "cli: models[1].id: index 1, but the list has 0 elements"},
    {NULL, "models[x].id=a", "cli: models[x].id: expected [NUMBER]"},
    {NULL, "daemon..http=a", "cli: daemon..http: a part of the key is empty or needs quotes"},
    {NULL, "daemon[0]x=1", "cli: daemon[0]x: expected '.' or '='"},
    {NULL, "daemon/http=1", "cli: daemon/http: expected '.' or '='"},
    {NULL, "devices.\"cpu:0.threads=1", "cli: devices.\"cpu:0.threads: a quote is not closed"},
    {NULL, "daemon.http.port=1",
     "cli: daemon.http: found a table, allowed: HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000"},
    {"daemon.http = '127.0.0.1:1'\n", "daemon.http.port=1",
     "cli: daemon.http.port: port stands below what is no table"},
    {"scheduler.ffn_concurrency = 3\n", "scheduler[0]=1",
     "cli: scheduler[0]: [0] stands behind what is no list"},
};

static int set_up(void **state)
{
    clear_environment();
    return 0;
}

static void each_mistake(void **state)
{
    for (size_t i = 0; i < sizeof(mistakes) / sizeof(mistakes[0]); i++) {
        const char *const settings[] = {mistakes[i].setting, NULL};
        char report[8192];
        config_t *config = load_text(mistakes[i].file, settings, report, sizeof(report));
        if (config)
            fail_msg("accepted: %s %s", mistakes[i].file ? mistakes[i].file : "",
                     mistakes[i].setting ? mistakes[i].setting : "");
        size_t length = strlen(mistakes[i].message);
        bool found = false;
        for (char *line = report; line && *line;
             line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
            bool whole = line[length] == '\0' || line[length] == '\n' ||
                         mistakes[i].message[length - 1] == ':' ||
                         mistakes[i].message[length - 1] == ' ';
            if (strncmp(line, mistakes[i].message, length) == 0 && whole)
                found = true;
        }
        if (!found)
            fail_msg("wanted: %s\nreport: %s", mistakes[i].message, report);
        /* One mistake is one line: no follow-up errors. */
        if (strchr(report, '\n'))
            fail_msg("more than one line for %s:\n%s", mistakes[i].message, report);
        assert_int_equal(xp_error_last()->status, XP_INVALID);
        assert_string_equal(xp_error_last()->text, report);
    }
}

static void environment_mistakes(void **state)
{
    char report[4096];
    setenv("XPOOL_DAEMON_HTTP", "nonsense", 1);
    assert_null(load_text(NULL, NULL, report, sizeof(report)));
    assert_string_equal(report, "env XPOOL_DAEMON_HTTP: daemon.http: found string \"nonsense\", "
                                "allowed: HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000");
}

static void overridden_values_are_still_checked(void **state)
{
    static const char *const settings[] = {"daemon.http=127.0.0.1:5", NULL};
    char report[4096];
    setenv("XPOOL_DAEMON_HTTP", "bad", 1);
    assert_null(load_text("daemon.http = 4\n", settings, report, sizeof(report)));
    assert_string_equal(report, "f.toml:1:15: daemon.http: found integer 4, allowed: HOST:PORT, "
                                "such as 127.0.0.1:8000 or [::1]:8000\n"
                                "env XPOOL_DAEMON_HTTP: daemon.http: found string \"bad\", "
                                "allowed: HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000");
}

static void several_mistakes_in_the_files_order(void **state)
{
    char text[2048] = "", report[8192];
    static const char *const settings[] = {"nonsense.key=1", NULL};
    for (int i = 0; i < 12; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "qqqqqqqqqq%d = 1\n", i);
    assert_null(load_text(text, settings, report, sizeof(report)));
    const char *line = report;
    for (int i = 0; i < CONFIG_SHOWN_ISSUES; i++) {
        char start[32];
        snprintf(start, sizeof(start), "f.toml:%d:1: qqqqqqqqqq%d:", i + 1, i);
        assert_memory_equal(line, start, strlen(start));
        line = strchr(line, '\n') + 1;
    }
    assert_string_equal(line, "... and 5 more");
    /* The error record holds whole lines only. */
    assert_true(strlen(xp_error_last()->text) < XP_ERROR_TEXT_MAX);
}

static void a_long_report_is_cut_at_a_line(void **state)
{
    char text[16384] = "", report[16384];
    for (int i = 0; i < 8; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text),
                 "[[models]]\nid = \"m%d\"\npath = \"/srv/%0200d\"\n", i, i);
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_true(strlen(report) > XP_ERROR_TEXT_MAX);
    const char *last = strrchr(xp_error_last()->text, '\n');
    assert_non_null(last);
    assert_string_equal(last, "\n... (xpool config check shows more)");
    size_t length = (size_t)(last - xp_error_last()->text);
    assert_memory_equal(xp_error_last()->text, report, length);
    assert_int_equal(report[length], '\n');
}

static void deep_and_large_texts(void **state)
{
    char report[4096];
    size_t size = 2000000;
    char *text = malloc(size + 1);
    assert_non_null(text);
    memset(text, '#', size);
    text[size] = '\0';
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_string_equal(report, "f.toml: larger than 1048576 bytes");

    /* Half a million parts of one key, and lists in lists. */
    for (size_t i = 0; i < 1000000; i++)
        text[i] = i % 2 ? '.' : 'a';
    strcpy(text + 999999, " = 1\n");
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_string_equal(report, "f.toml:1:128: a key of more than 64 parts");

    strcpy(text, "a = ");
    memset(text + 4, '[', 100000);
    strcpy(text + 100004, "\n");
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_memory_equal(report, "f.toml:1:", 9);

    strcpy(text, "a = ");
    for (int i = 0; i < 100; i++) {
        text[4 + i] = '[';
        text[104 + i] = ']';
    }
    strcpy(text + 204, "\n");
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_non_null(strstr(report, "tables and lists are nested too deeply"));

    /* Dots in strings and comments are no parts of keys. */
    memset(text, '.', 1000);
    memcpy(text, "#", 1);
    snprintf(text + 500, size - 500, "\nvendor.model_base_uri = '/%.*s'\n", 100, text + 1);
    config_t *config = load_text(text, NULL, NULL, 0);
    config_destroy(config);
    free(text);
}

static void too_many_of_a_kind(void **state)
{
    char text[16384] = "", report[8192];
    for (int i = 0; i < CONFIG_MAX_MODELS + 1; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "[[models]]\nid = 'm%d'\n", i);
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_string_equal(report, "f.toml:1:1: models: found 65, allowed: at most 64");

    strcpy(text, "atn.devices = [");
    for (int i = 0; i < CONFIG_MAX_DEVICES + 1; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "'cpu:%d',", i + 10);
    strcat(text, "]\n");
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_non_null(strstr(report, "atn.devices: more than 16 devices"));

    text[0] = '\0';
    for (int i = 0; i < 2 * CONFIG_MAX_DEVICES + 1; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text),
                 "devices.\"cpu:%d\".threads = 1\n", i);
    assert_null(load_text(text, NULL, report, sizeof(report)));
    assert_non_null(strstr(report, "devices: more than 32 device tables"));

    snprintf(text, sizeof(text), "daemon.socket = \"/tmp/%0200d\"\n", 0);
    assert_null(load_text(text, NULL, report, sizeof(report)));
    if (!strstr(report, "allowed: a path of at most 107 bytes"))
        fail_msg("%s", report);
}

static void warnings(void **state)
{
    config_t *config =
        load("[devices.\"cpu:9\"]\nthreads = 1\n[devices.\"cpu:0\"]\ncpus = [1023]\n");
    assert_int_equal(config_warning_count(config), 3);
    assert_non_null(strstr(config_warning(config, 0), "no models are configured"));
    assert_string_equal(config_warning(config, 1),
                        "devices.\"cpu:0\".cpus: this process may not run on CPU 1023");
    assert_string_equal(config_warning(config, 2), "f.toml:1:10: devices.\"cpu:9\" is in neither "
                                                   "atn.devices nor ffn.devices");
    assert_null(config_warning(config, 3));
    config_destroy(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(each_mistake, set_up),
        cmocka_unit_test_setup(environment_mistakes, set_up),
        cmocka_unit_test_setup(overridden_values_are_still_checked, set_up),
        cmocka_unit_test_setup(several_mistakes_in_the_files_order, set_up),
        cmocka_unit_test_setup(a_long_report_is_cut_at_a_line, set_up),
        cmocka_unit_test_setup(deep_and_large_texts, set_up),
        cmocka_unit_test_setup(too_many_of_a_kind, set_up),
        cmocka_unit_test_setup(warnings, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
