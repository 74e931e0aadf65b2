"""Makes crates/carat-quant/tests/recipes/expected.json with coreai-opt.

    V/bin/python scripts/make_recipe_golden.py crates/carat-quant/tests/recipes

For every recipe there: what `build_module_config_dict` and the levels above it
(module_state_spec, op_type_config, op_state_spec) make of each weight of a small
model, as `dtype scheme granularity` or `nbits granularity`, or null.
"""

import json
import sys
from pathlib import Path

import torch.nn as nn
import yaml
from coreai_opt._utils.config_utils import ConfigLevel
from coreai_opt.palettization import KMeansPalettizerConfig
from coreai_opt.quantization import QuantizerConfig


def group(**children):
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def linear():
    return nn.Linear(64, 64, bias=False)


def model():
    layers = nn.ModuleList(
        group(
            self_attn=group(**{f"{n}_proj": linear() for n in "qkvo"}),
            mlp=group(**{f"{n}_proj": linear() for n in ["gate", "up", "down"]}),
        )
        for _ in range(3)
    )
    inner = group(embed_tokens=nn.Embedding(64, 64), layers=layers)
    return group(model=inner, lm_head=linear())


def describe(spec):
    if spec is None:
        return None
    g = spec.granularity.model_dump()
    what = g["type"]
    if "block_size" in g:
        size = g["block_size"]
        what += f" {size if isinstance(size, int) else size[-1]}"
    if "group_size" in g:
        what += f" {g['group_size']}"
    if hasattr(spec, "cluster_dim"):
        return f"{spec.n_bits} {what}"
    return f"{str(spec.dtype).removeprefix('torch.')} {spec.qscheme.value} {what}"


def pick(specs):
    if specs is None:
        return None
    return specs["weight"] if "weight" in specs else specs.get("*")


def weights(config, root):
    levels = config.build_module_config_dict(root)
    out = {}
    for name, module in root.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        for level in [ConfigLevel.MODULE_NAME, ConfigLevel.MODULE_TYPE, ConfigLevel.GLOBAL]:
            if name in levels[level]:
                found = levels[level][name]
                break
        else:
            out[name] = None
            continue
        op = "embedding" if isinstance(module, nn.Embedding) else "linear"
        if found.module_state_spec and pick(found.module_state_spec) is not None:
            spec = pick(found.module_state_spec)
        elif op in found.op_type_config:
            spec = pick(found.op_type_config[op].op_state_spec)
        else:
            spec = pick(found.op_state_spec)
        out[name] = describe(spec)
    return out


def main(folder):
    out = {}
    for path in sorted(folder.glob("*.yaml")):
        top = yaml.safe_load(path.read_text())
        wrapped = "extend" in path.read_text()
        root = group(extend=model()) if wrapped else model()
        if "quantization_config" in top:
            config = top["quantization_config"]
            config.pop("calibrate_activations", None)
            found = weights(QuantizerConfig(**config), root)
        else:
            found = weights(KMeansPalettizerConfig(**top["kmeans_palettization_config"]), root)
        out[path.stem] = {name.removeprefix("extend."): spec for name, spec in found.items()}
    (folder / "expected.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
