/* SPDX-License-Identifier: MIT */
/* libxpool: versions, errors, and the configuration as an engine needs it. Runs on the caller's
 * thread; starts nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "library/private.h"
#include "model/checkpoint.h"
#include "model/spec.h"

uint32_t xpool_abi(void)
{
    return XPOOL_ABI;
}

const char *xpool_version(void)
{
    return XPOOL_VERSION;
}

const char *xpool_error(void)
{
    return xp_error_last()->text;
}

xp_status_t library_check_process(pid_t opened_by)
{
    if (getpid() == opened_by)
        return XP_OK;
    return xp_fail(XP_INVALID,
                   "opened by process %d, used in its forked child %d: open it in the process that "
                   "uses it",
                   (int)opened_by, (int)getpid());
}

xpool_status_t library_status(xp_status_t status)
{
    switch (status) {
    case XP_OK:
        return XPOOL_OK;
    case XP_RETRY:
        return XPOOL_RETRY;
    case XP_TIMEOUT:
        return XPOOL_TIMEOUT;
    case XP_CLOSED:
    case XP_CANCELLED:
        return XPOOL_CLOSED;
    case XP_NOT_FOUND:
        return XPOOL_NOT_FOUND;
    case XP_UNSUPPORTED:
        return XPOOL_UNSUPPORTED;
    case XP_NO_MEMORY:
        return XPOOL_NO_MEMORY;
    case XP_INVALID:
    case XP_IO:
        return XPOOL_INVALID;
    default:
        return XPOOL_FAILED;
    }
}

xp_status_t library_take_struct(const void *from, uint32_t bytes, uint32_t least, const char *name,
                                void *to, size_t size)
{
    if (bytes < least)
        return xp_fail(XP_INVALID, "%s.struct_bytes is %u, it has %zu: set it to sizeof", name,
                       bytes, size);
    memset(to, 0, size);
    memcpy(to, from, bytes < size ? bytes : size);
    return XP_OK;
}

void library_give_struct(const void *from, size_t size, void *to, uint32_t bytes)
{
    memcpy(to, from, bytes < size ? bytes : size);
    memcpy(to, &bytes, sizeof(bytes)); /* struct_bytes comes first */
}

xpool_status_t xpool_config_open(const char *path, xpool_config_t **config_out)
{
    const char *environment = getenv("XPOOL_CONFIG");
    if (!config_out)
        return library_status(xp_fail(XP_INVALID, "xpool_config_open needs config_out"));
    if (!path && (!environment || !environment[0]))
        return library_status(xp_fail(
            XP_INVALID, "no configuration: give a path, or set XPOOL_CONFIG to the daemon's file"));
    xpool_config_t *config = calloc(1, sizeof(*config));
    if (!config)
        return library_status(xp_fail(XP_NO_MEMORY, "no memory for the configuration"));
    config->pid = getpid();
    config_overrides_t overrides = {.config_path = path};
    xp_status_t status = config_load(&overrides, &config->config);
    if (status != XP_OK) {
        free(config);
        return library_status(status);
    }
    pthread_mutex_init(&config->lock, NULL);
    *config_out = config;
    return XPOOL_OK;
}

void xpool_config_close(xpool_config_t *config)
{
    if (!config || config->pid != getpid())
        return;
    for (uint32_t i = 0; i < CONFIG_MAX_MODELS; i++)
        free(config->specs[i]);
    planner_free(config->planned);
    config_destroy(config->config);
    pthread_mutex_destroy(&config->lock);
    free(config);
}

uint32_t xpool_config_model_count(const xpool_config_t *config)
{
    return config ? config->config->model_count : 0;
}

const char *xpool_config_model_id(const xpool_config_t *config, uint32_t index)
{
    return index < xpool_config_model_count(config) ? config->config->models[index].id : NULL;
}

static xp_status_t config_model(const xpool_config_t *config, const char *model_id,
                                const config_model_t **model_out)
{
    if (!config || !model_id)
        return xp_fail(XP_INVALID, "no configuration or no model id");
    XP_TRY(library_check_process(config->pid));
    const config_model_t *model = config_model_find(config->config, model_id);
    if (!model)
        return xp_fail(XP_NOT_FOUND, "model %s is not in the configuration (models[].id)",
                       model_id);
    *model_out = model;
    return XP_OK;
}

const char *xpool_config_model_path(const xpool_config_t *config, const char *model_id)
{
    const config_model_t *model;
    return config_model(config, model_id, &model) == XP_OK ? model->path : NULL;
}

/* What is worked out on first use is kept in the object, which callers hold as const. */
static xpool_config_t *config_cache(const xpool_config_t *config)
{
    return (xpool_config_t *)(uintptr_t)config;
}

static xp_status_t config_plan(const xpool_config_t *config, const plan_result_t **planned_out)
{
    xpool_config_t *cache = config_cache(config);
    pthread_mutex_lock(&cache->lock);
    xp_status_t status = cache->planned ? XP_OK : planner_make(cache->config, 1, &cache->planned);
    *planned_out = cache->planned;
    pthread_mutex_unlock(&cache->lock);
    return status;
}

xpool_status_t xpool_config_model_info(const xpool_config_t *config, const char *model_id,
                                       xpool_model_info_t *info_out)
{
    const config_model_t *model;
    const plan_result_t *planned;
    xp_status_t status = config_model(config, model_id, &model);
    if (status == XP_OK && !info_out)
        status = xp_fail(XP_INVALID, "xpool_config_model_info needs info_out");
    xpool_model_info_t info;
    if (status == XP_OK)
        status = library_take_struct(info_out, info_out->struct_bytes,
                                     LIBRARY_BYTES_TO(xpool_model_info_t, kv_tokens),
                                     "xpool_model_info_t", &info, sizeof(info));
    if (status == XP_OK)
        status = config_plan(config, &planned);
    if (status != XP_OK)
        return library_status(status);
    const plan_model_t *plan = &planned->models[model - config->config->models];
    info.hidden = plan->spec.hidden;
    info.layers = plan->spec.layers;
    info.attention_tp = model->attention_tp;
    info.attention_dp = model->attention_dp;
    info.decode_rows = model->decode_rows;
    info.prefill_rows = model->prefill_rows;
    info.max_rows = plan->max_rows;
    info.max_context = plan->max_context;
    info.kv_tokens = plan->kv_tokens;
    info.kv_elastic = plan->kv_elastic;
    snprintf(info.device, sizeof(info.device), "%s", config->config->atn[plan->rank_atn[0]].name);
    info.slo_ttft_ms = model->slo.ttft_ms;
    info.slo_tbt_ms = model->slo.tbt_ms;
    snprintf(info.architecture, sizeof(info.architecture), "%s", plan->spec.architecture_name);
    snprintf(info.engine, sizeof(info.engine), "%s", config_engine_name(model->engine));
    library_give_struct(&info, sizeof(info), info_out, info_out->struct_bytes);
    return XPOOL_OK;
}

static xp_status_t config_spec(const xpool_config_t *config, const config_model_t *model,
                               const model_spec_t **spec_out)
{
    xpool_config_t *cache = config_cache(config);
    model_spec_t **kept = &cache->specs[model - config->config->models];
    xp_status_t status = XP_OK;
    pthread_mutex_lock(&cache->lock);
    if (!*kept) {
        model_spec_t *spec = malloc(sizeof(*spec));
        status = spec ? model_spec_load(model->path, spec)
                      : xp_fail(XP_NO_MEMORY, "no memory for a model spec");
        if (status == XP_OK)
            *kept = spec;
        else
            free(spec);
    }
    *spec_out = *kept;
    pthread_mutex_unlock(&cache->lock);
    return status;
}

int xpool_config_is_ffn_tensor(const xpool_config_t *config, const char *model_id, const char *name)
{
    const config_model_t *model;
    const model_spec_t *spec;
    unsigned layer;
    if (config_model(config, model_id, &model) != XP_OK ||
        config_spec(config, model, &spec) != XP_OK)
        return -1;
    if (!name) {
        (void)xp_fail(XP_INVALID, "xpool_config_is_ffn_tensor needs a name");
        return -1;
    }
    checkpoint_tensor_t tensor = {.name = name};
    if (!checkpoint_tensor_is_ffn(&tensor))
        return 0;
    /* Layers past the model's own (multi-token prediction) are nobody's. */
    return sscanf(name, "model.layers.%u.", &layer) == 1 && layer < spec->layers;
}
