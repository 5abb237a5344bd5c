# SPDX-License-Identifier: MIT
"""The system of benches/kv_gpu.py on its one pool: what its books say, how its memory is taken back, and how its policy
changes while it serves."""

import kv_load
from sglang_gpu import burst
from sglang_servers import harness
from sglang_tokens import check_graphs

SETTLE_S = 20


def group_of(books, name):
    return next(group for group in books["groups"] if group["model"] == name)


def settle(fleet, condition, what, limit=SETTLE_S):
    return harness.wait_until(lambda: condition(fleet.books()), limit, what, 0.05)


def at_floors(books):
    return all(g["backed"]["tokens"] <= g["floor"]["tokens"] and not g["demand"] for g in books["groups"])


def trim(fleet):
    """Everything back but the floors."""
    fleet.kv("trim", "--all")
    settle(fleet, at_floors, "all KV Caches are at their floors")


def begin_system(run, fleet):
    sizes = run.sizes
    settle(fleet, lambda books: all(pool["formed"] for pool in books["pools"]), "the pool is formed", 30)
    check_graphs(run, fleet.servers())
    books = fleet.books()
    fleet.first = {g["model"]: (g["floor"]["tokens"], g["ceiling"]["tokens"]) for g in books["groups"]}
    fleet.policy = "deadline"
    print(f"    pool of {books['pools'][0]['bytes'] / 2**20:.0f} MiB; floor, ceiling, equal share in tokens: "
          + ", ".join(f"{m} {low}, {high}, {kv_load.shares(books)[m]}" for m, (low, high) in fleet.first.items()), flush=True)
    most = min(high for _, high in fleet.first.values())
    warm(run, fleet.servers(), min(sizes.cold_prompt, sizes.context - 40, most - 40))
    trim(fleet)


def warm(run, servers, most):
    """Kernels that are compiled at first use, and activations of the largest pieces, on all servers at once."""

    def one(server):
        for batch, context in ((1, 16), (4, run.sizes.contexts[0]), (1, most)):
            burst(server, batch, context, 4, "warm")

    harness.together([lambda server=server: one(server) for server in servers], 600)


def set_policy(fleet, policy):
    """While the system serves. `static`: floors and ceilings are equal shares of the pool."""
    if fleet.policy == policy:
        return
    if fleet.policy == "static":
        shares = kv_load.shares(fleet.books())
        for name, (floor, _) in fleet.first.items():
            fleet.kv("set", name, "--floor", str(min(floor, shares[name])))
        for name, (floor, ceiling) in fleet.first.items():
            fleet.kv("set", name, "--floor", str(floor), "--ceiling", str(ceiling))
    trim(fleet)
    if policy == "static":
        for name, tokens in kv_load.shares(fleet.books()).items():
            fleet.kv("set", name, "--floor", str(tokens), "--ceiling", str(tokens))
        shares = kv_load.shares(fleet.books())
        settle(fleet, lambda books: all(g["backed"]["tokens"] == shares[g["model"]] for g in books["groups"]), "all have their shares")
    else:
        fleet.kv("policy", policy)
    fleet.policy = policy
