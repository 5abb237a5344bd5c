# SPDX-License-Identifier: MIT
"""What routers chose, as /v1/state and /metrics show it: one row for each token that is computed, in each layer
of experts; two ids of one checkpoint are one weight set."""

import json
import time

import harness

TOKENS = 24


def usage(system):
    time.sleep(1.2)  # FfnAgents tell twice a second
    agents = [agent for agent in system.state()["agents"] if agent["role"] == "ffn"]
    harness.check(len(agents) == 1, f"one FfnAgent: {agents}")
    return agents[0]["experts"]


def counted():
    facts = json.loads((harness.TALES / "config.json").read_text())
    layers, experts, top = facts["num_hidden_layers"], facts["num_experts"], facts["num_experts_per_tok"]
    models = [harness.model("left", dtype="float32"), harness.model("right", dtype="float32")]
    prompt = harness.golden()[0]
    with harness.System(models) as system:
        system.start(120)
        before = usage(system)
        for m in ("left", "right"):
            harness.check(system.generate(m, prompt["ids"], TOKENS) == prompt["greedy_ids"][:TOKENS], f"{m} is not exact")
        after = usage(system)
        harness.check([len(before), len(after)] == [1, 1], f"one weight set: {after}")
        before, after = before[0], after[0]
        # The prompt, then a row a step; the last token is not computed.
        rows = 2 * layers * (len(prompt["ids"]) + TOKENS - 1)
        harness.check(after["rows"] - before["rows"] == rows, f"{rows} rows were computed: {before} {after}")
        harness.check(after["model"] == "left" and after["places"] == layers * experts, f"{after}")
        read, executions = (after[key] - before[key] for key in ("experts_read", "executions"))
        harness.check(2 * layers * TOKENS <= executions <= rows, f"{executions} executions of {rows} rows")
        harness.check(top * executions <= read <= min(top * rows, experts * executions), f"{read} experts read in {executions} executions")
        harness.check(0 < after["chosen"] <= after["places"] and sum(after["bins"]) == after["places"], f"{after}")
        harness.check(after["least"] * after["places"] <= top * after["rows"] <= after["most"] * after["places"], f"{after}")
        metrics = system.metrics()
        label = '{device="cpu:1",model="left"}'
        names = {"xpool_ffn_expert_rows_total": "rows", "xpool_ffn_experts_read_total": "experts_read",
                 "xpool_ffn_experts": "places", "xpool_ffn_experts_chosen": "chosen", "xpool_ffn_expert_most_rows": "most",
                 "xpool_ffn_expert_least_rows": "least", "xpool_ffn_expert_executions_total": "executions"}
        for name, key in names.items():
            harness.check(metrics[name + label] == after[key], f"{name}: {metrics[name + label]} is not {after[key]}")
        system.stop()


if __name__ == "__main__":
    harness.main(counted)
