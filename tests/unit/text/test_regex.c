/* SPDX-License-Identifier: MIT */
/* Regexes: what Oniguruma and PCRE2 read differently, and the classes of newer Unicode versions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "text/regex.h"
#include "text/unicode.h"

/* All matches in `subject`, each in brackets. */
static void check(const char *pattern, const char *subject, const char *wanted)
{
    text_regex_t *regex = NULL;
    text_matcher_t *matcher = NULL;
    text_matches_t matches;
    xp_buf_t out;
    xp_buf_init(&out, 1000);
    xp_status_t status = text_regex_create(pattern, strlen(pattern), false, &regex);
    if (status != XP_OK)
        print_error("%s: %s\n", pattern, xp_error_last()->text);
    assert_int_equal(status, XP_OK);
    assert_int_equal(text_matcher_create(&matcher), XP_OK);
    assert_int_equal(xp_buf_append(&out, "", 0), XP_OK);
    text_matches_init(&matches, regex, matcher, subject, strlen(subject));
    for (;;) {
        size_t start, end;
        bool found;
        assert_int_equal(text_matches_next(&matches, &start, &end, &found), XP_OK);
        if (!found)
            break;
        assert_int_equal(xp_buf_printf(&out, "[%.*s]", (int)(end - start), subject + start), XP_OK);
    }
    assert_string_equal(out.data, wanted);
    xp_buf_fini(&out);
    text_matcher_destroy(matcher);
    text_regex_destroy(regex);
}

static void syntax(void **state)
{
    (void)state;
    check("a+", "aabaa", "[aa][aa]");
    check("x*", "axx", "[][xx]");                /* no empty match right behind a match */
    check("\\d{1,3}+", "1234567", "[1234567]");  /* repeats, is not possessive */
    check("(?:ab){2}?", "ababab", "[abab][][]"); /* optional, not lazy */
    check("a$", "a\na", "[a][a]");               /* the end of a line is enough */
    check("^a", "a\na", "[a][a]");
    check("\\h+", "xFa0 z", "[Fa0]"); /* a hexadecimal digit */
    check("[\\h]+", "xFa0 z", "[Fa0]");
    check("\\v", "\n\x0b", "[\x0b]");
    check("\\x{41}\\u00e9\\x42", "A\u00e9B", "[A\u00e9B]");
    check("(?i:'s|'ll)", "it'S we'LL '\u017f", "['S]['LL]['\u017f]");
    check("(?i)AB|c", "abC", "[ab][C]");
    check("(?<=a)b(?!c)", "ab abc b", "[b]");
    check("a(b)?(?>c)", "abc ac", "[abc][ac]");
    check("a#b c", "a#b c", "[a#b c]");
    check("[a-c\\-\\]^]+", "b-]^d", "[b-]^]");
    check("{a}", "{a}", "[{a}]");
    check("a{,2}", "aaa", "[aa][a]");
    check("\\.\\$\\/", ".$/", "[.$/]");
}

static void classes(void **state)
{
    (void)state;
    check("\\s", "\u180e\u3000\xC2\x85",
          "[\u3000][\xC2\x85]"); /* the Mongolian vowel separator is none */
    check("\\S", "\u180e \u3000", "[\u180e]");
    check("[^\\S\\n]", "\n\t", "[\t]");
    check("\\p{L}+", "a\u00e9\U000105C0\u1C89",
          "[a\u00e9\U000105C0\u1C89]"); /* of Unicode 15, 16 */
    check("\\P{L}", "a\u1C89!", "[!]");
    check("[^\\p{L}\\p{N}]", "a1\U0001E4F0 ", "[ ]");
    check("\\p{^L}", "a!", "[!]");
    check("\\p{Lu}\\p{Ll}", "Aa aA", "[Aa]");
    check("\\p{Han}", "\u3001\u4e00\U00031350",
          "[\u4e00][\U00031350]"); /* by script, not extensions */
    check("\\w+", "a_1\u0301\u00b2!", "[a_1\u0301\u00b2]");
    check("\\W", "a!", "[!]");
    check("\\D", "1x", "[x]");
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        xp_status_t status;
    } cases[] = {
        {"(", XP_INVALID},
        {")", XP_INVALID},
        {"[a", XP_INVALID},
        {"a\\", XP_INVALID},
        {"\\p{L", XP_INVALID},
        {"*", XP_INVALID},
        {"[a&&b]", XP_UNSUPPORTED},
        {"[a[b]]", XP_UNSUPPORTED},
        {"[[:alpha:]]", XP_UNSUPPORTED},
        {"\\b", XP_UNSUPPORTED},
        {"(a)\\1", XP_UNSUPPORTED},
        {"(?m:a)", XP_UNSUPPORTED},
        {"a(?i)b", XP_UNSUPPORTED},
        {"\\p{Odd}", XP_UNSUPPORTED},
        {"\\K", XP_UNSUPPORTED},
        {"(?R)", XP_UNSUPPORTED},
        {"[\\P{L}]", XP_UNSUPPORTED},
        {"\\xFF", XP_UNSUPPORTED},
        {"\xFF", XP_INVALID},
        {"(?C1)", XP_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        text_regex_t *regex = NULL;
        xp_error_clear();
        xp_status_t status =
            text_regex_create(cases[i].pattern, strlen(cases[i].pattern), false, &regex);
        if (status != cases[i].status)
            print_error("%s: %s\n", cases[i].pattern, xp_error_last()->text);
        assert_int_equal(status, cases[i].status);
        assert_null(regex);
        assert_non_null(strstr(xp_error_last()->text, "regex"));
    }
}

static void lossy(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *wanted;
    } cases[] = {
        {"a\u00e9\u4e16\U0001F600", "a\u00e9\u4e16\U0001F600"},
        {"\xC0\x80", "\uFFFD\uFFFD"},
        {"\xE4\xB8z", "\uFFFDz"}, /* the longest begin of a character is one mistake */
        {"\xF0\x9F\x98", "\uFFFD"},
        {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"}, /* a surrogate */
        {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
        {"\xF5", "\uFFFD"},
        {"\x80\xE0\x80", "\uFFFD\uFFFD\uFFFD"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        xp_buf_t out;
        xp_buf_init(&out, 1000);
        assert_int_equal(text_utf8_append_lossy(&out, cases[i].bytes, strlen(cases[i].bytes)),
                         XP_OK);
        assert_string_equal(out.data, cases[i].wanted);
        assert_int_equal(text_utf8_valid(cases[i].bytes, strlen(cases[i].bytes)), i == 0);
        xp_buf_fini(&out);
    }
}

static void alphabet(void **state)
{
    (void)state;
    bool seen[0x180] = {false};
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t letter = text_byte_to_letter((uint8_t)byte);
        assert_true(letter < 0x180 && !seen[letter]);
        seen[letter] = true;
        assert_int_equal(text_letter_to_byte(letter), byte);
    }
    for (uint32_t letter = 0; letter < 0x400; letter++)
        assert_int_equal(text_letter_to_byte(letter) >= 0, letter < 0x180 && seen[letter]);
    assert_int_equal(text_byte_to_letter(' '), 0x120); /* the G with a dot that begins words */
    assert_int_equal(text_byte_to_letter('\n'), 0x10A);
    assert_int_equal(text_byte_to_letter(0xAD), 0x143);
}

static void normal_forms(void **state)
{
    (void)state;
    static const struct {
        text_form_t form;
        const char *text, *wanted;
    } cases[] = {
        {TEXT_NFC, "e\u0301", "\u00e9"},
        {TEXT_NFC, "o\u0308\u0323", "\u1ecd\u0308"},
        {TEXT_NFC, "\u1112\u1161\u11ab", "\ud55c"},
        {TEXT_NFD, "\u1e69", "s\u0323\u0307"},
        {TEXT_NFKC, "\ufb01\u00b2", "fi2"},
        {TEXT_NFKD, "\u01c4", "DZ\u030c"},
        {TEXT_NFKC, "\u32ff", "\u32ff"}, /* too new for the library */
        {TEXT_NFC, "\U00011935\U00011930", "\U00011935\U00011930"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        xp_buf_t out;
        xp_buf_init(&out, 1000);
        assert_int_equal(text_normalize(cases[i].form, cases[i].text, strlen(cases[i].text), &out),
                         XP_OK);
        assert_string_equal(out.data, cases[i].wanted);
        xp_buf_fini(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(syntax), cmocka_unit_test(classes),  cmocka_unit_test(refused),
        cmocka_unit_test(lossy),  cmocka_unit_test(alphabet), cmocka_unit_test(normal_forms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
