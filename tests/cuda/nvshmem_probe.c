/* SPDX-License-Identifier: MIT */
/*
 * Provider nvshmem on two GPUs, by real processes: AtnAgents and FfnAgents are the PEs, Instances
 * reach them by the relay. The echo stands for the execution. Prints one JSON row a line.
 *
 *   nvshmem_probe [thousands of round trips] [parts] [GPUs to use at most]
 *   parts: join     every scene once, without a request (also over tests/tools/fake_*.c)
 *          ping     the library's own put with signal between two PEs: the floor
 *          one      1 AtnAgent (cuda:0, MPS), 1 FfnAgent (cuda:1)
 *          two      1 AtnAgent, 2 FfnAgents: partials and complete rows of two members
 *          fan_in   2 AtnAgents, 1 FfnAgent: attention DP and TP
 *          mesh     2 AtnAgents, 2 FfnAgents, two PEs on each GPU: all delivery kinds
 *          crossed  mesh, where the other role's PE comes in the other order
 *          far      one, two, fan_in and mesh once more, as between hosts: NVSHMEM's calls alone
 *          kill     SIGKILL of Instances, then of PEs; a fresh start on the same GPUs
 *          limited  two PEs on a GPU without full multi-process support are refused by name
 *          memory   what joining takes of a GPU, with other settings of the library
 *
 * NVSHMEM joins only where every GPU has the same number of PEs (docs/designs/cuda.md): the scenes
 * of three PEs need three GPUs and are left out, by name, where there are two.
 *
 * Every wait has a limit; every step of a PE is printed, and NVSHMEM_DEBUG=INFO has the library's
 * own added. When something fails, all processes and the MPS controller are ended. Exit code 77
 * where there are not two GPUs, the wheel or the plug-in.
 */
#include <glob.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "fabric/records.h"
#include "stage/records.h"
#include "stage_roles.h"

#define PARTS    "ping,one,two,fan_in,mesh,far,kill,limited"
#define GPUS_MAX 4
#define CHILDREN 256

CUDA_IMAGE_DECLARE(tests_nvshmem_ping);

static int life_fd;
static mps_t *mps;
static const char *mps_pipe;
static uint32_t gpus;    /* to be used: as many as there are, GPUS_MAX at most */
static bool crossed_now; /* the FfnAgents' GPUs in the other order */
static agent_t children[CHILDREN];
static uint32_t child_count;
static uint32_t spawned; /* life words are not used twice */
static fabric_plan_t plan;
static uint32_t scene_now;
static bool far_now; /* no PE's memory is mapped by another: the courier carries all answers */
static agent_t atns[2], ffns[MEMBERS_MAX];
static agent_t clients[FABRIC_MAX_RANKS];
static hop_floor_t hop_floor = {-1, -1, -1};
static uint32_t variant_now; /* of FfnAgents */

/* ---- one PE of the floor: a role of this program -------------------------------------------- */
#define PING_PAYLOAD (256u << 10)

static void ping_role(char **argv)
{
    static const char *const names[] = {"nvshmem_test_ping"};
    const cuda_driver_t *driver;
    cuda_device_t device;
    cuda_module_t module;
    cuda_function_t ping;
    cuda_stream_t stream;
    cuda_address_t source, samples, late;
    static uint32_t host[SAMPLES_MAX];
    order_t order;
    const int socket = kit_role_socket(argv);
    const uint32_t pe = kit_role_number(argv, 0);
    scene_plan(SCENE_ONE, &plan);
    CHECK_OK(cuda_driver_load(&driver));
    CHECK_OK(cuda_device_open(driver, (int)pe, &device));
    stage_heap_t *heap = role_join(&device, &plan, socket);
    CHECK(heap);
    CHECK_OK(cuda_module_load(&device, &cuda_image_tests_nvshmem_ping, names, 1, &module, &ping));
    CHECK_OK(stage_heap_module_ready(heap, &module));
    CHECK_OK(cuda_stream_create(&device, false, &stream));
    CHECK_OK(CUDA_CALL(driver, cuMemAlloc, &source, PING_PAYLOAD));
    CHECK_OK(CUDA_CALL(driver, cuMemAlloc, &samples, sizeof(host)));
    CHECK_OK(CUDA_CALL(driver, cuMemAlloc, &late, 256));
    xp_clock_t clock = xp_clock_system();
    answer_t answer = {.status = XP_OK};
    answer.values[0] = stage_heap_peer(heap, 0, 1 - pe) != 0;
    CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    for (uint32_t turn = 0; kit_receive(socket, &order, sizeof(order), NULL); turn++) {
        if (order.what == ORDER_STOP)
            break;
        int peer = 1 - (int)pe;
        uint32_t first = pe == 0, missed = 0;
        CHECK(order.count <= SAMPLES_MAX && order.rows <= PING_PAYLOAD);
        /* A word of its own each time, all of them zero. */
        cuda_address_t word = stage_heap_at(heap, 64 * turn),
                       payload = stage_heap_at(heap, STAGE_HEADER_BYTES);
        void *parameters[] = {&word,  &payload, &source,  &order.rows, &order.count,
                              &first, &peer,    &samples, &late};
        CHECK_OK(CUDA_CALL(driver, cuMemsetD8Async, late, 0, 4, stream));
        CHECK_OK(cuda_launch(&device, ping, 1, order.other, stream, parameters));
        CHECK_OK(cuda_stream_wait(&device, stream, &clock, kit_in(25)));
        CHECK_OK(CUDA_CALL(driver, cuMemcpyDtoHAsync, &missed, late, sizeof(missed), stream));
        CHECK_OK(CUDA_CALL(driver, cuMemcpyDtoHAsync, host, samples, order.count * 4ull, stream));
        CHECK_OK(cuda_stream_wait(&device, stream, &clock, kit_in(10)));
        answer = (answer_t){.status = missed ? XP_TIMEOUT : XP_OK, .done = order.count};
        answer.times = kit_summarise(host, order.count);
        CHECK(kit_send(socket, &answer, sizeof(answer), -1));
    }
    fflush(stdout);
    stage_heap_sweep(getpid());
    _exit(0);
}

/* ---- the parent ----------------------------------------------------------------------------- */
/* At any exit: nothing stays, whatever has happened. Only processes that nobody has waited for yet
 * are this process's still. */
static void clean_up(void)
{
    bool any = false;
    for (uint32_t i = 0; i < child_count; i++) {
        const pid_t gone = waitpid(children[i].pid, NULL, WNOHANG);
        if (gone < 0)
            continue;
        any = true;
        if (gone == 0) {
            printf("still there, killed: process %d\n", children[i].pid);
            kill(children[i].pid, SIGKILL);
            waitpid(children[i].pid, NULL, 0);
        }
        stage_heap_sweep(children[i].pid);
    }
    if (any && mps)
        usleep(300000); /* the MPS server notices that they are gone */
    agent_mps_end(mps);
    mps = NULL;
}

/* Whoever limits the time ends this program so. It waits in a call of the system nearly always, and
 * is killed soon after if it does not end. */
static void on_end(int number)
{
    (void)number;
    exit(1);
}

static void spawn(const char *name, uint32_t a, uint32_t b, agent_t *agent_out)
{
    agent_spawn(name, life_fd, a, b, agent_out);
    uint32_t at = child_count;
    for (uint32_t i = 0; i < child_count && at == child_count; i++)
        if (waitpid(children[i].pid, NULL, WNOHANG) < 0)
            at = i; /* waited for: its place is free */
    CHECK(at < CHILDREN);
    child_count += at == child_count;
    children[at] = *agent_out;
}

static void tell(agent_t *agent, order_t order, int fd)
{
    CHECK(kit_send(agent->socket, &order, sizeof(order), fd));
}
static answer_t hear(agent_t *agent, int *fd_out)
{
    answer_t answer;
    if (!kit_receive(agent->socket, &answer, sizeof(answer), fd_out)) {
        fprintf(stderr, "process %d does not answer\n", agent->pid);
        exit(1);
    }
    if (answer.status != XP_OK)
        xp_fail(answer.status, "process %d: %s", agent->pid, answer.text);
    return answer;
}
static answer_t ask(agent_t *agent, order_t order, int fd, int *fd_out)
{
    tell(agent, order, fd);
    return hear(agent, fd_out);
}
static void must(agent_t *agent, order_t order, int fd, int *fd_out)
{
    CHECK_OK(ask(agent, order, fd, fd_out).status);
}

static void under_mps(bool is)
{
    if (is && mps_pipe)
        setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
    else
        unsetenv("CUDA_MPS_PIPE_DIRECTORY");
}

/* A GPU for each PE, where there are enough; else AtnAgents and FfnAgents on the same two. */
static int gpu_of_pe(uint32_t pe)
{
    if (pe < plan.atn_count || plan.atn_count + plan.ffn_count <= gpus)
        return (int)pe;
    const uint32_t ffn = pe - plan.atn_count;
    return (int)(crossed_now ? 1 - ffn : ffn);
}
static uint32_t pes_of_gpu(int gpu)
{
    uint32_t count = 0;
    for (uint32_t pe = 0; pe < plan.atn_count + plan.ffn_count; pe++)
        count += gpu_of_pe(pe) == gpu;
    return count;
}
static bool gpu_has_atn(int gpu)
{
    return (uint32_t)gpu < plan.atn_count;
}

/* What the daemon does for agents: MPS where the GPU has attention, and a share of it where several
 * PEs are on it. */
static void environment_of(uint32_t pe, bool shares)
{
    char share[16];
    int gpu = gpu_of_pe(pe);
    under_mps(gpu_has_atn(gpu));
    snprintf(share, sizeof(share), "%u", 100 / pes_of_gpu(gpu));
    if (shares && pes_of_gpu(gpu) > 1)
        setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", share, 1);
    else
        unsetenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
}

/* PE 0 makes the id, this process hands it to the others: the daemon's part. */
static void join_all(agent_t *const *pes, uint32_t count)
{
    join_t join = {.make = 1};
    CHECK(kit_send(pes[0]->socket, &join, sizeof(join), -1));
    CHECK(kit_receive(pes[0]->socket, &join, sizeof(join), NULL));
    join.make = 0;
    for (uint32_t pe = 1; pe < count; pe++) {
        join.pe = pe;
        CHECK(kit_send(pes[pe]->socket, &join, sizeof(join), -1));
    }
}

/* Whether NVSHMEM can join here: PEs on shared GPUs and others do not go together. */
static bool scene_possible(uint32_t scene, const char *name)
{
    scene_plan(scene, &plan);
    for (uint32_t pe = 0; pe < plan.atn_count + plan.ffn_count; pe++)
        if (pes_of_gpu(gpu_of_pe(pe)) != pes_of_gpu(gpu_of_pe(0))) {
            printf("%s: left out: %u PEs on %u GPUs, and NVSHMEM joins only with the same number "
                   "on each\n",
                   name, plan.atn_count + plan.ffn_count, gpus);
            return false;
        }
    return true;
}

static void pes_up(uint32_t scene, bool shares)
{
    agent_t *pes[4];
    setenv(HEAP_VARIABLE, far_now ? "far" : "near", 1);
    scene_plan(scene, &plan);
    scene_now = scene;
    for (uint32_t pe = 0; pe < plan.atn_count + plan.ffn_count; pe++) {
        const int gpu = gpu_of_pe(pe);
        printf("scene %u: PE %u is %s on cuda:%d, %s, 1 of %u PEs there\n", scene, pe,
               pe < plan.atn_count ? "an AtnAgent" : "an FfnAgent", gpu,
               gpu_has_atn(gpu) && mps_pipe ? "MPS" : "no MPS", pes_of_gpu(gpu));
    }
    for (uint32_t a = 0; a < plan.atn_count; a++) {
        environment_of(a, shares);
        spawn("relay", relay_number(scene, a), ++spawned, &atns[a]);
        pes[a] = &atns[a];
    }
    for (uint32_t f = 0; f < plan.ffn_count; f++) {
        environment_of(plan.atn_count + f, shares);
        spawn("ffn", f | scene << 8 | variant_now << 12 | ++spawned << 16,
              (uint32_t)gpu_of_pe(plan.atn_count + f), &ffns[f]);
        pes[plan.atn_count + f] = &ffns[f];
    }
    under_mps(true);
    unsetenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    unsetenv(HEAP_VARIABLE);
    join_all(pes, plan.atn_count + plan.ffn_count);
}

static void scene_up(uint32_t scene)
{
    uint64_t start_ns = xp_monotonic_ns();
    pes_up(scene, true);
    for (uint32_t a = 0; a < plan.atn_count; a++)
        CHECK_OK(hear(&atns[a], NULL).status);
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        CHECK_OK(hear(&ffns[f], NULL).status);
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        must(&ffns[f], (order_t){.what = ORDER_START}, -1, NULL);
    printf("scene %u%s: %u AtnAgents, %u FfnAgents joined and started in %.2f s\n", scene,
           far_now ? ", far" : "", plan.atn_count, plan.ffn_count,
           (double)(xp_monotonic_ns() - start_ns) / 1e9);
}

static uint32_t left_sockets(void)
{
    glob_t found;
    uint32_t count = glob("/tmp/nvshmem-socket-*", GLOB_NOSORT, NULL, &found) == 0
                         ? (uint32_t)found.gl_pathc
                         : 0;
    globfree(&found);
    return count;
}

static void scene_down(void)
{
    for (uint32_t a = 0; a < plan.atn_count; a++) {
        must(&atns[a], (order_t){.what = ORDER_STOP}, -1, NULL);
        agent_ended(&atns[a]);
    }
    for (uint32_t f = 0; f < plan.ffn_count; f++) {
        answer_t looked = ask(&ffns[f], (order_t){.what = ORDER_LOOK}, -1, NULL);
        CHECK(looked.status == XP_OK && looked.values[0] == 0);
        answer_t counted = ask(&ffns[f], (order_t){.what = ORDER_COUNTERS}, -1, NULL);
        CHECK_OK(ask(&ffns[f], (order_t){.what = ORDER_STOP}, -1, NULL).status);
        printf("FfnAgent %u: %llu Invocations, longest turn %.1f us\n", f,
               (unsigned long long)counted.values[0], (double)counted.values[2] / 1e3);
        agent_ended(&ffns[f]);
    }
    CHECK(left_sockets() == 0);
}

/* All ranks of an Instance, in `clients`. */
static void instance_up(uint32_t instance)
{
    const fabric_plan_instance_t *one = &plan.instances[instance];
    const uint32_t ranks = fabric_plan_ranks(one);
    uint32_t words[FABRIC_MAX_RANKS];
    int arenas[FABRIC_MAX_RANKS];
    for (uint32_t rank = 0; rank < ranks; rank++) {
        words[rank] = ++spawned;
        spawn("client", client_number(instance, rank, scene_now, 0, true), words[rank],
              &clients[rank]);
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        CHECK_OK(hear(&clients[rank], NULL).status);
        must(&clients[rank], (order_t){.what = ORDER_EXPORT}, -1, &arenas[rank]);
    }
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        if (stage_members(one) >> f & 1)
            must(&ffns[f], (order_t){.what = ORDER_ATTACH, .instance = instance}, -1, NULL);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        must(&atns[one->rank_atn[rank]],
             (order_t){
                 .what = ORDER_ATTACH, .instance = instance, .other = words[rank], .rows = rank},
             arenas[rank], NULL);
        close(arenas[rank]);
    }
}

static void detach(uint32_t instance)
{
    const fabric_plan_instance_t *one = &plan.instances[instance];
    for (uint32_t rank = 0; rank < fabric_plan_ranks(one); rank++)
        must(&atns[one->rank_atn[rank]],
             (order_t){.what = ORDER_DETACH, .instance = instance, .rows = rank}, -1, NULL);
    for (uint32_t f = 0; f < plan.ffn_count; f++)
        if (stage_members(one) >> f & 1)
            must(&ffns[f], (order_t){.what = ORDER_DETACH, .instance = instance}, -1, NULL);
}

static void instance_down(uint32_t instance)
{
    for (uint32_t rank = 0; rank < fabric_plan_ranks(&plan.instances[instance]); rank++) {
        must(&clients[rank], (order_t){.what = ORDER_STOP}, -1, NULL);
        agent_ended(&clients[rank]);
    }
    detach(instance);
}

/* The same order to all ranks at once; the answer of the slowest, with the sums of what is counted.
 */
static answer_t all_ranks(uint32_t instance, order_t order)
{
    answer_t slowest = {.status = XP_OK};
    const uint32_t ranks = fabric_plan_ranks(&plan.instances[instance]);
    uint64_t wrong = 0, done = 0;
    for (uint32_t rank = 0; rank < ranks; rank++)
        tell(&clients[rank], order, -1);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        answer_t answer = hear(&clients[rank], NULL);
        CHECK_OK(answer.status);
        wrong += answer.wrong;
        done += answer.done;
        if (rank == 0 || answer.times.p50_us > slowest.times.p50_us)
            slowest = answer;
    }
    slowest.wrong = wrong;
    slowest.done = done;
    return slowest;
}

static void row(const char *name, answer_t answer, double value, const char *unit, double floor,
                const char *target, const char *what)
{
    char note[300], metric[96];
    snprintf(metric, sizeof(metric), "hop.cuda.nvshmem%s.%s", far_now ? "_far" : "", name);
    snprintf(note, sizeof(note), "%s; P50 %.3f, P99 %.3f, max %.1f us of %llu, %llu wrong", what,
             answer.times.p50_us, answer.times.p99_us, answer.times.max_us,
             (unsigned long long)answer.done, (unsigned long long)answer.wrong);
    kit_row(metric, value, unit, floor, target, note);
    kit_samples(&answer.times, metric);
    CHECK(answer.wrong == 0);
}

static void measure_trips(uint32_t instance, const char *name, uint32_t thousands)
{
    answer_t all = {.status = XP_OK};
    for (uint32_t left = thousands; left; left -= left < 250 ? left : 250) {
        answer_t answer =
            all_ranks(instance, (order_t){ORDER_TRIPS, 0, 0, 1, (left < 250 ? left : 250) * 1000});
        answer.done += all.done;
        answer.wrong += all.wrong;
        all = answer;
    }
    row(name, all, all.times.p50_us, "us", hop_floor.p50_us, NULL,
        "whole layer in one kernel, 1 row of 2048, every element checked; floor: raw put with "
        "signal by NVSHMEM");
    if (strcmp(name, "round_trip_us") == 0)
        hop_rows(far_now ? "nvshmem_far" : "nvshmem", &all, &hop_floor,
                 "NVSHMEM's own put of 4096 bytes with signal between two PEs");
}

static void measure_rows(uint32_t instance, const char *way, const uint32_t *rows, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        char name[80], what[200];
        answer_t answer = all_ranks(instance, (order_t){ORDER_GRAPH, 0, 0, rows[i], 100});
        snprintf(name, sizeof(name), "%s.graph_layer_%urows_us", way, rows[i]);
        snprintf(what, sizeof(what),
                 "a layer of a captured graph of %d, %u rows of %d BF16 a rank, echo, %u ranks "
                 "(times: a replay / %d, the slowest rank's)",
                 LAYERS, rows[i], WIDTH, fabric_plan_ranks(&plan.instances[instance]), LAYERS);
        row(name, answer, answer.times.p50_us, "us", hop_floor.p50_us, NULL, what);
        char p99[120];
        snprintf(p99, sizeof(p99), "hop.cuda.nvshmem%s.%s.graph_layer_%urows_p99_us",
                 far_now ? "_far" : "", way, rows[i]);
        kit_row(p99, answer.times.p99_us, "us", -1, NULL, "P99 of the row before");
    }
}

/* ---- parts ---------------------------------------------------------------------------------- */
/* Two PEs that do nothing else; role_join() prints what the GPUs have less. */
static void part_memory(void)
{
    static const struct {
        const char *name, *value, *what;
    } settings[] = {{"XPOOL_TEST_NOTHING", "1", "as agents have it"},
                    {"CUDA_MODULE_LOADING", "LAZY", "code loaded when it is called"},
                    {"NVSHMEM_MAX_TEAMS", "8", "8 teams instead of 32"},
                    {"NVSHMEM_DISABLE_CUDA_VMM", "1", "the heap by cudaMalloc"}};
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        agent_t pes[2], *const both[] = {&pes[0], &pes[1]};
        printf("memory: %s=%s: %s\n", settings[i].name, settings[i].value, settings[i].what);
        setenv(HEAP_VARIABLE, "near", 1);
        setenv(settings[i].name, settings[i].value, 1);
        under_mps(false);
        spawn("ping", 0, 0, &pes[0]);
        spawn("ping", 1, 0, &pes[1]);
        under_mps(true);
        unsetenv(HEAP_VARIABLE);
        unsetenv(settings[i].name);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1);
        join_all(both, 2);
        for (int pe = 0; pe < 2; pe++) {
            CHECK_OK(hear(&pes[pe], NULL).status);
            tell(&pes[pe], (order_t){.what = ORDER_STOP}, -1);
            agent_ended(&pes[pe]);
        }
    }
}

static void part_ping(void)
{
    static const struct {
        uint32_t bytes, threads;
        const char *metric;
    } pings[] = {{0, 32, "raw_flag_us"},
                 {WIDTH * 2, 256, "raw_put_signal_us"},
                 {64 << 10, 1024, "raw_put_signal_64k_us"},
                 {256 << 10, 1024, "raw_put_signal_256k_us"}};
    agent_t pes[2], *const both[] = {&pes[0], &pes[1]};
    setenv(HEAP_VARIABLE, "near", 1);
    under_mps(false);
    spawn("ping", 0, 0, &pes[0]);
    spawn("ping", 1, 0, &pes[1]);
    under_mps(true);
    unsetenv(HEAP_VARIABLE);
    join_all(both, 2);
    for (int pe = 0; pe < 2; pe++)
        printf("PE %d: the other's heap is %s\n", pe,
               hear(&pes[pe], NULL).values[0] ? "mapped" : "not mapped");
    for (size_t i = 0; i < sizeof(pings) / sizeof(pings[0]); i++) {
        char what[160];
        order_t order = {ORDER_PING, 0, pings[i].threads, pings[i].bytes, 20000};
        tell(&pes[1], order, -1);
        tell(&pes[0], order, -1);
        answer_t answer = hear(&pes[0], NULL);
        CHECK_OK(answer.status);
        CHECK_OK(hear(&pes[1], NULL).status);
        snprintf(
            what, sizeof(what),
            "round trip of NVSHMEM's put with signal between two PEs, %u bytes and a word each "
            "way, one block of %u",
            pings[i].bytes, pings[i].threads);
        row(pings[i].metric, answer, answer.times.p50_us, "us", -1, NULL, what);
        if (pings[i].bytes == WIDTH * 2) {
            hop_floor.p50_us = answer.times.p50_us;
            hop_floor.p99_us = answer.times.p99_us;
        }
    }
    for (int pe = 0; pe < 2; pe++) {
        tell(&pes[pe], (order_t){.what = ORDER_STOP}, -1);
        agent_ended(&pes[pe]);
    }
    CHECK(left_sockets() == 0);
}

static const uint32_t few_rows[] = {1, 16, 128}, all_rows[] = {1, 4, 16, 64, 128, 512},
                      no_rows[] = {0, 1, 16};

static answer_t counters_of(agent_t *ffn)
{
    answer_t answer = ask(ffn, (order_t){.what = ORDER_COUNTERS}, -1, NULL);
    CHECK_OK(answer.status);
    return answer;
}

/* What the echo of a row takes, by an FfnAgent that keeps notes: a scene of its own, since they
 * cost it a look at the clock. */
static void measure_compute(void)
{
    variant_now = VARIANT_NOTES;
    scene_up(SCENE_ONE);
    variant_now = 0;
    instance_up(INSTANCE_A);
    answer_t before = counters_of(&ffns[0]);
    answer_t trips = all_ranks(INSTANCE_A, (order_t){ORDER_TRIPS, 0, 1, 1, 20000});
    answer_t after = counters_of(&ffns[0]);
    hop_floor.compute_us = hop_compute_us(&before, &after);
    row("echo_row_us", trips, hop_floor.compute_us, "us", -1, NULL,
        "what stands for the execution in round trips: mean of the echo of 1 row of 2048 BF16");
    hop_split_rows(far_now ? "nvshmem_far" : "nvshmem", HOP_RELAYED, &before, &trips, &after, 1,
                   &hop_floor);
    instance_down(INSTANCE_A);
    scene_down();
}

static void part_one(uint32_t thousands)
{
    enum { BULKS = 10, WARM = 3 };
    measure_compute();
    scene_up(SCENE_ONE);
    instance_up(INSTANCE_A);
    measure_trips(INSTANCE_A, "round_trip_us", thousands);
    measure_rows(INSTANCE_A, "one", all_rows, 6);
    instance_down(INSTANCE_A);
    instance_up(INSTANCE_BULK);
    answer_t before = counters_of(&ffns[0]);
    answer_t bulk = all_ranks(INSTANCE_BULK, (order_t){ORDER_BULK, 0, 0, 0, BULKS});
    answer_t after = counters_of(&ffns[0]);
    hop_bulk_row(far_now ? "nvshmem_far" : "nvshmem", &bulk,
                 (double)(after.values[3] - before.values[3]) / (BULKS + WARM) / 1e3);
    instance_down(INSTANCE_BULK);
    scene_down();
}

static void part_two(uint32_t thousands)
{
    if (!scene_possible(SCENE_TWO, "two"))
        return;
    scene_up(SCENE_TWO);
    instance_up(0);
    measure_trips(0, "direct_partial_2.round_trip_us", thousands / 4 + 1);
    measure_rows(0, "direct_partial_2", few_rows, 3);
    instance_down(0);
    instance_up(1);
    measure_trips(1, "complete_2.round_trip_us", thousands / 4 + 1);
    measure_rows(1, "complete_2", few_rows, 3);
    instance_down(1);
    scene_down();
}

static void part_fan_in(void)
{
    if (!scene_possible(SCENE_FAN_IN, "fan_in"))
        return;
    scene_up(SCENE_FAN_IN);
    instance_up(0);
    measure_rows(0, "fan_in.single_dp2", no_rows, 3);
    instance_down(0);
    instance_up(1);
    measure_rows(1, "fan_in.replicated_tp2", few_rows, 3);
    instance_down(1);
    scene_down();
}

static void part_mesh(void)
{
    static const char *const ways[] = {"mesh.direct_partial", "mesh.single_dp2",
                                       "mesh.replicated_tp2", "mesh.single",
                                       "mesh.direct_partial_tp2"};
    scene_up(SCENE_MESH);
    for (uint32_t i = 0; i < plan.instance_count; i++) {
        instance_up(i);
        measure_rows(i, ways[i], few_rows, 3);
        instance_down(i);
    }
    scene_down();
}

static void part_crossed(void)
{
    crossed_now = true;
    scene_up(SCENE_MESH);
    instance_up(0);
    measure_rows(0, "crossed.direct_partial", few_rows, 3);
    instance_down(0);
    scene_down();
    crossed_now = false;
}

static void part_far(uint32_t thousands)
{
    far_now = true;
    part_one(thousands);
    part_two(thousands);
    part_fan_in();
    part_mesh();
    far_now = false;
}

/* Every scene once, without a request: joining, attaching, detaching, ending. */
static void part_join(void)
{
    for (uint32_t n = 0; n < 2 * SCENES; n++) {
        far_now = n >= SCENES;
        if (!scene_possible(n % SCENES, "join"))
            continue;
        scene_up(n % SCENES);
        for (uint32_t i = 0; i < plan.instance_count; i++) {
            instance_up(i);
            instance_down(i);
        }
        scene_down();
    }
    far_now = false;
}

static void part_kill(void)
{
    uint64_t wrong = 0, detach_ns = 0;
    scene_up(SCENE_ONE);
    for (uint32_t n = 0; n < 5; n++) {
        instance_up(INSTANCE_A);
        tell(&clients[0], (order_t){.what = ORDER_LOOP}, -1);
        CHECK_OK(hear(&clients[0], NULL).status);
        usleep((20 + kit_value(n, 7) % 50) * 1000);
        agent_kill(&clients[0]);
        uint64_t start_ns = xp_monotonic_ns();
        detach(INSTANCE_A);
        uint64_t took = xp_monotonic_ns() - start_ns;
        detach_ns = took > detach_ns ? took : detach_ns;
    }
    instance_up(INSTANCE_A);
    answer_t answer = all_ranks(INSTANCE_A, (order_t){ORDER_TRIPS, 0, 0, 16, 2000});
    wrong += answer.wrong;
    /* A PE dies in the middle of a replay: nobody can go on; who holds the arena closes it. */
    tell(&clients[0], (order_t){.what = ORDER_LOOP}, -1);
    CHECK_OK(hear(&clients[0], NULL).status);
    usleep(50000);
    uint64_t start_ns = xp_monotonic_ns();
    int pids[2] = {atns[0].pid, ffns[0].pid};
    agent_kill(&ffns[0]);
    tell(&clients[0], (order_t){.what = ORDER_CLOSE, .other = XP_FATAL}, -1);
    answer = hear(&clients[0], NULL);
    double took_ms = (double)(xp_monotonic_ns() - start_ns) / 1e6;
    CHECK(answer.status == XP_FATAL && took_ms < 1000);
    agent_kill(&clients[0]);
    agent_kill(&atns[0]);
    for (int i = 0; i < 2; i++)
        stage_heap_sweep(pids[i]);
    CHECK(left_sockets() == 0);
    /* And all of it works again on the same GPUs, with a fresh id. */
    scene_up(SCENE_ONE);
    instance_up(INSTANCE_A);
    answer = all_ranks(INSTANCE_A, (order_t){ORDER_TRIPS, 0, 0, 16, 2000});
    wrong += answer.wrong;
    instance_down(INSTANCE_A);
    scene_down();
    char note[200];
    snprintf(note, sizeof(note),
             "SIGKILL of 5 Instances (longest detach %.1f ms), of a PE (wait ended after %.1f ms), "
             "a fresh start on the same GPUs",
             (double)detach_ns / 1e6, took_ms);
    kit_row("hop.cuda.nvshmem.kill_wrong", (double)wrong, "elements", -1, "0", note);
    CHECK(wrong == 0);
}

/* The roles end with exit code 1 and the name of what is missing on stderr. */
static void part_limited(void)
{
    pes_up(SCENE_MESH, false);
    agent_t *pes[] = {&atns[0], &atns[1], &ffns[0], &ffns[1]};
    uint32_t refused = 0;
    for (int i = 0; i < 4; i++) {
        int status = 0;
        uint64_t deadline_ns = kit_in(20);
        pid_t pid = 0;
        while ((pid = waitpid(pes[i]->pid, &status, WNOHANG)) == 0 &&
               xp_monotonic_ns() < deadline_ns)
            usleep(10000);
        if (pid == 0) {
            kill(pes[i]->pid, SIGKILL);
            waitpid(pes[i]->pid, &status, 0);
        }
        refused += pid == pes[i]->pid && WIFEXITED(status) && WEXITSTATUS(status) == 1;
        close(pes[i]->socket);
        stage_heap_sweep(pes[i]->pid);
    }
    printf("two PEs a GPU at 100 %% each: %u of 4 refused by themselves\n", refused);
    CHECK(refused == 4 || !mps_pipe);
}

static uint32_t count_gpus(void)
{
    /* A look by a child: the parent stays without a context. */
    pid_t child = fork();
    if (child == 0) {
        const cuda_driver_t *driver;
        cuda_device_info_t infos[GPUS_MAX];
        uint32_t count = 0;
        const bool known = cuda_driver_load(&driver) == XP_OK &&
                           cuda_devices_list(driver, infos, GPUS_MAX, &count) == XP_OK;
        _exit(known ? (int)(count < GPUS_MAX ? count : GPUS_MAX) : 0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? (uint32_t)WEXITSTATUS(status) : 0;
}

static bool has(const char *parts, const char *part)
{
    const size_t length = strlen(part);
    for (const char *at = parts; (at = strstr(at, part)); at += length)
        if ((at == parts || at[-1] == ',') && (at[length] == 0 || at[length] == ','))
            return true;
    return false;
}

int main(int argc, char **argv)
{
    stage_roles_main(argc, argv);
    if (argc >= 6 && strcmp(argv[1], "ping") == 0)
        ping_role(argv);
    const uint32_t thousands = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20;
    const char *parts = argc > 2 ? argv[2] : PARTS;
    stage_heap_place_t place;
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    if (!stage_roles_usable() ||
        cuda_image_tests_nvshmem_ping.begin == cuda_image_tests_nvshmem_ping.end) {
        printf("skipped: built without nvcc or without the wheel of NVSHMEM\n");
        return KIT_SKIP;
    }
    if (stage_heap_find(NULL, NULL, 0, &place) != XP_OK) {
        printf("skipped: %s\n", xp_error_last()->text);
        return KIT_SKIP;
    }
    printf("NVSHMEM: %s, plug-in %s\n", place.host, place.plugin);
    setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3", 0);
    const uint32_t most = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : GPUS_MAX;
    gpus = count_gpus();
    gpus = gpus < most ? gpus : most;
    if (gpus < 2) {
        printf("skipped: there are no two GPUs\n");
        return KIT_SKIP;
    }
    mps_options_t options = {.name = "cuda-0", .devices = "0,1"};
    atexit(clean_up);
    signal(SIGTERM, on_end);
    if (mps_start(&options, &mps) == XP_OK) {
        mps_pipe = mps_pipe_folder(mps);
        setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
        setenv("CUDA_MPS_LOG_DIRECTORY", mps_log_folder(mps), 1);
    } else {
        printf("without MPS: %s\n", xp_error_last()->text);
    }
    CHECK_OK(transport_life_make(&life_fd));
    if (has(parts, "join"))
        part_join();
    if (has(parts, "ping"))
        part_ping();
    if (has(parts, "one"))
        part_one(thousands);
    if (has(parts, "two"))
        part_two(thousands);
    if (has(parts, "fan_in"))
        part_fan_in();
    if (has(parts, "mesh"))
        part_mesh();
    if (has(parts, "crossed"))
        part_crossed();
    if (has(parts, "memory"))
        part_memory();
    if (has(parts, "far"))
        part_far(thousands);
    if (has(parts, "kill"))
        part_kill();
    if (has(parts, "limited"))
        part_limited();
    clean_up();
    printf("nvshmem_probe: all parts passed (%s)\n", parts);
    return 0;
}
