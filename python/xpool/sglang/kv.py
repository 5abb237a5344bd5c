# SPDX-License-Identifier: MIT
"""The elastic KV Cache along SGLang's scheduler.

    before the pools are made   open the range; its size is what SGLang takes for its capacity
    between two steps           apply the daemon's commands, report what is held and wanted
    a prefill without room      waits, and the daemon learns how much it needs and by when
    a decode without room       waits likewise; SGLang would retract requests, and end the last one
    idle                        the check for leaks knows what is lent out

Where steps overlap (as SGLang has it on GPUs), one is under way while the next is prepared. What moves
tokens, ends or retracts requests then waits until none is: for one round none is begun, and the one under
way is taken to its end.

A step is one round of the scheduler's loop. Ranks of one group are in step, since each round begins with
a broadcast from rank 0; what rank 0 alone knows (a grow that all have mapped, the ceiling of now, up to
where it may admit, that patience is at an end) travels in it. Everything else that decides about slots is
the same in all of them: no clock, no address and no device that is slower takes part. Data parallel ranks
are groups of their own: one that waits or pauses hands SGLang no batch, and takes part in the step of the
others without rows.
"""

import logging
import time
from collections import namedtuple
from http import HTTPStatus

from xpool import kv as kvs, ops
from xpool.native import XpoolError
from xpool.sglang import failure, patch

log = logging.getLogger("xpool")

_MIXIN = "sglang.srt.model_executor.model_runner_kv_cache_mixin"
_SCHEDULER = "sglang.srt.managers.scheduler"
_POLICY = "sglang.srt.managers.schedule_policy"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker"
_OBSERVER = "sglang.srt.managers.scheduler_components.pool_stats_observer"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"

# Where an elastic KV Cache and SGLang's arguments do not go together.
_REFUSED = (
    ("page_size", (1,), "its slots are moved one by one"),
    ("enable_hierarchical_cache", (False,), "it copies layers that are contiguous"),
    ("enable_lmcache", (False,), "it copies layers that are contiguous"),
    ("enable_streaming_session", (False,), "a session would hold memory while nothing runs"),
    ("radix_cache_backend", (None, ""), "only SGLang's own prefix cache is known"),
    ("disaggregation_decode_enable_radix_cache", (False,), "prefill and decode stay in one Instance"),
)
_REFUSED_FOR_RANKS = (("scheduler_recv_interval", (1,), "its ranks meet at the beginning of every step"),)
_REFUSED_ON_GPU = (
    ("attention_backend", ("triton",), "its layers are strided, which other backends do not expect"),
    ("decode_attention_backend", (None, "triton"), "its layers are strided"),
    ("prefill_attention_backend", (None, "triton"), "its layers are strided"),
    ("enable_memory_saver", (False,), "its memory is the daemon's"),
)

# How long a decode waits for memory before requests are retracted for it, and before the last one is.
PATIENCE_NS = 5_000_000_000
REFUSED_PATIENCE_NS = 500_000_000  # when the daemon has said that there is none
LAST_PATIENCE = 4  # times as long
RELEASES = 150  # how often a rank of several asks its device, which looks for 0.2 s each time

_TAG = "xpool-kv"  # the first item of what rank 0 adds to the requests of a round
Word = namedtuple("Word", "ceiling admit retract grow trim")
Demand = namedtuple("Demand", "kind tokens since deadline request")

_kv = None
_elastic = None


class Elastic:
    """The scheduler of this process and its part of the memory. Used by the scheduler's thread only."""

    def __init__(self, scheduler, kv, room, slo, group_ranks, clock=time.monotonic_ns):
        self.scheduler, self.kv, self.room = scheduler, kv, room
        self.ttft_ns, self.tbt_ns = (int(ms * 1e6) for ms in slo)
        self.group_ranks, self.clock = group_ranks, clock
        self.step = 0
        info = self.kv.info()
        self.word = Word(info.ceiling_tokens, info.admit_tokens, False, 0, False)
        self.pending = None  # a command to shrink that waits until no step is under way,
        self.rounds = 0  # and for how many rounds it has
        self.pause = False  # no step is begun in this round
        self.owed = None  # slots that stay, of a release that the device was not ready for
        self.grown = None  # a grow that rank 0 has yet to tell
        self.told = None  # the last Word that it told
        self.goal = room.mapped  # slots that the daemon wants to remain
        self.left = None  # what was held when the last shrink came to its end
        self.held = None  # a batch whose decode waits
        self.decode_since = None
        self.prefill = self.decode = None  # Demand
        self.last_step_ns = self.clock()
        self.unfit = []

    # --- commands ---------------------------------------------------------------------------------

    def begin(self, word):
        """One step begins: what rank 0 says, then what the channel says."""
        self.step = (self.step + 1) & 0xFFFFFFFF
        if word.admit > self.word.admit:
            self.scheduler.running_batch.batch_is_full = False
        self.word = word
        if word.grow:
            self._grow(word.grow, word.trim)
        self.pause = False
        if self.owed is not None:
            self._release(self.owed)
        command = self.kv.poll(self.step, self.room.needed()) if self.owed is None else None
        if command is None:
            self._shrink_further()
        elif command.kind == kvs.SHRINK:
            self.pending, self.rounds = command, 0
        elif self.group_ranks > 1:
            self.grown = command
        else:
            self.pending = None
            self._grow(command.tokens, command.trim)
        if self.pending is not None:
            self._shrink_when_quiet()
        if self.kv.leader:
            self.report()

    def _shrink_when_quiet(self):
        if self._granted_since(self.pending.tokens):
            self.pending = None
        elif self._quiet():
            self._shrink_to(self.pending)
            self.pending = None
        else:
            self.rounds += 1
            if self.rounds == 2:  # SGLang is paused in the middle of a step: what it has, it keeps until then
                self._release(self.room.mapped)

    def _granted_since(self, goal):
        """Whether the ranks have mapped more than a shrink to `goal` leaves; rank 0 will tell how much."""
        return self.group_ranks > 1 and self.kv.info().goal_tokens > goal

    def next_word(self):
        """What rank 0 says at the beginning of the next step."""
        grown, self.grown = self.grown, None
        info = self.kv.info()
        return Word(
            info.ceiling_tokens,
            info.admit_tokens,
            self._patience_over(),
            grown.tokens if grown else 0,
            bool(grown and grown.trim),
        )

    def _grow(self, tokens, trim):
        if trim:
            self.room.trim()
        self._release(tokens)  # another rank may have got less
        self.room.grow(tokens)
        self.goal = tokens
        self.scheduler.running_batch.batch_is_full = False

    def _release(self, slots):
        """Gives back what is above; a device that still works on it is asked again in the next step. Ranks of
        one group wait instead: who takes the next command a step later is out of step for good."""
        released = self.kv.release(slots, self.stream())
        if self.group_ranks > 1:
            asked = 1
            while not released:
                if asked == RELEASES:
                    raise XpoolError(f"the GPU still works with KV slots that were given up, asked {asked} times")
                released = self.kv.release(slots, self.stream())
                asked += 1
        self.owed = None if released else slots

    def stream(self):
        """On a GPU: behind everything that may use the KV Cache."""
        if self.kv.device < 0:
            return 0
        import torch

        stream, forward = torch.cuda.current_stream(), getattr(self.scheduler, "forward_stream", None)
        if forward is not None:
            stream.wait_stream(forward)
        return stream.cuda_stream

    def under_way(self):
        """Whether a step runs whose result the scheduler has yet to take."""
        queue = getattr(self.scheduler, "result_queue", ())
        return any(not batch.forward_mode.is_idle() for batch, _ in queue)

    def _quiet(self):
        """Whether no step is under way; else none is begun in this round, so that none is in the next."""
        self.pause = self.under_way()
        return not self.pause

    def _shrink_to(self, command):
        if command.trim:
            self.room.trim()
        self.goal = command.tokens
        self._shrink()

    def _shrink(self):
        self._release(self.room.shrink(self.goal))
        self.left = self._state()

    def _shrink_further(self):
        """Live requests had more than the goal; they may have left some, or left it to the prefix cache."""
        if self.pending is not None or self.room.mapped <= self.goal or self._state() == self.left:
            return
        if self._granted_since(self.goal):
            return
        if self.under_way():
            # What decodes takes does not interrupt it; the daemon asks again, should that hide what others left.
            used, cached = self._state()
            if self.left is not None and used - cached >= self.left[0] - self.left[1] and cached <= self.left[1]:
                return
        if self._quiet():
            self._shrink()

    def _state(self):
        return self.room.allocator.used(), self.room.tree.evictable_size()

    def most(self):
        """Slots this group may ever have as things are."""
        return min(self.word.ceiling, self.room.allocator.size + 1)

    def can_grow(self):
        return self.kv.elastic and self.room.allocator.limit < self.most()

    # --- prefill ----------------------------------------------------------------------------------

    def next_prefill(self, original):
        scheduler = self.scheduler
        waiting = scheduler.waiting_queue
        if self.pause:
            return None
        if self.prefill and not any(request is self.prefill.request for request in waiting):
            self.prefill = None
        chunked = scheduler.chunked_req
        if chunked is not None:
            remaining = len(chunked.full_untruncated_fill_ids) - len(chunked.prefix_indices)
            if self._obtainable() < min(remaining, scheduler.chunked_prefill_size):
                self._want_rest(chunked, remaining)
                return None
            self.decode_since = self.decode = None
        if scheduler.running_batch.is_empty():
            scheduler.running_batch.batch_is_full = False
        if not scheduler.running_batch.batch_is_full:
            self.prefill = None
        self.unfit = []
        batch = original(scheduler)
        for request in self.unfit:
            self._refuse(request)
        return batch

    def _obtainable(self):
        """Slots that a step can have: free ones, and those that only the prefix cache holds. None of the
        latter is above the goal of a shrink, see _shrink_further."""
        return self.room.allocator.available_size() + self.room.tree.evictable_size()

    def _want_rest(self, request, remaining):
        """A prefill has begun and cannot go on."""
        self.decode_since = self.decode_since or self.clock()
        tokens = self.room.needed() + remaining + request.sampling_params.max_new_tokens
        self._want_live(tokens)

    def admit(self, original, adder, request, *arguments, **options):
        """PrefillAdder.add_one_req: what does not fit is wanted from the daemon."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

        have = len(request.origin_input_ids) + len(request.output_ids)
        # SGLang admits what is strictly less than the free slots, and counts a page more.
        fitting = self.most() - 2 - adder.page_size - have
        parameters = request.sampling_params
        if fitting < 1:
            self.unfit.append(request)
            return AddReqResult.NO_TOKEN
        begun = sum(one.extend_input_len for one in adder.can_run_list)
        if self.room.needed() + begun + request.extend_input_len > self.word.admit:
            return AddReqResult.NO_TOKEN  # another Instance waits for what live requests have here
        if parameters.max_new_tokens - len(request.output_ids) > fitting:
            # As SGLang does when a request comes, by the capacity of then.
            parameters.max_new_tokens = len(request.output_ids) + fitting
        result = original(adder, request, *arguments, **options)
        if result == AddReqResult.NO_TOKEN and request not in adder.can_run_list:
            new = min(max(parameters.max_new_tokens - len(request.output_ids), 0), CLIP_MAX_NEW_TOKENS)
            total = request.extend_input_len + new + adder.page_size
            short = total - int(adder.rem_total_tokens) + 1
            if short <= 0:  # its own prefix counted as room
                short = max(short + len(request.prefix_indices), 1)
            self._want_prefill(request, self.room.allocator.limit + short)
        return result

    def _want_prefill(self, request, tokens):
        since = self.arrived(request)
        deadline = since + self.ttft_ns if self.ttft_ns else kvs.NO_DEADLINE
        self.prefill = Demand(kvs.PREFILL, min(tokens, self.most()), since, deadline, request)

    def arrived(self, request):
        """When this process saw the request first."""
        if not hasattr(request, "xpool_arrived_ns"):
            request.xpool_arrived_ns = self.clock()
        return request.xpool_arrived_ns

    def _refuse(self, request):
        """A prompt that has no room under the ceiling, which was higher when it came."""
        scheduler = self.scheduler
        scheduler.waiting_queue.remove(request)
        scheduler.running_batch.batch_is_full = False
        text = (
            f"the prompt has {len(request.origin_input_ids)} tokens, and the KV Cache of this model"
            f" at most {self.most()}"
        )
        self._abort(request, text, HTTPStatus.BAD_REQUEST)

    def _abort(self, request, text, status):
        from sglang.srt.managers.io_struct import AbortReq
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        reason = FINISH_ABORT(text, status_code=status).to_json()
        self.scheduler.ipc_channels.send_to_tokenizer.send_output(
            AbortReq(finished_reason=reason, rid=request.rid), request
        )

    # --- decode -----------------------------------------------------------------------------------

    def next_decode(self, original, batch):
        """Scheduler.update_running_batch: a decode without room waits, its batch is `held` meanwhile."""
        before = len(batch.reqs)
        batch.filter_batch(v1_spec_info_filtered=True)
        if len(batch.reqs) < before:
            batch.batch_is_full = False
        if self.pause:
            return self._put_aside(batch)
        if self.can_grow() and not self._has_room(batch):
            if self.under_way():
                return self._hold(batch)
            self._drop_aborted(batch)
            if self.word.retract and not self._has_room(batch):
                self._retract(batch)
            if not self._has_room(batch):
                return self._hold(batch)
        if self.scheduler.chunked_req is None:
            self.decode_since = self.decode = None
        return original(self.scheduler, batch)

    def _has_room(self, batch):
        return batch.is_empty() or batch.check_decode_mem()

    def _hold(self, batch):
        self.decode_since = self.decode_since or self.clock()
        free = self.room.allocator.available_size()
        wanted = max(batch.new_tokens_required_next_decode() - free, 1)
        self._want_live(self.room.allocator.limit + wanted)
        return self._put_aside(batch)

    def _put_aside(self, batch):
        """SGLang sees no decode in this round."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        self.held = batch
        return ScheduleBatch(reqs=[], batch_is_full=batch.batch_is_full)

    def _want_live(self, tokens):
        deadline = self.last_step_ns + self.tbt_ns if self.tbt_ns else kvs.NO_DEADLINE
        # The name of a demand does not change while it lasts.
        self.decode = Demand(kvs.DECODE, min(tokens, self.most()), self.decode_since, deadline, None)

    def _drop_aborted(self, batch):
        """A request that is to end would end in its next step, for which there is no room."""
        kept = []
        for index, request in enumerate(batch.reqs):
            if request.to_finish is None:
                kept.append(index)
                continue
            reason = request.to_finish
            batch.release_req(index, len(batch.reqs), self.scheduler.server_args)
            self._abort(request, reason.message, getattr(reason, "status_code", None))
        if len(kept) < len(batch.reqs):
            batch.filter_batch(keep_indices=kept)
            batch.batch_is_full = False

    def _patience_over(self):
        """Rank 0: whether the decode that waits has waited long enough for requests to be retracted."""
        if self.decode_since is None:
            return False
        patience = REFUSED_PATIENCE_NS if self.kv.refused() else PATIENCE_NS
        if len(self.scheduler.running_batch.reqs) == 1 and self.scheduler.chunked_req is None:
            patience *= LAST_PATIENCE
        return self.clock() - self.decode_since > patience

    def _retract(self, batch):
        """Puts the request that has got the least back into the queue; it begins anew later."""
        requests = batch.reqs
        index = min(
            range(len(requests)),
            key=lambda i: (len(requests[i].output_ids), -len(requests[i].origin_input_ids)),
        )
        request = requests[index]
        log.warning("no KV memory for the next step of %d requests: %s is retracted", len(requests), request.rid)
        batch.release_req(index, len(requests) - 1, self.scheduler.server_args)
        batch.filter_batch(keep_indices=[i for i in range(len(requests)) if i != index])
        batch.batch_is_full = False
        self.decode_since = self.clock()
        self.scheduler._add_request_to_queue(request, is_retracted=True)

    def retract_chunked(self):
        """The same for a prefill that cannot go on while nothing else runs."""
        scheduler = self.scheduler
        request = scheduler.chunked_req
        if request is None or not self.word.retract or not scheduler.running_batch.is_empty():
            return
        from sglang.srt.managers.schedule_batch import release_req

        log.warning("no KV memory for the rest of a prompt: %s is retracted", request.rid)
        release_req(
            req=request,
            remaing_req_count=0,
            server_args=scheduler.server_args,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        scheduler.chunked_req = None
        self.decode_since = self.decode = None
        scheduler._add_request_to_queue(request, is_retracted=True)

    # --- one round of the scheduler's loop ----------------------------------------------------------

    def next_batch(self, original):
        batch = original(self.scheduler)
        if self.held is not None:
            self.scheduler.running_batch, self.held = self.held, None
        if batch and not batch.forward_mode.is_idle():
            self.last_step_ns = self.clock()
        else:
            if self.decode is not None and not self.under_way():
                self.retract_chunked()
            if not self.scheduler.is_fully_idle():
                # Nothing runs, so no answer shows that the scheduler is well.
                self.scheduler.maybe_send_health_check_signal()
        return batch

    def report(self):
        scheduler = self.scheduler
        if scheduler.running_batch.is_empty() and scheduler.chunked_req is None:
            self.decode_since = self.decode = None  # who waited was ended or put back from outside
        running = len(scheduler.running_batch.reqs) + (scheduler.chunked_req is not None)
        demand = self.decode or self.prefill
        if demand is not None and demand.tokens <= self.room.allocator.limit:
            demand = None
        values = {}
        if demand is not None:
            values = {
                "demand": demand.kind,
                "demand_tokens": demand.tokens,
                "demand_since_ns": demand.since,
                "demand_deadline_ns": demand.deadline,
            }
        self.kv.report(
            live_tokens=self.room.needed(),
            cached_tokens=self.room.tree.evictable_size(),
            running=running,
            waiting=len(scheduler.waiting_queue),
            last_activity_ns=self.last_step_ns,
            earliest_deadline_ns=(
                self.last_step_ns + self.tbt_ns if running and self.tbt_ns else kvs.NO_DEADLINE
            ),
            **values,
        )


# --- opening the range -----------------------------------------------------------------------------------


def _check_arguments(arguments, gpu=False):
    otherwise = ', or set scheduler.kv_policy = "static" and restart the daemon' if gpu else ""
    ranks = arguments.tp_size // (arguments.dp_size if arguments.enable_dp_attention else 1)
    refused = _REFUSED + (_REFUSED_ON_GPU if gpu else ()) + (_REFUSED_FOR_RANKS if ranks > 1 else ())
    for name, allowed, reason in refused:
        value = getattr(arguments, name)
        if value not in allowed:
            raise XpoolError(
                f"--{name.replace('_', '-')} is {value}, which an elastic KV Cache cannot work with: {reason};"
                f" leave it at {allowed[0]}{otherwise}"
            )


@failure.fatal
def _open(runner):
    """The range for this rank, or None when the daemon keeps no account of it."""
    global _kv
    from xpool.sglang import kv_pool

    try:
        kv = kvs.Kv(ops.attached(), _token_bytes(runner))
    except XpoolError as error:
        if error.status != kvs.UNSUPPORTED:
            raise
        log.info("the KV Cache is SGLang's own: %s", error)
        return
    _check_arguments(runner.server_args, kv.device >= 0)
    _kv = kv
    kv_pool.MhaPool.range = kv_pool.MlaPool.range = kv
    kv_pool.Allocator.first_limit = kv.info().mapped_tokens
    log.info(
        "KV Cache: %d tokens of %d have memory now, in bundles of %d",
        kv.info().mapped_tokens,
        kv.reserved_tokens,
        kv.bundle_tokens,
    )


def _config(original, runner, *arguments, **options):
    _open(runner)
    return original(runner, *arguments, **options)


def _constraints(original, runner, capacity):
    """SGLang's capacity is the range's; slot 0 belongs to nobody."""
    if _kv is None:
        return original(runner, capacity)
    most = _kv.reserved_tokens - 1
    return min(most, runner.server_args.max_total_tokens or most)


def _profile(original, runner, *arguments, **options):
    """What SGLang believes to have for its pool on a GPU: the range, or the share that the plan gives it. What
    is free at this moment says nothing where others start beside it, so nobody looks."""
    rank, most = ops.attached(), runner.server_args.max_total_tokens
    if rank is None or rank.device is None or (_kv is None and most is None):
        return original(runner, *arguments, **options)
    if _kv is not None:
        return _kv.reserved_tokens * _kv.token_bytes
    return most * _token_bytes(runner)


def _token_bytes(runner):
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    return DefaultPoolConfigurator(runner)._cell_size


def mapped_bytes():
    """Bytes behind the KV Cache of this rank, or None when SGLang's own pool holds it."""
    return None if _kv is None else _kv.info().mapped_tokens * _kv.token_bytes


def _make(scheduler):
    global _elastic
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from xpool.sglang import kv_pool, rank
    from xpool.sglang.kv_room import Room

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    pool = allocator.get_kvcache()
    if type(allocator) is not kv_pool.Allocator or type(pool) not in (kv_pool.MhaPool, kv_pool.MlaPool):
        raise XpoolError(
            f"SGLang made a {type(pool).__name__} and a {type(allocator).__name__}, which are not xpool's:"
            " this model's attention cannot have an elastic KV Cache"
        )
    if type(tree) not in (RadixCache, ChunkCache):
        raise XpoolError(f"the prefix cache {type(tree).__name__} is not known to an elastic KV Cache")

    def requests():
        found = {}
        for batch in (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch):
            if batch is not None:
                found.update((id(request), request) for request in batch.reqs)
        if scheduler.chunked_req is not None:
            found[id(scheduler.chunked_req)] = scheduler.chunked_req
        return found.values()

    room = Room(
        allocator,
        tree,
        pool,
        scheduler.req_to_token_pool,
        requests,
        _kv.bundle_tokens,
        _kv.info().mapped_tokens,
    )
    _elastic = Elastic(scheduler, _kv, room, rank.slo(), scheduler.ps.attn_tp_size)
    _kv.captured()  # graphs are captured before the first round of the scheduler
    if scheduler.idle_sleeper is not None and _kv.info().bell >= 0:
        import zmq

        scheduler.idle_sleeper.poller.register(_kv.info().bell, zmq.POLLIN)


# --- hooks -------------------------------------------------------------------------------------------------


@failure.fatal
def _begin(scheduler, requests):
    if _elastic is None:
        _make(scheduler)
    if _elastic.group_ranks == 1:
        word = _elastic.next_word()
    else:
        words = [one for one in requests if type(one) is tuple and one[0] == _TAG]
        requests = [one for one in requests if not (type(one) is tuple and one[0] == _TAG)]
        word = Word(*words[-1][1:]) if words else _elastic.word._replace(grow=0, trim=False)
    _elastic.begin(word)
    return requests


def _process(original, scheduler, requests):
    if _kv is not None:
        requests = _begin(scheduler, requests)
    return original(scheduler, requests)


def _pull(original, receiver):
    requests = original(receiver)
    if requests is not None and _elastic is not None and _elastic.group_ranks > 1 and _elastic.kv.leader:
        word = _elastic.next_word()
        if word != _elastic.told:
            requests.append((_TAG, *word))
        _elastic.told = word
    return requests


def _next_batch(original, scheduler):
    return original(scheduler) if _elastic is None else _elastic.next_batch(original)


def _next_prefill(original, scheduler):
    return original(scheduler) if _elastic is None else _elastic.next_prefill(original)


def _next_decode(original, scheduler, batch):
    return original(scheduler, batch) if _elastic is None else _elastic.next_decode(original, batch)


def _admit(original, adder, request, *arguments, **options):
    if _elastic is None:
        return original(adder, request, *arguments, **options)
    return _elastic.admit(original, adder, request, *arguments, **options)


def _queue(original, scheduler, request, *arguments, **options):
    if _elastic is not None:
        _elastic.arrived(request)
    return original(scheduler, request, *arguments, **options)


def _lent(allocator):
    return getattr(allocator, "lent", 0)


def _check_full(original, checker, stats, *arguments, **options):
    """Slots without memory are no leak."""
    import dataclasses

    lent = _lent(checker.token_to_kv_pool_allocator)
    stats = dataclasses.replace(stats, full_available_size=stats.full_available_size + lent)
    return original(checker, stats, *arguments, **options)


def _token_info(original, observer):
    """Slots without memory are not used either."""
    stats = original(observer)
    stats.full_num_used -= _lent(observer.token_to_kv_pool_allocator)
    stats.full_token_usage = stats.full_num_used / observer.max_total_num_tokens
    return stats


def hook():
    from xpool.sglang import kv_pool

    patch.replace(_MIXIN, "MHATokenToKVPool", kv_pool.MhaPool)
    patch.replace(_MIXIN, "MLATokenToKVPool", kv_pool.MlaPool)
    patch.replace(_MIXIN, "TokenToKVPoolAllocator", kv_pool.Allocator)
    patch.around(_MIXIN, "ModelRunnerKVCacheMixin._resolve_memory_pool_config", _config)
    patch.around(_MIXIN, "ModelRunnerKVCacheMixin._profile_available_bytes", _profile)
    patch.around(_MIXIN, "ModelRunnerKVCacheMixin._apply_token_constraints", _constraints)
    patch.around(_RECEIVER, "SchedulerRequestReceiver._pull_raw_reqs", _pull)
    patch.around(_SCHEDULER, "Scheduler.process_input_requests", _process)
    patch.around(_SCHEDULER, "Scheduler.get_next_batch_to_run", _next_batch)
    patch.around(_SCHEDULER, "Scheduler.get_new_batch_prefill", _next_prefill)
    patch.around(_SCHEDULER, "Scheduler.update_running_batch", _next_decode)
    patch.around(_SCHEDULER, "Scheduler._add_request_to_queue", _queue)
    patch.around(_POLICY, "PrefillAdder.add_one_req", _admit)
    patch.around(_CHECKER, "SchedulerInvariantChecker._check_full_pool", _check_full)
    patch.around(_OBSERVER, "SchedulerPoolStatsObserver._get_token_info", _token_info)
