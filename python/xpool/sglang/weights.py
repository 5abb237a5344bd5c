# SPDX-License-Identifier: MIT
"""Reading a checkpoint without its FFN tensors.

SGLang's safetensors iterators ask each file for its names and then for the tensors. Here a file does
not tell the names that the FfnAgents hold, so that nobody asks for those bytes.
"""

import logging
from contextlib import contextmanager

from xpool.native import XpoolError
from xpool.sglang import patch

log = logging.getLogger("xpool")

_MODULE = "sglang.srt.model_loader.weight_utils"


class Counts:
    """What was seen while loading: tensors read, and tensors left on disk."""

    def __init__(self):
        self.read = 0
        self.skipped = 0


class _File:
    """An opened safetensors file that knows nothing of FFN tensors."""

    def __init__(self, opened, is_ffn, counts):
        self._opened, self._is_ffn, self._counts = opened, is_ffn, counts

    def __enter__(self):
        self._opened.__enter__()
        return self

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def keys(self):
        names = self._opened.keys()
        kept = [name for name in names if not self._is_ffn(name)]
        self._counts.skipped += len(names) - len(kept)
        return kept

    def get_tensor(self, name):
        if self._is_ffn(name):
            raise XpoolError(f"the FFN tensor {name} was asked for: it belongs to the FfnAgents")
        self._counts.read += 1
        return self._opened.get_tensor(name)


class _Safetensors:
    """Stands for the module `safetensors` inside SGLang's weight readers."""

    def __init__(self, module, is_ffn, counts):
        self._module, self._is_ffn, self._counts = module, is_ffn, counts

    def safe_open(self, *arguments, **options):
        return _File(self._module.safe_open(*arguments, **options), self._is_ffn, self._counts)

    @property
    def torch(self):
        raise XpoolError("reading whole safetensors files at once is not supported by the plugin")


@contextmanager
def without_ffn(is_ffn):
    """While it lasts, SGLang's readers do not see tensors for which `is_ffn(name)` holds."""
    _, _, module = patch.resolve(_MODULE, "safetensors")
    counts = Counts()
    patch.replace(_MODULE, "safetensors", _Safetensors(module, is_ffn, counts))
    try:
        yield counts
    finally:
        patch.replace(_MODULE, "safetensors", module)


def _refuse_update(original, runner, *arguments, **options):
    return False, "weights cannot be updated while the FFN is served by CrossPool"


def hook():
    # The FfnAgents would keep the old FFN: half of the model would be updated.
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    ):
        patch.around("sglang.srt.model_executor.model_runner", f"ModelRunner.{name}", _refuse_update)
