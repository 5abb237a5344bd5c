/* SPDX-License-Identifier: MIT */
/*
 * The Fabric over real processes, and what SIGKILL and SIGSTOP of one of them do to the others. The
 * test stands for the daemon: it makes the memfds, sees who died, and declares the failure.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "rig.h"

#define CLIENTS 3

/* Shared with all processes: how far each client is, what its end was, and orders to AtnAgents. */
typedef struct scene {
    _Atomic uint32_t stop;
    _Atomic uint64_t calls[CLIENTS];
    _Atomic uint32_t detach[CLIENTS]; /* 1: asked, 2: done */
} scene_t;

static rig_t rig;
static rig_client_t clients[CLIENTS];
static scene_t *scene;
static pid_t agents[FABRIC_MAX_PES], instances[CLIENTS];

static pid_t fork_child(void)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

/* Exit codes of children: 0 as expected for the status, 40 + status otherwise. */
static void exit_with(xp_status_t status)
{
    fflush(NULL);
    _exit(40 + (int)status);
}

static void *orders_main(void *context)
{
    rig_agent_t *agent = context;
    while (!atomic_load(&scene->stop)) {
        for (uint32_t i = 0; i < CLIENTS; i++) {
            if (rig_instance(&clients[i])->rank_atn[0] != (uint32_t)(agent - rig.agents))
                continue;
            if (atomic_load(&scene->detach[i]) == 1) {
                RIG_CHECK(fabric_atn_detach(agent->atn, i, 0) == XP_OK);
                atomic_store(&scene->detach[i], 2);
            }
        }
        usleep(500);
    }
    return NULL;
}

static void agent_process(uint32_t pe)
{
    rig_join_agent(&rig, pe);
    rig_agent_t *agent = &rig.agents[pe];
    if (!agent->is_ffn) {
        pthread_t orders;
        for (uint32_t i = 0; i < CLIENTS; i++)
            if (rig.plan.instances[i].rank_atn[0] == pe)
                rig_client_attach(&clients[i]);
        RIG_CHECK(pthread_create(&orders, NULL, orders_main, agent) == 0);
    }
    rig_agent_main(agent);
    exit_with(agent->result);
}

static void client_process(uint32_t index)
{
    while (!atomic_load(&scene->stop)) {
        xp_status_t status = rig_call(&clients[index], rig_in(20000));
        if (status != XP_OK)
            exit_with(status);
        atomic_fetch_add(&scene->calls[index], 1);
    }
    exit_with(XP_OK);
}

/* Two AtnAgents, two FfnAgents, three Instances; layers alternate or are shared by both. */
static void scene_start(uint32_t group)
{
    scene = mmap(NULL, sizeof(*scene), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(scene != MAP_FAILED);
    rig_plan(&rig, 2, 2, CLIENTS, group);
    rig.plan.instances[2].form = FABRIC_FORM_LONG;
    rig.plan.submission_timeout_ns = 20 * XP_NS_PER_S;
    rig_make(&rig);
    for (uint32_t i = 0; i < CLIENTS; i++)
        rig_client_create(&rig, i, 0, &clients[i]);
    for (uint32_t pe = 0; pe < 4; pe++)
        if ((agents[pe] = fork_child()) == 0)
            agent_process(pe);
    for (uint32_t i = 0; i < CLIENTS; i++)
        if ((instances[i] = fork_child()) == 0)
            client_process(i);
}

static void wait_for_progress(uint32_t index, uint64_t more)
{
    uint64_t until_ns = rig_in(20000), goal = atomic_load(&scene->calls[index]) + more;
    while (atomic_load(&scene->calls[index]) < goal && xp_monotonic_ns() < until_ns)
        usleep(1000);
    assert_true(atomic_load(&scene->calls[index]) >= goal);
}

/* Reaps within `ms`; returns the status the child ended with, or -1 when a signal ended it. */
static int end_of(pid_t pid, uint64_t ms)
{
    int how;
    for (uint64_t until_ns = rig_in(ms); waitpid(pid, &how, WNOHANG) == 0;) {
        if (xp_monotonic_ns() > until_ns) {
            kill(pid, SIGKILL);
            waitpid(pid, &how, 0);
            fail_msg("a process did not end within %llu ms", (unsigned long long)ms);
        }
        usleep(500);
    }
    return WIFEXITED(how) ? WEXITSTATUS(how) - 40 : -1;
}

static void scene_free(void)
{
    for (uint32_t i = 0; i < CLIENTS; i++)
        rig_client_destroy(&clients[i]);
    rig_free(&rig);
    munmap(scene, sizeof(*scene));
}

static void scene_stop(uint32_t but_client)
{
    atomic_store(&scene->stop, 1);
    for (uint32_t i = 0; i < CLIENTS; i++)
        if (i != but_client)
            assert_int_equal(end_of(instances[i], 20000), XP_OK);
    fabric_shutdown(rig.observer);
    for (uint32_t pe = 0; pe < 4; pe++)
        assert_int_equal(end_of(agents[pe], 2000), XP_CLOSED);
    scene_free();
}

static void test_serves(void **state)
{
    for (uint32_t group = 1; group <= 2; group++) {
        scene_start(group);
        for (uint32_t i = 0; i < CLIENTS; i++)
            wait_for_progress(i, 300);
        scene_stop(CLIENTS);
    }
}

/* SIGKILL of an Instance at a random moment, many times over: the others go on, exact. */
static void test_kill_instance(void **state)
{
    for (uint32_t round = 0; round < 12; round++) {
        scene_start(1 + round % 2);
        uint32_t victim = round % CLIENTS;
        for (uint32_t i = 0; i < CLIENTS; i++)
            wait_for_progress(i, 20);
        usleep(round * 137 % 1000);
        kill(instances[victim], SIGKILL);
        assert_int_equal(end_of(instances[victim], 2000), -1);
        atomic_store(&scene->detach[victim], 1);
        for (uint32_t i = 0; i < CLIENTS; i++)
            if (i != victim)
                wait_for_progress(i, 100);
        for (uint64_t until_ns = rig_in(10000);
             atomic_load(&scene->detach[victim]) != 2 && xp_monotonic_ns() < until_ns;)
            usleep(500);
        assert_int_equal(atomic_load(&scene->detach[victim]), 2);
        scene_stop(victim);
    }
}

/* SIGKILL of an agent: once the failure is declared, everyone else ends within a second. */
static void test_kill_agent(void **state)
{
    for (uint32_t round = 0; round < 8; round++) {
        scene_start(1 + round / 4);
        uint32_t victim = round % 4;
        for (uint32_t i = 0; i < CLIENTS; i++)
            wait_for_progress(i, 20);
        usleep(round * 211 % 1000);
        kill(agents[victim], SIGKILL);
        assert_int_equal(end_of(agents[victim], 2000), -1);
        assert_true(fabric_fail(rig.observer, victim, "an agent died"));
        /* A dead AtnAgent closes no arena: the daemon, which holds the descriptors, does. */
        for (uint32_t i = 0; i < CLIENTS; i++)
            assert_int_equal(
                transport_arena_close(transport_client_fd(clients[i].client), XP_FATAL), XP_OK);
        for (uint32_t pe = 0; pe < 4; pe++)
            if (pe != victim)
                assert_int_equal(end_of(agents[pe], 1000), XP_FATAL);
        for (uint32_t i = 0; i < CLIENTS; i++)
            assert_int_equal(end_of(instances[i], 1000), XP_FATAL);
        uint32_t pe = 99;
        assert_int_equal(fabric_failure(rig.observer, &pe), XP_FATAL);
        assert_int_equal(pe, victim);
        assert_string_equal(xp_error_last()->text, "an agent died");
        scene_free();
    }
}

/* A stopped FfnAgent stops everything that needs it, and nothing is lost when it goes on. */
static void test_stop_ffnagent(void **state)
{
    for (uint32_t victim = 2; victim < 4; victim++) {
        scene_start(2);
        for (uint32_t i = 0; i < CLIENTS; i++)
            wait_for_progress(i, 20);
        kill(agents[victim], SIGSTOP);
        usleep(300000);
        uint64_t before[CLIENTS];
        for (uint32_t i = 0; i < CLIENTS; i++)
            before[i] = atomic_load(&scene->calls[i]);
        usleep(700000);
        for (uint32_t i = 0; i < CLIENTS; i++)
            assert_int_equal(atomic_load(&scene->calls[i]), before[i]);
        kill(agents[victim], SIGCONT);
        for (uint32_t i = 0; i < CLIENTS; i++)
            wait_for_progress(i, 100);
        scene_stop(CLIENTS);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_serves),
        cmocka_unit_test(test_kill_instance),
        cmocka_unit_test(test_kill_agent),
        cmocka_unit_test(test_stop_ffnagent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
