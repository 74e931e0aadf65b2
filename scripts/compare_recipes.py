#!/usr/bin/env python3
"""Fidelity of recipes at their sizes: the oracle on each bundle against the oracle
on the checkpoint.

    V/bin/python scripts/compare_recipes.py --carat target/release/carat \
        --model models/wren-dense --prompts models/prompts.jsonl --out benches/fidelity/NAME.jsonl

Teacher-forced over each prompt and its reference continuation, or over `--text FILE`
in pieces of `--sequence` tokens. `--recipe` (several) replaces the built-in list, and so
does `--calibration FILE`: then each grid of GRIDS (those of `--grid`, if given) is made
in each way of METHODS (those of `--method`), which all take the same bytes. `--tokens`
and `--calibration-tokens` say how much of the texts is read; `--keep` leaves modules
alone. `--act int8` runs native
bundles on the CPU engine with int8 activations, where scales of activations show; the
reference stays the oracle on the checkpoint.

One line a recipe: bits for each quantized weight (scales, zero points and tables
included), mean and largest KL divergence in nats, the share of positions with the same
best token, and the margin-clear flips: positions whose best token differs although the
reference's is ahead of its second by at least 0.1 in probability. Nothing in it depends
on the machine's speed.
"""
import argparse, hashlib, json, subprocess, sys, tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

INT4 = """quantization_config:
  global_config:
    op_state_spec:
      weight:
        dtype: int4
        qscheme: {scheme}
        granularity: {{type: per_block, axis: 1, block_size: 32}}
        range_calculator_cls: {search}
    op_input_spec: null
    op_output_spec: null
"""
SCHEMES = [(s, m) for s in ["symmetric", "symmetric_with_clipping", "asymmetric"] for m in ["minmax", "mse"]]
PRESETS = ["int8lin", "int8_channel", "int4lin_sym", "mxfp4", "nvfp4", "4bit_weight_palettized_group8",
           "4bit_weight_palettized_group32", "pal6_g8"]


LINEAR = """quantization_config:
  global_config:
    op_state_spec:
      weight:
        dtype: {dtype}
        qscheme: {scheme}
        granularity: {spread}
        range_calculator_cls: {search}
    op_input_spec: null
    op_output_spec: null
"""
PALETTE = """kmeans_palettization_config:
  global_config:
    op_state_spec:
      weight:
        n_bits: {bits}
        granularity: {{type: per_grouped_channel, axis: 0, group_size: {rows}}}
"""


def linear(dtype, scheme, block):
    spread = f"{{type: per_block, axis: 1, block_size: {block}}}" if block else "{type: per_channel, axis: 0}"
    return lambda search: LINEAR.format(dtype=dtype, scheme=scheme, spread=spread, search=search)


def palette(bits, rows):
    return lambda search: PALETTE.format(bits=bits, rows=rows)


# Recipes by what `range_calculator_cls` is to be.
GRIDS = {
    "int4.block32": linear("int4", "symmetric", 32),
    "int4.block128": linear("int4", "symmetric", 128),
    "int4.channel": linear("int4", "symmetric", None),
    "int8.block32": linear("int8", "symmetric", 32),
    "int8.channel": linear("int8", "symmetric", None),
    "lut4.rows8": palette(4, 8),
    "lut3.rows8": palette(3, 8),
}
# `carat.calibration` and `range_calculator_cls`; None is without a text.
METHODS = {
    "none": (None, "minmax"),
    "clip search": (None, "mse"),
    "importance": ("{}", "mse"),
    "awq": ("{scales: awq}", "mse"),
    "smoothquant": ("{scales: smoothquant}", "minmax"),
    "gptq": ("{rounding: gptq}", "mse"),
    "gptq, sweeps": ("{rounding: gptq, sweeps: 8}", "mse"),
    "awq, gptq": ("{scales: awq, rounding: gptq}", "mse"),
    "awq, gptq, sweeps": ("{scales: awq, rounding: gptq, sweeps: 8}", "mse"),
}


def calibrated_recipes(args, folder):
    """Files of each grid in each way."""
    found = []
    for grid in args.grid or GRIDS:
        for method in args.method or METHODS:
            calibration, search = METHODS[method]
            if grid.startswith("lut") and method == "clip search":
                continue  # palettes have no range
            text = GRIDS[grid](search)
            if calibration:
                inner = calibration.strip("{}")
                tokens = f"tokens: {args.calibration_tokens}"
                text = f"carat: {{calibration: {{{', '.join(filter(None, [tokens, inner]))}}}}}\n" + text
            if args.keep:
                text += f"  module_name_configs:\n    '{args.keep}': null\n"
            path = folder / f"{grid} {method}.yaml"
            path.write_text(text)
            found.append((grid, path, method))
    return found



def softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--carat", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts")
    parser.add_argument("--text")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--calibration")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--grid", action="append", choices=list(GRIDS))
    parser.add_argument("--method", action="append", choices=list(METHODS))
    parser.add_argument("--keep", help="modules that stay as they are, a regular expression")
    parser.add_argument("--append", action="store_true", help="add to the file")
    parser.add_argument("--act")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    def carat(*words):
        run = subprocess.run([args.carat, *map(str, words)], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(run.stderr)
        return run.stdout

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        # One sequence after the other in one call each: contexts stay apart.
        if args.prompts:
            records = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
            texts = [r["prompt_ids"] + r["dense"]["ids"] for r in records]
        else:
            words = Path(args.text).read_text()[: 8 * args.tokens]
            (folder / "text").write_text(words)
            ids = json.loads(carat("tokenize", args.model, "--file", folder / "text", "--json"))["ids"][: args.tokens]
            texts = [ids[i : i + args.sequence] for i in range(0, len(ids), args.sequence)]

        def log_probabilities(model, *how):
            for ids in texts:
                (folder / "ids.json").write_text(json.dumps(ids))
                carat("logits", model, "--ids", folder / "ids.json", "--out", folder / "l.safetensors", *how)
                yield softmax(load_file(folder / "l.safetensors")["logits"])

        recipes = [(Path(r).stem, r, None) for r in args.recipe or []]
        if not recipes and args.calibration:
            recipes = calibrated_recipes(args, folder)
        if not recipes:
            recipes = [(name, name, None) for name in PRESETS]
            for scheme, search in SCHEMES:
                path = folder / f"int4_{scheme}_{search}.yaml"
                path.write_text(INT4.format(scheme=scheme, search=search))
                recipes.append((path.stem, path, None))
        # On disk, or a large vocabulary would not fit in memory.
        for i, reference in enumerate(log_probabilities(args.model, "--engine", "oracle")):
            np.save(folder / f"{i}.npy", reference.astype(np.float32))
        how = ["--act", args.act] if args.act else ["--engine", "oracle"]
        target = "native" if args.act else "portable"
        with open(args.out, "a" if args.append else "w") as out:
            for name, recipe, method in recipes:
                calibrated = args.calibration and Path(recipe).is_file() and "calibration:" in Path(recipe).read_text()
                made = json.loads(carat("convert", args.model, folder / "b", "--recipe", recipe, "--target", target,
                                        "--force", "--json",
                                        *(["--calibration", args.calibration] if calibrated else [])))["theory"]
                parts = sum(made[k] for k in ["codes", "scales", "zero_points", "tables"])
                kl, same, flips, clear = [], [], 0, 0
                for i, found in enumerate(log_probabilities(folder / "b", *how)):
                    reference = np.load(folder / f"{i}.npy").astype(np.float64)
                    kl.append((np.exp(reference) * (reference - found)).sum(1))
                    same.append(reference.argmax(1) == found.argmax(1))
                    top = np.exp(np.sort(np.partition(reference, -2, axis=1)[:, -2:], axis=1))
                    margin = top[:, 1] - top[:, 0] >= 0.1
                    clear += int(margin.sum())
                    flips += int((margin & ~same[-1]).sum())
                kl, same = np.concatenate(kl), np.concatenate(same)
                line = {
                    "recipe": name, "model": Path(args.model).name, "commit": commit,
                    "engine": f"cpu, act {args.act}" if args.act else "oracle",
                    "bits_per_weight": round(8 * parts / made["quantized_weights"], 3),
                    "kl_mean": float(f"{kl.mean():.3g}"), "kl_max": float(f"{kl.max():.3g}"),
                    "top1": round(float(same.mean()), 4), "flips": flips, "clear": clear,
                    "positions": len(kl),
                }
                if method:
                    line["method"] = method
                if args.keep:
                    line["kept"] = args.keep
                if calibrated:
                    line["calibration_tokens"] = args.calibration_tokens
                    line["calibration_text"] = hashlib.sha256(Path(args.calibration).read_bytes()).hexdigest()[:16]
                out.write(json.dumps(line) + "\n")
                out.flush()
                print(line)


if __name__ == "__main__":
    main()
