/* SPDX-License-Identifier: MIT */
/*
 * Decides what a checkpoint path stands for. Owns nothing, runs in any thread, never opens a
 * weight.
 */
#include "model/source.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Entries looked at in one folder; a folder with more is no checkpoint. */
#define SOURCE_MAX_ENTRIES 100000

static bool source_ends_with(const char *text, const char *suffix)
{
    size_t length = strlen(text), tail = strlen(suffix);
    return length >= tail && strcmp(text + length - tail, suffix) == 0;
}

xp_status_t model_source_join(const char *folder, const char *name, char *out)
{
    size_t length = strlen(folder);
    const char *slash = length && folder[length - 1] == '/' ? "" : "/";
    int written = snprintf(out, MODEL_PATH_MAX, "%s%s%s", folder, slash, name);
    if (written < 0 || written >= MODEL_PATH_MAX)
        return xp_fail(XP_INVALID, "the path %.64s... is longer than %d bytes", folder,
                       MODEL_PATH_MAX - 1);
    return XP_OK;
}

typedef struct source_contents {
    bool config, safetensors, index, other_weights;
    unsigned gguf_files;
    char gguf_name[256];
} source_contents_t;

static xp_status_t source_scan(const char *path, source_contents_t *contents)
{
    DIR *folder = opendir(path);
    if (!folder)
        return xp_fail_errno(XP_IO, "cannot read the folder %s", path);
    const struct dirent *entry;
    for (unsigned seen = 0; seen < SOURCE_MAX_ENTRIES && (entry = readdir(folder)); seen++) {
        const char *name = entry->d_name;
        if (strcmp(name, "config.json") == 0)
            contents->config = true;
        else if (strcmp(name, "model.safetensors") == 0)
            contents->safetensors = true;
        else if (strcmp(name, "model.safetensors.index.json") == 0)
            contents->index = true;
        else if (source_ends_with(name, ".gguf") && name[0] != '.') {
            contents->gguf_files++;
            snprintf(contents->gguf_name, sizeof(contents->gguf_name), "%s", name);
        } else if (strncmp(name, "pytorch_model", 13) == 0 || source_ends_with(name, ".pth")) {
            contents->other_weights = true;
        }
    }
    closedir(folder);
    return XP_OK;
}

xp_status_t model_source_resolve(const char *path, model_source_t *source_out)
{
    model_source_t source = {0};
    struct stat info;
    if (!path || !path[0])
        return xp_fail(XP_INVALID, "the checkpoint path is empty");
    if (strlen(path) >= sizeof(source.path))
        return xp_fail(XP_INVALID, "the path %.64s... is longer than %zu bytes", path,
                       sizeof(source.path) - 1);
    if (stat(path, &info) != 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO,
                             "cannot open the checkpoint %s", path);
    snprintf(source.path, sizeof(source.path), "%s", path);
    if (S_ISREG(info.st_mode)) {
        if (!source_ends_with(path, ".gguf"))
            return xp_fail(XP_INVALID,
                           "%s is a file but no .gguf; give the folder that holds config.json",
                           path);
        source.is_gguf = true;
        *source_out = source;
        return XP_OK;
    }
    if (!S_ISDIR(info.st_mode))
        return xp_fail(XP_INVALID, "%s is neither a folder nor a file", path);

    source_contents_t contents = {0};
    XP_TRY(source_scan(path, &contents));
    bool safetensors = contents.safetensors || contents.index;
    if (!safetensors && contents.gguf_files > 1)
        return xp_fail(XP_INVALID, "%s holds %u .gguf files; name the one to use", path,
                       contents.gguf_files);
    if (!safetensors && contents.gguf_files == 1) {
        XP_TRY(model_source_join(path, contents.gguf_name, source.path));
        source.is_gguf = true;
    } else if (!contents.config) {
        return xp_fail(XP_NOT_FOUND,
                       "%s holds neither config.json nor a .gguf file, so it is no checkpoint",
                       path);
    } else if (!safetensors && contents.other_weights) {
        return xp_fail(XP_UNSUPPORTED,
                       "%s holds PyTorch weights (.bin, .pth) but no model.safetensors; convert "
                       "them to safetensors",
                       path);
    }
    *source_out = source;
    return XP_OK;
}
