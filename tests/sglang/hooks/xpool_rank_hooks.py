# SPDX-License-Identifier: MIT
"""What tests want of the elastic KV Cache in SGLang's ranks; never part of the product.

Loaded by SGLang as the plugin `xpool_rank_hooks` beside the plugin `xpool`, in schedulers only.

- XPOOL_TEST_KV_STATES=FOLDER: each rank writes to a file there, whenever it changes, a digest of all that
  decides about its slots at the beginning of a step: "STEP DIGEST", and " moved" where the slots with memory, those
  that may be used or the goal have changed. Tensor parallel ranks must write the same. On a GPU, which would be
  waited for, only then.
- XPOOL_TEST_KV_DEATH=FILE: while it holds "RANK POINT", that rank ends by SIGKILL when it comes to that point
  of an operation, having renamed the file to FILE.done.
"""

import hashlib
import os
import signal

POINTS = (
    "shrink.told",  # the command is there, nothing is done
    "shrink.emptied",  # evicted and moved, the memory is still there
    "shrink.released",
    "grow.mapped",  # perhaps not in all ranks yet
    "grow.told",  # all have mapped, nothing is handed out
    "grow.exposed",
)

_rank = None
_file = None
_last = _sizes = None


def point(name):
    path = os.environ.get("XPOOL_TEST_KV_DEATH")
    if path is None or not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        wanted = file.read().split()
    if wanted == [str(_rank), name]:
        os.rename(path, path + ".done")
        os.kill(os.getpid(), signal.SIGKILL)


def digest(elastic):
    room, scheduler = elastic.room, elastic.scheduler
    allocator, tree = room.allocator, room.tree
    running = [(r.rid, len(r.output_ids), r.kv_allocated_len) for r in scheduler.running_batch.reqs]
    waiting = [r.rid for r in scheduler.waiting_queue]
    found = hashlib.sha256(
        repr((room.mapped, elastic.goal, elastic.word, allocator.limit, allocator.lent, running, waiting)).encode()
    )
    found.update(allocator.free_pages.cpu().numpy().tobytes())
    found.update(allocator.release_pages.cpu().numpy().tobytes())
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        found.update(bytes(node.key.token_ids) + node.value.cpu().numpy().tobytes() + bytes([min(node.lock_ref, 255)]))
    for leaf in sorted(tree.evictable_leaves, key=lambda node: node.last_access_time):
        found.update(bytes(leaf.key.token_ids))
    return found.hexdigest()[:16]


def write_state(elastic):
    global _file, _last, _sizes
    folder = os.environ.get("XPOOL_TEST_KV_STATES")
    if folder is None:
        return
    if _file is None:
        _file = open(os.path.join(folder, f"{_rank}.{os.getpid()}"), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    before, _sizes = _sizes, (elastic.room.mapped, elastic.room.allocator.limit, elastic.goal)
    if elastic.kv.device >= 0 and _sizes == before:
        return
    found = digest(elastic)
    if found != _last:
        _file.write(f"{elastic.step} {found}{'' if _sizes == before else ' moved'}\n")
        _last = found


def install():
    from xpool.sglang import failure

    if failure.is_main():
        return
    from xpool import kv as kvs
    from xpool.sglang import kv, kv_room

    begin, poll, release = kv.Elastic.begin, kvs.Kv.poll, kvs.Kv.release
    shrink, grow = kv_room.Room.shrink, kv_room.Room.grow

    def begin_and_write(elastic, word):
        global _rank
        _rank = elastic.scheduler.ps.tp_rank
        begin(elastic, word)
        write_state(elastic)

    def poll_and_pass(self, step, least):
        before = self.info().mapped_tokens
        command = poll(self, step, least)
        if command is not None and command.kind == kvs.SHRINK:
            point("shrink.told")
        elif self.info().mapped_tokens > before:
            point("grow.mapped")
        return command

    def shrink_and_pass(self, goal):
        kept = shrink(self, goal)
        point("shrink.emptied")
        return kept

    def release_and_pass(self, tokens, stream=0):
        before = self.info().mapped_tokens
        released = release(self, tokens, stream)
        if self.info().mapped_tokens < before:
            point("shrink.released")
        return released

    def grow_and_pass(self, slots):
        point("grow.told")
        grow(self, slots)
        point("grow.exposed")

    kv.Elastic.begin, kvs.Kv.poll, kvs.Kv.release = begin_and_write, poll_and_pass, release_and_pass
    kv_room.Room.shrink, kv_room.Room.grow = shrink_and_pass, grow_and_pass
