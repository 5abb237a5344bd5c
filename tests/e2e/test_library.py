# SPDX-License-Identifier: MIT
"""libxpool through real processes: examples/engine as somebody else's engine beside daemon and agents.
It is served and ends in order; a native Instance beside it stays exact when it is killed; killing an agent
(with deadlines.reform = 0) or the daemon ends its call with the canonical failure within two seconds, and
else its call waits for the next Generation; what does not fit the plan is refused by name. The installed library is all that an engine needs. Observers count every layer of every
step on all three sides."""

import array
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import harness

BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", harness.ROOT / "build"))
ENGINE = BUILD / "examples" / "engine"
GEOMETRY = json.loads((harness.TALES / "config.json").read_text())
LAYERS, HIDDEN = GEOMETRY["num_hidden_layers"], GEOMETRY["hidden_size"]


def library_model(identifier, **settings):
    """A model of an engine that is not xpool's own."""
    return harness.model(identifier, engine="sglang", dtype="float32", **settings)


class Library(harness.System):
    """Roles by hand, and example engines."""

    engines = 0

    def start_roles(self, *serve, gateway=False):
        commands = [["daemon", "serve"]]
        commands += [["atnagent", "--device", device] for device in self.atn]
        commands += [["ffnagent", "--device", device] for device in self.ffn]
        commands += [["serve", identifier] for identifier in serve]
        commands += [["gateway"]] if gateway else []
        self.hand = [self.launch(*command) for command in commands]
        return self

    def engine(self, model, *arguments):
        self.engines += 1
        path = self.folder / f"engine.{self.engines}"
        command = [str(ENGINE), "--config", str(self.config), "--model", model, *map(str, arguments)]
        with open(path, "wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=self.env
            )
        self.sessions.add(process.pid)
        process.output = path
        return process

    def down(self, *ended):
        """Ends in order; the daemon says that everybody ended by itself."""
        code, out, err = self.run("down")
        harness.check(code == 0, f"xpool down: {code} {out} {err}")
        for process in [*self.hand, *ended]:
            code = process.wait(20 * harness.SLOW)
            harness.check(code == 0, f"{process.args[:3]} ended with {code}")
        self.expect_nothing_left()


def lines(engine):
    return engine.output.read_text(errors="replace").splitlines()


def wait_line(engine, start, timeout=30):
    def look():
        for line in lines(engine):
            if line.startswith(start):
                return line
        harness.check(engine.poll() is None, f"the engine ended with {engine.poll()}: {lines(engine)}")
        return None

    return harness.wait_until(look, timeout, f"the engine says {start!r}; it said {lines(engine)[-5:]}")


def floats(path):
    values = array.array("f")
    values.frombytes(path.read_bytes())
    return values


def serves():
    """Admitted, executable, served, an ordered end; answers do not depend on rows, dtype or company."""
    with Library([library_model("other")]) as system:
        system.start_roles()
        files = {}
        for name, arguments in {
            "one": ("--rows", 1),
            "many": ("--rows", 33, "--step-kind", 1),
            "half": ("--rows", 33, "--dtype", "bf16"),
        }.items():
            files[name] = system.folder / name
            engine = system.engine("other", *arguments, "--output", files[name])
            harness.check(engine.wait(60) == 0, f"{name}: {lines(engine)}")
            harness.check("executable" in lines(engine), f"{name}: {lines(engine)}")
        one, many = floats(files["one"]), floats(files["many"])
        harness.check(len(one) == LAYERS * HIDDEN, f"{len(one)} values")
        for layer in range(LAYERS):
            first = many[layer * 33 * HIDDEN : layer * 33 * HIDDEN + HIDDEN]
            harness.check(first == one[layer * HIDDEN : (layer + 1) * HIDDEN], f"layer {layer}: rows differ")
        half = array.array("H")
        half.frombytes(files["half"].read_bytes())
        for got, want in zip(half, many):
            value = array.array("f", array.array("I", [got << 16]).tobytes())[0]
            harness.check(abs(value - want) <= abs(want) * 2**-8, f"bf16: {value}, not {want}")
        engine = system.engine("other", "--serve")
        wait_line(engine, "serving")
        harness.wait_until(lambda: system.run("daemon", "check")[0] == 0, 20, "daemon check")
        state = system.state()
        harness.check("example 1.0" in json.dumps(state), f"/v1/state does not name the engine: {state}")
        system.down(engine)
        harness.check(any(line.startswith("end drain") for line in lines(engine)), lines(engine))


def ranks():
    """Attention TP: every rank gets the full sum. Attention DP: every rank its own rows, none is allowed."""
    with Library([library_model("other")]) as system:
        system.start_roles()
        out = system.folder / "out"
        engine = system.engine("other", "--rows", 7, "--output", out)
        harness.check(engine.wait(60) == 0, f"{lines(engine)}")
        whole = floats(out)
        system.down()
    for shape, rows in (("tp", (7, 7)), ("dp", (7, 4)), ("dp", (0, 7))):
        with Library([library_model("other", **{f"attention_{shape}": 2})], atn=2) as system:
            system.start_roles()
            outs = [system.folder / f"out{rank}" for rank in range(2)]
            more = ("--dp-rows", f"{rows[0]},{rows[1]}") if shape == "dp" else ()
            engines = [
                system.engine(
                    "other", "--serve", "--rank", rank, "--rows", rows[rank], "--output", outs[rank], *more
                )
                for rank in range(2)
            ]
            # The first that leaves takes the Instance with it: all wait until all are done.
            for engine in engines:
                wait_line(engine, "calls")
            system.down(*engines)
            for rank in range(2):
                got = floats(outs[rank])
                harness.check(len(got) == LAYERS * rows[rank] * HIDDEN, f"{shape} {rows}: {len(got)} values")
                for layer in range(LAYERS):
                    first = layer * rows[rank] * HIDDEN
                    want = whole[layer * 7 * HIDDEN : (layer * 7 + rows[rank]) * HIDDEN]
                    harness.check(
                        got[first : first + rows[rank] * HIDDEN] == want, f"{shape} {rows}: rank {rank}, layer {layer}"
                    )


def rank_death():
    """One of two ranks dies: the other is told to end, the Generation goes on, both may come back."""
    with Library([library_model("other", attention_tp=2)], atn=2) as system:
        system.start_roles()
        for _ in range(2):
            engines = [system.engine("other", "--rank", r, "--serve", "--steps", 0, "--quiet") for r in range(2)]
            for engine in engines:
                wait_line(engine, "serving")
            engines[1].kill()
            harness.check(engines[0].wait(10 * harness.SLOW) == 0, f"{lines(engines[0])}")
            harness.check(any(line.startswith("end now") for line in lines(engines[0])), f"{lines(engines[0])}")
            harness.check(all(p.poll() is None for p in system.hand), "an agent or the daemon ended too")
        system.down()


def survivors():
    """kill -9 of the engine in the middle of its calls: a native Instance beside it stays exact, and the
    engine may come back."""
    prompt = harness.golden()[0]
    models = [library_model("other"), harness.model("native", dtype="float32")]
    with Library(models) as system:
        system.start_roles("native", gateway=True)
        engine = system.engine("other", "--serve", "--steps", 0, "--rows", 8, "--quiet")
        system.wait_ready(60)
        for _ in range(3):
            stream = system.stream("native", prompt["ids"], 48)
            stream.wait(2)
            engine.kill()
            engine.wait(10)
            harness.check(stream.result() == prompt["greedy_ids"], "the native Instance's tokens changed")
            harness.wait_until(lambda: "other" not in system.list_models(), 10, "the dead engine's model is down")
            engine = system.engine("other", "--serve", "--steps", 0, "--rows", 8, "--quiet")
            wait_line(engine, "serving")
            harness.wait_until(lambda: "other" in system.list_models(), 20, "the engine is back")
            got = system.generate("native", prompt["ids"], 48)
            harness.check(got == prompt["greedy_ids"], "the native Instance is not exact beside it")
        system.down(engine)


def killed(role, words):
    """kill -9 of `role` while the engine is in its calls: they end with the canonical failure."""
    with Library([library_model("other")], ffn=2, settings="[deadlines]\nreform = 0") as system:
        system.start_roles()
        engine = system.engine("other", "--serve", "--steps", 0, "--rows", 4, "--quiet")
        wait_line(engine, "serving")
        # The call stands still when the signal comes.
        stopped = [pid for name, pid in system.roles().items() if name.startswith("ffnagent")]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
        began = time.monotonic()
        os.kill(system.pid(role), signal.SIGKILL)
        code = engine.wait(10 * harness.SLOW)
        took = time.monotonic() - began
        for pid in stopped:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        said = lines(engine)
        harness.check(code == 1, f"the engine ended with {code}: {said}")
        error = [line for line in said if line.startswith("error 9: xpool_rank_ffn")]
        harness.check(error and words in error[0], f"the call did not end with {words!r}: {said}")
        harness.check(any(line.startswith("end failed") and words in line for line in said), f"on_end: {said}")
        harness.check(took < 2 * harness.SLOW, f"it took {took:.2f} s")
        print(f"     {role}: the call ended after {took * 1000:.0f} ms: {error[0].partition('_ffn: ')[2]}")
        harness.wait_until(lambda: not system.processes(), 10, f"everything ends (left: {system.roles()})")


def atnagent():
    killed("atnagent", "atnagent cpu:0: its process")


def ffnagent():
    killed("ffnagent cpu:1", "ffnagent cpu:1: its process")


def daemon():
    killed("daemon", "the daemon died")


def generations():
    """Its call waits while the agents are replaced, also with two ranks, and then goes on."""
    for tp in (1, 2):
        with Library([library_model("other", attention_tp=tp)], atn=tp) as system:
            system.start_roles()
            engines = [
                system.engine("other", "--rank", r, "--serve", "--steps", 0, "--rows", 4, "--quiet") for r in range(tp)
            ]
            for engine in engines:
                wait_line(engine, "serving")
            ready = lambda number: system.state()["generation"] == number and system.state()["verdict"]["system_ready"]
            calls = lambda: system.state()["models"][0]["engine"]["ffn_calls"]
            harness.wait_until(lambda: ready(1), 20, "READY")
            for number, role in ((2, f"ffnagent cpu:{tp}"), (3, "atnagent cpu:0")):
                agents = [p for p in system.hand if "agent" in p.args[1]]
                # No layer is under way while its agent dies: ranks must have been answered alike.
                os.kill(system.pid(f"ffnagent cpu:{tp}"), signal.SIGSTOP)
                time.sleep(0.3)
                os.kill(system.pid(role), signal.SIGKILL)
                for process in agents:
                    process.wait(10 * harness.SLOW)
                system.hand = [p for p in system.hand if p not in agents]
                system.hand += [system.launch(*process.args[1:-2]) for process in agents]
                harness.wait_until(lambda n=number: ready(n), 20, f"Generation {number}")
                before = calls()
                harness.wait_until(lambda b=before: calls() > b + 2 * LAYERS, 10, "its calls go on")
            harness.check(all(engine.poll() is None for engine in engines), "an engine ended")
            system.down(*engines)


def answered(engine):
    """The number of the last answer in an engine's arena (transport/mailbox.h)."""
    folder = f"/proc/{engine.pid}/fd"
    for name in os.listdir(folder):
        if "xpool-transport" in os.readlink(f"{folder}/{name}"):
            with open(f"{folder}/{name}", "rb") as arena:
                return int.from_bytes(os.pread(arena.fileno(), 8, 128), "little")
    raise harness.Failed("an engine without an arena")


def stop_between(victim, engines):
    """Stops an AtnAgent such that the rank of the other one has got a layer that its own has not."""

    def stopped():
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.05)
        if len({answered(engine) for engine in engines}) > 1:
            return True
        os.kill(victim, signal.SIGCONT)
        return False

    harness.wait_until(stopped, 60, "one rank is ahead", 0.003)


def one_rank_ahead():
    """Attention TP, and only one of two ranks has got a layer when its agents die: the other gets it handed on,
    and every row of every step is right. Under attention DP rows differ: that Instance ends, the rest goes on."""
    with Library([library_model("other")]) as system:
        system.start_roles()
        out = system.folder / "out"
        engine = system.engine("other", "--output", out)
        harness.check(engine.wait(60) == 0, f"{lines(engine)}")
        whole = out.read_bytes()
        system.down()
    for shape in ("tp", "dp"):
        with Library([library_model("other", **{f"attention_{shape}": 2})], atn=2) as system:
            system.start_roles()
            outs = [system.folder / f"out{rank}" for rank in range(2)]
            more = ("--dp-rows", "1,1") if shape == "dp" else ()
            engines = [
                system.engine(
                    "other", "--serve", "--rank", r, "--output", outs[r], "--steps", 0, "--quiet", *more
                )
                for r in range(2)
            ]
            for engine in engines:
                wait_line(engine, "serving")
            ready = lambda number: system.state()["generation"] == number and system.state()["verdict"]["system_ready"]
            harness.wait_until(lambda: ready(1), 20, "READY")
            for number in (2, 3) if shape == "tp" else (2,):
                agents = [p for p in system.hand if "agent" in p.args[1]]
                # It does not take the commit that the other AtnAgent takes.
                victim = system.pid(f"atnagent cpu:{number % 2}")
                stop_between(victim, engines)
                os.kill(victim, signal.SIGKILL)
                for process in agents:
                    process.wait(10 * harness.SLOW)
                system.hand = [p for p in system.hand if p not in agents]
                system.hand += [system.launch(*process.args[1:-2]) for process in agents]
                if shape == "dp":
                    break
                harness.wait_until(lambda n=number: ready(n), 20, f"Generation {number}")
                before = outs[0].stat().st_size
                harness.wait_until(lambda b=before: outs[0].stat().st_size > b + 2 * len(whole), 10, "its calls go on")
            if shape == "dp":
                for engine in engines:
                    engine.wait(10 * harness.SLOW)
                reason = harness.wait_until(lambda: system.state()["models"][0]["reason"], 10, "the model is down")
                harness.check("its ranks had answers" in reason, f"the reason: {reason}")
                system.down()
                continue
            system.down(*engines)
            for rank in range(2):
                got = outs[rank].read_bytes()
                count, rest = divmod(len(got), len(whole))
                harness.check(count > 4, f"rank {rank} made {count} steps")
                harness.check(got == whole * count + whole[:rest], f"rank {rank}: a row is not exact")


def copy_of(checkpoint, folder):
    """The same checkpoint with other weights."""
    shutil.copytree(checkpoint, folder)
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    return folder


def refusals():
    """Each mismatch is refused by name, and nothing of it disturbs the next engine."""
    models = [library_model("other"), harness.model("native", dtype="float32")]
    with Library(models) as system:
        system.start_roles()
        wrong = copy_of(harness.TALES, system.folder / "copy")
        for arguments, code, words in (
            (("--hidden", 64), 8, "width 64"),
            (("--layers", 5), 8, "5 layers"),
            (("--decode-rows", 100000), 8, "models[].decode_rows"),
            (("--prefill-rows", 100000), 8, "models[].prefill_rows"),
            (("--checkpoint", wrong), 8, "differs from the checkpoint of the plan"),
            (("--tp", 2), 4, "models[].attention_tp"),
            (("--rank", 1), 4, "rank 1"),
        ):
            engine = system.engine("other", *arguments)
            harness.check(engine.wait(30) == 1, f"{arguments}: {lines(engine)}")
            error = [line for line in lines(engine) if line.startswith("error")]
            harness.check(error and error[0].startswith(f"error {code}: xpool_rank_open"), f"{arguments}: {error}")
            harness.check(words in error[0], f"{arguments}: {words!r} is not in {error[0]}")
        for model, words in (("native", 'engine is "native"'), ("nobody", "models[].id")):
            engine = system.engine(model)
            harness.check(engine.wait(30) == 1, f"{model}: {lines(engine)}")
            harness.check(words in lines(engine)[-1], f"{model}: {lines(engine)}")
        first = system.engine("other", "--serve")
        wait_line(first, "serving")
        second = system.engine("other")
        harness.check(second.wait(30) == 1 and "already has" in lines(second)[-1], f"a second one: {lines(second)}")
        engine = system.engine("other", "--rows", 100000)
        harness.check(engine.wait(30) == 1, "too many rows")
        system.down(first)


def no_daemon():
    with Library([library_model("other")], settings="[deadlines]\nregistration = 1.0") as system:
        began = time.monotonic()
        engine = system.engine("other")
        harness.check(engine.wait(20) == 1, f"{lines(engine)}")
        harness.check(time.monotonic() - began < 5 * harness.SLOW, "it waited too long")
        harness.check("deadlines.registration" in lines(engine)[-1], f"{lines(engine)}")
        harness.check(lines(engine)[-1].startswith("error 2:"), f"{lines(engine)}")


def traces(system):
    """(header, records) of every observer file, as `xpool trace` prints them."""
    files = sorted((system.folder / "observe").glob("*.observe"))
    found = []
    for file in files:
        done = subprocess.run([str(harness.XPOOL), "trace", str(file)], capture_output=True, text=True, check=True, timeout=120)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        found.append((rows[0], rows[1:]))
    return found


def observers():
    """One record a layer and step on the rank, the AtnAgent and the FfnAgent, for both kinds of engine."""
    prompt = harness.golden()[0]
    models = [library_model("other"), harness.model("native", dtype="float32")]
    with Library(models, settings='[observe]\nfolder = "observe"\nrecords = 100000') as system:
        system.start_roles("native", gateway=True)
        engine = system.engine("other", "--serve", "--steps", 3, "--rows", 5, "--step-kind", 2, "--execution", 1)
        system.wait_ready(60)
        wait_line(engine, "calls")
        system.generate("native", prompt["ids"], 48)
        system.down(engine)
        found = {header["role"]: (header, rows) for header, rows in traces(system) if header["role"] != "rank"}
        ranks = {header["name"]: rows for header, rows in traces(system) if header["role"] == "rank"}
        harness.check(set(ranks) == {"other.0", "native.0"}, f"ranks: {set(ranks)}")
        other, native = ranks["other.0"], ranks["native.0"]
        harness.check(len(other) == 3 * LAYERS, f"{len(other)} records of 3 steps over {LAYERS} layers")
        for number, record in enumerate(other):
            want = {
                "role": "rank", "model": "other", "rank": 0, "layer": number % LAYERS, "rows": 5,
                "sequence": number + 1, "step": "mixed", "execution": "decode_graph",
            }
            harness.check({**record, **want} == record, f"record {number}: {record}")
        # The warm-up's one token, the prompt in one chunk, then a step a token but the first.
        steps = [record["rows"] for record in native if record["layer"] == 0]
        harness.check(len(native) == len(steps) * LAYERS, f"{len(native)} records, {len(steps)} steps")
        harness.check(sum(steps) == 1 + len(prompt["ids"]) + 47, f"rows of the native steps: {steps}")
        atn, ffn = found["atnagent"][1], found["ffnagent"][1]
        for name, records in (("atnagent", atn), ("ffnagent", ffn)):
            harness.check(len(records) == len(other) + len(native), f"{name}: {len(records)} records")
        for model, records in (("other", other), ("native", native)):
            def keys(rows):
                return [(row["layer"], row["rows"]) for row in rows if row["model"] == model]

            harness.check(keys(atn) == keys(records) == keys(ffn), f"{model}: the sides differ")
            asked = [row["request"] for row in atn if row["model"] == model]
            harness.check(asked == [row["sequence"] for row in records], f"{model}: requests of the AtnAgent")
        harness.check(all(row["capacity"] >= row["rows"] and "graph_template" in row for row in ffn), "capacities")
        harness.check({row["lane"] for row in atn} <= set(range(16)), "lanes")


def installed():
    """Nothing but what `cmake --install` puts down: header, library, pkg-config; C99 and C++17, pedantic."""
    if not shutil.which("cmake") or not shutil.which("pkg-config"):
        print("     skipped: no cmake or pkg-config")
        return
    with tempfile.TemporaryDirectory(prefix="xpool-install-") as name:
        prefix = pathlib.Path(name)
        command = ["cmake", "--install", str(BUILD), "--prefix", name, "--component", "library"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        harness.check(done.returncode == 0, done.stdout + done.stderr)
        (pc,) = prefix.rglob("xpool.pc")
        library = pc.parent.parent
        for file in (prefix / "include/xpool/xpool.h", library / "libxpool.so", library / "libxpool.so.1"):
            harness.check(file.exists(), f"{file.relative_to(prefix)} is not installed")
        env = {**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "xpool"], capture_output=True, text=True, check=True, env=env, timeout=120
        ).stdout.split()
        (source,) = prefix.rglob("examples/engine.c")
        strict = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
        for compiler in (["cc", "-std=c99"], ["c++", "-std=c++17", "-x", "c++"]):
            program = prefix / ("engine-" + compiler[0])
            done = subprocess.run(
                [*compiler, *strict, str(source), "-x", "none", "-o", str(program), *flags, "-lpthread"],
                capture_output=True, text=True, timeout=120,
            )
            harness.check(done.returncode == 0, f"{compiler}: {done.stderr}")
            run = subprocess.run(
                [str(program), "--config", "/nowhere.toml", "--model", "x"],
                capture_output=True, text=True, env={**env, "LD_LIBRARY_PATH": str(library)}, timeout=120,
            )
            harness.check(run.returncode == 1 and "/nowhere.toml" in run.stdout, f"{run.stdout}{run.stderr}")
        done = subprocess.run(
            [str(harness.ROOT / "scripts/check-symbols"), str(library / "libxpool.so.1")],
            capture_output=True, text=True, timeout=120,
        )
        harness.check(done.returncode == 0, done.stdout + done.stderr)


if __name__ == "__main__":
    if not ENGINE.exists():
        print(f"{ENGINE} is missing: build with scripts/build --tests")
        sys.exit(1)
    harness.main(
        serves, ranks, rank_death, survivors, atnagent, ffnagent, daemon, generations, one_rank_ahead, refusals, no_daemon, observers,
        installed,
    )
