/* SPDX-License-Identifier: MIT */
/* xpool kv: what the KV Caches hold, changing it live, and the market's records. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memfd.h"
#include "cli/cli.h"
#include "control/client.h"
#include "control/kv_record.h"

#define ASK_TIMEOUT_NS   (10 * XP_NS_PER_S)
#define RECORD_MAX_BYTES (256l << 20)

static int failed(void)
{
    fprintf(stderr, "xpool: %s\n", xp_error_last()->text);
    return CLI_EXIT_FAILED;
}

/* Asks and maps what came with the answer; *bytes_out is 0 where nothing did. */
static xp_status_t ask(const config_t *config, const xpw_KvAsk *question, xpw_KvAnswer *answer_out,
                       void **data_out, uint64_t *bytes_out)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_kv_ask_tag}, answer;
    int fd = -1;
    envelope.body.kv_ask = *question;
    xp_status_t status = client_ask_for(config, "kv", &envelope, xpw_Envelope_kv_answer_tag,
                                        ASK_TIMEOUT_NS, &answer, &fd);
    if (status == XP_RETRY) {
        char text[512];
        snprintf(text, sizeof(text), "%.500s", xp_error_last()->text);
        return xp_fail(status, "%s; is it running? start it with `xpool up`", text);
    }
    XP_TRY(status);
    *answer_out = answer.body.kv_answer;
    *data_out = NULL;
    *bytes_out = 0;
    if (!answer_out->ok)
        status = xp_fail(XP_INVALID, "%s", answer_out->text);
    uint64_t there;
    if (status == XP_OK && fd >= 0) {
        status = xp_memfd_check(fd, &there);
        if (status == XP_OK && there < answer_out->bytes)
            status = xp_fail(XP_PEER, "the daemon's answer is shorter than it says");
        if (status == XP_OK)
            status = xp_memfd_map(fd, there, data_out);
        if (status == XP_OK)
            *bytes_out = answer_out->bytes;
    }
    if (fd >= 0)
        close(fd);
    return status;
}

/* ---- show -------------------------------------------------------------------------------------
 */

static double mib_of(const json_t *object, const char *key)
{
    return (double)json_integer_value(json_object_get(object, key)) / 1048576.0;
}

static long long tokens_of(const json_t *group, const char *key)
{
    return json_integer_value(json_object_get(json_object_get(group, key), "tokens"));
}

static void print_group(const json_t *group)
{
    const json_t *demand = json_object_get(group, "demand");
    const json_t *last = json_object_get(group, "last_command");
    char name[128], wants[64] = "-", command[64] = "-";
    json_int_t dp = json_integer_value(json_object_get(group, "dp_rank"));
    snprintf(name, sizeof(name), dp ? "%s (DP %lld)" : "%s",
             json_string_value(json_object_get(group, "model")), (long long)dp);
    if (json_is_object(demand))
        snprintf(wants, sizeof(wants), "%lld %s, %.0f ms%s",
                 (long long)json_integer_value(json_object_get(demand, "tokens")),
                 json_string_value(json_object_get(demand, "kind")),
                 json_real_value(json_object_get(demand, "age_ms")),
                 json_is_true(json_object_get(demand, "refused")) ? ", refused" : "");
    if (json_is_object(last))
        snprintf(command, sizeof(command), "%lld (%s)%s",
                 (long long)json_integer_value(json_object_get(last, "tokens")),
                 json_string_value(json_object_get(last, "reason")),
                 json_is_true(json_object_get(last, "answered")) ? "" : ", open");
    printf("%-24s %-9s %10lld %10lld %10lld %10lld %10lld %10.1f  %-26s %s\n", name,
           json_string_value(json_object_get(group, "state")), tokens_of(group, "backed"),
           tokens_of(group, "used"), tokens_of(group, "cached"), tokens_of(group, "floor"),
           tokens_of(group, "ceiling"), mib_of(json_object_get(group, "backed"), "bytes"), wants,
           command);
}

static void print_table(const json_t *state)
{
    size_t index;
    const json_t *item;
    printf("%-12s %12s %12s %12s   policy %s\n", "device", "pool MiB", "given MiB", "free MiB",
           json_string_value(json_object_get(state, "policy")));
    json_array_foreach(json_object_get(state, "pools"), index, item)
        printf("%-12s %12.1f %12.1f %12.1f\n", json_string_value(json_object_get(item, "device")),
               mib_of(item, "bytes"), mib_of(item, "charged_bytes"), mib_of(item, "free_bytes"));
    printf("\n%-24s %-9s %10s %10s %10s %10s %10s %10s  %-26s %s\n", "model", "state", "backed",
           "used", "cached", "floor", "ceiling", "MiB", "waits for tokens", "last command");
    json_array_foreach(json_object_get(state, "groups"), index, item) print_group(item);
}

static int show(const config_t *config, bool json)
{
    xpw_KvAsk question = {.verb = xpw_KvVerb_KV_SHOW};
    xpw_KvAnswer answer;
    void *data;
    uint64_t bytes;
    if (ask(config, &question, &answer, &data, &bytes) != XP_OK)
        return failed();
    int code = CLI_EXIT_OK;
    json_error_t error;
    json_t *state = json_loadb(data ? data : "", bytes, 0, &error);
    if (!state) {
        fprintf(stderr, "xpool: the daemon's answer is no JSON: %s\n", error.text);
        code = CLI_EXIT_FAILED;
    } else if (json) {
        fwrite(data, 1, bytes, stdout);
        putchar('\n');
    } else {
        print_table(state);
    }
    json_decref(state);
    xp_memfd_unmap(data);
    return code;
}

/* ---- records ----------------------------------------------------------------------------------
 */

static int record(const config_t *config, const char *path)
{
    xpw_KvAsk question = {.verb = xpw_KvVerb_KV_RECORD};
    xpw_KvAnswer answer;
    void *data;
    uint64_t bytes;
    if (ask(config, &question, &answer, &data, &bytes) != XP_OK)
        return failed();
    FILE *file = fopen(path, "wb");
    bool good = file && fwrite(data, 1, bytes, file) == bytes;
    if (file && fclose(file) != 0)
        good = false;
    if (!good)
        fprintf(stderr, "xpool: cannot write %s: %s\n", path, strerror(errno));
    xp_memfd_unmap(data);
    return good ? CLI_EXIT_OK : CLI_EXIT_FAILED;
}

static int replay(const char *path)
{
    struct stat stat;
    int code = CLI_EXIT_FAILED;
    void *data = NULL;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &stat) != 0 || stat.st_size > RECORD_MAX_BYTES) {
        fprintf(stderr, "xpool: cannot read %s: %s\n", path,
                file && stat.st_size > RECORD_MAX_BYTES ? "too long for a record"
                                                        : strerror(errno));
        goto done;
    }
    size_t length = (size_t)stat.st_size;
    data = malloc(length + 1);
    kv_record_replay_t result;
    if (!data || fread(data, 1, length, file) != length) {
        fprintf(stderr, "xpool: cannot read %s\n", path);
    } else if (kv_record_replay(data, length, &result) != XP_OK) {
        fprintf(stderr, "xpool: %s: %s\n", path, xp_error_last()->text);
    } else if (result.different) {
        fprintf(stderr, "xpool: %llu of %llu snapshots are decided differently, entry %llu first\n",
                (unsigned long long)result.different, (unsigned long long)result.records,
                (unsigned long long)result.first_different);
    } else {
        printf("%llu snapshots over %.1f s, %llu commands: the same decisions\n",
               (unsigned long long)result.records, (double)result.span_ns / 1e9,
               (unsigned long long)result.commands);
        code = CLI_EXIT_OK;
    }
done:
    free(data);
    if (file)
        fclose(file);
    return code;
}

/* ---- commands ---------------------------------------------------------------------------------
 */

int cmd_kv(int argc, char **argv)
{
    if (cli_wants_help(
            argc, argv,
            "usage: xpool kv [--json | --record FILE | --replay FILE] [--config FILE]\n"
            "       xpool kv set MODEL [--floor TOKENS] [--ceiling TOKENS]\n"
            "       xpool kv policy deadline | arrival\n"
            "       xpool kv trim MODEL | --all\n\n"
            "Shows each attention device's KV Capacity Pool and, for every model, the tokens that\n"
            "are backed by memory, used by live requests, held by the prefix cache only, its "
            "floor\n"
            "and ceiling, what it waits for and since when, and its last command.\n\n"
            "  --json             the same as JSON\n"
            "  --record FILE      write the newest snapshots of the market with their decisions\n"
            "  --replay FILE      decide recorded snapshots again; exit 1 when anything "
            "differs\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    bool json = cli_take_flag(&argc, argv, "--json");
    const char *to = cli_take_option(&argc, argv, "--record");
    const char *from = cli_take_option(&argc, argv, "--replay");
    if (from) {
        config_overrides_t unused; /* a record is decided again without any configuration */
        if (cli_take_config_options(&argc, argv, &unused) || json || to ||
            cli_leftover(argc, argv, 1)) {
            fprintf(stderr, "xpool: --replay FILE stands alone (xpool help kv)\n");
            return CLI_EXIT_USAGE;
        }
        return replay(from);
    }
    config_t *config;
    int code = cli_load_config_running(&argc, argv, &config);
    if (code)
        return code;
    if (cli_leftover(argc, argv, 1))
        code = CLI_EXIT_USAGE;
    else
        code = to ? record(config, to) : show(config, json);
    config_destroy(config);
    return code;
}

static bool parse_tokens(const char *option, const char *text, uint32_t *tokens_out)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < 1 || value > UINT32_MAX) {
        fprintf(stderr, "xpool: %s: found \"%s\", allowed: a number of tokens from 1 to %u\n",
                option, text, UINT32_MAX);
        return false;
    }
    *tokens_out = (uint32_t)value;
    return true;
}

/* Sends, and prints what the daemon says. */
static int tell(const config_t *config, const xpw_KvAsk *question)
{
    xpw_KvAnswer answer;
    void *data;
    uint64_t bytes;
    if (ask(config, question, &answer, &data, &bytes) != XP_OK)
        return failed();
    xp_memfd_unmap(data);
    puts(answer.text);
    return CLI_EXIT_OK;
}

static bool take_model(xpw_KvAsk *question, const char *id)
{
    if (strlen(id) < sizeof(question->model)) {
        snprintf(question->model, sizeof(question->model), "%s", id);
        return true;
    }
    fprintf(stderr, "xpool: \"%.40s...\" is no model's id\n", id);
    return false;
}

int cmd_kv_set(int argc, char **argv)
{
    if (cli_wants_help(
            argc, argv,
            "usage: xpool kv set MODEL [--floor TOKENS] [--ceiling TOKENS] [--config FILE]\n\n"
            "Changes how much of its device's KV memory a model always keeps and may hold at "
            "most,\n"
            "of each attention DP rank, until its daemon ends. Tokens are rounded up to whole\n"
            "bundles. The ceiling can be raised to the one that the daemon started with "
            "(`xpool plan`).\n\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    const char *floor = cli_take_option(&argc, argv, "--floor");
    const char *ceiling = cli_take_option(&argc, argv, "--ceiling");
    config_t *config;
    int code = cli_load_config_running(&argc, argv, &config);
    if (code)
        return code;
    xpw_KvAsk question = {.verb = xpw_KvVerb_KV_SET, .has_floor = floor, .has_ceiling = ceiling};
    code = CLI_EXIT_USAGE;
    if (argc < 2 || (!floor && !ceiling))
        fprintf(stderr, "xpool: kv set needs a model and --floor or --ceiling (xpool help kv)\n");
    else if (!cli_leftover(argc, argv, 2) && take_model(&question, argv[1]) &&
             (!floor || parse_tokens("--floor", floor, &question.floor_tokens)) &&
             (!ceiling || parse_tokens("--ceiling", ceiling, &question.ceiling_tokens)))
        code = tell(config, &question);
    config_destroy(config);
    return code;
}

int cmd_kv_policy(int argc, char **argv)
{
    if (cli_wants_help(argc, argv,
                       "usage: xpool kv policy deadline | arrival [--config FILE]\n\n"
                       "Demands for KV memory are met by the earliest deadline, or in order of "
                       "arrival, until\nthe daemon ends. It starts with scheduler.kv_policy; where "
                       "that is \"static\", KV Caches\nhave fixed sizes and there is no "
                       "order.\n\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    config_t *config;
    int code = cli_load_config_running(&argc, argv, &config);
    if (code)
        return code;
    xpw_KvAsk question = {.verb = xpw_KvVerb_KV_POLICY};
    const char *name = argc > 1 ? argv[1] : "";
    code = CLI_EXIT_USAGE;
    if (strcmp(name, "arrival") == 0)
        question.order = xpw_KvOrder_KV_ORDER_ARRIVAL;
    if (strcmp(name, "arrival") != 0 && strcmp(name, "deadline") != 0)
        fprintf(stderr, "xpool: kv policy: found \"%s\", allowed: deadline, arrival\n", name);
    else if (!cli_leftover(argc, argv, 2))
        code = tell(config, &question);
    config_destroy(config);
    return code;
}

int cmd_kv_trim(int argc, char **argv)
{
    if (cli_wants_help(argc, argv,
                       "usage: xpool kv trim MODEL | --all [--config FILE]\n\n"
                       "Drops prefix caches and gives back all KV memory that live requests do not "
                       "use,\ndown to the floor.\n\n" CLI_CONFIG_HELP))
        return CLI_EXIT_OK;
    bool all = cli_take_flag(&argc, argv, "--all");
    config_t *config;
    int code = cli_load_config_running(&argc, argv, &config);
    if (code)
        return code;
    xpw_KvAsk question = {.verb = xpw_KvVerb_KV_TRIM};
    code = CLI_EXIT_USAGE;
    if (all == (argc > 1))
        fprintf(stderr, "xpool: kv trim needs a model or --all (xpool help kv)\n");
    else if (!cli_leftover(argc, argv, all ? 1 : 2) && (all || take_model(&question, argv[1])))
        code = tell(config, &question);
    config_destroy(config);
    return code;
}
