# SPDX-License-Identifier: MIT
"""Seeded texts that try tokenizers: all scripts, emoji, marks, controls, white space, code, specials."""
import random

BLOCKS = [
    (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x17F), (0x180, 0x24F), (0x250, 0x2AF),
    (0x2B0, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58F), (0x590, 0x5FF),
    (0x600, 0x6FF), (0x700, 0x74F), (0x750, 0x77F), (0x780, 0x7FF), (0x800, 0x8FF), (0x900, 0x97F),
    (0x980, 0xDFF), (0xE00, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF),
    (0x1100, 0x11FF), (0x1200, 0x139F), (0x13A0, 0x16FF), (0x1700, 0x1AFF), (0x1B00, 0x1CFF),
    (0x1D00, 0x1DFF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x218F), (0x2190, 0x23FF),
    (0x2400, 0x27BF), (0x2900, 0x2BFF), (0x2C00, 0x2DFF), (0x2E00, 0x2FDF), (0x3000, 0x30FF),
    (0x3100, 0x33FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x4E00, 0x9FFF), (0xA000, 0xABFF),
    (0xAC00, 0xD7A3), (0xD7B0, 0xD7FF), (0xE000, 0xF8FF), (0xF900, 0xFAFF), (0xFB00, 0xFDFF),
    (0xFE00, 0xFE6F), (0xFE70, 0xFEFF), (0xFF00, 0xFFEF), (0xFFF0, 0xFFFF), (0x10000, 0x10FFF),
    (0x11000, 0x11FFF), (0x12000, 0x143FF), (0x16000, 0x18FFF), (0x1AFF0, 0x1BFFF),
    (0x1C000, 0x1DFFF), (0x1E000, 0x1EFFF), (0x1F000, 0x1FAFF), (0x1F300, 0x1F64F),
    (0x20000, 0x323AF), (0xE0000, 0xE01EF), (0x10FF00, 0x10FFFF),
]
WORDS = """the of and a to in is was he she it's I'm they'll we've don't You'RE 'Tis o'clock Once upon time
there little girl named Lily naïve café Zürich Straße façade coöperate Москва привет мир Ελλάδα שלום
مرحبا नमस्ते สวัสดี こんにちは 世界 你好 안녕하세요 ᚠᚢᚦ don’t 'S 'LL ſ'ſ ﬁne ½ ² Ⅷ ①②③ ｆｕｌｌ １２３ İstanbul ΟΔΟΣ ǅ
ﷺ ក្រុម தமிழ் e\u0301 a\u0308\u0323 o\u0323\u0308 \u0344 \u1fc1 한글 \u1112\u1161\u11ab""".split()
EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☕", "🫠", "🪿", "1️⃣", "\U0001FAE9"]
SPACES = [" ", " ", "  ", "    ", "\t", "\n", "\r\n", "\n\n", "\r", "\v", "\f", "\x85", "\xa0", "\u1680",
          "\u180e", "\u2003", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\u200d", "\ufeff",
          " \n", "\n ", "   \n  ", "\t\t", " " * 17]
CODE = ["for (int i = 0; i < n; ++i) {\n\t", "def f(x):\n    return x**2\n", "x += 1;", "<a href=\"#\">", "==>",
        "0x7FFF", "1,234.56", "3.14159", "2024-02-30T12:00", "a_b_c", "camelCase", "$x", "C:\\dir", "#!/bin/sh",
        "<0x41>", "<0xE4>", "▁", "▁▁a", "Ġ", "Ċ", "\\n", "///", "!!!???...", "——", "“q”", "`~`", "&&||"]


def character(rng):
    first, last = rng.choice(BLOCKS)
    while True:
        c = rng.randint(first, last)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def piece(rng, specials):
    kind = rng.random()
    if kind < 0.34:
        return rng.choice(WORDS)
    if kind < 0.52:
        return rng.choice(SPACES) * rng.choice([1, 1, 1, 2, 3])
    if kind < 0.62:
        return "".join(character(rng) for _ in range(rng.randint(1, 6)))
    if kind < 0.68:
        first, last = rng.choice(BLOCKS)
        return "".join(chr(c) for c in (rng.randint(first, last) for _ in range(rng.randint(2, 12)))
                       if not 0xD800 <= c < 0xE000)
    if kind < 0.74:
        return str(rng.randint(0, 10 ** rng.randint(1, 12)))
    if kind < 0.80:
        return rng.choice(EMOJI)
    if kind < 0.87:
        return rng.choice(CODE)
    if kind < 0.90:
        return "".join(chr(rng.randint(0, 31)) for _ in range(rng.randint(1, 3)))
    if kind < 0.93:
        return rng.choice(WORDS)[0] + "".join(chr(rng.randint(0x300, 0x36F)) for _ in range(rng.randint(1, 5)))
    if kind < 0.98 and specials:
        special = rng.choice(specials)
        return special if rng.random() < 0.8 else special[: rng.randint(1, len(special))]
    return rng.choice("!?.,;:'\"-_()[]{}@#%^&*+=/\\|~`<>") * rng.randint(1, 9)


def texts(seed, count, specials=()):
    """`count` texts, the first ones hand-made."""
    specials = list(specials)
    rng = random.Random(seed)
    fixed = ["", " ", "  ", "\n", "a", "\u0000", "a\u0000b", "\ufffd", " a", "a ", "\u0301", "'", "'s", "''s",
             "aaaaaaaa" * 40, " " * 300, "\n" * 50, "😀" * 70, "1234567890" * 8, "ab" * 500]
    fixed += specials[:20] + [f"x{s}y" for s in specials[:10]] + [f" {s} {s}" for s in specials[:10]]
    for text in fixed[:count]:
        yield text
    for _ in range(count - min(len(fixed), count)):
        yield "".join((rng.choice(["", " ", ""]) + piece(rng, specials)) for _ in range(rng.randint(1, 14)))
