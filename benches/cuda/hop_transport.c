/* SPDX-License-Identifier: MIT */
/*
 * What the CUDA Transport costs a layer, without Fabric: an Instance and an AtnAgent that answers
 * by itself, two processes on one GPU, under MPS. The floor is a ping-pong of two words between
 * kernels of the same two processes. Prints one JSON row a line.
 */
#include <string.h>
#include <unistd.h>

#include "base/memfd.h"
#include "client.h"

#define WIDTH 2048

static int life_fd, board_fd;
static agent_t agent;

static client_t start_client(uint32_t rows, uint32_t life_index)
{
    client_t client;
    client_setup_t setup = {
        .geometry = {.hidden = WIDTH, .max_rows = rows, .dtype = XP_DTYPE_BF16, .dp_size = 1},
        .rows = rows,
        .line = life_index,
        .limit_ns = 20 * XP_NS_PER_S,
    };
    client_start(life_fd, board_fd, life_index, &setup, &client);
    CHECK(client_attach(&client, &agent));
    return client;
}

static void end_client(client_t *client)
{
    CHECK_OK(agent_detach(&agent, client->slot));
    client_exit(client);
}

static void row(const char *metric, client_times_t times, double value, double floor,
                const char *note)
{
    char text[400];
    snprintf(text, sizeof(text),
             "%s; P50 %.3f, P99 %.3f, max %.1f us, %llu round trips, %llu wrong", note,
             times.each.p50_us, times.each.p99_us, times.each.max_us,
             (unsigned long long)times.done, (unsigned long long)times.wrong);
    kit_row(metric, value, "us", floor, NULL, text);
    kit_samples(&times.each, metric);
    CHECK(times.wrong == 0);
}

int main(int argc, char **argv)
{
    agent_main(argc, argv);
    client_main(argc, argv);
    const uint32_t scale = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    mps_t *mps = agent_mps_begin();
    CHECK_OK(transport_life_make(&life_fd));
    CHECK_OK(xp_memfd_create("board", MAILBOX_HEADER_BYTES, &board_fd));
    agent_start(life_fd, 1, 8, &agent);

    client_t one = start_client(1, 2);
    client_times_t floor = client_ping_pong(&one, &agent, 20000);
    row("transport.cuda.raw_us", floor, floor.each.p50_us, floor.each.p50_us,
        "raw round trip of two words between kernels of two processes on one GPU");
    client_times_t trips = client_round_trips(&one, 100000);
    row("transport.cuda.mailbox_us", trips, trips.each.p50_us, floor.each.p50_us,
        "whole round trip inside one kernel, 1 row of 2048, rows written and checked");
    client_times_t graph = client_graph_times(&one, 200);
    row("transport.cuda.graph_layer_us", graph, graph.per_layer_us, floor.each.p50_us,
        "put, wait and take a layer in a captured graph of 48 layers, 1 row (times: a replay)");
    client_times_t eager = client_eager_times(&one, 100);
    row("transport.cuda.eager_layer_us", eager, eager.per_layer_us, floor.each.p50_us,
        "the same, launched one by one, 1 row (times: a pass of 48 layers)");
    uint64_t many = 0, lost = 0;
    for (uint32_t left = 100000 * scale; left; left -= left < 1000000 ? left : 1000000) {
        trips = client_round_trips(&one, left < 1000000 ? left : 1000000);
        many += left < 1000000 ? left : 1000000;
        lost += trips.wrong;
    }
    char text[100];
    snprintf(text, sizeof(text), "round trips of 1 row of 2048, every element checked");
    kit_row("transport.cuda.round_trips", (double)many, "round trips", -1, NULL, text);
    kit_row("transport.cuda.round_trips_wrong", (double)lost, "elements", -1, "0", text);
    end_client(&one);

    client_t sixteen = start_client(16, 3);
    graph = client_graph_times(&sixteen, 200);
    row("transport.cuda.graph_layer_16rows_us", graph, graph.per_layer_us, floor.each.p50_us,
        "the same graph with 16 rows, echo by one warp");
    end_client(&sixteen);

    client_t bulk = start_client(8192, 4);
    client_times_t put = client_put_times(&bulk, 20);
    char note[200];
    const double bytes = 8192.0 * WIDTH * 2;
    snprintf(note, sizeof(note),
             "put of 8192 x 2048 BF16 within the GPU, bytes of payload over time of the launch "
             "(P50 %.1f us)",
             put.each.p50_us);
    kit_row("transport.cuda.put_bulk_gbps", bytes / put.each.p50_us / 1e3, "GB/s", -1, NULL, note);
    end_client(&bulk);

    /* Several at once: the AtnAgent's warps do not disturb each other. */
    client_t four[4];
    for (uint32_t i = 0; i < 4; i++)
        four[i] = start_client(1, 5 + i);
    for (uint32_t i = 0; i < 4; i++) {
        /* All but the first replay in the background. */
        if (i > 0)
            client_loop(&four[i]);
    }
    trips = client_round_trips(&four[0], 100000);
    row("transport.cuda.mailbox_4clients_us", trips, trips.each.p50_us, floor.each.p50_us,
        "mailbox_us beside three Instances that replay graphs");
    void *board;
    CHECK_OK(xp_memfd_map(board_fd, MAILBOX_HEADER_BYTES, &board));
    for (uint32_t i = 1; i < 4; i++) {
        board_line_t *line = (board_line_t *)board + 5 + i;
        __atomic_store_n(&line->stop, 1, __ATOMIC_RELEASE);
    }
    uint64_t replays = 0;
    for (uint32_t i = 0; i < 4; i++) {
        board_line_t *line = (board_line_t *)board + 5 + i;
        end_client(&four[i]);
        CHECK(line->wrong == 0 && line->ended == 0);
        replays += line->replays;
    }
    printf("beside it: %llu replays of %d layers, all exact\n", (unsigned long long)replays,
           CLIENT_LAYERS);
    printf("stopping the resident kernel took %.0f us\n", (double)agent_stop(&agent) / 1e3);
    agent_mps_end(mps);
    printf("ok hop_transport\n");
    return 0;
}
