/* SPDX-License-Identifier: MIT */
/*
 * SIGKILL under MPS: Instances in the middle of their wait (inside a captured graph of 48 layers)
 * and at random moments, and AtnAgents, while other Instances replay and check every element.
 *
 *     transport_kill [SECONDS] [AGENT_KILLS] [DRAIN_KILLS]
 *     transport_kill sweep                     ends what a broken run left of MPS
 *
 * Passes when no survivor was harmed: none ended, none hung, none had a wrong element. The process
 * itself is the daemon's stand-in: host only, it owns MPS, life words and the arenas' descriptors.
 */
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/memfd.h"
#include "client.h"
#include "cuda/mps.h"

#define SURVIVORS   3
#define VICTIMS     6
#define LIFE_AGENT  1
#define LIFE_FIRST  2
#define CLIENTS     (SURVIVORS + VICTIMS)
#define KILLS_MAX   4000
#define SETTLE_NS   (30 * XP_NS_PER_MS)
#define PROGRESS_NS (3 * XP_NS_PER_S)

static int life_fd, board_fd;
static life_page_t *life;
static board_line_t *board;
static transport_life_watch_t *watch;
static agent_t agent;
static client_t clients[CLIENTS]; /* the first SURVIVORS are never killed */
static uint64_t died_ns[LIFE_WORDS];
static uint32_t agent_life = LIFE_AGENT;
static mps_t *mps;
static uint32_t victim_compute_ns = 15000; /* a layer; stands for attention */

static void on_death(void *context, uint32_t index)
{
    (void)context;
    __atomic_store_n(&died_ns[index], xp_monotonic_ns(), __ATOMIC_RELEASE);
}

static void watch_process(pid_t pid, uint32_t index)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    CHECK(fd >= 0);
    CHECK_OK(transport_life_watch_add(watch, fd, index));
    close(fd);
}

static void begin_client(uint32_t i)
{
    client_setup_t setup = {
        .geometry = {.hidden = 2048, .max_rows = 8, .dtype = XP_DTYPE_BF16, .dp_size = 1},
        .rows = i % 2 ? 4 : 8, /* one launch a layer, and three */
        .compute_ns = 15000,   /* stands for attention */
        .line = i,
        .seed = i + 1,
        .limit_ns = 30 * XP_NS_PER_S,
    };
    memset(&board[i], 0, sizeof(board[i]));
    transport_life_renew(life, LIFE_FIRST + i);
    __atomic_store_n(&died_ns[LIFE_FIRST + i], 0, __ATOMIC_RELEASE);
    client_start(life_fd, board_fd, LIFE_FIRST + i, &setup, &clients[i]);
    watch_process(clients[i].role.pid, LIFE_FIRST + i);
}

static bool alive(pid_t pid)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

static void begin_agent(void)
{
    /* Another word for each, so that nothing depends on when the last one's kernel has left. */
    agent_life = agent_life == LIFE_AGENT ? LIFE_WORDS - 1 : LIFE_AGENT;
    transport_life_renew(life, agent_life);
    __atomic_store_n(&died_ns[agent_life], 0, __ATOMIC_RELEASE);
    agent_start(life_fd, agent_life, CLIENTS, &agent);
    watch_process(agent.pid, agent_life);
}

static uint64_t replays_of(uint32_t i)
{
    return __atomic_load_n(&board[i].replays, __ATOMIC_ACQUIRE);
}

/* Is every survivor alive, right, and moving? */
static bool survivors_fine(char *why, size_t room)
{
    uint64_t before[SURVIVORS], deadline_ns = xp_monotonic_ns() + PROGRESS_NS;
    for (uint32_t i = 0; i < SURVIVORS; i++)
        before[i] = replays_of(i);
    for (uint32_t i = 0; i < SURVIVORS; i++) {
        while (replays_of(i) < before[i] + 2) {
            if (!alive(clients[i].role.pid)) {
                snprintf(why, room, "survivor %u is dead", i);
                return false;
            }
            if (board[i].ended) {
                snprintf(why, room, "survivor %u ended: %s", i,
                         xp_status_name((xp_status_t)(board[i].ended - 1)));
                return false;
            }
            if (xp_monotonic_ns() > deadline_ns) {
                snprintf(why, room, "survivor %u hangs", i);
                return false;
            }
            usleep(500);
        }
        if (board[i].wrong) {
            snprintf(why, room, "survivor %u has %llu wrong elements", i,
                     (unsigned long long)board[i].wrong);
            return false;
        }
    }
    if (!alive(agent.pid)) {
        snprintf(why, room, "the AtnAgent is dead");
        return false;
    }
    return true;
}

static void begin_mps(void)
{
    mps_options_t options = {.name = "cuda-0", .devices = "0"};
    if (mps) {
        (void)mps_stop(mps);
        mps_destroy(mps);
        mps = NULL;
    }
    if (mps_start(&options, &mps) != XP_OK) {
        printf("skipped: %s\n", xp_error_last()->text);
        exit(KIT_SKIP);
    }
    setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe_folder(mps), 1);
    setenv("CUDA_MPS_LOG_DIRECTORY", mps_log_folder(mps), 1);
}

static void begin_all(void)
{
    begin_agent();
    for (uint32_t i = 0; i < CLIENTS; i++)
        begin_client(i);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        CHECK(client_attach(&clients[i], &agent));
        client_loop(&clients[i]);
    }
}

static void kill_all(void)
{
    for (uint32_t i = 0; i < CLIENTS; i++) {
        transport_life_watch_remove(watch, LIFE_FIRST + i);
        client_kill(&clients[i]);
    }
    transport_life_watch_remove(watch, agent_life);
    agent_kill(&agent);
}

typedef struct tally {
    uint32_t kills, harmed;
    uint32_t word_ns[KILLS_MAX];  /* SIGKILL to life word */
    uint32_t pidfd_ns[KILLS_MAX]; /* ... to a readable pidfd */
    char first[160];
} tally_t;

/* Kills, and waits until the life word says so; the pidfd comes later. */
static uint64_t kill_one(tally_t *tally, pid_t pid, uint32_t index)
{
    uint64_t killed_ns = xp_monotonic_ns();
    kill(pid, SIGKILL);
    while (!life_word_look(&life->word[index]))
        CHECK(xp_monotonic_ns() < killed_ns + XP_NS_PER_S);
    if (tally->kills < KILLS_MAX)
        tally->word_ns[tally->kills] = (uint32_t)(xp_monotonic_ns() - killed_ns);
    tally->kills++;
    return killed_ns;
}

static void await_pidfd(tally_t *tally, uint32_t index, uint64_t killed_ns)
{
    uint64_t died;
    while (!(died = __atomic_load_n(&died_ns[index], __ATOMIC_ACQUIRE))) {
        CHECK(xp_monotonic_ns() < killed_ns + 5 * XP_NS_PER_S);
        usleep(200);
    }
    if (tally->kills <= KILLS_MAX)
        tally->pidfd_ns[tally->kills - 1] = (uint32_t)(died - killed_ns);
}

static void judge(tally_t *tally, const char *what)
{
    char why[128];
    if (survivors_fine(why, sizeof(why)))
        return;
    if (!tally->harmed++)
        snprintf(tally->first, sizeof(tally->first), "%s: %s", what, why);
    printf("HARM after kill %u (%s): %s\n", tally->kills, what, why);
    kill_all();
    begin_mps(); /* the server is in its fault state; the whole GPU starts anew */
    begin_all();
}

/* The victim is at a random moment, or in the middle of its wait, since nobody answers it: of any
 * layer, or of the first, with the whole graph still to run. */
typedef enum kill_when { KILL_ANY_TIME, KILL_WAITING, KILL_WAITING_FIRST } kill_when_t;
static void kill_clients(tally_t *tally, kill_when_t when, double seconds, uint32_t limit)
{
    const bool held = when != KILL_ANY_TIME;
    const uint32_t first = when == KILL_WAITING_FIRST ? AGENT_HOLD_FIRST : 0;
    uint64_t until_ns = kit_in(seconds);
    for (uint32_t n = 0; n < limit && xp_monotonic_ns() < until_ns; n++) {
        const uint32_t v = SURVIVORS + n % VICTIMS, harmed = tally->harmed;
        client_t *victim = &clients[v];
        if (!victim->attached) {
            CHECK(client_attach(victim, &agent));
            client_loop(victim);
            usleep(2000);
        }
        if (held)
            agent_hold(&agent, first | 1u << victim->slot);
        if (first)
            usleep(2 * CLIENT_LAYERS * (victim_compute_ns / 1000 + 30)); /* the graph before it */
        usleep((useconds_t)(kit_value(n, 3) % 4000));
        uint64_t killed_ns = kill_one(tally, victim->role.pid, victim->life_index);
        struct timespec settle = {.tv_nsec = SETTLE_NS};
        nanosleep(&settle, NULL);
        judge(tally, held ? "Instance held in its wait" : "Instance at a random moment");
        if (tally->harmed != harmed)
            continue; /* everything is new */
        await_pidfd(tally, victim->life_index, killed_ns);
        if (held)
            agent_hold(&agent, 0);
        CHECK_OK(agent_detach(&agent, victim->slot));
        client_kill(victim);
        begin_client(v);
    }
    for (uint32_t v = SURVIVORS; v < CLIENTS; v++)
        if (!clients[v].attached) {
            CHECK(client_attach(&clients[v], &agent));
            client_loop(&clients[v]);
        }
}

/* The Instances' requests stay open, and the next AtnAgent answers them. */
static void kill_agents(tally_t *tally, uint32_t count, uint32_t *pause_us)
{
    for (uint32_t n = 0; n < count; n++) {
        usleep((useconds_t)(kit_value(n, 9) % 5000));
        uint64_t killed_ns = kill_one(tally, agent.pid, agent_life);
        await_pidfd(tally, agent_life, killed_ns);
        agent_kill(&agent);
        begin_agent();
        bool attached = true;
        for (uint32_t i = 0; i < CLIENTS && attached; i++)
            attached = client_attach(&clients[i], &agent);
        if (!attached)
            printf("attach after an AtnAgent's death: %s\n", xp_error_last()->text);
        pause_us[n] = (uint32_t)((xp_monotonic_ns() - killed_ns) / 1000);
        judge(tally, "AtnAgent");
    }
}

static void report_target(const char *metric, tally_t *tally, const char *what, const char *target)
{
    char note[512];
    kit_summary_t word = {0}, pidfd = {0};
    uint32_t kept = tally->kills < KILLS_MAX ? tally->kills : KILLS_MAX;
    if (kept) {
        word = kit_summarise(tally->word_ns, kept);
        pidfd = kit_summarise(tally->pidfd_ns, kept);
    }
    snprintf(
        note, sizeof(note),
        "of %u SIGKILLs of %s under MPS, those after which a survivor was dead, hung or wrong; "
        "SIGKILL to life word P50 %.0f, P99 %.0f, max %.0f us, to pidfd P50 %.0f, max %.0f us%s%s",
        tally->kills, what, word.p50_us, word.p99_us, word.max_us, pidfd.p50_us, pidfd.max_us,
        tally->harmed ? "; first: " : "", tally->first);
    kit_row(metric, tally->harmed, "kills", -1, target, note);
    char name[96];
    snprintf(name, sizeof(name), "%s.word", metric);
    kit_samples(&word, name);
    snprintf(name, sizeof(name), "%s.pidfd", metric);
    kit_samples(&pidfd, name);
}

static void report(const char *metric, tally_t *tally, const char *what)
{
    report_target(metric, tally, what, "0");
}

/* What a graph may still have to compute after its waits have returned. This finds the limit, so
 * harm is a result here and no failure. */
static void measure_drain(uint32_t kills)
{
    const uint32_t compute_us[] = {40, 70, 100, 150, 220};
    for (uint32_t c = 0; c < sizeof(compute_us) / sizeof(compute_us[0]); c++) {
        tally_t *tally = calloc(1, sizeof(*tally));
        char metric[64], what[160];
        CHECK(tally);
        victim_compute_ns = compute_us[c] * 1000;
        kill_all();
        begin_all();
        kill_clients(tally, KILL_WAITING_FIRST, 12, kills);
        snprintf(metric, sizeof(metric), "transport.cuda.drain_%uus_harm",
                 compute_us[c] * CLIENT_LAYERS);
        snprintf(
            what, sizeof(what),
            "Instances that wait in the first layer, with %u layers of %u us of kernels after it",
            CLIENT_LAYERS, compute_us[c]);
        report_target(metric, tally, what, NULL);
        free(tally);
    }
    victim_compute_ns = 15000;
    kill_all();
    begin_all();
}

int main(int argc, char **argv)
{
    agent_main(argc, argv);
    client_main(argc, argv);
    const double seconds = argc > 1 ? strtod(argv[1], NULL) : 10;
    const uint32_t agents = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 3;
    static tally_t held, random_moment, of_agents;
    static uint32_t pause_us[1000];
    void *page;
    uint32_t swept;
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK_OK(mps_sweep(NULL, NULL, &swept));
    if (argc > 1 && !strcmp(argv[1], "sweep")) {
        printf("swept %u processes\n", swept);
        return 0;
    }
    begin_mps();
    CHECK_OK(transport_life_make(&life_fd));
    CHECK_OK(transport_life_map(life_fd, &life));
    CHECK_OK(xp_memfd_create("board", MAILBOX_HEADER_BYTES, &board_fd));
    CHECK_OK(xp_memfd_map(board_fd, MAILBOX_HEADER_BYTES, &page));
    board = page;
    CHECK_OK(transport_life_watch_create(life, on_death, NULL, &watch));
    printf("watching thread is %s\n",
           transport_life_watch_is_realtime(watch) ? "real-time" : "ordinary");
    begin_all();
    pid_t server = 0;
    CHECK_OK(mps_server(mps, &server));
    printf("MPS controller %d, server %d\n", mps_pid(mps), server);

    kill_clients(&held, KILL_WAITING, seconds * 0.5, 200);
    report("transport.cuda.kill_waiting_harm", &held, "Instances waiting inside a 48-layer graph");
    kill_clients(&random_moment, KILL_ANY_TIME, seconds * 0.5, 200);
    report("transport.cuda.kill_random_harm", &random_moment, "Instances at a random moment");
    if (agents) {
        kill_agents(&of_agents, agents < 1000 ? agents : 1000, pause_us);
        report("transport.cuda.kill_agent_harm", &of_agents,
               "the AtnAgent, whose successor answers what was open");
        kit_summary_t pause = kit_summarise(pause_us, agents);
        char note[160];
        snprintf(note, sizeof(note),
                 "AtnAgent's death to all %d arenas attached to the next, max %.0f", CLIENTS,
                 pause.max_us); /* samples were us, so the summary is ms */
        kit_row("transport.cuda.agent_replace_ms", pause.p50_us, "ms", -1, NULL, note);
        kit_samples(&pause, "transport.cuda.agent_replace_ms");
    }
    const uint32_t drained = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
    if (drained)
        measure_drain(drained);
    /* A planned end: MPS is told first. */
    uint32_t planned = 0, planned_harm = held.harmed + random_moment.harmed + of_agents.harmed;
    tally_t *tally = calloc(1, sizeof(*tally));
    CHECK(tally);
    for (uint32_t v = SURVIVORS; v < CLIENTS; v++, planned++) {
        if (mps_terminate_client(mps, clients[v].role.pid) != XP_OK)
            printf("terminate_client: %s\n", xp_error_last()->text);
        judge(tally, "terminate_client");
        if (tally->harmed)
            break;
    }
    char note[128];
    snprintf(note, sizeof(note), "of %u clients ended by MPS terminate_client first%s%s", planned,
             tally->harmed ? "; first: " : "", tally->first);
    kit_row("transport.cuda.planned_end_harm", tally->harmed, "ends", -1, "0", note);
    planned_harm += tally->harmed;

    uint64_t total = 0;
    for (uint32_t i = 0; i < SURVIVORS; i++)
        total += replays_of(i);
    printf("survivors replayed %llu graphs of %d layers, all exact\n", (unsigned long long)total,
           CLIENT_LAYERS);
    kill_all();
    transport_life_watch_destroy(watch);
    xp_status_t status = mps_stop(mps);
    printf("MPS stopped: %s\n", status == XP_OK ? "in order" : xp_error_last()->text);
    mps_destroy(mps);
    printf("%s transport_kill\n", planned_harm ? "FAILED" : "ok");
    return planned_harm ? 1 : 0;
}
