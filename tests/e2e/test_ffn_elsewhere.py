# SPDX-License-Identifier: MIT
"""The FFN is really on the FfnAgent: without it no token appears, its zeros change the tokens, and the
counters of both agents say that every step of every layer went through it."""

import time

import harness
import views

MODELS = ("left", "right")


def ffnagent_stopped():
    """SIGSTOP of the FfnAgent: no token of any model while it lasts; exact after SIGCONT."""
    prompts = harness.golden()
    # Long enough that the streams are in flight when the signal comes, whatever the machine's speed:
    # the first 48 tokens are golden, the rest must equal an undisturbed run.
    length = 600
    with harness.System([harness.model(m, dtype="float32") for m in MODELS]) as system:
        system.start(120)
        undisturbed = [system.generate(m, prompts[i]["ids"], length, 240) for i, m in enumerate(MODELS)]

        def begin():
            streams = [system.stream(m, prompts[i]["ids"], length, 240) for i, m in enumerate(MODELS)]
            for stream in streams:
                stream.wait(3, 60)
            return streams

        streams = system.hold(begin)
        before = [len(s.ids) for s in streams]
        time.sleep(3.0)
        after = [len(s.ids) for s in streams]
        harness.check(before == after, f"tokens appeared while the FfnAgent was stopped: {before} {after}")
        system.go_on()
        for index, stream in enumerate(streams):
            got = stream.result(240)
            golden = prompts[index]["greedy_ids"]
            harness.check(got[: len(golden)] == golden, f"{MODELS[index]}: the first tokens are not golden")
            harness.check(got == undisturbed[index], f"{MODELS[index]}: tokens differ after the stop")
        system.stop()


def zeroed_output():
    """With the FFN's output zeroed fewer than 20 % of the tokens agree."""
    prompts = harness.golden()
    with harness.System([harness.model("tales", dtype="float32")], env={"XPOOL_TEST_ZERO_FFN": "1"}) as system:
        system.start(120)
        same = total = 0
        for prompt in prompts:
            want = prompt["greedy_ids"]
            got = system.generate("tales", prompt["ids"], len(want))
            same += sum(a == b for a, b in zip(got, want))
            total += len(want)
        print(f"     zeroed FFN: {same} of {total} tokens agree")
        harness.check(same < 0.2 * total, f"{same} of {total} tokens agree although the FFN gives zeros")
        system.stop()


def counters():
    """Submissions of the AtnAgents and executions of the FfnAgents equal layers x steps."""
    prompts = harness.golden()
    with harness.System([harness.model(m, dtype="float32") for m in MODELS], atn=2, ffn=2) as system:
        system.start(120)
        start = views.settled_counters(system)
        for m in MODELS:
            for prompt in prompts[:2]:
                system.generate(m, prompt["ids"], 20)
        end = views.settled_counters(system)
        delta = {key: end[key] - start[key] for key in end}
        print(f"     {delta}")
        layers = 6
        harness.check(delta["steps"] >= 4 * 20 - 4, f"too few steps: {delta}")
        want = delta["steps"] * layers
        for key in ("ffn_calls", "submissions", "executions", "invocations"):
            harness.check(delta[key] == want, f"{key} is {delta[key]}, not steps x layers = {want}")
        system.stop()


def rows_per_invocation():
    """Under 16 streams one Invocation carries the rows of many."""
    prompts = harness.golden()
    with harness.System([harness.model("tales", dtype="float32")]) as system:
        system.start(120)
        start = views.settled_counters(system)
        calls = [
            lambda i=i: system.generate("tales", prompts[i % len(prompts)]["ids"], 900, 240) for i in range(16)
        ]
        harness.together(calls)
        end = views.settled_counters(system)
        rows = (end["ffn_rows"] - start["ffn_rows"]) / (end["ffn_calls"] - start["ffn_calls"])
        print(f"     mean rows per Invocation under 16 streams: {rows:.1f}")
        harness.check(rows > 4, f"only {rows:.1f} rows per Invocation under 16 streams")
        system.stop()


if __name__ == "__main__":
    harness.main(ffnagent_stopped, zeroed_output, counters, rows_per_invocation)
