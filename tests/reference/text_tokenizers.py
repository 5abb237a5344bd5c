#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""xpool tokenize and detokenize against the `tokenizers` library on generated texts.

usage: text_tokenizers.py XPOOL [--count N] [--gguf SMOLLM2.gguf] [--only WORD]
Every tokenizer of models/tales and, where it lies beside the checkout, ../shared; tokenizers trained here
on the fly for every stage we claim to read; and GGUF files written here. Exits 1 on any difference.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers

import text_corpus

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
          r"\s*[\r\n]|\s+(?!\S)|\s")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|"
         r"'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|"
         r"'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
failures = 0


def run(arguments, lines):
    """JSONL through xpool; returns the parsed answers."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(arguments, input=text, capture_output=True, encoding="utf-8", check=False, timeout=600)
    answers = [json.loads(line) for line in done.stdout.split("\n") if line]
    if len(answers) != len(lines) or done.returncode != 0:
        bad = [a["error"] for a in answers if "error" in a][:3]
        print(f"  {arguments[1]} exit {done.returncode}, {len(answers)} of {len(lines)} answers", bad,
              done.stderr[-500:])
        return [{}] * len(lines)
    return answers


def report(name, what, pairs):
    """Counts differences of (question, got, wanted)."""
    global failures
    bad = [pair for pair in pairs if pair[1] != pair[2]]
    print(f"  {what}: {len(pairs) - len(bad)}/{len(pairs)}")
    for question, got, wanted in bad[:3]:
        print(f"    {name} {what} {question!r}\n      got    {str(got)[:300]}\n      wanted {str(wanted)[:300]}")
    failures += len(bad)


def id_lists(rng, reference, count):
    """Random ids, with runs of byte tokens where there are some."""
    known = [i for i in range(reference.get_vocab_size() + 64) if reference.id_to_token(i) is not None]
    byte_ids = [i for i in (reference.token_to_id(f"<0x{b:02X}>") for b in range(256)) if i is not None]
    utf8 = [i for c in "aé世😀 ▁" for i in [[reference.token_to_id(f"<0x{b:02X}>") for b in c.encode()]]
            if None not in i]
    for _ in range(count):
        ids = []
        for _ in range(rng.randint(0, 12)):
            kind = rng.random()
            if kind < 0.3 and byte_ids:
                ids += [rng.choice(byte_ids) for _ in range(rng.randint(1, 4))]
            elif kind < 0.5 and utf8:
                ids += rng.choice(utf8)
            else:
                ids.append(rng.choice(known))
        yield ids


def compare(xpool, name, model, reference, count, seed=1, decode=True, specials=None):
    print(f"{name}:", flush=True)
    rng = random.Random(seed)
    if specials is None:
        specials = [t.content for t in reference.get_added_tokens_decoder().values()][:40]
    texts = list(text_corpus.texts(seed, count, specials))
    lines = [{"text": t, "add_special_tokens": rng.random() < 0.5, "parse_special": rng.random() < 0.9}
             for t in texts]
    wanted = []
    for line in lines:
        reference.encode_special_tokens = not line["parse_special"]
        wanted.append(reference.encode(line["text"], add_special_tokens=line["add_special_tokens"]).ids)
    got = run([xpool, "tokenize", "--model", str(model), "--jsonl"], lines)
    report(name, "encode", [(line, g.get("ids"), w) for line, g, w in zip(lines, got, wanted)])
    if not decode:
        return
    lists = wanted[: count // 2] + list(id_lists(rng, reference, count // 2))
    lines = [{"ids": ids, "skip_special_tokens": rng.random() < 0.5} for ids in lists]
    wanted = [reference.decode(line["ids"], skip_special_tokens=line["skip_special_tokens"]) for line in lines]
    command = [xpool, "detokenize", "--model", str(model), "--jsonl"]
    got = run(command, lines)
    report(name, "decode", [(line, g.get("text"), w) for line, g, w in zip(lines, got, wanted)])
    got = run(command, [dict(line, stream=True) for line in lines])
    report(name, "stream", [(line, "".join(g.get("pieces", ["?"])), w)
                            for line, g, w in zip(lines, got, wanted)])


# ---- tokenizers made here ----

# Without NUL: our JSON reader refuses it in keys, so a vocabulary cannot hold it.
CORPUS = [text.replace("\0", "") for text in text_corpus.texts(99, 1500)]


def trained(pre=None, normalizer=None, decoder=None, post=None, added=(), vocab=900, byte_level=True, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre:
        tokenizer.pre_tokenizer = pre
    if decoder:
        tokenizer.decoder = decoder
    first = [model["unk_token"]] if model.get("unk_token") else []
    if model.get("byte_fallback"):
        first += [f"<0x{b:02X}>" for b in range(256)]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    affixes = {k: model[k] for k in ("continuing_subword_prefix", "end_of_word_suffix") if k in model}
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=first, initial_alphabet=alphabet,
                                  limit_alphabet=400, show_progress=False, **affixes)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Training marks the bytes as special tokens; published files have them in the vocabulary only.
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    data["model"].update({k: v for k, v in model.items() if k in ("ignore_merges", "fuse_unk")})
    tokenizer = Tokenizer.from_str(json.dumps(data))
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if post:
        tokenizer.post_processor = post(tokenizer)
    return tokenizer


def template(tokenizer):
    ids = {t: tokenizer.token_to_id(t) for t in ("<s>", "</s>")}
    return processors.TemplateProcessing(single="<s> $A </s>", pair="$A $B",
                                         special_tokens=[(t, i) for t, i in ids.items()])


def made_here():
    byte_level, split = pre_tokenizers.ByteLevel, pre_tokenizers.Split
    ends = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    many = ends + [
        AddedToken("<left>", lstrip=True, special=True), AddedToken("<right>", rstrip=True, special=True),
        AddedToken("<both>", lstrip=True, rstrip=True), AddedToken("word", single_word=True),
        AddedToken("Lily", normalized=True), AddedToken("CAFÉ", normalized=True), AddedToken("<a>"),
        AddedToken("<a><b>"), AddedToken("  two  "), AddedToken("ﬁ", normalized=True),
    ]

    def byte_tokens(pre=None, **arguments):
        stages = [pre] if pre else []
        return trained(pre_tokenizers.Sequence(stages + [byte_level(add_prefix_space=False, use_regex=False)]),
                       decoder=decoders.ByteLevel(), **arguments)

    yield "gpt2", trained(byte_level(add_prefix_space=False), decoder=decoders.ByteLevel())
    yield "gpt2-prefix", trained(byte_level(add_prefix_space=True), decoder=decoders.ByteLevel(),
                                 post=template, added=ends)
    yield "smollm", trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     byte_level(add_prefix_space=False)]),
                            decoder=decoders.ByteLevel())
    yield "digits", byte_tokens(pre_tokenizers.Digits(individual_digits=False))
    for name, pattern in (("llama3", LLAMA3), ("cl100k", CL100K), ("o200k", O200K)):
        yield name, byte_tokens(split(Regex(pattern), "isolated"), ignore_merges=name == "llama3",
                                added=ends, post=template)
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            yield f"split-{behavior}-{invert}", byte_tokens(split(Regex(r"\p{P}+|\s"), behavior, invert))
        yield f"punctuation-{behavior}", byte_tokens(pre_tokenizers.Punctuation(behavior))
    yield "split-string", byte_tokens(split(" ", "merged_with_next"))
    yield "split-classes", byte_tokens(split(Regex(r"\w+|\d|\h{2}|\p{Han}|[^\S\n]+|\x41\u00e9?"), "isolated"))
    yield "split-empty", byte_tokens(split(Regex(r"\p{Lu}*"), "isolated"))
    yield "white-space", byte_tokens(pre_tokenizers.WhitespaceSplit())
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield form, byte_tokens(normalizer=getattr(normalizers, form)(), added=many)
    yield "lowercase", byte_tokens(added=many, normalizer=normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]))
    yield "strip-left", byte_tokens(added=many, normalizer=normalizers.Strip(left=True, right=False))
    yield "replace", byte_tokens(added=many, normalizer=normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Replace("a", "bb"), normalizers.Prepend("_")]))
    sentence = {"byte_level": False, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    yield "llama2", trained(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)]), added=many, post=template, **sentence)
    for scheme in ("first", "always", "never"):
        for cut in (True, False):
            yield f"metaspace-{scheme}-{cut}", trained(
                pre_tokenizers.Metaspace(prepend_scheme=scheme, split=cut),
                decoder=decoders.Metaspace(prepend_scheme=scheme), added=many, post=template, **sentence)
    yield "metaspace-strip", trained(
        pre_tokenizers.Metaspace(prepend_scheme="first"), normalizer=normalizers.Strip(),
        decoder=decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(),
                                   decoders.Fuse()]), added=many, **sentence)
    yield "metaspace-cut", trained(
        pre_tokenizers.Metaspace(prepend_scheme="first"), normalizer=normalizers.Replace(Regex("^[a-z]+"), ""),
        decoder=decoders.Metaspace(), added=ends, **sentence)
    yield "gemma", trained(split(" ", "merged_with_previous"), normalizer=normalizers.Replace(" ", "▁"),
                           decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                                      decoders.Fuse()]), added=ends, post=template, **sentence)
    yield "unknown", trained(pre_tokenizers.WhitespaceSplit(), byte_level=False, unk_token="<unk>", vocab=500)
    yield "unknown-fused", trained(pre_tokenizers.WhitespaceSplit(), byte_level=False, unk_token="<unk>",
                                   fuse_unk=True, vocab=500, decoder=decoders.Fuse())
    yield "vanishing", trained(pre_tokenizers.WhitespaceSplit(), byte_level=False, vocab=500)
    yield "prefix", trained(pre_tokenizers.WhitespaceSplit(), byte_level=False, unk_token="<unk>", vocab=700,
                            continuing_subword_prefix="##")
    yield "suffix", trained(pre_tokenizers.WhitespaceSplit(), byte_level=False, unk_token="<unk>", vocab=700,
                            end_of_word_suffix="</w>")


# ---- GGUF ----


def write_gguf(path, kind, tokens, types, merges=None, scores=None, **more):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in more.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add("tokenizer.ggml." + key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def gguf_of(path, tokenizer, pre, **more):
    """What a converter makes of a byte-level tokenizer.json."""
    data = json.loads(tokenizer.to_str())
    added = {t["id"]: t for t in data["added_tokens"]}
    tokens, types = [], []
    for i in range(max(max(data["model"]["vocab"].values()), max(added, default=0)) + 1):
        text = tokenizer.id_to_token(i)
        tokens.append(text if text is not None else f"[PAD{i}]")
        types.append(5 if text is None else 1 if i not in added else 3 if added[i]["special"] else 4)
    merges = [" ".join(m) if isinstance(m, list) else m for m in data["model"]["merges"]]
    write_gguf(path, "gpt2", tokens, types, merges=merges, pre=pre, **more)


class Scored:
    """SentencePiece's BPE, slowly: join the neighbours whose token scores best, leftmost first."""

    def __init__(self, tokens, types, scores, prefix):
        self.ids = {t: i for i, t in enumerate(tokens)}
        self.scores = {t: s for t, s, k in zip(tokens, scores, types) if k in (1, 4)}
        self.prefix = prefix

    def encode(self, text):
        parts = list(("▁" if self.prefix and text else "") + text.replace(" ", "▁"))
        while True:
            best = None
            for i in range(len(parts) - 1):
                score = self.scores.get(parts[i] + parts[i + 1])
                if score is not None and (best is None or score > best[0]):
                    best = (score, i)
            if best is None:
                break
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        ids = []
        for part in parts:
            if part in self.scores:
                ids.append(self.ids[part])
            else:
                ids += [self.ids[f"<0x{b:02X}>"] for b in part.encode()]
        return ids


def scored_gguf(xpool, folder, count):
    base = trained(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
                   byte_level=False, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    vocabulary = base.get_vocab(with_added_tokens=False)
    tokens = ["<unk>", "<s>", "</s>"] + sorted((t for t in vocabulary if t != "<unk>"), key=vocabulary.get)
    types = [2, 3, 3] + [6 if len(t) == 6 and t.startswith("<0x") else 1 for t in tokens[3:]]
    scores = [float(-(i // 2)) for i in range(len(tokens))]  # ties on purpose
    for prefix in (True, False):
        name = f"gguf-llama-{prefix}"
        path = folder / f"{name}.gguf"
        write_gguf(str(path), "llama", tokens, types, scores=scores, bos_token_id=1, eos_token_id=2,
                   unknown_token_id=0, add_space_prefix=prefix, add_eos_token=prefix)
        oracle = Scored(tokens, types, scores, prefix)
        texts = [t for t in text_corpus.texts(5, count) if "<" not in t and len(t) < 400]
        lines = [{"text": t, "add_special_tokens": i % 2 == 0} for i, t in enumerate(texts)]
        wanted = [oracle.encode(line["text"]) for line in lines]
        wanted = [[1] + w + [2] * prefix if line["add_special_tokens"] else w for line, w in zip(lines, wanted)]
        got = run([xpool, "tokenize", "--model", str(path), "--jsonl"], lines)
        print(f"{name}:")
        report(name, "encode", [(line, g.get("ids"), w) for line, g, w in zip(lines, got, wanted)])
        lines = [{"ids": ids, "skip_special_tokens": True} for ids in wanted]
        got = run([xpool, "detokenize", "--model", str(path), "--jsonl"], lines)
        # With byte fallback nothing is lost.
        report(name, "decode", [(t, g.get("text"), t.replace("▁", " ")) for t, g in zip(texts, got)])


def gguf_refused(xpool, folder):
    """Files that must be refused, with what the message names."""
    global failures
    tokens, types = ["a", "b", "ab", "</s>"], [1, 1, 1, 3]
    cases = {
        "pre \"odd\"": dict(kind="gpt2", merges=["a b"], pre="odd"),
        "model \"bert\"": dict(kind="bert"),
        "tokenizer.ggml.merges[0]": dict(kind="gpt2", merges=["a c"]),
        "needs tokenizer.ggml.merges": dict(kind="gpt2"),
        "needs tokenizer.ggml.scores": dict(kind="llama"),
        "2 scores for 4 tokens": dict(kind="llama", scores=[0.0, 1.0]),
        "is not a number": dict(kind="llama", scores=[0.0, float("nan"), 0.0, 0.0]),
        "id 77": dict(kind="gpt2", merges=["a b"], add_bos_token=True, bos_token_id=77),
    }
    for words, case in cases.items():
        path = folder / "refused.gguf"
        write_gguf(str(path), case.pop("kind"), tokens, types, **case)
        done = subprocess.run([xpool, "tokenize", "--model", str(path), "a"], capture_output=True, encoding="utf-8",
                              check=False, timeout=600)
        if done.returncode != 1 or words not in done.stderr or "refused.gguf" not in done.stderr:
            print(f"  WRONG: {words}: exit {done.returncode} {done.stderr}")
            failures += 1
    print(f"gguf-refused: {len(cases)} files")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("xpool")
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--gguf")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.gguf and not pathlib.Path(options.gguf).exists():
        print(f"skipped: {options.gguf} is not there")
        options.gguf = None
    small = max(options.count // 10, 50)
    wanted = lambda name: options.only in name  # noqa: E731
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        published = [("tales", ROOT / "models" / "tales" / "qwen3-moe" / "tokenizer.json"),
                     ("qwen3", SHARED / "tokenizers" / "qwen3.tokenizer.json"),
                     ("deepseek-llm", SHARED / "tokenizers" / "deepseek-llm.tokenizer.json"),
                     ("tinystories", SHARED / "tinystories-656k" / "tokenizer.json")]
        for name, path in published:
            if not path.exists():
                print(f"{name}: skipped, {path.name} is not there")
            elif wanted(name):
                compare(options.xpool, name, path, Tokenizer.from_file(str(path)), options.count)
        for name, tokenizer in made_here():
            if wanted(name):
                path = folder / f"{name}.json"
                tokenizer.save(str(path))
                compare(options.xpool, name, path, Tokenizer.from_file(str(path)), small)
        gguf_cases = [("gguf-tales-gpt2", published[0][1], None, "gpt-2"), ("gguf-qwen2", published[1][1], True, "qwen2"),
                      ("gguf-deepseek-llm", published[2][1], True, "deepseek-llm")]
        for name, path, same, pre in gguf_cases:
            if not path.exists() or not wanted(name):
                continue
            reference = Tokenizer.from_file(str(path))
            if not same:
                reference.normalizer = None
                reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            gguf_of(str(folder / f"{name}.gguf"), reference, pre)
            # GGUF knows no "normalized": user tokens are found in the text as it is.
            data = json.loads(reference.to_str())
            for token in data["added_tokens"]:
                token["normalized"] = False
            compare(options.xpool, name, folder / f"{name}.gguf", Tokenizer.from_str(json.dumps(data)),
                    small * 3)
        for name, tokenizer in made_here():
            pre = {"llama3": "llama-bpe", "smollm": "smollm"}.get(name)
            if pre and wanted("gguf-" + name):
                if name == "llama3":  # llama.cpp adds BOS alone
                    tokenizer.post_processor = processors.TemplateProcessing(
                        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
                path = folder / f"gguf-{name}.gguf"
                more = {"bos_token_id": tokenizer.token_to_id("<s>")} if name == "llama3" else {}
                gguf_of(str(path), tokenizer, pre, **more)
                compare(options.xpool, "gguf-" + name, path, tokenizer, small)
        if wanted("gguf-refused"):
            gguf_refused(options.xpool, folder)
        if wanted("gguf-llama"):
            scored_gguf(options.xpool, folder, small)
        if options.gguf and wanted("gguf-smollm2"):
            import gguf

            fields = gguf.GGUFReader(options.gguf).fields
            get = lambda key: fields["tokenizer.ggml." + key].contents()  # noqa: E731
            reference = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(get("tokens"))},
                                             merges=[tuple(m.split(" ")) for m in get("merges")]))
            reference.pre_tokenizer = pre_tokenizers.Sequence([
                pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
            reference.decoder = decoders.ByteLevel()
            reference.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                          for t, k in zip(get("tokens"), get("token_type")) if k == 3])
            compare(options.xpool, "gguf-smollm2", options.gguf, reference, options.count)
    print("differences:", failures)
    sys.exit(failures > 0)


main()
