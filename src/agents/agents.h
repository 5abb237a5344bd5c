/* SPDX-License-Identifier: MIT */
/* The programs of the roles. Each runs until its end and returns the process's exit code: 0 after
 * an ordered end, 1 after a failure, 2 for a wrong use, 130 when it was interrupted twice. */
#ifndef XPOOL_AGENTS_AGENTS_H
#define XPOOL_AGENTS_AGENTS_H

#include "config/config.h"

/* Of a process that could not become another program, as shells have it. */
#define AGENTS_EXIT_NOT_EXECUTABLE 126
#define AGENTS_EXIT_NOT_FOUND      127

int atnagent_run(const config_t *config, const char *device);
int ffnagent_run(const config_t *config, const char *device);
/* The same on a GPU; the two above call them. */
int atnagent_cuda_run(const config_t *config, const char *device);
int ffnagent_cuda_run(const config_t *config, const char *device);
int instance_run(const config_t *config, const char *model_id); /* the native engine */
/* Becomes SGLang's server of a configured model: returns only when that fails. `overrides` are the
 * command line's settings, for the processes that SGLang starts. */
int sglang_run(const config_t *config, const config_overrides_t *overrides, const char *model_id);
/* Becomes `command` (NULL-terminated) in the environment of an engine's process; `model_id` may be
 * NULL. Returns only when that fails: 127 not found, 126 not executable. */
int exec_run(const config_t *config, const config_overrides_t *overrides, const char *model_id,
             char *const *command);
int gateway_run(const config_t *config);

/* Starts every role of the configuration as a child of this process, waits for System Ready, and
 * keeps them until Ctrl-C, SIGTERM, `xpool down` or a failure. `program`: what to exec (argv[0]'s
 * own file). `config_arguments`: NULL-terminated, handed to each child. */
int up_run(const config_t *config, const char *program, char *const *config_arguments);
#endif
