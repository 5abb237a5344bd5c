# SPDX-License-Identifier: MIT
"""Emptying the end of the KV Cache, so that its memory can be given away.

A slot is held by a node of the prefix cache, by a live request, or by both. What only the cache holds in
the end that goes is evicted, the rest keeps its hits; what live requests hold there is moved to free slots
below, rows and every reference to them, between two steps. Nothing is waited for and no request is ended:
what does not fit below stays where it is, and the caller tries again later.

Knows SGLang's RadixCache and ChunkCache (no prefix cache); owns no state but the number of mapped slots.
"""

import logging

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

log = logging.getLogger("xpool")


def _beginnings(nodes, first):
    """Where in each node the first slot from `first` on lies, None where there is none: one answer of the
    device for all of them."""
    if not nodes:
        return []
    over = (torch.cat([node.value for node in nodes]) >= first).cpu()
    parts = over.split([len(node.value) for node in nodes])
    return [int(part.to(torch.uint8).argmax()) if bool(part.any()) else None for part in parts]


class Room:
    """`requests()` gives the live requests; `table` is SGLang's ReqToTokenPool. `mapped` slots have memory,
    whole bundles of `bundle_tokens`; those below `allocator.limit` are handed out."""

    def __init__(self, allocator, tree, pool, table, requests, bundle_tokens, mapped):
        self.allocator, self.tree, self.pool, self.table = allocator, tree, pool, table
        self.requests = requests
        self.bundle_tokens, self.mapped = bundle_tokens, mapped
        self._puzzled = False

    def whole(self, slots):
        """So many slots, rounded up to whole bundles."""
        return -(-slots // self.bundle_tokens) * self.bundle_tokens

    def needed(self):
        """Slots that hold all that live requests hold, slot 0 with them."""
        return self.allocator.used() - self.tree.evictable_size() + 1

    def grow(self, slots):
        """Slots below `slots` have memory now: they are handed out."""
        self._expose(slots)
        self.mapped = slots

    def shrink(self, goal):
        """Hands out no slot from `goal` on and empties what can be. Returns how many slots, whole bundles,
        have to keep their memory: `goal` when nothing is left above it. The caller takes the rest away."""
        allocator = self.allocator
        if allocator.limit < min(self.mapped, allocator.size + 1):
            self._expose(self.mapped)
        self._evict_from(goal)
        over = allocator.used() - (goal - 1)
        if over > 0:
            self.tree.evict(EvictParams(num_tokens=over))
        keep = min(max(goal, self.whole(allocator.used() + 1)), self.mapped)
        held = self._held(keep)
        free = int((allocator.free_pages >= keep).sum() + (allocator.release_pages >= keep).sum())
        if len(held) + free != allocator.limit - min(keep, allocator.limit):
            # Somebody holds slots that are in none of the places looked at. They stay.
            if not self._puzzled:
                log.warning("%d KV slots are held by nobody known: no memory is given away",
                            allocator.limit - keep - free - len(held))
                self._puzzled = True
            return self.mapped
        self._puzzled = False
        allocator.withdraw(min(keep, allocator.limit))
        self._move(held)
        if goal < allocator.limit:
            allocator.withdraw(goal)
        self.mapped = keep
        return keep

    def trim(self):
        """Drops the whole prefix cache."""
        self.tree.evict(EvictParams(num_tokens=self.tree.evictable_size()))

    def _expose(self, slots):
        # An earlier shrink that is not at its goal has left slots in use above the limit.
        limit = self.allocator.limit
        held = self._held(limit) if limit < self.mapped else None
        self.allocator.expose(slots, held)

    # --- who holds what -------------------------------------------------------------------------------

    def _nodes(self, first):
        """The nodes of the prefix cache with a slot from `first` on."""
        root = getattr(self.tree, "root_node", None)
        nodes = [] if root is None else list(root.children.values())
        for node in nodes:
            nodes += node.children.values()
        return [node for node, at in zip(nodes, _beginnings(nodes, first), strict=True) if at is not None]

    def _rows(self):
        """(request, its row of the table, as far as it is used)."""
        for request in self.requests():
            if request.req_pool_idx is not None and request.kv_allocated_len > 0:
                yield request, self.table.req_to_token[request.req_pool_idx, : request.kv_allocated_len]

    def _held(self, first):
        """The slots from `first` on that somebody holds, sorted."""
        parts = [node.value for node in self._nodes(first)]
        parts += [row.to(torch.int64) for _, row in self._rows()]
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=self.allocator.device)
        slots = torch.cat(parts)
        return torch.unique(slots[slots >= first])

    # --- emptying -------------------------------------------------------------------------------------

    def _evict_from(self, first):
        """Evicts what only the cache holds from slot `first` on, leaf by leaf. A leaf that lies there in
        part keeps what is in front of that, and its age."""
        tree = self.tree
        # Sets are ordered by addresses, which are others in every rank.
        leaves = sorted(getattr(tree, "evictable_leaves", ()), key=lambda node: node.id)
        leaves = [one for one in zip(leaves, _beginnings(leaves, first), strict=True) if one[1] is not None]
        while leaves:
            leaf, kept = leaves.pop()
            if kept > 0:
                front = tree._split_node(leaf.key, leaf, kept)
                front.last_access_time, front.creation_time = leaf.last_access_time, leaf.creation_time
            parent = leaf.parent
            self.allocator.free(leaf.value)
            tree._delete_leaf(leaf)
            tree._record_remove_event(leaf)
            if kept == 0 and parent in tree.evictable_leaves:
                (kept,) = _beginnings([parent], first)
                if kept is not None:
                    leaves.append((parent, kept))

    def _move(self, held):
        """Moves the tokens in slots `held`, which are withdrawn, to the lowest free ones."""
        if len(held) == 0:
            return
        first = int(held[0])
        to = self.allocator.alloc(len(held))
        self.pool.move_kv_cache(to, held)
        place = torch.arange(self.allocator.size + 1, dtype=torch.int64, device=held.device)
        place[held] = to
        for node in self._nodes(first):
            node.value = place[node.value]
        for request, row in self._rows():
            row.copy_(place[row.to(torch.int64)])
            if len(request.prefix_indices) > 0:
                request.prefix_indices = place[request.prefix_indices.to(torch.int64)]
        self.allocator.lent += len(held)
