#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The elastic KV Cache under SGLang's own scheduling code, without a model: admission, chunked prefill,
decode, retraction, prefix cache and checks for leaks are SGLang's; a forward pass is a function that reads
the rows of a request back and writes the next ones. The daemon is a random one: it shrinks and grows at any
step, whatever is wanted, and grants what is wanted some time later, or not.

Every request must end with the tokens that it would have had alone in a big cache. Two tensor parallel ranks
must be the same after every step: their slots, their prefix caches, what waits and what runs.
"""

import array
import collections
import os
import random
import types
import unittest
from unittest import mock

from kv_model import BUNDLE, LAYERS, ROOT, ROW, SLOTS, Range, make_pool

import torch
from sglang.srt import server_args as server_arguments
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import maybe_cache_unfinished_req, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from xpool import kv as kvs
from xpool.native import XpoolError
from xpool.sglang import kv as plugin, kv_pool

VOCABULARY = 50
CHUNK = 24
CONTEXT = 160
MOST = 8
STEP_NS = 10_000_000


def rows(tokens):
    """The contents of these tokens' rows: a function of each one's prefix."""
    mark, marks = 7, []
    for token in tokens:
        mark = (mark * 1000003 + token * 7919 + 12345) % (1 << 20)
        marks.append(float(mark))
    return torch.tensor(marks)


def alone(prompt, new):
    """The tokens that a request gets: each is a function of all rows before it."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(rows(tokens)))
    return tokens[len(prompt) :]


def next_token(marks):
    return int(marks.to(torch.float64).sum()) % VOCABULARY


class Counts:
    def __init__(self):
        self.held = self.retracted = self.chunks_held = 0


class Simulation:
    """With `overlap` a step's tokens are taken a round later, as on a GPU. `others`: how often data parallel
    ranks that are not here have a step in which this one takes part without rows."""

    def __init__(self, mapped, kind="mha", overlap=False, ranks=1, others=0.0):
        self.overlap, self.ranks, self.others = overlap, ranks, others
        self.kv = Range(mapped, make_bytes(kind))
        self.kv.ceiling = SLOTS
        self.mha = kind == "mha"
        kv_pool.Allocator.first_limit = mapped
        pool = make_pool(self.kv, kind)
        allocator = kv_pool.Allocator(SLOTS - 1, torch.float32, "cpu", pool, False)
        kv_pool.Allocator.first_limit = None
        table = ReqToTokenPool(MOST, CONTEXT, "cpu", False)
        tree = RadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=table, token_to_kv_pool_allocator=allocator, page_size=1
            )
        )
        self.now = 1
        self.pool, self.counts, self.answers = pool, Counts(), {}
        self.scheduler = self.make_scheduler(allocator, tree, table)
        with mock.patch.object(plugin, "_kv", self.kv), mock.patch("xpool.sglang.rank.slo", lambda: (500, 50)):
            plugin._make(self.scheduler)
        self.elastic, plugin._elastic = plugin._elastic, None
        self.elastic.clock = lambda: self.now

    def make_scheduler(self, allocator, tree, table):
        s = Scheduler.__new__(Scheduler)
        off = """enable_fpm enable_hisparse enable_priority_preemption enable_hierarchical_cache is_hybrid_swa
            enable_lora enable_hicache_storage enable_overlap enable_priority_scheduling require_mlp_sync
            is_mixed_chunk enable_dynamic_chunking prefill_delayer dllm_config chunked_req last_batch cur_batch
            truncation_align_size lora_drainer draft_worker idle_sleeper""".split()
        for name in off:
            setattr(s, name, None if name not in ("enable_overlap", "is_mixed_chunk") else False)
        s.enable_overlap = self.overlap
        if self.overlap:
            s.result_queue = collections.deque()
        s.page_size, s.spec_algorithm = 1, SpeculativeAlgorithm.NONE
        s.server_args = server_arguments.get_global_server_args()
        s.token_to_kv_pool_allocator, s.tree_cache, s.req_to_token_pool = allocator, tree, table
        s.model_config = types.SimpleNamespace(vocab_size=VOCABULARY, is_encoder_decoder=False)
        s.waiting_queue, s.running_batch = [], ScheduleBatch(reqs=[], batch_is_full=False)
        s.policy = SchedulePolicy("fcfs", tree, False, False, False)
        s.new_token_ratio_tracker = NewTokenRatioTracker.from_server_args(s.server_args)
        s.max_prefill_tokens, s.chunked_prefill_size = 1000, CHUNK
        s.max_running_requests, s.max_prefill_bs = MOST, 0
        s.priority_scheduling_preemption_threshold = 0
        s.max_total_num_tokens = SLOTS - 1
        s.forward_ct = 0
        s.ps = types.SimpleNamespace(attn_tp_size=self.ranks, pp_size=1)
        s.disaggregation_mode = plugin_mode()
        s.return_health_check_ipcs = []
        for name in "grammar_manager metrics_reporter load_inquirer dllm_manager".split():
            setattr(s, name, mock.MagicMock())
        s.grammar_manager.has_waiting_grammars.return_value = False
        s.grammar_manager.grammar_queue = []
        s.dllm_manager.any_staging_reqs.return_value = False
        s.load_inquirer._get_num_pending_tokens.return_value = 0
        s.dp_attn_adapter = types.SimpleNamespace(maybe_prepare_mlp_sync_batch=self.with_others)
        s.ipc_channels = types.SimpleNamespace(
            send_to_tokenizer=types.SimpleNamespace(send_output=self.answer)
        )
        for name in "_abort_on_waiting_timeout _abort_on_running_timeout".split():
            setattr(s, name, lambda: None)
        s._maybe_prepare_ngram_embedding = lambda batch: batch
        s._set_or_validate_priority = lambda request: True
        s._abort_on_queued_limit = lambda request: False
        s._prefetch_kvcache = lambda request: None
        s._pp_microbatches_drained = lambda: True
        ends = dict(get_last_batch=lambda: s.last_batch, get_running_batch=lambda: s.running_batch)
        s.pool_stats_observer = SchedulerPoolStatsObserver(
            tree_cache=tree, token_to_kv_pool_allocator=allocator, req_to_token_pool=table,
            session_controller=mock.MagicMock(), hisparse_coordinator=None, is_hybrid_swa=False,
            is_hybrid_ssm=False, enable_hisparse=False, full_tokens_per_layer=None, swa_tokens_per_layer=None,
            max_total_num_tokens=SLOTS - 1, **ends,
        )  # fmt: skip
        s.invariant_checker = SchedulerInvariantChecker(
            is_hybrid_swa=False, is_hybrid_ssm=False, disaggregation_mode=s.disaggregation_mode, page_size=1,
            full_tokens_per_layer=None, swa_tokens_per_layer=None, max_total_num_tokens=SLOTS - 1,
            server_args=s.server_args, tree_cache=tree, token_to_kv_pool_allocator=allocator,
            req_to_token_pool=table, pool_stats_observer=s.pool_stats_observer, **ends,
        )  # fmt: skip
        return s

    def with_others(self, batch, **more):
        if batch is None and random.random() < self.others:
            return ScheduleBatch(reqs=[], forward_mode=ForwardMode.IDLE)
        return batch

    def answer(self, output, request):
        self.answers[request.rid] = output.finished_reason

    def add(self, name, prompt, new):
        request = Req(
            name, "", array.array("q", prompt), SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)
        )
        request.wanted = alone(prompt, new)
        self.queue(request)
        return request

    def queue(self, request):
        self.scheduler._add_request_to_queue(request)

    # --- one round of the loop -----------------------------------------------------------------------

    def step(self, told=()):
        """What event_loop_normal does; `told`: what came with rank 0's broadcast."""
        self.now += STEP_NS
        scheduler, elastic = self.scheduler, self.elastic
        with mock.patch.object(plugin, "_elastic", elastic), mock.patch.object(plugin, "_kv", self.kv):
            plugin._begin(scheduler, list(told))
            chunked = scheduler.chunked_req
            batch = scheduler.get_next_batch_to_run()
            scheduler.cur_batch = batch
            if elastic.decode is not None:
                self.counts.held += 1
                self.counts.chunks_held += chunked is not None
            if self.overlap:
                if batch:
                    scheduler.result_queue.append((batch.copy(), self.launch(batch)))
                if scheduler.last_batch:
                    before, work = scheduler.result_queue.popleft()
                    self.take(before, self.forward(work))
            elif batch:
                self.take(batch, self.forward(self.launch(batch)))
            scheduler.last_batch = batch
            self.check()
        return batch

    def launch(self, batch):
        """A step as the device gets it: slots as they are now. It may run at the last moment."""
        extend = batch.forward_mode.is_extend()
        table = self.scheduler.req_to_token_pool.req_to_token
        work = []
        for request in batch.reqs:
            filled = request.fill_len if extend else request.kv_committed_len
            slots = table[request.req_pool_idx, :filled].long()
            first = len(request.prefix_indices) if extend else filled - 1
            tokens = (request.origin_input_ids + request.output_ids)[:filled] if extend else None
            work.append((request, slots, first, tokens))
        return work

    def forward(self, work):
        """What the device does, with the tokens that it knows: (request, next token) each."""
        result = []
        for request, slots, first, given in work:
            tokens = request.known[: len(slots)] if given is None else given
            assert len(tokens) == len(slots), f"{request.rid}: {len(slots)} slots for {len(tokens)} tokens"
            marks = rows(tokens)
            self.write(slots[first:], marks[first:])
            assert self.read(slots, marks), f"{request.rid} does not find its rows"
            token = next_token(self.pool.get_key_buffer(0)[slots, 0, 0])
            request.known = tokens + array.array("q", [token])
            result.append((request, token))
        return result

    def take(self, batch, result):
        """What the scheduler does with the tokens."""
        extend = batch.forward_mode.is_extend()
        for request, token in result:
            if request.inflight_middle_chunks > 0 and extend:
                request.inflight_middle_chunks -= 1
                continue
            if request.finished() or request.is_retracted:
                continue
            request.output_ids.append(token)
            if len(request.output_ids) >= request.sampling_params.max_new_tokens:
                request.finished_reason = FINISH_LENGTH(len(request.output_ids))
            if request.to_finish is not None:
                request.finished_reason = request.to_finish
            if request.finished():
                release_kv_cache(request, self.scheduler.tree_cache)
            elif extend:
                maybe_cache_unfinished_req(request, self.scheduler.tree_cache)

    def write(self, slots, marks):
        self.kv.untouched()
        for layer in range(LAYERS):
            shaped = marks.view(-1, 1, 1) + layer
            k = self.pool.get_key_buffer(layer)
            k[slots] = shaped.expand(-1, *k.shape[1:])
            if self.mha:
                v = self.pool.get_value_buffer(layer)
                v[slots] = -shaped.expand(-1, *v.shape[1:])

    def read(self, slots, marks):
        return all(
            bool((self.pool.get_key_buffer(layer)[slots] == (marks + layer).view(-1, 1, 1)).all())
            for layer in range(LAYERS)
        )

    def check(self):
        self.kv.untouched()
        checker = self.scheduler.invariant_checker
        stats = self.scheduler.pool_stats_observer.get_pool_stats()
        uncached = checker._get_total_uncached_sizes()[0] if self.scheduler.last_batch is not None else None
        if uncached is not None:
            leak, text = checker._check_full_pool(stats, uncached=uncached)
            assert not leak, text
        if self.scheduler.is_fully_idle():
            leak, texts = checker._check_all_pools(stats)
            assert not leak, texts
        assert 0 <= stats.full_token_usage <= 1, stats

    def command(self, kind, slots, trim=False):
        self.kv.commands.append(kvs.Command(kind, slots, trim))

    def resize(self, slots):
        self.command(kvs.GROW if slots >= self.kv.mapped else kvs.SHRINK, slots, random.random() < 0.1)

    def wanted(self):
        """Slots of the demand reported last, 0 when there is none."""
        report = self.kv.reports[-1] if self.kv.reports else {}
        return report["demand_tokens"] if report.get("demand") else 0


class Votes:
    """The daemon's commands for two ranks: both vote, rank 0 names the step of the switch (kv/channel.h)."""

    def __init__(self, ranks):
        self.ranks, self.commands, self.growing = ranks, collections.deque(), None
        self.command = self.at = None

    def poll(self, kv, step):
        leads = kv is self.ranks[0]
        if leads and self.growing is not None:
            if None in self.mapped:
                return None
            trim, self.growing = self.growing, None
            return kvs.Command(kvs.GROW, min(self.mapped), trim)
        if self.command is None:
            if not leads or not self.commands:
                return None
            self.command, self.at = self.commands.popleft(), None
            self.voted, self.applied, self.mapped = set(), set(), [None, None]
        self.voted.add(kv)
        if leads and self.at is None and len(self.voted) == 2:
            self.at = step + 2
        if self.at is None or step < self.at or kv in self.applied:
            return None
        self.applied.add(kv)
        command = self.command
        kv.goal = command.tokens
        if len(self.applied) == 2:
            self.command = None
        if command.tokens < kv.mapped or (command.tokens == kv.mapped and command.trim):
            self.mapped[self.ranks.index(kv)] = kv.mapped
            return command._replace(kind=kvs.SHRINK)
        got = command.tokens if random.random() < 0.8 else random.randrange(kv.mapped, command.tokens + 1, BUNDLE)
        if got > kv.mapped:
            kv.grow(got)
        self.mapped[self.ranks.index(kv)] = got
        if leads:
            self.growing = command.trim
        return None


class Pair:
    """Two tensor parallel ranks. Their clocks differ, and their devices are slow at times."""

    def __init__(self, mapped, kind, overlap):
        self.both = [Simulation(mapped, kind, overlap, ranks=2) for _ in range(2)]
        self.first, second = self.both
        second.kv.leader, second.now = False, 10**12
        self.votes = Votes([one.kv for one in self.both])
        for one in self.both:
            one.kv.poll = lambda step, least, kv=one.kv: self.votes.poll(kv, step)
        self.counts = self.first.counts

    def add(self, *arguments):
        return [one.add(*arguments) for one in self.both]

    def idle(self):
        return self.first.scheduler.is_fully_idle()

    def wanted(self):
        return self.first.wanted()

    def resize(self, slots):
        if len(self.votes.commands) < 2:
            self.votes.commands.append(kvs.Command(kvs.GROW, slots, random.random() < 0.1))

    def step(self):
        with mock.patch.object(plugin, "_elastic", self.first.elastic):
            told = plugin._pull(lambda receiver: [], None)
        states = []
        for one in self.both:
            one.now += random.randrange(STEP_NS)
            one.kv.busy = random.choice((0, 0, 0, 1, 3))
            batch = one.step(told)
            states.append(state(one, batch))
        for name, value in states[0].items():
            assert states[1][name] == value, f"{name}: {value} and {states[1][name]}"


def state(simulation, batch):
    """Everything that must be the same in all ranks."""
    scheduler, room = simulation.scheduler, simulation.elastic.room
    allocator, tree, table = room.allocator, room.tree, room.table.req_to_token
    nodes, stack = [], [tree.root_node]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        nodes.append((list(node.key.token_ids), [int(slot) for slot in node.value], node.lock_ref))

    def running(one):
        return [] if one is None else [
            (r.rid, list(r.output_ids), table[r.req_pool_idx, : r.kv_allocated_len].tolist())
            for r in one.reqs if r.req_pool_idx is not None
        ]  # fmt: skip

    return {
        "limits": (allocator.limit, allocator.lent, room.mapped, simulation.elastic.goal),
        "free": (allocator.free_pages.tolist(), allocator.release_pages.tolist()),
        "nodes": nodes,
        "order of eviction": [n.key.token_ids for n in sorted(tree.evictable_leaves, key=lambda n: n.last_access_time)],
        "waiting": [r.rid for r in scheduler.waiting_queue],
        "running": running(scheduler.running_batch),
        "batch": (batch and str(batch.forward_mode), running(batch)),
        "chunked": scheduler.chunked_req and scheduler.chunked_req.rid,
    }


def make_bytes(kind):
    from kv_model import ROW

    return LAYERS * (ROW if kind == "mha" else 14 * 4)


def plugin_mode():
    from sglang.srt.disaggregation.utils import DisaggregationMode

    return DisaggregationMode.NULL


def whole(slots):
    return -(-slots // BUNDLE) * BUNDLE


def setUpModule():
    """SGLang's global arguments, and the plugin's hooks on its classes, put back afterwards."""
    global PATCHES
    arguments = server_arguments.ServerArgs(
        model_path=str(ROOT / "models" / "tales" / "qwen3-moe"), device="cpu", attention_backend="torch_native",
        disable_overlap_schedule=True, chunked_prefill_size=CHUNK, page_size=1, disable_cuda_graph=True,
        sampling_backend="pytorch", grammar_backend="none", max_running_requests=MOST,
    )  # fmt: skip
    arguments.pp_max_micro_batch_size = MOST
    server_arguments.set_global_server_args_for_scheduler(arguments)
    PATCHES = [
        (Scheduler, "get_next_batch_to_run", plugin._next_batch),
        (Scheduler, "get_new_batch_prefill", plugin._next_prefill),
        (Scheduler, "update_running_batch", plugin._next_decode),
        (Scheduler, "_add_request_to_queue", plugin._queue),
        (PrefillAdder, "add_one_req", plugin._admit),
        (SchedulerInvariantChecker, "_check_full_pool", plugin._check_full),
        (SchedulerPoolStatsObserver, "_get_token_info", plugin._token_info),
    ]
    PATCHES = [mock.patch.object(owner, name, around(getattr(owner, name), hook)) for owner, name, hook in PATCHES]
    for patch in PATCHES:
        patch.start()


def tearDownModule():
    for patch in PATCHES:
        patch.stop()


def around(original, hook):
    return lambda *arguments, **options: hook(original, *arguments, **options)


def random_prompt(texts):
    text = random.choice(texts)
    return text[: random.randrange(1, len(text))] + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 9))]


class Histories(unittest.TestCase):
    def history(self, seed, steps, grants, kind="mha", overlap=False, others=0.0):
        """Random requests and commands; `grants`: how likely a demand is met in a step."""
        random.seed(seed)
        simulation = Simulation(random.randrange(2, 6) * BUNDLE, kind, overlap, others=others)
        texts = [[random.randrange(VOCABULARY) for _ in range(70)] for _ in range(3)]
        requests = []
        for number in range(steps):
            if random.random() < 0.25 and len(simulation.scheduler.waiting_queue) < 6:
                prompt = random_prompt(texts)
                requests.append(simulation.add(f"r{number}", prompt, random.randrange(1, 60)))
            if random.random() < 0.3:
                simulation.resize(random.randrange(1, SLOTS // BUNDLE + 1) * BUNDLE)
            elif random.random() < grants and simulation.wanted() if simulation.kv.reports else False:
                simulation.resize(max(whole(simulation.wanted()), BUNDLE))
            simulation.step()
        simulation.others = 0.0
        # In the end the daemon gives what is wanted.
        for _ in range(3000):
            if simulation.scheduler.is_fully_idle():
                break
            if simulation.wanted() and not simulation.kv.commands:
                simulation.resize(whole(simulation.wanted()))
            simulation.step()
        self.assertTrue(simulation.scheduler.is_fully_idle(), "requests were left over")
        wrong = [r.rid for r in requests if list(r.output_ids) != r.wanted]
        self.assertEqual(wrong, [], "other tokens")
        self.assertEqual(simulation.answers, {})
        simulation.command(kvs.SHRINK, BUNDLE, True)
        simulation.step()
        self.assertEqual(simulation.kv.mapped, BUNDLE)
        return simulation.counts

    def test_random_daemon(self):
        self.random_daemon(False)

    def test_random_daemon_with_overlap(self):
        self.random_daemon(True)

    def test_random_daemon_beside_data_parallel_ranks(self):
        self.random_daemon(True, others=0.5)

    def test_two_ranks(self):
        self.two_ranks(False)

    def test_two_ranks_with_overlap(self):
        self.two_ranks(True)

    def two_ranks(self, overlap):
        for seed in range(int(os.environ.get("XPOOL_KV_HISTORIES", "4"))):
            random.seed(1000 + seed)
            pair = Pair(random.randrange(2, 6) * BUNDLE, ("mha", "mla")[seed % 2], overlap)
            texts = [[random.randrange(VOCABULARY) for _ in range(70)] for _ in range(3)]
            requests, sizes = [], set()
            for number in range(250):
                if random.random() < 0.25 and len(pair.first.scheduler.waiting_queue) < 6:
                    requests += pair.add(f"r{number}", random_prompt(texts), random.randrange(1, 60))
                if random.random() < 0.3:
                    pair.resize(random.randrange(1, SLOTS // BUNDLE + 1) * BUNDLE)
                elif random.random() < (0.3, 0.9)[seed // 2 % 2] and pair.wanted():
                    pair.resize(max(whole(pair.wanted()), BUNDLE))
                pair.step()
                sizes.add(pair.first.kv.mapped)
            for _ in range(3000):
                if pair.idle():
                    break
                if pair.wanted() and pair.votes.command is None:
                    pair.resize(whole(pair.wanted()))
                pair.step()
            self.assertTrue(pair.idle(), "requests were left over")
            self.assertEqual([r.rid for r in requests if list(r.output_ids) != r.wanted], [], "other tokens")
            self.assertGreater(len(sizes), 4, "the KV Cache hardly moved")
            self.assertEqual([one.answers for one in pair.both], [{}, {}])

    def random_daemon(self, overlap, others=0.0):
        held = chunks = 0
        for seed in range(int(os.environ.get("XPOOL_KV_HISTORIES", "6"))):
            counts = self.history(seed, 300, (0.1, 0.5, 0.9)[seed % 3], ("mha", "mla")[seed % 2], overlap, others)
            held += counts.held
            chunks += counts.chunks_held
        self.assertGreater(held, 0, "no decode ever waited")
        self.assertGreater(chunks, 0, "no chunked prefill ever waited")


class Scenes(unittest.TestCase):
    def run_until(self, simulation, condition, most=400):
        for _ in range(most):
            if condition():
                return
            simulation.step()
        self.fail("it never came to that")

    def test_a_prefill_waits_and_its_demand_is_exact(self):
        simulation = Simulation(2 * BUNDLE)
        request = simulation.add("long", list(range(40)), 20)
        for _ in range(5):
            self.assertIsNone(simulation.step())
        report = simulation.kv.reports[-1]
        self.assertEqual((report["demand"], report["waiting"], report["running"]), (kvs.PREFILL, 1, 0))
        # SGLang wants the prompt, all new tokens, one more, and strictly more than that; and slot 0.
        self.assertEqual(report["demand_tokens"], 40 + 20 + 1 + 1 + 1)
        self.assertEqual(report["demand_deadline_ns"] - report["demand_since_ns"], 500_000_000)
        simulation.command(kvs.GROW, whole(report["demand_tokens"]))
        self.assertIsNotNone(simulation.step())
        self.run_until(simulation, request.finished)
        self.assertEqual(list(request.output_ids), request.wanted)

    def test_a_squeezed_group_begins_nothing_new(self):
        simulation = Simulation(8 * BUNDLE)
        first = simulation.add("first", list(range(30)), 20)
        simulation.step()
        simulation.kv.admit = BUNDLE
        second = simulation.add("second", list(range(50, 80)), 5)
        self.run_until(simulation, first.finished)  # who runs goes on
        for _ in range(5):
            self.assertIsNone(simulation.step())
        self.assertEqual(len(second.output_ids), 0)
        self.assertEqual(simulation.wanted(), 0)  # memory is not what it lacks
        small = simulation.add("small", [9] * 8, 3)
        simulation.scheduler.waiting_queue.reverse()
        self.run_until(simulation, small.finished)
        simulation.kv.admit = 2**32 - 1
        self.run_until(simulation, second.finished)
        self.assertEqual([list(r.output_ids) for r in (first, second)], [r.wanted for r in (first, second)])

    def test_a_decode_waits_and_is_not_killed(self):
        simulation = Simulation(8 * BUNDLE)
        request = simulation.add("one", list(range(30)), 60)
        self.run_until(simulation, lambda: len(request.output_ids) == 10)
        simulation.command(kvs.SHRINK, BUNDLE)
        self.run_until(simulation, lambda: simulation.elastic.decode is not None)
        self.assertEqual(simulation.kv.mapped, 3 * BUNDLE)
        report = simulation.kv.reports[-1]
        for _ in range(20):
            self.assertIsNone(simulation.step())
        report, since = simulation.kv.reports[-1], report.get("demand_since_ns")
        self.assertEqual((report["demand"], report["running"]), (kvs.DECODE, 1))
        self.assertFalse(since and since != report["demand_since_ns"], "the demand's name changed")
        self.assertGreater(report["demand_tokens"], BUNDLE)
        simulation.command(kvs.GROW, 8 * BUNDLE)
        self.run_until(simulation, request.finished)
        self.assertEqual((list(request.output_ids), request.retraction_count), (request.wanted, 0))

    def test_a_pause_that_puts_all_back_ends_the_demand(self):
        simulation = Simulation(8 * BUNDLE)
        request = simulation.add("one", list(range(30)), 60)
        self.run_until(simulation, lambda: len(request.output_ids) == 10)
        simulation.command(kvs.SHRINK, BUNDLE)
        self.run_until(simulation, lambda: simulation.wanted() > 0)
        scheduler = simulation.scheduler
        scheduler.running_batch.release_req(0, 0, scheduler.server_args)  # as pause_generation does
        scheduler.running_batch.filter_batch(keep_indices=[])
        scheduler.last_batch = None
        with mock.patch.object(plugin, "_elastic", simulation.elastic):
            plugin._begin(scheduler, [])
        self.assertEqual(simulation.wanted(), 0)

    def test_without_a_grant_requests_are_retracted_and_come_back(self):
        simulation = Simulation(8 * BUNDLE)
        requests = [simulation.add(f"r{i}", [i] * 20, 16) for i in range(3)]
        self.run_until(simulation, lambda: all(len(r.output_ids) > 2 for r in requests))
        simulation.command(kvs.SHRINK, BUNDLE)
        simulation.kv.was_refused = True
        self.run_until(simulation, lambda: sum(r.retraction_count for r in requests) > 0, 2000)
        self.assertEqual(len(simulation.scheduler.running_batch.reqs), 2)
        simulation.command(kvs.GROW, SLOTS)
        self.run_until(simulation, lambda: all(r.finished() for r in requests))
        for request in requests:
            self.assertEqual(list(request.output_ids), request.wanted)

    def test_a_chunked_prefill_waits_and_is_retracted_at_last(self):
        simulation = Simulation(8 * BUNDLE)
        request = simulation.add("long", list(range(50)) * 2, 5)
        for _ in range(3):
            simulation.step()
        self.assertIs(simulation.scheduler.chunked_req, request)
        simulation.command(kvs.SHRINK, BUNDLE)
        for _ in range(5):
            self.assertIsNone(simulation.step())
        report = simulation.kv.reports[-1]
        self.assertEqual((report["demand"], report["running"]), (kvs.DECODE, 1))
        self.assertGreaterEqual(report["demand_tokens"], 105)
        simulation.kv.was_refused = True
        self.run_until(simulation, lambda: request.retraction_count == 1, 2000)
        simulation.step()
        self.assertEqual(simulation.kv.mapped, BUNDLE)
        simulation.step()
        self.assertEqual(simulation.kv.reports[-1]["demand"], kvs.PREFILL)
        simulation.command(kvs.GROW, SLOTS)
        self.run_until(simulation, request.finished)
        self.assertEqual(list(request.output_ids), request.wanted)

    def test_an_aborted_request_leaves_while_it_waits(self):
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        simulation = Simulation(8 * BUNDLE)
        request = simulation.add("gone", list(range(30)), 60)
        self.run_until(simulation, lambda: len(request.output_ids) == 10)
        simulation.command(kvs.SHRINK, BUNDLE)
        self.run_until(simulation, lambda: simulation.elastic.decode is not None)
        request.to_finish = FINISH_ABORT()
        self.run_until(simulation, simulation.scheduler.is_fully_idle, 10)
        self.assertIn("gone", simulation.answers)
        simulation.step()
        self.assertEqual(simulation.kv.mapped, BUNDLE)

    def test_what_can_never_fit_is_refused(self):
        simulation = Simulation(2 * BUNDLE)
        long = simulation.add("long", list(range(40)) * 3, 5)
        cut = simulation.add("cut", list(range(40)), 100)
        simulation.kv.ceiling = 6 * BUNDLE
        self.run_until(simulation, lambda: "long" in simulation.answers, 5)
        self.assertEqual(simulation.answers["long"]["status_code"], 400)
        self.assertIn("at most 96", simulation.answers["long"]["message"])
        simulation.command(kvs.GROW, 6 * BUNDLE)
        self.run_until(simulation, cut.finished)
        self.assertEqual(list(cut.output_ids), cut.wanted[: len(cut.output_ids)])
        self.assertEqual(len(cut.output_ids), 96 - 3 - 40)
        self.assertEqual(len(long.output_ids), 0)

    def test_an_idle_group_gives_its_prefix_cache(self):
        simulation = Simulation(8 * BUNDLE)
        request = simulation.add("one", list(range(40)), 10)
        self.run_until(simulation, request.finished)
        self.run_until(simulation, simulation.scheduler.is_fully_idle)
        simulation.step()
        report = simulation.kv.reports[-1]
        self.assertEqual((report["live_tokens"], report["cached_tokens"]), (1, 49))
        simulation.command(kvs.SHRINK, BUNDLE)
        simulation.step()
        self.assertEqual((simulation.kv.mapped, simulation.scheduler.tree_cache.evictable_size()), (BUNDLE, 15))

    def test_a_device_at_work_is_asked_again(self):
        simulation = Simulation(8 * BUNDLE)
        self.assertTrue(simulation.kv.has_captured)
        simulation.kv.busy = 2
        simulation.command(kvs.SHRINK, 2 * BUNDLE)
        simulation.command(kvs.SHRINK, BUNDLE)
        seen = []
        for _ in range(4):
            simulation.step()
            seen.append((simulation.kv.mapped // BUNDLE, simulation.elastic.room.mapped // BUNDLE))
        # What is empty is handed out no more; the next command waits for the memory.
        self.assertEqual(seen, [(8, 2), (8, 2), (1, 1), (1, 1)])

    def test_a_pause_in_the_middle_of_a_step_is_no_silence(self):
        simulation = Simulation(8 * BUNDLE, overlap=True)
        request = simulation.add("one", list(range(30)), 60)
        self.run_until(simulation, lambda: len(request.output_ids) == 10)

        def rounds(count):
            """As SGLang's loop while it is paused in place: requests are taken, nothing else is done."""
            for _ in range(count):
                with mock.patch.object(plugin, "_elastic", simulation.elastic):
                    plugin._begin(simulation.scheduler, [])

        self.assertTrue(simulation.elastic.under_way())
        del simulation.kv.released[:]
        for goal in (2 * BUNDLE, BUNDLE):
            simulation.command(kvs.SHRINK, goal)
            rounds(5)
        self.assertEqual(simulation.kv.released, [8 * BUNDLE] * 2)  # an answer to each
        simulation.command(kvs.GROW, 9 * BUNDLE)
        rounds(2)
        self.assertEqual((simulation.kv.mapped, simulation.elastic.pending), (9 * BUNDLE, None))
        simulation.command(kvs.SHRINK, 2 * BUNDLE)
        rounds(5)
        self.assertEqual(simulation.kv.mapped, 9 * BUNDLE)
        simulation.step()
        simulation.step()
        self.assertEqual(simulation.kv.mapped, 3 * BUNDLE)
        simulation.command(kvs.GROW, 9 * BUNDLE)
        self.run_until(simulation, request.finished)
        self.assertEqual(list(request.output_ids), request.wanted)

    def test_ranks_of_a_group_are_told_by_rank_0(self):
        first, second = Simulation(2 * BUNDLE), Simulation(2 * BUNDLE)
        second.kv.leader = False
        for one in (first, second):
            one.elastic.group_ranks = 2
        receiver = types.SimpleNamespace()
        first.command(kvs.GROW, 8 * BUNDLE)
        second.kv.grow(8 * BUNDLE)
        second.kv.goal = 8 * BUNDLE

        def round_of_both():
            with mock.patch.object(plugin, "_elastic", first.elastic):
                requests = plugin._pull(lambda receiver: ["a request"], receiver)
            for one in (first, second):
                with mock.patch.object(plugin, "_elastic", one.elastic):
                    self.assertEqual(plugin._begin(one.scheduler, list(requests)), ["a request"])
            return requests

        self.assertEqual(len(round_of_both()), 2)  # the ceiling
        self.assertEqual([one.room.mapped for one in (first.elastic, second.elastic)], [2 * BUNDLE] * 2)
        self.assertEqual(len(round_of_both()), 2)  # the grow
        self.assertEqual([one.room.mapped for one in (first.elastic, second.elastic)], [8 * BUNDLE] * 2)
        self.assertEqual(len(round_of_both()), 2)  # it is over
        self.assertEqual(len(round_of_both()), 1)
        self.assertEqual(second.kv.reports, [])


class Arguments(unittest.TestCase):
    def test_what_does_not_go_together_is_refused(self):
        good = server_arguments.get_global_server_args()
        plugin._check_arguments(good)
        for name, value in (("page_size", 16), ("enable_lmcache", True)):
            wrong = types.SimpleNamespace(**{**vars(good), name: value})
            with self.assertRaisesRegex(XpoolError, f"--{name.replace('_', '-')} is {value}.*; leave it at [^,]*$"):
                plugin._check_arguments(wrong)

        # Rounds without a broadcast are nobody's business but a group's of several ranks.
        rare = {**vars(good), "scheduler_recv_interval": 2, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
        plugin._check_arguments(types.SimpleNamespace(**rare))
        with self.assertRaisesRegex(XpoolError, "--scheduler-recv-interval is 2.*leave it at 1$"):
            plugin._check_arguments(types.SimpleNamespace(**{**rare, "dp_size": 1}))

        good = types.SimpleNamespace(**{**vars(good), "attention_backend": "triton"})
        plugin._check_arguments(good, True)
        for name, value in (("attention_backend", "fa3"), ("decode_attention_backend", "flashinfer")):
            wrong = types.SimpleNamespace(**{**vars(good), name: value})
            plugin._check_arguments(wrong)
            with self.assertRaisesRegex(
                XpoolError, f"--{name.replace('_', '-')} is {value}.* or set scheduler.kv_policy"
            ):
                plugin._check_arguments(wrong, True)

    def test_on_a_gpu_nobody_looks_at_free_memory(self):
        runner = types.SimpleNamespace(server_args=types.SimpleNamespace(max_total_tokens=100))

        def profile(device, kv):
            rank = types.SimpleNamespace(device=device)
            with (
                mock.patch.object(plugin.ops, "attached", lambda: rank),
                mock.patch.object(plugin, "_kv", kv),
                mock.patch.object(plugin, "_token_bytes", lambda runner: 7),
            ):
                return plugin._profile(lambda runner, before: before, runner, 5)

        self.assertEqual(profile(None, None), 5)
        self.assertEqual(profile(None, Range(BUNDLE)), 5)
        self.assertEqual(profile(0, None), 700)
        with mock.patch.object(Range, "padding", 8):
            self.assertEqual(profile(0, Range(BUNDLE)), SLOTS * (LAYERS * ROW + 8))
        runner.server_args.max_total_tokens = None
        self.assertEqual(profile(0, None), 5)

    def test_the_capacity_is_the_range(self):
        runner = types.SimpleNamespace(server_args=types.SimpleNamespace(max_total_tokens=None))
        self.assertEqual(plugin._constraints(lambda runner, capacity: capacity, runner, 77), 77)
        with mock.patch.object(plugin, "_kv", Range(BUNDLE)):
            self.assertEqual(plugin._constraints(None, runner, 77), SLOTS - 1)
            runner.server_args.max_total_tokens = 100
            self.assertEqual(plugin._constraints(None, runner, 77), 100)


if __name__ == "__main__":
    unittest.main()
