# SPDX-License-Identifier: MIT
"""xpool kv on a running system: what it shows is what /v1/state and /metrics show; floors, ceilings and
trims take effect live; mistakes say what is allowed; the market's record replays. An Instance that does
not answer a command is reported, then treated as failed, and its memory returns. A daemon that dies at a
step of an operation ends everything, and the next start is clean."""

import json
import time

import harness

TOKENS = 40
PROMPT = [(5 * i + 1) % 400 for i in range(500)]


def system_of_two(settings="", **more):
    models = [harness.model(m, dtype="float32", decode_rows=4, kv_floor_tokens=256) for m in ("a", "b")]
    return harness.System(models, memory="64MiB", settings=settings, **more)


def shown(system):
    code, out, err = system.run("kv", "--json")
    harness.check(code == 0, f"xpool kv --json: {code} {err}")
    kv = json.loads(out)
    return kv, {group["model"]: group for group in kv["groups"]}


def settles(system, condition, what):
    return harness.wait_until(lambda: condition(shown(system)[1]), 10, what, 0.05)


def books_are_right(system):
    """Of every byte of a pool it is said once where it is."""
    kv, _ = shown(system)
    for pool in kv["pools"]:
        charged = 0
        for group in kv["groups"]:
            size = max(group["backed"]["bytes"], group["floor"]["bytes"])
            charged += size * group["devices"].count(pool["device"])
        harness.check(charged == pool["charged_bytes"], f"{charged} bytes are charged in {kv}")
        harness.check(pool["free_bytes"] == pool["bytes"] - charged, f"free bytes of {pool}")


def commands():
    with system_of_two() as system:
        code, out, err = system.run("kv")
        harness.check(code == 1 and "is it running?" in err, f"kv without a daemon: {code} {err}")
        system.start(60)
        system.generate("a", PROMPT, TOKENS)
        _, groups = shown(system)
        a, b = groups["a"], groups["b"]
        harness.check(a["backed"]["tokens"] >= len(PROMPT) > a["floor"]["tokens"], f"a did not grow: {a}")
        harness.check(b["backed"] == b["floor"], f"b has asked for nothing: {b}")
        books_are_right(system)

        # The same everywhere.
        state = {m["id"]: m["kv"] for m in system.state()["models"]}
        metrics = system.metrics()
        harness.check(state["a"]["backed_tokens"] == a["backed"]["tokens"], f"/v1/state: {state}")
        name = 'xpool_kv_tokens_backed{model="a",dp_rank="0"}'
        harness.check(metrics[name] == a["backed"]["tokens"], "/metrics differs")
        code, out, _ = system.run("kv")
        harness.check(code == 0 and str(a["backed"]["tokens"]) in out and "policy deadline" in out, out)

        # A trim drops the prefix cache and gives back all but the floor.
        code, out, err = system.run("kv", "trim", "a")
        harness.check(code == 0, err)
        settles(system, lambda g: g["a"]["backed"] == g["a"]["floor"] and g["a"]["cached"]["tokens"] == 0, "a trim")
        books_are_right(system)

        # A floor is mapped at once, a ceiling is kept.
        code, out, err = system.run("kv", "set", "b", "--floor", "600")
        harness.check(code == 0, err)
        harness.check(out.startswith("model b: floor ") and "of them have memory so far" in out, out)
        settles(system, lambda g: g["b"]["backed"]["tokens"] >= 600, "a raised floor")
        code, _, err = system.run("kv", "set", "b", "--floor", "256", "--ceiling", "300")
        harness.check(code == 0, err)
        settles(system, lambda g: g["b"]["backed"]["tokens"] <= g["b"]["ceiling"]["tokens"], "a lowered ceiling")
        books_are_right(system)
        too_long = {"model": "b", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
        status, _, data = harness.http_request(system.gateway + "/generate", "POST", too_long)
        harness.check(status == 400, f"a prompt above the ceiling: {status} {data[:200]}")
        code, _, err = system.run("kv", "set", "b", "--ceiling", str(b["ceiling"]["tokens"]))
        harness.check(code == 0, err)
        system.generate("b", PROMPT, TOKENS)

        for arguments, text in (
            (("set", "c", "--floor", "1"), "there are a, b"),
            (("set", "a", "--floor", "0"), "allowed: a number of tokens from 1"),
            (("set", "a", "--ceiling", "100"), "allowed are 1 <= floor <= ceiling <="),
            (("set", "a", "--ceiling", "999999999"), "allowed are 1 <= floor <= ceiling <="),
            (("set", "a"), "needs a model and --floor or --ceiling"),
            (("trim",), "needs a model or --all"),
        ):
            code, _, err = system.run("kv", *arguments)
            harness.check(code in (1, 2) and text in err, f"kv {arguments}: {code} {err}")

        # The order of demands changes live, and a record with both replays.
        for name in ("arrival", "deadline", "arrival"):
            code, out, err = system.run("kv", "policy", name)
            harness.check(code == 0 and name in out, f"kv policy {name}: {code} {out} {err}")
            harness.check(shown(system)[0]["policy"] == name, f"the policy is not {name}")
            system.generate("a", PROMPT, TOKENS)
            system.run("kv", "trim", "--all")
        code, _, err = system.run("kv", "policy", "static")
        harness.check(code == 2 and "allowed: deadline, arrival" in err, f"kv policy static: {code} {err}")

        record = system.folder / "record"
        code, _, err = system.run("kv", "--record", str(record))
        harness.check(code == 0 and record.stat().st_size > 1000, err)
        code, out, err = system.run("kv", "--replay", str(record))
        harness.check(code == 0 and "the same decisions" in out, f"{out} {err}")
        code, _, err = system.run("kv", "--replay", str(system.config))
        harness.check(code == 1 and "no record" in err, err)
        code, _, err = system.run("kv", "trim", "--all")
        harness.check(code == 0, err)
        system.stop()


def several_groups():
    """A model's groups are set together or not at all. No Instance is needed: the books are the plan's."""
    models = [
        harness.model("two", engine="sglang", dtype="float32", attention_dp=2, decode_rows=4, max_context=512, kv_floor_tokens=256),
        harness.model("one", dtype="float32", decode_rows=4, max_context=512, kv_floor_tokens=256),
    ]

    with harness.System(models, atn=2, memory="32MiB") as system:

        def of(model):
            return [group for group in shown(system)[0]["groups"] if group["model"] == model]

        def sizes():
            return [(group["floor"]["tokens"], group["ceiling"]["tokens"]) for group in of("two")]

        system.hand = [system.launch("daemon", "serve")]
        harness.wait_until(lambda: system.run("kv", "--json")[0] == 0, 20, "the daemon answers")
        most, (one,) = [ceiling for _, ceiling in sizes()], of("one")
        harness.check(sorted(group["devices"] for group in of("two")) == [["cpu:0"], ["cpu:1"]], f"{of('two')}")
        # Now the ceiling fits the device that `two` has alone, and not the one that it shares.
        code, _, err = system.run("kv", "set", "one", "--floor", str(one["ceiling"]["tokens"]))
        harness.check(code == 0, err)
        before = sizes()
        code, out, err = system.run("kv", "set", "two", "--ceiling", str(max(most)))
        harness.check(code == 0 and "of which others' floors leave" in out, f"{code} {out} {err}")
        code, _, err = system.run("kv", "set", "two", "--floor", str(max(most)))
        harness.check(code == 1 and "room for" in err, f"floors of {most} beside {of('one')}: {code} {err}")
        harness.check(sizes() == before, f"something was set: {of('two')}")
        code, _, err = system.run("kv", "set", "one", "--floor", "64")
        harness.check(code == 0, err)
        # Nor is it wanted for later, when there is room.
        code, _, err = system.run("kv", "set", "two", "--ceiling", str(max(most)))
        harness.check(code == 0 and [floor for floor, _ in sizes()] == [floor for floor, _ in before], f"{code} {err}: {of('two')}")
        code, _, err = system.run("kv", "set", "two", "--floor", str(max(most)))
        harness.check(code == 0 and [floor for floor, _ in sizes()] == most, f"{code} {err}: {of('two')}")
        system.hand[0].terminate()
        system.hand[0].wait(20)


def silent():
    """Its memory cannot be counted on while it says nothing, so it is ended, and others go on."""
    with system_of_two("[deadlines]\nkv = 0.4") as system:
        system.start(60)
        want = system.generate("b", PROMPT, TOKENS)
        system.run("kv", "trim", "--all")
        system.env["XPOOL_FAILPOINTS"] = "kv.rank.seen=sleep:5000"
        with_sleep = restart(system, "a")
        del system.env["XPOOL_FAILPOINTS"]
        stream = system.stream("a", PROMPT, TOKENS)
        harness.wait_until(lambda: with_sleep.poll() is not None, 10, "the silent Instance is ended")
        harness.check("has not answered a KV command within deadlines.kv" in system.log(), "it was not reported first")
        harness.check("twice deadlines.kv" in json.dumps(system.state()["models"]), "the model does not say why")
        settles(system, lambda g: g["a"]["state"] == "absent" and g["a"]["backed"]["tokens"] == 0, "its bytes return")
        books_are_right(system)
        harness.check(system.generate("b", PROMPT, TOKENS) == want, "the other Instance changed its answer")
        stream.thread.join(10)
        system.hand = [restart(system, "a", kill=False)]
        harness.check(system.generate("a", PROMPT, TOKENS) == want, "not exact after its return")
        system.hand = []
        system.stop()


def restart(system, model, kill=True):
    if kill:
        harness.os.kill(system.pid(f"serve {model}"), harness.signal.SIGKILL)
        harness.wait_until(lambda: model not in system.list_models(), 10, f"{model} is gone")
    process = system.launch("serve", model, log=system.folder / f"log.{model}.{time.monotonic_ns()}")
    harness.wait_until(lambda: model in system.list_models(), 60, f"{model} is back")
    return process


def daemon_dies():
    for point in ("kv.daemon.rung=kill@4", "kv.daemon.commanded=kill@8"):
        with system_of_two(env={"XPOOL_FAILPOINTS": point}) as system:
            system.up = system.launch("up")
            deadline = time.monotonic() + 30
            turn = 0
            while system.up.poll() is None and time.monotonic() < deadline:
                turn += 1
                body = {"model": "ab"[turn % 2], "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}}
                try:
                    harness.http_request(system.gateway + "/generate", "POST", body, timeout=5)
                    system.run("kv", "trim", "--all")
                except OSError:
                    time.sleep(0.05)
            system.expect_end(None)
            harness.check("canonical failure" in system.log(), f"{point}: no canonical failure")
            del system.env["XPOOL_FAILPOINTS"]
            system.start(60)
            system.generate("a", PROMPT, TOKENS)
            books_are_right(system)
            system.stop()


if __name__ == "__main__":
    harness.main(commands, several_groups, silent, daemon_dies)
