#!/usr/bin/env python3
"""Fidelity of recipes at their sizes: the oracle on each bundle against the oracle
on the checkpoint.

    V/bin/python scripts/compare_recipes.py --carat target/release/carat \
        --model models/wren-dense --prompts models/prompts.jsonl --out benches/records/NAME.jsonl

Teacher-forced over each prompt and its reference continuation. One line a recipe:
bits for each quantized weight (scales, zero points and tables included), mean and
largest KL divergence in nats, and the share of positions with the same best token.
Nothing in it depends on the machine's speed.
"""
import argparse, json, subprocess, sys, tempfile
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--carat", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    def carat(*words):
        run = subprocess.run([args.carat, *map(str, words)], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(run.stderr)
        return run.stdout

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    records = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        # One sequence after the other in one call each: contexts stay apart.
        texts = [r["prompt_ids"] + r["dense"]["ids"] for r in records]

        def log_probabilities(model):
            out = []
            for ids in texts:
                (folder / "ids.json").write_text(json.dumps(ids))
                carat("logits", model, "--ids", folder / "ids.json", "--out", folder / "l.safetensors",
                      "--engine", "oracle")
                logits = load_file(folder / "l.safetensors")["logits"].astype(np.float64)
                logits -= logits.max(1, keepdims=True)
                out.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
            return np.concatenate(out)

        recipes = [(name, name) for name in PRESETS]
        for scheme, search in SCHEMES:
            path = folder / f"int4_{scheme}_{search}.yaml"
            path.write_text(INT4.format(scheme=scheme, search=search))
            recipes.append((path.stem, path))
        reference = log_probabilities(args.model)
        with open(args.out, "w") as out:
            for name, recipe in recipes:
                made = json.loads(carat("convert", args.model, folder / "b", "--recipe", recipe,
                                        "--target", "portable", "--force", "--json"))["theory"]
                parts = sum(made[k] for k in ["codes", "scales", "zero_points", "tables"])
                found = log_probabilities(folder / "b")
                kl = (np.exp(reference) * (reference - found)).sum(1)
                line = {
                    "recipe": name, "model": Path(args.model).name, "commit": commit,
                    "bits_per_weight": round(8 * parts / made["quantized_weights"], 3),
                    "kl_mean": float(f"{kl.mean():.3g}"), "kl_max": float(f"{kl.max():.3g}"),
                    "top1": round(float((reference.argmax(1) == found.argmax(1)).mean()), 4),
                    "positions": len(kl),
                }
                out.write(json.dumps(line) + "\n")
                print(line)


if __name__ == "__main__":
    main()
