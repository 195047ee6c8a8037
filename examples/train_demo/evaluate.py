"""Measure a trained demo model: ``python evaluate.py --run RUN --corpus FOLDER [--out report.json]``.

Held-out bits per byte and expert skew for each domain, samples, and the check that samples are not copies.
The weights are rounded to bfloat16 first, so the figures are those of the exported model.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data import ASSISTANT, BOS, EOS, USER, encode_documents, read_corpus
from export import load_model
from model import DemoModel
from tokenizers import Tokenizer

PROMPTS = (
    f"{BOS}once upon a time",
    f"{BOS}one day, a little",
    f"{BOS}{USER}tell me a story about a dog.{ASSISTANT}",
    f"{BOS}{USER}can you tell me a story about a girl named lily?{ASSISTANT}",
    f"{BOS}he turned to the window, and",
)
COPY_RUN_WORDS = 30  # a sample with a run this long counts as a copy
TOP_P = 0.95


@torch.no_grad()
def measure_domain(model: DemoModel, tokens: np.ndarray, num_bytes: int, length: int, max_rows: int) -> dict:
    """Return bits per byte over non-overlapping rows, and every sparse layer's load share per expert.

    Bits per byte is nats per token times tokens per byte of the whole held-out text, over ln 2.
    """
    starts = np.arange(0, len(tokens) - length - 1, length)
    starts = starts[np.linspace(0, len(starts) - 1, min(max_rows, len(starts))).astype(int)]
    for layer in model.moe_layers:
        layer.load.zero_()
    total_nats = 0.0
    for group in np.array_split(starts, max(1, len(starts) // 4)):
        rows = torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in group]).astype(np.int64))
        logits = model(rows[:, :-1])
        total_nats += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    num_tokens = len(starts) * length
    nats_per_token = total_nats / num_tokens
    return {
        "tokens": num_tokens,
        "nats_per_token": nats_per_token,
        "bits_per_byte": nats_per_token * len(tokens) / num_bytes / math.log(2),
        "load_share": [(layer.load / layer.load.sum()).tolist() for layer in model.moe_layers],
    }


def compare_skew(first: list[list[float]], second: list[list[float]], num_hottest: int) -> list[dict]:
    """Return, per sparse layer, how much the hottest experts of each domain carry and how many they share."""
    layers = []
    for shares in zip(first, second, strict=False):
        hottest = [set(np.argsort(share)[-num_hottest:].tolist()) for share in shares]
        layers.append(
            {
                "hottest_share": [float(sum(sorted(share)[-num_hottest:])) for share in shares],
                "max_over_mean": [float(max(share) * len(share)) for share in shares],
                "hottest_in_common": len(hottest[0] & hottest[1]),
                # 1: the same load; 0: no expert shared.
                "overlap": float(np.minimum(*map(np.array, shares)).sum()),
            }
        )
    return layers


@torch.no_grad()
def generate(
    model: DemoModel,
    prompt_ids: list[int],
    eos_id: int,
    temperatures: list[float],
    *,
    num_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Return new token ids, up to eos, one list per temperature (0 is greedy; top_p is 0.95).

    All rows share the prompt and run as one batch.
    """
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.tensor([prompt_ids] * len(temperatures))
    for _ in range(num_tokens):
        next_ids = []
        for logits, temperature in zip(model(ids_BS)[:, -1], temperatures, strict=False):
            if temperature == 0:
                next_ids.append(int(logits.argmax()))
                continue
            probs, order = (logits / temperature).softmax(-1).sort(descending=True)
            probs[probs.cumsum(0) - probs >= TOP_P] = 0.0
            next_ids.append(int(order[torch.multinomial(probs, 1, generator=generator)]))
        new_BS = torch.tensor(next_ids)[:, None]
        ids_BS = torch.cat((ids_BS, new_BS), dim=1)
        if (ids_BS == eos_id).any(dim=1).all():
            break
    rows = [row[len(prompt_ids) :] for row in ids_BS.tolist()]
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


def longest_copied_runs(samples: list[str], documents: list[str], limit: int) -> list[int]:
    """Return for each sample the longest run of words, up to ``limit``, that also stands in a document.

    Compares 64-bit rolling hashes of every run, so a chance hit is out of the question in practice.
    """
    word_ids: dict[str, int] = {}

    def hash_seeds(text: str) -> np.ndarray:
        ids = [word_ids.setdefault(word, len(word_ids)) for word in text.split()]
        return (np.array(ids, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)

    known = hash_seeds(" <|break|> ".join(documents))
    texts = [hash_seeds(sample) for sample in samples]
    base = np.uint64(0xD6E8FEB86659FD93)
    longest = [0] * len(samples)
    text_hashes = [np.zeros_like(text) for text in texts]
    starts, known_hash = np.arange(len(known)), np.zeros_like(known)
    for run in range(1, limit + 1):
        text_hashes = [
            h[: max(0, len(t) - run + 1)] * base + t[run - 1 :]
            for h, t in zip(text_hashes, texts, strict=True)
        ]
        is_inside = starts + run <= len(known)
        starts, known_hash = starts[is_inside], known_hash[is_inside]
        known_hash = known_hash * base + known[starts + run - 1]
        wanted = np.unique(np.concatenate(text_hashes))
        if not len(wanted):
            break
        is_met = wanted[np.searchsorted(wanted, known_hash).clip(max=len(wanted) - 1)] == known_hash
        starts, known_hash = starts[is_met], known_hash[is_met]  # only these can grow into a longer run
        met = np.unique(known_hash)
        for idx, hashes in enumerate(text_hashes):
            if np.isin(hashes, met).any():
                longest[idx] = run
    return longest


def copy_check(samples: list[str], documents: list[str]) -> dict:
    """Return the longest copied run of words of each sample, and whether all are short enough."""
    runs = longest_copied_runs(samples, documents, COPY_RUN_WORDS)
    return {"longest_copied_words": runs, "is_free_of_long_copies": max(runs) < COPY_RUN_WORDS}


def evaluate(run: Path, corpus_folder: Path, length: int, max_rows: int) -> dict:
    """Return the whole report."""
    corpus = read_corpus(corpus_folder)
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    model = load_model(run / "checkpoint.pt")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_weight" not in name:
                parameter.copy_(parameter.bfloat16().float())
    report: dict = {}
    for domain, documents in (("novels", corpus.held_out_novels), ("stories", corpus.held_out_stories)):
        num_bytes = sum(len(document.encode()) for document in documents)
        tokens = encode_documents(tokenizer, documents)
        report[domain] = measure_domain(model, tokens, num_bytes, length, max_rows)
    loads = [report[domain].pop("load_share") for domain in ("novels", "stories")]
    report["skew_novels_vs_stories"] = compare_skew(*loads, num_hottest=model.config.num_experts // 4)
    report["load_share"] = dict(zip(("novels", "stories"), loads, strict=False))

    eos_id = tokenizer.token_to_id(EOS)
    samples = []
    temperatures = [0.0, 0.8, 0.8, 0.8]
    for seed, prompt in enumerate(PROMPTS):
        prompt_ids = tokenizer.encode(prompt).ids
        rows = generate(model, prompt_ids, eos_id, temperatures, num_tokens=160, seed=seed)
        for temperature, ids in zip(temperatures, rows, strict=False):
            samples.append({"prompt": prompt, "temperature": temperature, "text": tokenizer.decode(ids)})
    report["samples"] = samples
    report["copy_check"] = copy_check([s["text"] for s in samples], corpus.novels + corpus.stories)
    return report


def main() -> None:
    """Read the flags, print the report and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="train.py's --out folder")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--max-rows", type=int, default=24, help="rows per domain")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = evaluate(args.run, args.corpus, args.length, args.max_rows)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    for sample in report["samples"]:
        print(f"--- temperature {sample['temperature']}\n{sample['prompt']} [...]{sample['text']}")
    print(json.dumps({key: report[key] for key in report if key not in ("samples", "load_share")}, indent=1))


if __name__ == "__main__":
    main()
