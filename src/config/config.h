/* SPDX-License-Identifier: MIT */
/*
 * The resolved configuration: one plain struct, immutable after config_load().
 *
 * Every setting is a row of one registry (settings.c): name, type, bounds, default, sources that
 * may set it, help text. Precedence: command line, allow-listed environment, TOML file named by
 * --config or XPOOL_CONFIG, default. --help, docs/configuration.md, configs/xpool.example.toml and
 * .env.example are generated from the registry.
 */
#ifndef XPOOL_CONFIG_CONFIG_H
#define XPOOL_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/dtype.h"
#include "base/log.h"
#include "base/status.h"

#define CONFIG_MAX_MODELS      64
#define CONFIG_MAX_DEVICES     16 /* per role */
#define CONFIG_MAX_ID          96
#define CONFIG_MAX_PATH        1024
#define CONFIG_MAX_CPUS        256
#define CONFIG_MAX_ENGINE_ARGS 64

typedef enum config_engine { CONFIG_ENGINE_NATIVE = 0, CONFIG_ENGINE_SGLANG } config_engine_t;
typedef enum config_load_format { CONFIG_LOAD_AUTO = 0, CONFIG_LOAD_DUMMY } config_load_format_t;
typedef enum config_policy {
    CONFIG_POLICY_FIFO = 0,
    CONFIG_POLICY_RANDOM,
    CONFIG_POLICY_DEADLINE
} config_policy_t;

typedef enum config_kv_policy {
    CONFIG_KV_DEADLINE = 0,
    CONFIG_KV_ARRIVAL, /* elastic, without deadlines */
    CONFIG_KV_STATIC   /* each model keeps its share */
} config_kv_policy_t;

typedef struct config_slo {
    double ttft_ms, tbt_ms;
} config_slo_t;

typedef struct config_model {
    char id[CONFIG_MAX_ID];
    char path[CONFIG_MAX_PATH]; /* resolved absolute path (path, or vendor.model_base_uri + id) */
    config_engine_t engine;
    uint16_t port; /* 0 = any free one */
    xp_dtype_t dtype;
    config_load_format_t load_format;
    char chat_template[64]; /* "" = recognise */
    char python[CONFIG_MAX_PATH];
    uint32_t engine_arg_count;
    char *engine_args[CONFIG_MAX_ENGINE_ARGS];
    uint32_t max_context; /* 0 = the checkpoint's */
    uint32_t ffn_tp_size, attention_tp, attention_dp;
    uint32_t decode_rows, prefill_rows;
    uint32_t kv_floor_tokens, kv_ceiling_tokens; /* 0 = from checkpoint and memory */
    config_slo_t slo;                            /* the model's, or scheduler.slo */
    uint32_t idle_unload_seconds;                /* 0 = never */
} config_model_t;

typedef enum config_device_kind { CONFIG_DEVICE_CPU = 0, CONFIG_DEVICE_CUDA } config_device_kind_t;

typedef struct config_device {
    char name[32]; /* "cpu:0", "cuda:1" */
    config_device_kind_t kind;
    uint32_t index;
    uint32_t threads; /* cpu: 0 was resolved to the usable cores */
    uint64_t
        memory_bytes;   /* cpu: 0 was resolved to a share of the machine's; cuda: 0 = the GPU's */
    uint32_t cpu_count; /* pinning; 0 = none */
    uint32_t cpus[CONFIG_MAX_CPUS];
} config_device_t;

typedef struct config {
    struct {
        char socket[108]; /* Unix socket path */
        char http[64];    /* "127.0.0.1:8200" */
    } daemon;
    struct {
        char http[64];
    } gateway;
    char model_base_uri[CONFIG_MAX_PATH];
    uint32_t model_count;
    config_model_t models[CONFIG_MAX_MODELS];
    uint32_t atn_count, ffn_count;
    config_device_t atn[CONFIG_MAX_DEVICES], ffn[CONFIG_MAX_DEVICES];
    bool allow_shared_roles;
    char fabric_provider[16];           /* "auto", "shm", ... */
    bool keep_requests;                 /* on GPUs, from one Generation to the next */
    char nvshmem_root[CONFIG_MAX_PATH]; /* "" = looked for */
    struct {
        uint32_t ffn_concurrency, atn_concurrency;
        config_policy_t ffn_policy;
        config_kv_policy_t kv_policy;
        config_slo_t slo;
    } scheduler;
    double atn_memory_utilization;
    uint32_t loader_parallelism, placement_parallelism;
    double placement_timeout_s;
    uint64_t ffn_extra_margin_bytes;
    char ffn_calibration[CONFIG_MAX_PATH];
    struct { /* seconds */
        double registration, startup, submission, request, queue, drain, stop, kv, reform;
    } deadlines;
    char cache_root[CONFIG_MAX_PATH];
    struct {
        char folder[CONFIG_MAX_PATH]; /* "" = off */
        uint32_t records;             /* ring capacity of a process */
    } observe;
    struct {
        xp_log_level_t level;
        xp_log_color_t color;
        xp_log_format_t format;
    } logging;
    char source_path[CONFIG_MAX_PATH]; /* the TOML file, absolute; "" when none */
    uint8_t digest[32]; /* of every resolved value but logging.*; what is worked out from one
                           process's surroundings (free memory, usable cores, current
                           folder) enters as "auto" */
    struct config_record *record; /* where each value came from; NULL in a config_t made by hand */
} config_t;

#define CONFIG_MAX_OVERRIDES 64

/* Command-line settings: --set KEY=VALUE and --config FILE, plus the subcommand's own flags are
 * collected in here by cli/ and handed down. Values are parsed as TOML values, bare words as
 * strings. */
typedef struct config_overrides {
    const char *config_path; /* NULL: XPOOL_CONFIG, else none */
    bool running;            /* for a system that runs: a model's files may be gone meanwhile */
    uint32_t count;
    const char *keys[CONFIG_MAX_OVERRIDES];
    const char *values[CONFIG_MAX_OVERRIDES];
} config_overrides_t;

/* Resolves everything. Errors name file:line:column, the key, what was found, what is allowed and
 * the nearest known key. Collects several errors of one file in the message (up to 8). */
xp_status_t config_load(const config_overrides_t *overrides, config_t **config_out);
/* As config_load(), and on failure appends the whole message, one error a line, to `report`: the
 * error record has room for about a thousand bytes. */
xp_status_t config_load_report(const config_overrides_t *overrides, config_t **config_out,
                               xp_buf_t *report);
/* What is suspicious but no error; apps log it once at start. */
uint32_t config_warning_count(const config_t *config);
const char *config_warning(const config_t *config, uint32_t index);
void config_destroy(config_t *config);

const char *config_engine_name(config_engine_t engine); /* as the setting has it */
/* The interpreter of a model's SGLang Instance: models[].python where it was set, else XPOOL_PYTHON
 * of the environment, else venv-test below cache.root where it exists (scripts/test-venv makes it),
 * else python3. */
void config_model_python(const config_t *config, const config_model_t *model, char *out,
                         size_t size);
/* Path of a model's checkpoint by id (the seeds' XpoolConfig.model_path_of); XP_NOT_FOUND. */
xp_status_t config_model_path_of(const config_t *config, const char *model_id,
                                 const char **path_out);
const config_model_t *config_model_find(const config_t *config, const char *model_id);
/* By device name in the named role's list; NULL when absent. */
const config_device_t *config_device_find(const config_t *config, bool ffn_role, const char *name,
                                          uint32_t *index_out);
/* machine.c: memory that processes started now could take, in bytes, read below these roots
 * ("/proc", "/sys/fs/cgroup"). 0 when unknown. */
uint64_t config_machine_memory(const char *proc_root, const char *cgroup_root);
/* The same of this machine, for who asks before it takes; UINT64_MAX when unknown. */
uint64_t config_machine_room(void *unused);
#endif
