/* SPDX-License-Identifier: MIT */
/* The digest of a checkpoint's identity. Owns nothing past a call; runs in any thread. */
#include "model/digest.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/source.h"

#define DIGEST_HEAD_BYTES   (1u << 20)
#define DIGEST_PIECES       64
#define DIGEST_PIECE_BYTES  4096
#define DIGEST_MAX_FILES    1024
#define DIGEST_MAX_ENTRIES  100000
#define DIGEST_MAX_CONFIG   (16u << 20)
#define DIGEST_BUFFER_BYTES (1u << 16)

static xp_status_t digest_add(EVP_MD_CTX *context, const void *bytes, size_t length)
{
    if (EVP_DigestUpdate(context, bytes, length) != 1)
        return xp_fail(XP_NO_MEMORY, "libcrypto cannot compute SHA-256");
    return XP_OK;
}

static xp_status_t digest_range(EVP_MD_CTX *context, int fd, const char *path, uint64_t offset,
                                uint64_t bytes)
{
    char buffer[DIGEST_BUFFER_BYTES];
    while (bytes > 0) {
        size_t piece = bytes < sizeof(buffer) ? (size_t)bytes : sizeof(buffer);
        ssize_t got = pread(fd, buffer, piece, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return xp_fail_errno(XP_IO, "cannot read %s", path);
        if (got == 0)
            return xp_fail(XP_INVALID, "%s became shorter while it was read", path);
        XP_TRY(digest_add(context, buffer, (size_t)got));
        offset += (uint64_t)got;
        bytes -= (uint64_t)got;
    }
    return XP_OK;
}

/* `whole`: every byte, for files whose every byte counts. */
static xp_status_t digest_file(EVP_MD_CTX *context, const char *path, bool whole)
{
    struct stat info;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return xp_fail_errno(errno == ENOENT ? XP_NOT_FOUND : XP_IO, "cannot open %s", path);
    xp_status_t status;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        status = xp_fail(XP_INVALID, "%s is no regular file", path);
        goto done;
    }
    uint64_t bytes = (uint64_t)info.st_size;
    if (whole && bytes > DIGEST_MAX_CONFIG) {
        status = xp_fail(XP_INVALID, "%s is larger than %u bytes", path, DIGEST_MAX_CONFIG);
        goto done;
    }
    char head[512];
    int length =
        snprintf(head, sizeof(head), "%.255s %llu\n", name, (unsigned long long)info.st_size);
    XP_TRY_GOTO(status, done, digest_add(context, head, (size_t)length));
    uint64_t first = whole || bytes < DIGEST_HEAD_BYTES ? bytes : DIGEST_HEAD_BYTES;
    XP_TRY_GOTO(status, done, digest_range(context, fd, path, 0, first));
    uint64_t rest = bytes - first;
    if (rest <= (uint64_t)DIGEST_PIECES * DIGEST_PIECE_BYTES) {
        status = digest_range(context, fd, path, first, rest);
        goto done;
    }
    for (uint64_t i = 0; i < DIGEST_PIECES && status == XP_OK; i++)
        status = digest_range(context, fd, path,
                              first + (rest - DIGEST_PIECE_BYTES) / (DIGEST_PIECES - 1) * i,
                              DIGEST_PIECE_BYTES);
done:
    close(fd);
    return status;
}

static int digest_compare_names(const void *left, const void *right)
{
    return strcmp(*(char *const *)left, *(char *const *)right);
}

/* The folder's safetensors files, sorted; each is malloc'd. */
static xp_status_t digest_list(const char *folder, char **names, uint32_t *count_out)
{
    DIR *directory = opendir(folder);
    if (!directory)
        return xp_fail_errno(XP_IO, "cannot read the folder %s", folder);
    xp_status_t status = XP_OK;
    const struct dirent *entry;
    uint32_t count = 0;
    for (uint32_t seen = 0; seen < DIGEST_MAX_ENTRIES && (entry = readdir(directory)); seen++) {
        static const char suffix[] = ".safetensors";
        size_t length = strlen(entry->d_name), tail = sizeof(suffix) - 1;
        if (entry->d_name[0] == '.' || length <= tail ||
            strcmp(entry->d_name + length - tail, suffix) != 0)
            continue;
        if (count == DIGEST_MAX_FILES) {
            status = xp_fail(XP_INVALID, "%s holds more than %d safetensors files", folder,
                             DIGEST_MAX_FILES);
            break;
        }
        names[count] = strdup(entry->d_name);
        if (!names[count]) {
            status = xp_fail(XP_NO_MEMORY, "no memory for the files of %s", folder);
            break;
        }
        count++;
    }
    closedir(directory);
    *count_out = count;
    qsort(names, count, sizeof(*names), digest_compare_names);
    return status;
}

static xp_status_t digest_folder(EVP_MD_CTX *context, const char *folder)
{
    uint32_t count = 0;
    char **names = calloc(DIGEST_MAX_FILES, sizeof(*names));
    char *path = malloc(MODEL_PATH_MAX);
    xp_status_t status;
    if (!names || !path) {
        status = xp_fail(XP_NO_MEMORY, "no memory for the files of %s", folder);
        goto done;
    }
    XP_TRY_GOTO(status, done, model_source_join(folder, "config.json", path));
    XP_TRY_GOTO(status, done, digest_file(context, path, true));
    XP_TRY_GOTO(status, done, digest_list(folder, names, &count));
    for (uint32_t i = 0; i < count && status == XP_OK; i++) {
        status = model_source_join(folder, names[i], path);
        if (status == XP_OK)
            status = digest_file(context, path, false);
    }
done:
    for (uint32_t i = 0; i < count; i++)
        free(names[i]);
    free(names);
    free(path);
    return status;
}

xp_status_t model_checkpoint_digest(const char *path, uint8_t digest_out[MODEL_DIGEST_BYTES])
{
    xp_status_t status;
    unsigned char digest[EVP_MAX_MD_SIZE];
    model_source_t *source = calloc(1, sizeof(*source));
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    if (!source || !context || EVP_DigestInit_ex(context, EVP_sha256(), NULL) != 1) {
        status = xp_fail(XP_NO_MEMORY, "no memory for the digest of %s", path);
        goto done;
    }
    XP_TRY_GOTO(status, done, model_source_resolve(path, source));
    XP_TRY_GOTO(status, done,
                source->is_gguf ? digest_file(context, source->path, false)
                                : digest_folder(context, source->path));
    if (EVP_DigestFinal_ex(context, digest, NULL) != 1) {
        status = xp_fail(XP_NO_MEMORY, "libcrypto cannot compute SHA-256");
        goto done;
    }
    memcpy(digest_out, digest, MODEL_DIGEST_BYTES);
done:
    EVP_MD_CTX_free(context);
    free(source);
    return status;
}

static uint64_t stamp_add(uint64_t stamp, uint64_t value)
{
    uint64_t mixed = (stamp + value) * 0x9e3779b97f4a7c15u;
    return (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9u;
}

static uint64_t stamp_of_file(uint64_t stamp, const struct stat *info)
{
    stamp = stamp_add(stamp, (uint64_t)info->st_ino);
    stamp = stamp_add(stamp, (uint64_t)info->st_size);
    stamp = stamp_add(stamp, (uint64_t)info->st_mtim.tv_sec);
    return stamp_add(stamp, (uint64_t)info->st_mtim.tv_nsec);
}

uint64_t model_checkpoint_stamp(const char *path)
{
    uint64_t sum = 0;
    struct stat info;
    const struct dirent *entry;
    DIR *folder = opendir(path);
    if (!folder)
        return stat(path, &info) == 0 ? stamp_of_file(0, &info) : 0;
    /* A sum: a folder lists its files in any order. */
    for (uint32_t seen = 0; seen < DIGEST_MAX_ENTRIES && (entry = readdir(folder)); seen++) {
        uint64_t name = 0;
        for (const char *c = entry->d_name; *c; c++)
            name = stamp_add(name, (uint8_t)*c);
        if (fstatat(dirfd(folder), entry->d_name, &info, 0) == 0 && S_ISREG(info.st_mode))
            sum += stamp_of_file(name, &info);
    }
    closedir(folder);
    return sum;
}
