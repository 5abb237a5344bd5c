/* SPDX-License-Identifier: MIT */
/* Failpoints armed from the environment, once. A text that cannot be read arms nothing and is said
 * on the log. */
#include "base/failpoint.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"

#define POINTS_MAX 16

typedef struct point {
    char name[48];
    uint32_t sleep_ms; /* 0: kill */
    uint32_t at;       /* 0: at each passage */
    uint32_t passed;
} point_t;

int xp_failpoint_armed = -1;
static point_t points[POINTS_MAX];
static uint32_t point_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool read_point(const char *text, point_t *point_out)
{
    point_t point = {0};
    char action[16];
    int used = 0, more = 0;
    if (sscanf(text, "%47[^=]=%15[a-z]%n", point.name, action, &used) != 2)
        return false;
    text += used;
    if (strcmp(action, "sleep") == 0) {
        if (sscanf(text, ":%u%n", &point.sleep_ms, &more) != 1 || point.sleep_ms == 0)
            return false;
        text += more;
    } else if (strcmp(action, "kill") != 0) {
        return false;
    }
    more = 0;
    if (*text == '@' && (sscanf(text, "@%u%n", &point.at, &more) != 1 || point.at == 0))
        return false;
    text += more;
    *point_out = point;
    return *text == '\0';
}

static void arm(void)
{
    const char *given = getenv("XPOOL_FAILPOINTS");
    char copy[1024], *rest = NULL;
    snprintf(copy, sizeof(copy), "%s", given ? given : "");
    for (char *text = strtok_r(copy, ",", &rest); text; text = strtok_r(NULL, ",", &rest)) {
        if (point_count < POINTS_MAX && read_point(text, &points[point_count]))
            point_count++;
        else
            xp_log_err("XPOOL_FAILPOINTS: \"%s\" is not NAME=kill or NAME=sleep:MILLISECONDS, with "
                       "@N or without",
                       text);
    }
    __atomic_store_n(&xp_failpoint_armed, point_count ? 1 : 0, __ATOMIC_RELEASE);
}

void xp_failpoint_pass(const char *name)
{
    pthread_once(&once, arm);
    for (uint32_t i = 0; i < point_count; i++) {
        point_t *point = &points[i];
        if (strcmp(point->name, name) != 0)
            continue;
        uint32_t passed = __atomic_add_fetch(&point->passed, 1, __ATOMIC_RELAXED);
        if (point->at && passed != point->at)
            continue;
        if (point->sleep_ms == 0) {
            raise(SIGKILL);
        } else {
            struct timespec time = {.tv_sec = point->sleep_ms / 1000,
                                    .tv_nsec = (long)(point->sleep_ms % 1000) * 1000000};
            nanosleep(&time, NULL);
        }
    }
}
