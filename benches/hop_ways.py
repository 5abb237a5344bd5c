# SPDX-License-Identifier: MIT
"""The fixed metrics of a hop between two GPUs, from the rows of each way (the direct lane, the relay, the relay
over NVSHMEM): all ways keep rows of their own, and the best one gives the metric with its target."""

import results

WAYS = {"direct": "direct lane", "relay": "p2p relay", "nvshmem": "relay over NVSHMEM"}
OVER_FLOOR = {"p50_over_floor": "<= 2", "p99_over_floor": "<= 3"}
BULK, BULK_TARGET = "bulk_link_fraction", ">= 0.8"


def with_fixed(rows):
    """`rows` with the fixed metrics behind them, where the direct lane was measured: a run of another way alone
    does not say what the best one is. Rows of a former call are made anew."""
    fixed = {f"hop.cuda.{name}" for name in (*OVER_FLOOR, BULK)} | {f"hop.cuda.{way}.{BULK}" for way in WAYS}
    rows = [row for row in rows if row["metric"] not in fixed]
    found = {row["metric"]: row for row in rows}
    copy = found.get("hop.cuda.peer_copy_gbs")
    more = []
    for way, words in WAYS.items():
        rate = found.get(f"hop.cuda.{way}.bulk_gbs")
        if rate and copy and copy["value"] > 0:
            note = f"{words}: {rate['value']:.0f} GB/s over the peer copy's {copy['value']:.0f} GB/s in the same run; {rate['note']}"
            more.append(results.row(f"hop.cuda.{way}.{BULK}", rate["value"] / copy["value"], "x", floor=copy["value"], note=note))
    found |= {row["metric"]: row for row in more}
    for name, target in (*OVER_FLOOR.items(), (BULK, BULK_TARGET)):
        measured = {way: found[f"hop.cuda.{way}.{name}"] for way in WAYS if f"hop.cuda.{way}.{name}" in found}
        if "direct" not in measured:
            continue
        choose = max if name == BULK else min
        best = choose(measured, key=lambda way: measured[way]["value"])
        others = ", ".join(f"{WAYS[way]} {row['value']:.3f}" for way, row in measured.items() if way != best)
        note = f"{WAYS[best]}" + (f", the best way (others: {others})" if others else ", the only way measured in this run") + f": {measured[best]['note']}"
        more.append({**measured[best], "metric": f"hop.cuda.{name}", "target": target, "note": note})
    return rows + more
