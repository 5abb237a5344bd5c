/* SPDX-License-Identifier: MIT */
/*
 * A small Instance for proofs of endurance: one Instance Rank of libxpool without attention, that
 * sends pooled rows through the layers and compares each answer with a table, then bit for bit with
 * what the same row of the same layer got before, whatever other rows and padding went with it.
 *
 *     cuda_instance table --path CHECKPOINT --out FILE --dtype NAME --rows N [--dummy]
 *     cuda_instance serve --model ID --table FILE --board FILE [--calls N] [--seed N] [--no-check]
 *
 * `serve` runs under `xpool exec` until it is told to end (SIGTERM, or by the daemon: exit code 0)
 * or until the Generation fails (3). 4: an answer was wrong or a pass did not end; 1: not started.
 * On a GPU a pass is eager, or the replay of a graph captured for more rows than are live.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/stream.h"
#include "instance_board.h"
#include "instance_table.h"
#include "kernels/kernels.h"
#include "xpool/xpool.h"

CUDA_IMAGE_DECLARE(tests_instance);

#define EXIT_FAILED   3
#define EXIT_WRONG    4
#define GRAPHS        4u
#define PASS_LIMIT_NS (20 * XP_NS_PER_S)
#define DECODE_ROWS   16u /* up to here the decode kernels compute, which give a row one result */
#define PATTERNS      4u /* one of decoding; above, of few rows, grouped products and the library */
#define UNTOUCHED     0xa5
#define MARKS         4096u

typedef enum pass_kind { PASS_EAGER = 0, PASS_PADDED, PASS_GRAPH, PASS_PREFILL } pass_kind_t;

typedef struct pass {
    pass_kind_t kind;
    uint32_t graph; /* PASS_GRAPH */
    uint32_t calls, tensor_rows, live;
} pass_t;

typedef struct instance {
    board_t *board;
    table_t table;
    xpool_config_t *config;
    xpool_model_info_t info;
    xpool_rank_t *rank;
    const char *model;
    bool gpu, check;
    uint32_t calls, width; /* bytes of an element */
    uint64_t state;        /* of the random numbers */
    uint64_t room;         /* bytes of each buffer */
    uint8_t *in, *out;     /* host; pinned on a GPU */
    uint8_t *pool;         /* [rows][hidden] as they travel */
    uint8_t *seen;         /* [PATTERNS][layers][rows][hidden] */
    uint8_t *known;        /* [layers][rows], a bit a pattern */
    uint32_t *picks;       /* [rows of a pass] */
    float *wide;
    cuda_device_t device;
    cuda_module_t module;
    cuda_function_t mark;
    cuda_stream_t stream;
    cuda_address_t in_at, out_at;
    cuda_graph_exec_t graphs[GRAPHS];
    uint32_t graph_rows[GRAPHS], graph_count;
} instance_t;

static volatile sig_atomic_t terminated;

static void on_signal(int number)
{
    (void)number;
    terminated = 1;
}

static void die(const char *what, const char *why)
{
    fprintf(stderr, "cuda_instance: %s: %s\n", what, why);
    exit(1);
}

#define NEED(expression)                                                                           \
    do {                                                                                           \
        if ((expression) != XP_OK)                                                                 \
            die(#expression, xp_error_last()->text);                                               \
    } while (0)
#define NEED_POOL(expression)                                                                      \
    do {                                                                                           \
        if ((expression) != XPOOL_OK)                                                              \
            die(#expression, xpool_error());                                                       \
    } while (0)

static void enter(instance_t *self, board_state_t state)
{
    __atomic_store_n(&self->board->state, state, __ATOMIC_RELEASE);
}

static uint32_t below(instance_t *self, uint32_t limit)
{
    uint64_t z = (self->state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (uint32_t)((z ^ (z >> 31)) >> 32) % limit;
}

/* ---- rows --------------------------------------------------------------------------------------
 */
static uint64_t row_bytes(const instance_t *self)
{
    return (uint64_t)self->table.hidden * self->width;
}

static uint32_t layer_of(const instance_t *self, uint32_t call)
{
    return call % self->table.layers;
}

/* Another row of the pool in every layer. */
static uint32_t pooled(const instance_t *self, uint32_t call, uint32_t row)
{
    return (self->picks[row] + call * 13) % self->table.rows;
}

/* Live rows from the pool, padding of bits that no number has. */
static void fill_rows(instance_t *self, const pass_t *pass)
{
    const uint64_t bytes = row_bytes(self);
    for (uint32_t r = 0; r < pass->live; r++)
        self->picks[r] = below(self, self->table.rows);
    for (uint32_t c = 0; c < pass->calls; c++) {
        uint8_t *tensor = self->in + (uint64_t)c * pass->tensor_rows * bytes;
        for (uint32_t r = 0; r < pass->live; r++)
            memcpy(tensor + r * bytes, self->pool + pooled(self, c, r) * bytes, bytes);
        memset(tensor + pass->live * bytes, 0xff, (pass->tensor_rows - pass->live) * bytes);
    }
}

static void fault(instance_t *self, const char *what, const pass_t *pass, uint32_t layer,
                  uint32_t row)
{
    static const char *const kinds[] = {"eager", "padded", "graph", "prefill"};
    if (!self->board->fault[0])
        snprintf(self->board->fault, sizeof(self->board->fault),
                 "%s: %s pass of %u live rows of %u, layer %u, row %u (%g %g, wanted %g %g)", what,
                 kinds[pass->kind], pass->live, pass->tensor_rows, layer, row,
                 (double)self->wide[0], (double)self->wide[1],
                 (double)self->table
                     .want[((uint64_t)layer * self->table.rows + row) * self->table.hidden],
                 (double)self->table
                     .want[((uint64_t)layer * self->table.rows + row) * self->table.hidden + 1]);
}

/* Processors give a row one result. On a GPU decoding does; of more rows there are three ways: the
 * resident kernel of few rows, the grouped products, the library. */
static uint32_t allowed(const instance_t *self, const pass_t *pass)
{
    return !self->gpu || pass->live <= DECODE_ROWS ? 1u : 14u;
}

static void check_row(instance_t *self, const pass_t *pass, uint32_t call, uint32_t at)
{
    const uint64_t bytes = row_bytes(self), matrix = self->table.rows * self->table.layers * bytes;
    const uint32_t layer = layer_of(self, call), row = pooled(self, call, at);
    const uint64_t place = (uint64_t)layer * self->table.rows + row;
    const uint8_t *got = self->out + ((uint64_t)call * pass->tensor_rows + at) * bytes;
    const uint32_t patterns = allowed(self, pass);
    for (uint32_t p = 0; p < PATTERNS; p++)
        if (patterns & self->known[place] & 1u << p &&
            memcmp(self->seen + p * matrix + place * bytes, got, bytes) == 0)
            return;
    if (self->table.dtype == XP_DTYPE_F32)
        memcpy(self->wide, got, bytes);
    else
        kernels_convert(self->table.dtype, got, XP_DTYPE_F32, self->wide, self->table.hidden);
    if (!table_near(&self->table, layer, row, self->wide)) {
        fault(self, "wrong", pass, layer, row);
        self->board->wrong++;
        return;
    }
    const uint32_t left = patterns & ~(uint32_t)self->known[place];
    /* The library has another way for each number of rows of a dense layer. */
    if (!left && pass->live > DECODE_ROWS)
        return;
    if (!left) {
        fault(self, "other bits than before", pass, layer, row);
        self->board->apart++;
        return;
    }
    const uint32_t p = (uint32_t)__builtin_ctz(left);
    memcpy(self->seen + p * matrix + place * bytes, got, bytes);
    self->known[place] |= (uint8_t)(1u << p);
}

static bool untouched(const uint8_t *from, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        if (from[i] != UNTOUCHED)
            return false;
    return true;
}

static void check_rows(instance_t *self, const pass_t *pass)
{
    const uint64_t bytes = row_bytes(self);
    for (uint32_t c = 0; c < pass->calls; c++) {
        for (uint32_t r = 0; r < pass->live; r++)
            check_row(self, pass, c, r);
        if (pass->tensor_rows > pass->live &&
            !untouched(self->out + ((uint64_t)c * pass->tensor_rows + pass->live) * bytes,
                       (pass->tensor_rows - pass->live) * bytes)) {
            fault(self, "padding was written", pass, layer_of(self, c), 0);
            self->board->dirty++;
        }
    }
}

/* ---- passes ------------------------------------------------------------------------------------
 */
static xpool_status_t queue_calls(instance_t *self, const pass_t *pass, uint8_t *in, uint8_t *out,
                                  uint32_t live_on_device)
{
    const uint64_t tensor = pass->tensor_rows * row_bytes(self);
    for (uint32_t c = 0; c < pass->calls; c++) {
        const xpool_ffn_call_t call = {
            .struct_bytes = sizeof(call),
            .layer = layer_of(self, c),
            .rows = pass->tensor_rows,
            .dtype = self->table.dtype == XP_DTYPE_F32   ? XPOOL_F32
                     : self->table.dtype == XP_DTYPE_F16 ? XPOOL_F16
                                                         : XPOOL_BF16,
            .step = pass->kind == PASS_PREFILL ? XPOOL_PREFILL : XPOOL_DECODE,
            .execution = pass->kind == PASS_GRAPH ? XPOOL_DECODE_GRAPH : XPOOL_EAGER,
            .input = in + c * tensor,
            .output = out + c * tensor,
            .stream = self->stream,
            .live_on_device = live_on_device,
        };
        const xpool_status_t status = xpool_rank_ffn(self->rank, &call);
        if (status != XPOOL_OK)
            return status;
    }
    return XPOOL_OK;
}

static void capture_graphs(instance_t *self)
{
    const uint32_t sizes[GRAPHS] = {1, 4, DECODE_ROWS, self->info.decode_rows};
    for (uint32_t g = 0; g < GRAPHS; g++) {
        if (sizes[g] > self->info.decode_rows ||
            (g && sizes[g] <= self->graph_rows[self->graph_count - 1]))
            continue;
        const pass_t pass = {.kind = PASS_GRAPH, .calls = self->calls, .tensor_rows = sizes[g]};
        NEED(cuda_capture_begin(&self->device, self->stream));
        NEED_POOL(queue_calls(self, &pass, (uint8_t *)(uintptr_t)self->in_at,
                              (uint8_t *)(uintptr_t)self->out_at, 1));
        NEED(cuda_capture_end(&self->device, self->stream, &self->graphs[self->graph_count]));
        self->graph_rows[self->graph_count++] = sizes[g];
    }
}

static pass_t choose_pass(instance_t *self)
{
    const uint32_t most = self->info.decode_rows, order = self->board->order;
    pass_t pass = {.calls = self->calls};
    const uint32_t dice = below(self, 100);
    if (order == BOARD_PREFILL || (order == BOARD_MIXED && dice < 12)) {
        pass.kind = PASS_PREFILL;
        pass.calls = self->table.layers;
        pass.tensor_rows = pass.live = 1 + below(self, self->info.prefill_rows);
        return pass;
    }
    if (self->gpu && (order == BOARD_DECODE || dice < 70)) {
        pass.kind = PASS_GRAPH;
        pass.graph = below(self, self->graph_count);
        if (order == BOARD_DECODE)
            for (pass.graph = 0; pass.graph + 1 < self->graph_count &&
                                 self->graph_rows[pass.graph] < self->board->order_rows;)
                pass.graph++;
        pass.tensor_rows = self->graph_rows[pass.graph];
        pass.live =
            order == BOARD_DECODE ? self->board->order_rows : below(self, pass.tensor_rows + 1);
        return pass;
    }
    pass.tensor_rows = pass.live = 1 + below(self, most);
    if (self->gpu && dice < 85) {
        pass.kind = PASS_PADDED;
        pass.tensor_rows = pass.live + below(self, most - pass.live + 1);
    }
    return pass;
}

/* Queues the pass and waits until its stream is idle. *status_out: of libxpool; the answer: of the
 * device itself. */
static xp_status_t run_on_gpu(instance_t *self, const pass_t *pass, xpool_status_t *status_out)
{
    const cuda_driver_t *driver = self->device.driver;
    const uint64_t bytes = pass->calls * pass->tensor_rows * row_bytes(self);
    const xp_clock_t clock = xp_clock_system();
    xpool_status_t status = XPOOL_OK;
    XP_TRY(CUDA_CALL(driver, cuMemcpyHtoDAsync, self->in_at, self->in, bytes, self->stream));
    XP_TRY(CUDA_CALL(driver, cuMemsetD8Async, self->out_at, UNTOUCHED, bytes, self->stream));
    if (pass->kind == PASS_GRAPH || pass->kind == PASS_PADDED) {
        const xpool_live_t live = {.struct_bytes = sizeof(live),
                                   .rows = pass->live,
                                   .step = XPOOL_DECODE,
                                   .stream = self->stream};
        status = xpool_rank_live(self->rank, &live, NULL);
    }
    if (status == XPOOL_OK && pass->kind == PASS_GRAPH)
        XP_TRY(cuda_graph_launch(&self->device, self->graphs[pass->graph], self->stream));
    else if (status == XPOOL_OK)
        status = queue_calls(self, pass, (uint8_t *)(uintptr_t)self->in_at,
                             (uint8_t *)(uintptr_t)self->out_at, pass->kind == PASS_PADDED);
    XP_TRY(CUDA_CALL(driver, cuMemcpyDtoHAsync, self->out, self->out_at, bytes, self->stream));
    XP_TRY(
        cuda_stream_wait(&self->device, self->stream, &clock, xp_monotonic_ns() + PASS_LIMIT_NS));
    *status_out = status;
    return XP_OK;
}

/* One pass. False: it was the last one. */
static bool run_pass(instance_t *self)
{
    board_t *board = self->board;
    const pass_t pass = choose_pass(self);
    xpool_status_t status = XPOOL_OK;
    xp_status_t own = XP_OK;
    fill_rows(self, &pass);
    const uint64_t began_ns = xp_monotonic_ns();
    if (self->gpu)
        own = run_on_gpu(self, &pass, &status);
    else
        status = queue_calls(self, &pass, self->in, self->out, 0);
    const uint64_t ended_ns = xp_monotonic_ns();
    if (own == XP_OK && status == XPOOL_OK && self->gpu)
        status = xpool_rank_finish(self->rank, 5);
    if (own != XP_OK || status != XPOOL_OK) {
        const bool silent = own == XP_TIMEOUT || status == XPOOL_RETRY || status == XPOOL_TIMEOUT;
        snprintf(board->ended_text, sizeof(board->ended_text), "%s",
                 own != XP_OK ? xp_error_last()->text : xpool_error());
        board->late = silent;
        board->ended_status = own != XP_OK ? UINT32_MAX : (uint32_t)status;
        board->ended_ns = ended_ns;
        return false;
    }
    if (self->check)
        check_rows(self, &pass);
    else
        board->unchecked += (uint64_t)pass.calls * pass.live;
    if (ended_ns - began_ns > board->longest_pass_ns)
        board->longest_pass_ns = ended_ns - began_ns;
    board->graph_passes += pass.kind == PASS_GRAPH;
    board->eager_passes += pass.kind == PASS_EAGER || pass.kind == PASS_PADDED;
    board->prefill_passes += pass.kind == PASS_PREFILL;
    board->calls += pass.calls;
    board->rows += (uint64_t)pass.calls * pass.live;
    board->beat_ns = ended_ns;
    __atomic_store_n(&board->passes, board->passes + 1, __ATOMIC_RELEASE);
    return true;
}

/* ---- life --------------------------------------------------------------------------------------
 */
static void on_end(void *context, uint32_t end, uint32_t seconds, const char *text)
{
    board_t *board = context;
    (void)seconds;
    if (board->told_kind)
        return;
    snprintf(board->told_text, sizeof(board->told_text), "%s", text);
    board->told_ns = xp_monotonic_ns();
    __atomic_store_n(&board->told_kind, end, __ATOMIC_RELEASE);
}

static void open_device(instance_t *self)
{
    static const char *const name = "instance_mark";
    const cuda_driver_t *driver;
    NEED(cuda_driver_load(&driver));
    NEED(cuda_device_open(driver, 0, &self->device));
    self->board->gpu = 1;
    self->board->mps = self->device.info.mps;
    NEED(cuda_stream_create(&self->device, false, &self->stream));
    NEED(cuda_module_load(&self->device, &cuda_image_tests_instance, &name, 1, &self->module,
                          &self->mark));
}

static void take_memory(instance_t *self)
{
    const uint64_t bytes = row_bytes(self);
    const uint64_t decode = (uint64_t)self->calls * self->info.decode_rows;
    const uint64_t prefill = (uint64_t)self->table.layers * self->info.prefill_rows;
    const uint64_t matrix = (uint64_t)self->table.rows * self->table.layers;
    self->room = (decode > prefill ? decode : prefill) * bytes;
    if (self->gpu) {
        void *in, *out;
        NEED(cuda_host_alloc(&self->device, self->room, &in));
        NEED(cuda_host_alloc(&self->device, self->room, &out));
        NEED(CUDA_CALL(self->device.driver, cuMemAlloc, &self->in_at, self->room));
        NEED(CUDA_CALL(self->device.driver, cuMemAlloc, &self->out_at, self->room));
        self->in = in;
        self->out = out;
    } else {
        self->in = malloc(self->room);
        self->out = malloc(self->room);
    }
    self->pool = malloc(self->table.rows * bytes);
    self->seen = malloc(PATTERNS * matrix * bytes);
    self->known = calloc(matrix, 1);
    self->picks = malloc((self->info.decode_rows + self->info.prefill_rows) * sizeof(uint32_t));
    self->wide = malloc(self->table.hidden * sizeof(float));
    if (!self->in || !self->out || !self->pool || !self->seen || !self->known || !self->picks ||
        !self->wide)
        die("memory", "there is none");
    if (self->table.dtype == XP_DTYPE_F32)
        memcpy(self->pool, self->table.input, self->table.rows * bytes);
    else
        kernels_convert(XP_DTYPE_F32, self->table.input, self->table.dtype, self->pool,
                        (size_t)self->table.rows * self->table.hidden);
}

static void open_rank(instance_t *self)
{
    const xpool_rank_options_t options = {
        .struct_bytes = sizeof(options),
        .model_id = self->model,
        .engine = "cuda_instance",
        .checkpoint = xpool_config_model_path(self->config, self->model),
        .hidden = self->info.hidden,
        .layers = self->info.layers,
        .attention_tp = 1,
        .attention_dp = 1,
        .decode_rows = self->info.decode_rows,
        .prefill_rows = self->info.prefill_rows,
        .dtype = self->table.dtype == XP_DTYPE_F32   ? XPOOL_F32
                 : self->table.dtype == XP_DTYPE_F16 ? XPOOL_F16
                                                     : XPOOL_BF16,
        .on_end = on_end,
        .context = self->board,
    };
    NEED_POOL(xpool_rank_open(self->config, &options, &self->rank));
    self->board->open_ns = xp_monotonic_ns();
    enter(self, BOARD_OPEN);
    NEED_POOL(xpool_rank_wait_executable(self->rank, 0));
    self->board->executable_ns = xp_monotonic_ns();
    enter(self, BOARD_EXECUTABLE);
    if (self->gpu)
        capture_graphs(self);
    const xpool_serving_t serving = {.struct_bytes = sizeof(serving),
                                     .max_context = self->info.max_context};
    NEED_POOL(xpool_rank_serving(self->rank, &serving));
    self->board->serving_ns = self->board->beat_ns = xp_monotonic_ns();
    enter(self, BOARD_SERVING);
}

/* The Generation is over; the context must not be. */
static bool kernel_runs(instance_t *self)
{
    const cuda_driver_t *driver = self->device.driver;
    const xp_clock_t clock = xp_clock_system();
    uint32_t count = MARKS, seed = (uint32_t)getpid();
    void *parameters[] = {&self->out_at, &count, &seed};
    const uint32_t *words = (const uint32_t *)self->out;
    if (self->room < MARKS * sizeof(uint32_t))
        return false;
    memset(self->out, 0, MARKS * sizeof(uint32_t));
    if (cuda_launch(&self->device, self->mark, MARKS / 256, 256, self->stream, parameters) !=
            XP_OK ||
        CUDA_CALL(driver, cuMemcpyDtoHAsync, self->out, self->out_at, MARKS * sizeof(uint32_t),
                  self->stream) != XP_OK ||
        cuda_stream_wait(&self->device, self->stream, &clock,
                         xp_monotonic_ns() + 5 * XP_NS_PER_S) != XP_OK)
        return false;
    for (uint32_t i = 0; i < MARKS && self->check; i++)
        if (words[i] != seed * 2654435761u + i)
            return false;
    return true;
}

static int serve_passes(instance_t *self)
{
    board_t *board = self->board;
    bool more = true;
    while (more && !terminated && !__atomic_load_n(&board->told_kind, __ATOMIC_ACQUIRE)) {
        if (board->order == BOARD_REST)
            usleep(1000);
        else
            more = run_pass(self);
    }
    if (!board->ended_ns)
        board->ended_ns = xp_monotonic_ns();
    /* What was met in a call, and the words for it, come by different ways. */
    const uint64_t until_ns = xp_monotonic_ns() + XP_NS_PER_S;
    while (!more && !__atomic_load_n(&board->told_kind, __ATOMIC_ACQUIRE) &&
           xp_monotonic_ns() < until_ns)
        usleep(500);
    enter(self, BOARD_ENDED);
    const bool failed = board->told_kind == XPOOL_END_FAILED || (!more && !board->told_kind);
    if (failed && self->gpu)
        board->kernel_after = kernel_runs(self) ? 1 : 2;
    xpool_rank_close(self->rank);
    board->closed_ns = xp_monotonic_ns();
    if (board->wrong || board->apart || board->dirty || board->late || board->kernel_after == 2)
        return EXIT_WRONG;
    return failed ? EXIT_FAILED : 0;
}

static void report(const instance_t *self)
{
    const board_t *b = self->board;
    printf("{\"model\": \"%s\", \"passes\": %llu, \"graph_passes\": %llu, \"eager_passes\": %llu, "
           "\"prefill_passes\": %llu, \"calls\": %llu, \"rows\": %llu, \"wrong\": %llu, "
           "\"apart\": %llu, \"dirty\": %llu, \"unchecked\": %llu, \"longest_pass_ms\": %.3f, "
           "\"late\": %u, \"kernel_after\": %u, \"told\": %u, \"status\": %d}\n",
           self->model, (unsigned long long)b->passes, (unsigned long long)b->graph_passes,
           (unsigned long long)b->eager_passes, (unsigned long long)b->prefill_passes,
           (unsigned long long)b->calls, (unsigned long long)b->rows, (unsigned long long)b->wrong,
           (unsigned long long)b->apart, (unsigned long long)b->dirty,
           (unsigned long long)b->unchecked, (double)b->longest_pass_ns / 1e6, b->late,
           b->kernel_after, b->told_kind, (int)b->ended_status);
    if (b->fault[0])
        printf("fault: %s\n", b->fault);
    if (b->ended_text[0])
        printf("met: %s\n", b->ended_text);
    if (b->told_text[0])
        printf("told: %s\n", b->told_text);
}

static void open_board(instance_t *self, const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(board_t)) != 0)
        die(path, "cannot be made");
    void *map = mmap(NULL, sizeof(board_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        die(path, "cannot be mapped");
    self->board = map;
    self->board->began_ns = xp_monotonic_ns();
    self->board->pid = (uint32_t)getpid();
    self->board->magic = BOARD_MAGIC;
}

static const char *option(int argc, char **argv, const char *name, const char *fallback)
{
    for (int i = 2; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    if (!fallback)
        die(name, "is missing");
    return fallback;
}

static bool flag(int argc, char **argv, const char *name)
{
    for (int i = 2; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return false;
}

static uint32_t number(int argc, char **argv, const char *name, const char *fallback)
{
    return (uint32_t)strtoul(option(argc, argv, name, fallback), NULL, 10);
}

static int make_table(int argc, char **argv)
{
    const char *dtype = option(argc, argv, "--dtype", "bfloat16");
    const table_options_t options = {
        .path = option(argc, argv, "--path", NULL),
        .out = option(argc, argv, "--out", NULL),
        .dtype = !strcmp(dtype, "float32")   ? XP_DTYPE_F32
                 : !strcmp(dtype, "float16") ? XP_DTYPE_F16
                                             : XP_DTYPE_BF16,
        .dummy = flag(argc, argv, "--dummy"),
        .rows = number(argc, argv, "--rows", "64"),
        .threads = number(argc, argv, "--threads", "1"),
        .seed = number(argc, argv, "--seed", "1"),
    };
    NEED(table_make(&options));
    return 0;
}

int main(int argc, char **argv)
{
    static instance_t self;
    const struct sigaction action = {.sa_handler = on_signal};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1 && !strcmp(argv[1], "table"))
        return make_table(argc, argv);
    if (argc < 2 || strcmp(argv[1], "serve"))
        die("the first word", "is table or serve");
    sigaction(SIGTERM, &action, NULL);
    self.model = option(argc, argv, "--model", NULL);
    open_board(&self, option(argc, argv, "--board", NULL));
    NEED(table_open(option(argc, argv, "--table", NULL), &self.table));
    self.calls = number(argc, argv, "--calls", "48");
    self.state = number(argc, argv, "--seed", "1");
    self.check = !flag(argc, argv, "--no-check");
    self.width = self.table.dtype == XP_DTYPE_F32 ? 4 : 2;
    NEED(kernels_select());
    self.info.struct_bytes = sizeof(self.info);
    NEED_POOL(xpool_config_open(NULL, &self.config));
    NEED_POOL(xpool_config_model_info(self.config, self.model, &self.info));
    if (self.info.hidden != self.table.hidden || self.info.layers != self.table.layers)
        die("the table", "is of another model");
    self.gpu = !strncmp(self.info.device, "cuda", 4);
    if (self.gpu)
        open_device(&self);
    take_memory(&self);
    open_rank(&self);
    const int code = serve_passes(&self);
    report(&self);
    return code;
}
