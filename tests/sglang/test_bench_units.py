#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""benches/sglang_gpu.py without a server: what is read from logs and counters, how it is judged, and what a run
that goes on from an earlier one keeps."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "tests" / "cuda")]

import hop_ways  # noqa: E402
import numpy  # noqa: E402
import results  # noqa: E402
import sglang_first  # noqa: E402
import sglang_gpu  # noqa: E402
import sglang_models  # noqa: E402
import sglang_padded  # noqa: E402
import sglang_servers  # noqa: E402
import sglang_spread  # noqa: E402
import sglang_tokens  # noqa: E402
import sglang_truth  # noqa: E402

LOG = """
[12:00:00] Load weight end. elapsed=3.20 s, type=Qwen3MoeForCausalLM, avail mem=80.00 GB, mem usage=56.90 GB.
[12:00:01] Capture cuda graph begin. This can take up to several minutes. avail mem=70.00 GB
[12:00:07] Capture cuda graph end. Time elapsed: 6.48 s. mem usage=0.82 GB. avail mem=69.00 GB.
[12:00:50] Capture piecewise CUDA graph end. Time elapsed: 47.10 s. mem usage=0.82 GB. avail mem=69.00 GB.
[12:00:51] Prefill batch, #new-seq: 1, #new-token: 1024, #running-req: 0, cuda graph: True, input throughput (token/s): 3.00
[12:00:52] Decode batch, #running-req: 1, #token: 1064, cuda graph: True, gen throughput (token/s): 3.00, #queue-req: 0
"""
EAGER = "[12:00:53] Decode batch, #running-req: 1, #token: 1064, cuda graph: False, gen throughput (token/s): 3.00\n"


def server(text, mode="graphs"):
    made = sglang_servers.Server.__new__(sglang_servers.Server)
    made.side, made.model = "vanilla", types.SimpleNamespace(name="m", mode=mode, dp=1, more=[])
    made.text, made.arguments = lambda: text, []
    return made


def run_on(kind="cuda", counters=()):
    states = iter(counters)
    fleet = types.SimpleNamespace(counters=lambda name: dict(next(states)))
    return types.SimpleNamespace(host=types.SimpleNamespace(kind=kind), fleet=fleet, failures=[])


def answer(due, times):
    return types.SimpleNamespace(due=due, times=times)


def counted(invocations, busy, queue, **rank):
    found = {"invocations": invocations, "busy_ns": busy, "queue_ns": queue, "layers": 4}
    return {**found, **{f"rank_{key}": value for key, value in rank.items()}}


class Commit(unittest.TestCase):
    def test_what_benchmarks_write_is_no_change(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(results, "ROOT", pathlib.Path(folder)), \
                unittest.mock.patch.dict("os.environ"):
            os.environ.pop("XPOOL_COMMIT", None)
            self.assertEqual(results.commit(), "unknown")
            root = pathlib.Path(folder)
            for name in ("docs/results/a.json", "README.md", "src.c"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("one")
            for words in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t", "commit", "-qm", "t"]):
                subprocess.run(["git", *words], cwd=root, check=True, timeout=60)
            clean = results.commit()
            self.assertRegex(clean, "^[0-9a-f]+$")
            (root / "docs/results/a.json").write_text("two")
            (root / "README.md").write_text("two")
            (root / "new").write_text("untracked")
            self.assertEqual(results.commit(), clean)
            (root / "src.c").write_text("two")
            self.assertEqual(results.commit(), clean + "-dirty")


class Sanitizer(unittest.TestCase):
    RAN = "========= COMPUTE-SANITIZER\n212 cases, 0 failed, 448 rows compared, 0 not comparable (ties)\n"
    CLEAN = {"memcheck": "========= ERROR SUMMARY: 0 errors\n", "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"}

    def rows(self, tool, text, *ran):
        return results.sanitizer_rows("ffn.sanitizer", tool, text, "small", *ran)

    def test_a_row_is_what_was_found(self):
        for tool, clean in self.CLEAN.items():
            self.assertEqual(self.rows(tool, self.RAN + clean), [results.row(f"ffn.sanitizer.{tool}", 0, "errors", target="0", note="small")])
        found = "========= RACECHECK SUMMARY: 27 hazards displayed (25 errors, 2 warnings)\n"
        self.assertEqual(self.rows("racecheck", self.RAN + found)[0]["value"], 27)
        self.assertEqual(self.rows("memcheck", self.RAN + "========= ERROR SUMMARY: 1 error\n")[0]["value"], 1)
        self.assertEqual(self.rows("memcheck", "ok transport_sanitize\n" + self.CLEAN["memcheck"], "(ok) transport_sanitize$")[0]["value"], 0)

    def test_an_empty_run_is_none(self):
        for tool, clean in self.CLEAN.items():
            other = self.CLEAN["racecheck" if tool == "memcheck" else "memcheck"]
            for text in ("", self.RAN, clean, clean + "0 cases, 0 failed\n", clean + "no cases, 0 failed\n", self.RAN + other):
                self.assertIsNone(self.rows(tool, text), text)

    def test_what_is_planted_must_be_seen(self):
        write = "========= Invalid __global__ write of size 4 bytes\n=========     at test_planted+0x90 in ffn_device.cu:80\n"
        race = "========= Error: Race reported between Write access at test_planted+0x50 in ffn_device.cu:79\n"
        for tool, sees, other in (("memcheck", write, race), ("racecheck", race, write)):
            self.assertTrue(results.sanitizer_sees(tool, sees))
            for text in ("", other, sees.replace("test_planted", "decode"), self.CLEAN[tool]):
                self.assertFalse(results.sanitizer_sees(tool, text), text)


class Logs(unittest.TestCase):
    def test_what_a_log_tells(self):
        self.assertEqual(server(LOG).captured(), {"cuda": 6.48, "piecewise": 47.1})
        self.assertEqual(server(LOG).batches(), {("Prefill", True): 1, ("Decode", True): 1})
        self.assertEqual(server(LOG).loaded_gb(), 56.9)
        self.assertIsNone(server("").loaded_gb())

    def test_steps_outside_graphs_fail_the_run(self):
        run = run_on()
        sglang_tokens.check_graphs(run, [server(LOG)])
        self.assertEqual(run.failures, [])
        with self.assertRaisesRegex(sglang_servers.harness.Failed, "outside graphs"):
            sglang_tokens.check_graphs(run, [server(LOG + EAGER)])
        with self.assertRaisesRegex(sglang_servers.harness.Failed, "did not report"):
            sglang_tokens.check_graphs(run, [server(EAGER)])
        sglang_tokens.check_graphs(run, [server(EAGER, mode="eager")])
        for _ in range(2):
            sglang_tokens.check_graphs(run, [server(LOG.replace("piecewise", "other"))])
        self.assertEqual(len(run.failures), 1)
        without = server(LOG.replace("piecewise", "other"))
        without.side, without.arguments = "kvcached", sglang_servers.for_kvcached([])  # it is not to capture these
        sglang_tokens.check_graphs(run, [without])
        self.assertEqual(len(run.failures), 1)


class Counters(unittest.TestCase):
    RANK = {"replayed_calls": 0, "eager_decode_calls": 0, "eager_prefill_calls": 0, "ffn_calls": 0, "ffn_wait_ns": 0}

    def measured(self, *states):
        run = run_on(counters=states)
        with sglang_tokens.Replayed(run, "m") as found:
            pass
        return found

    def test_replayed_calls_are_wanted(self):
        before = counted(0, 0, 0, **self.RANK)
        good = self.measured(before, counted(40, 0, 0, **{**self.RANK, "replayed_calls": 40}))
        good.check(10)
        with self.assertRaisesRegex(sglang_servers.harness.Failed, "44 or more"):
            good.check(11)
        eager = self.measured(before, counted(44, 0, 0, **{**self.RANK, "replayed_calls": 40, "eager_decode_calls": 4}))
        with self.assertRaisesRegex(sglang_servers.harness.Failed, "4 FFN calls"):
            eager.check(10)
        untold = self.measured(counted(0, 0, 0), counted(40, 0, 0))
        with self.assertRaisesRegex(sglang_servers.harness.Failed, "does not tell"):
            untold.check(10)

    def test_prefill_is_subtracted(self):
        states = [counted(0, 0, 0, ffn_calls=0, ffn_wait_ns=0), counted(10, 100000, 5000, ffn_calls=10, ffn_wait_ns=200000),
                  counted(70, 420000, 75000, ffn_calls=70, ffn_wait_ns=1000000)]
        run = run_on(counters=states)
        with sglang_tokens.Replayed(run, "m") as prefill:
            pass
        with sglang_tokens.Replayed(run, "m", since=prefill) as whole:
            pass
        layer = whole.layer(prefill, 2)  # 60 calls less twice 10
        self.assertEqual(layer["calls"], 40)
        self.assertAlmostEqual(layer["execution"], (320 - 200) / 40)
        self.assertAlmostEqual(layer["waiting"], (70 - 10) / 40)
        self.assertAlmostEqual(layer["round_trip"], (800 - 400) / 40)


class Times(unittest.TestCase):
    def test_gaps_while_all_decode(self):
        answers = [answer(0.0, [1.0, 2.0, 3.0, 4.0]), answer(0.5, [1.5, 2.0, 2.5, 5.5])]  # absolute 2, 2.5, 3, 6
        self.assertEqual(sglang_gpu.steady_gaps(answers), [1.0, 1.0, 0.5, 0.5])
        self.assertEqual(len(sglang_gpu.all_gaps(answers)), 6)

    def test_quantiles(self):
        self.assertEqual(sglang_gpu.quantile(range(100), 0.99), 99)
        self.assertEqual(sglang_gpu.quantile([3, 1, 2], 0.5), 2)
        self.assertNotEqual(sglang_gpu.quantile([], 0.5), sglang_gpu.quantile([], 0.5))  # not a number

    def test_the_worst_cell_is_of_the_model_that_it_is_named_after(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "x.json"
            one, other, third = (f"sglang.{name}.ratio" for name in ("Qwen3-30B-A3B.1024.b1", "Qwen3-30B-A3B.1024.b8", "Qwen3-14B.1024.b1"))
            with mock.patch.object(results, "commit", lambda: "old"):
                sglang_gpu.Book(path, "m", None, []).add(results.row(one, 1.1, "ratio"), results.row(third, 1.9, "ratio"))
            book = sglang_gpu.Book(path, "m", path, [other])
            sglang_gpu.worst_ratio(book)
            self.assertTrue(book.lacks("tbt.one_model.sglang_ratio"))  # nothing of it was measured
            with mock.patch.object(results, "commit", lambda: "new"):
                book.add(results.row(other, 1.05, "ratio"), results.row("sglang.Qwen3-14B.8192.b1.ratio", 1.8, "ratio"))
                sglang_gpu.worst_ratio(book)
            row = book.rows["tbt.one_model.sglang_ratio"]
            self.assertEqual(row["value"], 1.1)
            self.assertIn(f"the largest of 2 of 2 cells: {one}; median 1.075", row["note"])
            self.assertIn("of commits: new 1, old 1", row["note"])

    def test_a_p99_of_few_is_called_what_it_is(self):
        self.assertEqual([sglang_gpu.quantile(range(count), 0.99) == count - 1 for count in (1, 23, 100, 101)], [True, True, True, False])
        self.assertEqual([results.few(23, 100), results.few(23, 101), results.few(101, 500)], [" (the largest of 23 and the largest of 100)", " (the largest of 23 and of 101)", ""])

    def test_where_a_figure_is_that_is_not_run_here(self):
        with tempfile.TemporaryDirectory() as folder:
            book = sglang_gpu.Book(pathlib.Path(folder) / "x.json", "m", None, ["one", "two"])
            book.add(results.row("one", 1.0, "ms", note="measured"))
            book.point(["one", "two"], "elsewhere")
            self.assertEqual([(row["value"], row["note"]) for row in book.rows.values()], [(1.0, "measured"), (None, "elsewhere")])

    def test_rows_of_a_cell(self):
        plain = {"ttft": [0.1], "gaps": [0.01] * 10}
        ours = {"ttft": [0.2], "gaps": [0.011] * 10}
        layer = {"calls": 9, "execution": 20.0, "waiting": 1.0, "round_trip": 50.0}
        rows = {row["metric"]: row for row in sglang_gpu.cell_rows("x", plain, ours, layer, 48, "decode only")}
        self.assertAlmostEqual(rows["x.ratio"]["value"], 1.1)
        self.assertAlmostEqual(rows["x.split.mailbox_hops_us"]["value"], 29.0)
        self.assertAlmostEqual(rows["x.split.attention_us"]["value"], 11000 - 48 * 50)
        self.assertEqual(list(rows)[sglang_gpu.RATIO], "x.ratio")


class Tokens(unittest.TestCase):
    def test_only_close_choices_may_part(self):
        plain = [([1, 2, 3, 4], [5.0, 5.0, 0.1, 5.0]), ([1, 2, 3, 4], [5.0] * 4)]
        agreement, wrong = sglang_tokens.compare("t", plain, [([1, 2, 9, 9], []), ([1, 2, 3, 4], [])])
        self.assertEqual((agreement["value"], wrong["value"]), (0.75, 0))
        self.assertIn("0.100: 2", agreement["note"])
        agreement, wrong = sglang_tokens.compare("t", plain, [([9, 2, 3, 4], []), ([1, 2, 3, 4], [])])
        self.assertEqual((agreement["value"], wrong["value"]), (0.5, 1))


def judged(*shorts):
    """Answers whose tokens are so many nats short of float32's best; the second is 3 behind it."""
    return [[[7, 3.0, short] for short in one] for one in shorts]


class ThirdParty(unittest.TestCase):
    def test_what_one_side_is_worth(self):
        one = sglang_truth.summary(judged([0, 0, 0.3, 0, 4.7], [0, 0, 0, 0, 0]))
        self.assertEqual((one["tokens"], one["missed"], one["far"], one["first"]), (10, 2, 1, 3.5))
        self.assertEqual((one["longest"], one["gaps"]), (4.7, [(3.0, 0.3, 2)]))
        self.assertIn("8 of 10 tokens are float32's, 1 are more than 1.0 nat short (longest 4.70)", sglang_truth.words(one))

    def test_only_what_is_clearly_worse_fails(self):
        def side(missed, far):
            return sglang_truth.summary(judged([0.2] * missed + [3.0] * far + [0.0] * (500 - missed - far)))

        self.assertLessEqual(sglang_truth.verdict(side(20, 2), side(20, 2)), 0)
        self.assertLess(sglang_truth.verdict(side(5, 0), side(20, 5)), 0)  # better
        self.assertLess(sglang_truth.verdict(side(24, 0), side(20, 0)), sglang_truth.SIGMAS)  # chance
        self.assertGreater(sglang_truth.verdict(side(40, 0), side(15, 0)), sglang_truth.SIGMAS)
        self.assertGreater(sglang_truth.verdict(side(10, 6), side(15, 0)), sglang_truth.SIGMAS)  # few, but far

    def test_rows(self):
        rows = sglang_tokens.float32_rows("t", {"ours": judged([0, 0, 0, 0.5]), "plain": judged([4.7, 0, 0, 0.1])})
        self.assertEqual([row["metric"] for row in rows], ["t.float32_agreement", "t.float32_first", "t.float32_worse"])
        self.assertEqual((rows[0]["value"], rows[0]["peer"]), (0.75, 0.5))
        self.assertEqual((rows[1]["value"], rows[1]["peer"]), (3, 0))
        self.assertLess(rows[2]["value"], 0)

    def test_without_the_reference_it_is_said(self):
        with self.assertRaisesRegex(RuntimeError, "float32 reference"):
            sglang_truth.ask(sys.executable, "/nonexistent", {"ours": [[[1, 2], [3]]]})


class GoingOn(unittest.TestCase):
    def test_rows_and_samples_outlast_a_run(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (pathlib.Path(folder) / name for name in "ab")
            first.mkdir(), second.mkdir()
            book = sglang_gpu.Book(first / "x.json", "machine", None, ["one", "two"])
            book.add(sglang_gpu.results.row("one", 1.5, "ms"))
            self.assertTrue(book.has("one") and not book.has("two"))
            sglang_gpu.Samples(first, None).keep("tokens", "m", [1, 2])
            again = sglang_gpu.Book(second / "x.json", "machine", first / "x.json", ["one", "two", "three"])
            self.assertTrue(again.has("one") and not again.has("three"))
            again.write()
            rows = json.loads((second / "x.json").read_text())["rows"]
            self.assertEqual([row["value"] for row in rows], [1.5, None, None])
            self.assertEqual(sglang_gpu.Samples(second, first).get("tokens", "m"), [1, 2])
            self.assertEqual(sglang_gpu.Samples(second, second).get("tokens", "m"), [1, 2])

    def test_samples_know_their_commit_and_day(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            samples = sglang_gpu.Samples(folder, None)
            samples.keep("tokens", "m", [1, 2], ["old", "a day"])
            samples.keep("kv_cold_ours", "1", {"at": ["older", "its day"]})
            samples.keep("tokens", "n", [3])
            again = sglang_gpu.Samples(folder, folder)
            self.assertEqual([again.at("tokens", "m"), again.at("tokens", "n"), again.at("tokens", "o")], [["old", "a day"], results.here(), None])
            self.assertEqual(again.at("kv_cold_ours", "1"), ["older", "its day"])
            self.assertEqual(results.kept(ours=again.at("tokens", "m"), peer=again.at("tokens", "n"), other=None), "; ours of a day, commit old")
        for path in sglang_gpu.SAMPLES.glob("sglang_*.samples"):  # all that later runs may go on from
            kept = sglang_gpu.Samples(ROOT, None, sglang_gpu.SAMPLES)
            for kind, one in kept.kinds.items():
                self.assertTrue(all(kept.at(kind, key) for key in one if key != "at"), path)

    def test_tokens_of_two_commits_say_so(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            run = run_on()
            run.samples, run.sizes = sglang_gpu.Samples(folder, None), sglang_gpu.Sizes(False)
            run.book, run.need = sglang_gpu.Book(folder / "x.json", "m", None, []), lambda *_: None
            run.samples.keep("tokens", "c-graphs", [([1, 2], [5.0, 5.0])], ["abc", "a day"])
            replayed = mock.MagicMock()
            replayed.return_value.__enter__.return_value.words = lambda: "replayed 1"
            with mock.patch.object(sglang_tokens, "check_graphs"), mock.patch.object(sglang_tokens, "Replayed", replayed), \
                 mock.patch.object(sglang_tokens, "greedy", return_value=[([1, 2], [])]):
                sglang_tokens.pair_of_tokens(run, "t", "c", "graphs", None, server(LOG))
            self.assertIn("; peer of a day, commit abc", run.book.rows["t.agreement"]["note"])
            judged_so = {"ours": judged([0, 0]), "plain": judged([0, 0])}
            run.arguments = types.SimpleNamespace(python="python3")
            run.small = lambda *_: types.SimpleNamespace(path=None)
            with mock.patch.object(sglang_tokens.sglang_truth, "ask", return_value=judged_so), mock.patch.object(sglang_tokens, "prompts_of", return_value=[[1]]):
                sglang_tokens.step_float32(run)
            self.assertIn("; peer of a day, commit abc", run.book.rows["t.float32_agreement"]["note"])

    def test_rows_of_another_commit_say_so(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (pathlib.Path(folder) / name for name in ("x.json", "y.json"))
            with mock.patch.object(results, "commit", lambda: "old"):
                sglang_gpu.Book(first, "machine", None, ["one", "two", "gone"]).add(results.row("one", 1.5, "ms"), results.row("two", 2.5, "ms"))
            book = sglang_gpu.Book(second, "machine", first, ["one", "two"], again=True)
            self.assertFalse(book.has("one") or book.has("two"))  # they are measured once more
            with mock.patch.object(results, "commit", lambda: "new"):
                book.add(results.row("one", 1.4, "ms"))
            self.assertTrue(book.has("one"))
            data = json.loads(second.read_text())
            self.assertEqual([(row["metric"], row["value"], row.get("commit", data["commit"])) for row in data["rows"]], [("one", 1.4, "new"), ("two", 2.5, "old")])

    def test_what_failed_stands_with_the_rows(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "x.json"
            run = types.SimpleNamespace(arguments=argparse.Namespace(flags="", only="one,two,three", budget=1e9, out=pathlib.Path(folder)), stop=lambda: None,
                                        host=types.SimpleNamespace(flags=[], caches=None), failures=[], left=lambda: 1.0, book=sglang_gpu.Book(path, "m", None, ["one"]))  # fmt: skip
            run.fails = lambda what, error: run.failures.append(f"{what}: {error}")

            def fails(run):
                raise sglang_servers.harness.Failed("no answer")

            def late(run):
                run.failures.append("half of it")
                raise sglang_gpu.OutOfTime("60 s")

            steps = {"one": lambda run: run.book.add(results.row("one", 1.0, "ms")), "two": fails, "three": late}
            self.assertEqual(sglang_gpu.perform(run, steps), 1)
            self.assertEqual(json.loads(path.read_text())["failures"], {"two": ["two: no answer"], "three": ["half of it"]})
            # Only a step that is measured anew clears what it said; a step that has no time for all of it too.
            run.book, run.failures = sglang_gpu.Book(path, "m", path, ["one"]), []
            steps.update(two=lambda run: run.book.add(results.row("two", 1.0, "ms")), three=lambda run: None)
            self.assertEqual(sglang_gpu.perform(run, steps), 0)
            self.assertEqual(json.loads(path.read_text())["failures"], {"three": ["half of it"]})

            def some(run):
                run.book.add(results.row("three", 1.0, "ms"))
                raise sglang_gpu.OutOfTime("60 s")

            run.book, run.failures, steps["three"] = sglang_gpu.Book(path, "m", path, ["one"]), [], some
            run.book.failures["end"] = ["did not end in order"]
            self.assertEqual(sglang_gpu.perform(run, steps), 0)
            self.assertNotIn("failures", json.loads(path.read_text()))
            # A fault of the program itself is told, and no old one hides it.
            run.book.failures["two"], steps["one"] = ["old"], lambda run: None + 1
            with self.assertRaises(TypeError):
                sglang_gpu.perform(run, steps)
            self.assertIn("unsupported operand", json.loads(path.read_text())["failures"]["one"][0])

    def test_what_is_of_this_commit_need_not_be_renewed(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            path = folder / "x.json"
            with mock.patch.object(results, "commit", lambda: "old"):
                sglang_gpu.Book(path, "machine", None, []).add(results.row("one", 1.5, "ms"))
                sglang_gpu.Samples(folder, None).keep("s", "one", 1)
            for now, again, done in (("old", True, False), ("old", sglang_gpu.RENEW, True), ("new", sglang_gpu.RENEW, False), ("new", False, True)):
                with mock.patch.object(results, "commit", lambda now=now: now):
                    book, samples = sglang_gpu.Book(path, "machine", path, [], again=again), sglang_gpu.Samples(folder, folder, again=again)
                    self.assertEqual((book.has("one"), samples.wanted("s", "one")), (done, not done), (now, again))
                    self.assertTrue(samples.wanted("s", "two") and not book.has("two"))
            for unknown in ("unknown", "abc-dirty", None):
                with mock.patch.object(results, "commit", lambda unknown=unknown: unknown or "abc"):
                    self.assertFalse(sglang_gpu.of_this_commit(unknown))

    def test_no_step_begins_without_time(self):
        run = sglang_gpu.Run.__new__(sglang_gpu.Run)
        run.end = sglang_gpu.time.monotonic() + 5
        run.need(1, "this")
        with self.assertRaises(sglang_gpu.OutOfTime):
            run.need(60, "that")


class Small(unittest.TestCase):
    """The servers of small checkpoints, without any."""

    def fleet(self, **ends):
        """Every server serves at once; those named in `ends` end instead."""
        fleet = sglang_servers.Fleet.__new__(sglang_servers.Fleet)
        fleet.roles, fleet.lost, fleet.dead, fleet.later, fleet.ended, fleet.plain = {}, {}, {}, set(), [], "vanilla"

        def made(side, name):
            one = types.SimpleNamespace(model=types.SimpleNamespace(name=name, mode="graphs", more=[]), side=side, ready_after=None)
            one.set_log_aside = lambda: None
            one.captured = lambda: dict.fromkeys(ends.get("captured", ()), 1.0)
            one.name, one.end = lambda: f"{side} {name}", lambda: fleet.ended.append(one.name())

            def healthy():
                if name in ends.get(side, ()):
                    raise sglang_servers.harness.Failed(f"{one.name()} ended with -9")
                one.ready_after = 1.0
                return True

            one.healthy = healthy
            return one

        names = ("tales-qwen3-moe-graphs", "seeded-deepseek-v2-graphs")
        fleet.vanilla, fleet.instances = ({name: made(side, name) for name in names} for side in ("vanilla", "crosspool"))
        return fleet

    def test_a_server_that_does_not_start_costs_its_own_rows(self):
        fleet, asked = self.fleet(vanilla=["seeded-deepseek-v2-graphs"]), []
        arguments = types.SimpleNamespace(checkpoints=["seeded-deepseek-v2", "tales-qwen3-moe"], rehearse=False, only="tokens", kills=10)
        run = types.SimpleNamespace(modes=lambda: ("graphs",), arguments=arguments, failures=[], need=lambda *words: None,
                                    book=types.SimpleNamespace(has=lambda metric: False))
        with mock.patch.object(sglang_tokens, "small_fleet", lambda run: fleet), \
             mock.patch.object(sglang_tokens, "pair_of_tokens", lambda run, metric, *pair: asked.append(pair[:2])):
            sglang_tokens.step_tokens(run)
        self.assertEqual(asked, [("tales-qwen3-moe", "graphs")])
        self.assertEqual(fleet.ended, ["vanilla seeded-deepseek-v2-graphs", "vanilla tales-qwen3-moe-graphs"])
        self.assertEqual(run.failures, ["sglang.tokens.seeded-deepseek-v2.graphs.1x1: vanilla seeded-deepseek-v2-graphs ended with -9"])

    def test_prefill_graphs_are_left_out_where_their_capture_ends_a_server(self):
        name = "seeded-deepseek-v2-graphs"
        fleet, started = self.fleet(vanilla=[name], captured=["cuda"]), []
        fleet.launch_plain = fleet.launch_instances = started.append
        fleet.poll()
        model = fleet.dead[f"vanilla {name}"].model
        self.assertTrue(fleet.without_prefill_graphs(name))
        self.assertEqual((started, model.more, fleet.lost), ([{name}] * 2, [sglang_servers.NO_PREFILL_GRAPHS], {}))
        self.assertEqual(fleet.ended, [f"vanilla {name}", f"crosspool {name}"])
        self.assertFalse(fleet.without_prefill_graphs(name))
        fleet = self.fleet(vanilla=[name])  # it ended before
        fleet.poll()
        self.assertFalse(fleet.without_prefill_graphs(name))

    def kills(self, rows):
        run = types.SimpleNamespace(book=sglang_gpu.Book.__new__(sglang_gpu.Book), arguments=types.SimpleNamespace(kills=10))
        run.book.again, run.book.rows = False, {row["metric"]: row for row in rows}
        return sglang_tokens.kills_left(run)

    def test_kills_are_judged_and_counted(self):
        run = types.SimpleNamespace(sizes=sglang_gpu.Sizes(False), arguments=types.SimpleNamespace(kills=10))
        survivors = [types.SimpleNamespace(model=types.SimpleNamespace(name="s"))]
        done = [{"name": "v", "at": 40, "wrong": 0, "gap": 0.004, "ended": []}, {"name": "w", "at": None, "wrong": 3, "gap": 0.009, "ended": []}]
        rows = sglang_tokens.kill_rows(run, done, survivors, 0.003)
        self.assertEqual([row["value"] for row in rows], [3, 1, 9.0])  # a kill that came too late counts for tokens alone
        self.assertIn("v at 40", rows[1]["note"])
        self.assertEqual((self.kills([]), self.kills(rows)), (10, 9))

    def test_shapes_that_triton_decodes(self):
        def decodes(latents, rotary):
            return sglang_models.triton_decodes({"kv_lora_rank": latents, "qk_rope_head_dim": rotary})

        self.assertTrue(sglang_models.triton_decodes({}))
        self.assertEqual([decodes(512, 64), decodes(256, 32), decodes(112, 16), decodes(64, 16), decodes(128, 64)], [True, True, True, False, False])
        for family in ("deepseek-v2", "glm4-moe-lite"):
            self.assertFalse(sglang_models.triton_decodes(sglang_models.facts(sglang_models.TALES / family)))
            hidden, head = sglang_models.SEEDED[family]["hidden"], sglang_models.SEEDED[family]["head-dim"]  # as `xpool model synth` derives them
            self.assertTrue(decodes(hidden // 4, head // 2))


class More(unittest.TestCase):
    """The other models: a start of each side, without any server."""

    def run_of(self, folder, lost=(), again=False):
        arguments = types.SimpleNamespace(models=["first", "a", "GLM-4.7-Flash"], only="more", rehearse=False)
        run = types.SimpleNamespace(arguments=arguments, failures=[], sizes=sglang_gpu.Sizes(True), host=types.SimpleNamespace(kind="cpu", both=[["gpu0", "gpu1"]]),
                                    samples=sglang_gpu.Samples(folder, folder, again=again), book=sglang_gpu.Book(folder / "x.json", "m", folder / "x.json", []),
                                    real=lambda name, requests: types.SimpleNamespace(name=name), stop=lambda: None, need=lambda *_: None, started=[])  # fmt: skip
        run.fails = lambda what, error: run.failures.append(f"{what}: {error}")

        def start_most(name, vanilla=(), models=()):
            run.started.append((name, [(model.name, gpu) for model, (gpu,) in vanilla], [model.name for model in models]))
            made = lambda name: types.SimpleNamespace(model=types.SimpleNamespace(name=name), name=lambda: name)  # noqa: E731
            run.fleet = types.SimpleNamespace(vanilla={m.name: made(m.name) for m, _ in vanilla if m.name not in lost},
                                              instances={m.name: made(m.name) for m in models}, servers=lambda: [])
            return run.fleet

        run.start_most = start_most
        return run

    def perform(self, run):
        cells = []
        with mock.patch.object(sglang_gpu, "check_graphs"), mock.patch.object(sglang_gpu, "warm_up"), \
             mock.patch.object(sglang_gpu, "measure_cell", lambda run, server, batch, context, rounds: {"ttft": [0.1], "gaps": [0.0123456789]}), \
             mock.patch.object(sglang_gpu, "ours_cell", lambda run, name, metric, context, batch, rounds, plain, how: cells.append((metric, plain)) or run.book.add(results.row(f"{metric}.ratio", 1.0, "ratio"))):
            sglang_gpu.step_more(run)
        return cells

    def test_sides_one_after_the_other(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_of(pathlib.Path(folder))
            cells = self.perform(run)
            self.assertEqual(run.started, [("more-plain", [("a", "gpu0"), ("GLM-4.7-Flash", "gpu1")], []), ("more-ours", [], ["a", "GLM-4.7-Flash"])])
            self.assertEqual(len(cells), 2 * len(sglang_gpu.cells_of(run)))
            self.assertEqual(cells[0][1], {"ttft": [0.1], "gaps": [0.012346]})
            again = self.run_of(pathlib.Path(folder))  # of the samples and rows of that run: nothing but memory is left
            self.assertEqual((self.perform(again), [name for name, *_ in again.started]), ([], ["more-ours"]))

    def test_a_server_that_ends_costs_its_own_rows(self):
        with tempfile.TemporaryDirectory() as folder:
            cells = self.perform(self.run_of(pathlib.Path(folder), lost=["a"]))
            self.assertTrue(cells and all("GLM-4.7-Flash" in metric for metric, _ in cells))


class Starts(unittest.TestCase):
    def test_the_last_one_tells_how_long_the_next_one_takes(self):
        with tempfile.TemporaryDirectory() as folder:
            run = sglang_gpu.Run.__new__(sglang_gpu.Run)
            run.samples, run.host, run.left = sglang_gpu.Samples(pathlib.Path(folder), None), types.SimpleNamespace(start_s=10), lambda: 99
            run.fleet = None

            def begin(name):
                run.fleet = types.SimpleNamespace(ready=lambda limit: None, began=sglang_gpu.time.monotonic() - 50)
                return run.fleet

            run.begin = begin
            run.start("one")
            self.assertAlmostEqual(run.start_s, 60, delta=2)
            self.assertAlmostEqual(sglang_gpu.start_seconds(sglang_gpu.Samples(pathlib.Path(folder), None, pathlib.Path(folder))), 60, delta=2)
            self.assertEqual(sglang_gpu.start_seconds(sglang_gpu.Samples(ROOT, None)), sglang_gpu.START_S)

    def test_all_serve_or_have_ended(self):
        fleet = Small().fleet(vanilla=["seeded-deepseek-v2-graphs"])
        fleet.name, fleet.began, fleet.host = "f", sglang_gpu.time.monotonic(), types.SimpleNamespace(used=lambda: [0])
        fleet.settle(5)
        self.assertEqual((list(fleet.vanilla), list(fleet.lost)), (["tales-qwen3-moe-graphs"], ["vanilla seeded-deepseek-v2-graphs"]))
        late = Small().fleet()
        late.name = "f"
        for server in late.instances.values():
            server.healthy, server.tail = lambda: False, lambda: "tail"
        with self.assertRaisesRegex(sglang_servers.harness.Failed, "not ready in time"):
            late.settle(0.3)

    def test_spread_and_padded_share_one(self):
        started = []

        def begin(only, has=()):
            run = types.SimpleNamespace(arguments=types.SimpleNamespace(only=only, rehearse=False, recorder=False, scratch=pathlib.Path("/s")), fleet=None,
                                        recorded=False, sizes=sglang_gpu.Sizes(False), host=types.SimpleNamespace(kind="cuda", atn=["cuda:0"]),
                                        book=types.SimpleNamespace(has=lambda metric: metric in has),
                                        real=lambda name, *_: sglang_servers.Model(name, "path", dummy=True),
                                        start_most=lambda name, start_s, vanilla, models: started.append((vanilla, models)))  # fmt: skip
            sglang_gpu.router_fleet(run)
            return started[-1]

        vanilla, models = begin("spread,padded")
        self.assertEqual((len(vanilla), len(models)), (1, 4))
        self.assertIn("stat", vanilla[0][0].more)
        self.assertTrue(all(sglang_servers.NO_PREFILL_GRAPHS in model.more for model in models))
        self.assertEqual([len(one) for one in begin("padded")], [0, 4])
        self.assertEqual([len(one) for one in begin("spread", has=["sglang.padded.4.rows_per_layer"])], [1, 0])


    def test_a_recorder_that_dies_ends_alone(self):
        ended = []
        fleet = types.SimpleNamespace(name="routers", vanilla={sglang_gpu.COLD[0]: types.SimpleNamespace(end=lambda: ended.append("recorder"))}, instances={"i": None})
        run = types.SimpleNamespace(fleet=fleet, recorded=False, failures=[], host=types.SimpleNamespace(kind="cuda"), book=types.SimpleNamespace(has=lambda metric: False))
        run.fails = lambda what, error: run.failures.append(f"{what}: {error}")
        with mock.patch.object(sglang_spread, "measure", side_effect=ConnectionResetError("gone")):
            sglang_gpu.step_spread(run)
        self.assertEqual((ended, run.failures, run.recorded), (["recorder"], ["spread: gone"], True))
        self.assertIs(sglang_gpu.router_fleet(run), fleet)
        self.assertEqual((fleet.vanilla, list(fleet.instances)), ({}, ["i"]))


class Memory(unittest.TestCase):
    def test_what_a_server_gives_back(self):
        used = {"now": 90000}

        def ends(mib):
            def end():
                used["now"] -= mib

            return types.SimpleNamespace(end=end, loaded_gb=lambda: 1.0)

        entry = {"id": "m", "attention_weight_bytes": 3 << 30, "ffn_weight_bytes": 54 << 30}
        # The daemon is asked while the Instance is there.
        fleet = types.SimpleNamespace(state=lambda: {"models": [entry] if used["now"] == 90000 else []}, vanilla={"m": ends(61440)}, instances={"m": ends(10240)},
                                      models=[types.SimpleNamespace(name="m", kv_tokens=1000)])
        rows = []
        book = types.SimpleNamespace(has=lambda metric: False, add=lambda *more: rows.extend(more))
        run = types.SimpleNamespace(book=book, fleet=fleet, host=types.SimpleNamespace(kind="cuda", used=lambda: [used["now"]]), stop=lambda: None)
        with mock.patch.object(sglang_gpu, "real_fleet", lambda run, name: fleet), mock.patch.object(sglang_gpu.time, "sleep"):
            sglang_gpu.memory_of(run, "m")
        self.assertEqual((rows[0]["value"], rows[0]["peer"]), (10.0, 60.0))
        self.assertEqual(rows[1]["value"], 3.0)


class Spread(unittest.TestCase):
    def test_routers_are_those_of_the_ffn_side(self):
        """Beside src/ffn/dummy.h itself, compiled."""
        source = """#include <stdio.h>
#include "ffn/dummy.h"
int main(void) { uint64_t seed = ffn_dummy_seed("model.layers.1.mlp.gate.weight");
for (int i = 0; i < 24; i++) printf("%.9g\\n", ffn_dummy_value(seed, i, ffn_dummy_scale(6))); }"""
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "dummy"
            program.with_suffix(".c").write_text(source)
            subprocess.run(["cc", "-I", str(ROOT / "src"), "-o", str(program), f"{program}.c", "-lm"], check=True, timeout=120)
            out = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=120).stdout
        want = numpy.array([float(word) for word in out.split()], dtype=numpy.float32).reshape(4, 6)
        numpy.testing.assert_allclose(sglang_spread.dummy("model.layers.1.mlp.gate.weight", 4, 6), want, rtol=1e-6)

    def test_the_idlest_expert_is_told(self):
        counts = numpy.array([[10, 10, 10, 10], [1, 19, 10, 10]])
        row = sglang_spread.row("x", counts, 20, "more")
        self.assertEqual(row["value"], 1)
        self.assertIn("2 layers of 4 experts", row["note"])


class Arguments(unittest.TestCase):
    def test_both_sides_have_one_command_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = sglang_models.real_size("DeepSeek-V2-Lite", pathlib.Path(folder))
            model = sglang_servers.Model("m", path, dummy=True, rows=4096, context=16384, kv_tokens=1000, tp=1, dp=2, requests=8)
            words = model.arguments(sglang_servers.Gpus(), 11000)
            text = " ".join(words)
            self.assertIn("--piecewise-cuda-graph-tokens 128 512 1024 2048", text)
            self.assertNotIn(" 4096", text.replace("8192", ""))
            self.assertIn("--max-running-requests 16 --chunked-prefill-size 8192", text)
            self.assertIn("--tp-size 2 --dp-size 2 --enable-dp-attention", text)
            settings = model.settings(sglang_servers.Gpus())
            self.assertIn("prefill_rows = 4096", settings)
            self.assertIn('load_format = "dummy"', settings)

    def test_cold_load_is_the_same_each_time(self):
        run = types.SimpleNamespace(sizes=sglang_gpu.Sizes(False), arguments=argparse.Namespace())
        one, other = (sglang_gpu.arrivals(run, "m", 0.8, 5000, [(20000, 50), (3, 5000)]) for _ in range(2))
        self.assertEqual(one, other)
        self.assertTrue(20 < len(one) < 60)
        self.assertLessEqual(max(len(body["input_ids"]) for _, body in one), run.sizes.cold_prompt)
        self.assertLessEqual(max(body["sampling_params"]["max_new_tokens"] for _, body in one), run.sizes.cold_answer)


class Hops(unittest.TestCase):
    def row(self, metric, value):
        return results.row(f"hop.cuda.{metric}", value, "x", note=f"of {metric}")

    def test_the_best_way_gives_the_metric(self):
        rows = [self.row("direct.p50_over_floor", 1.7), self.row("relay.p50_over_floor", 3.1),
                self.row("nvshmem.p50_over_floor", 3.6), self.row("direct.bulk_gbs", 300), self.row("relay.bulk_gbs", 20),
                self.row("peer_copy_gbs", 400)]
        for _ in range(2):  # made anew from what a former call made
            rows = hop_ways.with_fixed(rows)
            self.assertEqual(len(rows), 10)
            found = {row["metric"]: row for row in rows}
            self.assertEqual((found["hop.cuda.p50_over_floor"]["value"], found["hop.cuda.p50_over_floor"]["target"]), (1.7, "<= 2"))
            self.assertIn("p2p relay 3.100, relay over NVSHMEM 3.600", found["hop.cuda.p50_over_floor"]["note"])
            self.assertEqual(found["hop.cuda.bulk_link_fraction"]["value"], 0.75)
            self.assertEqual(found["hop.cuda.relay.bulk_link_fraction"]["value"], 0.05)
            self.assertEqual([row["metric"] for row in rows if row["target"]], ["hop.cuda.p50_over_floor", "hop.cuda.bulk_link_fraction"])

    def test_a_run_of_another_way_alone_says_nothing(self):
        rows = [self.row("nvshmem.p50_over_floor", 3.6), self.row("nvshmem.bulk_gbs", 20)]
        self.assertEqual(hop_ways.with_fixed(rows), rows)


class Padded(unittest.TestCase):
    def usage(self, executions, rows, experts):
        return {"executions": executions, "rows": rows, "experts_read": experts}

    def test_decoding_is_the_difference_of_two_bursts(self):
        # Prefill of 48 rows in one pass of 10 layers, then 1 or 129 steps of 3 rows.
        usage = iter([self.usage(0, 0, 0), self.usage(20, 510, 900), self.usage(20, 510, 900), self.usage(1320, 4860, 30800)])
        told = iter([counted(0, 0, 0), counted(20, 2000, 0), counted(20, 2000, 0), counted(1320, 132000, 0)])
        fleet = types.SimpleNamespace(experts=lambda settled: next(usage), counters=lambda name: next(told))
        run = types.SimpleNamespace(fleet=fleet)
        found = sglang_padded.decoding(run, server(""), lambda *asked: asked, 3, 16, 128)
        self.assertEqual((found["rows"], found["executions"]), (3.0, 1280))
        self.assertEqual(found["experts"], 29000 / 1280)

    def test_the_histogram_names_its_bins(self):
        words = sglang_padded.histogram({"bins": [0, 1, 0, 9, 0, 0, 0, 2], "least": 4, "most": 90})
        self.assertIn("0.25-0.5: 1, 0.75-1: 9, 2+: 2", words)
        row = sglang_padded.spread_row("m", {"bins": [0] * 8, "least": 0, "most": 0, "rows": 30, "chosen": 6, "places": 8}, {"rows": 10}, 100)
        self.assertEqual((row["value"], row["target"]), (0.75, ">= 1"))


class First(unittest.TestCase):
    """tests/cuda/sglang_first.py: the waves of requests under which memory moves."""

    def run_of(self, tp=1, dp=1, groups=()):
        run = sglang_first.Run.__new__(sglang_first.Run)
        run.arguments = types.SimpleNamespace(elastic=True, layout="tp1")
        run.tp, run.dp, run.rows, run.waves, run.gpu = tp, dp, 32, 2, True
        run.vocabulary, run.lengths, run.fresh, run.result = 4096, sglang_first.PROMPTS + sglang_first.ELASTIC_PROMPTS, [], {}
        run.until = time.monotonic() + 60
        run.groups = lambda: [dict(group) for group in groups]
        run.tokens = lambda port, number: ([len(run.prompt(number))], 0.0)
        run.kv = lambda *words: ""
        return run

    def test_a_wave(self):
        for dp in (1, 2):
            run = self.run_of(dp=dp)
            waves = [run.wave(turn, 32 * dp, 17) for turn in range(2)]
            for wave in waves:
                for group in range(dp):  # each has as many
                    self.assertEqual(sum(isinstance(number, list) for number in wave[group::dp]), 17)
            fresh = [number for wave in waves for number in wave if isinstance(number, list)]
            self.assertEqual(len({tuple(run.prompt(number)) for number in fresh}), 2 * 17 * dp)
            self.assertEqual({number for wave in waves for number in wave if not isinstance(number, list)}, {2, 3, 4, 5, 6})

    def test_new_prompts_want_four_bundles(self):
        for bundle, wanted in ((256, 2), (2048, 9), (4096, 17)):
            size = {"elastic": True, "ceiling": {"tokens": 32768}, "floor": {"tokens": bundle}, "backed": {"tokens": bundle}, "bundle_tokens": bundle, "grants": 0}
            run = self.run_of(groups=[size])
            good, known = run.elastic(1, {number: [length] for number, length in enumerate(run.lengths)})
            self.assertFalse(good)  # nothing has moved
            self.assertEqual((len(run.fresh), run.result["elastic KV"]["same"]), (2 * wanted, 2 * (32 - wanted)))
            self.assertGreaterEqual(wanted * (sglang_first.FRESH_PROMPT + sglang_first.TOKENS), 4 * bundle)
        for bundle, ceiling in ((8192, 65536), (4096, 16384)):
            size = {"elastic": True, "ceiling": {"tokens": ceiling}, "floor": {"tokens": 4096}, "bundle_tokens": bundle, "grants": 0}
            with self.assertRaisesRegex(sglang_first.Failed, "no scene"):
                self.run_of(groups=[size]).elastic(1, {})

    def test_states_count_where_memory_moved(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_of(tp=2)
            run.states = pathlib.Path(folder)
            for moves, good in ((11, True), (10, False)):
                lines = [f"{i} d{i}{' moved' if i < moves else ''}\n" for i in range(40)]
                for rank in range(2):
                    (run.states / f"{rank}.1").write_text("".join(lines))
                self.assertEqual(run.same_states(), good)
            (run.states / "1.1").write_text("".join(lines).replace("d30", "other"))
            self.assertFalse(run.same_states())


if __name__ == "__main__":
    unittest.main()
