"""Makes crates/carat-quant/tests/golden/*.safetensors with coreai-opt.

    python3 -m venv V && V/bin/pip install coreai-opt==0.3.0 safetensors numpy
    V/bin/python scripts/make_quant_golden.py crates/carat-quant/tests/golden

`linear.safetensors` and `palettes.safetensors` hold weights and, for each case,
what coreai-opt makes of them; the name of a case says how it was made. Weights
are seeded, so a second run gives the same files (the k-means is optimal, not
drawn).
"""

import sys
from pathlib import Path

import torch
from coreai_opt.palettization.kmeans.kmeans_fake_palettize import _KMeansFakePalettize
from coreai_opt.palettization.spec import PalettizationSpec
from coreai_opt.quantization.spec import QuantizationSpec
from coreai_opt.quantization.spec.factory import QuantizationComponentFactory
from coreai_opt.config.spec import CompressionTargetTensor
from safetensors.torch import save_file


def weights(rows, columns, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g) * 0.05
    # Outliers of either sign, a block of zeros, a block of one sign.
    w[1, 3], w[2, 40], w[3, :32], w[4, 32:64] = 0.9, -1.1, 0.0, w[4, 32:64].abs()
    return w.to(dtype)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for name, dtype in [("f16", torch.float16), ("f32", torch.float32)]:
        w = weights(8, 64, dtype, 1)
        out[f"weights.{name}"] = w
        spreads = {
            "tensor": {"type": "per_tensor"},
            "channel": {"type": "per_channel", "axis": 0},
            "block32": {"type": "per_block", "axis": 1, "block_size": 32},
            "block16": {"type": "per_block", "axis": 1, "block_size": 16},
        }
        for spread, granularity in spreads.items():
            cases = [
                (code, scheme, None)
                for code in ["int8", "int4", "int2", "uint8", "uint4"]
                for scheme in ["symmetric", "symmetric_with_clipping", "asymmetric"]
            ]
            cases += [("float8_e4m3fn", "symmetric", None), ("float8_e5m2", "symmetric", None)]
            cases += [("float8_e4m3fn", "symmetric", "float8_e8m0fnu")]
            if spread == "block32":
                cases += [("float4_e2m1fn", "symmetric", None)]
            for code, scheme, scale_dtype in cases:
                spec = QuantizationSpec(
                    dtype=code, qscheme=scheme, granularity=granularity, scale_dtype=scale_dtype
                )
                fake = QuantizationComponentFactory.create_fake_quantizer(
                    spec=spec, quantization_target=CompressionTargetTensor.WEIGHT
                )
                scale = ".e8m0" if scale_dtype else ""
                out[f"{name}.{spread}.{code}.{scheme}{scale}"] = fake(w).detach().contiguous()
    save_file(out, folder / "linear.safetensors")

    out = {}
    for name, dtype in [("f16", torch.float16), ("f32", torch.float32)]:
        w = weights(16, 64, dtype, 2)
        out[f"weights.{name}"] = w
        for bits in [1, 2, 3, 4, 6, 8]:
            for spread in ["tensor", "rows8", "rows16"]:
                # Row scales are fp16 here, as weights in fp16 make them there.
                for scaled in [False, True] if name == "f16" else [False]:
                    granularity = (
                        {"type": "per_tensor"}
                        if spread == "tensor"
                        else {
                            "type": "per_grouped_channel",
                            "axis": 0,
                            "group_size": int(spread[4:]),
                        }
                    )
                    spec = PalettizationSpec(
                        n_bits=bits, granularity=granularity, enable_per_channel_scale=scaled
                    )
                    fake = _KMeansFakePalettize(
                        n_bits=spec.n_bits,
                        lut_qspec=None,
                        granularity=spec.granularity,
                        cluster_dim=1,
                        enable_per_channel_scale=scaled,
                    )
                    fake._initialize(w)
                    case = f"{name}.{spread}.{bits}{'.scaled' if scaled else ''}"
                    lut = fake.lut.reshape(-1, 2**bits).float().contiguous()
                    out[f"{case}.table"] = lut
                    out[f"{case}.codes"] = fake.indices.to(torch.uint8).contiguous()
    save_file(out, folder / "palettes.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
