#!/usr/bin/env python3
"""Interleaved comparison of carat with a native llama.cpp on the same GGUF files.

    scripts/compare_llamacpp.py --carat target/release/carat --llama-bench .../llama-bench \
        --llama-commit 0c1e57098 --out benches/records/NAME.jsonl MODEL.gguf [...]

Each round runs both programs once per model and thread count, in turns, so that
drift of the machine hits both alike; the ratio of a round is what counts. One
JSON line per (model, threads, load): every round's figures, medians of the
per-round ratios, machine, commits. With --busy N, N other processes compute
meanwhile.
"""
import argparse, json, os, platform, statistics, subprocess, sys, time


def carat(args, model, threads):
    out = subprocess.run(
        [args.carat, "bench", model, "-p", str(args.prompt), "-n", str(args.new), "-r", "1",
         "--threads", str(threads), "--json"],
        capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(f"carat bench failed: {out.stderr}")
    record = json.loads(out.stdout)["record"]
    return {
        "prompt_tps": record["prompt_tps"]["median"], "decode_tps": record["decode_tps"]["median"],
        "read_bandwidth": record["read_bandwidth"], "bytes_per_token": record["bytes_per_token"],
        "effective_bandwidth": record["effective_bandwidth"], "backend": record["backend"],
    }


def llama(args, model, threads):
    out = subprocess.run(
        [args.llama_bench, "-m", model, "-t", str(threads), "-p", str(args.prompt), "-n", str(args.new),
         "-r", "1", "-o", "json"], capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(f"llama-bench failed: {out.stderr}")
    rows = json.loads(out.stdout)
    return {
        "prompt_tps": next(r["avg_ts"] for r in rows if r["n_prompt"] and not r["n_gen"]),
        "decode_tps": next(r["avg_ts"] for r in rows if r["n_gen"] and not r["n_prompt"]),
    }


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--carat", required=True)
    p.add_argument("--llama-bench", required=True)
    p.add_argument("--llama-commit", required=True)
    p.add_argument("--carat-commit", help="where this is no checkout")
    p.add_argument("--out", required=True)
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", default="1,2")
    p.add_argument("--busy", type=int, default=0, help="other processes that keep a core busy")
    p.add_argument("models", nargs="+")
    args = p.parse_args()
    commit = args.carat_commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "")
    flags = next((l for l in open("/proc/cpuinfo") if l.startswith("flags")), "").split()
    counts = [int(t) for t in args.threads.split(",")]
    for model in args.models:
        by_threads = {threads: [] for threads in counts}
        # A round covers every thread count, so that those compare as well.
        for n in range(args.rounds):
            for threads in counts if n % 2 == 0 else counts[::-1]:
                order = [("carat", carat), ("llama.cpp", llama)]
                hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
                try:
                    got = {name: f(args, model, threads) for name, f in (order if n % 2 == 0 else order[::-1])}
                finally:
                    for hog in hogs:
                        hog.kill()
                        hog.wait()
                got["load_average"] = os.getloadavg()[0]
                by_threads[threads].append(got)
                time.sleep(0.5)
        for threads, rounds in by_threads.items():
            ratio = {
                k: statistics.median(r["carat"][k] / r["llama.cpp"][k] for r in rounds)
                for k in ("prompt_tps", "decode_tps")
            }
            median = {
                name: {k: statistics.median(r[name][k] for r in rounds) for k in ("prompt_tps", "decode_tps")}
                for name in ("carat", "llama.cpp")
            }
            record = {
                "schema": "carat.compare", "version": 1, "date": time.strftime("%Y-%m-%d"),
                "model": os.path.basename(model), "threads": threads, "busy_neighbours": args.busy,
                "prompt_tokens": args.prompt, "new_tokens": args.new,
                "carat_commit": commit, "llama_commit": args.llama_commit,
                "machine": {"cpu": cpu, "cores": os.cpu_count(), "os": platform.platform(),
                            "amx": "amx_int8" in flags, "avx512_vnni": "avx512_vnni" in flags},
                "ratio": ratio, "median": median, "rounds": rounds,
            }
            with open(args.out, "a") as f:
                f.write(json.dumps(record) + "\n")
            busy = f" ({args.busy} busy)" if args.busy else ""
            print(f"{os.path.basename(model)} t={threads}{busy}: "
                  f"prompt {median['carat']['prompt_tps']:.0f} / {median['llama.cpp']['prompt_tps']:.0f} = {ratio['prompt_tps']:.2f}x, "
                  f"decode {median['carat']['decode_tps']:.1f} / {median['llama.cpp']['decode_tps']:.1f} = {ratio['decode_tps']:.2f}x",
                  flush=True)


if __name__ == "__main__":
    main()
