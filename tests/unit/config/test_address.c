/* SPDX-License-Identifier: MIT */
/* HOST:PORT taken apart; the hosts are what getaddrinfo() takes (RFC 3986, 3.2.2 for brackets). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <netdb.h>
#include <sys/socket.h>

#include <cmocka.h>

#include "config/address.h"

static void good_addresses(void **state)
{
    static const struct {
        const char *text, *host;
        uint16_t port;
    } cases[] = {
        {"127.0.0.1:8000", "127.0.0.1", 8000},
        {"0.0.0.0:0", "0.0.0.0", 0},
        {"localhost:65535", "localhost", 65535},
        {"[::1]:8000", "::1", 8000},
        {"[::]:1", "::", 1},
        {"[2001:db8::192.0.2.1]:00080", "2001:db8::192.0.2.1", 80},
        {"a-b.example:1", "a-b.example", 1},
        {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:1",
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char host[CONFIG_MAX_HOST];
        uint16_t port = 9;
        memset(host, 'x', sizeof(host));
        assert_int_equal(config_address_split(cases[i].text, host, &port), XP_OK);
        assert_string_equal(host, cases[i].host);
        assert_int_equal(port, cases[i].port);
    }
}

/* What listening does with the host; an address with its brackets is refused there. */
static void an_ipv6_host_can_be_resolved(void **state)
{
    char host[CONFIG_MAX_HOST];
    uint16_t port;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
    struct addrinfo *found = NULL;
    assert_int_not_equal(getaddrinfo("[::1]", "8000", &hints, &found), 0);
    assert_int_equal(config_address_split("[::1]:8000", host, &port), XP_OK);
    assert_int_equal(getaddrinfo(host, "8000", &hints, &found), 0);
    assert_int_equal(found->ai_family, AF_INET6);
    freeaddrinfo(found);
}

static void bad_addresses(void **state)
{
    static const char *const texts[] = {
        "",
        ":80",
        "localhost",
        "::1:80",
        "[::1]",
        "[::1]80",
        "[::1:80",
        "[]:80",
        "[x]:80",
        "a:65536",
        "a:",
        "a:-1",
        "a b:1",
        "a:80/x",
        "[::1]x:80",
        "[1.2.3.4]:1",
        "1.2.3:4",
        "[::1]:",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:1",
    };
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        char host[CONFIG_MAX_HOST] = "untouched";
        uint16_t port = 9;
        if (config_address_split(texts[i], host, &port) != XP_INVALID)
            fail_msg("\"%s\" is taken for an address", texts[i]);
        assert_string_equal(host, "untouched");
        assert_int_equal(port, 9);
        assert_non_null(strstr(xp_error_last()->text, "is no HOST:PORT"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_addresses),
        cmocka_unit_test(an_ipv6_host_can_be_resolved),
        cmocka_unit_test(bad_addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
