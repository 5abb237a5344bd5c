#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""xpool chat-template against Jinja2, set up as transformers does, on generated conversations.

usage: text_templates.py XPOOL [--count N] [--gguf SMOLLM2.gguf]
The templates of models/tales, of ../shared and of the GGUF are the checkpoints' own and must be
recognised; the others are written here, and only name what the family's template does. Exits 1 on any
difference.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

import text_corpus

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"

# What the families do, in words of our own.
DEFAULT_SYSTEM = """\
{%- macro turn(role, text) -%}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{%- if messages and messages[0].role != 'system' %}{{ turn('system', DEFAULT) }}{% endif -%}
{%- for m in messages %}{{ turn(m.role, m.content) }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
QWEN25 = """\
{%- set ns = namespace(system=DEFAULT) -%}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif -%}
{{- '<|im_start|>system\\n' + ns.system -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' -}}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ' -}}
{{- '"arguments": <args-json-object>}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|im_start|>user' -}}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' -}}
{{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{- '<|im_start|>assistant' ~ ('\\n' ~ m.content if m.content else '') -}}
{%- for call in m.tool_calls -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '\\n<tool_call>\\n{"name": "' ~ f.name ~ '", "arguments": ' ~ (f.arguments | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role in ('user', 'assistant') or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""
LLAMA3 = """\
{%- for m in messages -%}
{{- (bos_token if loop.first else '') ~ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' -}}
{{- m.content.strip() ~ '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' -}}
"""
OWN = {"smollm2": (DEFAULT_SYSTEM, "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
       "qwen2": (DEFAULT_SYSTEM, "You are a helpful assistant."),
       "qwen2.5": (QWEN25, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
       "llama3": (LLAMA3, "")}
# ChatML, spelled in ways that render the same: each must be recognised.
CHATML = [
    "{%- for message in messages %}\n  {{- \"<|im_start|>\" + message.role + \"\\n\" }}\n  {{- message.content }}\n"
    "  {{- '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "  {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n",
    "{% for message in messages %}\n<|im_start|>{{ message['role'] }}{{ '\\n' }}{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}\n<|im_start|>assistant{{ '\\n' }}{% endif %}",
    "{# turns #}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
]
# Templates that are near to a known one and render something else: none may be recognised.
STRANGE = [
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% for message in messages %}\n {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' }}",
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] ", "{%", "{{ 'a", "", "plain", "{# x",
]
failures = 0


def environment():
    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    return env


def text(rng, corpus):
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(["", "\n", "\n\nx\n\n", " pad ", "\t", "\u00a0x\u3000", "\x1cx\x1f"])
    if kind < 0.15:
        return "<tool_response>\n" + rng.choice(corpus) + rng.choice(["\n</tool_response>", "</tool_response> "])
    return rng.choice(corpus)


def value(rng, corpus, depth=0):
    kind = rng.randint(0, 9 if depth < 3 else 6)
    if kind < 3:
        return text(rng, corpus)[:30]
    if kind == 3:
        return rng.choice([0, 1, -7, 2**53, -(2**63), 10**17])
    if kind == 4:
        return rng.choice([0.0, -0.0, 1.5, 1e16, 1e15, 123456789012345680.0, 1e-4, 1e-5, 0.1, 1e22, 1e300, 5e-324,
                           rng.random(), rng.uniform(-1e9, 1e9), rng.random() * 10 ** rng.randint(-20, 20)])
    if kind < 7:
        return rng.choice([True, False, None])
    if kind == 7:
        return [value(rng, corpus, depth + 1) for _ in range(rng.randint(0, 3))]
    return {text(rng, corpus)[:12]: value(rng, corpus, depth + 1) for _ in range(rng.randint(0, 4))}


def assistant(rng, corpus, calls):
    content = text(rng, corpus)
    kind = rng.random()
    if kind < 0.25:
        content = rng.choice(["", "\n"]) + "<think>" + rng.choice(["\n", "", "\n\n"]) + text(rng, corpus) + \
            rng.choice(["\n</think>\n\n", "</think>", "\n\n</think>\n"]) + content
    elif kind < 0.3:
        content += "</think>" + text(rng, corpus) + "</think>\n\n" + text(rng, corpus)
    message = {"role": "assistant", "content": content}
    if rng.random() < 0.2:
        message["reasoning_content"] = rng.choice(["", None, "\n" + text(rng, corpus) + "\n"])
    if calls and rng.random() < 0.4:
        message["tool_calls"] = []
        for _ in range(rng.randint(0, 3)):
            call = {"name": rng.choice(["f", "get_weather", "größe"]),
                    "arguments": rng.choice([value(rng, corpus), {"city": text(rng, corpus)}, "{\"a\": 1}"])}
            message["tool_calls"].append(
                {"type": "function", "function": call} if rng.random() < 0.7 else call)
    return message


def conversation(rng, corpus, calls):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng, corpus)})
    for _ in range(rng.randint(0 if messages else 1, 6)):
        role = rng.choice(["user", "user", "assistant", "assistant", "tool" if calls else "user", "system"])
        messages.append(assistant(rng, corpus, calls) if role == "assistant"
                        else {"role": role, "content": text(rng, corpus)})
    line = {"messages": messages, "add_generation_prompt": rng.random() < 0.7}
    if calls and rng.random() < 0.4:
        line["tools"] = [value(rng, corpus) if rng.random() < 0.2 else
                         {"type": "function", "function": {"name": "f", "parameters": value(rng, corpus)}}
                         for _ in range(rng.randint(0, 3))]
    if calls and rng.random() < 0.5:
        line["enable_thinking"] = rng.random() < 0.5
    return line


def compare(name, command, template, count, calls, **variables):
    global failures
    rng = random.Random(name)
    corpus = [t.replace("\0", "") for t in text_corpus.texts(7, 300, ["<|im_end|>", "</think>"])]
    lines = [conversation(rng, corpus, calls) for _ in range(count)]
    done = subprocess.run(command + ["--jsonl"], input="".join(json.dumps(line) + "\n" for line in lines),
                          capture_output=True, encoding="utf-8", check=False, timeout=600)
    answers = [json.loads(line) for line in done.stdout.split("\n") if line]
    compiled = environment().from_string(template)
    bad = 0
    for line, answer in zip(lines, answers):
        wanted = compiled.render(**line, **variables)
        if answer.get("text") != wanted:
            bad += 1
            if bad < 3:
                print(f"  {json.dumps(line)[:600]}\n  got    {answer}\n  wanted {wanted!r}")
    if done.returncode != 0 or len(answers) != count:
        print(f"  exit {done.returncode}, {len(answers)} answers", done.stderr[-300:])
        bad += 1
    failures += bad
    print(f"{name}: {count - bad}/{count}", flush=True)


def name_of(xpool, path):
    done = subprocess.run([xpool, "chat-template", "--model", str(path), "--name"], capture_output=True,
                          encoding="utf-8", check=False, timeout=600)
    return done.stdout.strip() if done.returncode == 0 else None, done


def expect(what, good):
    global failures
    if not good:
        print("  WRONG:", what)
        failures += 1


def recognise(xpool, folder):
    for i, template in enumerate(CHATML + STRANGE):
        path = folder / f"spelling-{i}"
        path.mkdir()
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
        name, done = name_of(xpool, path)
        if i < len(CHATML):
            expect(f"{template!r} is chatml, got {name} {done.stderr}", name == "chatml")
            compare(f"chatml spelling {i}", [xpool, "chat-template", "--model", str(path)], template, 60, False)
        else:
            expect(f"{template!r} is refused", name is None and done.returncode == 1 and
                   "models[].chat_template" in done.stderr and "chat_template.jinja" in done.stderr)
    print(f"refused: {len(STRANGE)} strange templates")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("xpool")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--gguf")
    options = parser.parse_args()
    if options.gguf and not pathlib.Path(options.gguf).exists():
        print(f"skipped: {options.gguf} is not there")
        options.gguf = None
    xpool, count = options.xpool, options.count
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        tales = ROOT / "models" / "tales" / "qwen3-moe"
        template = json.loads((tales / "tokenizer_config.json").read_text())["chat_template"]
        expect("tales is chatml", name_of(xpool, tales)[0] == "chatml")
        compare("tales", [xpool, "chat-template", "--model", str(tales)], template, count, False)
        recognise(xpool, folder)
        for name, (template, default) in OWN.items():
            compare(name, [xpool, "chat-template", "--model", str(tales), "--template", name], template, count,
                    name == "qwen2.5", DEFAULT=default, bos_token="<|begin_of_text|>")
        config = SHARED / "tokenizers" / "qwen3.tokenizer_config.json"
        if config.exists():
            (folder / "qwen3").mkdir()
            (folder / "qwen3" / "tokenizer_config.json").write_text(config.read_text(encoding="utf-8"), "utf-8")
            expect("qwen3 is recognised", name_of(xpool, folder / "qwen3")[0] == "qwen3")
            compare("qwen3", [xpool, "chat-template", "--model", str(folder / "qwen3")],
                    json.loads(config.read_text(encoding="utf-8"))["chat_template"], 2 * count, True)
        else:
            print("qwen3: skipped, its tokenizer_config.json is not there")
        if options.gguf:
            import gguf

            template = gguf.GGUFReader(options.gguf).fields["tokenizer.chat_template"].contents()
            expect("the GGUF is smollm2", name_of(xpool, options.gguf)[0] == "smollm2")
            compare("gguf-smollm2", [xpool, "chat-template", "--model", options.gguf], template, count, False)
    print("differences:", failures)
    sys.exit(failures > 0)


main()
