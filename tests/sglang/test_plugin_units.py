#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The SGLang plugin against the real SGLang's modules, without a server and without a daemon.

Bindings and configuration, the operator, leaving FFN tensors on disk, class replacement of every
family, refused options, and hooks that miss.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", ROOT / "build"))
sys.path.insert(0, str(BUILD / "python"))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402

from xpool import XpoolConfig, XpoolError, native, ops, rank as ranks  # noqa: E402

TALES = ROOT / "models" / "tales"
MODELS = {path.name: path for path in sorted(TALES.iterdir()) if path.is_dir()}
CONFIG = """
[daemon]
socket = "{folder}/daemon.sock"
[deadlines]
registration = 2
[atn]
devices = ["cpu:0"]
[ffn]
devices = ["cpu:1"]
[devices."cpu:0"]
threads = 1
memory = "1GiB"
[devices."cpu:1"]
threads = 1
memory = "1GiB"
"""


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    text = CONFIG.format(folder=FOLDER.name)
    for name, path in MODELS.items():
        text += f'[[models]]\nid = "{name}"\npath = "{path}"\nengine = "sglang"\ndtype = "float32"\n'
    path = pathlib.Path(FOLDER.name) / "xpool.toml"
    path.write_text(text)
    os.environ["XPOOL_CONFIG"] = str(path)
    os.environ.pop("XPOOL_MODEL_ID", None)


def tearDownModule():
    FOLDER.cleanup()


class Bindings(unittest.TestCase):
    def test_header_declares_what_the_library_has(self):
        header = (ROOT / "include" / "xpool" / "xpool.h").read_text()
        declared = set(re.findall(r"\b(xpool_[a-z_]+)\(", native.declarations(header)))
        listed = (ROOT / "include" / "xpool" / "symbols.txt").read_text().split()
        self.assertEqual(declared, {s for s in listed if s.startswith("xpool_")})
        lib = native.load().lib
        for name in declared:
            self.assertTrue(callable(getattr(lib, name)), name)

    def test_configuration(self):
        config = XpoolConfig()
        self.assertEqual(sorted(config.model_ids()), sorted(MODELS))
        for name, path in MODELS.items():
            self.assertEqual(config.model_path_of(name), str(path))
            spec = json.loads((path / "config.json").read_text())
            info = config.model_info(name)
            self.assertEqual(info.architecture, spec["architectures"][0])
            self.assertEqual((info.hidden, info.layers), (spec["hidden_size"], spec["num_hidden_layers"]))
            self.assertEqual((info.engine, info.attention_tp, info.attention_dp), ("sglang", 1, 1))

    def test_errors_say_what_is_wrong(self):
        with self.assertRaisesRegex(XpoolError, "no model 'x'.*qwen3-moe"):
            XpoolConfig().model_path_of("x")
        with self.assertRaisesRegex(XpoolError, "/nowhere.toml"):
            XpoolConfig("/nowhere.toml")

    def test_a_missing_daemon_is_named(self):
        info = XpoolConfig().model_info("qwen3-moe")
        workload = ranks.Workload(
            "test", str(MODELS["qwen3-moe"]), info.hidden, info.layers, 1, 1, 8, 128, ranks.F32
        )
        with self.assertRaisesRegex(XpoolError, "daemon.sock"):
            ranks.Rank(XpoolConfig(), "qwen3-moe", 0, workload)


class TwiceRank:
    """Answers 2 x input; tells the calls."""

    hidden = 8

    def __init__(self):
        self.calls = []
        self.status = ranks.OK

    def ffn(self, layer, rows, dtype, input_address, output_address):
        self.calls.append((layer, rows, dtype))
        if self.status == ranks.OK and rows:
            import ctypes

            size = ctypes.c_float * (rows * 8)
            source, target = size.from_address(input_address), size.from_address(output_address)
            for i in range(rows * 8):
                target[i] = 2 * source[i]
        return self.status

    def error(self, status):
        return XpoolError("the canonical failure", status)


class Operator(unittest.TestCase):
    def setUp(self):
        self.rank = TwiceRank()
        ops.attach(self.rank)
        self.addCleanup(ops.attach, None)

    def test_rows_in_rows_out(self):
        x = torch.randn(5, 8)
        self.assertTrue(torch.equal(ops.ffn_shim(x, 3), 2 * x))
        self.assertTrue(torch.equal(torch.ops.xpool.ffn_shim(x.t().contiguous().t(), 4), 2 * x))
        self.assertEqual(ops.ffn_shim(torch.empty(0, 8), 5).shape, (0, 8))
        self.assertEqual(self.rank.calls, [(3, 5, ranks.F32), (4, 5, ranks.F32), (5, 0, ranks.F32)])

    def test_no_tensor_operation_but_the_allocation(self):
        x = torch.randn(5, 8)
        with torch.profiler.profile() as profile:
            ops.ffn_shim(x, 0)
        seen = {event.key for event in profile.key_averages() if event.key.startswith("aten::")}
        self.assertLessEqual(seen, {"aten::empty_like", "aten::empty_strided", "aten::empty"})

    def test_fake_implementation(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            out = ops.ffn_shim(torch.empty(7, 8, dtype=torch.bfloat16), 1)
            self.assertEqual((out.shape, out.dtype), ((7, 8), torch.bfloat16))
        self.assertEqual(self.rank.calls, [])

    def test_a_wrong_tensor_never_reaches_the_library(self):
        told = []
        ops.attach(self.rank, lambda *what: told.append(what))
        for tensor, reason in (
            (torch.randn(5, 7), r"rows x 8, not a tensor of shape \(5, 7\)"),
            (torch.randn(2, 5, 8), r"of shape \(2, 5, 8\)"),
            (torch.zeros(5, 8, dtype=torch.float64), "not torch.float64"),
        ):
            with self.assertRaisesRegex(RuntimeError, reason):
                ops.ffn_shim(tensor, 0)
        self.assertEqual([status for status, _ in told], [ranks.INVALID] * 3)
        self.assertEqual(self.rank.calls, [])

    def test_a_tensor_of_another_device_is_refused(self):
        self.rank.device = 1
        with self.assertRaisesRegex(RuntimeError, "tensor is on cpu, the Instance Rank on cuda:1"):
            ops.ffn_shim(torch.randn(5, 8), 0)
        self.assertEqual(self.rank.calls, [])

    def test_a_failure_reaches_the_caller(self):
        told = []
        ops.attach(self.rank, lambda *what: told.append(what))
        self.rank.status = ranks.FAILED
        with self.assertRaisesRegex(XpoolError, "the canonical failure"):
            ops.ffn_shim(torch.randn(1, 8), 0)
        self.assertEqual(told, [(ranks.FAILED, "the canonical failure")])
        ops.attach(None)
        with self.assertRaisesRegex(RuntimeError, "no Instance Rank"):
            ops.ffn_shim(torch.randn(1, 8), 0)


class Weights(unittest.TestCase):
    """With SGLang's own readers, over a safetensors file that tells what is asked of it."""

    def names_asked(self, model, read):
        import safetensors

        from xpool.sglang import weights

        config, asked = XpoolConfig(), []

        class Opened:
            def __init__(self, *arguments, **options):
                self.file = safetensors.safe_open(*arguments, **options)

            def __enter__(self):
                self.file.__enter__()
                return self

            def __exit__(self, *error):
                return self.file.__exit__(*error)

            def keys(self):
                return list(self.file.keys())

            def get_tensor(self, name):
                asked.append(name)
                return self.file.get_tensor(name)

        files = [str(path) for path in MODELS[model].glob("*.safetensors")]
        module = types.SimpleNamespace(safe_open=Opened)
        with mock.patch("sglang.srt.model_loader.weight_utils.safetensors", module):
            with weights.without_ffn(lambda name: config.is_ffn_tensor(model, name)) as counts:
                given = [name for name, _ in read(files)]
        everything = []
        for path in files:
            with safetensors.safe_open(path, "pt") as file:
                everything += list(file.keys())
        self.assertEqual(sorted(asked), sorted(given))
        self.assertEqual((counts.read, counts.skipped), (len(asked), len(everything) - len(asked)))
        return asked, everything

    def test_ffn_tensors_stay_on_disk(self):
        from sglang.srt.model_loader import weight_utils

        readers = (
            weight_utils.safetensors_weights_iterator,
            lambda files: weight_utils.buffered_multi_thread_safetensors_weights_iterator(files, 2),
            lambda files: weight_utils.multi_thread_safetensors_weights_iterator(files, 2),
        )
        for model in MODELS:
            for read in readers:
                with self.subTest(model=model):
                    asked, everything = self.names_asked(model, read)
                    self.assertEqual(set(asked), {name for name in everything if ".mlp." not in name})
                    self.assertLess(len(asked), len(everything))

    def test_whole_files_are_refused(self):
        from sglang.srt.model_loader import weight_utils

        from xpool.sglang import weights

        files = [str(path) for path in MODELS["qwen3-moe"].glob("*.safetensors")]
        with weights.without_ffn(lambda name: ".mlp." in name):
            with self.assertRaisesRegex(XpoolError, "whole safetensors files"):
                list(weight_utils.safetensors_weights_iterator(files, disable_mmap=True))


class Replacement(unittest.TestCase):
    def test_every_site_exists_and_holds_nothing_afterwards(self):
        from xpool.sglang import adapters, ffn, patch

        for architecture, adapter in adapters.ADAPTERS.items():
            with self.subTest(architecture=architecture):
                patch.resolve(adapter.module, architecture)
                with mock.patch.multiple(
                    adapter.module, **{name: patch.resolve(adapter.module, name)[2] for name in adapter.sites}
                ):
                    ffn.replace(architecture)
                    ffn.replace(architecture)  # a second time changes nothing
                    for name in adapter.sites:
                        site = patch.resolve(adapter.module, name)[2]
                        shim = site(hidden_size=8, config=None, layer_id=3, prefix="model.layers.3.mlp")
                        self.assertIsInstance(shim, ffn.FfnShim)
                        self.assertNotIsInstance(shim, site)
                        self.assertEqual((shim.layer, list(shim.parameters())), (3, []))
                        for prefix, layer in (("model.layers.3.mlp", 4), ("model.mtp.mlp", None), ("", None)):
                            with self.assertRaises(XpoolError):
                                site(prefix=prefix, layer_id=layer)

    def test_forward_ignores_what_belongs_to_sglangs_ffn(self):
        from xpool.sglang import ffn

        rank = TwiceRank()
        ops.attach(rank)
        self.addCleanup(ops.attach, None)
        x = torch.randn(2, 8)
        self.assertTrue(torch.equal(ffn.FfnShim(1)(x, object(), True, True, None), 2 * x))
        self.assertTrue(torch.equal(ffn.FfnShim(1)(x, forward_batch=None), 2 * x))

    def test_verification(self):
        from xpool.sglang import ffn

        class Layer(torch.nn.Module):
            def __init__(self, mlp):
                super().__init__()
                self.mlp = mlp

        class Qwen3ForCausalLM(torch.nn.Module):
            def __init__(self, mlps):
                super().__init__()
                self.model = torch.nn.Module()
                self.model.layers = torch.nn.ModuleList(Layer(mlp) for mlp in mlps)

        good = [ffn.FfnShim(0), ffn.FfnShim(1)]
        ffn.verify(Qwen3ForCausalLM(good), "Qwen3ForCausalLM", 2)
        leaking = ffn.FfnShim(1)
        leaking.gate = torch.nn.Linear(2, 2)
        for mlps, architecture, text in (
            ([ffn.FfnShim(0), torch.nn.Linear(2, 2)], "Qwen3ForCausalLM", "layer 1 is SGLang's own Linear"),
            ([ffn.FfnShim(0), ffn.FfnShim(0)], "Qwen3ForCausalLM", "layers \\[0\\], the plan has 2"),
            ([ffn.FfnShim(0), leaking], "Qwen3ForCausalLM", "layers.1.mlp.gate.weight"),
            (good, "Qwen3MoeForCausalLM", "built a Qwen3ForCausalLM"),
        ):
            with self.assertRaisesRegex(XpoolError, text):
                ffn.verify(Qwen3ForCausalLM(mlps), architecture, 2)


class Steps(unittest.TestCase):
    """The deadline of a step is the earliest of its requests'."""

    TTFT, TBT = 500, 40

    def batch(self, mode, *requests):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return types.SimpleNamespace(forward_mode=getattr(ForwardMode, mode), reqs=list(requests))

    def request(self, arrived, token=None, outputs=0):
        found = types.SimpleNamespace(output_ids=[1] * outputs, xpool_arrived_ns=arrived)
        if token is not None:
            found.xpool_token_ns = token
        return found

    def deadline(self, batch, ttft=TTFT, tbt=TBT):
        from xpool.sglang import step

        return step.deadline_of(batch, ttft, tbt)

    def test_prefill_is_due_after_its_arrival(self):
        self.assertEqual(self.deadline(self.batch("EXTEND", self.request(1000), self.request(900))), 1400)
        # Between two chunks there is no token yet.
        self.assertEqual(self.deadline(self.batch("EXTEND", self.request(900, token=1300))), 1400)
        self.assertEqual(self.deadline(self.batch("EXTEND", self.request(900)), ttft=0), 0)

    def test_decode_is_due_after_the_last_token(self):
        requests = self.request(10, 2000, 3), self.request(20, 1990, 0)  # the overlapped first token
        self.assertEqual(self.deadline(self.batch("DECODE", *requests)), 2030)
        self.assertEqual(self.deadline(self.batch("DECODE", *requests), tbt=0), 0)

    def test_other_steps(self):
        mixed = self.batch("MIXED", self.request(1800), self.request(10, 2000, 3))
        self.assertEqual(self.deadline(mixed), 2040)
        self.assertEqual(self.deadline(mixed, tbt=0), 2300)
        # Retracted: prefilled again, after its last token.
        self.assertEqual(self.deadline(self.batch("EXTEND", self.request(10, 2000, 3))), 2040)
        self.assertEqual(self.deadline(self.batch("IDLE")), 0)
        self.assertEqual(self.deadline(self.batch("EXTEND", types.SimpleNamespace(output_ids=[]))), 0)

    def test_the_calls_of_a_step_carry_it(self):
        from xpool.sglang import rank as deployment, step

        rank = object.__new__(ranks.Rank)
        rank._native, rank.device, rank.dp_size = native.load(), None, 1
        rank.call = rank._native.ffi.new("xpool_ffn_call_t *")
        ops.attach(rank)
        self.addCleanup(ops.attach, None)
        request = types.SimpleNamespace(output_ids=[])
        batch = self.batch("EXTEND", request)
        batch.global_num_tokens_cpu = None
        seen = []

        def forward(runner, batch):
            seen.append(rank.call.slo_deadline_ns)

        def run(scheduler, batch):
            step._forward(forward, None, batch)

        info = types.SimpleNamespace(info=types.SimpleNamespace(slo_ttft_ms=2, slo_tbt_ms=1))
        with mock.patch.object(deployment, "_deployment", info):
            step._queued(lambda scheduler, request: None, None, request)
            step._run_by_deadline(run, None, batch)
            request.output_ids.append(1)
            batch.forward_mode = self.batch("DECODE").forward_mode
            step._run_by_deadline(run, None, batch)
        step._forward(forward, None, batch)  # a warm-up, outside the scheduler
        arrived = request.xpool_arrived_ns
        self.assertEqual(seen[0], arrived + 2_000_000)
        self.assertTrue(arrived + 1_000_000 < seen[1] <= request.xpool_token_ns + 1_000_000)
        self.assertEqual(seen[2], 0)


class Patching(unittest.TestCase):
    def test_a_missing_target_is_named(self):
        from xpool.sglang import patch

        for module, path in (
            ("sglang.srt.server_args", "ServerArgs.no_such_method"),
            ("sglang.srt.server_args", "NoSuchClass.method"),
            ("sglang.srt.no_such_module", "f"),
        ):
            with self.assertRaisesRegex(XpoolError, f"SGLang .* has no {module}.{path}"):
                patch.around(module, path, lambda original: None)

    def test_methods_of_all_kinds_and_the_final_check(self):
        from xpool.sglang import patch

        class Target:
            def method(self, x):
                return x

            @classmethod
            def of_class(cls, x):
                return (cls, x)

            @staticmethod
            def plain(x):
                return x

        module = types.ModuleType("xpool_patch_target")
        module.Target = Target
        hook = lambda original, *arguments: ("hooked", original(*arguments))  # noqa: E731
        with mock.patch.dict(sys.modules, {module.__name__: module}), mock.patch.object(patch, "_around", []):
            for name in ("method", "of_class", "plain"):
                patch.around(module.__name__, f"Target.{name}", hook)
            self.assertEqual(Target().method(1), ("hooked", 1))
            self.assertEqual(Target.of_class(1), ("hooked", (Target, 1)))
            self.assertEqual(Target.plain(1), ("hooked", 1))
            patch.check()
            Target.method = lambda self, x: x  # another plugin, which forgets ours
            with self.assertRaisesRegex(XpoolError, "xpool_patch_target.Target.method is gone"):
                patch.check()


class Options(unittest.TestCase):
    def arguments(self, **changes):
        from sglang.srt.server_args import ServerArgs

        values = {}
        for field in dataclasses.fields(ServerArgs):
            if field.default is not dataclasses.MISSING:
                values[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                values[field.name] = field.default_factory()
        values.update(
            model_path=str(MODELS["qwen3-moe"]),
            served_model_name="something",
            device="cpu",
            chunked_prefill_size=128,
        )
        values.update(changes)
        return types.SimpleNamespace(**values)

    def refused(self, text, **changes):
        from xpool.sglang import options

        with self.assertRaisesRegex(XpoolError, text):
            options.deployment(self.arguments(**changes))

    def test_the_model_is_found(self):
        from xpool.sglang import options

        arguments = self.arguments()
        found = options.deployment(arguments)
        self.assertEqual(
            (found.model_id, found.attention_tp, found.attention_dp), ("qwen3-moe", 1, 1)
        )
        self.assertEqual(arguments.max_running_requests, found.info.decode_rows)
        named = self.arguments(served_model_name="deepseek-v2")
        self.assertEqual(options.deployment(named).model_id, "deepseek-v2")
        with mock.patch.dict(os.environ, XPOOL_MODEL_ID="glm4-moe-lite"):
            self.assertEqual(options.deployment(named).model_id, "glm4-moe-lite")
        with mock.patch.dict(os.environ, XPOOL_MODEL_ID="nobody"):
            self.refused("XPOOL_MODEL_ID=nobody is not a configured model")
        self.refused("no configured model has the path", model_path=FOLDER.name)
        self.refused("is not a folder on this machine", model_path="Qwen/Qwen3-0.6B")

    def test_capacity(self):
        self.refused("--max-running-requests gives 33 rows.*decode_rows", max_running_requests=33)
        self.refused("--chunked-prefill-size gives 129 rows.*prefill_rows", chunked_prefill_size=129)
        self.refused("chunked prefill must be on", chunked_prefill_size=-1)
        self.refused("\\(TP, DP\\) = \\(2, 1\\), the plan of qwen3-moe has \\(1, 1\\)", tp_size=2)
        self.refused("without --enable-dp-attention", dp_size=2, tp_size=2)

    def test_options_that_do_not_go_together(self):
        for name, value in (
            ("device", "cuda"),
            ("speculative_algorithm", "EAGLE"),
            ("pp_size", 2),
            ("ep_size", 2),
            ("moe_a2a_backend", "deepep"),
            ("quantization", "fp8"),
            ("load_format", "gguf"),
            ("enable_lora", True),
            ("weight_loader_disable_mmap", True),
            ("disaggregation_mode", "prefill"),
            ("enable_two_batch_overlap", True),
            ("model_impl", "transformers"),
        ):
            flag = "--" + name.replace("_", "-")
            self.refused(f"{flag} {value} cannot be used with the xpool plugin: .+", **{name: value})

    def test_on_gpus(self):
        from xpool.sglang import options

        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "gpus.toml"
            config.write_text(
                f"""daemon.socket = '{folder}/d.sock'
atn.devices = ['cuda:0']
ffn.devices = ['cuda:1']
devices.'cuda:0'.memory = '8GiB'
devices.'cuda:1'.memory = '8GiB'
scheduler.kv_policy = 'static'
[[models]]
id = 'm'
path = '{MODELS["qwen3-moe"]}'
engine = 'sglang'
decode_rows = 16
prefill_rows = 256
kv_ceiling_tokens = 2048
"""
            )
            with mock.patch.dict(os.environ, XPOOL_CONFIG=str(config)):
                plain = dict(device="cuda", piecewise_cuda_graph_tokens=[16, 256])
                arguments = self.arguments(**plain)
                found = options.deployment(arguments)
                self.assertEqual(found.info.device, "cuda:0")
                # SGLang would take the whole GPU; steps overlap where KV memory stays.
                self.assertEqual(arguments.max_total_tokens, found.info.kv_tokens)
                self.assertEqual(arguments.max_running_requests, 16)
                self.assertFalse(arguments.disable_overlap_schedule)
                self.refused("prefill graphs of 288 rows.*room for 256", device="cuda", piecewise_cuda_graph_tokens=[288])
                options.deployment(
                    self.arguments(
                        device="cuda", piecewise_cuda_graph_tokens=[288], disable_piecewise_cuda_graph=True
                    )
                )
                self.refused("--enable-breakable-cuda-graph cannot", enable_breakable_cuda_graph=True, **plain)
                self.refused("--device cpu cannot be used.*the plan puts m on cuda:0")

    def test_every_named_argument_exists_and_its_default_is_allowed(self):
        from xpool.sglang import options

        options.refuse_unsupported(self.arguments())


class Processes(unittest.TestCase):
    """What ends a process ends it with a reason and a non-zero code; SGLang swallows exceptions."""

    def run_python(self, text, path=None):
        return subprocess.run(
            [sys.executable, *([str(path)] if path else ["-c", text])],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
        )

    def test_a_schedulers_reason_ends_main_and_tree(self):
        path = pathlib.Path(FOLDER.name) / "tree.py"
        path.write_text(
            "import multiprocessing, time\n"
            "from xpool.sglang import failure\n"
            "def scheduler():\n"
            "    failure.watch()\n"
            "    failure.end('the canonical failure')\n"
            "if __name__ == '__main__':\n"
            "    import sglang.srt.utils\n"
            "    failure.watch()\n"
            "    multiprocessing.set_start_method('spawn')\n"
            "    for target in (time.sleep, scheduler):\n"
            "        multiprocessing.Process(target=target, args=(600,) if target is time.sleep else ()).start()\n"
            "    time.sleep(600)\n"
        )
        done = self.run_python("", path)
        self.assertEqual(done.returncode, 1)
        self.assertIn("xpool: the canonical failure\n", done.stderr)

    def test_who_stopped_main(self):
        """By its user: exit code 0. Told by a scheduler first, or fallen: SIGKILL."""
        cases = {"u": 0, "us": 0, "s": -9, "su": -9, "uf": -9}
        done = self.run_python(
            "import asyncio, os, signal, types\n"
            "from sglang.srt.managers import tokenizer_manager\n"
            "from xpool.sglang import failure, stop\n"
            "happens = {\n"
            "    'u': lambda: os.kill(os.getpid(), signal.SIGTERM),\n"
            "    's': failure.drain,\n"
            "    'f': lambda: tokenizer_manager.kill_process_tree(os.getpid()),\n"
            "}\n"
            "async def main(case):\n"
            "    manager = types.SimpleNamespace(gracefully_exit=False, rid_to_state={}, server_status=None)\n"
            "    handler = tokenizer_manager.SignalHandler(manager).sigterm_handler\n"
            "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, handler)\n"
            "    for what in case:\n"
            "        happens[what]()\n"
            "        await asyncio.sleep(0.2)\n"
            "    await tokenizer_manager.TokenizerManager.sigterm_watchdog(manager)\n"
            "stop.hook()\n"
            f"for case in {list(cases)}:\n"
            "    if (pid := os.fork()) == 0:\n"
            "        failure.watch()\n"
            "        asyncio.run(main(case))\n"
            "        os._exit(99)\n"
            "    print(case, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        )
        found = dict(line.split() for line in done.stdout.splitlines())
        self.assertEqual({case: int(code) for case, code in found.items()}, cases, done.stderr)

    def test_another_release(self):
        done = self.run_python(
            "import sglang; sglang.__version__ = '0.5.12'\n"
            "from xpool.sglang import plugin\n"
            "try: plugin.install()\n"
            "except Exception: pass\n"
            "print('went on')\n"
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("xpool: SGLang 0.5.12 is not supported: this plugin is for SGLang 0.5.13.post1", done.stderr)

    def test_a_missed_hook(self):
        done = self.run_python(
            "from sglang.srt.server_args import ServerArgs; del ServerArgs.check_server_args\n"
            "from xpool.sglang import plugin\n"
            "try: plugin.install()\n"
            "except Exception: pass\n"
            "print('went on')\n"
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("has no sglang.srt.server_args.ServerArgs.check_server_args", done.stderr)

    def test_a_missing_library(self):
        done = self.run_python(
            "from pathlib import Path\n"
            "from xpool import native; native.LIBRARY = Path('/nowhere/libxpool.so')\n"
            "from xpool.sglang import plugin\n"
            "try: plugin.install()\n"
            "except Exception: pass\n"
            "print('went on')\n"
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("xpool: libxpool cannot be loaded: ", done.stderr)


class Senders(unittest.TestCase):
    """Requests that only their sender is to blame for."""

    def generate(self, parameters):
        """What SGLang's generate_request would have been asked, or the ValueError that becomes a 400."""
        import asyncio

        from xpool.sglang import tokens

        asked = []

        async def original(manager, request):
            asked.append(request)
            yield "answer"

        async def all_of():
            request = types.SimpleNamespace(rid="r", sampling_params=parameters)
            return [one async for one in tokens._generate(original, types.SimpleNamespace(), request)]

        answers = asyncio.run(all_of())
        self.assertEqual((answers, len(asked)), (["answer"], 1))

    def validate(self, ids, parameters=None, **fields):
        from xpool.sglang import tokens

        manager = types.SimpleNamespace(model_config=types.SimpleNamespace(vocab_size=100), context_len=50)
        values = {"return_logprob": False, "token_ids_logprob": None, "top_logprobs_num": 0, "logprob_start_len": -1}
        request = types.SimpleNamespace(sampling_params=parameters or {}, **{**values, **fields})
        return tokens._validate(lambda manager, request, ids: "asked", manager, request, ids)

    def test_what_the_scheduler_would_fall_over(self):
        logprobs = {"return_logprob": True, "token_ids_logprob": [0, 99], "top_logprobs_num": 100, "logprob_start_len": 0}
        held_back = {"min_new_tokens": 2, "stop_token_ids": [1, 99]}
        for answer in (
            self.validate([0, 99]),
            self.validate(None),
            self.validate([1], **logprobs),
            self.validate([1], held_back),
            self.validate([1], {"stop_token_ids": [5000]}),
            self.validate([1], top_logprobs_num=5000, token_ids_logprob=[-7]),
        ):
            self.assertEqual(answer, "asked")
        with self.assertRaisesRegex(ValueError, "no tokens"):
            self.validate([])
        for ids in ([100], [-1], [1 << 70], [None], ["a"], [[1]], [1.5]):
            with self.assertRaisesRegex(ValueError, "not in the vocabulary of 100"):
                self.validate(ids)
            with self.assertRaisesRegex(ValueError, "of token_ids_logprob is not in"):
                self.validate([1], **{**logprobs, "token_ids_logprob": ids})
            with self.assertRaisesRegex(ValueError, "of stop_token_ids is not in"):
                self.validate([1], {**held_back, "stop_token_ids": ids})
        self.assertEqual(self.validate([1], {"logit_bias": {"5": 1, "6": -0.5}, "top_k": -1, "sampling_seed": 7}), "asked")
        for wrong in ("x", None, [], float("nan"), float("inf"), -1e308, 1 << 200):
            with self.assertRaisesRegex(ValueError, "logit_bias has values"):
                self.validate([1], {"logit_bias": {"5": 1, "6": wrong}})
        with self.assertRaisesRegex(ValueError, "logit_bias has values"):
            self.validate([1], {"logit_bias": "x"})
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "sampling_seed"):
            bits = 64 if name == "sampling_seed" else 32
            self.assertEqual(self.validate([1], {name: (1 << bits - 1) - 1}), "asked")
            for wrong in (1.5, "4", [4], 1 << bits - 1, -(1 << bits)):
                with self.assertRaisesRegex(ValueError, f"^{name} is .*; allowed is a whole number"):
                    self.validate([1], {name: wrong})
        for name, wrong in (("top_logprobs_num", (-1, 101, 1 << 31, None, "1")), ("logprob_start_len", (-2, 51, None))):
            for value in wrong:
                with self.assertRaisesRegex(ValueError, f"^{name} is "):
                    self.validate([1], **{**logprobs, name: value})

    def test_choices(self):
        for count in (1, 2, 128):
            self.generate({"n": count})
        for parameters in (None, {}, [], [{}, {"n": 2}]):
            self.generate(parameters)
        for count in (0, -1, 129, 1 << 31, 1 << 80, None, "4", 1.5, [], True):
            for parameters in ({"n": count}, [{"n": 1}, {"n": count}]):
                with self.assertRaisesRegex(ValueError, "allowed is a number from 1 to 128"):
                    self.generate(parameters)


if __name__ == "__main__":
    unittest.main(verbosity=2)
