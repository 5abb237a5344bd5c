/* SPDX-License-Identifier: MIT */
/* What follows from models[].engine: its name, and the interpreter of an SGLang Instance. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "config/resolve.h"

const char *config_engine_name(config_engine_t engine)
{
    return engine == CONFIG_ENGINE_SGLANG ? "sglang" : "native";
}

void config_model_python(const config_t *config, const config_model_t *model, char *out,
                         size_t size)
{
    const config_setting_t *setting = config_setting_find("models[].python");
    bool given = !config->record ||
                 config_setting_slot(config, setting, (uint32_t)(model - config->models))->state ==
                     CONFIG_SLOT_SET;
    const char *environment = getenv("XPOOL_PYTHON");
    snprintf(out, size, "%s", model->python);
    if (given)
        return;
    if (environment && environment[0]) {
        snprintf(out, size, "%s", environment);
        return;
    }
    char path[CONFIG_MAX_PATH + 32];
    snprintf(path, sizeof(path), "%s/venv-test/bin/python", config->cache_root);
    if (access(path, X_OK) == 0)
        snprintf(out, size, "%s", path);
}
