# SPDX-License-Identifier: MIT
"""The configuration, resolved by the registry in libxpool: same files, same rules, same errors."""

import os
from collections import namedtuple

from xpool import native

ModelInfo = namedtuple(
    "ModelInfo",
    "architecture engine hidden layers attention_tp attention_dp decode_rows prefill_rows"
    " max_rows max_context kv_tokens slo_ttft_ms slo_tbt_ms device kv_elastic",
)


class XpoolConfig:
    """A resolved configuration. `path`: a TOML file; None takes XPOOL_CONFIG of the environment."""

    def __init__(self, path=None):
        self._native = native.load()
        ffi, lib = self._native.ffi, self._native.lib
        handle = ffi.new("xpool_config_t **")
        name = ffi.NULL if path is None else os.fsencode(path)
        self._native.check(lib.xpool_config_open(name, handle))
        self.handle = ffi.gc(handle[0], lib.xpool_config_close)

    def model_ids(self):
        lib = self._native.lib
        return [
            self._native.string(lib.xpool_config_model_id(self.handle, index))
            for index in range(lib.xpool_config_model_count(self.handle))
        ]

    def model_path_of(self, model_id):
        """models[].path of `model_id`, absolute."""
        path = self._native.string(
            self._native.lib.xpool_config_model_path(self.handle, model_id.encode())
        )
        if path is None:
            known = ", ".join(self.model_ids()) or "none"
            raise native.XpoolError(f"no model {model_id!r} is configured (configured: {known})")
        return path

    def model_info(self, model_id):
        """What the checkpoint and the plan say of a model. Reads headers; nothing is started."""
        ffi = self._native.ffi
        info = ffi.new("xpool_model_info_t *", {"struct_bytes": ffi.sizeof("xpool_model_info_t")})
        self._native.check(
            self._native.lib.xpool_config_model_info(self.handle, model_id.encode(), info)
        )
        values = {field: getattr(info, field) for field in ModelInfo._fields}
        for field in ("architecture", "engine", "device"):
            values[field] = self._native.string(values[field])
        return ModelInfo(**values)

    def is_ffn_tensor(self, model_id, name):
        """Whether the FfnAgents hold the checkpoint tensor `name`, so that an engine skips it."""
        found = self._native.lib.xpool_config_is_ffn_tensor(
            self.handle, model_id.encode(), name.encode()
        )
        if found < 0:
            raise self._native.error(found, "")
        return bool(found)
