/* SPDX-License-Identifier: MIT */
/* The small parsers, edit distance, the registry's own consistency, and the machine's memory read
 * from made-up /proc and /sys/fs/cgroup trees. */
#include "config_test.h"

#include <sys/stat.h>

static void sizes(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"4096", 4096},
        {"7B", 7},
        {"1KiB", 1024},
        {"512MiB", 512ull << 20},
        {"8 GiB", 8ull << 30},
        {"1.5GiB", 3ull << 29},
        {"0.25TiB", 1ull << 38},
        {"16777215TiB", 16777215ull << 40},
        {"18446744073709551615", UINT64_MAX},
    };
    static const char *const bad[] = {
        "",           "GiB",   "1GB",  "1G",           "-1",   "1e3",
        "1.5",        "1.5B",  "1.",   ".5GiB",        "1gib", "1 KiB ",
        "1KiB x",     " 1KiB", "0x10", "1.2345678GiB", "1 2",  "18446744073709551616",
        "16777216TiB"};
    uint64_t bytes;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        bytes = 1;
        if (!config_size_parse(good[i].text, &bytes) || bytes != good[i].bytes)
            fail_msg("%s gives %llu", good[i].text, (unsigned long long)bytes);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        bytes = 77;
        if (config_size_parse(bad[i], &bytes) || bytes != 77)
            fail_msg("\"%s\" is taken for a size", bad[i]);
    }
}

static void cpu_lists(void **state)
{
    uint32_t cpus[CONFIG_MAX_CPUS], count = 0;
    assert_true(config_cpus_parse("0-3,6", cpus, &count));
    const uint32_t expected[] = {0, 1, 2, 3, 6};
    assert_int_equal(count, 5);
    assert_memory_equal(cpus, expected, sizeof(expected));
    assert_true(config_cpus_parse(" 1023 , 0 ", cpus, &count));
    assert_int_equal(count, 2);
    assert_true(config_cpus_parse("0-255", cpus, &count));
    assert_int_equal(count, 256);
    static const char *const bad[] = {"",      ",",     "1,",   "a",     "1-",
                                      "-1",    "3-1",   "1024", "0-256", "1,1",
                                      "0-2,2", "99999", "1 2",  "0x1",   "0-99999"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (config_cpus_parse(bad[i], cpus, &count) || count != 256)
            fail_msg("\"%s\" is taken for CPUs", bad[i]);
}

static void devices(void **state)
{
    config_device_t device;
    assert_true(config_device_parse("cpu:12", &device));
    assert_int_equal(device.kind, CONFIG_DEVICE_CPU);
    assert_int_equal(device.index, 12);
    assert_string_equal(device.name, "cpu:12");
    assert_true(config_device_parse("cuda:0", &device));
    assert_int_equal(device.kind, CONFIG_DEVICE_CUDA);
    static const char *const bad[] = {"",         "cpu",       "cpu:",   "cpu:a",   "cpu:01",
                                      "cpu:1024", "cpu:-1",    "cpu:1 ", "CPU:0",   "cuda0",
                                      "gpu:0",    "cpu:99999", "cpu:0x", "cuda:+1", " cpu:0"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (config_device_parse(bad[i], &device))
            fail_msg("\"%s\" is taken for a device", bad[i]);
}

static void addresses(void **state)
{
    static const char *const good[] = {"127.0.0.1:0", "0.0.0.0:65535", "localhost:80", "[::1]:8000",
                                       "a-b.example:1"};
    static const char *const bad[] = {
        "",        ":80",         "localhost",    "1.2.3:80", "::1:80",  "[::1]",
        "[::1:80", "[x]:80",      "a:65536",      "a:",       "a:-1",    "a:1x",
        "a b:1",   "http://a:80", "256.1.1.1:80", "-a:1",     "a:000080"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        if (!config_address_valid(good[i]))
            fail_msg("\"%s\" is refused", good[i]);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (config_address_valid(bad[i]))
            fail_msg("\"%s\" is taken for an address", bad[i]);
}

static void paths(void **state)
{
    static const struct {
        const char *text, *expected;
    } good[] = {
        {"/a/b/", "/a/b"},
        {"/", "/"},
        {"x.gguf", "/base/dir/x.gguf"},
        {"./x//", "/base/dir/x"},
        {"../x", "/base/x"},
        {".././../../x", "/x"},
        {"..", "/base"},
        {".", "/base/dir"},
        {"a/../b", "/base/dir/a/../b"}, /* `a` may be a link */
        {"..x", "/base/dir/..x"},
        {"file:///srv/m%20x", "/srv/m x"},
        {"file://localhost/srv", "/srv"},
    };
    static const char *const bad[] = {"",
                                      "file://",
                                      "file://host/x",
                                      "file://x",
                                      "s3://b/x",
                                      "https://h/x",
                                      "file:///a%2",
                                      "file:///a%zz",
                                      "file:///a%00"};
    char out[64], reason[96];
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        if (!config_path_resolve("/base/dir", good[i].text, true, out, sizeof(out), reason,
                                 sizeof(reason)))
            fail_msg("%s: %s", good[i].text, reason);
        assert_string_equal(out, good[i].expected);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        reason[0] = '\0';
        if (config_path_resolve("/base/dir", bad[i], true, out, sizeof(out), reason,
                                sizeof(reason)) ||
            !reason[0])
            fail_msg("\"%s\" is taken for a path", bad[i]);
    }
    char text[80];
    memset(text, 'x', 70);
    text[70] = '\0';
    assert_false(config_path_resolve("/", text, false, out, sizeof(out), reason, sizeof(reason)));
    assert_string_equal(reason, "the path is longer than 63 bytes");
}

/* The plain definition, exponential but obviously right (optimal string alignment). */
static uint32_t slow_distance(const char *a, size_t m, const char *b, size_t n)
{
    if (m == 0 || n == 0)
        return (uint32_t)(m + n);
    uint32_t best = slow_distance(a, m - 1, b, n - 1) + (a[m - 1] != b[n - 1]);
    uint32_t drop = slow_distance(a, m - 1, b, n) + 1, add = slow_distance(a, m, b, n - 1) + 1;
    best = drop < best ? drop : best;
    best = add < best ? add : best;
    if (m > 1 && n > 1 && a[m - 1] == b[n - 2] && a[m - 2] == b[n - 1]) {
        uint32_t swap = slow_distance(a, m - 2, b, n - 2) + 1;
        best = swap < best ? swap : best;
    }
    return best;
}

static void distances(void **state)
{
    uint32_t seed = 1;
    for (int i = 0; i < 2000; i++) {
        char words[2][8] = {"", ""};
        for (int w = 0; w < 2; w++) {
            seed = seed * 1664525u + 1013904223u;
            size_t length = (seed >> 16) % 7;
            for (size_t c = 0; c < length; c++) {
                seed = seed * 1664525u + 1013904223u;
                words[w][c] = (char)('a' + (seed >> 20) % 3);
            }
        }
        uint32_t expected = slow_distance(words[0], strlen(words[0]), words[1], strlen(words[1]));
        if (config_text_distance(words[0], words[1], 100) != expected)
            fail_msg("%s %s", words[0], words[1]);
        assert_int_equal(config_text_distance(words[0], words[1], 2), expected > 2 ? 3 : expected);
    }
}

static void every_key_is_found_again_after_a_slip(void **state)
{
    for (uint32_t i = 0; i < config_setting_count; i++) {
        char key[CONFIG_MAX_KEY], nearest[CONFIG_MAX_KEY];
        size_t length = strlen(config_settings[i].key);
        snprintf(key, sizeof(key), "%s", config_settings[i].key);
        char last = key[length - 1];
        key[length - 1] = key[length - 2];
        key[length - 2] = last;
        assert_true(config_setting_nearest(key, nearest, sizeof(nearest)));
        assert_string_equal(nearest, config_settings[i].key);
    }
}

static void the_registry_is_consistent(void **state)
{
    clear_environment();
    config_t *config = load(TEST_MODEL "[atn]\ndevices = ['cpu:0']\n[ffn]\ndevices = ['cuda:0']\n");
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        assert_ptr_equal(config_setting_find(setting->key), setting); /* no key twice */
        assert_true(setting->help && setting->help[0] && setting->sources);
        assert_true((setting->environment != NULL) == !!(setting->sources & CONFIG_SOURCE_ENV));
        assert_true(setting->default_text || setting->default_note || setting->alias_of);
        assert_true(setting->minimum <= setting->maximum);
        assert_true((setting->choices != NULL) == (setting->type == CONFIG_TYPE_CHOICE));
        if (setting->alias_of) {
            assert_non_null(config_setting_find(setting->alias_of));
            continue;
        }
        /* Every default passes its own checks: the load above applied it, to the first device (a
         * CPU) or, of a GPU's settings, to the second. */
        assert_non_null(
            config_setting_slot(config, setting, strstr(setting->key, "\"cuda:N\"") ? 1 : 0)
                ->origin);
    }
    config_destroy(config);
}

/* ---- machine memory ----------------------------------------------------------------------------
 */

static char root[64];

static void put(const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof(full), "%s/%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static uint64_t memory(void)
{
    char proc[80], cgroup[80];
    snprintf(proc, sizeof(proc), "%s/proc", root);
    snprintf(cgroup, sizeof(cgroup), "%s/cgroup", root);
    return config_machine_memory(proc, cgroup);
}

static void machine_memory(void **state)
{
    snprintf(root, sizeof(root), "/tmp/xpool-memory-XXXXXX");
    assert_non_null(mkdtemp(root));
    assert_int_equal(memory(), 0); /* nothing is known */
    put("proc/meminfo", "MemTotal:       2000 kB\nMemAvailable:   1000 kB\n");
    assert_int_equal(memory(), 1000 * 1024);
    /* Version 2: the tightest level above the process counts, page cache is room. */
    put("proc/self/cgroup", "0::/a/b\n");
    put("cgroup/a/b/memory.max", "max\n");
    put("cgroup/a/b/memory.current", "5\n");
    assert_int_equal(memory(), 1000 * 1024);
    put("cgroup/a/memory.max", "500000\n");
    put("cgroup/a/memory.current", "300000\n");
    assert_int_equal(memory(), 200000);
    put("cgroup/a/memory.stat", "anon 1\nfile 7\ninactive_file 100000\nactive_file 50000\n");
    assert_int_equal(memory(), 350000);
    put("cgroup/memory.max", "1000\n");
    assert_int_equal(memory(), 1000);
    put("cgroup/memory.current", "2000\n"); /* over the limit: no room, not a huge number */
    assert_int_equal(memory(), 0);
    /* Version 1, in a container whose path does not exist below the mount. */
    put("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/gone\n0::/elsewhere\n");
    put("cgroup/memory.max", "max\n");
    put("cgroup/memory/memory.limit_in_bytes", "9000\n");
    put("cgroup/memory/memory.usage_in_bytes", "6000\n");
    put("cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 1000\n");
    assert_int_equal(memory(), 4000);
    put("proc/self/cgroup", "nonsense\n:\n\n");
    assert_int_equal(memory(), 1000 * 1024);
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),
        cmocka_unit_test(cpu_lists),
        cmocka_unit_test(devices),
        cmocka_unit_test(addresses),
        cmocka_unit_test(paths),
        cmocka_unit_test(distances),
        cmocka_unit_test(every_key_is_found_again_after_a_slip),
        cmocka_unit_test(the_registry_is_consistent),
        cmocka_unit_test(machine_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
