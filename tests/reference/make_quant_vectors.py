# SPDX-License-Identifier: MIT
"""Writes tests/unit/kernels/quant_vectors.bin: blocks of every quantised type and what the gguf
package's dequantize makes of them, so that our decoders are checked against code that is not ours.

    python tests/reference/make_quant_vectors.py

Layout, little endian: "XPQV", then for each type u32 name length, the name (as xp_dtype_name), u32
blocks, the blocks' bytes, the FP32 values. Seeded: the file is reproducible. Any bytes are a valid
block once the f16 scales are finite, so random bytes cover every field; the scales are drawn over
many sizes, subnormal ones included. Needs gguf and numpy of tests/reference/requirements.txt.
"""

import pathlib
import struct

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGML_QUANT_SIZES, quants

OUT = pathlib.Path(__file__).resolve().parent.parent / "unit" / "kernels" / "quant_vectors.bin"

# Byte offsets of the f16 fields of a block.
SCALES = {
    Kind.Q8_0: [0],
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q4_K: [0, 2],
    Kind.Q6_K: [208],
}


def main():
    rng = np.random.default_rng(20261129)
    out = bytearray(b"XPQV")
    for kind, fields in SCALES.items():
        elements, size = GGML_QUANT_SIZES[kind]
        blocks = 16 * 256 // elements
        data = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
        for field in fields:
            scale = rng.standard_normal(blocks) * 10.0 ** rng.integers(-7, 2, blocks)
            data[:, field : field + 2] = scale.astype("<f2").view(np.uint8).reshape(blocks, 2)
        values = quants.dequantize(data.reshape(-1), kind).astype("<f4")
        assert values.size == blocks * elements and np.isfinite(values).all()
        name = kind.name.lower().encode()
        out += struct.pack("<I", len(name)) + name + struct.pack("<I", blocks)
        out += data.tobytes() + values.tobytes()
    OUT.write_bytes(out)
    print(f"{OUT.name}: {len(out)} bytes")


if __name__ == "__main__":
    main()
