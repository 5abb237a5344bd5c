// SPDX-License-Identifier: MIT
// The whole FFN of one layer for 1 to 16 rows, of experts to 32, in one cooperative launch: router, gate and up, down.
//
// Few rows make this a matter of streaming weights. Every warp does the same: it copies weights into a
// ring of its own in shared memory (cp.async, 16 bytes a lane), multiplies what has come on tensor
// cores, and starts the next copy into that place. Nobody waits for another warp to get or to free
// a place, so a few warps suffice, and what is under way is what the ring holds.
//
//   slot    a tile of 16 weight rows by a unit of the inner dimension: one copy, one wait
//   unit    at most BYTES of each row, so many that the warps get equal numbers of them
//   pass    up to TILES tiles over the whole inner dimension; the units of a pass go round the warps,
//           and the warps' sums are added in the warps' order when the pass ends. The input rows'
//           piece of a unit is loaded once for all tiles of the pass, a unit ahead
//   gate    a block owns a range of (gate row, up row) pairs over all chosen parts; a tile is 8 gate
//           rows above their 8 up rows, so that one lane holds both sums of a pair
//   down    a block owns a range of output columns. That of experts goes otherwise: decode_pairs.cuh
//
// Layers of experts and dense ones are instantiations of their own: neither pays for what the other needs.
//
// Copies run ahead over all borders: passes, the barrier between gate and down (weights depend on
// nothing), and, in the resident kernel, from one layer to the next: the first weights of a dense
// layer, the router of a layer of experts.
//
// Which warp multiplies which part of the inner dimension depends on the layer's shape alone. So a row
// gives the same bits alone and among others, and whichever block has its pairs. Lanes read 16
// contiguous bytes of a row as four K pairs of two products; rows and weights use the same order of K,
// so it does not matter which.
//
// A layer of experts is short, and a trip to L2 and back takes as long as 5 MB of weights. So a logit is
// one word with the Invocation's number in it, which all blocks look for at once and choose by
// themselves; and what describes a layer is fetched while another one runs.
//
// Nothing waits without a partner that is already running: the launch is cooperative. Needs sm_90.
#include <stddef.h>

#include "ffn/cuda/command.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
#include "ffn/cuda/decode_route.cuh"
#include "ffn/cuda/decode_stream.cuh"

// ---- one layer -----------------------------------------------------------------------------------
// What every thread keeps between layers.
struct decode_role_t {
    decode_cursor_t cursor;
    uint32_t slot;   // the next one to multiply
    uint32_t buffer; // of sums, the next
    uint64_t policy;
};

// Describes the layer in layers[which]; one warp.
static __device__ __forceinline__ void layer_fetch(decode_state_t &sh, uint32_t which,
                                                   const ffn_cuda_layer_t *at)
{
    const uint32_t lane = threadIdx.x % 32;
    decode_layer_t &layer = sh.layers[which];
    const ffn_cuda_layer_t l = *at;
    const uint32_t word = ((const uint32_t *)l.signature)[lane % (sizeof(ffn_cuda_signature_t) / 4)];
    const ffn_cuda_part_t first = l.parts[0];
    if (lane < sizeof(ffn_cuda_signature_t) / 4)
        ((uint32_t *)&layer.signature)[lane] = word;
    __syncwarp();
    if (lane == 0) {
        const ffn_cuda_signature_t &s = layer.signature;
        layer.at = at;
        layer.parts = l.parts;
        layer.router = l.router;
        layer.bias = l.bias;
        layer.usage = l.usage;
        layer.dense = first;
        layer.next = l.next;
        layer.last_width = s.experts ? s.shared_intermediate : s.intermediate;
        layer.unit[0] = unit_bytes(s.hidden * 2);
        layer.unit[1] = unit_bytes(layer.last_width * 2);
        if (s.experts)
            pairs_describe(&layer);
    }
    __syncwarp();
}

// Fills `held` from the Lane; one thread.
static __device__ __forceinline__ void lane_fetch(const ffn_cuda_lane_t *lane, decode_lane_t *held)
{
    const ffn_cuda_workspace_t &w = lane->workspace;
    uint32_t(*shares)[FFN_CUDA_MAX_BLOCKS + 1] = w.shares;
    const uint32_t number = block_number();
    held->lane = lane;
    held->meeting = w.meeting;
    held->logits = w.logits;
    held->activations = (char *)w.decode_activations;
    held->pitch = w.decode_pitch;
    held->cycles = w.cycles;
    held->trace = w.trace;
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t end = 0; end < 2; end++)
            held->share[i][end] =
                __ldcg(&shares[i][gridDim.x]) // 0: equal shares
                    ? __ldcg(&shares[i][number + end])
                    : (uint32_t)((uint64_t)(number + end) * FFN_CUDA_SHARE_ONE / gridDim.x);
}

// Once call.command is there: the Lane's description by warp 0, the layer's by warp 1.
static __device__ __forceinline__ void call_read(decode_state_t &sh, bool resident)
{
    decode_call_t &call = sh.call;
    if (threadIdx.x == 0) {
        decode_lane_t *held = &sh.lanes[call.command.lane_number % FFN_CUDA_MAX_LANES];
        if (!resident || held->lane != call.command.lane)
            lane_fetch(call.command.lane, held);
        call.lane = *held;
        call.experts_chosen = 0;
    }
    if (threadIdx.x / 32 != 1 || call.command.rows == 0)
        return;
    const ffn_cuda_layer_t *layer = call.command.layers + call.command.layer;
    const uint32_t now = sh.now;
    const bool same = sh.layers[now].at == layer, other = sh.layers[now ^ 1].at == layer;
    __syncwarp();
    if (!same && !other)
        layer_fetch(sh, now ^ 1, layer);
    if (threadIdx.x == 32 && !same) {
        sh.now = now ^ 1;
        sh.ahead = 0;
    }
    __syncwarp();
}

// Whether what was loaded ahead is what this Invocation begins with.
static __device__ __forceinline__ bool ahead_holds(const decode_state_t &sh)
{
    bool holds = sh.ahead;
    if (sh.layers[sh.now].signature.experts == 0)
        for (uint32_t i = 0; i < 4; i++)
            holds = holds && sh.call.lane.share[i / 2][i % 2] == sh.ahead_share[i / 2][i % 2];
    return holds;
}

// Makes the layer that should come next, where it is described, the current one; one thread, at the end
// of a layer.
static __device__ __forceinline__ void ahead_choose(decode_state_t &sh)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_layer_t *next = sh.call.command.layers + layer.next;
    const bool same = next == layer.at;
    sh.ahead = sh.look_ahead && layer.next != FFN_CUDA_NO_LAYER &&
               (same || sh.layers[sh.now ^ 1].at == next);
    if (!sh.ahead)
        return;
    sh.now ^= !same;
    sh.call.experts_chosen = 0;
    for (uint32_t i = 0; i < 4; i++)
        sh.ahead_share[i / 2][i % 2] = sh.call.lane.share[i / 2][i % 2];
}

// Describes the layer that should come after layers[now] in the other place, if that is not there yet;
// one warp.
static __device__ __forceinline__ void next_fetch(decode_state_t &sh, const ffn_cuda_layer_t *table)
{
    const decode_layer_t &layer = sh.layers[sh.now];
    const ffn_cuda_layer_t *next = table + layer.next;
    if (layer.next != FFN_CUDA_NO_LAYER && next != layer.at && sh.layers[sh.now ^ 1].at != next)
        layer_fetch(sh, sh.now ^ 1, next);
}

// Where a layer that was cut goes on: 0 is its beginning.
#define PLACE_DOWN 0x80000000u
static __device__ __forceinline__ uint32_t place_of(bool down, uint32_t pass)
{
    return (down ? PLACE_DOWN : 0) + pass + 1;
}

static __device__ __forceinline__ uint32_t place_pass(uint32_t place)
{
    return place ? (place & ~PLACE_DOWN) - 1 : 0;
}

// One thread, all of the block's values being written: the block arrives at the barrier after gate, once.
// began: 0 if the layer was cut, its time being no measure then.
static __device__ __forceinline__ void gate_arrive(const decode_call_t &call, uint32_t began)
{
    ptx_add_release(&call.lane.meeting->acted, 1);
    if (began)
        call.lane.cycles[0][block_number()] = (uint32_t)clock64() - began;
    decode_mark(call, 4);
}

// False: a cut has come before the others.
static __device__ __forceinline__ bool gate_wait(const decode_call_t &call, const decode_cuts_t &cuts)
{
    for (;;) {
        const uint32_t look = cuts.at ? ptx_load_relaxed_system(cuts.at) : 0;
        if (ptx_load_acquire(&call.lane.meeting->acted) >= call.acted_target)
            break;
        if (cuts.at && look == cuts.word)
            return false;
    }
    decode_mark(call, 5);
    return true;
}

// All threads, after gate and up: the barrier of all blocks. Meanwhile the layer that should come next
// is described. arrived: this block has been here, and was cut. False: it is cut.
static __device__ __forceinline__ bool dense_gate_end(decode_shared_t &shared, uint32_t began,
                                                      bool arrived)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    __syncthreads(); // all threads' values before the arrival
    if (threadIdx.x == 0) {
        if (!arrived)
            gate_arrive(call, began);
        shared.cuts.seen_waiting = !gate_wait(call, shared.cuts);
    } else if (threadIdx.x / 32 == DECODE_WARPS - 1) {
        next_fetch(sh, call.command.layers);
    }
    __syncthreads();
    return !shared.cuts.seen_waiting;
}

// The same of a layer of experts. Meanwhile down is prepared, and the coming layer is described if that
// was not done while the kernel waited for the command.
static __device__ __forceinline__ bool experts_gate_end(decode_shared_t &shared, uint32_t began,
                                                        bool arrived, const decode_cursor_t &cursor)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    __syncthreads(); // all threads' values before the arrival
    if (threadIdx.x == 0 && !arrived)
        gate_arrive(call, began);
    else if (threadIdx.x / 32 == DECODE_WARPS - 1 && sh.look_ahead)
        next_fetch(sh, call.command.layers);
    pairs_prefetch(cursor);
    pairs_prepare(sh);
    __syncwarp();
    if (threadIdx.x == 0)
        shared.cuts.seen_waiting = !gate_wait(call, shared.cuts);
    __syncthreads();
    return !shared.cuts.seen_waiting;
}

static __device__ __forceinline__ void down_end(decode_state_t &sh, uint32_t began)
{
    decode_call_t &call = sh.call;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (began)
            call.lane.cycles[1][block_number()] = (uint32_t)clock64() - began;
        decode_mark(call, 6);
        sh.table = call.command.layers;
        ahead_choose(sh); // the others are done with this layer
    }
    __syncthreads();
}

// All threads; sh.call is filled. From `place` on. Answers 0 with all of this block's outputs written, not
// yet visible, or where the layer goes on when it is cut.
template <typename T, int NB, bool EXPERTS>
static __device__ __forceinline__ uint32_t layer_phases(decode_shared_t &shared, decode_role_t *role,
                                                        bool hit, uint32_t place)
{
    decode_state_t &sh = shared.state;
    const decode_phase_t gate = phase_of<EXPERTS>(sh, false), down = phase_of<EXPERTS>(sh, true);
    uint32_t from = place_pass(place);
    if (EXPERTS || !hit) {
        cursor_begin<EXPERTS>(shared, gate, down, place & PLACE_DOWN, from, &role->cursor,
                              role->policy);
        role->slot = 0;
    }
    if constexpr (EXPERTS) {
        uint32_t began = place ? 0 : (uint32_t)clock64() | 1;
        const uint32_t done = phase_run<T, NB, true>(shared, false, gate, down, from, &role->cursor,
                                                     &role->slot, &role->buffer, role->policy);
        if (done < gate.passes)
            return place_of(false, done);
        if (!experts_gate_end(shared, began, place && from >= gate.passes, role->cursor))
            return place_of(false, gate.passes);
        began = (uint32_t)clock64() | 1;
        pairs_run<T>(shared, &role->cursor, &role->slot, role->policy);
        down_end(sh, began);
    } else {
        bool arrived = place && from >= gate.passes;
#pragma unroll 1
        for (uint32_t phase = place & PLACE_DOWN ? 1 : 0; phase < 2; phase++) {
            const uint32_t began = from ? 0 : (uint32_t)clock64() | 1;
            const uint32_t passes = phase ? down.passes : gate.passes;
            const uint32_t done =
                phase_run<T, NB, false>(shared, phase, gate, down, from, &role->cursor, &role->slot,
                                        &role->buffer, role->policy);
            if (done < passes)
                return place_of(phase, done);
            if (phase)
                down_end(sh, began);
            else if (!dense_gate_end(shared, began, arrived))
                return place_of(false, passes);
            from = 0;
        }
    }
    return 0;
}

// For the number of rows; those of a dense layer are no more than 16.
template <typename T, bool EXPERTS>
static __device__ __forceinline__ uint32_t layer_rows(decode_shared_t &shared, decode_role_t *role,
                                                      bool hit, uint32_t place)
{
    const uint32_t rows = shared.state.call.command.rows;
    if (rows <= 8)
        return layer_phases<T, 1, EXPERTS>(shared, role, hit, place);
    if (!EXPERTS || rows <= 16)
        return layer_phases<T, 2, EXPERTS>(shared, role, hit, place);
    return layer_phases<T, EXPERTS ? 4 : 2, EXPERTS>(shared, role, hit, place);
}

// What comes before the products.
static __device__ __forceinline__ bool layer_begin(decode_shared_t &shared, decode_role_t *role)
{
    decode_state_t &sh = shared.state;
    decode_call_t &call = sh.call;
    const ffn_cuda_signature_t &s = sh.layers[sh.now].signature;
    const bool hit = ahead_holds(sh);
    if (threadIdx.x == 0)
        decode_mark(call, 0);
    uint64_t acted = 0;
    if (threadIdx.x == ROUTE_COUNTS)
        acted = ptx_load_relaxed(&call.lane.meeting->acted);
    if (!hit) { // what was loaded ahead, if anything, is dropped
        ptx_copies_wait<0>();
        __syncthreads();
        if (s.experts)
            experts_fetch(shared, role->policy);
    }
    if (s.experts)
        route_all(shared, acted);
    else if (threadIdx.x == ROUTE_COUNTS)
        call_number(call, acted);
    if (threadIdx.x == 0)
        decode_mark(call, 3);
    return hit;
}

// As layer_phases().
static __device__ __forceinline__ uint32_t layer_run(decode_shared_t &shared, decode_role_t *role,
                                                     uint32_t place)
{
    const decode_state_t &sh = shared.state;
    const ffn_cuda_signature_t &s = sh.layers[sh.now].signature;
    const bool hit = place == 0 && layer_begin(shared, role);
    if (sh.call.command.rows > (s.experts ? FFN_CUDA_DECODE_ROWS : FFN_CUDA_DENSE_ROWS))
        __trap();
    const bool bf16 = s.dtype == FFN_CUDA_BF16;
    if (s.experts && bf16)
        return layer_rows<__nv_bfloat16, true>(shared, role, hit, place);
    if (s.experts)
        return layer_rows<__half, true>(shared, role, hit, place);
    if (bf16)
        return layer_rows<__nv_bfloat16, false>(shared, role, hit, place);
    return layer_rows<__half, false>(shared, role, hit, place);
}

// All threads, at the end of a layer, its successor in layers[now]: starts on that.
static __device__ __forceinline__ void layer_ahead(decode_shared_t &shared, decode_role_t *role)
{
    decode_state_t &sh = shared.state;
    ptx_copies_wait<0>();
    __syncwarp();
    if (sh.layers[sh.now].signature.experts) {
        experts_fetch(shared, role->policy);
        return;
    }
    const decode_phase_t gate = phase_of<false>(sh, false), down = phase_of<false>(sh, true);
    cursor_begin<false>(shared, gate, down, false, 0, &role->cursor, role->policy);
    role->slot = 0;
}

// ---- cuts ----------------------------------------------------------------------------------------
// What the block knows of its command but for the Lanes' descriptions, which are the same for all. The
// ring is not kept.
static __device__ __forceinline__ void aside_move(decode_shared_t &shared, bool back)
{
    enum { LANES = offsetof(decode_state_t, lanes) / 8, LAYERS = offsetof(decode_state_t, layers) / 8 };
    static_assert(sizeof(decode_state_t) % 8 == 0, "moved by words");
    unsigned long long *const near = (unsigned long long *)&shared.state;
    unsigned long long *const far = (unsigned long long *)shared.cuts.aside;
    for (uint32_t i = threadIdx.x; i < sizeof(decode_state_t) / 8; i += DECODE_THREADS) {
        if (i >= LANES && i < LAYERS)
            continue;
        if (back)
            near[i] = __ldcg(far + i);
        else
            far[i] = near[i];
    }
}

// All threads, a cut having come. Meanwhile the command's time stands still: `began_ns` is what has passed.
static __device__ __forceinline__ void aside_put(decode_shared_t &shared, uint32_t place)
{
    decode_call_t &call = shared.state.call;
    ptx_copies_wait<0>();
    if (threadIdx.x == 0) {
        call.began_ns = clock_ns() - call.began_ns;
        shared.cuts.place = place;
        shared.cuts.cut = 1;
        shared.cuts.resume = 0; // it may have been cut before
    }
    __syncthreads();
    aside_move(shared, false);
    __syncthreads(); // the command may be written over
}

// Who may cut in on what comes now: nobody on a cut. One thread.
static __device__ __forceinline__ void cuts_watch(decode_cuts_t &cuts, ffn_cuda_queue_t *queue)
{
    const bool taken = cuts.aside && cuts.turn != DECODE_CUT;
    cuts.at = taken ? (const uint32_t *)&queue->cuts[cuts.done % FFN_CUDA_QUEUE_ENTRIES].sequence
                    : NULL;
    cuts.word = (uint32_t)FFN_CUDA_CUT_WORD(cuts.done + 1, cuts.sequence);
    cuts.seen[0] = cuts.seen[1] = 0;
}

// ---- commands ------------------------------------------------------------------------------------
// The launch's only Invocation, as the Lane has it; warp 0.
static __device__ __forceinline__ void command_of_lane(decode_state_t &sh,
                                                       const ffn_cuda_lane_t *lane)
{
    if (threadIdx.x == 0) {
        ffn_cuda_command_t &command = sh.call.command;
        command.lane = (ffn_cuda_lane_t *)lane;
        command.layers = lane->layers;
        command.layer = lane->layer;
        command.rows = lane->rows;
        command.input = lane->input;
        command.output = lane->output;
        command.partial = lane->partial;
        command.lane_number = 0;
        sh.call.began_ns = clock_ns();
    }
    __syncwarp();
}

// The entry for a block that leaves: no cut comes any more, or there is one. One thread.
static __device__ __forceinline__ decode_turn_t cut_or_leave(ffn_cuda_command_t *cut, uint32_t word)
{
    for (;;) {
        const unsigned long long seen = ptx_load_acquire_system(&cut->sequence);
        if (seen == FFN_CUDA_QUEUE_LEFT)
            return DECODE_LEAVE;
        if ((uint32_t)seen == word)
            return DECODE_CUT;
        ptx_swap_if_system(&cut->sequence, seen, FFN_CUDA_QUEUE_LEFT);
    }
}

// Waits for the command after `sequence`, of which cuts may still come, or for the cut after `cuts`; reads
// what it answers. Warp 0.
static __device__ __forceinline__ decode_turn_t command_turn(decode_call_t &call,
                                                             ffn_cuda_queue_t *queue,
                                                             uint64_t sequence, uint32_t cuts)
{
    ffn_cuda_command_t *entry = &queue->entries[sequence % FFN_CUDA_QUEUE_ENTRIES];
    ffn_cuda_command_t *cut = &queue->cuts[cuts % FFN_CUDA_QUEUE_ENTRIES];
    const uint32_t word = (uint32_t)FFN_CUDA_CUT_WORD(cuts + 1, sequence);
    uint32_t turn = DECODE_COMMAND;
    if (threadIdx.x == 0) {
        for (uint32_t looks = 1;; looks++) {
            const uint32_t look = ptx_load_relaxed_system((const uint32_t *)&cut->sequence);
            const unsigned long long seen = ptx_load_acquire_system(&entry->sequence);
            if (seen == sequence + 1)
                break;
            if (seen == FFN_CUDA_QUEUE_LEFT)
                turn = cut_or_leave(cut, word);
            else if (look == word)
                turn = DECODE_CUT;
            if (turn != DECODE_COMMAND)
                break;
            if (looks % COMMAND_LOOKS == 0 && ptx_load_relaxed_system(&queue->stop))
                ptx_swap_if_system(&entry->sequence, seen, FFN_CUDA_QUEUE_LEFT);
        }
        call.began_ns = ptx_clock_ns();
    }
    turn = __shfl_sync(ROUTE_ALL, turn, 0);
    if (turn == DECODE_COMMAND) {
        command_read(call.command, entry);
        if (call.command.cuts != cuts) // posted before it
            turn = DECODE_CUT;
        else if (call.command.lane == NULL)
            turn = DECODE_LEAVE;
        __syncwarp();
    }
    return (decode_turn_t)turn;
}

// The cut after `cuts`, which is there; warp 0.
static __device__ __forceinline__ void cut_read(decode_call_t &call, ffn_cuda_queue_t *queue,
                                                uint64_t sequence, uint32_t cuts)
{
    const ffn_cuda_command_t *cut = &queue->cuts[cuts % FFN_CUDA_QUEUE_ENTRIES];
    if (threadIdx.x == 0) {
        const uint32_t word = (uint32_t)FFN_CUDA_CUT_WORD(cuts + 1, sequence);
        while ((uint32_t)ptx_load_acquire_system(&cut->sequence) != word)
            ;
        call.began_ns = ptx_clock_ns();
    }
    __syncwarp();
    command_read(call.command, cut);
}

// What comes next, read into the call if it is new; warp 0.
static __device__ __forceinline__ void turn_take(decode_shared_t &shared,
                                                 const ffn_cuda_lane_t *given,
                                                 ffn_cuda_queue_t *queue)
{
    decode_state_t &sh = shared.state;
    decode_cuts_t &cuts = shared.cuts;
    const uint64_t sequence = cuts.sequence;
    const uint32_t done = cuts.done;
    decode_turn_t turn = DECODE_COMMAND;
    if (!queue)
        command_of_lane(sh, given);
    else if (cuts.resume)
        turn = DECODE_RESUME;
    else if (cuts.cut)
        turn = DECODE_CUT;
    else
        turn = command_turn(sh.call, queue, sequence, done);
    if (turn == DECODE_CUT)
        cut_read(sh.call, queue, sequence, done);
    if (threadIdx.x == 0) {
        if (cuts.cut)
            sh.ahead = 0; // what the command began with is used up
        cuts.sequence = sequence + (turn == DECODE_COMMAND);
        cuts.turn = turn;
    }
}

// What ends it, one thread; what comes after it is known from here on.
static __device__ __forceinline__ command_end_t turn_end(decode_shared_t &shared,
                                                         ffn_cuda_queue_t *queue,
                                                         uint64_t **answered_out,
                                                         uint64_t *number_out)
{
    const decode_call_t &call = shared.state.call;
    decode_cuts_t &cuts = shared.cuts;
    const bool was_cut = cuts.turn == DECODE_CUT;
    cuts.done += was_cut;
    cuts.place = was_cut ? cuts.place : 0;
    cuts.cut = 0;
    cuts.resume = cuts.place != 0;
    *answered_out = was_cut ? &queue->cuts_answered : &queue->answered;
    *number_out = was_cut ? cuts.done : cuts.sequence;
    return command_end_of(call.command, call.began_ns, call.lane.meeting, call.lane.trace,
                          FFN_CUDA_DECODE_ROWS);
}

// One layer of `given`, or, where `queue` is not NULL, those of its commands until it says to leave, with
// cuts in the middle of them.
static __device__ __forceinline__ void decode_main(const ffn_cuda_lane_t *given,
                                                   ffn_cuda_queue_t *queue, uint32_t look_ahead)
{
    decode_shared_t &shared = *(decode_shared_t *)ptx_dynamic_shared();
    decode_state_t &sh = shared.state;
    decode_role_t role;
    role.policy = ptx_policy_stream();
    role.slot = role.buffer = 0;
    if (threadIdx.x < FFN_CUDA_MAX_LANES)
        sh.lanes[threadIdx.x].lane = NULL;
    if (threadIdx.x == 0) {
        sh.now = sh.ahead = 0;
        sh.layers[0].at = sh.layers[1].at = NULL;
        sh.layers[0].signature.experts = 0;
        unsigned char *const aside = queue ? queue->aside : NULL;
        shared.cuts.aside = aside ? aside + (uint64_t)blockIdx.x * FFN_CUDA_ASIDE_BYTES : NULL;
        shared.cuts.sequence = shared.cuts.done = 0;
        shared.cuts.place = shared.cuts.cut = shared.cuts.resume = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (;;) {
        if (threadIdx.x < 32)
            turn_take(shared, given, queue);
        __syncthreads(); // all are done with the Invocation before
        const uint32_t turn = shared.cuts.turn;
        if (turn == DECODE_LEAVE)
            break;
        if (turn == DECODE_RESUME)
            aside_move(shared, true);
        else
            call_read(sh, queue != NULL);
        if (threadIdx.x == 0) {
            cuts_watch(shared.cuts, queue);
            if (turn != DECODE_RESUME)
                sh.look_ahead = turn == DECODE_COMMAND && look_ahead;
        }
        __syncthreads();
        if (turn == DECODE_RESUME && threadIdx.x == 0)
            sh.call.began_ns = clock_ns() - sh.call.began_ns;
        const uint32_t rows = sh.call.command.rows;
        const uint32_t stopped =
            rows ? layer_run(shared, &role, turn == DECODE_RESUME ? shared.cuts.place : 0) : 0;
        if (!queue)
            break;
        if (stopped) {
            aside_put(shared, stopped);
            continue;
        }
        // Warp 0 waits for the next command while warp 1 ends this one.
        command_end_t end = {};
        uint64_t *answered = NULL, number = 0;
        const bool was_cut = turn == DECODE_CUT;
        const bool ahead = rows && sh.ahead && !was_cut;
        const bool next = rows && sh.layers[sh.now].signature.experts && !was_cut;
        if (threadIdx.x == 32)
            end = turn_end(shared, queue, &answered, &number);
        __syncthreads(); // the command may be written over
        if (threadIdx.x == 32)
            command_end(end, queue, answered, number);
        __syncwarp();
        if (ahead) // of sh.call it reads what call_read() writes, not the command
            layer_ahead(shared, &role);
        if (next && threadIdx.x / 32 == DECODE_WARPS - 1)
            next_fetch(sh, sh.table);
    }
    ptx_copies_wait<0>();
}

// Without the limit it takes more. What goes to local memory then is what a launch reckons once, read back
// once a layer.
extern "C" __global__ void __maxnreg__(DECODE_MOST_REGISTERS)
    ffn_decode(const ffn_cuda_lane_t *lane, ffn_cuda_queue_t *queue, uint32_t look_ahead)
{
    decode_main(lane, queue, look_ahead);
}
#else
extern "C" __global__ void ffn_decode(const ffn_cuda_lane_t *lane, ffn_cuda_queue_t *queue,
                                      uint32_t look_ahead)
{
    __trap();
}
#endif
