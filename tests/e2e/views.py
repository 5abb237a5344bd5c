# SPDX-License-Identifier: MIT
"""What the tests read out of the daemon's /v1/state and the log, in one place, so that the form of
both is known once."""

import re
import time

import harness


def counters(system):
    """Sums over the system: steps, ffn_calls, ffn_rows (engines of the Instances), submissions
    (AtnAgents), executions (FfnAgents), invocations (as the Coordinator counted them by Instance)."""
    state = system.state()
    totals = dict.fromkeys(
        ("steps", "ffn_calls", "ffn_rows", "submissions", "executions", "invocations", "invocation_rows"), 0
    )
    for model in state["models"]:
        for key in ("steps", "ffn_calls", "ffn_rows"):
            totals[key] += model["engine"][key]
        totals["invocations"] += model["invocations"]
        totals["invocation_rows"] += model["invocation_rows"]
    for agent in state["agents"]:
        key = "executions" if agent["role"] == "ffn" else "submissions"
        totals[key] += agent["counters"]["submissions"]
    return totals


def settled_counters(system):
    """Engines report to the daemon once a second: read when nothing changes any more."""
    seen = []

    def settled():
        seen.append(counters(system))
        return len(seen) > 1 and seen[-1] == seen[-2] and seen[-1]

    time.sleep(1.2)
    return harness.wait_until(settled, 20, "the counters stand still", 1.2)


def kv_pages_used(system):
    return sum(model["kv"]["pages_used"] for model in system.state()["models"])


def check_one_failure(system, dead):
    """Everyone who logs a canonical failure logs the same one, and it names the role that died. Nobody
    is left to word the daemon's own death, so there only who it was must agree."""
    lines = re.findall(r"canonical failure(?: of Generation \d+)?: (.*)", system.log())
    harness.check(lines, f"no canonical failure in the log after {dead} died")
    different = {line.partition(":")[0] for line in lines} if dead == "daemon" else set(lines)
    harness.check(len(different) == 1, f"several canonical failures: {different}")
    role, _, name = dead.partition(" ")
    harness.check((name or role) in lines[0], f"the canonical failure does not name {dead}: {lines[0]}")
    print(f"     {lines[0]}")
