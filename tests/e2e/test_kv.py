# SPDX-License-Identifier: MIT
"""KV memory moves between models: three Instances on one attention device whose pool holds about half
of what they would like. Looked at from outside, every 100 ms: what their KV memfds hold never exceeds
the pool and follows the loads. One request as long as the model allows, far above a static share, runs
when the others idle; the tokens are the same whatever moved. kill -9 of a borrower and of a donor, at any moment and at each
step of an operation."""

import contextlib
import json
import os
import pathlib
import signal
import time

import harness
from test_memory import mappings, total

MODELS = ("a", "b", "c")
FLOOR = 128
POOL_TOKENS = 1500  # less than two requests of the model's whole context
PROMPT = [(7 * i + 3) % 500 for i in range(900)]
LENGTH = 100
PERIOD = 0.1
LOOKS = 4


def kv_bytes(pid):
    """Memory that the process's KV memfds hold, and what of it is in its page table."""
    held = 0
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "xpool-kv:" in os.readlink(fd):
                held += os.stat(fd).st_blocks * 512
        except OSError:
            continue
    return held, total(mappings(pid), "Rss", "xpool-kv:")


class Sampler(harness.Repeated):
    """Samples every Instance every 100 ms; `rows` holds (time, {model: bytes held})."""

    def __init__(self, system, pool):
        super().__init__(PERIOD)
        self.system, self.pool, self.rows, self.errors = system, pool, [], []

    def sample(self):
        """({model: bytes held}, {model: bytes resident}) of the Instances there are."""
        held, resident = {}, {}
        for role, pid in self.system.roles().items():
            if not role.startswith("serve "):
                continue
            model = role.split()[1]
            try:
                held[model], resident[model] = kv_bytes(pid)
            except OSError:
                continue  # it has just ended
        return held, resident

    def excess(self):
        """What is held and resident at once, when that is more than the pool. Readings of several
        processes are not of one moment, and memory passes from one to another meanwhile: what counts
        is the least of some looks."""
        looks = [self.sample() for _ in range(LOOKS)]
        for kind in range(2):
            least = {m: min(look[kind].get(m, 0) for look in looks) for m in looks[0][kind]}
            if sum(least.values()) > self.pool:
                return least
        return None

    def once(self):
        held, resident = self.sample()
        if max(sum(held.values()), sum(resident.values())) > self.pool:
            least = self.excess()
            if least:
                books = {g["model"]: g["backed"]["bytes"] for g in self.system.state()["kv"]["groups"]}
                self.errors.append(f"{least} is more than the pool of {self.pool} bytes; the daemon: {books}")
        self.rows.append((time.monotonic(), held))

    def now(self, model):
        return self.sample()[0].get(model, 0)

    def check(self):
        harness.check(not self.errors, "; ".join(self.errors[:3]))
        harness.check(len(self.rows) > 10, f"{len(self.rows)} samples are too few to say anything")


def models():
    return [harness.model(m, dtype="float32", kv_floor_tokens=FLOOR, decode_rows=8) for m in MODELS]


def small_pool(policy="deadline", reform=240):
    """(system, bytes of the pool, bytes of a token): memory such that the pool is what the test wants."""
    settings = f'[scheduler]\nkv_policy = "{policy}"\n[deadlines]\nreform = {reform}'
    with harness.System(models(), memory="64MiB") as probe:
        code, out, err = probe.run("plan", "--json")
        harness.check(code == 0, err)
        plan = json.loads(out)
    device = plan["devices"][0]
    taken = device["weight_bytes"] + device["workspace_bytes"] + device["arena_bytes"]
    share = device["budget_bytes"] / (64 << 20)
    token = plan["models"][0]["kv_bytes"] // plan["models"][0]["kv_tokens"]
    memory = int((taken + POOL_TOKENS * token) / share)
    system = harness.System(models(), settings=settings)
    text = system.config.read_text().replace(
        '[devices."cpu:0"]\nthreads = 1\nmemory = "1GiB"',
        f'[devices."cpu:0"]\nthreads = 1\nmemory = "{memory}"',
    )
    system.config.write_text(text)
    return system, token


def pool_bytes(system):
    return system.state()["kv"]["pools"][0]["bytes"]


def settled(system):
    """Nothing is asked for, nothing is under way; what is charged is what is there."""
    kv = system.state()["kv"]
    return all(group["demand"] is None for group in kv["groups"])


def elastic():
    system, token = small_pool()
    with system:
        system.start(60)
        pool = pool_bytes(system)
        static = pool // len(MODELS)
        whole = (len(PROMPT) + LENGTH) * token
        harness.check(whole > 1.8 * static and 2 * whole > pool, f"the scene is none: pool {pool}, share {static}")
        with Sampler(system, pool) as sampler:
            # The others idle: one request of the model's own limit runs.
            want = system.generate("a", PROMPT, LENGTH)
            harness.check(len(want) == LENGTH, "the long request was cut short")
            harness.check(sampler.now("a") >= whole, "a did not grow to its request")
            harness.check(sampler.now("b") + sampler.now("c") <= pool - whole, "the others gave nothing")
            # It keeps that for its prefixes until another one asks, and then gives back.
            began = time.monotonic()
            stream = system.stream("b", PROMPT, LENGTH)
            stream.wait(1)
            granted = time.monotonic() - began
            held = sampler.now("a")
            harness.check(held <= pool - whole, f"a still holds {held} of {pool} after b's first token")
            harness.check(stream.result() == want, "b's tokens are not a's")
            harness.check(granted < 2 * harness.SLOW, f"b waited {granted:.2f} s for an idle donor")
            # All three at once want twice the pool: they take turns, and nothing changes in what they say.
            prompts = harness.golden()[:3]
            for _ in range(4):
                answers = harness.together(
                    [lambda m=m: system.generate(m, PROMPT, LENGTH) for m in MODELS]
                    + [lambda m=m, p=p: system.generate(m, p["ids"], 48) for m, p in zip(MODELS, prompts, strict=True)]
                )
                harness.check(answers[:3] == [want] * 3, "tokens changed when memory moved")
                for prompt, answer in zip(prompts, answers[3:], strict=True):
                    harness.check(answer == prompt["greedy_ids"][:48], "a short request is not exact beside long ones")
            harness.wait_until(lambda: settled(system), 5, "no demand is left")
            for group in system.state()["kv"]["groups"]:
                seen = sampler.now(group["model"])
                harness.check(seen == group["backed"]["bytes"], f"{group['model']}: {seen} bytes, the daemon says {group}")
            time.sleep(2 * PERIOD)
        sampler.check()
        peak = {m: max(held.get(m, 0) for _, held in sampler.rows) for m in MODELS}
        print(f"     pool {pool}, static share {static}, peaks {peak}, grant through an idle donor {granted * 1e3:.0f} ms")
        system.stop()


def killed():
    """A borrower in the middle of its request, then a donor while its memory is being asked for."""
    system, _ = small_pool()
    with system:
        system.start(60)
        # Until it says so itself, `up` takes an Instance's end for a failed start.
        pool = pool_bytes(system)
        system.hand = []
        with Sampler(system, pool) as sampler:
            want = system.generate("b", PROMPT, LENGTH)
            for turn, (victim, after) in enumerate((("a", 3), ("c", 0), ("c", 40), ("a", 0))):
                if after:  # a borrower
                    stream = system.stream(victim, PROMPT, LENGTH)
                    stream.wait(after)
                else:  # a donor that holds most of the pool
                    system.generate(victim, PROMPT, LENGTH)
                pid = system.pid(f"serve {victim}")
                other = system.stream("b", PROMPT, LENGTH)
                os.kill(pid, signal.SIGKILL)
                harness.check(other.result(20) == want, f"b's tokens changed when {victim} died")
                harness.check(system.up.poll() is None, "xpool up ended although only an Instance died")
                harness.wait_until(lambda v=victim: v not in system.list_models(), 10, f"{victim} is gone")
                again = system.launch("serve", victim, log=system.folder / f"log.again{turn}")
                system.hand.append(again)
                harness.wait_until(lambda v=victim: v in system.list_models(), 30, f"{victim} is back")
                harness.check(system.generate(victim, PROMPT, LENGTH, 30) == want, f"{victim} is not exact after its return")
            kv = system.state()["kv"]
            charged = sum(group["backed"]["bytes"] for group in kv["groups"])
            harness.check(kv["pools"][0]["charged_bytes"] == charged <= pool, f"bytes were lost: {kv}")
        sampler.check()
        system.hand = []
        system.stop()


# Where an Instance dies, at which passage, and whether it borrows or gives at that moment. Its first
# completion is that of its floor.
STEPS = (
    ("kv.rank.demanded", 1, "borrower"),
    ("kv.rank.seen", 1, "borrower"),
    ("kv.rank.grown", 1, "borrower"),
    ("kv.rank.completed", 2, "borrower"),
    ("kv.rank.withdrawn", 1, "donor"),
    ("kv.rank.released", 1, "donor"),
    ("kv.rank.returned", 1, "donor"),
)


def killed_at_every_step():
    """An Instance that dies at a named step of an operation: no byte is lost, the others are served."""
    system, _ = small_pool()
    with system:
        system.start(60)
        # Until it says so itself, `up` takes an Instance's end for a failed start.
        pool = pool_bytes(system)
        system.hand = []
        with Sampler(system, pool) as sampler:
            want = system.generate("b", PROMPT, LENGTH)
            os.kill(system.pid("serve a"), signal.SIGKILL)
            for turn, (point, passage, part) in enumerate(STEPS):
                step = f"{part} at {point}"
                harness.wait_until(lambda: "a" not in system.list_models(), 10, "the former a is gone")
                system.env["XPOOL_FAILPOINTS"] = f"{point}=kill@{passage}"
                victim = system.launch("serve", "a", log=system.folder / f"log.step{turn}")
                del system.env["XPOOL_FAILPOINTS"]
                harness.wait_until(lambda: "a" in system.list_models(), 30, f"the {step} is there")
                if part == "borrower":
                    with contextlib.suppress(harness.Failed):
                        system.generate("a", PROMPT, LENGTH, 20)
                else:
                    harness.check(system.generate("a", PROMPT, LENGTH) == want, f"the {step} does not serve")
                harness.check(system.generate("b", PROMPT, LENGTH, 20) == want, f"b's tokens changed: {step}")
                harness.check(victim.wait(10) == -signal.SIGKILL, f"the {step} did not die there")
                harness.check(system.up.poll() is None, f"xpool up ended: {step}")
            harness.wait_until(lambda: "a" not in system.list_models(), 10, "the former a is gone")
            again = system.launch("serve", "a", log=system.folder / "log.last")
            system.hand = [again]
            harness.wait_until(lambda: "a" in system.list_models(), 30, "a is back")
            harness.check(system.generate("a", PROMPT, LENGTH, 30) == want, "a is not exact after its return")
            kv = system.state()["kv"]
            charged = sum(group["backed"]["bytes"] for group in kv["groups"])
            harness.check(kv["pools"][0]["charged_bytes"] == charged <= pool, f"bytes were lost: {kv}")
        sampler.check()
        system.hand = []
        system.stop()


def static():
    """The same system with static shares: what fitted above is refused, what fits a share is served."""
    system, _ = small_pool("static")
    with system:
        system.start(60)
        status, _, data = harness.http_request(
            system.gateway + "/generate", "POST", {"model": "a", "input_ids": PROMPT}
        )
        harness.check(status == 400 and b"context_length_exceeded" in data, f"{status} {data[:200]!r}")
        prompt = harness.golden()[0]
        harness.check(system.generate("a", prompt["ids"], 48) == prompt["greedy_ids"][:48], "not exact")
        system.stop()


if __name__ == "__main__":
    harness.main(elastic, killed, killed_at_every_step, static)
