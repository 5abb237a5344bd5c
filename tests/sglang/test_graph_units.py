#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The plugin where SGLang compiles and captures, without a GPU: the operator in SGLang's own piecewise
compilation (its torch.compile back end, its splitting, its captures with a graph that only notes what is
captured), and what a rank on a GPU is told before and after each pass.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", HERE.parent.parent / "build"))
sys.path.insert(0, str(BUILD / "python"))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
FOLDER = tempfile.TemporaryDirectory(prefix="xpool-graph-")
os.environ["SGLANG_CACHE_DIR"] = FOLDER.name

import torch  # noqa: E402

from xpool import XpoolError, ops, rank as ranks  # noqa: E402

LAYERS, WIDTH, SIZES = 3, 8, [4, 8, 16]


class Rank:
    """An Instance Rank on a GPU, whose FFN of layer n adds n + 1; it keeps what it is told."""

    hidden, device, dp_size, dp_rank = WIDTH, 0, 1, 0

    def __init__(self):
        self.told, self.bad = [], set()

    def begin_step(self, step, execution=ranks.EAGER, rows=None, stream=0, dp_rows=None, deadline_ns=0):
        self.told.append(("begin", step, execution, rows, stream, dp_rows))

    def mark(self, stream):
        self.told.append(("mark", stream))
        return len(self.told)

    def look(self, mark):
        self.told.append(("look", mark))
        if mark in self.bad:
            raise XpoolError("no answer from the FFN tier")


class Graph:
    """Stands for a CUDA graph: a capture runs what it captures once."""

    captured = []  # all that were
    current = None

    def __init__(self):
        self.calls, self.replays = [], 0

    def replay(self):
        self.replays += 1

    @staticmethod
    @contextlib.contextmanager
    def capture(graph, pool=None, stream=None):
        Graph.current = graph
        Graph.captured.append(graph)
        yield
        Graph.current = None


attention = torch.library.Library("xtest", "DEF")
attention.define("attention(Tensor x) -> Tensor")
attention.impl("attention", lambda x: 2 * x, "CPU")
torch.library.register_fake("xtest::attention", torch.empty_like, lib=attention)


class Layer(torch.nn.Module):
    """As SGLang's decoder layers hand the FFN more than the rows."""

    def __init__(self, index):
        from xpool.sglang import ffn

        super().__init__()
        self.mlp = ffn.FfnShim(index)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def fuse(self, batch):
        return True

    def forward(self, x, batch):
        residual = x
        x = torch.ops.xtest.attention(self.norm(x))
        fused = self.fuse(batch)
        return residual + self.mlp(x, batch, fused, use_reduce_scatter=False)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i) for i in range(LAYERS))

    def forward(self, x: torch.Tensor, batch):
        for layer in self.layers:
            x = layer(x, batch)
        return x


class Piecewise(unittest.TestCase):
    def setUp(self):
        # SGLang's back end imports its kernels for this one function.
        weak = types.ModuleType("sglang.srt.compilation.weak_ref_tensor")
        weak.weak_ref_tensors = lambda tensors: tensors
        sys.modules[weak.__name__] = weak
        self.addCleanup(sys.modules.pop, weak.__name__)
        self.calls = []
        rank = types.SimpleNamespace(hidden=WIDTH, device=None, ffn=self.ffn, error=None)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        ops.attach(rank)
        self.addCleanup(ops.attach, None)
        for patched in (
            mock.patch.object(torch.cuda, "CUDAGraph", Graph),
            mock.patch.object(torch.cuda, "graph", Graph.capture),
        ):
            patched.start()
            self.addCleanup(patched.stop)

    def ffn(self, layer, rows, dtype, source, target):
        import ctypes

        size = ctypes.c_float * (rows * WIDTH)
        given, taken = size.from_address(source), size.from_address(target)
        for i in range(rows * WIDTH):
            taken[i] = given[i] + layer + 1
        self.calls.append((layer, rows))
        if Graph.current is not None:
            Graph.current.calls.append((layer, rows))
        return ranks.OK

    def test_the_operator_is_in_the_captured_pieces(self):
        from sglang.srt.compilation import piecewise_context_manager as context
        from sglang.srt.compilation.backend import SGLangBackend
        from sglang.srt.compilation.compilation_config import CompilationConfig
        from sglang.srt.compilation.compile import install_torch_compiled
        from xpool.sglang import parallel, patch

        patch.around(__name__, "Layer.fuse", parallel._never)  # the hook that decoder layers run through
        model, batch = Model(), types.SimpleNamespace(name="a batch")
        wanted = {n: torch.randn(n, WIDTH) for n in (*SIZES, 6)}
        with torch.no_grad():
            answers = {n: model(x, batch) for n, x in wanted.items()}
            config = CompilationConfig(SIZES)
            config.add_split_op("xtest.attention")
            backends = []

            def backend(graph, inputs):
                backends.append(SGLangBackend(config, (0, 0)))
                return backends[-1](graph, inputs)

            install_torch_compiled(model, compile_config=config, backend_factory=backend, graph_pool=(0, 0))

            def run(n, times=1):
                self.calls.clear()
                with context.enable_piecewise_cuda_graph():
                    found = model(wanted[n], batch)
                self.assertEqual(self.calls, times * [(layer, n) for layer in range(LAYERS)])
                torch.testing.assert_close(found, answers[n])

            with context.enable_piecewise_cuda_graph_compile():
                for n in reversed(SIZES):
                    run(n, 1 if backends else 2)  # SGLang runs what it has compiled first twice
            self.assertFalse(Graph.captured)
            for n in reversed(SIZES):  # as PiecewiseCudaGraphRunner: once to warm up, once to capture
                run(n)
                self.assertFalse([g for g in Graph.captured if (0, n) in g.calls])
                with context.set_pcg_capture_stream("a stream"):
                    run(n)
            self.assertEqual(len(backends), 1)  # one trace for all sizes
            pieces = [piece for piece in backends[0].piecewise_graphs if not piece.is_splitting_graph]
            nodes = [
                [node.args[1] for node in piece.graph.graph.nodes if node.target is torch.ops.xpool.ffn_shim.default]
                for piece in pieces
            ]
            self.assertEqual(nodes, [[]] + [[layer] for layer in range(LAYERS)])
            self.assertEqual(len(Graph.captured), len(pieces) * len(SIZES))
            for n in SIZES:
                inside = [call for graph in Graph.captured for call in graph.calls if call[1] == n]
                self.assertEqual(inside, [(layer, n) for layer in range(LAYERS)])
            run(6)  # a size without a graph
            self.calls.clear()
            with context.enable_piecewise_cuda_graph():
                model(wanted[8], batch)
            self.assertEqual(self.calls, [])  # replayed: nothing is called any more
            self.assertEqual(sum(graph.replays for graph in Graph.captured), len(pieces))


class Steps(unittest.TestCase):
    def setUp(self):
        self.rank, self.stream = Rank(), 77
        ops.attach(self.rank)
        self.addCleanup(ops.attach, None)
        self.ended = []
        current = types.SimpleNamespace(cuda_stream=self.stream, synchronize=lambda: self.rank.told.append("synchronized"))
        for patched in (
            mock.patch.object(torch.cuda, "current_stream", lambda device: current),
            mock.patch("xpool.sglang.failure.end", self.end),
        ):
            patched.start()
            self.addCleanup(patched.stop)

    def end(self, reason):
        self.ended.append(reason)
        raise SystemExit(reason)

    @staticmethod
    def batch(rows, mode="decode", counts=None, extend=False):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return types.SimpleNamespace(
            input_ids=None if rows is None else torch.zeros(rows),
            forward_mode=getattr(ForwardMode, mode.upper()),
            global_num_tokens_cpu=counts,
            is_extend_in_batch=extend,
        )

    def forward(self, batch):
        from xpool.sglang import step

        def original(runner, batch, *arguments, **options):
            self.rank.told.append("pass")
            return "logits"

        self.assertEqual(step._forward(original, None, batch), "logits")

    def test_live_rows_before_a_pass_and_a_mark_behind_it(self):
        for batch, kind, rows in (
            (self.batch(3), ranks.DECODE, 3),
            (self.batch(200, "extend"), ranks.PREFILL, 200),
            (self.batch(9, "mixed"), ranks.MIXED, 9),
            (self.batch(None, "idle"), ranks.DECODE, 0),
        ):
            self.rank.told.clear()
            self.forward(batch)
            begin = ("begin", kind, ranks.EAGER, rows, self.stream, None)
            self.assertEqual(self.rank.told, [begin, "pass", ("mark", self.stream)])

    def test_data_parallel_ranks_tell_all_counts(self):
        self.rank.dp_size, self.rank.dp_rank = 2, 1
        self.forward(self.batch(8, counts=[3, 5]))
        self.assertEqual(self.rank.told[0], ("begin", ranks.DECODE, ranks.EAGER, 5, self.stream, [3, 5]))
        self.rank.told.clear()
        self.forward(self.batch(0, "idle", counts=[130, 0], extend=True))
        self.assertEqual(self.rank.told[0], ("begin", ranks.PREFILL, ranks.EAGER, 0, self.stream, [130, 0]))

    def test_passes_that_warm_up_and_capture_have_all_rows(self):
        from xpool.sglang import step

        graphs = types.SimpleNamespace(num_tokens_per_bs=1)
        done = lambda *arguments, **options: arguments[1:]  # noqa: E731
        self.assertEqual(step._capture_decode(done, graphs, 8, "forward", None), (8, "forward", None))
        self.assertEqual(step._capture_prefill(done, graphs, num_tokens=64), (64,))
        self.rank.dp_size = 2
        step._capture_decode(done, graphs, 2, "forward")
        self.assertEqual(
            self.rank.told,
            [
                ("begin", ranks.DECODE, ranks.DECODE_GRAPH, 8, self.stream, None),
                ("begin", ranks.PREFILL, ranks.PREFILL_GRAPH, 64, self.stream, None),
                ("begin", ranks.DECODE, ranks.DECODE_GRAPH, 2, self.stream, [2, 2]),
            ],
        )

    def run_batch(self, **fields):
        from xpool.sglang import step

        def original(scheduler, batch):
            self.forward(batch)
            return types.SimpleNamespace(**fields)

        return step._run_batch(original, None, self.batch(1))

    def process(self, result):
        from xpool.sglang import step

        step._process(lambda scheduler, batch, result: self.rank.told.append("handed out"), None, None, result)

    def test_a_pass_is_looked_at_before_its_tokens_are_handed_out(self):
        event = types.SimpleNamespace(synchronize=lambda: self.rank.told.append("copied"))
        first = self.run_batch(copy_done=event)
        second = self.run_batch(copy_done=event)  # overlap: the next pass is queued before
        self.assertNotEqual(first.xpool_mark, second.xpool_mark)
        self.rank.told.clear()
        self.process(first)
        self.assertEqual(self.rank.told, ["copied", ("look", first.xpool_mark[0]), "handed out"])
        self.rank.told.clear()
        self.rank.bad.add(second.xpool_mark[0])
        with self.assertRaises(SystemExit):
            self.process(second)
        self.assertEqual(self.rank.told[-1], ("look", second.xpool_mark[0]))
        self.assertEqual(self.ended, ["no answer from the FFN tier"])

    def test_without_overlap_the_stream_is_waited_for(self):
        result = self.run_batch(copy_done=None)
        self.rank.told.clear()
        self.process(result)
        self.assertEqual(self.rank.told, ["synchronized", ("look", result.xpool_mark[0]), "handed out"])

    def test_a_result_without_a_pass(self):
        from xpool.sglang import step

        result = step._run_batch(lambda scheduler: types.SimpleNamespace(), None)
        self.process(result)
        self.assertEqual(self.rank.told, ["handed out"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
