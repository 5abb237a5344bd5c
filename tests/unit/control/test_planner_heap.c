/* SPDX-License-Identifier: MIT */
/* Plans with the symmetric heap of provider nvshmem: its memory, and where the wheel is missing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "control/daemon.h"
#include "control/gpus.h"
#include "control/planner.h"
#include "stage/stage.h"

#define MODEL XPOOL_SOURCE_DIR "/models/tales/qwen3-moe"

static char folder[] = "/tmp/xpool-planner-heap-XXXXXX";

static config_t *deployment(const char *provider, const char *model)
{
    char path[128];
    config_t *config = NULL;
    snprintf(path, sizeof(path), "%s/c.toml", folder);
    FILE *file = fopen(path, "w");
    fprintf(file,
            "daemon.socket = '%s/d.sock'\ndaemon.http = '127.0.0.1:0'\nlogging.level = 'error'\n"
            "atn.devices = ['cuda:0', 'cuda:1']\nffn.devices = ['cuda:2', 'cuda:3']\n%s\n"
            "[devices.'cuda:0']\nmemory = '80GiB'\n[devices.'cuda:1']\nmemory = '80GiB'\n"
            "[devices.'cuda:2']\nmemory = '80GiB'\n[devices.'cuda:3']\nmemory = '80GiB'\n"
            "[[models]]\nid = 'm'\npath = '" MODEL "'\nengine = 'sglang'\n%s\n",
            folder, provider, model);
    fclose(file);
    config_overrides_t overrides = {.config_path = path};
    if (config_load(&overrides, &config) != XP_OK)
        fail_msg("%s", xp_error_last()->text);
    return config;
}

/* The same heap on every agent's device, whatever is placed where. */
static void a_symmetric_heap_is_admitted_on_every_device(void **state)
{
    static const char *const names[] = {"nvshmem", "nvshmem-far"};
    uint64_t heaps[2];
    for (uint32_t n = 0; n < 2; n++) {
        char provider[64];
        plan_result_t *plan = NULL;
        snprintf(provider, sizeof(provider), "fabric.provider = '%s'", names[n]);
        config_t *config =
            deployment(provider, "ffn_tp_size = 2\nattention_tp = 2\nprefill_rows = 8000");
        if (planner_make(config, 1, &plan) != XP_OK)
            fail_msg("%s", xp_error_last()->text);
        assert_string_equal(fabric_plan_provider_name(plan->plan.provider), names[n]);
        heaps[n] = stage_heap_bytes(&plan->plan);
        assert_true(heaps[n] >=
                    stage_arena_bytes(&plan->plan.instances[0]) - STAGE_GRANULARITY_BYTES);
        for (uint32_t a = 0; a < 2; a++)
            assert_true(plan->atn[a].arena_bytes >=
                        plan->models[0].arena_bytes + heaps[n] + STAGE_HEAP_OWN_BYTES);
        for (uint32_t f = 0; f < 2; f++) {
            assert_true(plan->ffn[f].arena_bytes >= heaps[n] + STAGE_HEAP_OWN_BYTES);
            assert_true(plan->ffn[f].arena_bytes + plan->ffn[f].workspace_bytes +
                            plan->ffn[f].weight_bytes <=
                        plan->ffn[f].budget_bytes);
        }
        planner_free(plan);
        config_destroy(config);
    }
    assert_true(heaps[1] > heaps[0]); /* outboxes and mirrors */
}

/* NVSHMEM would never return from joining. */
static void gpus_have_as_many_agents_each(void **state)
{
    for (uint32_t n = 0; n < 2; n++) {
        plan_result_t *plan = NULL;
        config_t *config = deployment("devices.allow_shared_roles = true", "");
        snprintf(config->fabric_provider, sizeof(config->fabric_provider), "nvshmem");
        config->ffn[0] = config->atn[0];
        config->ffn[1] = n ? config->atn[1] : config->ffn[1];
        assert_int_equal(planner_make(config, 1, &plan), n ? XP_OK : XP_UNSUPPORTED);
        if (!n)
            assert_non_null(strstr(xp_error_last()->text, "cuda:0 has both and cuda:3 has one"));
        planner_free(plan);
        config_destroy(config);
    }
}

static void without_the_wheel_there_is_no_daemon(void **state)
{
    config_t *config = deployment(
        "fabric.provider = 'nvshmem'\nfabric.nvshmem_root = '/nonexistent'", "ffn_tp_size = 2");
    stage_heap_place_t place;
    assert_int_equal(gpus_nvshmem(config, &place), XP_UNSUPPORTED);
    assert_int_equal(daemon_run(config), 1);
    assert_non_null(strstr(xp_error_last()->text, "nvshmem: no lib/libnvshmem_host.so.3 in "
                                                  "/nonexistent"));
    config_destroy(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_symmetric_heap_is_admitted_on_every_device),
        cmocka_unit_test(gpus_have_as_many_agents_each),
        cmocka_unit_test(without_the_wheel_there_is_no_daemon),
    };
    char command[128];
    unsetenv("XPOOL_UNDER_UP");
    unsetenv(STAGE_HEAP_ROOT_VARIABLE);
    if (!mkdtemp(folder))
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) ? 1 : failed;
}
