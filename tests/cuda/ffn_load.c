/* SPDX-License-Identifier: MIT */
/* Loading a shard from files, beside what the bus and the files do alone. */
#include "ffn_load.h"

#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pool.h"
#include "ffn/cuda_runtime.h"
#include "model/synth.h"

#define READERS 8u

/* What the bus does alone: one pinned buffer, copied again and again. GB/s. */
static double bus_rate(ffn_kit_t *kit)
{
    enum { COPIES = 32 };
    const uint64_t bytes = 64u << 20;
    void *pinned;
    cuda_address_t to = ffn_kit_alloc(kit, bytes);
    CHECK_OK(cuda_host_alloc(&kit->device, bytes, &pinned));
    memset(pinned, 1, bytes);
    for (uint32_t i = 0; i <= COPIES; i++) {
        if (i == 1)
            CHECK_OK(CUDA_CALL(kit->device.driver, cuEventRecord, kit->start, kit->stream));
        CHECK_OK(CUDA_CALL(kit->device.driver, cuMemcpyHtoDAsync, to, pinned, bytes, kit->stream));
    }
    CHECK_OK(CUDA_CALL(kit->device.driver, cuEventRecord, kit->end, kit->stream));
    ffn_kit_wait(kit, kit->stream);
    const double rate = (double)bytes * COPIES / (ffn_kit_elapsed(kit) * 1e6);
    cuda_host_free(&kit->device, pinned);
    ffn_kit_free(kit, to);
    return rate;
}

/* What the files give alone, read in pieces of the loader's size by as many readers. */
typedef struct file_read {
    glob_t files;
    uint64_t bytes; /* of all files */
} file_read_t;

static void file_run(void *context, uint32_t member, uint32_t members)
{
    enum { PIECE = 8 << 20 };
    file_read_t *all = context;
    char *buffer = malloc(PIECE);
    CHECK(buffer);
    memset(buffer, 0, PIECE);
    for (size_t f = 0, turn = 0; f < all->files.gl_pathc; f++) {
        struct stat about;
        const int fd = open(all->files.gl_pathv[f], O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0 && fstat(fd, &about) == 0);
        for (off_t at = 0; at < about.st_size; at += PIECE, turn++)
            if (turn % members == member) {
                const ssize_t got = pread(fd, buffer, PIECE, at);
                CHECK(got > 0);
                __atomic_fetch_add(&all->bytes, (uint64_t)got, __ATOMIC_RELAXED);
            }
        close(fd);
    }
    free(buffer);
}

static double file_rate(const char *path, uint32_t readers)
{
    char pattern[600];
    file_read_t all = {0};
    xp_pool_t *pool;
    snprintf(pattern, sizeof(pattern), "%s/*.safetensors", path);
    CHECK(glob(pattern, 0, NULL, &all.files) == 0);
    CHECK_OK(xp_pool_create(readers, NULL, 0, &pool));
    const uint64_t start = xp_monotonic_ns();
    xp_pool_run(pool, file_run, &all);
    const double rate = (double)all.bytes / (double)(xp_monotonic_ns() - start);
    xp_pool_destroy(pool);
    globfree(&all.files);
    return rate;
}

void ffn_load_measure(ffn_kit_t *kit, const char *folder)
{
    synth_options_t options;
    char path[512], note[240];
    model_synth_defaults(MODEL_ARCH_QWEN3_MOE, &options);
    options.layers = 16; /* enough that fixed costs of some 80 ms do not weigh */
    options.hidden = 2048;
    options.moe_intermediate = 768;
    options.experts = 64;
    options.top_k = 8;
    options.dtype = XP_DTYPE_BF16;
    options.shards = 4;
    options.force = true;
    snprintf(path, sizeof(path), "%s/load", folder);
    CHECK_OK(model_synth_write(&options, path));
    const double bus = bus_rate(kit);
    ffn_kit_row("ffn.load.bus_gb_per_s", bus, "GB/s", NAN, NULL,
                "pinned copies of 64 MiB, one after the other");
    for (uint32_t readers = 1; readers <= READERS; readers *= 2) {
        ffn_cuda_runtime_t *runtime;
        ffn_cuda_load_report_t report;
        const ffn_cuda_config_t config = {
            .device = &kit->device, .lanes = 1, .max_rows = 16, .cpu = -1};
        const ffn_install_t install = {.model_id = "load",
                                       .path = path,
                                       .dtype = XP_DTYPE_AUTO,
                                       .tp_size = 1,
                                       .readers = readers};
        CHECK_OK(ffn_cuda_runtime_create(&config, &runtime));
        CHECK_OK(ffn_cuda_runtime_install(runtime, &install, NULL, &report));
        char metric[64] = "ffn.load.gb_per_s";
        if (readers < READERS)
            snprintf(metric, sizeof(metric), "ffn.load.%ureaders.gb_per_s", readers);
        snprintf(note, sizeof(note),
                 "%.2f GB from cached files, %u readers; floor: the bus alone; the files alone, by "
                 "as many readers: %.1f GB/s",
                 (double)report.read / 1e9, readers, file_rate(path, readers));
        ffn_kit_row(metric, (double)report.read / (double)report.took_ns, "GB/s", bus, NULL, note);
        ffn_cuda_runtime_destroy(runtime);
    }
}
