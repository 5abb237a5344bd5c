# SPDX-License-Identifier: MIT
"""kill -9 while KV memory moves between three Instances that want twice the pool. An Instance, as
borrower or donor, at each step of an operation and at any moment: no byte of the pool is lost and none
counted twice, the others are served, exact. An agent: the next Generation goes on with all of it. The
daemon, and with deadlines.reform = 0 an AtnAgent: the canonical failure, nothing is left, and the next start
begins with floors.

The tests run a selection; --whole is everything (some minutes), XPOOL_SEED other random moments."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time

import harness
import views
from test_kv import LENGTH, MODELS, PROMPT, Sampler, pool_bytes, settled, small_pool

WHOLE = "--whole" in sys.argv
SEED = int(os.environ.get("XPOOL_SEED", "1"))
RANDOM_KILLS = 60 if WHOLE else 4
# Prompts of which two do not fit together, some do, and many do.
LENGTHS = (900, 350, 40)
# Steps of an operation in an Instance, and the passages at which it dies there. Its first completion is
# that of its floor.
BORROWER = (("kv.rank.demanded", (1, 3)), ("kv.rank.seen", (1, 3)), ("kv.rank.grown", (1, 3)))
DONOR = (
    ("kv.rank.withdrawn", (1, 3)),
    ("kv.rank.moved", (1, 2)),
    ("kv.rank.released", (1, 3)),
    ("kv.rank.returned", (1, 3)),
)
COMPLETED = (("kv.rank.completed", (1, 2, 3, 6)),)
SHORT_STEPS = (("kv.rank.moved", (1,)), ("kv.rank.completed", (3,)))
# The daemon's own, and passages from its start to the midst of the load.
DAEMON = (
    ("kv.daemon.admitted", (1, 3)),
    ("kv.daemon.commanded", (2, 9, 14, 22, 60)),
    ("kv.daemon.rung", (1, 5, 9, 30)),
)


def shown(system):
    code, out, err = system.run("kv", "--json")
    harness.check(code == 0, f"xpool kv --json: {code} {err}")
    return json.loads(out)


def books(system):
    """What is charged is, for each group once, the largest of its floor, what it has and what it was
    last told, and never more than the pool."""
    kv = shown(system)
    charged = 0
    for group in kv["groups"]:
        token_bytes = group["bundle_bytes"] // group["bundle_tokens"]
        command = group["last_command"]
        goal = command["tokens"] * token_bytes if command else 0
        charged += max(group["floor"]["bytes"], group["backed"]["bytes"], goal)
    pool = kv["pools"][0]
    harness.check(charged == pool["charged_bytes"] <= pool["bytes"], f"{charged} bytes are charged in {kv}")
    harness.check(pool["free_bytes"] == pool["bytes"] - charged, f"free bytes: {kv}")
    return {group["model"]: group for group in kv["groups"]}


class Traffic:
    """Requests without pause, some threads a model; each answer is compared. What a model does not answer
    since it was killed is excused; a wrong token never is."""

    def __init__(self, system, wants, models=MODELS, threads=2):
        self.system, self.wants = system, wants
        self.deaths = dict.fromkeys(MODELS, 0)
        self.served = dict.fromkeys(MODELS, 0)
        self.down, self.errors = set(), []
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self.run, args=(m, t), daemon=True) for m in models for t in range(threads)
        ]

    def run(self, model, turn):
        while not self.stop.is_set():
            turn += 1
            length = LENGTHS[turn % len(LENGTHS)]
            excused, deaths = model in self.down, self.deaths[model]
            try:
                got = self.system.generate(model, PROMPT[:length], LENGTH, 30)
            except (OSError, harness.Failed, harness.http.client.HTTPException) as error:
                if not (excused or deaths != self.deaths[model] or model in self.down or self.stop.is_set()):
                    self.errors.append(f"{model}, prompt of {length}: {error}")
                time.sleep(0.02)
                continue
            if got != self.wants[length]:
                self.errors.append(f"{model}, prompt of {length}: other tokens")
            self.served[model] += 1

    def goes_on(self, models, seconds=20):
        """Each of these models answers again from now on."""
        before = dict(self.served)
        harness.wait_until(
            lambda: self.errors or all(self.served[m] > before[m] for m in models),
            seconds,
            f"{models} are served: {before}, {self.served}",
        )
        harness.check(not self.errors, "; ".join(self.errors[:3]))

    def killed(self, model):
        self.deaths[model] += 1
        self.down.add(model)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(40)


def answers(system):
    return {length: system.generate("b", PROMPT[:length], LENGTH) for length in LENGTHS}


def launch(system, model, failpoints=None):
    if failpoints:
        system.env["XPOOL_FAILPOINTS"] = failpoints
    process = system.launch("serve", model, log=system.folder / f"log.{model}.{time.monotonic_ns()}")
    system.env.pop("XPOOL_FAILPOINTS", None)
    return process


def is_up(system, model):
    return model in system.list_models()


def gone(system, model):
    """Its bytes are back."""

    def so():
        group = books(system)[model]
        return group["state"] == "absent" and group["backed"]["bytes"] == 0

    harness.wait_until(so, 5, f"the bytes of {model} return")


def at_rest(system, sampler):
    """Nothing under way: what the daemon says is what the processes hold, and the pool has the rest."""
    harness.wait_until(lambda: settled(system), 5, "no demand is left")

    def agrees():
        return all(sampler.now(m) == group["backed"]["bytes"] for m, group in books(system).items())

    harness.wait_until(agrees, 3, "what the Instances hold is what the daemon says", 0.1)
    sampler.check()


def steps():
    """An Instance dies at a named step."""
    system, _ = small_pool()
    with system:
        system.start(60)
        system.hand = []
        wants = answers(system)
        reached = []
        with Sampler(system, pool_bytes(system)) as sampler, Traffic(system, wants) as traffic:
            for point, passages in (*BORROWER, *DONOR, *COMPLETED) if WHOLE else SHORT_STEPS:
                for passage in passages:
                    if not reached:
                        traffic.killed("a")
                        os.kill(system.pid("serve a"), signal.SIGKILL)
                    gone(system, "a")
                    traffic.goes_on(("b", "c"))
                    victim = launch(system, "a", f"{point}=kill@{passage}")
                    system.hand = [victim]
                    with contextlib.suppress(harness.Failed):
                        harness.wait_until(lambda v=victim: v.poll() is not None, 15, "it dies")
                    harness.check(victim.poll() is not None, f"{point} was not passed {passage} times within 15 s")
                    harness.check(victim.poll() == -signal.SIGKILL, f"{point}@{passage}: it ended with {victim.poll()}")
                    reached.append(f"{point}@{passage}")
                    harness.check(system.up.poll() is None, f"xpool up ended: {point}@{passage}")
            gone(system, "a")
            traffic.goes_on(("b", "c"))
            system.hand = [launch(system, "a")]
            harness.wait_until(lambda: is_up(system, "a"), 30, "a is back")
            traffic.down.discard("a")
            traffic.goes_on(MODELS)
        at_rest(system, sampler)
        print(f"     {len(reached)} steps; answers beside them {traffic.served}")
        system.hand = []
        system.stop()


def moments():
    """Any Instance at any moment; it returns each time."""
    chance = random.Random(SEED)
    system, _ = small_pool()
    with system:
        system.start(60)
        wants = answers(system)
        with Sampler(system, pool_bytes(system)) as sampler, Traffic(system, wants) as traffic:
            for _ in range(RANDOM_KILLS):
                time.sleep(chance.uniform(0.0, 0.5))
                model = chance.choice(MODELS)
                others = [m for m in MODELS if m != model]
                traffic.killed(model)
                os.kill(system.pid(f"serve {model}"), signal.SIGKILL)
                harness.check(system.up.poll() is None, "xpool up ended although only an Instance died")
                if chance.random() < 0.5:
                    gone(system, model)
                    traffic.goes_on(others)
                harness.wait_until(lambda m=model: not is_up(system, m), 10, f"{model} is gone")
                system.hand = [launch(system, model)]
                harness.wait_until(lambda m=model: is_up(system, m), 30, f"{model} is back")
                traffic.down.discard(model)
                books(system)
            traffic.goes_on(MODELS)
        at_rest(system, sampler)
        print(f"     {RANDOM_KILLS} kills, seed {SEED}; answers {traffic.served}")
        system.hand = []
        system.stop()


def next_start(system, want):
    """Clean: every group has its floor, and the tokens are right."""
    system.env.pop("XPOOL_FAILPOINTS", None)
    system.start(60)
    for model, group in books(system).items():
        harness.check(group["backed"] == group["floor"], f"{model} does not begin with its floor: {group}")
    if want:
        harness.check(system.generate("a", PROMPT, LENGTH) == want, "not exact after the next start")
    system.stop()


def ends_all(role, point, donor):
    """An agent or the daemon dies while an Instance stands at this step of an operation."""
    system, _ = small_pool(reform=0)
    with system:
        system.env["XPOOL_FAILPOINTS"] = f"{point}=sleep:4000@1"
        system.start(60)
        if donor:
            system.generate("a", PROMPT, LENGTH)
        stream = system.stream("b" if donor else "a", PROMPT, LENGTH)
        time.sleep(0.4)
        harness.check(point == "kv.rank.returned" or not stream.ids, f"{point}: nobody stands there")
        os.kill(system.pid(role), signal.SIGKILL)
        system.expect_end(None)
        views.check_one_failure(system, role)
        stream.thread.join(5)
        harness.check(not stream.thread.is_alive() and len(stream.ids) < LENGTH, "a client's stream hangs")
        next_start(system, None)


def agents():
    roles = ("atnagent cpu:0", "daemon")
    if WHOLE:
        for role in roles:
            for point, _ in BORROWER:
                ends_all(role, point, False)
            for point, _ in DONOR:
                if point != "kv.rank.moved":
                    ends_all(role, point, True)
    else:
        ends_all("atnagent cpu:0", "kv.rank.withdrawn", True)
        ends_all("daemon", "kv.rank.grown", False)


def daemon_steps():
    """The daemon at its own steps (test_kv_steering has two of them)."""
    if not WHOLE:
        return
    for point, passages in DAEMON:
        for passage in passages:
            system, _ = small_pool()
            with system:
                system.env["XPOOL_FAILPOINTS"] = f"{point}=kill@{passage}"
                system.up = system.launch("up")
                end = time.monotonic() + 20 * harness.SLOW
                turn = 0
                while system.up.poll() is None and time.monotonic() < end:
                    turn += 1
                    body = {"model": MODELS[turn % 3], "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}}
                    with contextlib.suppress(OSError, harness.http.client.HTTPException):
                        harness.http_request(system.gateway + "/generate", "POST", body, timeout=5)
                        continue
                    time.sleep(0.05)
                system.expect_end(None)
                next_start(system, None)


def agents_at_moments():
    """AtnAgent, FfnAgent or daemon at any moment of the load."""
    if not WHOLE:
        return
    chance = random.Random(SEED)
    for _ in range(8):
        system, _ = small_pool(reform=0)
        with system:
            system.start(60)
            wants = answers(system)
            role = chance.choice(("atnagent cpu:0", "ffnagent cpu:1", "daemon"))
            with Traffic(system, wants) as traffic:
                traffic.goes_on(MODELS)
                time.sleep(chance.uniform(0.0, 0.5))
                traffic.stop.set()
                os.kill(system.pid(role), signal.SIGKILL)
                system.expect_end(None)
            views.check_one_failure(system, role)
            next_start(system, wants[900])


def generations():
    """Agents die at any moment of the load: every request is answered, exact, and the books are right."""
    chance = random.Random(SEED)
    system, _ = small_pool()
    with system:
        system.start(60)
        wants = answers(system)
        with Sampler(system, pool_bytes(system)) as sampler, Traffic(system, wants) as traffic:
            for number in range(RANDOM_KILLS):
                time.sleep(chance.uniform(0.0, 0.5))
                os.kill(system.pid(chance.choice(("atnagent cpu:0", "ffnagent cpu:1"))), signal.SIGKILL)
                harness.wait_until(
                    lambda n=number: system.state()["generation"] == n + 2 and system.is_ready(), 20, "the next Generation"
                )
                traffic.goes_on(MODELS)
                books(system)
        at_rest(system, sampler)
        print(f"     {RANDOM_KILLS} Generations failed, seed {SEED}; answers {traffic.served}")
        system.stop()


if __name__ == "__main__":
    harness.main(steps, moments, agents, daemon_steps, agents_at_moments, generations)
