#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The elastic KV Cache's pools, allocator and the emptying of its end, with SGLang's own prefix cache, but
without a server: random histories of requests, shrinks and grows against a simple model.

A token's rows are a function of the tokens in front of it, so a row that is lost, moved wrongly or shown
to the wrong request is seen. What has no memory is filled with another pattern, which nobody may touch.
"""

import array
import os
import random
import types
import unittest
from unittest import mock

from kv_model import BUNDLE, DEVICE, DIM, HEADS, LAYERS, ROW, SLOTS, V_DIM, WHERE, MadeRange, Range, make_pool

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from xpool.native import XpoolError
from xpool.sglang import kv_pool
from xpool.sglang.kv_room import Room
from xpool.sglang.kv_views import strided

CONTEXT = 140


class Request:
    """What SGLang's caches ask of a request."""

    def __init__(self, tokens, new):
        self.origin_input_ids, self.output_ids = array.array("q", tokens), array.array("q")
        self.new = new
        self.extra_key, self.priority = None, 0
        self.req_pool_idx = self.last_node = None
        self.prefix_indices = torch.empty(0, dtype=torch.int64, device=DEVICE)
        self.cache_protected_len = self.kv_committed_len = self.kv_allocated_len = 0
        self.inflight_middle_chunks = 0

    @property
    def fill_len(self):
        return self.kv_committed_len

    def tokens(self):
        return self.origin_input_ids + self.output_ids

    def get_fill_ids(self):
        return self.tokens()[: self.kv_committed_len]

    def pop_committed_kv_cache(self):
        return self.kv_committed_len


class Engine:
    """The simple model: what SGLang does with its caches in the course of requests."""

    def __init__(self, mapped, cached=True, kind="mha"):
        self.kv = MadeRange(mapped, LAYERS * (ROW if kind == "mha" else 14 * 4))
        kv_pool.Allocator.first_limit = mapped
        self.pool = make_pool(self.kv, kind)
        self.allocator = kv_pool.Allocator(SLOTS - 1, torch.float32, DEVICE, self.pool, False)
        kv_pool.Allocator.first_limit = None
        self.table = ReqToTokenPool(16, CONTEXT, DEVICE, False)
        params = CacheInitParams(
            disable=not cached,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        self.tree = RadixCache(params) if cached else ChunkCache(params)
        self.live = []
        self.room = Room(self.allocator, self.tree, self.pool, self.table, lambda: self.live, BUNDLE, mapped)
        self.mha = kind == "mha"

    def rows(self, tokens):
        """The contents of these tokens' rows, a function of each one's prefix."""
        mark, marks = 7, []
        for token in tokens:
            mark = (mark * 1000003 + token * 7919 + 12345) % (1 << 20)
            marks.append(float(mark))
        return torch.tensor(marks, device=DEVICE)

    def write(self, slots, values):
        for layer in range(LAYERS):
            where = types.SimpleNamespace(layer_id=layer)
            shaped = values.view(-1, 1, 1) + layer
            if self.mha:
                k, v = shaped.expand(-1, HEADS, DIM), -shaped.expand(-1, HEADS, V_DIM)
                self.pool.set_kv_buffer(where, slots, k, v)
            else:
                self.pool.set_kv_buffer(where, slots, shaped.expand(-1, 1, 14), None)

    def read(self, slots, values):
        for layer in range(LAYERS):
            wanted = (values + layer).view(-1, 1, 1)
            if not bool((self.pool.get_key_buffer(layer)[slots] == wanted).all()):
                return False
            sign = -1 if self.mha else 1
            if not bool((self.pool.get_value_buffer(layer)[slots] == sign * wanted).all()):
                return False
        return True

    def obtainable(self):
        evictable = 0 if self.room.mapped > self.allocator.limit else self.tree.evictable_size()
        return self.allocator.available_size() + evictable

    def alloc(self, count):
        if self.allocator.available_size() < count:
            self.tree.evict(EvictParams(num_tokens=count))
        slots = self.allocator.alloc(count)
        assert slots is not None, "what counted as obtainable was not"
        return slots

    def extend(self, request, count):
        """The next `count` tokens of a prompt."""
        done = request.kv_allocated_len
        slots = self.alloc(count)
        index = request.req_pool_idx
        self.table.write((index, slice(0, done)), request.prefix_indices.to(torch.int32))
        self.table.write((index, slice(done, done + count)), slots.to(torch.int32))
        request.kv_allocated_len = request.kv_committed_len = done + count
        self.write(slots, self.rows(request.tokens()[: done + count])[done:])
        self.tree.cache_unfinished_req(request)

    def admit(self, request, chunk=None):
        prompt = request.origin_input_ids
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1])))
        prefix = match.device_indices
        if self.obtainable() - len(prefix) < len(prompt) - len(prefix) or not self.table.free_slots:
            return False
        request.prefix_indices, request.last_node = prefix, match.last_device_node
        request.cache_protected_len = request.kv_allocated_len = len(prefix)
        self.tree.inc_lock_ref(request.last_node)
        self.table.alloc([request])
        self.live.append(request)
        rest = len(prompt) - len(prefix)
        self.extend(request, min(rest, chunk or rest))
        return True

    def decode(self):
        if self.allocator.available_size() + self.tree.evictable_size() < len(self.live):
            return False
        if self.room.mapped > self.allocator.limit and self.allocator.available_size() < len(self.live):
            return False
        for request in self.live:
            if request.kv_allocated_len < len(request.origin_input_ids):
                self.extend(request, 1)
                continue
            request.output_ids.append(random.randrange(9))
            at = request.kv_allocated_len
            slots = self.alloc(1)
            self.table.write((request.req_pool_idx, slice(at, at + 1)), slots.to(torch.int32))
            request.kv_allocated_len = request.kv_committed_len = at + 1
            self.write(slots, self.rows(request.tokens()[: at + 1])[at:])
        return True

    def finish(self, request):
        self.live.remove(request)
        self.tree.cache_finished_req(request)
        self.table.free(request)

    def check(self):
        """Every request and every node of the prefix cache has its rows; nothing is lost or double."""
        held = []
        for request in self.live:
            count = request.kv_allocated_len
            row = self.table.req_to_token[request.req_pool_idx, :count].long()
            assert self.read(row, self.rows(request.tokens()[:count])), "a request's rows are wrong"
            held += row.tolist()
            assert request.prefix_indices.tolist() == row[: len(request.prefix_indices)].tolist()
        nodes = []
        stack = [(child, []) for child in self.tree.root_node.children.values()] if self.cached() else []
        while stack:
            node, before = stack.pop()
            tokens = before + list(node.key.token_ids)
            values = self.rows(tokens)[len(before) :]
            assert self.read(node.value, values), "a cached prefix's rows are wrong"
            nodes += node.value.tolist()
            stack += [(child, tokens) for child in node.children.values()]
        assert len(nodes) == len(set(nodes)), "two nodes have the same slot"
        in_use = set(held) | set(nodes)
        free = self.allocator.free_pages.tolist() + self.allocator.release_pages.tolist()
        assert len(free) == len(set(free)) and not in_use & set(free)
        assert all(0 < slot < self.allocator.limit for slot in free)
        assert all(0 < slot < self.kv.mapped for slot in in_use)
        assert len(in_use) == self.allocator.used()
        assert len(free) + len(in_use) + self.allocator.lent == SLOTS - 1
        if self.cached():
            assert self.tree.evictable_size() + self.tree.protected_size() == len(nodes)
        self.kv.untouched()

    def cached(self):
        return hasattr(self.tree, "root_node")

    def resize(self, goal):
        """As the plugin does on a command."""
        if goal >= self.room.mapped:
            self.kv.grow(goal)
            self.room.grow(goal)
        else:
            keep = self.room.shrink(goal)
            assert goal <= keep and keep % BUNDLE == 0
            self.kv.release(keep)


def history(seed, cached, kind, steps):
    random.seed(seed)
    engine = Engine(random.randrange(1, SLOTS // BUNDLE + 1) * BUNDLE, cached, kind)
    goal, kept = engine.room.mapped, 0
    texts = [[random.randrange(9) for _ in range(40)] for _ in range(4)]
    for _ in range(steps):
        action = random.random()
        if action < 0.25:
            text = random.choice(texts)[: random.randrange(1, 40)]
            prompt = text + [random.randrange(9) for _ in range(random.randrange(1, 12))]
            chunk = random.randrange(1, 9) if random.random() < 0.3 else None
            if engine.room.mapped <= goal and len(engine.live) < 8:
                engine.admit(Request(prompt, random.randrange(1, 30)), chunk)
        elif action < 0.7:
            engine.decode()
        elif action < 0.8 and engine.live:
            engine.finish(random.choice(engine.live))
        elif action < 0.95:
            goal = random.randrange(1, SLOTS // BUNDLE + 1) * BUNDLE
            engine.resize(goal)
        elif engine.room.mapped > goal:
            engine.resize(goal)
        for request in [r for r in engine.live if len(r.output_ids) >= r.new or r.kv_allocated_len > 80]:
            engine.finish(request)
        kept += engine.room.mapped > goal
        engine.check()
    for request in list(engine.live):
        engine.finish(request)
    engine.resize(BUNDLE)
    engine.check()
    assert engine.room.mapped == BUNDLE
    return kept


class Histories(unittest.TestCase):
    STEPS = int(os.environ.get("XPOOL_KV_HISTORY_STEPS", "250"))

    def test_with_a_prefix_cache(self):
        kept = sum(history(seed, True, "mha", self.STEPS) for seed in range(4))
        self.assertGreater(kept, 0, "no shrink met live requests that fill more than its goal")

    def test_without_a_prefix_cache(self):
        for seed in range(2):
            history(seed, False, "mha", self.STEPS)

    def test_a_cache_too_big_to_be_sorted_each_time(self):
        with mock.patch.object(kv_pool.Allocator, "SMALL", 0):
            for seed in range(2):
                history(200 + seed, True, "mha", self.STEPS)

    def test_mla(self):
        for seed in range(2):
            history(100 + seed, True, "mla", self.STEPS)

    @unittest.skipUnless(WHERE == "cpu", "they are anyway")
    def test_padded_views_as_on_a_gpu(self):
        with mock.patch.object(Range, "padding", 8), mock.patch.object(kv_pool.MhaPool, "MOVED_BYTES", 3000):
            for kind in ("mha", "mla"):
                history(300, True, kind, self.STEPS)


class Emptying(unittest.TestCase):
    def engine(self, mapped=SLOTS, **more):
        return Engine(mapped, **more)

    def cache(self, engine, tokens):
        request = Request(tokens, 1)
        self.assertTrue(engine.admit(request))
        engine.finish(request)

    def hits(self, engine, tokens):
        match = engine.tree.match_prefix(MatchPrefixParams(key=RadixKey(array.array("q", tokens))))
        return len(match.device_indices)

    def test_only_the_end_is_evicted(self):
        engine = self.engine()
        one, other = [1] * 20, [2] * 60
        self.cache(engine, one)
        self.cache(engine, other)
        engine.resize(3 * BUNDLE)  # slots 1 to 47 stay: all of one, and the first 27 of the other
        self.assertEqual(engine.room.mapped, 3 * BUNDLE)
        self.assertEqual(self.hits(engine, one), 20)
        self.assertEqual(self.hits(engine, other), 27)
        engine.check()

    def test_a_long_request_in_the_tail_does_not_block(self):
        engine = self.engine()
        self.cache(engine, [1] * 90)
        late = Request([2] * 40, 50)
        self.assertTrue(engine.admit(late))
        row = engine.table.req_to_token[late.req_pool_idx]
        self.assertGreater(int(row[0]), 90)
        engine.tree.evict(EvictParams(num_tokens=90))
        engine.resize(3 * BUNDLE)
        self.assertEqual(engine.room.mapped, 3 * BUNDLE)
        self.assertLess(int(row[:40].max()), 3 * BUNDLE)
        engine.check()

    def test_live_requests_keep_what_they_need(self):
        engine = self.engine()
        for value in (1, 2):
            self.assertTrue(engine.admit(Request([value] * 40, 50)))
        engine.resize(BUNDLE)
        self.assertEqual(engine.room.mapped, 6 * BUNDLE)  # 80 tokens and slot 0
        self.assertEqual(engine.allocator.available_size(), 0)
        engine.finish(engine.live[0])
        engine.resize(BUNDLE)
        self.assertEqual(engine.room.mapped, 3 * BUNDLE)
        engine.check()

    def test_unknown_holders_keep_everything(self):
        engine = self.engine()
        slots = engine.allocator.alloc(100)
        engine.allocator.free(slots[:80])
        with self.assertLogs("xpool", "WARNING"):
            self.assertEqual(engine.room.shrink(2 * BUNDLE), SLOTS)
        self.assertEqual(engine.allocator.available_size(), SLOTS - 21)
        engine.allocator.free(slots[80:])
        engine.resize(2 * BUNDLE)
        self.assertEqual(engine.room.mapped, 2 * BUNDLE)

    def test_a_flush_exposes_what_has_memory(self):
        engine = self.engine(4 * BUNDLE)
        self.cache(engine, [1] * 30)
        engine.tree.reset()
        engine.allocator.clear()
        self.assertEqual(engine.allocator.available_size(), 4 * BUNDLE - 1)
        engine.resize(SLOTS)
        self.assertEqual(engine.allocator.available_size(), SLOTS - 1)

    def test_inner_nodes_move_when_their_ends_stay(self):
        engine = self.engine()
        self.cache(engine, [3] * 50)
        self.cache(engine, [1] * 100)
        engine.tree.evict(EvictParams(num_tokens=50))  # the older one: slots 1 to 50 are free
        self.cache(engine, [1] * 100 + [2] * 20)  # its own 20 are below, the 100 before them above
        engine.resize(8 * BUNDLE)
        self.assertEqual(engine.room.mapped, 8 * BUNDLE)
        self.assertEqual(self.hits(engine, [1] * 100 + [2] * 20), 120)
        engine.check()


@unittest.skipUnless(WHERE == "cpu", "of the CPU's range")
class Pools(unittest.TestCase):
    def test_strides(self):
        kv = Range(SLOTS)
        pool = make_pool(kv)
        k, v = pool.get_kv_buffer(1)
        self.assertEqual(k.stride(), (LAYERS * ROW // 4, DIM, 1))
        self.assertEqual(v.data_ptr() - k.data_ptr(), HEADS * DIM * 4)
        self.assertEqual(pool.get_key_buffer(2).data_ptr() - k.data_ptr(), ROW)
        self.assertEqual(k.shape, (SLOTS, HEADS, DIM))

    def test_copies(self):
        kv = Range(SLOTS)
        pool = make_pool(kv)
        kv.bytes[5] = 9
        kv.bytes[6] = 10
        pool.move_kv_cache(torch.tensor([7, 8]), torch.tensor([5, 6]))
        self.assertTrue(bool((kv.bytes[7] == 9).all() and (kv.bytes[8] == 10).all()))
        copy = pool.get_cpu_copy(torch.tensor([7, 8]))
        pool.load_cpu_copy(copy, torch.tensor([20, 21]))
        self.assertTrue(bool((kv.bytes[20] == 9).all() and (kv.bytes[21] == 10).all()))
        with self.assertRaises(XpoolError):
            pool.get_contiguous_buf_infos()

    def test_views_as_on_a_gpu(self):
        with mock.patch.object(Range, "padding", 40):
            kv = Range(SLOTS)
            pool = make_pool(kv)
            k, v = pool.get_kv_buffer(1)
            self.assertEqual(k.stride(), ((LAYERS * ROW + 40) // 4, DIM, 1))
            self.assertEqual(v.data_ptr(), kv.address + ROW + HEADS * DIM * 4)
            self.assertEqual((k.shape, v.shape), ((SLOTS, HEADS, DIM), (SLOTS, HEADS, V_DIM)))
            # Two layers are no views of one tensor.
            self.assertNotEqual(k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr())
            kv.bytes[5] = 9
            pool.move_kv_cache(torch.tensor([7]), torch.tensor([5]))
            self.assertTrue(bool((kv.bytes[7] == 9).all()))
            self.assertEqual(pool.data_strides.tolist(), [LAYERS * ROW + 40] * 2 * LAYERS)
            with self.assertRaisesRegex(XpoolError, "whole words"):
                Range.padding = 12
                make_pool(Range(SLOTS))

    def test_dtypes_of_views(self):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int64):
            owner = torch.arange(48).to(dtype)
            view = strided(owner.data_ptr(), (3, 2, 2), (16, 4, 1), dtype, torch.device("cpu"))
            self.assertTrue(torch.equal(view, owner.as_strided((3, 2, 2), (16, 4, 1))))

    def test_another_geometry_is_refused(self):
        with self.assertRaisesRegex(XpoolError, "slots of"):
            make_pool(Range(SLOTS, LAYERS * ROW + 4))
        with self.assertRaisesRegex(XpoolError, "slots of"):
            make_pool(Range(SLOTS), size=SLOTS)

    def test_without_a_range_it_is_sglangs(self):
        pool = make_pool(None)
        self.assertTrue(pool.get_key_buffer(0).is_contiguous())
        copy = pool.get_cpu_copy(torch.tensor([1]))
        pool.load_cpu_copy(copy, torch.tensor([2]))
        allocator = kv_pool.Allocator(8, torch.float32, "cpu", pool, False)
        self.assertEqual((allocator.available_size(), allocator.lent), (8, 0))


if __name__ == "__main__":
    unittest.main()
