// SPDX-License-Identifier: MIT
// Fibers of emulated.h: one stack each, switched by hand; the one that runs next is chosen at
// random.
#include "emulated.h"

#include <sys/mman.h>

#define STACK_BYTES (64u * 1024u)
#define IDLE_MOST   200000000ull // looks in a row that change nothing: the grid waits for ever

emulated_grid_t emulated;

// Saves what a call must keep, on the stack, and goes on with another one.
asm(".text\n"
    ".globl emulated_switch\n"
    "emulated_switch:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n"
    "mov %rsi, %rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
    "ret\n");
extern "C" void emulated_switch(void **save, void *load);

static void to_main()
{
    emulated_switch(&emulated.fibers[emulated.now].stack_pointer, emulated.main_stack);
}

static void fiber_main()
{
    emulated.entry();
    emulated_fiber_t *fiber = &emulated.fibers[emulated.now];
    EMULATED_CHECK(fiber->open.empty() && fiber->groups.empty(), "copies were left under way");
    fiber->ended = true;
    to_main();
    abort();
}

static void ready_add(uint32_t fiber)
{
    emulated.ready.push_back(fiber);
}

void emulated_yield(bool idle)
{
    if (!idle)
        emulated.idle = 0;
    ready_add(emulated.now);
    to_main();
}

void emulated_wait()
{
    emulated.fibers[emulated.now].waits = true;
    to_main();
}

static void wake(uint32_t fiber)
{
    EMULATED_CHECK(emulated.fibers[fiber].waits, "thread %u was not waiting", fiber);
    emulated.fibers[fiber].waits = false;
    ready_add(fiber);
}

uint64_t emulated_meet(emulated_op_t op, uint64_t value, uint32_t source, const void *argument,
                       void (*all)(emulated_meeting_t *))
{
    emulated_fiber_t *fiber = &emulated.fibers[emulated.now];
    emulated_meeting_t *m = &emulated.warps[fiber->warp];
    const uint32_t lane = fiber->thread.x % 32;
    if (m->arrived == 0)
        m->op = op;
    EMULATED_CHECK(m->op == op, "block %u warp %u: lane %u is at operation %d, others at %d",
                   fiber->block.x, fiber->thread.x / 32, lane, op, m->op);
    m->fiber[lane] = emulated.now;
    m->value[lane] = value;
    m->source[lane] = source;
    m->argument[lane] = argument;
    if (++m->arrived < 32) {
        emulated_wait();
    } else {
        all(m);
        m->arrived = 0;
        emulated.idle = 0;
        for (uint32_t i = 0; i < 32; i++)
            if (i != lane)
                wake(m->fiber[i]);
    }
    return m->result[lane];
}

void emulated_syncthreads()
{
    emulated_fiber_t *fiber = &emulated.fibers[emulated.now];
    const uint32_t block = fiber->block.x, threads = emulated.block.x;
    EMULATED_CHECK(emulated.warps[fiber->warp].arrived == 0, "a lane is at another operation");
    if (++emulated.blocks[block] < threads) {
        emulated_wait();
        return;
    }
    emulated.blocks[block] = 0;
    emulated.idle = 0;
    for (uint32_t i = block * threads; i < (block + 1) * threads; i++)
        if (i != emulated.now)
            wake(i);
}

void emulated_allow(const void *at, uint64_t bytes)
{
    const std::pair<const unsigned char *, uint64_t> range((const unsigned char *)at, bytes);
    emulated.memory.insert(std::upper_bound(emulated.memory.begin(), emulated.memory.end(), range),
                           range);
}

void emulated_forbid_all()
{
    emulated.memory.clear();
}

void emulated_look(const void *at, uint64_t bytes)
{
    const unsigned char *first = (const unsigned char *)at;
    // Memory that was freed and given out again may be there twice.
    auto after = std::upper_bound(emulated.memory.begin(), emulated.memory.end(),
                                  std::make_pair(first, ~(uint64_t)0));
    for (uint32_t i = 0; i < 64 && after != emulated.memory.begin(); i++) {
        --after;
        if (first + bytes <= after->first + after->second)
            return;
    }
    EMULATED_CHECK(false, "block %u thread %u: %llu bytes outside of what is allocated", blockIdx.x,
                   threadIdx.x, (unsigned long long)bytes);
}

void emulated_run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                  emulated_copies_t copies, uint64_t order, const std::function<void()> &entry)
{
    emulated_grid_t *g = &emulated;
    g->grid = {blocks, 1, 1};
    g->block = {threads, 1, 1};
    g->copies = copies;
    g->random = order;
    g->idle = 0;
    g->entry = entry;
    g->warps.assign(blocks * threads / 32, {});
    g->blocks.assign(blocks, 0);
    g->counts.assign(blocks, 0);
    g->ready.clear();
    // What nobody has written are NaNs.
    g->shared.assign(blocks, std::vector<unsigned char>(shared_bytes + 128, 0xff));
    const size_t count = (size_t)blocks * threads;
    if (g->fibers.size() < count)
        g->fibers.resize(count);
    for (uint32_t i = 0; i < count; i++) {
        emulated_fiber_t *f = &g->fibers[i];
        if (!f->stack)
            f->stack = (unsigned char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        EMULATED_CHECK(f->stack != MAP_FAILED, "no stack");
        f->block = {i / threads, 0, 0};
        f->thread = {i % threads, 0, 0};
        f->warp = i / 32;
        f->ended = f->waits = false;
        f->shared = (unsigned char *)(((uintptr_t)g->shared[i / threads].data() + 127) / 128 * 128);
        void **top = (void **)(f->stack + STACK_BYTES - 64);
        top[0] = (void *)fiber_main; // after the switch's `ret` the stack is as after a call
        f->stack_pointer = top - 6;
        ready_add(i);
    }
    for (size_t ended = 0; ended < count;) {
        EMULATED_CHECK(!g->ready.empty(), "all threads wait for each other");
        EMULATED_CHECK(g->idle < IDLE_MOST, "the grid waits for ever");
        const size_t at = emulated_random() % g->ready.size();
        g->now = g->ready[at];
        g->ready[at] = g->ready.back();
        g->ready.pop_back();
        g->idle++;
        if (g->outside)
            g->outside();
        emulated_switch(&g->main_stack, g->fibers[g->now].stack_pointer);
        ended += g->fibers[g->now].ended;
    }
}
