#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes src/text/unicode_tables.c: where the `tokenizers` library and our Unicode libraries part.

PCRE2 and utf8proc know the Unicode version they were built with; the library carries several others.
Every table is measured by asking the library about each code point, with Unicode 14 (Python 3.11's
unicodedata) as the base line. Usage: text_unicode_tables.py > src/text/unicode_tables.c
"""
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

assert unicodedata.unidata_version == "14.0.0", "run this with Python 3.11"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
MAJOR = "L M N P S Z".split()
MINOR = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Cf".split()


def members(pattern):
    """Code points that the library's regex engine matches."""
    split, found = pre_tokenizers.Split(Regex(pattern), "removed"), set(CODE_POINTS)
    for base in range(0, len(CODE_POINTS), 4096):
        chunk = CODE_POINTS[base : base + 4096]
        for _, (first, last) in split.pre_tokenize_str("".join(map(chr, chunk))):
            found.difference_update(chunk[first:last])
    return found


def ranges(points):
    out = []
    for c in sorted(points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def table(name, points, comment):
    rows = ranges(points)
    print(f"\n/* {comment} */\nconst text_range_t {name}[] = {{")
    for first, last in rows:
        print(f"    {{0x{first:X}, 0x{last:X}}},")
    print(f"}};\nconst size_t {name}_count = {len(rows)};")


print("/* SPDX-License-Identifier: MIT */")
print("/* Written by tests/reference/text_unicode_tables.py; see unicode.h for what each table is for. */")
print('#include "text/unicode.h"')
print("\n/* clang-format off */")
category = {}
for minor in MINOR:
    for c in members(r"\p{%s}" % minor):
        base = unicodedata.category(chr(c))
        if base != minor:
            # A later reclassification (never across major classes): only the new one is recorded.
            assert base == "Cn" or base[0] == minor[0], (hex(c), base, minor)
            category[c] = minor
rows = []
for c in sorted(category):
    if rows and rows[-1][1] == c - 1 and rows[-1][2] == category[c]:
        rows[-1][1] = c
    else:
        rows.append([c, c, category[c]])
print("\n/* Code points assigned after Unicode 14, as the library's regex engine knows them. */")
print("const text_category_range_t text_new_categories[] = {")
for first, last, minor in rows:
    print(f'    {{0x{first:X}, 0x{last:X}, "{minor}"}},')
print(f"}};\nconst size_t text_new_categories_count = {len(rows)};")

word = members(r"\w")
base = {c for c in CODE_POINTS
        if (category.get(c) or unicodedata.category(chr(c))) in MINOR
        and ((category.get(c) or unicodedata.category(chr(c)))[0] in "LM"
             or (category.get(c) or unicodedata.category(chr(c))) in ("Nd", "Nl", "Pc"))}
assert base <= word, [hex(c) for c in sorted(base - word)[:20]]
table("text_word_extra", word - base, "In the library's \\\\w beside L, M, Nd, Nl and Pc.")
han = members(r"\p{Han}")
table("text_new_han", {c for c in han if unicodedata.category(chr(c)) == "Cn"},
      "Han ideographs assigned after Unicode 14.")


def single(pre_tokenizer):
    return {c for c in CODE_POINTS if len(pre_tokenizer.pre_tokenize_str("a%cb" % c)) != 1}


numeric = single(pre_tokenizers.Digits(True))
known = {c for c in CODE_POINTS if (category.get(c) or unicodedata.category(chr(c)))[0] == "N"}
assert known <= numeric
table("text_numeric_extra", numeric - known, "Numeric for the Digits pre-tokenizer beside N.")
punctuation = single(pre_tokenizers.Punctuation("removed"))
known = {c for c in CODE_POINTS if (category.get(c) or unicodedata.category(chr(c)))[0] == "P"}
known |= {ord(c) for c in "$+<=>^`|~"}
table("text_punctuation_differs", known ^ punctuation,
      "Where the library's Punctuation pre-tokenizer, of an older Unicode, says the opposite.")

forms = {"NFC": normalizers.NFC(), "NFD": normalizers.NFD(), "NFKC": normalizers.NFKC(),
         "NFKD": normalizers.NFKD()}
opaque = set()
for c in CODE_POINTS:
    text = chr(c)
    for form, normalizer in forms.items():
        want = unicodedata.normalize(form, text)
        if want != text and normalizer.normalize_str(text) != want:
            assert normalizer.normalize_str(text) == text, hex(c)
            opaque.add(c)
    ccc = unicodedata.combining(text)
    if ccc:
        other = "\u0334" if ccc > 1 else "\u0345"
        pair = text + other if ccc > 1 else other + text
        if forms["NFD"].normalize_str("a" + pair) != unicodedata.normalize("NFD", "a" + pair):
            opaque.add(c)
    parts = unicodedata.normalize("NFD", text)
    if (unicodedata.normalize("NFC", parts) == text != parts
            and forms["NFC"].normalize_str(parts) != text):
        opaque.update(map(ord, parts[1:]))  # a composition that the library does not know
table("text_normalize_opaque", opaque,
      "Unchanged and inert in the library's normal forms, not in Unicode 14's.")

lower = normalizers.Lowercase()
rows = []
for c in CODE_POINTS:
    mapped, want = lower.normalize_str(chr(c)), chr(c).lower()
    if mapped != want:
        assert len(mapped) == 1 and want == chr(c), hex(c)
        if rows and rows[-1][1] == c - 1 and rows[-1][2] == ord(mapped) - c:
            rows[-1][1] = c
        else:
            rows.append([c, c, ord(mapped) - c])
print("\n/* Lower case newer than Unicode 14: first, last, distance. */")
print("const text_lower_range_t text_new_lower[] = {")
for first, last, distance in rows:
    print(f"    {{0x{first:X}, 0x{last:X}, {distance}}},")
print(f"}};\nconst size_t text_new_lower_count = {len(rows)};")
space = members(r"\s")
assert space == {c for c in CODE_POINTS if chr(c).isspace()} - set(range(0x1C, 0x20)), "white space"
