"""Write the model card of an exported demo model: ``python card.py RUN REPORT OUT``.

REPORT is the report.json of evaluate.py. Every figure comes from the report, the log or the configuration;
the loss curve is copied beside the card.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
tags: [mixture-of-experts, deepseek_v3, demo]
---
# moesaic demo

A mixture-of-experts language model small enough to travel inside a Python package, for trying out and
testing moesaic without a download. It writes short children's stories, in lower case only. It is a toy:
it knows no facts, follows no instructions beyond "tell me a story about ...", and loses its thread.

| | |
|---|---|
| family | DeepSeek-V3 (`DeepseekV3ForCausalLM`): latent attention, sigmoid gate, selection bias |
| parameters | {num_parameters:,}; about {num_active:,} used per token |
| layers | {num_layers}, the first dense |
| experts | {num_experts} routed, {num_chosen} per token, and 1 shared; width {expert_width} |
| width | model {hidden_size}, latent {latent}, heads {num_heads} x ({nope_width} + {rope_width}) |
| vocabulary | {vocab_size}, byte-level BPE: any UTF-8 text goes in and comes out unchanged |
| positions | {max_positions}; trained on rows of 256 and 512 tokens, one step in eight on 1024 |
| weights | bfloat16; gate and selection bias float32 |
| trained on | {tokens:,} tokens in {minutes:.0f} minutes on one CPU core; stories {story_passes:.2f} times |

{state}

## Figures on held-out text

Held out: two whole novels (Doyle 1902, Woolf 1927) and the last 3 % of the stories. Weights rounded to
bfloat16, arithmetic in float32, rows of {length} tokens.

| domain | bits per byte | nats per token | tokens measured |
|---|---|---|---|
{domain_rows}

Where the two domains send their tokens. "Overlap" is the sum over experts of the smaller of the two load
shares: 1 if both load the experts alike, 0 if they share none.

| layer | hottest expert over mean, novels | stories | overlap | of the {num_hottest} hottest, in common |
|---|---|---|---|---|
{skew_rows}

Copy check: of 20 samples (5 prompts, 160 tokens at most, 5 of them greedy) the longest run of words that
also stands in the training text has {longest_copy} words; the limit is 30.

![loss curve](loss.png)

## Samples

{samples}

## Data and rights

- Weights: Apache-2.0, trained from nothing by the moesaic authors.
- 57 English novels published 1880-1930, from the collection computationalstylistics/100_english_novels:
  public domain in the United States (published before 1931), by authors dead for over 70 years.
- About 5,300 stories of TinyStories (R. Eldan and Y. Li, arXiv:2305.07759), CDLA-Sharing-1.0. The data
  itself is not part of this model.

Both were lower-cased. The chat template lower-cases what the user writes.

## Limits

Lower case and English only. The novels reflect the prejudices of their time. Chat is one request for a
story and its answer; a system message is put before the request. Text past {max_positions} tokens is
outside what it was trained on, and past 512 it saw little.

## How to make it again

`examples/train_demo` in the moesaic repository: `train.py`, `export.py`, `evaluate.py`, `card.py`.
"""


def describe_state(lr_factor: float) -> str:
    """Return a sentence on whether the learning rate had come down when training stopped."""
    if lr_factor <= 0.02:
        return "Training ran its whole schedule; the learning rate ended at zero."
    return (
        f"Training was stopped before the end of its schedule, with the learning rate at {lr_factor:.0%} of "
        "its peak: a complete run would do better."
    )


def write_card(run: Path, report_path: Path, out: Path, length: int) -> None:
    """Write OUT/README.md and OUT/loss.png."""
    report = json.loads(report_path.read_text())
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    config = saved["config"]
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = [row for row in rows if "lr_factor" in row][-1]
    weights = [v for name, v in saved["model"].items() if not name.endswith("selection_bias")]
    num_parameters = sum(weight.numel() for weight in weights)
    num_sparse = config["num_layers"] - config["num_dense_layers"]
    num_idle = config["num_experts"] - config["num_experts_per_token"]
    num_idle_weights = num_sparse * num_idle * 3 * config["hidden_size"] * config["expert_width"]
    domain_rows = [
        f"| {name} | {report[name]['bits_per_byte']:.3f} | {report[name]['nats_per_token']:.3f} "
        f"| {report[name]['tokens']:,} |"
        for name in ("novels", "stories")
    ]
    skew_rows = [
        f"| {config['num_dense_layers'] + i} | {skew['max_over_mean'][0]:.2f} "
        f"| {skew['max_over_mean'][1]:.2f} | {skew['overlap']:.2f} | {skew['hottest_in_common']} |"
        for i, skew in enumerate(report["skew_novels_vs_stories"])
    ]
    samples = [report["samples"][idx] for idx in (0, 1, 5, 9, 13, 17)]
    card = CARD.format(
        num_parameters=num_parameters,
        num_active=num_parameters - num_idle_weights,  # both embedding matrices counted, as everywhere here
        num_chosen=config["num_experts_per_token"],
        latent=config["kv_latent_width"],
        tokens=saved["tokens"],
        minutes=saved["spent_s"] / 60,
        story_passes=last["story_passes"],
        state=describe_state(last["lr_factor"]),
        length=length,
        num_hottest=config["num_experts"] // 4,
        longest_copy=max(report["copy_check"]["longest_copied_words"]),
        domain_rows="\n".join(domain_rows),
        skew_rows="\n".join(skew_rows),
        samples="\n\n".join(
            f"Temperature {s['temperature']}, after `{s['prompt']}`:\n\n"
            + "\n".join(f"> {line}" for line in s["text"].strip().splitlines())
            for s in samples
        ),
        **{k: v for k, v in config.items() if k in CARD and k not in ("num_experts_per_token",)},
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    if (run / "loss.png").exists():
        shutil.copyfile(run / "loss.png", out / "loss.png")


def main() -> None:
    """Read the three paths and write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="train.py's --out folder")
    parser.add_argument("report", type=Path, help="evaluate.py's report")
    parser.add_argument("out", type=Path, help="the exported model's folder")
    parser.add_argument("--length", type=int, default=512, help="evaluate.py's --length, for the text")
    args = parser.parse_args()
    write_card(args.run, args.report, args.out, args.length)


if __name__ == "__main__":
    main()
