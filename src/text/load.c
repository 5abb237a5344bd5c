/* SPDX-License-Identifier: MIT */
/* Finding a tokenizer on disk. Runs on the loading thread; keeps no file open. */
#include "text/locate.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "text/internal.h"

#define LOCATE_MAX_ENTRIES 100000

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

bool text_path_exists(const char *folder, const char *name, char path_out[TEXT_MAX_PATH])
{
    struct stat info;
    int length = snprintf(path_out, TEXT_MAX_PATH, "%s/%s", folder, name);
    return length > 0 && length < TEXT_MAX_PATH && stat(path_out, &info) == 0 &&
           S_ISREG(info.st_mode);
}

static xp_status_t find_gguf(const char *folder, char path_out[TEXT_MAX_PATH], bool *found_out)
{
    xp_status_t status = XP_OK;
    char first[256] = "";
    DIR *directory = opendir(folder);
    if (!directory)
        return xp_fail_errno(XP_IO, "cannot read folder %s", folder);
    for (int i = 0; i < LOCATE_MAX_ENTRIES; i++) {
        const struct dirent *entry = readdir(directory);
        if (!entry)
            break;
        if (!ends_with(entry->d_name, ".gguf"))
            continue;
        if (first[0]) {
            status = xp_fail(XP_INVALID, "%s holds more than one .gguf (%s, %s): name the file",
                             folder, first, entry->d_name);
            goto done;
        }
        snprintf(first, sizeof(first), "%s", entry->d_name);
    }
    *found_out = first[0] && text_path_exists(folder, first, path_out);
done:
    closedir(directory);
    return status;
}

xp_status_t text_locate(const char *path, text_location_t *location_out)
{
    text_location_t location = {.kind = TEXT_FOLDER};
    struct stat info;
    if (strlen(path) >= TEXT_MAX_PATH - 64)
        return xp_fail(XP_INVALID, "the path is too long: %.100s...", path);
    if (stat(path, &info) != 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO, "cannot open %s", path);
    snprintf(location.path, sizeof(location.path), "%s", path);
    if (!S_ISDIR(info.st_mode)) {
        char magic[4] = "";
        FILE *file = fopen(path, "rb");
        if (!file)
            return xp_fail_errno(XP_IO, "cannot open %s", path);
        size_t got = fread(magic, 1, 4, file);
        fclose(file);
        location.kind = got == 4 && !memcmp(magic, "GGUF", 4) ? TEXT_GGUF : TEXT_FILE;
        *location_out = location;
        return XP_OK;
    }
    bool found = false;
    char gguf[TEXT_MAX_PATH], name[TEXT_MAX_PATH];
    if (!text_path_exists(path, "tokenizer.json", name)) {
        XP_TRY(find_gguf(path, gguf, &found));
        if (found) {
            location.kind = TEXT_GGUF;
            memcpy(location.path, gguf, sizeof(gguf));
        }
    }
    *location_out = location;
    return XP_OK;
}

static xp_status_t load_file(const char *path, tokenizer_t **tokenizer_out)
{
    char *json;
    size_t length;
    XP_TRY(xp_file_read(path, TEXT_MAX_FILE_BYTES, &json, &length));
    xp_status_t status = tokenizer_parse_json(json, length, path, tokenizer_out);
    free(json);
    return status;
}

xp_status_t tokenizer_load(const char *path, tokenizer_t **tokenizer_out)
{
    text_location_t location;
    char name[TEXT_MAX_PATH];
    XP_TRY(text_locate(path, &location));
    if (location.kind == TEXT_GGUF)
        return tokenizer_load_gguf(location.path, tokenizer_out);
    if (location.kind == TEXT_FILE)
        return load_file(location.path, tokenizer_out);
    if (!text_path_exists(location.path, "tokenizer.json", name))
        return xp_fail(XP_NOT_FOUND, "%s holds neither a tokenizer.json nor a .gguf", path);
    return load_file(name, tokenizer_out);
}
