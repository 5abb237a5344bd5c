# SPDX-License-Identifier: MIT
"""The SGLang plugin: attention and KV Cache stay in SGLang, the FFN of every layer is CrossPool's.

`plugin.install` is the entry point. Each file owns one thing that is changed in SGLang:

    release    which release the rest was written for
    options    server arguments: which model, which workload, what is refused
    adapters   the FFN classes of each architecture
    ffn        their replacement, and the check that nothing of an FFN is left here
    weights    reading a checkpoint without its FFN tensors
    parallel   tensor and data parallel attention around an FFN that is elsewhere
    step       what kind of step a call belongs to, which rows are live, how a pass on a GPU ended
    cpu        what SGLang needs to compute right answers on a CPU
    cuda       what is different on a GPU: arguments, pools
    kv         the elastic KV Cache along the scheduler's loop
    kv_pool    its tensors and the allocator of its slots
    kv_room    emptying its end
    rank       the Instance Rank's life along the scheduler's
    failure    ending SGLang with a reason
    interrupt  Ctrl-C
    stop       who stopped the server
    tokens     token ids that come from outside
    shared     names in /dev/shm
    patch      how a function of SGLang is changed

A further thing is a further file with a `hook()`, named in a list of `plugin`.
"""
