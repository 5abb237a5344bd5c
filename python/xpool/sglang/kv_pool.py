# SPDX-License-Identifier: MIT
"""SGLang's KV pools over the rank's reserved range, and the allocator of its token slots.

The layout is token-major: all layers of a token lie together, so that the part of the range that has
memory is a run of whole tokens. A layer's tensor is a strided view, whose stride is a token, on a GPU with
padding. Addresses never change; slots at and above the mapped ones must not be touched, and the allocator
hands none out.
"""

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from xpool.native import XpoolError
from xpool.sglang.kv_views import strided


class _TokenMajor:
    """What both pools share: `tokens` is the range as slots x a token, in bytes or in words."""

    range = None  # the xpool.kv.Kv whose memory the pools of this process use; None: SGLang's own
    MOVED_BYTES = 64 << 20  # at once: they are copied in between

    def _open_range(self, row_shapes):
        """A view of every layer for each of `row_shapes`, in their order within a token."""
        kv, slots = self.range, self.size + self.page_size
        row_elements = [rows * width for rows, width in row_shapes]
        layer_elements = sum(row_elements)
        token_elements = self.layer_num * layer_elements
        token_bytes = token_elements * self.store_dtype.itemsize
        padding = kv.token_bytes - token_bytes
        if padding < 0 or (padding and kv.device < 0) or slots > kv.reserved_tokens:
            raise XpoolError(
                f"SGLang makes a KV Cache of {slots} slots of {token_bytes} bytes, the range has"
                f" {kv.reserved_tokens} of {kv.token_bytes}"
            )
        make = self._on_cpu(slots) if kv.device < 0 else self._on_gpu(slots)
        views, at = [], 0
        for shape, count in zip(row_shapes, row_elements, strict=True):
            views.append([make(shape, layer * layer_elements + at) for layer in range(self.layer_num)])
            at += count
        return views

    def _on_cpu(self, slots):
        """A function that makes the view of rows of `shape` at an element of each token."""
        token_bytes = self.range.token_bytes
        self.tokens = torch.frombuffer(self.range.memory(slots * token_bytes), dtype=torch.uint8)
        self.tokens = self.tokens.view(slots, token_bytes)
        elements = self.tokens.view(-1).view(self.store_dtype)
        stride = token_bytes // self.store_dtype.itemsize
        return lambda shape, at: elements.as_strided((slots, *shape), (stride, shape[1], 1), at)

    def _on_gpu(self, slots):
        kv, size = self.range, self.store_dtype.itemsize
        device = torch.device(self.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            if device.index != kv.device:
                raise XpoolError(f"SGLang computes on cuda:{device.index}, the range is on cuda:{kv.device}")
        if kv.token_bytes % 8:
            raise XpoolError(f"tokens of {kv.token_bytes} bytes are no whole words")
        words, stride = kv.token_bytes // 8, kv.token_bytes // size
        self.tokens = strided(kv.address, (slots, words), (words, 1), torch.int64, device)

        def make(shape, at):
            where = kv.address + at * size
            return strided(where, (slots, *shape), (stride, shape[1], 1), self.store_dtype, device)

        return make

    def _addresses(self, views):
        return torch.tensor([view.data_ptr() for view in views], dtype=torch.uint64, device=self.device)

    def move_kv_cache(self, tgt_loc, src_loc):
        """No slot is in both."""
        if self.range is None:
            super().move_kv_cache(tgt_loc, src_loc)
            return
        many = max(self.MOVED_BYTES // self.range.token_bytes, 1)
        to, of = tgt_loc.view(-1).long(), src_loc.view(-1).long()
        for first in range(0, len(of), many):
            some = slice(first, first + many)
            self.tokens[to[some]] = self.tokens[of[some]]

    def get_cpu_copy(self, indices, mamba_indices=None):
        if self.range is None:
            return super().get_cpu_copy(indices, mamba_indices)
        return self.tokens[indices.long()].cpu()

    def load_cpu_copy(self, kv_cache_cpu, indices, mamba_indices=None):
        if self.range is None:
            return super().load_cpu_copy(kv_cache_cpu, indices, mamba_indices)
        self.tokens[indices.long()] = kv_cache_cpu.to(self.tokens.device)

    def get_contiguous_buf_infos(self):
        if self.range is None:
            return super().get_contiguous_buf_infos()
        raise XpoolError("the layers of a token-major KV Cache are not contiguous: no other process can read it")


class MhaPool(_TokenMajor, MHATokenToKVPool):
    def _create_buffers(self):
        if self.range is None:
            super()._create_buffers()
            return
        rows = ((self.head_num, self.head_dim), (self.head_num, self.v_head_dim))
        self.k_buffer, self.v_buffer = self._open_range(rows)
        self.k_data_ptrs = self._addresses(self.k_buffer)
        self.v_data_ptrs = self._addresses(self.v_buffer)
        self.data_ptrs = torch.cat([self.k_data_ptrs, self.v_data_ptrs])
        self.data_strides = torch.full(
            (len(self.data_ptrs),), self.range.token_bytes, device=self.device
        )

    def set_kv_buffer(
        self, layer, loc, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None
    ):
        if self.range is None or self.tokens.is_cuda:
            super().set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override)
            return
        # SGLang's own stores take the stride from the shape on a CPU.
        index = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        for buffer, cache, scale in (
            (self.k_buffer[index], cache_k, k_scale),
            (self.v_buffer[index], cache_v, v_scale),
        ):
            if cache.dtype != self.dtype:
                cache = (cache if scale is None else cache.div_(scale)).to(self.dtype)
            buffer[loc] = cache.view(self.store_dtype)


class MlaPool(_TokenMajor, MLATokenToKVPool):
    def _create_buffers(self):
        if self.range is None:
            super()._create_buffers()
        else:
            (self.kv_buffer,) = self._open_range(((1, self.kv_cache_dim),))


class Allocator(TokenToKVPoolAllocator):
    """Hands out free slots below `limit` only, the lowest first.

    `lent` counts the free slots at and above it, which have no memory here or are about to lose it. So
    that the tail stays free, freed slots are sorted in before the next ones are handed out, in a big cache
    once there are many. Without a limit from the daemon every slot is below it.
    """

    first_limit = None  # slots that have memory at the start
    SMALL = 1 << 15  # slots that are sorted in a fraction of a millisecond
    MANY = 8  # one in so many free slots

    def __init__(self, size, dtype, device, kvcache, need_sort):
        self.limit = min(self.first_limit or size + 1, size + 1)
        super().__init__(size, dtype, device, kvcache, need_sort)

    def clear(self):
        super().clear()
        self.free_pages = self.free_pages[: self.limit - 1].clone()
        self.lent = self.size + 1 - self.limit

    def used(self):
        """Slots that requests and the prefix cache hold, slot 0 aside."""
        return self.size - self.lent - self.available_size()

    def alloc(self, need_size):
        freed, free = len(self.release_pages), len(self.free_pages)
        if need_size > free or free + freed <= self.SMALL or freed * self.MANY > free:
            self.merge_and_sort_free()
        return super().alloc(need_size)

    def free(self, free_index):
        if not self.is_not_in_free_group or free_index.numel() == 0:
            super().free(free_index)
            return
        kept = free_index
        if self.lent < self.size + 1 - self.limit:  # somebody holds slots from the limit on
            kept = free_index[free_index < self.limit]
        self.lent += free_index.numel() - kept.numel()
        self.release_pages = torch.cat((self.release_pages, kept))

    def withdraw(self, limit):
        """Lowers the limit: no slot from there on is handed out."""
        self.merge_and_sort_free()
        kept = self.free_pages[self.free_pages < limit]
        self.lent += len(self.free_pages) - len(kept)
        self.free_pages, self.limit = kept.clone(), limit

    def expose(self, limit, in_use=None):
        """Raises the limit. `in_use`: the slots between the two that somebody holds, if any."""
        limit = min(limit, self.size + 1)
        added = torch.arange(self.limit, limit, dtype=torch.int64, device=self.device)
        if in_use is not None and in_use.numel() > 0:
            added = added[~torch.isin(added, in_use)]
        self.free_pages = torch.cat((self.free_pages, added))
        self.lent -= len(added)
        self.limit = limit
        assert self.lent >= 0, "a slot was exposed that somebody holds"
