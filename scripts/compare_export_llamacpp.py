#!/usr/bin/env python3
"""Exports Wren under several recipes and has llama.cpp answer from the files.

    V/bin/pip install xllamacpp numpy safetensors
    V/bin/python scripts/compare_export_llamacpp.py --carat target/release/carat

For each recipe: the largest difference between llama.cpp's ten best
log-probabilities after twelve ids and those of the oracle on the bundle, and
whether both choose the same token. llama.cpp rounds activations to 8 bits, so the
file as it came (`keep`) has a difference too: it is the measure of the others.
"""
import argparse, json, subprocess, sys, tempfile
from pathlib import Path

import numpy as np
import xllamacpp
from safetensors.numpy import load_file

IDS = [2052, 300, 265, 400, 32, 511, 700, 33, 90, 1200, 14, 60]
RECIPES = [("keep", "native"), ("int8lin", "native"), ("4bit", "native"), ("mxfp4", "portable")]


def best(gguf):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(gguf), 256, 1, False
    server = xllamacpp.Server(params)
    request = {"prompt": IDS, "n_predict": 1, "n_probs": 10, "temperature": 0}
    answer = server.handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    # The field's place depends on the version.
    found = answer.get("completion_probabilities") or answer["choices"][0]["logprobs"]["content"]
    return {t["id"]: t["logprob"] for t in found[0]["top_logprobs"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--carat", required=True)
    args = parser.parse_args()
    model = Path(__file__).parent.parent / "models/wren-ternary-tq2_0.gguf"

    def carat(*words):
        run = subprocess.run([args.carat, *map(str, words)], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(run.stderr)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "ids.json").write_text(json.dumps(IDS))
        for recipe, target in RECIPES:
            bundle, gguf, out = folder / recipe, folder / f"{recipe}.gguf", folder / "l.safetensors"
            carat("convert", model, bundle, "--recipe", recipe, "--target", target)
            carat("export", bundle, gguf, "--to", "gguf", "--like", model)
            carat("logits", bundle, "--ids", folder / "ids.json", "--out", out, "--engine", "oracle")
            logits = load_file(out)["logits"][-1].astype(np.float64)
            logits -= logits.max() + np.log(np.exp(logits - logits.max()).sum())
            top = best(gguf)
            worst = max(abs(logits[i] - p) for i, p in top.items())
            same = int(np.argmax(logits)) == max(top, key=top.get)
            print(f"{recipe:8} max|difference| {worst:.3f}, same token: {same}")


if __name__ == "__main__":
    main()
