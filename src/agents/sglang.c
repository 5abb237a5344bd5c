/* SPDX-License-Identifier: MIT */
/*
 * An SGLang Instance: builds the server's command from configuration and plan, prepares its
 * environment, and becomes it. SGLang keeps scheduling, attention, KV Cache and sampling; the
 * plugin in its processes does the rest through libxpool. One thread; nothing runs here after the
 * exec.
 */
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/environment.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/process.h"
#include "control/planner.h"

#define SGLANG_HOST       "127.0.0.1"
#define SGLANG_MAX_WORDS  (96 + CONFIG_MAX_ENGINE_ARGS)
#define SGLANG_TEXT_BYTES 4096
#define CHECK_TIMEOUT_NS  (5 * XP_NS_PER_S)
#define CHECK_NO_SGLANG   3
#define CHECK_NO_PLUGIN   4
/* The ports that the kernel hands out by itself begin above; SGLang binds its own only after half a
 * minute of imports, by when one of those may be somebody's. */
#define PORT_FIRST 20000u
#define PORT_COUNT 12000u
#define PORT_TRIES 256
/* SGLang takes what is free when it starts; how much of that it uses is bounded by the plan's
 * tokens, not by this. */
#define MEMORY_FRACTION "0.9"

extern char **environ;

typedef struct command {
    char *words[SGLANG_MAX_WORDS + 1];
    uint32_t count;
    char text[SGLANG_TEXT_BYTES]; /* of the numbers in it */
    size_t used;
    bool overflow;
} command_t;

static void add(command_t *command, const char *word)
{
    if (command->count == SGLANG_MAX_WORDS) {
        command->overflow = true;
        return;
    }
    command->words[command->count++] = (char *)word;
}

static void add_option(command_t *command, const char *option, const char *value)
{
    add(command, option);
    add(command, value);
}

static void add_number(command_t *command, const char *option, uint64_t number)
{
    size_t room = sizeof(command->text) - command->used;
    char *text = command->text + command->used;
    int length = snprintf(text, room, "%llu", (unsigned long long)number);
    if (length < 0 || (size_t)length >= room) {
        command->overflow = true;
        return;
    }
    command->used += (size_t)length + 1;
    add_option(command, option, text);
}

static bool port_is_free(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    bool is_free = bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0;
    close(fd);
    return is_free;
}

static xp_status_t choose_port(uint16_t *port_out)
{
    for (int i = 0; i < PORT_TRIES; i++) {
        uint32_t number;
        if (getrandom(&number, sizeof(number), 0) != sizeof(number))
            number = (uint32_t)(xp_monotonic_ns() ^ (uint64_t)getpid() << 16);
        uint16_t port = (uint16_t)(PORT_FIRST + number % PORT_COUNT);
        if (port_is_free(port)) {
            *port_out = port;
            return XP_OK;
        }
    }
    return xp_fail(XP_IO, "no free port between %u and %u; set models[].port", PORT_FIRST,
                   PORT_FIRST + PORT_COUNT - 1);
}

static const char *level_name(xp_log_level_t level)
{
    switch (level) {
    case XP_LOG_DEBUG:
        return "debug";
    case XP_LOG_WARNING:
        return "warning";
    case XP_LOG_ERROR:
        return "error";
    default:
        return "info";
    }
}

static const char *dtype_name(xp_dtype_t dtype)
{
    return dtype == XP_DTYPE_F32 ? "float32" : dtype == XP_DTYPE_F16 ? "float16" : "bfloat16";
}

static void build_command(const config_t *config, const config_model_t *model,
                          const plan_model_t *plan, const char *python, uint16_t port,
                          command_t *command)
{
    uint32_t dp = model->attention_dp;
    add(command, python);
    add_option(command, "-m", "sglang.launch_server");
    add_option(command, "--model-path", model->path);
    add_option(command, "--served-model-name", model->id);
    add_option(command, "--host", SGLANG_HOST);
    add_number(command, "--port", port);
    add_option(command, "--dtype", dtype_name(plan->dtype));
    if (model->load_format == CONFIG_LOAD_DUMMY)
        add_option(command, "--load-format", "dummy");
    add_number(command, "--context-length", plan->max_context);
    add_number(command, "--max-total-tokens", plan->kv_tokens);
    /* SGLang divides these two by its attention DP ranks. */
    add_number(command, "--max-running-requests", (uint64_t)model->decode_rows * dp);
    add_number(command, "--chunked-prefill-size", (uint64_t)model->prefill_rows * dp);
    add_option(command, "--mem-fraction-static", MEMORY_FRACTION);
    add_number(command, "--tp-size", (uint64_t)model->attention_tp * dp);
    add_number(command, "--dp-size", dp);
    if (dp > 1)
        add(command, "--enable-dp-attention");
    add_option(command, "--log-level", level_name(config->logging.level));
    add_option(command, "--log-level-http", "warning");
    add(command, "--skip-server-warmup");
    /* Its kernels wait for those of other ranks, and know nothing of life words. */
    if (plan->ranks > 1)
        add(command, "--disable-custom-all-reduce");
    if (config->atn[plan->rank_atn[0]].kind == CONFIG_DEVICE_CUDA) {
        add_option(command, "--device", "cuda");
        if (plan->kv_elastic) /* its layers are strided, which other backends do not expect */
            add_option(command, "--attention-backend", "triton");
    }
    if (config->atn[plan->rank_atn[0]].kind == CONFIG_DEVICE_CPU) {
        add_option(command, "--device", "cpu");
        add_option(command, "--attention-backend", "torch_native");
        add_option(command, "--sampling-backend", "pytorch");
        add_option(command, "--grammar-backend", "none");
        add(command, "--disable-cuda-graph");
        add(command, "--disable-overlap-schedule");
    }
    for (uint32_t i = 0; i < model->engine_arg_count; i++)
        add(command, model->engine_args[i]);
}

/* Looks, with the interpreter and in the environment that the server will have, whether SGLang and
 * the plugin can be found: SGLang goes on without a plugin that it does not find, and would load
 * all the weights itself. */
static xp_status_t check_python(const config_model_t *model, const char *python)
{
    static const char script[] =
        "import sys, importlib.util as u, importlib.metadata as m\n"
        "if u.find_spec('sglang') is None: sys.exit(3)\n"
        "if not m.entry_points(group='sglang.srt.plugins', name='xpool'): sys.exit(4)\n";
    char *const words[] = {(char *)python, "-c", (char *)script, NULL};
    pid_t pid;
    int error = xp_child_spawn(python, NULL, false, words, environ, &pid);
    if (error)
        return xp_fail(XP_NOT_FOUND,
                       "models[%s].python: cannot start %s: %s; scripts/test-venv makes an "
                       "environment with SGLang for CPU devices (GPUs: docs/sglang.md), or name an "
                       "interpreter that has it",
                       model->id, python, strerror(error));
    int wait_status = 0;
    if (xp_child_reap(pid, xp_monotonic_ns() + CHECK_TIMEOUT_NS, &wait_status) == XP_TIMEOUT) {
        /* A machine so busy is no reason to refuse; the server itself will tell. */
        xp_log_warn("%s did not say within %d s whether it has SGLang; starting it anyway", python,
                    (int)(CHECK_TIMEOUT_NS / XP_NS_PER_S));
        return XP_OK;
    }
    int code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
    if (code == 0)
        return XP_OK;
    if (code == CHECK_NO_SGLANG)
        return xp_fail(XP_NOT_FOUND,
                       "models[%s].python: %s has no SGLang; scripts/test-venv makes an "
                       "environment that has it "
                       "for CPU devices (GPUs: docs/sglang.md), or name an interpreter that does",
                       model->id, python);
    if (code == CHECK_NO_PLUGIN)
        return xp_fail(XP_NOT_FOUND,
                       "models[%s].python: %s does not find the plugin xpool: it lies in python/ "
                       "beside the folder of the xpool program, or is installed by `pip install .`",
                       model->id, python);
    return xp_fail(XP_NOT_FOUND, "models[%s].python: %s cannot run a program (exit code %d)",
                   model->id, python, code);
}

/* Where the devices of all ranks are pinned, all of SGLang's processes are. */
static void pin(const config_t *config, const plan_model_t *plan)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    for (uint32_t r = 0; r < plan->ranks; r++) {
        const config_device_t *device = &config->atn[plan->rank_atn[r]];
        if (!device->cpu_count)
            return;
        for (uint32_t i = 0; i < device->cpu_count; i++)
            if (device->cpus[i] < CPU_SETSIZE)
                CPU_SET(device->cpus[i], &set);
    }
    if (sched_setaffinity(0, sizeof(set), &set) != 0)
        xp_log_warn("cannot pin the Instance to its device's processors: %s", strerror(errno));
}

static void log_command(const command_t *command)
{
    xp_buf_t text;
    xp_buf_init(&text, 65536);
    for (uint32_t i = 0; i < command->count; i++)
        if (xp_buf_printf(&text, "%s%s", i ? " " : "", command->words[i]) != XP_OK)
            break;
    xp_log_info("becomes: %s", text.data ? text.data : "");
    xp_buf_fini(&text);
}

static xp_status_t prepare(const config_t *config, const config_overrides_t *overrides,
                           const config_model_t *model, char *python, size_t python_bytes,
                           command_t *command)
{
    plan_result_t *planned = NULL;
    uint16_t port = model->port;
    config_model_python(config, model, python, python_bytes);
    XP_TRY(environment_prepare(config, overrides, model));
    /* The checkpoint is a folder: nothing is to be asked of the network. */
    setenv("HF_HUB_OFFLINE", "1", 0);
    setenv("TRANSFORMERS_OFFLINE", "1", 0);
    XP_TRY(check_python(model, python));
    /* Checked here: whoever answers there already would be taken for this Instance. */
    if (port && !port_is_free(port))
        return xp_fail(XP_INVALID,
                       "models[%s].port: %u is in use by another program; choose another one, or 0 "
                       "for any",
                       model->id, port);
    if (!port)
        XP_TRY(choose_port(&port));
    XP_TRY(planner_make(config, 1, &planned));
    const plan_model_t *plan = &planned->models[model - config->models];
    build_command(config, model, plan, python, port, command);
    pin(config, plan);
    planner_free(planned);
    if (command->overflow)
        return xp_fail(XP_INVALID, "models[%s].engine_args: too many arguments", model->id);
    return XP_OK;
}

int sglang_run(const config_t *config, const config_overrides_t *overrides, const char *model_id)
{
    static command_t command; /* too large for a stack, and alive until the exec */
    char python[CONFIG_MAX_PATH + 32];
    bool under_up = getenv("XPOOL_UNDER_UP") != NULL;
    const config_model_t *model = config_model_find(config, model_id);
    xp_log_identify("instance", model_id);
    XP_ASSERT(model != NULL);
    if (prepare(config, overrides, model, python, sizeof(python), &command) != XP_OK) {
        xp_log_error("cannot start");
        return 1;
    }
    log_command(&command);
    if (under_up) {
        /* `up` starts its children with SIGTERM blocked until they can act on it. */
        sigset_t term;
        sigemptyset(&term);
        sigaddset(&term, SIGTERM);
        sigprocmask(SIG_UNBLOCK, &term, NULL);
    }
    execvp(command.words[0], command.words);
    int error = errno;
    xp_log_err("models[%s].python: cannot start %s: %s", model->id, python, strerror(error));
    return error == ENOENT ? AGENTS_EXIT_NOT_FOUND : AGENTS_EXIT_NOT_EXECUTABLE;
}
