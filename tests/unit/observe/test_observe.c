/* SPDX-License-Identifier: MIT */
/* The ring of an observer: what is written is read in order, an overwritten or half-written record
 * never is, a killed writer's file stays readable, and nonsense in a file is an error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "observe/observe.h"

static char folder[64], below[96];

static int setup(void **state)
{
    strcpy(folder, "/tmp/xpool-observe-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(below, sizeof(below), "%s/a/b", folder);
    return 0;
}

static int teardown(void **state)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command);
}

static void path_of(char out[160], const char *role_and_name, pid_t pid)
{
    snprintf(out, 160, "%s/%s-%d.observe", below, role_and_name, (int)pid);
}

static observe_record_t record_of(uint64_t number)
{
    return (observe_record_t){.end_ns = number,
                              .duration_ns = number,
                              .sequence = number,
                              .layer = (uint32_t)number,
                              .rows = (uint32_t)number,
                              .instance = 2};
}

static void test_off(void **state)
{
    observe_t *observe = (observe_t *)state;
    assert_int_equal(observe_open("", OBSERVE_RANK, "x", 0, &observe), XP_OK);
    assert_null(observe);
    observe_write(NULL, &(observe_record_t){0});
    observe_name_instance(NULL, 0, "m");
    observe_close(NULL);
}

static void test_in_order(void **state)
{
    observe_t *observe;
    observe_reader_t *reader;
    observe_record_t record;
    char path[160];
    assert_int_equal(observe_open(below, OBSERVE_FFN, "org/m:1", 8, &observe), XP_OK);
    observe_name_instance(observe, 2, "tiny");
    path_of(path, "ffnagent-org_m:1", getpid());
    assert_int_equal(observe_reader_open(path, &reader), XP_OK);
    const observe_header_t *header = observe_reader_header(reader);
    assert_string_equal(header->name, "org/m:1");
    assert_string_equal(header->instance[2], "tiny");
    assert_int_equal(header->instances, 3);
    assert_int_equal(header->pid, getpid());
    assert_int_equal(observe_reader_next(reader, &record), XP_RETRY);
    for (uint64_t i = 1; i <= 5; i++) {
        record = record_of(i);
        observe_write(observe, &record);
    }
    for (uint64_t i = 1; i <= 5; i++) {
        assert_int_equal(observe_reader_next(reader, &record), XP_OK);
        assert_int_equal(record.index, i);
        assert_int_equal(record.sequence, i);
        assert_int_equal(record.layer, i);
        assert_int_equal(record.instance, 2);
    }
    assert_int_equal(observe_reader_next(reader, &record), XP_RETRY);
    /* Round the ring twice: the last eight are left. */
    for (uint64_t i = 6; i <= 26; i++) {
        record = record_of(i);
        observe_write(observe, &record);
    }
    for (uint64_t i = 19; i <= 26; i++) {
        assert_int_equal(observe_reader_next(reader, &record), XP_OK);
        assert_int_equal(record.sequence, i);
    }
    assert_int_equal(observe_reader_next(reader, &record), XP_RETRY);
    assert_int_equal(observe_reader_skipped(reader), 13);
    record = (observe_record_t){0};
    uint64_t before = xp_monotonic_ns();
    observe_write(observe, &record);
    assert_int_equal(observe_reader_next(reader, &record), XP_OK);
    assert_true(record.end_ns >= before);
    observe_reader_close(reader);
    observe_close(observe);
}

static atomic_bool done;

static void *write_for_ever(void *context)
{
    for (uint64_t i = 1; !atomic_load(&done); i++) {
        observe_record_t record = record_of(i);
        observe_write(context, &record);
    }
    return NULL;
}

/* A reader that is overtaken all the time gets whole records or none. */
static void test_while_written(void **state)
{
    observe_t *observe;
    observe_reader_t *reader;
    pthread_t writer;
    char path[160];
    assert_int_equal(observe_open(below, OBSERVE_RANK, "m.0", 4, &observe), XP_OK);
    path_of(path, "rank-m.0", getpid());
    assert_int_equal(observe_reader_open(path, &reader), XP_OK);
    atomic_store(&done, false);
    assert_int_equal(pthread_create(&writer, NULL, write_for_ever, observe), 0);
    uint64_t last = 0, end_ns = xp_monotonic_ns() + 200 * XP_NS_PER_MS;
    while (xp_monotonic_ns() < end_ns) {
        observe_record_t record;
        if (observe_reader_next(reader, &record) != XP_OK)
            continue;
        assert_true(record.index > last);
        last = record.index;
        assert_int_equal(record.sequence, record.index);
        assert_int_equal(record.duration_ns, record.index);
        assert_int_equal(record.layer, (uint32_t)record.index);
        assert_int_equal(record.rows, (uint32_t)record.index);
    }
    atomic_store(&done, true);
    pthread_join(writer, NULL);
    assert_true(last > 0);
    observe_reader_close(reader);
    observe_close(observe);
}

static void test_killed_writer(void **state)
{
    observe_reader_t *reader;
    observe_record_t record;
    char path[160];
    atomic_store(&done, false);
    pid_t child = fork();
    if (child == 0) {
        observe_t *observe;
        if (observe_open(below, OBSERVE_ATN, "cpu:0", 16, &observe) != XP_OK)
            _exit(1);
        write_for_ever(observe);
        _exit(1);
    }
    usleep(100000);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    path_of(path, "atnagent-cpu:0", child);
    assert_int_equal(observe_reader_open(path, &reader), XP_OK);
    uint64_t count = 0, last = 0;
    while (observe_reader_next(reader, &record) == XP_OK) {
        assert_int_equal(record.sequence, record.index);
        assert_true(record.index > last);
        last = record.index;
        count++;
    }
    assert_in_range(count, 15, 16);
    observe_reader_close(reader);
}

static void test_nonsense(void **state)
{
    observe_t *observe;
    observe_reader_t *reader;
    char path[160], header[OBSERVE_HEADER_BYTES];
    assert_int_equal(observe_reader_open("/nowhere/x", &reader), XP_NOT_FOUND);
    assert_int_equal(observe_open(below, OBSERVE_RANK, "m", 0, &observe), XP_INVALID);
    assert_int_equal(observe_open("/proc/xpool", OBSERVE_RANK, "m", 1, &observe), XP_IO);
    assert_non_null(strstr(xp_error_last()->text, "observe.folder"));
    assert_int_equal(observe_open(below, OBSERVE_RANK, "m", 4, &observe), XP_OK);
    observe_close(observe);
    path_of(path, "rank-m", getpid());
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, header, sizeof(header), 0), sizeof(header));
#define EXPECT(offset, value, status)                                                              \
    do {                                                                                           \
        uint32_t word = value;                                                                     \
        assert_int_equal(pwrite(fd, &word, sizeof(word), offset), sizeof(word));                   \
        assert_int_equal(observe_reader_open(path, &reader), status);                              \
        assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));                   \
    } while (0)
    EXPECT(0, 7, XP_INVALID);
    EXPECT(offsetof(observe_header_t, abi), 9, XP_UNSUPPORTED);
    EXPECT(offsetof(observe_header_t, capacity), 0, XP_INVALID);
    EXPECT(offsetof(observe_header_t, capacity), 5, XP_INVALID);
    EXPECT(offsetof(observe_header_t, capacity), UINT32_MAX, XP_INVALID);
    EXPECT(offsetof(observe_header_t, instances), 65, XP_INVALID);
#undef EXPECT
    assert_int_equal(ftruncate(fd, 100), 0);
    assert_int_equal(observe_reader_open(path, &reader), XP_INVALID);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_off),           cmocka_unit_test(test_in_order),
        cmocka_unit_test(test_while_written), cmocka_unit_test(test_killed_writer),
        cmocka_unit_test(test_nonsense),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
