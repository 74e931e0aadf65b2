#!/usr/bin/env python3
"""Recipes against what `carat allocate` makes of a scan within the same bytes.

    scripts/compare_allocations.py --carat target/release/carat --model models/wren-dense \
        --fixture F.json --scan SCAN.jsonl --recipe 4bit --recipe mixed48_g8 \
        --text HELD_OUT.txt --out benches/fidelity/NAME.jsonl

For each recipe one line, and one for the recipe of equal bytes: bytes and bits in
theory, and on each text that the scan did not ask about the mean KL divergence with its
95 % interval, the largest, and flips at clear positions, as `carat simulate` finds them
in fp32 with weights as the recipe leaves them. Nothing in it depends on the machine's
speed. A text that is a file of questions (.jsonl) is those questions with their answers.
"""
import argparse, json, subprocess, sys, tempfile
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ["--carat", "--model", "--fixture", "--scan", "--out"]:
        parser.add_argument(name, required=True)
    parser.add_argument("--recipe", action="append", required=True)
    parser.add_argument("--text", action="append", required=True)
    args = parser.parse_args()

    def carat(*words, fine=(0,)):
        run = subprocess.run([args.carat, *map(str, words), "--json"], capture_output=True, text=True)
        if run.returncode not in fine:
            sys.exit(run.stderr)
        return json.loads(run.stdout)

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    scan = json.loads(Path(args.scan).read_text().splitlines()[0])
    with tempfile.TemporaryDirectory() as folder, open(args.out, "w") as out:

        texts = {}
        for text in args.text:
            plain = Path(text)
            if text.endswith(".jsonl"):
                rows = [json.loads(line) for line in plain.read_text().splitlines()]
                plain = Path(folder) / "text.txt"
                plain.write_text("".join(f"{r['question']}\n{r['answer']}\n\n" for r in rows))
            texts[text] = plain

        def measure(name, recipe, more):
            line = {"recipe": name, "model": Path(args.model).name, "commit": commit, **more, "texts": []}
            for text, plain in texts.items():
                # 1 is a verdict like any other here.
                found = carat("simulate", args.model, "--recipe", recipe, "--fixture", args.fixture,
                              "--act", "f32", "--text", plain, fine=(0, 1))
                line["bytes"] = found["recipe"]["bytes"]
                line["bits_per_weight"] = round(found["recipe"]["bits_per_weight"], 3)
                seen = found["runs"][0]["text"]
                line["texts"].append({
                    "text": Path(text).name, "positions": seen["positions"],
                    "kl": seen["kl"]["value"], "kl_low": seen["kl"]["low"], "kl_high": seen["kl"]["high"],
                    "kl_max": seen["kl_max"], "clear_flips": seen["clear_flips"], "clear": seen["clear"],
                })
            positions = sum(t["positions"] for t in line["texts"])
            line["kl"] = sum(t["kl"] * t["positions"] for t in line["texts"]) / positions
            line["clear_flips"] = sum(t["clear_flips"] for t in line["texts"])
            line["clear"] = sum(t["clear"] for t in line["texts"])
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(name, line["bytes"], line["bits_per_weight"], f"{line['kl']:.5f}", line["clear_flips"])
            return line["bytes"]

        for recipe in args.recipe:
            name = Path(recipe).stem
            budget = measure(name, recipe, {})
            path = Path(folder) / f"{name}-allocated.yaml"
            made = carat("allocate", args.model, "--scan", args.scan, "--budget", budget, "--out", path)
            measure(f"allocated within {name}", path, {
                "family": scan["method"], "scanned_bits": scan["bits"], "scanned_positions": scan["positions"],
                "matrices": {m["bits"]: m["matrices"] for m in made["matrices"]},
            })


if __name__ == "__main__":
    main()
