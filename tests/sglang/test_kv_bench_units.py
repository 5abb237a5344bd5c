#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""benches/kv_gpu.py without a server: the load, how answers are judged, memory seen from outside, the daemon's
books, rows, and what is told of a peer that does not run."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))

import kv_gpu  # noqa: E402
import kv_load  # noqa: E402
import kv_pool  # noqa: E402
import sglang_gpu  # noqa: E402
import sglang_servers  # noqa: E402
from sglang_servers import harness  # noqa: E402

TRACE = [(0.5 * i, 10 + i % 7, 2 + i % 3) for i in range(50)]


def source(name, **more):
    return kv_load.Source(name, TRACE, more.get("begin", 0.0), 1000, more.get("prompt", 12), more.get("answer", 3))


def answer(status=200, times=(), count=None, finished=True):
    return types.SimpleNamespace(status=status, times=list(times), ids=list(range(count if count is not None else len(times))), finished=finished)


def request(tokens):
    return 0.0, {"input_ids": [1], "sampling_params": {"max_new_tokens": tokens}}


def group(model, backed, floor, goal=None, bundle=64, tokens=16):
    size = {"backed": {"bytes": backed * bundle, "tokens": backed * tokens}, "floor": {"bytes": floor * bundle, "tokens": floor * tokens}}
    last = None if goal is None else {"tokens": goal * tokens}
    return {"model": model, "bundle_bytes": bundle, "bundle_tokens": tokens, "devices": ["cuda:0"], "last_command": last, "demand": None, **size}


def books(*groups, pool=1000, charged=None):
    found = {"groups": list(groups), "pools": [{"device": "cuda:0", "bytes": pool}]}
    total = kv_load.charged(found)["cuda:0"] if charged is None else charged
    found["pools"][0].update(charged_bytes=total, free_bytes=pool - total)
    return found


class Load(unittest.TestCase):
    def test_a_trace(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "t.csv"
            path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:48.0000000,400,1\n2023-11-16 18:15:46.5000000,100,44\n")
            self.assertEqual(kv_load.read_trace(path, 2.0), [(0.0, 200, 44), (1.5, 800, 2)])

    def test_each_is_hot_in_turn_and_has_its_rate(self):
        names = ("a", "b", "c")
        load = kv_load.workload({name: source(name) for name in names}, 2.0, 30)
        for place, name in enumerate(names):
            times = [at for at, _ in load[name]]
            self.assertEqual(times, sorted(times))
            self.assertTrue(0 <= times[0] and times[-1] < 30)
            self.assertAlmostEqual(len(times), 60, delta=2)
            by = [sum(10 * phase <= at < 10 * (phase + 1) for at in times) for phase in range(3)]
            self.assertEqual(by.index(max(by)), place)
            self.assertGreater(max(by), 4 * min(by))

    def test_the_same_requests_each_time_and_within_bounds(self):
        one, other = (kv_load.workload({"a": source("a")}, 1.0, 20) for _ in range(2))
        self.assertEqual(one, other)
        for _, body in one["a"]:
            self.assertLessEqual(len(body["input_ids"]), 12)
            self.assertLessEqual(body["sampling_params"]["max_new_tokens"], 3)
            self.assertTrue(all(16 <= token < 984 for token in body["input_ids"]))
        self.assertNotEqual(one, kv_load.workload({"a": source("a", begin=0.5)}, 1.0, 20))

    def test_a_trace_that_begins_anew(self):
        rows = source("a", begin=0.9).phase(1.0, 5.0, 20)
        self.assertEqual(len(rows), 20)
        self.assertTrue(all(5.0 <= at <= 25.0 for at, _ in rows))


class Judged(unittest.TestCase):
    TARGETS = {"m": (1000.0, 100.0)}

    def of(self, *pairs, seconds=10):
        return kv_load.judge({"m": [request(tokens) for tokens, _ in pairs]}, {"m": [one for _, one in pairs]}, self.TARGETS, seconds)

    def test_every_kind(self):
        found = self.of(
            (3, answer(times=[0.5, 0.55, 0.6])),  # good
            (3, answer(times=[1.5, 1.55, 1.6])),  # the first token is late
            (3, answer(times=[0.5, 0.7, 0.9])),  # between tokens
            (3, answer(times=[0.5, 0.55])),  # cut short
            (3, answer(status=400)),
            (3, answer()),  # refused within a stream
            (3, answer(status=200, times=[0.5], finished=False)),
            (3, answer(status=None, finished=False)),
        )
        self.assertEqual({key: found[key] for key in ("asked", "good", "late", "refused", "cut", "unfinished")},
                         {"asked": 8, "good": 1, "late": 2, "refused": 2, "cut": 1, "unfinished": 2})
        self.assertAlmostEqual(found["goodput"], 0.1)
        self.assertAlmostEqual(found["offered"], 0.8)
        self.assertIn("1 good, 2 late, 2 refused", kv_load.counts(found))

    def test_the_part_of_computing(self):
        points = {"m": [(10, 0.1), (20, 0.3), (40, 0.9)]}
        for tokens, seconds in ((5, 0.1), (10, 0.1), (15, 0.2), (30, 0.6), (40, 0.9), (60, 1.5)):
            self.assertAlmostEqual(kv_load.alone(points["m"], tokens), seconds)
        self.assertEqual(kv_load.alone([(10, 0.1)], 90), 0.1)
        sent = [(0.5 * i, {"input_ids": [1] * prompt, "sampling_params": {"max_new_tokens": 3}}) for i, prompt in enumerate((10, 20, 60, 15, 10))]
        came = [answer(times=[0.5, 0.55, 0.6]), answer(times=[0.5, 0.7, 0.9]), answer(times=[1.5, 1.9, 2.5]), answer(times=[0.7, 0.75], finished=False), answer(status=400)]
        rows = kv_load.by_request({"m": sent}, {"m": came}, self.TARGETS)
        self.assertEqual([row[4] for row in rows], ["good", "late", "late", "unfinished", "refused"])
        self.assertEqual(rows[1], ["m", 0.5, 20, 3, "late", 0.5, 0.2])
        self.assertEqual(rows[4][5:], [None, None])
        found = kv_load.compute(rows, points, self.TARGETS, 4.2)
        self.assertEqual((found["prefill_tokens"], found["late_first"], found["late_between"], found["late_alone"]), (105, 1, 2, 1))
        self.assertAlmostEqual(found["prefill_alone"], 0.1 + 0.3 + 1.5 + 0.2)
        self.assertAlmostEqual(found["prefill_fraction"], 0.5)

    def test_nothing_served(self):
        found = self.of((3, answer(status=400)))
        self.assertEqual(found["goodput"], 0)
        self.assertNotEqual(found["ttft"][0], found["ttft"][0])  # not a number


class Memory(unittest.TestCase):
    def test_a_device_without_what_engines_took_for_good(self):
        rows = [(0.1, {"device": 1000}), (0.2, {"device": 1500}), (0.3, {"device": 1100})]
        self.assertEqual([value for _, value in kv_load.kv_of_device(rows, 1000, 1100, 60)], [-40, 460, 60])

    def test_watch_takes_the_least_of_some_looks(self):
        looks = iter([{"a": 8, "b": 8}, {"a": 2, "b": 8}, *[{"a": 2, "b": 2}] * 1000])
        with kv_load.Watch(lambda: next(looks), 10, 0.01) as watch:
            time.sleep(0.1)
        self.assertEqual(watch.rows[0][1], {"a": 2, "b": 8})
        self.assertEqual(watch.peak(), 10)

    def test_watch_counts_what_it_misses(self):
        def look():
            raise OSError("gone")

        with kv_load.Watch(look, None, 0.01) as watch:
            time.sleep(0.05)
        self.assertEqual((watch.rows, watch.peak()), ([], 0))
        self.assertTrue(watch.errors)

    def test_where_nvml_is_looked_for(self):
        class Library:
            def nvmlInit_v2(self):
                return 0

            def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
                return 0 if index.value == 1 else 2

            def nvmlDeviceGetMemoryInfo(self, handle, found):
                found._obj[2] = 77
                return 0

        asked = []

        def load(name):
            asked.append(name)
            if not name.startswith("/usr/local/nvidia/lib64"):
                raise OSError(name)
            return Library()

        with mock.patch.object(kv_load.ctypes, "CDLL", load):
            self.assertEqual(kv_load.Nvml(1).used(), 77)
            with self.assertRaisesRegex(OSError, "no GPU 5"):
                kv_load.Nvml(5)
        self.assertEqual(asked[:2], ["libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1"])
        with mock.patch.object(kv_load.ctypes, "CDLL", side_effect=OSError), self.assertRaisesRegex(OSError, "not here"):
            kv_load.Nvml(0)

    def test_memfds_of_a_process(self):
        before = kv_load.held(os.getpid())
        fd = os.memfd_create("xpool-kv: test")
        try:
            os.write(fd, b"x" * 8192)
            copy = os.dup(fd)  # counts once
            self.assertEqual(kv_load.held(os.getpid()) - before, 8192)
            os.close(copy)
        finally:
            os.close(fd)


class Books(unittest.TestCase):
    def test_each_group_once_with_the_largest(self):
        found = books(group("a", 3, 2, 5), group("b", 1, 2), group("c", 4, 1, 2))
        self.assertEqual(kv_load.charged(found), {"cuda:0": (5 + 2 + 4) * 64})
        self.assertIsNone(kv_load.wrong_books(found))
        self.assertIn("charged", kv_load.wrong_books(books(group("a", 3, 2), charged=64)))
        self.assertIn("charged", kv_load.wrong_books(books(group("a", 30, 2), pool=100)))

    def test_equal_shares_in_whole_bundles(self):
        found = books(group("a", 1, 1), group("b", 1, 1, bundle=100, tokens=32), pool=1000)
        self.assertEqual(kv_load.shares(found), {"a": 7 * 16, "b": 5 * 32})

    def test_memory_that_leaves_a_pool(self):
        device = {"weight_bytes": 100, "workspace_bytes": 20, "arena_bytes": 30, "budget_bytes": 900}
        self.assertEqual(sglang_servers.memory_for(device, 1000, 750), 1000)


class Trimming(kv_load.Trimming):
    """Trims before anything is asked."""

    def __enter__(self):
        self.fleet.kv("trim", "--all")
        return super().__enter__()


class Policies(unittest.TestCase):
    """set_policy gives the commands that each change needs."""

    def fleet(self):
        said, state = [], books(group("a", 1, 1), group("b", 1, 1), pool=640)
        share = {"a": 5, "b": 5}

        def kv(*words):
            said.append(words)
            if words[:1] == ("set",) and "--ceiling" in words:
                one = kv_gpu.group_of(state, words[1])
                size = int(words[3]) // 16 if words[3] != "16" else 1
                one["backed"] = {"tokens": size * 16, "bytes": size * 64}

        made = types.SimpleNamespace(kv=kv, books=lambda: state, policy="deadline", first={"a": (16, 640), "b": (16, 640)}, said=said)
        self.assertEqual(kv_load.shares(state), {name: 16 * count for name, count in share.items()})
        return made

    def test_there_and_back(self):
        fleet = self.fleet()
        kv_gpu.set_policy(fleet, "deadline")
        self.assertEqual(fleet.said, [])
        kv_gpu.set_policy(fleet, "static")
        self.assertEqual(fleet.said, [("trim", "--all"), ("set", "a", "--floor", "80", "--ceiling", "80"), ("set", "b", "--floor", "80", "--ceiling", "80")])
        fleet.said.clear()
        kv_gpu.set_policy(fleet, "arrival")
        self.assertEqual(fleet.said[:2], [("set", "a", "--floor", "16"), ("set", "b", "--floor", "16")])
        self.assertEqual(fleet.said[2:4], [("set", "a", "--floor", "16", "--ceiling", "640"), ("set", "b", "--floor", "16", "--ceiling", "640")])
        self.assertEqual(fleet.said[4:], [("trim", "--all"), ("policy", "arrival")])

    def test_back_to_floors_above_an_equal_share(self):
        fleet = self.fleet()
        kv_gpu.set_policy(fleet, "static")
        fleet.said.clear()
        fleet.first = {"a": (160, 640), "b": (16, 640)}
        with mock.patch.object(kv_pool, "settle"):  # this fleet has no memory that moves
            kv_gpu.set_policy(fleet, "arrival")
        self.assertEqual(fleet.said[:3], [("set", "a", "--floor", "80"), ("set", "b", "--floor", "16"), ("set", "a", "--floor", "160", "--ceiling", "640")])


class Rows(unittest.TestCase):
    ONE = {"by": {"m": {"asked": 9, "good": 6}}, "asked": 9, "good": 6, "late": 1, "refused": 1, "cut": 1, "unfinished": 0, "seconds": 3, "goodput": 2.0,
           "offered": 3.0, "ttft": [10.0, 20.0], "tbt": [5.0, 6.0], "peak": 90, "pool": 100, "samples": 30, "missed": 0, "grown": 1 << 20,
           "commands": 3, "rows": [(0.1, 50), (0.2, 90)],
           "prefill_tokens": 6000, "prefill_alone": 0.6, "prefill_fraction": 0.2, "took": 3, "late_first": 1, "late_between": 0, "late_alone": 0}  # fmt: skip

    def test_of_a_policy(self):
        rows = {row["metric"]: row for row in kv_load.policy_rows(0.5, "deadline", self.ONE, {"m": (1000, 100)})}
        self.assertEqual(rows["kv.goodput.rate0.5.deadline"]["value"], 2.0)
        self.assertIn("a pool of 0 MiB", rows["kv.goodput.rate0.5.deadline"]["note"])
        self.assertEqual(rows["kv.goodput.rate0.5.deadline.refused_or_late"]["value"], 3)
        self.assertEqual(rows["kv.pool.rate0.5.deadline.peak_fraction"]["value"], 0.9)
        self.assertIn("1 MiB that engines took", rows["kv.pool.rate0.5.deadline.peak_fraction"]["note"])
        self.assertEqual(rows["kv.ttft.rate0.5.deadline.p99"]["value"], 20.0)
        part = rows["kv.goodput.rate0.5.deadline.prefill_fraction"]
        self.assertEqual(part["value"], 0.2)
        self.assertIn("6000 prompt tokens served, 2000 a second; alone their prefill takes 0.6 of 3.0 s; of 1 late 1 by the first token", part["note"])
        nothing = kv_load.policy_rows(0.5, "deadline", {**self.ONE, "ttft": [float("nan")] * 2, "tbt": [float("nan")] * 2}, {"m": (1000, 100)})
        json.dumps([*rows.values(), *nothing], allow_nan=False)

    def run_in(self, folder, only="goodput"):
        arguments = kv_gpu.parse(["--build", "x", "--out", folder, "--rehearse", "--only", only, "--rates", "1", "--resume"])
        return kv_gpu.Run(arguments)

    def test_ratios_and_plots_when_all_policies_are_there(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            for policy, good in (("static", 1.0), ("arrival", 1.6), ("deadline", 2.0)):
                kv_gpu.goodput_rows(run)
                self.assertFalse(run.book.has("kv.goodput.rate1.deadline_static_ratio"))
                run.samples.keep("kv_goodput", f"1 {policy}", {**self.ONE, "goodput": good, "load": kv_gpu.goodput_load(run)})
            kv_gpu.goodput_rows(run)
            self.assertEqual(run.book.rows["kv.goodput.rate1.deadline_static_ratio"]["value"], 2.0)
            self.assertEqual(run.book.rows["kv.goodput.rate1.deadline_arrival_ratio"]["value"], 1.25)
            self.assertIn("one load of 9 s, 9 requests", run.book.rows["kv.goodput.rate1.deadline_arrival_ratio"]["note"])
            for name in ("kv-gpu-goodput.svg", "kv-gpu-memory.svg"):
                self.assertIn("</svg>", (pathlib.Path(folder) / name).read_text())
            again = self.run_in(folder)  # goes on where that one ended
            self.assertEqual(again.book.rows["kv.goodput.rate1.deadline_static_ratio"]["value"], 2.0)
            self.assertEqual(again.book.plots, ["kv-gpu-goodput.svg", "kv-gpu-memory.svg"])
            self.assertEqual(json.loads((pathlib.Path(folder) / "kv_rehearsal.json").read_text())["bench"], "kv_gpu")

    def test_another_load_or_pool_is_measured_anew(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            load = kv_gpu.goodput_load(run)
            for other in (None, [*load[:3], load[3] + 1, *load[4:]], load):
                run.samples.keep("kv_goodput", "1 static", {**self.ONE, "load": other})
                self.assertEqual(kv_gpu.goodput_sample(run, 1.0, "static") is not None, other == load)

    def test_no_rate_is_begun_that_cannot_end(self):
        """The first one is, as far as it goes; of another one all policies, or none."""
        with tempfile.TemporaryDirectory() as folder:
            run, done = self.run_in(folder), []
            run.arguments.rates, run.fleet = [1.0, 2.0], types.SimpleNamespace(servers=lambda: [], name="kv-ours")
            run.end = time.monotonic() + 2.5 * (run.sizes.seconds + run.sizes.patience)
            with mock.patch.object(kv_gpu.Run, "system", lambda self, pool: self.fleet), mock.patch.object(kv_gpu, "alone_times", return_value={}), mock.patch.object(kv_gpu, "replayed"), \
                 mock.patch.object(kv_gpu, "measure_policy", lambda run, fleet, policy, rate, *_: done.append((rate, policy)) or dict(self.ONE)):
                with self.assertRaises(sglang_gpu.OutOfTime):
                    kv_gpu.step_goodput(run)
            self.assertEqual(done, [(1.0, policy) for policy in kv_gpu.POLICIES])

    def test_nothing_starts_where_not_even_one_cell_fits(self):
        with tempfile.TemporaryDirectory() as folder:
            run, started = self.run_in(folder), []
            run.arguments.rates = [1.0, 2.0]
            cell = run.sizes.seconds + run.sizes.patience + 10
            for policy in kv_gpu.POLICIES:
                run.samples.keep("kv_goodput", f"1 {policy}", {**self.ONE, "load": kv_gpu.goodput_load(run)})

            def system(self, pool):
                started.append(pool)
                raise harness.Failed("it started")

            with mock.patch.object(kv_gpu.Run, "system", system):
                # The second rate needs all of its policies, beside the start.
                for seconds, error in ((run.start_s + kv_gpu.WARM_S + cell, sglang_gpu.OutOfTime), (run.start_s + kv_gpu.WARM_S + 3 * cell, harness.Failed)):
                    run.end = time.monotonic() + seconds
                    with self.assertRaises(error):
                        kv_gpu.step_goodput(run)
            self.assertEqual(len(started), 1)
            self.assertFalse(run.samples.fresh & {("kv_goodput", "2 static")})

    def test_again_measures_what_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "base").mkdir(), (folder / "out").mkdir()
            sglang_gpu.Samples(folder / "base", None).keep("kv_neighbour", "ours", {"alone": 1})
            for again in (False, True):
                samples = sglang_gpu.Samples(folder / "out", None, folder / "base", again)
                self.assertEqual((samples.get("kv_neighbour", "ours"), samples.wanted("kv_neighbour", "ours")), ({"alone": 1}, again))
                self.assertTrue(samples.wanted("kv_neighbour", "kvcached"))
            self.assertEqual(list((folder / "out").iterdir()), [])  # nothing that would be taken for newer
            samples.keep("kv_neighbour", "ours", {"alone": 2})
            self.assertFalse(samples.wanted("kv_neighbour", "ours"))
            self.assertTrue((folder / "out" / "sglang_kv_neighbour.samples").exists())

    def test_a_load_that_is_measured_starts_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder, "cold")
            self.assertEqual(kv_gpu.parse(["--build", "x", "--renew"]).again, sglang_gpu.RENEW)
            run.system = lambda: 1 / 0
            run.samples.keep("kv_capacity", "ours", {"m": 1})
            with self.assertRaises(ZeroDivisionError):
                kv_gpu.STEPS["cold"](run)
            run.samples.keep("kv_cold_ours", "0.8", {"load": []})
            kv_gpu.STEPS["cold"](run)

    def test_another_pool_is_another_system(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            run.sizes.goodput_pool = run.sizes.pool // 2
            started = []

            def start(run, name, **what):
                started.append((name, what["pool"]))
                run.fleet = types.SimpleNamespace(name=name)
                return run.fleet

            with mock.patch.object(kv_gpu.Run, "start", start), mock.patch.object(kv_gpu.Run, "model", lambda self, name: name), mock.patch.object(kv_gpu, "begin_system") as begun:
                for pool in (None, run.sizes.goodput_pool, run.sizes.goodput_pool, run.sizes.pool):
                    run.system(pool)
            whole, half = run.sizes.pool, run.sizes.goodput_pool
            self.assertEqual(started, [("kv-ours", whole), ("kv-goodput", half), ("kv-goodput", half), ("kv-ours", whole)])
            self.assertEqual(begun.call_count, 3)

    def test_ratios_of_the_peers(self):
        side = {"tbt": [0.01] * 98 + [0.02] * 2, "ttft": [0.1], "asked": 5, "unfinished": 0, "load": ["t.csv", 6]}
        slow = {**side, "tbt": [0.01] * 98 + [0.2] * 2}
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            run.samples.keep("kv_cold_ours", "0.8", side)
            kv_gpu.cold_rows(run)
            self.assertFalse(run.book.has("tbt.cold_models.p99_static_ratio"))
            run.samples.keep("kv_cold_static", "0.8", {**slow, "load": ["other.csv", 6]})
            kv_gpu.cold_rows(run)
            self.assertFalse(run.book.has("tbt.cold_models.p99_static_ratio"))
            run.samples.keep("kv_cold_static", "0.8", slow)
            kv_gpu.cold_rows(run)
            self.assertAlmostEqual(run.book.rows["tbt.cold_models.p99_static_ratio"]["value"], 10.0)
            self.assertEqual(run.book.rows["tbt.cold_models.p99_static_ratio"]["target"], ">= 1")
            row = run.book.rows["kv.cold.rate0.8.static.tbt_p99_ms"]
            self.assertEqual((row["value"], row["peer"]), (20.0, 200.0))
            self.assertIn("without MPS", row["note"])
            self.assertIn("TTFT P99 (the largest of 1 and the largest of 1) of three", run.book.rows["kv.cold.rate0.8.static_ttft_p99_ratio"]["note"])
            run.samples.keep("kv_cold_static", "0.8", {**slow, "tbt": [0.01] * 98 + [0.4] * 2, "at": ["abc", "a day"]})  # measured again
            kv_gpu.cold_rows(run)
            row = run.book.rows["tbt.cold_models.p99_static_ratio"]
            self.assertAlmostEqual(row["value"], 20.0)
            self.assertIn("peer of a day, commit abc", row["note"])
            self.assertFalse(run.book.has("tbt.cold_models.p99_kvcached_ratio"))

    OLD = ["abc", "a day"]

    def values(self, run, metric):
        return run.book.rows[metric]["value"], run.book.rows[metric].get("commit")

    def test_what_is_older_than_the_row_is_told(self):
        side = {"tbt": [0.01] * 200, "ttft": [0.1], "asked": 5, "unfinished": 0, "load": ["t.csv", 6]}
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            run.samples.keep("kv_neighbour", "ours", {"alone": 1, "beside": 2}, self.OLD)
            run.samples.keep("kv_neighbour", "kvcached", {"alone": 1, "beside": 3})
            kv_gpu.neighbour_rows(run)
            note = run.book.rows["tbt.neighbour.growth"]["note"]
            self.assertTrue(note.endswith("; ours of a day, commit abc"), note)
            self.assertNotIn("peer of", note)
            run.samples.keep("kv_cold_ours", "0.8", side, self.OLD)
            run.samples.keep("kv_cold_static", "0.8", side)
            kv_gpu.cold_rows(run)
            rows = [row for metric, row in run.book.rows.items() if "static" in metric and "cold" in metric and row["value"] is not None]
            self.assertEqual(len(rows), 7)
            self.assertTrue(all("; ours of a day, commit abc" in row["note"] for row in rows), rows)
            run.samples.keep("kv_capacity", "ours", dict.fromkeys(kv_gpu.MODELS, 10), self.OLD)
            run.samples.keep("kv_capacity", "static", dict.fromkeys(kv_gpu.MODELS, 9))
            with mock.patch.object(kv_gpu.Run, "real", lambda self, name: types.SimpleNamespace(path=name)), \
                 mock.patch.object(kv_gpu.sglang_models, "facts", return_value={"max_position_embeddings": 1}):
                kv_gpu.capacity_rows(run)
            self.assertIn("; ours of a day, commit abc", run.book.rows[f"kv.longest.{kv_gpu.MODELS[0]}.capacity_tokens"]["note"])

    def test_ratios_keep_their_day(self):
        """A run that measures another rate, or another peer, does not date them anew; one of two builds says so."""
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.object(kv_gpu.results, "here", lambda: self.OLD), mock.patch.object(kv_gpu.results, "commit", lambda: "abc"):
                run = self.run_in(folder)
                for policy in kv_gpu.POLICIES:
                    run.samples.keep("kv_goodput", f"1 {policy}", {**self.ONE, "load": kv_gpu.goodput_load(run)})
                kv_gpu.goodput_rows(run)
            run = self.run_in(folder)
            ratio = "kv.goodput.rate1.deadline_static_ratio"
            kv_gpu.goodput_rows(run)
            self.assertEqual((self.values(run, ratio), ratio in run.book.fresh), ((1.0, "abc"), False))
            run.samples.keep("kv_goodput", "1 deadline", {**self.ONE, "goodput": 3.0, "load": kv_gpu.goodput_load(run)})
            kv_gpu.goodput_rows(run)
            self.assertEqual(self.values(run, ratio), (1.5, None))
            self.assertTrue(run.book.rows[ratio]["note"].endswith("; static of a day, commit abc"))

    def test_a_rate_is_told_although_the_next_one_does_not_fit(self):
        side = {"tbt": [0.01] * 200, "ttft": [0.1], "asked": 5, "unfinished": 0, "load": None}
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            run.arguments.cold_rates = [0.8, 0.2]
            left = iter([True, False])
            run.need = lambda *_: next(left) or (_ for _ in ()).throw(sglang_gpu.OutOfTime("over"))
            run.samples.keep("kv_cold_ours", "0.8", {**side, "load": sglang_gpu.cold_load_words(run, None, [])})
            with mock.patch.object(sglang_gpu, "cold_load", return_value=None), mock.patch.object(sglang_gpu, "cold_summary", return_value=side), \
                 self.assertRaises(sglang_gpu.OutOfTime):
                kv_gpu.measure_cold(run, "static", [])
            self.assertEqual(run.book.rows["tbt.cold_models.p99_static_ratio"]["value"], 1.0)

    def test_a_peer_that_does_not_run_is_no_win(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder, "kvcached")
            with mock.patch.object(kv_gpu.Run, "start", side_effect=harness.Failed("no such GPU")), mock.patch.object(kv_gpu.Run, "model", lambda self, name: types.SimpleNamespace(name=name)):
                kv_gpu.plain_side(run, "kvcached")
            row = run.book.rows["tbt.cold_models.p99_kvcached_ratio"]
            self.assertIsNone(row["value"])
            self.assertIn("kvcached failed to run: Failed: no such GPU", row["note"])
            self.assertEqual(len(run.failures), 1)
            self.assertEqual(run.book.rows["tbt.cold_models.p99_static_ratio"]["note"], "not run yet")

    def test_a_peer_whose_neighbour_is_missing_starts_again(self):
        side = {"tbt": [0.01] * 200, "ttft": [0.1], "asked": 5, "unfinished": 0, "load": []}
        with tempfile.TemporaryDirectory() as folder:
            run, started = self.run_in(folder, "kvcached"), []

            def start(self, name, **_):
                started.append(name)
                raise harness.Failed("no GPU")

            with mock.patch.multiple(kv_gpu.Run, start=start, model=lambda self, name: types.SimpleNamespace(name=name)), mock.patch.object(kv_gpu, "capacity_rows") as capacities:
                run.samples.keep("kv_cold_kvcached", "0.8", side)
                kv_gpu.plain_side(run, "kvcached")
                self.assertEqual((started, capacities.call_count), (["kv-kvcached"], 1))
                run.samples.keep("kv_neighbour", "kvcached", {"alone": 1, "beside": 1})
                kv_gpu.plain_side(run, "kvcached")
                self.assertEqual((started, capacities.call_count), (["kv-kvcached"], 2))

    def test_a_peer_outside_its_graphs_is_no_win(self):
        """At the start, or by what its log tells after the load."""
        side = {"tbt": [0.01] * 200, "ttft": [0.1], "asked": 5, "unfinished": 0}
        log = "Capture cuda graph end. Time elapsed: 6.48 s. Successfully patched sglang: a\n"
        eager = log + "Decode batch, #running-req: 1, cuda graph: False, gen\n"
        for peer in ("static", "kvcached"):
            for texts, why in ((["Successfully patched sglang: a"] * 2, "did not report a captured decode graph"), ([log, eager], "outside graphs"), ([log, log], "")):
                with tempfile.TemporaryDirectory() as folder:
                    run = self.run_in(folder, peer)
                    run.host.kind = "cuda"
                    made = sglang_servers.Server.__new__(sglang_servers.Server)
                    made.side, made.model, made.arguments = "vanilla", types.SimpleNamespace(name="m", mode="graphs", dp=1), [sglang_servers.NO_PREFILL_GRAPHS]
                    loaded = []
                    made.text = lambda texts=texts, loaded=loaded: texts[len(loaded)]
                    load = sglang_gpu.cold_load_words(run, None, ["m"])
                    run.samples.keep("kv_cold_ours", "0.8", {**side, "load": load})
                    run.samples.keep("kv_neighbour", peer, {"alone": 1, "beside": 1})
                    with mock.patch.multiple(kv_gpu.Run, start=lambda *_, **__: types.SimpleNamespace(vanilla={"m": made}), stop=lambda self: None,
                                             model=lambda self, name: types.SimpleNamespace(name=name)), \
                         mock.patch.multiple(kv_gpu, warm=mock.DEFAULT, capacity_rows=mock.DEFAULT, capacity=lambda server: 1, growth=lambda *_: {"alone": 1, "beside": 1},
                                             fixed_tokens=lambda run: dict.fromkeys(kv_gpu.MODELS, 1)), \
                         mock.patch.object(sglang_gpu, "cold_load", lambda *_, loaded=loaded: loaded.append(1)), mock.patch.object(sglang_gpu, "cold_summary", lambda _: dict(side)):
                        kv_gpu.plain_side(run, peer)
                    row = run.book.rows[f"tbt.cold_models.p99_{peer}_ratio"]
                    self.assertEqual((row["value"] is None, bool(run.failures)), (bool(why), bool(why)), (peer, run.failures))
                    if why:
                        self.assertIn(why, run.failures[0])
                        self.assertIn(f"{peer} failed to run", row["note"])
                        self.assertIsNone(run.samples.get(f"kv_cold_{peer}", "0.8"))


class Peers(unittest.TestCase):
    def test_arguments_of_kvcached(self):
        words = ["--port", "1", "--mem-fraction-static", "0.95", "--piecewise-cuda-graph-tokens", "128", "512", "--device", "cuda"]
        self.assertEqual(sglang_servers.for_kvcached(words), ["--port", "1", "--device", "cuda", "--disable-piecewise-cuda-graph"])

    def test_no_folder_no_kvcached(self):
        host = sglang_servers.Gpus.__new__(sglang_servers.Gpus)
        with self.assertRaisesRegex(harness.Failed, "kvcached is not here"):
            host.kvcached_environment("m")
        with tempfile.TemporaryDirectory() as folder:
            host.peer, host.site = pathlib.Path(folder), None
            (host.peer / "kvcached").mkdir()
            with self.assertRaisesRegex(harness.Failed, r"no kvcached_autopatch\.pth"):
                host.kvcached_environment("m")

    def test_hooks_of_the_peer_are_in_spawned_processes(self):
        """Beside a site whose own sitecustomize.py is of before there was a peer."""
        script = "import multiprocessing, sys\nif __name__ == '__main__':\n    child = multiprocessing.get_context('spawn').Process(target=print, args=('child',))\n"
        script += "    child.start()\n    child.join()\n"
        with tempfile.TemporaryDirectory() as folder:
            host = sglang_servers.Gpus.__new__(sglang_servers.Gpus)
            host.peer, host.site = pathlib.Path(folder) / "peer", pathlib.Path(folder) / "site"
            (host.peer / "kvcached").mkdir(parents=True)
            host.site.mkdir()
            (host.site / "sitecustomize.py").write_text("")
            (host.peer / "kvcached_autopatch.pth").write_text("import os; import kvcached; os.write(1, b'hooked ')\n")
            (host.peer / "kvcached" / "__init__.py").write_text("")
            program = pathlib.Path(folder) / "program.py"
            program.write_text(script)
            segment = pathlib.Path("/dev/shm") / f"xpool_peer_{os.getpid()}-m-1"
            segment.touch()
            self.addCleanup(segment.unlink, missing_ok=True)
            more = host.kvcached_environment(f"{os.getpid()}.m-1")
            self.assertEqual((more["ENABLE_KVCACHED"], more["KVCACHED_IPC_NAME"], segment.exists()), ("true", segment.name, False))
            self.assertEqual(more["PYTHONPATH"].split(os.pathsep)[-1], str(host.site))
            plain = {**os.environ, "PYTHONPATH": str(host.site)}
            said = [subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=60).stdout for env in (plain, {**plain, **more})]
        self.assertEqual(said[0].split(), ["child"])
        self.assertEqual(said[1].split()[-2:], ["hooked", "child"])

    def test_a_server_that_is_not_patched_fails(self):
        loads = "Load weight begin. avail mem=139.11 GB\n"
        done, failed = "[kvcached] Successfully patched sglang: a, b, c\n", "[kvcached] Failed to patch sglang: d\n"
        virtual = "[kvcached] VirtualKV Cache is allocated. #tokens: 9\n"
        self.assertEqual(sglang_servers.kvcached_patches(done + done + failed), (["a", "b", "c"], ["d"]))
        for text, ready, why in (
            ("", False, None),  # it has not come so far
            (done + loads, False, None),
            (done + loads + virtual, True, None),
            (loads, False, "no word"),
            ("", True, "no word"),
            (done + failed, False, "d failed, 3 were applied"),
            (done + loads, True, "not kvcached's"),
        ):
            found = sglang_servers.kvcached_fault(text, ready)
            self.assertTrue(found is None if why is None else why in found and found.startswith("kvcached did not patch SGLang"), (text, ready, found))
        made = sglang_servers.Server.__new__(sglang_servers.Server)
        made.ready_after, made.model, made.port, made.began = None, types.SimpleNamespace(name="m"), 1, 0.0
        for side, text, code, why in (
            ("kvcached", loads, None, "^kvcached m: kvcached did not patch SGLang"),
            ("kvcached", loads, -9, "ended with -9 before it was ready: kvcached did not patch SGLang"),
            ("kvcached", done, None, "^kvcached m: kvcached did not patch SGLang: the scheduler's"),  # it answers
            ("kvcached", done + virtual, None, None),
            ("vanilla", loads, None, None),
        ):
            made.side, made.text, made.process = side, lambda text=text: text, types.SimpleNamespace(poll=lambda code=code: code, returncode=code)
            made.ready_after = None
            with mock.patch.object(harness, "http_request", return_value=(200, {}, b"")):
                if why is None:
                    self.assertTrue(made.healthy())
                else:
                    with self.assertRaisesRegex(harness.Failed, why):
                        made.healthy()

    def test_a_model_that_does_not_start_is_left_out_once(self):
        with tempfile.TemporaryDirectory() as folder:
            run = kv_gpu.Run(kv_gpu.parse(["--build", "x", "--out", folder, "--rehearse"]))
            qwen, glm, deepseek = kv_gpu.MODELS
            self.assertEqual([run.who(part) for part in (kv_gpu.LONG, kv_gpu.BUSY, kv_gpu.ALONE)], [deepseek, deepseek, qwen])
            graphs = ["cuda"]
            fleet = types.SimpleNamespace(name="kv-ours", instances={glm: types.SimpleNamespace(captured=lambda: dict.fromkeys(graphs, 1.0))})
            started, run.fleet = [], fleet

            def start(self, name, models, **what):
                started.append(models)
                if len(models) == 3:
                    raise harness.Failed(f"crosspool {glm} ended with 1 before it was ready\nno such kernel")
                return fleet

            with mock.patch.multiple(kv_gpu.Run, start=start, model=lambda self, name: name, stop=lambda self: None), mock.patch.object(kv_gpu, "begin_system"):
                self.assertIs(run.system(), fleet)
            # At first without the graphs in whose capture it ended.
            self.assertEqual(started, [[qwen, glm, deepseek], [qwen, glm, deepseek], [qwen, deepseek]])
            self.assertEqual(run.eager_prefill, {glm, deepseek})
            self.assertEqual([run.model(name).more for name in (qwen, glm)], [[], ["--disable-piecewise-cuda-graph"]])
            self.assertEqual([run.who(part) for part in (kv_gpu.LONG, kv_gpu.BUSY, kv_gpu.ALONE)], [deepseek, deepseek, qwen])
            self.assertEqual(run.failures, [f"{glm} does not start: crosspool {glm} ended with 1 before it was ready"] * 2)
            run.names, run.eager_prefill = [qwen, glm, deepseek], set()
            graphs.clear()  # nothing was captured: it is left out at once
            with mock.patch.object(kv_gpu.Run, "stop"):
                run.without(harness.Failed(f"crosspool {glm} ended with 1"))
            self.assertEqual((run.names, run.eager_prefill), ([qwen, deepseek], set()))
            for text in ("daemon ended with 1", f"crosspool {qwen} ended with 1"):  # nobody to blame, too few left
                with self.assertRaises(harness.Failed):
                    run.without(harness.Failed(text))
            run.names = [glm, deepseek]
            self.assertEqual([run.who(part) for part in (kv_gpu.LONG, kv_gpu.BUSY, kv_gpu.ALONE)], [deepseek, deepseek, glm])

    def test_a_step_that_fails_leaves_the_system_where_it_serves(self):
        def step_bad(run):
            raise harness.Failed("wrong\nmore")

        for serves in (True, False):
            run = types.SimpleNamespace(failures=[], fleet=types.SimpleNamespace(serves=lambda serves=serves: serves))
            if serves:
                kv_gpu.keeping(step_bad)(run)
                self.assertEqual(run.failures, ["step_bad: Failed: wrong"])
            else:
                with self.assertRaises(harness.Failed):
                    kv_gpu.keeping(step_bad)(run)

    def test_tokens_under_a_history_are_compared(self):
        for wrong, moves in ((0, True), (1, True), (0, False)):
            state = {"groups": [{"model": "m", "grants": 0}]}

            def kv(*words, state=state, moves=moves):
                state["groups"][0]["grants"] += moves and words[:1] == ("trim",)

            def post(path, body, timeout, state=state, wrong=wrong):
                time.sleep(0.05 if state["groups"][0]["grants"] else 0.0)
                moved = state["groups"][0]["grants"] > 0
                return {"output_ids": [1, 2 + (wrong and moved)]}

            def books(state=state):
                return {"groups": [dict(state["groups"][0])]}

            server = types.SimpleNamespace(model=types.SimpleNamespace(path=pathlib.Path("x")), post=post)
            fleet = types.SimpleNamespace(instances={"m": server}, kv=kv, books=books, policy="deadline")
            with tempfile.TemporaryDirectory() as folder:
                run = self.run_here(folder, fleet)
                with mock.patch.object(kv_gpu.sglang_models, "facts", return_value={"vocab_size": 99}), mock.patch.object(kv_load, "Trimming", Trimming):
                    if wrong or not moves:
                        with self.assertRaisesRegex(harness.Failed, "differ" if wrong else "did not move"):
                            kv_gpu.step_history(run)
                    else:
                        kv_gpu.step_history(run)
                row = run.book.rows["kv.history.wrong_tokens"]
                self.assertEqual(row["value"] is None, not moves)
                if moves:
                    self.assertEqual(row["value"] > 0, bool(wrong))

    def run_here(self, folder, fleet):
        run = kv_gpu.Run(kv_gpu.parse(["--build", "x", "--out", folder, "--rehearse"]))
        run.system = lambda: fleet
        return run

    def test_both_halves_of_the_trace_are_there(self):
        with tempfile.TemporaryDirectory() as folder:
            conv = pathlib.Path(folder) / "trace_conv.csv"
            words = ["--build", "x", "--trace", str(conv)]
            conv.touch()
            with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
                kv_gpu.parse(words)
            kv_gpu.parse([*words, "--only", "cold"])
            (conv.parent / "trace_code.csv").touch()
            self.assertEqual(kv_gpu.parse(words).models, list(kv_gpu.MODELS))

    def test_steps_are_known(self):
        self.assertEqual(set(kv_gpu.ORDER), set(kv_gpu.STEPS))
        with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
            kv_gpu.parse(["--build", "x", "--only", "nonsense"])


class Traffic(unittest.TestCase):
    def test_other_tokens_are_counted(self):
        def post(path, body, timeout):
            return {"output_ids": [1, 9]}

        server = types.SimpleNamespace(model=types.SimpleNamespace(name="m"), post=post, name=lambda: "m")
        with kv_load.Traffic([server], [[1]], 2, [[1, 2]]) as traffic:
            time.sleep(0.05)
        self.assertGreater(traffic.served["m"], 0)
        self.assertEqual(traffic.wrong, traffic.served["m"])

    def test_errors_of_the_dying_are_excused(self):
        def post(path, body, timeout):
            raise OSError("gone")

        server = types.SimpleNamespace(model=types.SimpleNamespace(name="m"), post=post, name=lambda: "m")
        for excused in (True, False):
            with kv_load.Traffic([server], [[1]], 2, excused=excused, streams=2) as traffic:
                time.sleep(0.05)
            self.assertEqual(bool(traffic.errors), not excused)

    def test_all_go_on_or_it_is_told(self):
        def post(path, body, timeout):
            return {"output_ids": [1, 2]}

        server = types.SimpleNamespace(model=types.SimpleNamespace(name="m"), post=post, name=lambda: "m")
        with kv_load.Traffic([server], [[1]], 2, [[1, 2]], pause=0.01) as traffic:
            kv_gpu.goes_on(traffic)
        self.assertEqual((traffic.wrong, traffic.errors), (0, []))
        with mock.patch.object(harness, "wait_until", side_effect=harness.Failed("late")), self.assertRaises(harness.Failed):
            kv_gpu.goes_on(traffic)


class Cold(unittest.TestCase):
    def test_ours_is_elastic(self):
        started = {}
        run = types.SimpleNamespace(samples=types.SimpleNamespace(wanted=lambda *_: True), sizes=types.SimpleNamespace(cold_kv_tokens=1),
                                    real=lambda name, tokens: name, start=lambda name, **what: started.update(what) or 1 / 0)  # fmt: skip
        with self.assertRaises(ZeroDivisionError):
            sglang_gpu.cold_side(run, "ours", [0.8], [])
        self.assertEqual(started["kv_policy"], "deadline")

    def test_the_static_split_is_measured_once(self):
        """What benches/kv_gpu.py found of it serves here, where the load is the same."""
        trace = pathlib.Path("t.csv")
        with tempfile.TemporaryDirectory() as folder:
            run = types.SimpleNamespace(samples=sglang_gpu.Samples(pathlib.Path(folder), None), sizes=sglang_gpu.Sizes(False),
                                        arguments=types.SimpleNamespace(trace=trace), real=lambda *_: 1 / 0)  # fmt: skip
            load = sglang_gpu.cold_load_words(run, trace, sglang_gpu.COLD)
            run.samples.keep("kv_cold_static", "0.8", {"tbt": [0.1], "load": ["other", *load[1:]]})
            with self.assertRaises(ZeroDivisionError):
                sglang_gpu.cold_side(run, "static", [0.8], [])
            run.samples.keep("kv_cold_static", "0.8", {"tbt": [0.1], "load": load})
            run.samples.keep("kv_cold_static", "0.8", {"tbt": [0.1], "load": load}, ["abc", "a day"])
            sglang_gpu.cold_side(run, "static", [0.8], [])
            self.assertEqual(run.samples.get("cold_static", "0.8")["kv"], "filled its GPU")
            self.assertEqual(run.samples.at("cold_static", "0.8"), ["abc", "a day"])

    def test_rows_say_when_the_static_split_was_measured(self):
        side = {"tbt": [0.1], "ttft": [0.1], "asked": 5, "unfinished": 0, "by": {}}
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            run = types.SimpleNamespace(samples=sglang_gpu.Samples(folder, None), sizes=sglang_gpu.Sizes(False), book=sglang_gpu.Book(folder / "x.json", "m", None, []))
            run.samples.keep("cold_static", "0.8", {**side, "context": 70000}, ["abc", "a day"])
            run.samples.keep("cold_ours", "0.8", side)
            sglang_gpu.cold_rows(run, [0.8], "lengths")
            self.assertIn("; peer of a day, commit abc", run.book.rows["sglang.cold.0.8.tbt_p99_ms"]["note"])
            self.assertIn("contexts of up to 16384 tokens, the peer's 70000", run.book.rows["sglang.cold.0.8.tbt_p99_ms"]["note"])
            run.samples.fresh.clear(), run.book.fresh.clear()
            sglang_gpu.cold_rows(run, [0.8], "lengths")
            self.assertEqual(run.book.fresh, set())


if __name__ == "__main__":
    unittest.main()
