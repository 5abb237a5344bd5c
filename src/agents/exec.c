/* SPDX-License-Identifier: MIT */
/*
 * `xpool exec`: becomes another program, in the environment of CrossPool. Same process, group,
 * descriptors and signals; the program's words are handed on as they are, its exit code is ours.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "agents/agents.h"
#include "agents/environment.h"
#include "base/log.h"

int exec_run(const config_t *config, const config_overrides_t *overrides, const char *model_id,
             char *const *command)
{
    const config_model_t *model = NULL;
    if (model_id) {
        const char *path;
        if (config_model_path_of(config, model_id, &path) != XP_OK) {
            xp_log_error("--model");
            return 2;
        }
        model = config_model_find(config, model_id);
    } else if (config->model_count == 1) {
        model = &config->models[0];
    }
    if (environment_prepare(config, overrides, model) != XP_OK) {
        xp_log_error("cannot prepare the environment");
        return 1;
    }
    execvp(command[0], command);
    int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
        xp_log_err("cannot start %s: %s", command[0],
                   strchr(command[0], '/') ? strerror(error) : "no program of this name in PATH");
        return AGENTS_EXIT_NOT_FOUND;
    }
    xp_log_err("cannot start %s: %s", command[0], strerror(error));
    return AGENTS_EXIT_NOT_EXECUTABLE;
}
