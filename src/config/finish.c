/* SPDX-License-Identifier: MIT */
/*
 * After every source was read: alias spellings, defaults, values worked out from other values or
 * from the machine, and the checks that need several settings. Runs on the loading thread; looks at
 * the file system only to see that checkpoints exist.
 */
#include "config/resolve.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pool.h"

#define MEMORY_SHARE    0.8
#define MEMORY_UNIT     (1024ull * 1024)
#define MEMORY_FALLBACK (1024 * MEMORY_UNIT) /* where /proc tells nothing */
#define MAX_THREADS     256
#define MAX_STEP_ROWS   8192 /* of one Transport request */
#define MAX_RANKS       8    /* attention TP x DP of one Instance */

static config_slot_t *slot_of(config_slot_t *slots, const char *key)
{
    const config_setting_t *setting = config_setting_find(key);
    XP_ASSERT(setting != NULL);
    return &slots[config_setting_index(setting)];
}

static bool usable(const config_slot_t *slot)
{
    return slot->state != CONFIG_SLOT_FAILED && slot->state != CONFIG_SLOT_UNSET;
}

static void join_aliases(config_resolver_t *resolver)
{
    config_slot_t *root = resolver->record->root;
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *alias = &config_settings[i];
        if (!alias->alias_of || root[i].state == CONFIG_SLOT_UNSET)
            continue;
        config_slot_t *target = slot_of(root, alias->alias_of);
        if (target->state == CONFIG_SLOT_UNSET) {
            *target = root[i];
            continue;
        }
        char where[CONFIG_MAX_PATH + 64];
        config_origin_format(target->node->origin, target->node->line, target->node->column, where,
                             sizeof(where));
        config_issue_add(&resolver->issues, root[i].node, true,
                         "%s: %s means the same and is set too (%s); keep one", alias->key,
                         alias->alias_of, where);
        target->state = CONFIG_SLOT_FAILED;
    }
}

static void apply_defaults(config_resolver_t *resolver, config_scope_t scope, void *base,
                           config_slot_t *slots, const char *shown_prefix)
{
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        if (setting->scope != scope || slots[i].state != CONFIG_SLOT_UNSET ||
            !setting->default_text || setting->alias_of)
            continue;
        const config_node_t *node = config_node_from_text(
            &resolver->record->arena, setting->default_text, &resolver->default_origin);
        if (!node) {
            resolver->out_of_memory = true;
            return;
        }
        char shown[CONFIG_MAX_KEY];
        snprintf(shown, sizeof(shown), "%s%s", shown_prefix,
                 setting->key + (scope == CONFIG_SCOPE_MODEL ? strlen("models[]") : 0));
        slots[i].origin = "default";
        if (!config_value_read(resolver, setting, node, shown, base))
            slots[i].state = CONFIG_SLOT_FAILED;
        else if (setting->type == CONFIG_TYPE_PATH && setting->default_text[0])
            slots[i].state = CONFIG_SLOT_DERIVED; /* depends on the current folder */
        else
            slots[i].state = CONFIG_SLOT_DEFAULT;
    }
}

static void default_socket(config_resolver_t *resolver)
{
    config_t *config = resolver->config;
    config_slot_t *slot = slot_of(resolver->record->root, "daemon.socket");
    if (slot->state != CONFIG_SLOT_UNSET)
        return;
    slot->state = CONFIG_SLOT_DEFAULT;
    slot->origin = "default";
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    struct stat info;
    if (runtime && runtime[0] == '/' && stat(runtime, &info) == 0 && S_ISDIR(info.st_mode)) {
        int length = snprintf(config->daemon.socket, sizeof(config->daemon.socket),
                              "%s/xpool/daemon.sock", runtime);
        if (length < (int)sizeof(config->daemon.socket))
            return;
    }
    snprintf(config->daemon.socket, sizeof(config->daemon.socket), "/tmp/xpool-%u/daemon.sock",
             (unsigned)getuid());
}

/* ---- models ------------------------------------------------------------------------------------
 */

static void inherit_slo(config_resolver_t *resolver, config_slot_t *slots, const char *key,
                        const char *from_key, double from, double *value)
{
    config_slot_t *slot = slot_of(slots, key);
    const config_slot_t *source = slot_of(resolver->record->root, from_key);
    if (slot->state != CONFIG_SLOT_UNSET)
        return;
    slot->state = source->state;
    slot->origin = source->origin;
    *value = from;
}

static void finish_path(config_resolver_t *resolver, uint32_t index)
{
    config_t *config = resolver->config;
    config_model_t *model = &config->models[index];
    config_slot_t *slots = resolver->record->models[index];
    config_slot_t *path = slot_of(slots, "models[].path"), *id = slot_of(slots, "models[].id");
    const config_slot_t *root = slot_of(resolver->record->root, "vendor.model_base_uri");
    if (path->state == CONFIG_SLOT_UNSET) {
        if (!usable(id) || !usable(root))
            return;
        if (!config->model_base_uri[0]) {
            path->state = CONFIG_SLOT_FAILED;
            config_issue_add(&resolver->issues, id->node, false,
                             "models[%u].path: not set, and vendor.model_base_uri is empty", index);
            return;
        }
        char path_text[2 * CONFIG_MAX_PATH];
        const char *base = config->model_base_uri;
        int length = snprintf(path_text, sizeof(path_text), "%s%s%s", base,
                              base[strlen(base) - 1] == '/' ? "" : "/", model->id);
        if (length >= (int)sizeof(model->path)) {
            path->state = CONFIG_SLOT_FAILED;
            config_issue_add(&resolver->issues, id->node, false,
                             "models[%u].path: longer than %zu bytes", index,
                             sizeof(model->path) - 1);
            return;
        }
        memcpy(model->path, path_text, (size_t)length + 1);
        path->state = CONFIG_SLOT_DEFAULT;
        path->origin = root->origin;
    }
    struct stat info;
    if (usable(path) && !resolver->running && stat(model->path, &info) != 0) {
        const config_node_t *node = path->node ? path->node : id->node;
        config_issue_add(&resolver->issues, node, false, "models[%u].path: %.300s: %s", index,
                         model->path, strerror(errno));
        path->state = CONFIG_SLOT_FAILED;
    }
}

static void check_model_alone(config_resolver_t *resolver, uint32_t index)
{
    const config_t *config = resolver->config;
    const config_model_t *model = &config->models[index];
    config_slot_t *slots = resolver->record->models[index], *root = resolver->record->root;
    const config_slot_t *tp = slot_of(slots, "models[].attention_tp");
    const config_slot_t *dp = slot_of(slots, "models[].attention_dp");
    const config_slot_t *ffn_tp = slot_of(slots, "models[].ffn_tp_size");
    const config_slot_t *decode = slot_of(slots, "models[].decode_rows");
    const config_slot_t *prefill = slot_of(slots, "models[].prefill_rows");
    const config_slot_t *floor = slot_of(slots, "models[].kv_floor_tokens");
    const config_slot_t *ceiling = slot_of(slots, "models[].kv_ceiling_tokens");
    if (usable(tp) && usable(dp)) {
        uint32_t ranks = model->attention_tp * model->attention_dp;
        const config_node_t *node = tp->node ? tp->node : dp->node;
        if (ranks > MAX_RANKS)
            config_issue_add(&resolver->issues, node, false,
                             "models[%u].attention_tp: attention_tp x attention_dp is %u, allowed: "
                             "at most %d",
                             index, ranks, MAX_RANKS);
        else if (usable(slot_of(root, "atn.devices")) && ranks > config->atn_count)
            config_issue_add(&resolver->issues, node, false,
                             "models[%u].attention_tp: attention_tp x attention_dp is %u, but "
                             "atn.devices has %u",
                             index, ranks, config->atn_count);
    }
    if (usable(ffn_tp) && usable(slot_of(root, "ffn.devices")) &&
        model->ffn_tp_size > config->ffn_count)
        config_issue_add(&resolver->issues, ffn_tp->node, false,
                         "models[%u].ffn_tp_size: found %u, but ffn.devices has %u", index,
                         model->ffn_tp_size, config->ffn_count);
    if (usable(decode) && usable(prefill) &&
        model->decode_rows + model->prefill_rows > MAX_STEP_ROWS)
        config_issue_add(&resolver->issues, prefill->node ? prefill->node : decode->node, false,
                         "models[%u].prefill_rows: decode_rows + prefill_rows is %u, allowed: at "
                         "most %d",
                         index, model->decode_rows + model->prefill_rows, MAX_STEP_ROWS);
    if (usable(floor) && usable(ceiling) && model->kv_ceiling_tokens &&
        model->kv_floor_tokens > model->kv_ceiling_tokens)
        config_issue_add(&resolver->issues, floor->node, false,
                         "models[%u].kv_floor_tokens: %u is above kv_ceiling_tokens, %u", index,
                         model->kv_floor_tokens, model->kv_ceiling_tokens);
}

/* Ids and ports are unique; the second one is the mistake. */
static void check_model_others(config_resolver_t *resolver, uint32_t index)
{
    const config_model_t *model = &resolver->config->models[index];
    config_slot_t *slots = resolver->record->models[index];
    const config_slot_t *id = slot_of(slots, "models[].id");
    const config_slot_t *port = slot_of(slots, "models[].port");
    bool id_reported = false, port_reported = false;
    if (usable(id) && model->id[0] == '-')
        config_issue_add(&resolver->issues, id->node, false,
                         "models[%u].id: \"%s\" begins with '-' and would be taken for an option",
                         index, model->id);
    for (uint32_t i = 0; i < index; i++) {
        const config_model_t *other = &resolver->config->models[i];
        if (!id_reported && usable(id) && strcmp(model->id, other->id) == 0) {
            id_reported = true;
            const config_slot_t *first = slot_of(resolver->record->models[i], "models[].id");
            config_issue_add(&resolver->issues, id->node, false,
                             "models[%u].id: \"%s\" is the id of models[%u] too (%.200s)", index,
                             model->id, i, first->origin ? first->origin : "?");
        }
        if (!port_reported && usable(port) && model->port && model->port == other->port) {
            port_reported = true;
            config_issue_add(&resolver->issues, port->node, false,
                             "models[%u].port: %u is the port of models[%u] too", index,
                             model->port, i);
        }
    }
}

static void finish_models(config_resolver_t *resolver)
{
    config_t *config = resolver->config;
    for (uint32_t i = 0; i < config->model_count; i++) {
        config_model_t *model = &config->models[i];
        config_slot_t *slots = resolver->record->models[i], *id = slot_of(slots, "models[].id");
        char prefix[32];
        snprintf(prefix, sizeof(prefix), "models[%u]", i);
        if (id->state == CONFIG_SLOT_UNSET) {
            config_issue_add(&resolver->issues, resolver->model_nodes[i], true,
                             "models[%u].id: not set, every model needs one", i);
            id->state = CONFIG_SLOT_FAILED;
        }
        apply_defaults(resolver, CONFIG_SCOPE_MODEL, model, slots, prefix);
        inherit_slo(resolver, slots, "models[].slo.ttft_ms", "scheduler.slo.ttft_ms",
                    config->scheduler.slo.ttft_ms, &model->slo.ttft_ms);
        inherit_slo(resolver, slots, "models[].slo.tbt_ms", "scheduler.slo.tbt_ms",
                    config->scheduler.slo.tbt_ms, &model->slo.tbt_ms);
        finish_path(resolver, i);
        check_model_alone(resolver, i);
        check_model_others(resolver, i);
    }
    if (config->model_count == 0)
        config_warn(resolver, "no models are configured; name a file with --config or "
                              "XPOOL_CONFIG, and list [[models]] in it");
}

/* ---- devices -----------------------------------------------------------------------------------
 */

static void check_roles(config_resolver_t *resolver)
{
    const config_t *config = resolver->config;
    config_slot_t *root = resolver->record->root;
    const config_slot_t *atn = slot_of(root, "atn.devices"), *ffn = slot_of(root, "ffn.devices");
    if (!usable(atn) || !usable(ffn) || config->allow_shared_roles ||
        slot_of(root, "devices.allow_shared_roles")->state == CONFIG_SLOT_FAILED)
        return;
    for (uint32_t i = 0; i < config->ffn_count; i++) {
        for (uint32_t j = 0; j < config->atn_count; j++) {
            if (strcmp(config->ffn[i].name, config->atn[j].name) != 0)
                continue;
            const config_node_t *node = ffn->node ? ffn->node : atn->node;
            config_issue_add(
                &resolver->issues, node, false,
                "ffn.devices: %s is in atn.devices too (%.200s); a device has one role "
                "unless devices.allow_shared_roles is true",
                config->ffn[i].name, atn->origin);
        }
    }
}

static const config_device_table_t *find_table(const config_resolver_t *resolver, const char *name)
{
    for (uint32_t i = 0; i < resolver->device_table_count; i++)
        if (strcmp(resolver->device_tables[i].values.name, name) == 0)
            return &resolver->device_tables[i];
    return NULL;
}

static void warn_unusable_cpus(config_resolver_t *resolver, const config_device_t *device)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return;
    for (uint32_t i = 0; i < device->cpu_count; i++) {
        if (device->cpus[i] < CPU_SETSIZE && CPU_ISSET(device->cpus[i], &allowed))
            continue;
        config_warn(resolver, "devices.\"%s\".cpus: this process may not run on CPU %u",
                    device->name, device->cpus[i]);
        return;
    }
}

static void finish_device(config_resolver_t *resolver, config_device_t *device,
                          config_slot_t *slots, uint64_t memory_share)
{
    const config_device_table_t *table = find_table(resolver, device->name);
    if (table) {
        *device = table->values;
        memcpy(slots, table->slots, sizeof(table->slots));
    }
    if (device->kind == CONFIG_DEVICE_CUDA) {
        /* 0: whoever plans asks the driver, in a process of its own. */
        config_slot_t *memory = slot_of(slots, "devices.\"cuda:N\".memory");
        if (memory->state == CONFIG_SLOT_UNSET) {
            memory->state = CONFIG_SLOT_DERIVED;
            memory->origin = "default";
        }
        return;
    }
    config_slot_t *threads = slot_of(slots, "devices.\"cpu:N\".threads");
    config_slot_t *memory = slot_of(slots, "devices.\"cpu:N\".memory");
    config_slot_t *cpus = slot_of(slots, "devices.\"cpu:N\".cpus");
    if (cpus->state == CONFIG_SLOT_UNSET) {
        cpus->state = CONFIG_SLOT_DEFAULT;
        cpus->origin = "default";
    } else if (usable(cpus)) {
        warn_unusable_cpus(resolver, device);
    }
    if (threads->state == CONFIG_SLOT_UNSET) {
        uint32_t cores = device->cpu_count ? device->cpu_count : xp_usable_cpus();
        device->threads = cores < MAX_THREADS ? cores : MAX_THREADS;
        threads->state = device->cpu_count ? CONFIG_SLOT_DEFAULT : CONFIG_SLOT_DERIVED;
        threads->origin = device->cpu_count ? cpus->origin : "default";
    }
    if (memory->state == CONFIG_SLOT_UNSET) {
        device->memory_bytes = memory_share;
        memory->state = CONFIG_SLOT_DERIVED;
        memory->origin = "default";
    }
}

static bool listed(const config_t *config, const char *name)
{
    return config_device_find(config, false, name, NULL) ||
           config_device_find(config, true, name, NULL);
}

static void finish_devices(config_resolver_t *resolver)
{
    config_t *config = resolver->config;
    struct config_record *record = resolver->record;
    uint32_t cpu_devices = 0;
    check_roles(resolver);
    for (uint32_t side = 0; side < 2; side++) {
        const config_device_t *devices = side ? config->ffn : config->atn;
        for (uint32_t i = 0; i < (side ? config->ffn_count : config->atn_count); i++)
            if (!side || !config_device_find(config, false, devices[i].name, NULL))
                cpu_devices += devices[i].kind == CONFIG_DEVICE_CPU;
    }
    uint64_t memory = config_machine_memory("/proc", "/sys/fs/cgroup");
    uint64_t share = cpu_devices ? (uint64_t)((double)memory * MEMORY_SHARE / cpu_devices) : 0;
    share = memory ? share / MEMORY_UNIT * MEMORY_UNIT : MEMORY_FALLBACK;
    if (share < MEMORY_UNIT)
        share = MEMORY_UNIT;
    for (uint32_t side = 0; side < 2; side++) {
        config_device_t *devices = side ? config->ffn : config->atn;
        for (uint32_t i = 0; i < (side ? config->ffn_count : config->atn_count); i++) {
            config_device_t *device = &devices[i];
            const config_device_t *twin =
                side ? config_device_find(config, false, device->name, NULL) : NULL;
            if (twin) {
                *device = *twin;
                continue;
            }
            uint32_t index = record->device_count++;
            record->devices[index] = device;
            finish_device(resolver, device, record->device_slots[index], share);
        }
    }
    for (uint32_t i = 0; i < resolver->device_table_count; i++) {
        const config_device_table_t *table = &resolver->device_tables[i];
        char where[CONFIG_MAX_PATH + 64];
        if (listed(config, table->values.name))
            continue;
        config_origin_format(table->node->origin, table->node->key_line, table->node->key_column,
                             where, sizeof(where));
        config_warn(resolver, "%.200s: devices.\"%s\" is in neither atn.devices nor ffn.devices",
                    where, table->values.name);
    }
}

/* The port of "HOST:PORT", 0 when it is any. */
static uint32_t port_of(const char *address)
{
    const char *colon = strrchr(address, ':');
    return colon ? (uint32_t)strtoul(colon + 1, NULL, 10) : 0;
}

/* An Instance listens on the loopback address, where the two others do as well or on every one. */
static void check_model_ports(config_resolver_t *resolver)
{
    const config_t *config = resolver->config;
    const struct {
        const char *key, *address;
    } others[] = {{"daemon.http", config->daemon.http}, {"gateway.http", config->gateway.http}};
    for (uint32_t i = 0; i < config->model_count; i++) {
        const config_slot_t *port = slot_of(resolver->record->models[i], "models[].port");
        for (uint32_t k = 0; k < sizeof(others) / sizeof(others[0]); k++)
            if (usable(port) && config->models[i].port &&
                config->models[i].port == port_of(others[k].address))
                config_issue_add(&resolver->issues, port->node, false,
                                 "models[%u].port: %u is the port of %s too", i,
                                 config->models[i].port, others[k].key);
    }
}

static void check_addresses(config_resolver_t *resolver)
{
    const config_t *config = resolver->config;
    config_slot_t *root = resolver->record->root;
    const config_slot_t *daemon = slot_of(root, "daemon.http");
    const config_slot_t *gateway = slot_of(root, "gateway.http");
    const char *port = strrchr(config->gateway.http, ':');
    if (usable(daemon) && usable(gateway) &&
        strcmp(config->daemon.http, config->gateway.http) == 0 && port && atoi(port + 1) != 0)
        config_issue_add(&resolver->issues, gateway->node ? gateway->node : daemon->node, false,
                         "gateway.http: %s is daemon.http too", config->gateway.http);
    check_model_ports(resolver);
}

void config_finish(config_resolver_t *resolver)
{
    join_aliases(resolver);
    apply_defaults(resolver, CONFIG_SCOPE_ROOT, resolver->config, resolver->record->root, "");
    default_socket(resolver);
    finish_models(resolver);
    finish_devices(resolver);
    check_addresses(resolver);
    const config_slot_t *calibration =
        slot_of(resolver->record->root, "ffn.device_memory_calibration");
    if (calibration->state == CONFIG_SLOT_SET && resolver->config->ffn_calibration[0] &&
        access(resolver->config->ffn_calibration, R_OK) != 0)
        config_issue_add(&resolver->issues, calibration->node, false,
                         "ffn.device_memory_calibration: %.300s: %s",
                         resolver->config->ffn_calibration, strerror(errno));
}
