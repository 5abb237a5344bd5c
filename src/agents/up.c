/* SPDX-License-Identifier: MIT */
/*
 * `xpool up`: every role of the configuration as a child of one process. The children die with it
 * (PR_SET_PDEATHSIG), leave Ctrl-C to it (XPOOL_UNDER_UP), and end in the daemon's order. One
 * thread.
 */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agents/agents.h"
#include "base/clock.h"
#include "base/log.h"
#include "control/client.h"
#include "control/gpus.h"
#include "control/participant.h"
#include "cuda/mps.h"

#define UP_MAX_CHILDREN  (2 + 2 * CONFIG_MAX_DEVICES + CONFIG_MAX_MODELS)
#define UP_MAX_ARGUMENTS 160
#define UP_TICK_MS       100
#define UP_CHECK_NS      (200 * XP_NS_PER_MS)
#define UP_SLACK_S       5 /* past the daemon's own deadlines of an ordered end */
#define UP_GRACE_NS      (700 * XP_NS_PER_MS) /* after a failure, before what is left is killed */
#define UP_SHORT_LIFE_NS (1 * XP_NS_PER_S)
#define UP_PAUSE_SHARE   4 /* of deadlines.reform, at most, before who lived shortly is replaced */
#define UP_PAUSE_NS      (4 * XP_NS_PER_S) /* the longest; the daemon counts who fell how often */
#define UP_SWEEP_NS      (3 * XP_NS_PER_S) /* for what an engine's main process leaves behind */

typedef struct up_child {
    pid_t pid;     /* 0 when it has ended */
    xpw_Role role; /* NONE for the daemon */
    char name[CONFIG_MAX_ID];
    /* Another engine's main process, in a process group of its own: it has children, and signals of
     * its own that a terminal's Ctrl-C must not reach. */
    bool engine;
    uint64_t gone_ns; /* when its main process was seen dead while others of its group lived */
    uint64_t born_ns;
    uint64_t again_ns; /* an agent whose Generation failed: when to start its successor; 0 = not */
    uint32_t falls;    /* an agent's ends in a row before it had registered */
} up_child_t;

typedef struct up {
    const config_t *config;
    const char *program;
    char *const *config_arguments;
    up_child_t children[UP_MAX_CHILDREN];
    uint32_t count;
    bool stopping, failed, ready, interrupted, killed;
    uint64_t changed_ns; /* the first agent of the last failed Generation was seen dead */
    uint64_t kill_at_ns; /* 0 = no force yet */
    int exit_code;
    /* As of the last Verdict: bits of models whose Instance the daemon ended; of an agent's end
     * that was told, that it had not registered. */
    uint64_t replace;
    bool unregistered;
    char last_reason[256];
} up_t;

static const char *child_role(const up_child_t *child)
{
    return child->role == xpw_Role_ROLE_NONE ? "daemon" : wire_role_name(child->role);
}

/* Starts `child`, whose role and name are set. */
static xp_status_t start_child(const up_t *up, up_child_t *child)
{
    char *arguments[UP_MAX_ARGUMENTS];
    uint32_t count = 0;
    arguments[count++] = (char *)up->program;
    switch (child->role) {
    case xpw_Role_ROLE_NONE:
        arguments[count++] = "daemon";
        arguments[count++] = "serve";
        break;
    case xpw_Role_ROLE_INSTANCE:
        arguments[count++] = "serve";
        arguments[count++] = child->name;
        break;
    case xpw_Role_ROLE_GATEWAY:
        arguments[count++] = "gateway";
        break;
    default:
        arguments[count++] = child->role == xpw_Role_ROLE_FFNAGENT ? "ffnagent" : "atnagent";
        arguments[count++] = "--device";
        arguments[count++] = child->name;
    }
    for (char *const *more = up->config_arguments; more && *more && count < UP_MAX_ARGUMENTS - 1;
         more++)
        arguments[count++] = *more;
    arguments[count] = NULL;
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0)
        return xp_fail_errno(XP_IO, "cannot start %s", child->name);
    if (pid == 0) {
        /* SIGTERM stays blocked until the role can act on it, so that none kills it half started;
         * Ctrl-C and a closing terminal are for `up` alone. */
        sigset_t term;
        sigemptyset(&term);
        sigaddset(&term, SIGTERM);
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        sigprocmask(SIG_SETMASK, &term, NULL);
        if (child->engine)
            setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        execv("/proc/self/exe", arguments);
        fprintf(stderr, "xpool: cannot start %s: %s\n", up->program, strerror(errno));
        _exit(127);
    }
    child->pid = pid;
    child->gone_ns = child->again_ns = 0;
    child->born_ns = xp_monotonic_ns();
    if (child->engine)
        setpgid(pid, pid); /* here too: whoever comes first */
    return XP_OK;
}

static xp_status_t spawn(up_t *up, xpw_Role role, const char *name, bool engine)
{
    up_child_t *child = &up->children[up->count];
    *child = (up_child_t){.role = role, .engine = engine};
    snprintf(child->name, sizeof(child->name), "%s", name);
    XP_TRY(start_child(up, child));
    up->count++;
    return XP_OK;
}

/* Waits until the daemon that answers at the socket is our own child, so that no role ever
 * registers with somebody else's. XP_CLOSED when the child ended instead (it has said why). */
static xp_status_t wait_for_daemon(const up_t *up)
{
    pid_t daemon = up->children[0].pid;
    uint64_t deadline =
        xp_monotonic_ns() + (uint64_t)(up->config->deadlines.registration * (double)XP_NS_PER_S);
    while (xp_monotonic_ns() < deadline) {
        int socket;
        if (wire_connect(up->config->daemon.socket, &socket) == XP_OK) {
            pid_t pid = 0;
            uid_t uid;
            xp_status_t status = wire_peer(socket, &pid, &uid);
            close(socket);
            if (status == XP_OK && pid == daemon)
                return XP_OK;
        }
        siginfo_t info = {.si_pid = 0};
        if (waitid(P_PID, (id_t)daemon, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid)
            return xp_fail(XP_CLOSED, "the daemon did not start");
        struct timespec pause = {.tv_nsec = 5 * 1000000};
        sigset_t pending;
        sigpending(&pending);
        if (sigismember(&pending, SIGINT) || sigismember(&pending, SIGTERM))
            return xp_fail(XP_CANCELLED, "interrupted before the daemon was there");
        nanosleep(&pause, NULL);
    }
    return xp_fail(XP_TIMEOUT, "the daemon did not answer within %g s (deadlines.registration)",
                   up->config->deadlines.registration);
}

static xp_status_t spawn_all(up_t *up)
{
    const config_t *config = up->config;
    XP_TRY(spawn(up, xpw_Role_ROLE_NONE, config->daemon.socket, false));
    XP_TRY(wait_for_daemon(up));
    for (uint32_t f = 0; f < config->ffn_count; f++)
        XP_TRY(spawn(up, xpw_Role_ROLE_FFNAGENT, config->ffn[f].name, false));
    for (uint32_t a = 0; a < config->atn_count; a++)
        XP_TRY(spawn(up, xpw_Role_ROLE_ATNAGENT, config->atn[a].name, false));
    for (uint32_t m = 0; m < config->model_count; m++)
        XP_TRY(spawn(up, xpw_Role_ROLE_INSTANCE, config->models[m].id,
                     config->models[m].engine == CONFIG_ENGINE_SGLANG));
    return spawn(up, xpw_Role_ROLE_GATEWAY, config->gateway.http, false);
}

static uint32_t alive(const up_t *up)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < up->count; i++)
        count += up->children[i].pid != 0;
    return count;
}

static void signal_all(const up_t *up, int signal_number)
{
    /* An engine's tree ends with its main process; reap() sees to it. */
    for (uint32_t i = 0; i < up->count; i++)
        if (up->children[i].pid)
            kill(up->children[i].pid, signal_number);
}

static void begin_force(up_t *up, uint64_t after_ns)
{
    uint64_t at_ns = xp_monotonic_ns() + after_ns;
    if (!up->kill_at_ns || at_ns < up->kill_at_ns)
        up->kill_at_ns = at_ns;
}

static void describe_end(int wait_status, char *out, size_t size)
{
    if (WIFSIGNALED(wait_status))
        snprintf(out, size, "was killed by signal %d (%s)", WTERMSIG(wait_status),
                 strsignal(WTERMSIG(wait_status)));
    else
        snprintf(out, size, "ended with exit code %d", WEXITSTATUS(wait_status));
}

static void report_failure(up_t *up, const up_child_t *child, const char *how)
{
    xpw_Envelope report = {.which_body = xpw_Envelope_fail_report_tag}, answer;
    snprintf(report.body.fail_report.who, sizeof(report.body.fail_report.who), "%s %s",
             child_role(child), child->name);
    snprintf(report.body.fail_report.what, sizeof(report.body.fail_report.what), "its process %s",
             how);
    client_ask(up->config, "up", &report, xpw_Envelope_failure_tag, 300 * XP_NS_PER_MS, &answer);
}

/* An ordered end that somebody else asked for (`xpool down`): the daemon judges it, not we. Returns
 * whether the daemon answered. */
static bool ask_with(up_t *up, const xpw_Envelope *question)
{
    xpw_Envelope answer;
    if (client_ask(up->config, "up", question, xpw_Envelope_verdict_tag, 300 * XP_NS_PER_MS,
                   &answer) != XP_OK)
        return false;
    up->replace = answer.body.verdict.replace;
    up->unregistered = answer.body.verdict.unregistered;
    const char *state = answer.body.verdict.state;
    up->stopping = strcmp(state, "QUIESCING") == 0 || strcmp(state, "DRAINING") == 0 ||
                   strcmp(state, "FINALIZING") == 0 || strcmp(state, "STOPPED") == 0;
    return true;
}

static bool ask_stopping(up_t *up)
{
    return ask_with(up, &(xpw_Envelope){.which_body = xpw_Envelope_check_tag});
}

static bool daemon_is_stopping(up_t *up)
{
    ask_stopping(up);
    return up->stopping;
}

/* The daemon is there, and nobody asked it to end. */
static bool daemon_goes_on(up_t *up)
{
    return ask_stopping(up) && !up->stopping;
}

static bool is_agent(const up_child_t *child)
{
    return child->role == xpw_Role_ROLE_ATNAGENT || child->role == xpw_Role_ROLE_FFNAGENT;
}

/* An agent of a Generation that has failed: how it ends is no fault of the next one's. */
static bool is_former(const up_t *up, const up_child_t *child)
{
    return is_agent(child) && child->born_ns < up->changed_ns;
}

/* Twice as long each time: what is wrong may pass, and a machine is not to be kept busy by it. */
static uint64_t pause_after(const up_t *up, uint32_t falls)
{
    double share = up->config->deadlines.reform / UP_PAUSE_SHARE * (double)XP_NS_PER_S;
    uint64_t pause = UP_SHORT_LIFE_NS;
    for (uint32_t i = 1; i < falls && pause < UP_PAUSE_NS; i++)
        pause *= 2;
    if (pause > UP_PAUSE_NS)
        pause = UP_PAUSE_NS;
    return (double)pause > share ? (uint64_t)share : pause;
}

/* The daemon counts those that never registered, of which it hears from us alone; they are started
 * again later and later. */
static void tell_ended(up_t *up, up_child_t *child, pid_t pid, const char *how)
{
    xpw_Envelope report = {.which_body = xpw_Envelope_agent_ended_tag};
    xpw_AgentEnded *ended = &report.body.agent_ended;
    ended->role = child->role;
    ended->pid = (uint32_t)pid;
    snprintf(ended->device, sizeof(ended->device), "%s", child->name);
    snprintf(ended->how, sizeof(ended->how), "%s", how);
    up->unregistered = false;
    ask_with(up, &report);
    child->falls = up->unregistered ? child->falls + 1 : 0;
    if (child->falls)
        child->again_ns = xp_monotonic_ns() + pause_after(up, child->falls);
}

/* As of the last Verdict. */
static bool ended_with_generation(const up_t *up, const up_child_t *child)
{
    const config_model_t *model = config_model_find(up->config, child->name);
    return model && up->replace >> (model - up->config->models) & 1;
}

/* An agent of a failed Generation makes room for a successor, which the daemon waits for; it also
 * sees to it that this has an end. Who did not live long is given a pause. On GPUs Instances that
 * end with the Generation are started again too; so is one that the daemon names, however late: it
 * could not go on in the next Generation. */
static bool replaces(up_t *up, up_child_t *child)
{
    uint64_t now = xp_monotonic_ns();
    if (up->config->deadlines.reform <= 0 || !up->ready)
        return false;
    if (is_agent(child)) {
        if (!is_former(up, child))
            up->changed_ns = now;
    } else if (child->role != xpw_Role_ROLE_INSTANCE || !gpus_used(up->config, false) ||
               !up->changed_ns ||
               (!ended_with_generation(up, child) &&
                now - up->changed_ns >
                    (uint64_t)((up->config->deadlines.stop + UP_SLACK_S) * (double)XP_NS_PER_S))) {
        return false;
    }
    child->again_ns = now - child->born_ns < UP_SHORT_LIFE_NS ? now + pause_after(up, 1) : now;
    return true;
}

static void start_again(up_t *up)
{
    uint64_t now = xp_monotonic_ns();
    for (uint32_t i = 0; i < up->count && !up->stopping && !up->failed; i++) {
        up_child_t *child = &up->children[i];
        if (child->pid || !child->again_ns || now < child->again_ns)
            continue;
        if (start_child(up, child) != XP_OK) {
            xp_log_error("cannot start again");
            child->again_ns = now + UP_SHORT_LIFE_NS;
        } else {
            xp_log_info("%s %s started again (pid %d)", child_role(child), child->name,
                        (int)child->pid);
        }
    }
}

static void child_ended(up_t *up, up_child_t *child, int wait_status)
{
    char how[96];
    describe_end(wait_status, how, sizeof(how));
    pid_t pid = child->pid;
    child->pid = 0;
    bool clean = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0;
    bool daemon = child->role == xpw_Role_ROLE_NONE;
    /* SGLang's way to end in order is to kill its processes and itself. */
    bool own_end = child->engine && WIFSIGNALED(wait_status) && !up->killed &&
                   (WTERMSIG(wait_status) == SIGKILL || WTERMSIG(wait_status) == SIGTERM);
    if (daemon) {
        /* The daemon knows how the whole ended; its exit code is ours. */
        up->stopping = true;
        if (clean)
            signal_all(up, SIGTERM); /* whoever had not reached it yet */
        if (!clean) {
            up->exit_code = 1;
            up->failed = true;
            if (WIFSIGNALED(wait_status) && !up->killed)
                xp_log_err("canonical failure: daemon: its process (pid %d) %s", (int)pid, how);
        }
        begin_force(up, UP_GRACE_NS);
        return;
    }
    bool in_order = child->role == xpw_Role_ROLE_INSTANCE && (clean || own_end);
    /* On GPUs an Instance ends in order with its Generation. One that was stopped stays so: the
     * daemon knows of ours, and SGLang's exit code tells (python/xpool/sglang/stop.py). */
    bool may_replace = in_order && !(child->engine && clean);
    if (may_replace && up->changed_ns && !up->stopping && !up->failed && daemon_goes_on(up) &&
        ended_with_generation(up, child) && replaces(up, child))
        return;
    /* An exit code of 0 is no fault, but for a model that the start still waits for. */
    if (clean && (child->role != xpw_Role_ROLE_INSTANCE || up->ready || up->stopping ||
                  up->failed || !daemon_goes_on(up)))
        return;
    if (up->stopping || up->failed || daemon_is_stopping(up)) {
        /* An agent that was killed is the daemon's to judge: the end of its Generation, or of all.
         */
        bool judged = is_agent(child) && WIFSIGNALED(wait_status) &&
                      WTERMSIG(wait_status) == SIGKILL && !up->killed;
        bool unheard = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == PARTICIPANT_UNHEARD;
        if ((own_end || is_former(up, child) || judged || unheard) && !up->failed) {
            if (judged && !up->changed_ns)
                up->changed_ns = xp_monotonic_ns(); /* the others end with it */
            return;
        }
        up->exit_code = up->exit_code == 130 ? 130 : 1;
        return;
    }
    xp_log_warn("%s %s (pid %d) %s", child_role(child), child->name, (int)pid, how);
    if (!in_order && replaces(up, child)) {
        if (is_agent(child))
            tell_ended(up, child, pid, how);
        return;
    }
    switch (child->role) {
    case xpw_Role_ROLE_INSTANCE:
        if (!up->ready) {
            /* A model that cannot start is a configuration to mend, not a system to run on. */
            up->failed = true;
            up->exit_code = 1;
            report_failure(up, child, how);
        } else {
            xp_log_warn("the other models go on; start it again with `xpool serve %s`",
                        child->name);
        }
        break;
    default:
        up->failed = true;
        up->exit_code = 1;
        report_failure(up, child, how);
        begin_force(up, UP_GRACE_NS);
    }
}

/* Whether a live process other than its dead leader is in this process group. */
static bool group_lives(pid_t leader)
{
    DIR *folder = opendir("/proc");
    bool found = false;
    struct dirent *entry;
    while (folder && !found && (entry = readdir(folder))) {
        char path[64], line[512];
        char *end;
        long pid = strtol(entry->d_name, &end, 10);
        if (*end || pid <= 0 || pid == leader)
            continue;
        snprintf(path, sizeof(path), "/proc/%ld/stat", pid);
        FILE *file = fopen(path, "re");
        size_t got = file ? fread(line, 1, sizeof(line) - 1, file) : 0;
        if (file)
            fclose(file);
        line[got] = '\0';
        char state;
        long group;
        const char *rest = strrchr(line, ')'); /* a name may hold anything */
        found = rest && sscanf(rest, ") %c %*d %ld", &state, &group) == 2 && group == leader &&
                state != 'Z' && state != 'X';
    }
    if (folder)
        closedir(folder);
    return found;
}

static void reap(up_t *up)
{
    for (uint32_t i = 0; i < up->count; i++) {
        up_child_t *child = &up->children[i];
        siginfo_t info = {.si_pid = 0};
        if (!child->pid ||
            waitid(P_PID, (id_t)child->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
            !info.si_pid)
            continue;
        /* What an engine's main process has started and not taken with it has a moment to end by
         * itself and to tidy up. The group's id stays its own while it has not been waited for. */
        if (child->engine && group_lives(child->pid)) {
            uint64_t now = xp_monotonic_ns();
            if (!child->gone_ns)
                child->gone_ns = now;
            if (now - child->gone_ns < UP_SWEEP_NS)
                continue;
            kill(-child->pid, SIGKILL);
        }
        int wait_status;
        if (waitpid(child->pid, &wait_status, WNOHANG) == child->pid)
            child_ended(up, child, wait_status);
    }
}

static pid_t daemon_pid(const up_t *up)
{
    return up->children[0].pid;
}

/* Asks the daemon how far the start is; tells the user when something changes. */
static void check_ready(up_t *up, uint64_t started_ns)
{
    xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
    if (client_ask(up->config, "up", &question, xpw_Envelope_verdict_tag, XP_NS_PER_S, &answer) !=
        XP_OK)
        return;
    const xpw_Verdict *verdict = &answer.body.verdict;
    if (verdict->system_ready && verdict->gateway_port) {
        up->ready = true;
        const char *http = up->config->daemon.http;
        fprintf(stdout,
                "ready in %.1f s: OpenAI API at http://%s:%u/v1, state at http://%.*s:%u/\n",
                (double)(xp_monotonic_ns() - started_ns) / 1e9, verdict->gateway_host,
                verdict->gateway_port, (int)(strrchr(http, ':') - http), http, verdict->http_port);
        for (uint32_t m = 0; m < up->config->model_count; m++)
            fprintf(stdout, "  model %s\n", up->config->models[m].id);
        fprintf(stdout, "Ctrl-C or `xpool down` stops everything.\n");
        fflush(stdout);
        return;
    }
    const char *reason = verdict->reasons_count ? verdict->reasons[0] : "the gateway to listen";
    if (strcmp(reason, up->last_reason) != 0) {
        snprintf(up->last_reason, sizeof(up->last_reason), "%s", reason);
        xp_log_info("waiting: %s", reason);
    }
}

/* A start that does not come to its end: the deadlines of its parts have passed one after the
 * other, and something (an engine that never registered, say) is still awaited. */
static void check_start(up_t *up, uint64_t started_ns)
{
    const config_t *config = up->config;
    double limit = config->deadlines.registration + 2 * config->deadlines.startup;
    if ((double)(xp_monotonic_ns() - started_ns) / 1e9 < limit)
        return;
    xpw_Envelope report = {.which_body = xpw_Envelope_fail_report_tag}, answer;
    snprintf(report.body.fail_report.who, sizeof(report.body.fail_report.who), "up");
    snprintf(report.body.fail_report.what, sizeof(report.body.fail_report.what),
             "not ready within %g s (deadlines.registration and twice deadlines.startup); waits "
             "for: %.250s",
             limit, up->last_reason);
    xp_log_err("%s", report.body.fail_report.what);
    up->failed = true;
    up->exit_code = 1;
    client_ask(config, "up", &report, xpw_Envelope_failure_tag, 300 * XP_NS_PER_MS, &answer);
    begin_force(up, UP_GRACE_NS);
}

/* Kills what has not ended by itself. An engine whose main process has ended did: only what that
 * left behind is to go, and reap() sees to it. */
static void force(up_t *up)
{
    for (uint32_t i = 0; i < up->count; i++) {
        const up_child_t *child = &up->children[i];
        if (!child->pid || child->gone_ns)
            continue;
        xp_log_err("%s %s (pid %d) did not end by itself: killed", child_role(child), child->name,
                   (int)child->pid);
        up->exit_code = 1;
        up->killed = true;
        kill(child->pid, SIGKILL);
    }
}

static void on_stop_signal(up_t *up, int signal_number)
{
    if (up->interrupted) {
        xp_log_warn("second signal: killing everything at once");
        up->killed = true;
        signal_all(up, SIGKILL);
        up->exit_code = 130;
        return;
    }
    up->interrupted = up->stopping = true;
    const config_t *config = up->config;
    double patience = config->deadlines.drain + 2 * config->deadlines.stop + UP_SLACK_S;
    if (daemon_pid(up)) {
        kill(daemon_pid(up), SIGTERM);
        begin_force(up, (uint64_t)(patience * (double)XP_NS_PER_S));
    } else {
        begin_force(up, UP_GRACE_NS);
    }
}

/* An MPS controller outlives a daemon that was killed; with the whole system it goes. */
static void sweep_mps(const config_t *config)
{
    uint32_t ended = 0;
    if (!gpus_used(config, false))
        return;
    if (mps_sweep(getenv(GPUS_MPS_ROOT_VARIABLE), NULL, &ended) != XP_OK)
        xp_log_warn("%s", xp_error_last()->text);
    else if (ended)
        xp_log_info("%u process(es) of MPS ended", ended);
}

int up_run(const config_t *config, const char *program, char *const *config_arguments)
{
    xp_log_identify("up", "");
    up_t *up = calloc(1, sizeof(*up));
    if (!up)
        return 1;
    up->config = config;
    up->program = program;
    up->config_arguments = config_arguments;
    uint64_t started_ns = xp_monotonic_ns(), next_check_ns = 0;

    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    char self[24];
    snprintf(self, sizeof(self), "%d", (int)getpid());
    setenv("XPOOL_UNDER_UP", self, 1);
    /* Asked once, for all children; where it is not known, the daemon says so. */
    (void)gpus_memory_hand_on(config);

    xp_status_t status = spawn_all(up);
    if (status != XP_OK && status != XP_CANCELLED) {
        xp_log_error("cannot start");
        up->exit_code = 1;
        up->stopping = true;
        signal_all(up, SIGKILL);
    }
    while (alive(up)) {
        struct timespec tick = {.tv_nsec = UP_TICK_MS * 1000000};
        int got = sigtimedwait(&signals, NULL, &tick);
        reap(up); /* whoever died before the signal did not die of it */
        if (got == SIGINT || got == SIGTERM || got == SIGHUP)
            on_stop_signal(up, got);
        reap(up);
        start_again(up);
        uint64_t now = xp_monotonic_ns();
        if (up->kill_at_ns && now >= up->kill_at_ns && alive(up)) {
            force(up);
            up->kill_at_ns = now + XP_NS_PER_S;
        }
        if (!up->ready && !up->stopping && !up->failed && now >= next_check_ns) {
            next_check_ns = now + UP_CHECK_NS;
            check_ready(up, started_ns);
            if (!up->ready)
                check_start(up, started_ns);
        }
    }
    int exit_code = up->exit_code;
    if (exit_code)
        sweep_mps(config);
    if (exit_code == 0)
        xp_log_info("everything stopped in order");
    free(up);
    return exit_code;
}
