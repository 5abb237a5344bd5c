#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes tests/unit/text/golden_tales.jsonl: seeded texts with the `tokenizers` library's ids.

usage: text_golden.py > tests/unit/text/golden_tales.jsonl
"""
import json
import pathlib

from tokenizers import Tokenizer

import text_corpus

ROOT = pathlib.Path(__file__).resolve().parents[2]
tokenizer = Tokenizer.from_file(str(ROOT / "models" / "tales" / "qwen3-moe" / "tokenizer.json"))
specials = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
for text in text_corpus.texts(2026, 140, specials):
    if len(text) < 120:
        ids = tokenizer.encode(text).ids
        print(json.dumps({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                          "skipped": tokenizer.decode(ids)}))
