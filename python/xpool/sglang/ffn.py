# SPDX-License-Identifier: MIT
"""The replacement of an FFN module: a module without parameters whose forward is one operator.

The replacement is in place before the model is built, so that no FFN parameter is ever allocated;
`verify` proves it on the finished model.
"""

import re

import torch

from xpool import ops
from xpool.native import XpoolError
from xpool.sglang import adapters, patch

_PREFIX = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp$")


class FfnShim(torch.nn.Module):
    """The FFN of one layer, computed by the FfnAgents.

    The answer is the complete sum on every rank, for exactly the rows handed in. What SGLang's own
    modules take besides (all-reduce and reduce-scatter hints, buffers) has no meaning here.
    """

    # Qwen3's decoder layer looks at the weights of these on some devices.
    gate_up_proj = None
    down_proj = None

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, *arguments, **options):
        return ops.ffn_shim(hidden_states, self.layer)


def _site(name):
    """A class to put in place of the FFN class `name`. Making an instance gives an FfnShim, which is
    not an instance of it: SGLang asks isinstance before it reaches for experts, which are not here."""

    def make(cls, *arguments, prefix="", layer_id=None, **options):
        match = _PREFIX.search(prefix)
        if match is None or (layer_id is not None and layer_id != int(match.group(1))):
            raise XpoolError(f"{name} is built at {prefix!r} (layer_id {layer_id}), not as a layer's mlp")
        return FfnShim(int(match.group(1)))

    return type(name, (), {"__new__": make, "xpool_site": True})


def replace(architecture):
    """Replaces the FFN classes of `architecture`; to be called before its model is built."""
    adapter = adapters.of(architecture)
    for name in adapter.sites:
        original = patch.resolve(adapter.module, name)[2]
        if getattr(original, "xpool_site", False):
            continue
        if not (isinstance(original, type) and issubclass(original, torch.nn.Module)):
            raise XpoolError(f"{adapter.module}.{name} is not the class of a module")
        patch.replace(adapter.module, name, _site(name))


def verify(model, architecture, layers):
    """Every FFN of the built model is a shim, and no parameter or buffer of an FFN is here."""
    if type(model).__name__ != architecture:
        raise XpoolError(
            f"SGLang built a {type(model).__name__}, the plan is for {architecture}:"
            " another model implementation is not supported"
        )
    found = {}
    for index, layer in enumerate(model.model.layers):
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, FfnShim):
            raise XpoolError(
                f"the FFN of layer {index} is SGLang's own {type(mlp).__name__}: a hook was missed"
            )
        found[mlp.layer] = mlp
    if sorted(found) != list(range(layers)):
        raise XpoolError(f"the model has FFNs of layers {sorted(found)}, the plan has {layers} layers")
    held = [name for name, _ in model.named_parameters() if ".mlp." in name]
    held += [name for name, _ in model.named_buffers() if ".mlp." in name]
    if held:
        raise XpoolError(f"FFN parameters are held by this process: {', '.join(held[:4])}")
