# SPDX-License-Identifier: MIT
"""FFN weights exist once, in the FfnAgent: read from /proc/PID/smaps of every process."""

import json
import os
import pathlib
import re
import struct

import harness

NAMED = re.compile(r"xpool-[\w./:-]+")


def mappings(pid):
    """[(name, {Rss, Pss, ...} in bytes)] of /proc/PID/smaps."""
    found = []
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if re.match(r"^[0-9a-f]+-[0-9a-f]+$", words[0]):
            found.append((" ".join(words[5:]), {}))
        elif words[0].endswith(":") and len(words) >= 2 and words[1].isdigit():
            found[-1][1][words[0][:-1]] = int(words[1]) * 1024
    return found


def total(maps, key, pattern=""):
    return sum(values.get(key, 0) for name, values in maps if re.search(pattern, name))


def tensor_bytes(path):
    """(FFN bytes, other bytes) of a safetensors file, by tensor name."""
    with open(path / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    sides = [0, 0]
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            sides[".mlp." not in name] += end - begin
    return sides


def look(system, checkpoints):
    """Checks every process of a system whose FFN checkpoints are these paths."""
    names = [os.path.realpath(c) for c in checkpoints]
    holders = 0
    for pid, command in system.processes().items():
        role = harness.role_of(command) or command[0]
        maps = mappings(pid)
        for name, _ in maps:
            mapped = os.path.realpath(name.removesuffix(" (deleted)")) if name.startswith("/") else ""
            harness.check(
                not any(mapped == n or mapped.startswith(n + "/") for n in names),
                f"{role} has the checkpoint {mapped} mapped",
            )
            if "xpool-ffn:" in name:
                harness.check(role.startswith("ffnagent"), f"{role} maps FFN weights: {name}")
                holders += 1
            if "xpool-kv:" in name:
                harness.check(role.startswith("serve"), f"{role} maps a KV Cache: {name}")
    harness.check(holders > 0, "nobody maps xpool-ffn:*, so the check says nothing")


def weights_once():
    """Two ids of one checkpoint: one copy of the FFN weights, none in any Instance."""
    models = [harness.model("left", dtype="float32"), harness.model("right", dtype="float32")]
    prompt = harness.golden()[0]
    ffn, other = tensor_bytes(harness.TALES)
    with harness.System(models) as system:
        system.start(120)
        for m in ("left", "right"):
            harness.check(system.generate(m, prompt["ids"], 48) == prompt["greedy_ids"], f"{m} is not exact")
        look(system, [harness.TALES])
        # float32 doubles the checkpoint's BF16.
        agent = mappings(system.pid("ffnagent"))
        resident = total(agent, "Rss", "xpool-ffn:")
        print(f"     FFN weights: {2 * ffn} bytes in float32, resident in the FfnAgent: {resident}")
        harness.check(resident >= 2 * ffn * 0.95, "the FfnAgent does not hold all FFN weights")
        harness.check(resident < 2 * ffn * 1.5, "the FfnAgent holds FFN weights more than once")
        system.stop()


def instance_bound():
    """A model whose FFN side is most of it: no Instance has room for it."""
    path = pathlib.Path(os.environ.get("XPOOL_TEST_MODELS", "")) / "wide"
    with harness.System([harness.model("left"), harness.model("right")]) as scratch:
        path = scratch.folder / "wide"
        code, out, error = harness_synth(path)
        harness.check(code == 0, f"model synth: {error}")
        ffn, other = tensor_bytes(path)
        harness.check(ffn > 5 * other, f"the checkpoint is not mostly FFN: {ffn} {other}")
        models = [harness.model("left", path, dtype="float32"), harness.model("right", path, dtype="float32")]
        with harness.System(models) as system:
            system.start(180)
            first = system.generate("left", list(range(1, 40)), 20)
            second = system.generate("right", list(range(1, 40)), 20)
            harness.check(first == second, "two ids of one checkpoint differ")
            look(system, [path])
            for m in ("left", "right"):
                resident = total(mappings(system.pid(f"serve {m}")), "Pss")
                bound = other + (64 << 20)
                print(f"     Instance {m}: {resident >> 20} MiB of {ffn >> 20} MiB FFN, {other >> 20} MiB other")
                harness.check(resident < min(bound, ffn), f"{m} takes {resident} bytes, more than {bound}")
            system.stop()


def harness_synth(path):
    import subprocess

    command = [str(harness.XPOOL), "model", "synth", "--arch", "llama", "--out", str(path), "--seed", "5"]
    command += ["--layers", "6", "--hidden", "256", "--intermediate", "24576", "--heads", "4", "--kv-heads", "2"]
    command += ["--head-dim", "64", "--dtype", "f32"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout, result.stderr


def budget():
    """A device too small for its models: admission refuses before a byte of weights is read, and says
    what does not fit."""
    with harness.System([harness.model("tales", dtype="float32")], memory="3MiB") as system:
        code, out, error = system.run("up", timeout=60)
        harness.check(code != 0, "xpool up started although nothing fits")
        text = out + error
        harness.check("cpu:" in text, f"the message names no device: {text[-500:]}")
        system.expect_nothing_left()


if __name__ == "__main__":
    harness.main(weights_once, instance_bound, budget)
