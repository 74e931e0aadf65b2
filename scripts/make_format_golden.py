#!/usr/bin/env python3
"""Makes crates/carat-tensor/tests/golden: what the `gguf` package reads and writes.

    pip install numpy gguf
    python scripts/make_format_golden.py

    decode/NAME.blocks   whole blocks of the format
    decode/NAME.values   what gguf.quants.dequantize makes of them, fp32
    encode/input.values  fp32 values, a multiple of 256
    encode/NAME.blocks   what gguf.quants.quantize makes of them
    index.json           package version, seed, number of blocks or values

Everything is little-endian and follows from the seed. For each format the blocks
hold: all bytes 0, all bytes 0xff, extreme fp16 scales (subnormal, negative, largest)
in each scale field, every byte value in each field, every integer scale and minimum,
every codebook index, and random blocks. Scales are finite: NaN payloads are nobody's
contract.
"""

import importlib.metadata
import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/carat-tensor/tests/golden"
SEED = 20250
RANDOM_BLOCKS = 8

# Fields of a block, in order: name and bytes. d and dmin are fp16 scales.
LAYOUTS = {
    "Q4_0": [("d", 2), ("qs", 16)],
    "Q4_1": [("d", 2), ("dmin", 2), ("qs", 16)],
    "Q5_0": [("d", 2), ("qh", 4), ("qs", 16)],
    "Q5_1": [("d", 2), ("dmin", 2), ("qh", 4), ("qs", 16)],
    "Q8_0": [("d", 2), ("qs", 32)],
    "Q2_K": [("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)],
    "Q3_K": [("hmask", 32), ("qs", 64), ("scales", 12), ("d", 2)],
    "Q4_K": [("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)],
    "Q5_K": [("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)],
    "Q6_K": [("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)],
    "TQ1_0": [("qs", 48), ("qh", 4), ("d", 2)],
    "TQ2_0": [("qs", 64), ("d", 2)],
    "IQ4_NL": [("d", 2), ("qs", 16)],
    "IQ4_XS": [("d", 2), ("scales_h", 2), ("scales_l", 4), ("qs", 128)],
    "IQ2_XXS": [("d", 2), ("qs", 64)],
    "IQ2_XS": [("d", 2), ("qs", 64), ("scales", 8)],
    "IQ2_S": [("d", 2), ("qs", 32), ("signs", 32), ("qh", 8), ("scales", 8)],
    "IQ3_XXS": [("d", 2), ("qs", 64), ("signs", 32)],
    "IQ3_S": [("d", 2), ("qs", 64), ("qh", 8), ("signs", 32), ("scales", 4)],
    "IQ1_S": [("d", 2), ("qs", 32), ("qh", 16)],
    "IQ1_M": [("qs", 32), ("qh", 16), ("scales", 8)],
    "MXFP4": [("e", 1), ("qs", 16)],
}
ENCODED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]

F16_EXTREMES = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF,
]  # fmt: skip
TERNARY_BYTES = np.array(
    [b for b in range(256) if all((b >> s) & 3 != 3 for s in (0, 2, 4, 6))], dtype=np.uint8
)


class Blocks:
    """Collects the blocks of one format."""

    def __init__(self, name: str, rng: np.random.Generator):
        self.name, self.rng, self.blocks = name, rng, []
        self.fields, at = {}, 0
        for field, size in LAYOUTS[name]:
            self.fields[field] = slice(at, at + size)
            at += size
        self.size = at
        assert gguf.GGML_QUANT_SIZES[T[name]][1] == at, name

    def random(self) -> np.ndarray:
        """A random block, its fp16 scales of ordinary size."""
        b = self.rng.integers(0, 256, self.size, dtype=np.uint8)
        if self.name == "TQ2_0":
            b[self.fields["qs"]] = self.rng.choice(TERNARY_BYTES, 64)
        for field in ("d", "dmin"):
            value = self.rng.normal() * 2.0 ** self.rng.integers(-12, 3)
            self.set_f16(b, field, int(np.float16(value).view(np.uint16)))
        return b

    def set_f16(self, b: np.ndarray, field: str, bits: int):
        if field in self.fields:
            b[self.fields[field]] = np.array([bits], dtype="<u2").view(np.uint8)
        elif self.name == "IQ1_M" and field == "d":
            # A nibble on top of each of the four scale words.
            words = b[self.fields["scales"]].view("<u2")
            for k in range(4):
                words[k] = (int(words[k]) & 0x0FFF) | (((bits >> (4 * k)) & 0xF) << 12)

    def add(self, **fields):
        """A random block with some fields set to bytes or (d, dmin) fp16 bits."""
        b = self.random()
        for field, value in fields.items():
            if field in ("d", "dmin"):
                self.set_f16(b, field, value)
            else:
                b[self.fields[field]] = value
        self.blocks.append(b)

    def build(self) -> np.ndarray:
        for fill in (0x00, 0xFF):
            b = np.full(self.size, fill, dtype=np.uint8)
            if self.name == "TQ2_0" and fill == 0xFF:
                b[self.fields["qs"]] = 0xAA
            for field in ("d", "dmin"):
                self.set_f16(b, field, 0x3C00)
            self.blocks.append(b)
        for k, bits in enumerate(F16_EXTREMES):
            self.add(d=bits)
            if "dmin" in self.fields:
                # Against an ordinary, an equally small and an opposite scale.
                self.add(dmin=bits)
                self.add(d=bits, dmin=F16_EXTREMES[-1 - k])
        self.sweep()
        getattr(self, f"extra_{self.name.lower()}", lambda: None)()
        for _ in range(RANDOM_BLOCKS):
            self.blocks.append(self.random())
        return np.stack(self.blocks)

    def sweep(self):
        """Every byte value in every field, all fields at once."""
        values = {field: np.arange(256, dtype=np.uint8) for field in self.fields}
        widths = {f: p.stop - p.start for f, p in self.fields.items() if f not in ("d", "dmin")}
        if self.name == "TQ2_0":
            values["qs"] = TERNARY_BYTES
        # scales_h is two bytes: its values are left to extra_iq4_xs.
        count = max(-(-len(values[f]) // w) for f, w in widths.items() if f != "scales_h")
        for k in range(count):
            fields = {
                f: np.take(values[f], np.arange(k * w, (k + 1) * w), mode="wrap") for f, w in widths.items()
            }
            if self.name == "IQ1_M":
                # d lies within scales: it is set last, and finite.
                fields["d"] = int(np.float16(self.rng.normal()).view(np.uint16))
            self.add(**fields)

    def k_scales(self):
        """Every pair of scale v and minimum 63 - v, in turning groups."""
        for k in range(8):
            s = (np.arange(8) * 8 + k + np.arange(8)) % 64
            m = 63 - s
            packed = np.concatenate([
                s[:4] | ((s[4:] >> 4) << 6),
                m[:4] | ((m[4:] >> 4) << 6),
                (s[4:] & 15) | ((m[4:] & 15) << 4),
            ])  # fmt: skip
            self.add(scales=packed.astype(np.uint8))

    extra_q4_k = k_scales
    extra_q5_k = k_scales

    def extra_q3_k(self):
        for k in range(4):
            s = np.arange(16) * 4 + k
            low = (s[:8] & 15) | ((s[8:] & 15) << 4)
            high = sum(((s[4 * j : 4 * j + 4] >> 4) & 3) << (2 * j) for j in range(4))
            self.add(scales=np.concatenate([low, high]).astype(np.uint8))

    def extra_iq4_xs(self):
        for k in range(8):
            s = np.arange(8) * 8 + k
            low = (s[0::2] & 15) | ((s[1::2] & 15) << 4)
            high = sum(int(v >> 4) << (2 * g) for g, v in enumerate(s))
            self.add(scales_l=low.astype(np.uint8), scales_h=np.array([high], "<u2").view(np.uint8))

    def extra_iq2_xxs(self):
        # Each of the 128 sign patterns, each scale.
        for k in range(4):
            words = np.zeros((8, 2), dtype="<u4")
            words[:, 0] = self.rng.integers(0, 2**32, 8)
            for g in range(8):
                signs = [(k * 32 + g * 4 + v) & 127 for v in range(4)]
                word = sum(s << (7 * v) for v, s in enumerate(signs))
                words[g, 1] = word | (((k * 8 + g) & 15) << 28)
            self.add(qs=words.reshape(-1).view(np.uint8))

    def extra_iq3_xxs(self):
        for k in range(4):
            words = []
            for g in range(8):
                signs = [(k * 32 + g * 4 + v) & 127 for v in range(4)]
                words.append(sum(s << (7 * v) for v, s in enumerate(signs)) | (((k * 8 + g) & 15) << 28))
            self.add(signs=np.array(words, "<u4").view(np.uint8))

    def extra_iq2_xs(self):
        # 512 codebook entries, 128 sign patterns.
        for k in range(16):
            i = np.arange(32) + 32 * k
            self.add(qs=(i | ((i * 5 & 127) << 9)).astype("<u2").view(np.uint8))

    def extra_iq2_s(self):
        for k in range(32):
            i = np.arange(32) + 32 * k
            high = (i >> 8).reshape(8, 4) << np.array([0, 2, 4, 6])
            self.add(qs=(i & 255).astype(np.uint8), qh=high.sum(axis=1).astype(np.uint8))

    def extra_iq3_s(self):
        for k in range(8):
            i = np.arange(64) + 64 * k
            high = (i >> 8).reshape(8, 8) << np.arange(8)
            self.add(qs=(i & 255).astype(np.uint8), qh=high.sum(axis=1).astype(np.uint8))

    def extra_iq1_s(self):
        for k in range(64):
            i = np.arange(32) + 32 * k
            high = ((i >> 8).reshape(8, 4) << np.array([0, 3, 6, 9])).sum(axis=1)
            high |= ((np.arange(8) + k) % 16) << 12
            self.add(qs=(i & 255).astype(np.uint8), qh=high.astype("<u2").view(np.uint8))

    def extra_iq1_m(self):
        for k in range(64):
            i = np.arange(32) + 32 * k
            nibbles = (i >> 8) | ((i + k) % 2 << 3)
            pairs = nibbles[0::2] | (nibbles[1::2] << 4)
            self.add(qs=(i & 255).astype(np.uint8), qh=pairs.astype(np.uint8))


def float_patterns(name: str, rng: np.random.Generator) -> np.ndarray:
    """Bit patterns of a float format, infinities but no NaN."""
    if name == "F32":
        special = [0, 1 << 31, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
        bits = np.concatenate([np.array(special, "<u4"), rng.integers(0, 2**32, 500, dtype=np.uint32)])
        return bits[(bits & 0x7FFFFFFF) <= 0x7F800000].astype("<u4").view(np.uint8)
    # Every exponent and sign, with the lowest, highest and a random fraction.
    fraction, infinity = (10, 0x7C00) if name == "F16" else (7, 0x7F80)
    upper = np.arange(1 << (16 - fraction)) << fraction
    ends = [upper, upper | ((1 << fraction) - 1), upper | rng.integers(0, 1 << fraction, len(upper))]
    bits = np.concatenate(ends)
    return bits[(bits & 0x7FFF) <= infinity].astype("<u2").view(np.uint8)


def encoder_input(rng: np.random.Generator) -> np.ndarray:
    """Chunks of 256 that meet the encoders' corners; all within fp16's range."""
    spike = np.zeros(256)
    spike[[5, 40, 70, 131, 200, 255]] = [3.0, -3.0, 1e-3, -65504.0, 6e-5, 0.5]
    ramp = np.arange(256) - 128.0
    step = np.tile(np.arange(32) - 16.0, 8)
    chunks = [
        np.zeros(256), np.full(256, -0.0), np.ones(256), -np.ones(256), np.full(256, 0.1),
        spike, -spike, ramp, -ramp, ramp / 4, step, -step, step / 2, step * 0.3, np.abs(step),
        # Equal magnitudes of both signs: the first one sets the scale.
        np.tile([1.0, -1.0], 128), np.tile([-1.0, 1.0], 128), np.tile([0.0, 0.5, -1.0, 1.0], 64),
        # Halves of a step: how ties round.
        np.tile(np.concatenate([[127.0], np.arange(31) - 15.5]), 8),
        np.tile(np.concatenate([[-8.0], np.arange(31) / 2 - 7.5]), 8),
        np.tile(np.concatenate([[1.0], np.full(31, 0.5)]), 8),
        np.tile(np.concatenate([[1.0], np.full(31, -0.5)]), 8),
        np.full(256, 65504.0), np.linspace(-65504.0, 65504.0, 256),
    ]  # fmt: skip
    chunks += [rng.normal(size=256) * 0.02 for _ in range(12)]
    chunks += [rng.choice([-1.0, 0.0, 1.0], 256) * s for s in (0.01, 0.37, 1.0, 1234.5)]
    chunks += [rng.normal(size=256) * s for s in (1e-4, 1e-6, 1e-9, 1e-30, 100.0, 9000.0)]
    chunks += [rng.standard_t(2, size=256) * 0.01 for _ in range(6)]
    chunks += [rng.uniform(low, high, 256) for low, high in ((0, 1), (-1, 0), (0.9, 1))]
    chunks += [rng.laplace(size=256)]
    values = np.concatenate(chunks).astype("<f4")
    assert np.abs(values).max() <= 65504
    return values


def main():
    version = importlib.metadata.version("gguf")
    index = {"gguf": version, "seed": SEED, "decode": {}, "encode": {}}
    files = {}
    np.seterr(over="ignore")  # MXFP4's two largest scales reach infinity
    for name in ["F32", "F16", "BF16", *LAYOUTS]:
        rng = np.random.default_rng([SEED, T[name].value])
        if name in LAYOUTS:
            blocks = Blocks(name, rng).build()
        else:
            blocks = float_patterns(name, rng).reshape(1, -1)
        values = quants.dequantize(blocks, T[name]).astype("<f4", copy=False)
        assert not np.isnan(values).any(), name
        files[f"decode/{name}.blocks"] = blocks.tobytes()
        files[f"decode/{name}.values"] = values.tobytes()
        index["decode"][name] = values.size // gguf.GGML_QUANT_SIZES[T[name]][0]
    values = encoder_input(np.random.default_rng([SEED, 1000]))
    files["encode/input.values"] = values.tobytes()
    index["encode_values"] = values.size
    for name in ENCODED:
        length, _ = gguf.GGML_QUANT_SIZES[T[name]]
        blocks = quants.quantize(values.reshape(-1, 256), T[name])
        files[f"encode/{name}.blocks"] = blocks.tobytes()
        index["encode"][name] = values.size // length
    for path, data in files.items():
        (OUT / path).parent.mkdir(parents=True, exist_ok=True)
        (OUT / path).write_bytes(data)
    (OUT / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes in {OUT}")


if __name__ == "__main__":
    main()
