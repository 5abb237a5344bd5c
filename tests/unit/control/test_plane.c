/* SPDX-License-Identifier: MIT */
/*
 * A deployment of GPUs without a GPU: what is planned and refused, what of the driver's answers is
 * understood, and a Generation walked through by agents and ranks that are sockets of this test.
 * The MPS controller is this program itself, started under NVIDIA's name; descriptors of device
 * memory are memfds.
 */
#include "plane_support.h"

/* ---- the fake MPS controller ------------------------------------------------------------------
 */

static int fake_mps(int argc, char **argv)
{
    char path[PATH_MAX], line[128] = "";
    int controller = 0;
    snprintf(path, sizeof(path), "%s/control.pid", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    if (argc > 1 && strcmp(argv[1], "-f") == 0) {
        const char *delay = getenv("XPOOL_TEST_MPS_DELAY_MS"); /* tests/cuda/soak_on_device */
        alarm(delay ? 120 : 60); /* never outlives a broken test for long */
        usleep(delay ? (useconds_t)strtoul(delay, NULL, 10) * 1000 : 0);
        FILE *file = fopen(path, "w");
        fprintf(file, "%d %s\n", (int)getpid(), getenv("CUDA_VISIBLE_DEVICES"));
        fclose(file);
        for (;;)
            pause();
    }
    FILE *file = fopen(path, "r");
    snprintf(path, sizeof(path), "%s/hangs", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    if (access(path, F_OK) == 0) {
        alarm(60);
        for (;;)
            pause();
    }
    if (!file || fscanf(file, "%d", &controller) != 1 || kill(controller, 0) != 0 ||
        !fgets(line, sizeof(line), stdin))
        return 1;
    if (strncmp(line, "quit", 4) == 0)
        kill(controller, SIGKILL);
    snprintf(path, sizeof(path), "%s/client", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    FILE *client = fopen(path, "r"); /* where a test has one, it is the server's only one */
    if (strncmp(line, "get_server_list", 15) == 0 && client)
        printf("77\n");
    else if (strncmp(line, "get_client_list 77", 18) == 0 && client && fgets(line, 32, client))
        fputs(line, stdout);
    else if (strncmp(line, "terminate_client 77 ", 20) == 0) {
        snprintf(path, sizeof(path), "%s/terminated", getenv("CUDA_MPS_PIPE_DIRECTORY"));
        FILE *log = fopen(path, "w");
        fputs(line, log);
        fclose(log);
    }
    return 0;
}

/* ---- the fake `xpool devices --json` ----------------------------------------------------------
 */

/* Never ends by itself. */
static int fake_devices(void)
{
    alarm(60);
    if (!getenv("TEST_MUTE")) {
        printf("{\"devices\": [{\"device\": \"cuda:0\", \"memory_bytes\": 4096},"
               " {\"device\": \"cuda:1\", \"memory_bytes\": 4096, \"ffn\": false}]}\n");
        fclose(stdout);
    }
    pause();
    return 1;
}

/* ---- plans ------------------------------------------------------------------------------------
 */

static void refused(config_t *config, const char *text)
{
    plan_result_t *plan = NULL;
    if (planner_make(config, 1, &plan) == XP_OK)
        fail_msg("planned, but not refused with \"%s\"", text);
    if (!strstr(xp_error_last()->text, text))
        fail_msg("\"%s\" says nothing of \"%s\"", xp_error_last()->text, text);
    config_destroy(config);
}

static void gpus_are_planned_with_the_memory_that_is_given(void **state)
{
    config_t *config = deployment("'cuda:0'", "'cuda:1', 'cuda:2'", MEMORY, "ffn_tp_size = 2");
    plan_result_t *plan = plan_of(config);
    const fabric_plan_instance_t *instance = &plan->plan.instances[0];
    const plan_model_t *model = &plan->models[0];
    assert_true(plan->cuda);
    assert_int_equal(plan->plan.provider, FABRIC_PROVIDER_P2P);
    assert_int_equal(instance->dtype, XP_DTYPE_BF16);
    assert_int_equal(instance->delivery, FABRIC_DELIVERY_DIRECT_PARTIAL);
    assert_int_equal(instance->layer_group[0], 3);
    assert_true(plan->atn[0].budget_bytes == (uint64_t)(0.9 * (double)(80ull << 30)));
    assert_true(plan->ffn[0].budget_bytes == (80ull << 30) - (1ull << 30));
    /* Of the KV Cache: two bytes an element, K and V of every layer. */
    uint64_t token = 2ull * 2 * model->spec.layers * model->spec.kv_heads * model->spec.head_dim;
    assert_true(model->kv_bytes_per_token == token);
    assert_true(model->kv_bytes == model->kv_tokens * token);
    assert_true(model->arena_bytes >= 2ull * model->max_rows * model->spec.hidden * 2);
    assert_true(model->arena_bytes == stage_arena_bytes(instance));
    stage_bytes_t stages;
    for (uint32_t f = 0; f < 2; f++) {
        const plan_device_t *device = &plan->ffn[f];
        stage_ffn_bytes(&plan->plan, f, &stages);
        assert_true(device->arena_bytes == stages.stages + stages.partials);
        assert_true(device->weight_bytes == plan->weights[0].shard_bytes && device->weight_bytes);
        assert_true(device->workspace_bytes >= stages.tables);
    }
    assert_true(plan->fabric_bytes == 0);
    planner_free(plan);
    config_destroy(config);

    /* Without tensor parallel FFNs nothing is to be added up; under attention TP everybody gets
     * all. */
    config = deployment("'cuda:0'", "'cuda:1'", "fabric.provider = 'p2p-relay'\n" MEMORY, "");
    plan = plan_of(config);
    assert_int_equal(plan->plan.provider, FABRIC_PROVIDER_P2P_RELAY);
    assert_int_equal(plan->plan.instances[0].delivery, FABRIC_DELIVERY_SINGLE_COMPLETE);
    planner_free(plan);
    config_destroy(config);
    config =
        deployment("'cuda:0', 'cuda:1'", "'cuda:2'", MEMORY, "attention_tp = 2\ndtype = 'float16'");
    plan = plan_of(config);
    assert_int_equal(plan->plan.instances[0].delivery, FABRIC_DELIVERY_REPLICATED_COMPLETE);
    assert_int_equal(plan->plan.instances[0].dtype, XP_DTYPE_F16);
    planner_free(plan);
    config_destroy(config);
}

/* A Lane has rows of its own where several ranks get what one member computes, and nowhere else. */
static void lanes_have_rows_of_their_own_where_one_member_serves_several_ranks(void **state)
{
    static const char *const models[] = {"ffn_tp_size = 2", "ffn_tp_size = 2\nattention_tp = 2",
                                         "attention_tp = 2", ""};
    uint64_t workspace[4], rows = 0;
    for (uint32_t i = 0; i < 4; i++) {
        char model[128];
        snprintf(model, sizeof(model), "prefill_rows = 1024\n%s", models[i]);
        config_t *config = deployment("'cuda:0', 'cuda:1'", "'cuda:2', 'cuda:3'",
                                      "scheduler.ffn_concurrency = 8\n" MEMORY
                                      "[devices.'cuda:3']\nmemory = '80GiB'\n",
                                      model);
        plan_result_t *plan = plan_of(config);
        workspace[i] = plan->ffn[0].workspace_bytes;
        rows = (uint64_t)plan->models[0].max_rows * plan->models[0].spec.hidden * 2;
        planner_free(plan);
        config_destroy(config);
    }
    assert_true(workspace[1] == workspace[0]);
    assert_true(workspace[2] >= workspace[3] + rows);
}

static void a_gpu_may_have_both_roles_where_that_is_allowed(void **state)
{
    config_t *config = deployment("'cuda:0'", "'cuda:0'",
                                  "devices.allow_shared_roles = true\n"
                                  "devices.'cuda:0'.memory = '80GiB'\n",
                                  "");
    plan_result_t *plan = plan_of(config);
    assert_true(plan->atn[0].budget_bytes == (uint64_t)(0.9 * (double)(40ull << 30)));
    assert_true(plan->ffn[0].budget_bytes == 39ull << 30);
    planner_free(plan);
    config_destroy(config);
}

static void what_cannot_be_planned_is_refused_by_name(void **state)
{
    refused(deployment("'cuda:0'", "'cpu:1'", MEMORY, ""),
            "ffn.devices has cpu:1, atn.devices has cuda:0: the devices of one system");
    refused(deployment("'cpu:0', 'cuda:0'", "'cpu:1'", MEMORY, ""), "atn.devices has cuda:0");
    refused(deployment("'cuda:0'", "'cuda:1'", "fabric.provider = 'shm'\n" MEMORY, ""),
            "\"shm\" does not go with CUDA devices; use \"p2p\"");
    refused(deployment("'cpu:0'", "'cpu:1'", "fabric.provider = 'p2p'\n", ""),
            "\"p2p\" does not go with CPU devices; use \"shm\"");
    refused(deployment("'cpu:0'", "'cpu:1'", "fabric.provider = 'nvshmem'\n", ""),
            "\"nvshmem\" does not go with CPU devices; use \"shm\"");
    refused(deployment("'cuda:0'", "'cuda:1'", "fabric.provider = 'ucx'\n" MEMORY, ""),
            "\"ucx\" is not part of this build");
    refused(deployment("'cuda:0'", "'cuda:1'", MEMORY, "dtype = 'float32'"),
            "models[m].dtype: GPUs compute in bfloat16 or float16");
    refused(
        deployment("'cuda:0'", "'cuda:1'", "ffn.device_memory_calibration = 'c.toml'\n" MEMORY, ""),
        "ffn.device_memory_calibration");
    config_t *config = deployment("'cuda:0'", "'cuda:1'", MEMORY, "");
    config->models[0].engine = CONFIG_ENGINE_NATIVE;
    refused(config, "models[m].engine: the native engine computes on CPU devices, and cuda:0");
    config = deployment("'cuda:0'", "'cuda:1'", MEMORY, "");
    config->ffn[0].memory_bytes = (1ull << 30) + (1ull << 20); /* past the context, one MiB */
    refused(config, "FFN weights do not fit");
    /* Nobody has said how much memory there is, and this program is not to ask itself. */
    refused(deployment("'cuda:0'", "'cuda:1'", "", ""), "set devices.\"cuda:0\".memory");
}

static void answers_of_the_driver_are_understood(void **state)
{
    uint64_t bytes = 0;
    static const char two[] = "{\"devices\": [{\"device\": \"cpu:N\", \"memory_bytes\": 5},"
                              " {\"device\": \"cuda:0\", \"memory_bytes\": 150754820096},"
                              " {\"device\": \"cuda:1\", \"memory_bytes\": 7}]}";
    assert_int_equal(gpus_memory_parse(two, 1, true, &bytes), XP_OK);
    assert_true(bytes == 7);
    assert_int_equal(gpus_memory_parse(two, 0, true, &bytes), XP_OK);
    assert_true(bytes == 150754820096ull);
    assert_int_equal(gpus_memory_parse(two, 2, true, &bytes), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "shows no such GPU"));
    assert_int_equal(gpus_memory_parse("{\"devices\": [], \"cuda_unavailable\": \"no libcuda\"}", 0,
                                       false, &bytes),
                     XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "cuda:0: no libcuda"));
    assert_int_equal(gpus_memory_parse("{", 0, false, &bytes), XP_PEER);
    assert_int_equal(gpus_memory_parse("[]", 0, false, &bytes), XP_NOT_FOUND);

    /* A GPU that computes attention only is refused before anything is started. */
    static const char older[] = "{\"devices\": [{\"device\": \"cuda:1\", \"memory_bytes\": 7,"
                                " \"name\": \"NVIDIA A100\", \"compute_capability\": \"8.0\","
                                " \"ffn\": false}]}";
    assert_int_equal(gpus_memory_parse(older, 1, false, &bytes), XP_OK);
    assert_int_equal(gpus_memory_parse(older, 1, true, &bytes), XP_UNSUPPORTED);
    assert_non_null(strstr(xp_error_last()->text, "cuda:1 is in ffn.devices, and NVIDIA A100 of "
                                                  "compute capability 8.0"));

    config_t *config = deployment("'cuda:0'", "'cuda:1'", "devices.'cuda:1'.memory = '1GiB'\n", "");
    setenv(GPUS_MEMORY_VARIABLE, "3=1,0=4096", 1);
    assert_int_equal(gpus_memory(config, &config->atn[0], &bytes), XP_OK);
    assert_true(bytes == 4096);
    assert_int_equal(gpus_memory(config, &config->ffn[0], &bytes), XP_OK);
    assert_true(bytes == 1ull << 30); /* the configuration comes first */
    assert_int_equal(gpus_memory_hand_on(config), XP_OK);
    assert_string_equal(getenv(GPUS_MEMORY_VARIABLE), "0=4096");
    setenv(GPUS_MEMORY_VARIABLE, "nonsense", 1);
    assert_int_equal(gpus_memory(config, &config->atn[0], &bytes), XP_UNSUPPORTED);
    unsetenv(GPUS_MEMORY_VARIABLE);
    config_destroy(config);
}

static void every_process_sees_the_gpus_under_numbers_of_its_own(void **state)
{
    char list[GPUS_TEXT_BYTES];
    config_t *config = deployment("'cuda:3', 'cuda:1'", "'cuda:2', 'cuda:1'",
                                  "devices.allow_shared_roles = true\n", "");
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_int_equal(gpus_controller_list(config, list), XP_OK);
    assert_string_equal(list, "3,1,2"); /* attention devices first */
    setenv("CUDA_VISIBLE_DEVICES", "7, GPU-aa,5,6", 1);
    assert_int_equal(gpus_controller_list(config, list), XP_OK);
    assert_string_equal(list, "6,GPU-aa,5");
    setenv("CUDA_VISIBLE_DEVICES", "7,8", 1);
    assert_int_equal(gpus_controller_list(config, list), XP_NOT_FOUND);
    assert_non_null(strstr(xp_error_last()->text, "CUDA_VISIBLE_DEVICES=7,8 shows no such GPU"));
    unsetenv("CUDA_VISIBLE_DEVICES");
    const config_device_t *first[] = {&config->atn[1], &config->atn[0]};
    assert_int_equal(gpus_client_list(config, first, 2, list), XP_OK);
    assert_string_equal(list, "1,0,2");
    assert_int_equal(gpus_client_list(config, first, 1, list), XP_OK);
    assert_string_equal(list, "1,0,2");
    first[0] = &config->ffn[0];
    assert_int_equal(gpus_client_list(config, first, 1, list), XP_OK);
    assert_string_equal(list, "2,0,1");
    char name[64], pipe[PATH_MAX], log[PATH_MAX], wanted[PATH_MAX];
    assert_int_equal(gpus_mps_folders(config, name, pipe, log), XP_OK);
    assert_string_equal(name, "cuda-1-3");
    snprintf(wanted, sizeof(wanted), "%s/cuda-1-3/pipe", getenv(GPUS_MPS_ROOT_VARIABLE));
    assert_string_equal(pipe, wanted);
    assert_true(gpus_shared(config, &config->atn[1]) && !gpus_shared(config, &config->atn[0]));
    config_destroy(config);
}

/* ---- a Generation -----------------------------------------------------------------------------
 */

static void an_instance_gets_the_stages_when_every_member_has_its_arena(void **state)
{
    fixture_t f;
    rank_t rank, next;
    start(&f, "'cuda:0'", 1, "", "ffn_tp_size = 2");
    int mps = controller();
    assert_true(mps > 0 && kill(mps, 0) == 0);
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    assert_true(silent(f.ffn[0])); /* nobody can execute yet */
    wait_verdict(&f, "ffnagent cuda:2 loads weights");
    executable(&f);
    uint64_t lease = expect_arena(f.ffn[0], 0, 100);
    assert_true(expect_arena(f.ffn[1], 0, 100) == lease);
    attached(f.ffn[0], 0, lease, "");
    assert_true(silent(rank.fd)); /* the other member has not answered */
    attached(f.ffn[1], 0, lease - 1, "");
    assert_true(silent(rank.fd)); /* that was of another attachment */
    attached(f.ffn[1], 0, lease, "");
    expect_stage(rank.fd, xpw_StageKind_STAGE_ROWS, 0, 200);
    expect_stage(rank.fd, xpw_StageKind_STAGE_ROWS, 1, 201);
    expect(rank.fd, xpw_Envelope_attached_tag, 0);
    expect(rank.fd, xpw_Envelope_initialize_tag, 0);
    initialized(rank.fd);
    wait_verdict(&f, NULL);
    assert_true(silent(f.atn[0])); /* no row goes by it */

    /* Its counters are what the agents tell. */
    xpw_Envelope stats = {.which_body = xpw_Envelope_plane_stats_tag};
    stats.body.plane_stats.invocations = 11;
    say(f.ffn[0], &stats, NULL, 0);

    /* It dies: its word ends, and its successor waits until nobody has anything of it any more. */
    assert_true(!life_word_look(&f.life->word[rank.life_index]));
    kill_rank(&rank);
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    assert_true(life_word_look(&f.life->word[rank.life_index]));
    start_rank(&f, 0, &next);
    assert_int_not_equal(next.life_index, rank.life_index);
    offer_arena(&f, &next, 101, XP_DTYPE_BF16);
    detached(f.ffn[0], 0);
    assert_true(silent(f.ffn[0]));
    detached(f.ffn[1], 0);
    uint64_t later = expect_arena(f.ffn[0], 0, 101);
    assert_true(later != lease);
    expect_arena(f.ffn[1], 0, 101);
    attached(f.ffn[0], 0, later, "no room");
    xpw_Envelope *stop = expect(next.fd, xpw_Envelope_stop_tag, 0);
    assert_int_equal(stop->body.stop.phase, xpw_StopPhase_STOP_FINALIZE);
    wait_verdict(&f, "its arena was not attached by ffnagent cuda:2: no room");
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    kill_rank(&next);

    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
    assert_true(kill(mps, 0) != 0 && errno == ESRCH); /* it ended with the system, in order */
}

static void members_get_the_partials_of_their_first(void **state)
{
    fixture_t f;
    rank_t ranks[2];
    start(&f, "'cuda:0', 'cuda:1'", 2, "", "ffn_tp_size = 2\nattention_tp = 2");
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_PARTIALS, 0, 300);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    assert_true(silent(f.ffn[1])); /* it still loads, and has nothing to map them into */
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    expect_stage(f.ffn[1], xpw_StageKind_STAGE_PARTIALS, 0, 300);
    executable(&f);
    start_rank(&f, 1, &ranks[1]);
    offer_arena(&f, &ranks[1], 101, XP_DTYPE_BF16);
    assert_true(silent(f.ffn[0])); /* all ranks or none */
    start_rank(&f, 0, &ranks[0]);
    offer_arena(&f, &ranks[0], 100, XP_DTYPE_BF16);
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        uint64_t lease = expect_arena(f.ffn[i], 0, 100);
        assert_true(expect_arena(f.ffn[i], 1, 101) == lease);
        attached(f.ffn[i], 0, lease, "");
    }
    for (uint32_t r = 0; r < 2; r++) {
        expect_stage(ranks[r].fd, xpw_StageKind_STAGE_ROWS, 0, 200);
        expect_stage(ranks[r].fd, xpw_StageKind_STAGE_ROWS, 1, 201);
        expect(ranks[r].fd, xpw_Envelope_attached_tag, 0);
    }
    /* The controller is one, for both attention devices; without it nothing can go on. */
    char path[PATH_MAX];
    int pid = 0;
    snprintf(path, sizeof(path), "%s/mps/cuda-0-1/pipe/control.pid", scratch);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%d", &pid), 1);
    fclose(file);
    assert_int_equal(kill(pid, SIGKILL), 0);
    xpw_Envelope *failure = expect(f.ffn[1], xpw_Envelope_failure_tag, 0);
    assert_string_equal(failure->body.failure.who, "mps");
    assert_non_null(strstr(failure->body.failure.what, "the MPS controller"));
    for (uint32_t r = 0; r < 2; r++)
        kill_rank(&ranks[r]);
    for (uint32_t p = 0; p < 2; p++) {
        close(f.atn[p]);
        close(f.ffn[p]);
    }
    assert_int_equal(wait_daemon(&f), 1);
}

static void with_the_relay_the_agents_arenas_take_the_place_of_the_instances(void **state)
{
    fixture_t f;
    rank_t rank;
    start(&f, "'cuda:0'", 1, "fabric.provider = 'p2p-relay'\n", "ffn_tp_size = 2");
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    executable(&f);
    assert_true(silent(f.ffn[0])); /* what is it to attach? */
    offer_stage(f.atn[0], xpw_StageKind_STAGE_RELAY, 0, 400);
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        lease = expect_arena(f.ffn[i], 0, 400);
        attached(f.ffn[i], 0, lease, "");
    }
    expect_stage(f.atn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    expect_stage(f.atn[0], xpw_StageKind_STAGE_ROWS, 1, 201);
    assert_true(expect_arena(f.atn[0], 0, 100) == lease);
    assert_true(silent(rank.fd));
    attached(f.atn[0], 0, lease, "");
    expect(rank.fd, xpw_Envelope_attached_tag, 0); /* no stages: it puts into its own arena */
    expect(rank.fd, xpw_Envelope_initialize_tag, 0);
    kill_rank(&rank);
    expect(f.atn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

/* The sockets that are the agents here say what PE 0 and the others say. */
static void agents_of_a_symmetric_heap_join_with_one_id(void **state)
{
    fixture_t f;
    rank_t rank;
    begin(&f, "'cuda:0', 'cuda:1'", 2, "fabric.provider = 'nvshmem'\n", "ffn_tp_size = 2");
    assert_true(silent(f.atn[1]) && silent(f.ffn[0]) && silent(f.ffn[1]));
    xpw_Envelope envelope = {.which_body = xpw_Envelope_fabric_id_tag};
    envelope.body.fabric_id.generation = 1;
    for (uint32_t i = 0; i < sizeof(envelope.body.fabric_id.id); i++)
        envelope.body.fabric_id.id[i] = (uint8_t)(200 - i);
    say(f.atn[0], &envelope, NULL, 0);
    int others[] = {f.atn[1], f.ffn[0], f.ffn[1]};
    for (uint32_t i = 0; i < 3; i++) {
        xpw_Envelope *id = expect(others[i], xpw_Envelope_fabric_id_tag, 0);
        assert_int_equal(id->body.fabric_id.generation, 1);
        assert_memory_equal(id->body.fabric_id.id, envelope.body.fabric_id.id, 128);
    }
    assert_true(silent(f.atn[0]));
    join(&f);
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    executable(&f);
    /* FfnAgents know where everything is; the rank's own arena goes to its AtnAgent, last. */
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        xpw_Envelope *attach = expect(f.ffn[i], xpw_Envelope_arena_attach_tag, 0);
        lease = attach->body.arena_attach.lease;
        assert_true(silent(f.atn[0]));
        attached(f.ffn[i], 0, lease, "");
    }
    assert_true(expect_arena(f.atn[0], 0, 100) == lease);
    attached(f.atn[0], 0, lease, "");
    expect(rank.fd, xpw_Envelope_attached_tag, 0);
    expect(rank.fd, xpw_Envelope_initialize_tag, 0);
    assert_true(silent(f.atn[1]));
    kill_rank(&rank);
    expect(f.atn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

static void an_atnagent_that_dies_while_arenas_are_attached_is_the_failure(void **state)
{
    fixture_t f;
    rank_t rank;
    start(&f, "'cuda:0'", 1, "fabric.provider = 'p2p-relay'\n", "ffn_tp_size = 2");
    start_rank(&f, 0, &rank);
    offer_arena(&f, &rank, 100, XP_DTYPE_BF16);
    offer_stage(f.ffn[0], xpw_StageKind_STAGE_ROWS, 0, 200);
    offer_stage(f.ffn[1], xpw_StageKind_STAGE_ROWS, 0, 201);
    executable(&f);
    offer_stage(f.atn[0], xpw_StageKind_STAGE_RELAY, 0, 400);
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        lease = expect_arena(f.ffn[i], 0, 400);
    attached(f.ffn[0], 0, lease, "");
    shutdown(f.atn[0], SHUT_RDWR); /* the rank's process holds it too */
    xpw_Envelope *failure = expect(f.ffn[1], xpw_Envelope_failure_tag, 0);
    assert_string_equal(failure->body.failure.who, "atnagent cuda:0");
    attached(f.ffn[1], 0, lease, ""); /* on its way when the other died */
    kill_rank(&rank);
    close(f.atn[0]);
    close(f.ffn[0]);
    close(f.ffn[1]);
    assert_int_equal(wait_daemon(&f), 1);
}

static void an_agent_that_cannot_let_go_ends_the_generation(void **state)
{
    fixture_t f;
    start(&f, "'cuda:0'", 1, "", "");
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_detached_tag};
    snprintf(envelope.body.arena_detached.error, sizeof(envelope.body.arena_detached.error),
             "still in flight");
    say(f.ffn[0], &envelope, NULL, 0);
    xpw_Envelope *failure = expect(f.atn[0], xpw_Envelope_failure_tag, 0);
    assert_string_equal(failure->body.failure.who, "ffnagent cuda:2");
    assert_non_null(strstr(failure->body.failure.what, "still in flight"));
    close(f.atn[0]);
    close(f.ffn[0]);
    close(f.ffn[1]);
    assert_int_equal(wait_daemon(&f), 1);
}

/* An Instance of one rank on two FfnAgents, System Ready. */
static void serve_directly(fixture_t *f, const char *more, rank_t *rank)
{
    uint64_t lease = 0;
    start(f, "'cuda:0'", 1, more, "ffn_tp_size = 2");
    start_rank(f, 0, rank);
    offer_arena(f, rank, 100, XP_DTYPE_BF16);
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        offer_stage(f->ffn[i], xpw_StageKind_STAGE_ROWS, 0, 200 + i);
    executable(f);
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        lease = expect_arena(f->ffn[i], 0, 100);
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        attached(f->ffn[i], 0, lease, "");
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        expect_stage(rank->fd, xpw_StageKind_STAGE_ROWS, i, 200 + i);
    expect(rank->fd, xpw_Envelope_attached_tag, 0);
    expect(rank->fd, xpw_Envelope_initialize_tag, 0);
    initialized(rank->fd);
    wait_verdict(f, NULL);
}

/* More often in a row than those may fail that computed nothing. */
static void a_generation_that_computed_something_counts_though_who_counted_it_died(void **state)
{
    fixture_t f;
    rank_t rank;
    serve_directly(&f, "fabric.keep_requests = false\n", &rank);
    for (int round = 0; round < 6; round++) {
        xpw_Envelope stats = {.which_body = xpw_Envelope_plane_stats_tag};
        stats.body.plane_stats.invocations = 1;
        say(f.ffn[0], &stats, NULL, 0);
        shutdown(f.ffn[0], SHUT_RDWR); /* the rank's process holds it too */
        expect(f.atn[0], xpw_Envelope_failure_tag, 0);
        expect(f.ffn[1], xpw_Envelope_failure_tag, 0);
        if (round == 0) {
            expect(rank.fd, xpw_Envelope_failure_tag, 0);
            kill_rank(&rank);
        }
        close(f.atn[0]);
        close(f.ffn[0]);
        close(f.ffn[1]);
        register_all(&f);
        join(&f);
        executable(&f);
    }
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

/* The first FfnAgent dies, the others are told; all of them register again and join. */
static void next_generation(fixture_t *f)
{
    xpw_Envelope stats = {.which_body = xpw_Envelope_plane_stats_tag};
    stats.body.plane_stats.invocations = 1;
    say(f->ffn[0], &stats, NULL, 0);
    shutdown(f->ffn[0], SHUT_RDWR); /* the rank's process holds it too */
    for (uint32_t p = 0; p < f->atn_count; p++)
        expect(f->atn[p], xpw_Envelope_failure_tag, 0);
    expect(f->ffn[1], xpw_Envelope_failure_tag, 0);
    for (uint32_t p = 0; p < f->atn_count + FFN_COUNT; p++) {
        shutdown(agent_of(f, p), SHUT_RDWR);
        close(agent_of(f, p));
    }
    register_all(f);
    for (uint32_t p = 0; p < f->atn_count + FFN_COUNT; p++) {
        xpw_Envelope joined = {.which_body = xpw_Envelope_joined_tag};
        say(agent_of(f, p), &joined, NULL, 0);
    }
}

/* The FfnAgents get the stages in which requests wait, and offer them again. */
static void hand_stages_on(fixture_t *f, bool adopted)
{
    for (uint32_t i = 0; i < FFN_COUNT; i++) {
        wire_descriptors_t fds;
        xpw_Envelope *kept = expect_with(f->ffn[i], xpw_Envelope_kept_stage_tag, &fds);
        assert_int_equal(kept->body.kept_stage.instance, 0);
        assert_int_equal(fds.count, 1);
        expect_size(fds.fds[0], 200 + i);
        expect(f->ffn[i], xpw_Envelope_prepare_tag, 0);
        xpw_Envelope offer = {.which_body = xpw_Envelope_stage_offer_tag};
        offer.body.stage_offer.adopted = adopted;
        say(f->ffn[i], &offer, fds.fds, 1);
        wire_descriptors_close(&fds);
    }
}

/* `count` arenas, each a byte larger than the one before. */
static uint64_t expect_arenas(int agent, off_t bytes, uint32_t count, bool resume)
{
    wire_descriptors_t fds;
    xpw_Envelope *attach = expect_with(agent, xpw_Envelope_arena_attach_tag, &fds);
    assert_int_equal(attach->body.arena_attach.resume, resume);
    assert_int_equal(fds.count, count);
    for (uint32_t i = 0; i < count; i++)
        expect_size(fds.fds[i], bytes + i);
    wire_descriptors_close(&fds);
    return attach->body.arena_attach.lease;
}
static uint64_t expect_resume(int agent, off_t bytes, bool resume)
{
    return expect_arenas(agent, bytes, 1, resume);
}

static void found(int agent, uint64_t lease, uint64_t answered, bool open)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_arena_attached_tag};
    envelope.body.arena_attached.lease = lease;
    envelope.body.arena_attached.answered = answered;
    envelope.body.arena_attached.open = open;
    say(agent, &envelope, NULL, 0);
}

/* All members take the arenas up as they are, and say what they found there. */
static void take_up(fixture_t *f, uint64_t answered, bool open)
{
    uint64_t lease = 0;
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        lease = expect_resume(f->ffn[i], 100, true);
    found(f->ffn[0], lease, answered + 1, false); /* its partial is there, the other's is not */
    found(f->ffn[1], lease, answered, open);
}

static void requests_on_the_direct_lane_outlive_their_generation(void **state)
{
    fixture_t f;
    rank_t rank;
    serve_directly(&f, "", &rank);
    for (uint32_t round = 0; round < 3; round++) {
        next_generation(&f);
        expect(rank.fd, xpw_Envelope_pause_tag, 0);
        hand_stages_on(&f, true);
        wait_verdict(&f, "its open requests wait for the next Generation");
        assert_true(silent(rank.fd));
        executable(&f);
        take_up(&f, 7, round > 0);
        expect(rank.fd, xpw_Envelope_attached_tag, 0);
        wait_verdict(&f, NULL);
    }
    /* What fails Generation after Generation is not tried for ever. */
    for (uint32_t round = 0; round < 2; round++) {
        next_generation(&f);
        expect(rank.fd, xpw_Envelope_pause_tag, 0);
        hand_stages_on(&f, true);
        executable(&f);
        take_up(&f, 7, true);
        if (round == 0)
            expect(rank.fd, xpw_Envelope_attached_tag, 0);
    }
    assert_int_equal(expect(rank.fd, xpw_Envelope_stop_tag, 0)->body.stop.phase,
                     xpw_StopPhase_STOP_FINALIZE);
    wait_verdict(&f, "4 Generations in a row failed over its request 8");
    expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
    expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
    kill_rank(&rank);
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

/* An agent dies once more before anybody took the requests up; then the memory in which they wait
 * cannot be taken over. */
static void requests_whose_memory_is_lost_end(void **state)
{
    fixture_t f;
    rank_t rank;
    serve_directly(&f, "", &rank);
    next_generation(&f);
    expect(rank.fd, xpw_Envelope_pause_tag, 0);
    hand_stages_on(&f, true);
    next_generation(&f);
    assert_true(silent(rank.fd)); /* it waits already */
    hand_stages_on(&f, false);
    assert_int_equal(expect(rank.fd, xpw_Envelope_stop_tag, 0)->body.stop.phase,
                     xpw_StopPhase_STOP_FINALIZE);
    wait_verdict(&f, "could not take over the memory in which its requests wait");
    kill_rank(&rank);
    executable(&f);
    wait_verdict(&f, "model m: ");
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

/* `xpool up` asks that, and starts the Instance again. */
static bool to_be_replaced(const fixture_t *f)
{
    xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
    assert_int_equal(client_ask(f->config, "test", &question, xpw_Envelope_verdict_tag,
                                5 * XP_NS_PER_S, &answer),
                     XP_OK);
    return answer.body.verdict.replace & 1;
}

/* Their rows lie in the Instance's own arenas. Whoever resumes a rank gets those of all, to hand
 * answers on; where it cannot, the Instance ends and is to be started anew. */
static void requests_by_the_relay_outlive_their_generation(void **state)
{
    for (uint32_t way = 0; way < 3; way++) {
        const uint32_t ranks = way ? 2 : 1;
        const char *refused =
            way == 2 ? "rank 0 had the answer to request 2, rank 1 that to 1" : "";
        fixture_t f;
        rank_t rank[2];
        uint64_t lease = 0;
        start(&f, ranks == 2 ? "'cuda:0', 'cuda:1'" : "'cuda:0'", ranks,
              "fabric.provider = 'p2p-relay'\n",
              ranks == 2 ? "ffn_tp_size = 2\nattention_tp = 2" : "ffn_tp_size = 2");
        for (uint32_t generation = 1; generation <= 2; generation++) {
            for (uint32_t i = 0; i < FFN_COUNT; i++)
                offer_stage(f.ffn[i], xpw_StageKind_STAGE_ROWS, 0, 200 + i);
            for (uint32_t r = 0; r < ranks; r++) {
                if (generation == 1) {
                    start_rank(&f, r, &rank[r]);
                    offer_arena(&f, &rank[r], 100 + r, XP_DTYPE_BF16);
                }
                offer_stage(f.atn[r], xpw_StageKind_STAGE_RELAY, r, 400 + r);
            }
            executable(&f);
            for (uint32_t i = 0; i < FFN_COUNT; i++) {
                for (uint32_t r = 0; r < ranks; r++)
                    lease = expect_resume(f.ffn[i], 400 + r, false); /* the relay's are fresh */
                attached(f.ffn[i], 0, lease, "");
            }
            for (uint32_t r = 0; r < ranks; r++) {
                for (uint32_t i = 0; i < FFN_COUNT; i++)
                    expect_stage(f.atn[r], xpw_StageKind_STAGE_ROWS, i, 200 + i);
                assert_true(lease == (generation == 1 ? expect_arenas(f.atn[r], 100 + r, 1, false)
                                                      : expect_arenas(f.atn[r], 100, ranks, true)));
                if (r == 0 || generation == 1 || way < 2)
                    attached(f.atn[r], r, lease, "");
            }
            if (generation == 2 && way == 2) {
                attached(f.atn[1], 1, lease, refused);
                for (uint32_t r = 0; r < ranks; r++)
                    expect(rank[r].fd, xpw_Envelope_stop_tag, 0);
                wait_verdict(&f, refused);
                assert_true(to_be_replaced(&f));
                break;
            }
            for (uint32_t r = 0; r < ranks; r++)
                expect(rank[r].fd, xpw_Envelope_attached_tag, 0);
            for (uint32_t r = 0; r < ranks && generation == 1; r++) {
                expect(rank[r].fd, xpw_Envelope_initialize_tag, 0);
                initialized(rank[r].fd);
            }
            wait_verdict(&f, NULL);
            if (generation == 2)
                break;
            next_generation(&f);
            for (uint32_t r = 0; r < ranks; r++)
                expect(rank[r].fd, xpw_Envelope_pause_tag, 0);
            for (uint32_t i = 0; i < FFN_COUNT; i++)
                expect(f.ffn[i], xpw_Envelope_prepare_tag, 0);
        }
        for (uint32_t r = 0; r < ranks; r++)
            kill_rank(&rank[r]);
        for (uint32_t r = 0; r < ranks; r++)
            expect(f.atn[r], xpw_Envelope_arena_detach_tag, 0);
        expect(f.ffn[0], xpw_Envelope_arena_detach_tag, 0);
        expect(f.ffn[1], xpw_Envelope_arena_detach_tag, 0);
        assert_int_equal(kill(f.daemon, SIGTERM), 0);
        assert_int_equal(finish(&f), 0);
    }
}

/* Its work on the device is ended by MPS, which harms nobody else, before it is killed. */
static void an_instance_that_does_not_end_is_terminated_first(void **state)
{
    fixture_t f;
    rank_t rank;
    char path[PATH_MAX], line[64] = "", wanted[64];
    serve_directly(&f, "deadlines.stop = 1\n", &rank);
    snprintf(path, sizeof(path), "%s/mps/cuda-0/pipe/client", scratch);
    FILE *file = fopen(path, "w");
    fprintf(file, "%d\n", (int)rank.pid);
    fclose(file);
    xpw_Envelope report = {.which_body = xpw_Envelope_fail_report_tag};
    snprintf(report.body.fail_report.what, sizeof(report.body.fail_report.what), "it hangs");
    say(rank.fd, &report, NULL, 0);
    expect(rank.fd, xpw_Envelope_stop_tag, 0);
    assert_int_equal(waitpid(rank.pid, NULL, 0), rank.pid);
    close(rank.fd);
    snprintf(path, sizeof(path), "%s/mps/cuda-0/pipe/terminated", scratch);
    file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    fclose(file);
    snprintf(wanted, sizeof(wanted), "terminate_client 77 %d\n", (int)rank.pid);
    assert_string_equal(line, wanted);
    for (uint32_t i = 0; i < FFN_COUNT; i++)
        expect(f.ffn[i], xpw_Envelope_arena_detach_tag, 0);
    wait_verdict(&f, "model m: it hangs");
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

/* It is asked beside the event loop, which goes on. */
static void a_controller_that_hangs_holds_up_nobody(void **state)
{
    fixture_t f;
    char path[PATH_MAX];
    start(&f, "'cuda:0'", 1, "", "");
    snprintf(path, sizeof(path), "%s/mps/cuda-0/pipe/hangs", scratch);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    uint64_t longest_ns = 0, until_ns = xp_monotonic_ns() + PATIENCE_NS;
    for (bool told = false; !told;) {
        uint64_t began_ns = xp_monotonic_ns();
        assert_true(began_ns < until_ns);
        xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
        assert_int_equal(client_ask(f.config, "test", &question, xpw_Envelope_verdict_tag,
                                    5 * XP_NS_PER_S, &answer),
                         XP_OK);
        if (xp_monotonic_ns() - began_ns > longest_ns)
            longest_ns = xp_monotonic_ns() - began_ns;
        for (pb_size_t i = 0; i < answer.body.verdict.reasons_count; i++)
            told = told || strstr(answer.body.verdict.reasons[i], "did not answer");
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    assert_true(longest_ns < 700 * XP_NS_PER_MS);
    assert_int_equal(unlink(path), 0);
    executable(&f);
    wait_verdict(&f, "model m: its Instance is not registered");
    until_ns = xp_monotonic_ns() + PATIENCE_NS;
    for (bool told = true; told;) { /* it answers again */
        xpw_Envelope question = {.which_body = xpw_Envelope_check_tag}, answer;
        assert_int_equal(client_ask(f.config, "test", &question, xpw_Envelope_verdict_tag,
                                    5 * XP_NS_PER_S, &answer),
                         XP_OK);
        told = answer.body.verdict.reasons_count > 1;
        assert_true(xp_monotonic_ns() < until_ns);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    assert_int_equal(kill(f.daemon, SIGTERM), 0);
    assert_int_equal(finish(&f), 0);
}

static void without_mps_there_is_no_daemon(void **state)
{
    fixture_t f = {.atn_count = 1};
    f.config = deployment("'cuda:0'", "'cuda:1'", MEMORY, "");
    char *path = strdup(getenv("PATH"));
    setenv("PATH", "/nonexistent", 1);
    assert_int_equal(daemon_run(f.config), 1);
    assert_non_null(strstr(xp_error_last()->text, MPS_CONTROL_PROGRAM));
    setenv("PATH", path, 1);
    free(path);
    config_destroy(f.config);
}

/* Neither for its answer nor, once that is there, for its end. */
static void nobody_waits_for_the_driver_without_a_limit(void **state)
{
    uint64_t bytes = 0, began_ns = xp_monotonic_ns();
    config_t *config = deployment("'cuda:0'", "'cuda:1'", "devices.'cuda:1'.memory = '1GiB'\n", "");
    gpus_ask_own_program(500 * XP_NS_PER_MS);
    assert_int_equal(gpus_memory(config, &config->atn[0], &bytes), XP_OK);
    assert_true(bytes == 4096);
    setenv("TEST_MUTE", "1", 1);
    assert_int_equal(gpus_memory(config, &config->atn[0], &bytes), XP_UNSUPPORTED);
    assert_non_null(strstr(xp_error_last()->text, "did not answer within 0.5 s"));
    unsetenv("TEST_MUTE");
    assert_true(xp_monotonic_ns() - began_ns < 5 * XP_NS_PER_S);
    config_destroy(config);
    /* Planning with less memory does not make it an FFN device. */
    config = deployment("'cuda:0'", "'cuda:1'", "", "");
    assert_int_equal(gpus_memory(config, &config->ffn[0], &bytes), XP_UNSUPPORTED);
    assert_non_null(strstr(xp_error_last()->text, "cuda:1 is in ffn.devices"));
    assert_null(strstr(xp_error_last()->text, "set devices."));
    config_destroy(config);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "devices") == 0)
        return fake_devices();
    const char *name = strrchr(argv[0], '/');
    if (strcmp(name ? name + 1 : argv[0], MPS_CONTROL_PROGRAM) == 0)
        return fake_mps(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpus_are_planned_with_the_memory_that_is_given),
        cmocka_unit_test(lanes_have_rows_of_their_own_where_one_member_serves_several_ranks),
        cmocka_unit_test(a_gpu_may_have_both_roles_where_that_is_allowed),
        cmocka_unit_test(what_cannot_be_planned_is_refused_by_name),
        cmocka_unit_test(answers_of_the_driver_are_understood),
        cmocka_unit_test(every_process_sees_the_gpus_under_numbers_of_its_own),
        cmocka_unit_test(an_instance_gets_the_stages_when_every_member_has_its_arena),
        cmocka_unit_test(members_get_the_partials_of_their_first),
        cmocka_unit_test(with_the_relay_the_agents_arenas_take_the_place_of_the_instances),
        cmocka_unit_test(agents_of_a_symmetric_heap_join_with_one_id),
        cmocka_unit_test(an_atnagent_that_dies_while_arenas_are_attached_is_the_failure),
        cmocka_unit_test(an_agent_that_cannot_let_go_ends_the_generation),
        cmocka_unit_test(a_generation_that_computed_something_counts_though_who_counted_it_died),
        cmocka_unit_test(requests_on_the_direct_lane_outlive_their_generation),
        cmocka_unit_test(requests_whose_memory_is_lost_end),
        cmocka_unit_test(requests_by_the_relay_outlive_their_generation),
        cmocka_unit_test(an_instance_that_does_not_end_is_terminated_first),
        cmocka_unit_test(a_controller_that_hangs_holds_up_nobody),
        cmocka_unit_test(without_mps_there_is_no_daemon),
        cmocka_unit_test(nobody_waits_for_the_driver_without_a_limit),
    };
    char own[PATH_MAX], link[PATH_MAX], path[8192], command[512];
    unsetenv("XPOOL_UNDER_UP");
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv(GPUS_MEMORY_VARIABLE);
    signal(SIGPIPE, SIG_IGN);
    snprintf(scratch, sizeof(scratch), "/tmp/xpool-plane-XXXXXX");
    ssize_t length = readlink("/proc/self/exe", own, sizeof(own) - 1);
    if (!mkdtemp(scratch) || length <= 0)
        return 1;
    own[length] = '\0';
    snprintf(link, sizeof(link), "%s/" MPS_CONTROL_PROGRAM, scratch);
    if (symlink(own, link) != 0)
        return 1;
    snprintf(path, sizeof(path), "%s:%s", scratch, getenv("PATH"));
    setenv("PATH", path, 1);
    snprintf(path, sizeof(path), "%s/mps", scratch);
    setenv(GPUS_MPS_ROOT_VARIABLE, path, 1);
    /* The daemon looks whether NVSHMEM is there, and loads nothing of it. */
    snprintf(path, sizeof(path), "%s/wheel", scratch);
    setenv(STAGE_HEAP_ROOT_VARIABLE, path, 1);
    setenv(STAGE_HEAP_PLUGIN_VARIABLE, own, 1);
    snprintf(command, sizeof(command), "mkdir -p %s/lib && : > %s/lib/libnvshmem_host.so.3", path,
             path);
    if (system(command) != 0)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof(command), "rm -rf %s", scratch);
    return system(command) ? 1 : failed;
}
