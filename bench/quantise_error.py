"""What rounding weights or KV to each format costs: errors, bits per number, and bits per byte of text.

Weights are random (normal) and a checkpoint's own matrices; an error is the norm of the difference over the
norm. A matmul's rows are normal, and rounded to int8 as they are in use; so are keys and values, of which the
errors are those of their rows and of attention over KV_TOKENS of them. With --corpus the model's bits per
byte on held-out stories are added: the folder is that of `examples/train_demo`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.audit.bench.report import describe_machine, describe_versions
from moesaic.audit.probe import run_prompt
from moesaic.kernels.formats import pack
from moesaic.kernels.integer_matmul import integer_linear
from moesaic.kernels.kv_format import POOL_DTYPES, pack_rows, unpack_rows
from moesaic.kernels.panel import to_panels
from moesaic.models.build import load
from moesaic.models.checkpoint import Checkpoint
from moesaic.spec.locate import locate
from moesaic.spec.numerics import KV_FORMATS, KvFormat, kv_row_bytes
from moesaic.spec.quantised import QUANTISED
from moesaic.text.tokenizer import Tokenizer

RANDOM_SHAPE = (1024, 2048)
NUM_ROWS = 32
TEXT_TOKENS = 256
KV_TOKENS, KV_WIDTH = 1024, 128


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def errors_of(weights: list[Tensor], format: Any) -> dict[str, float]:
    """Mean errors of the weights themselves and of their products with rounded rows, and bits per weight."""
    generator = torch.Generator().manual_seed(0)
    of_weight, of_matmul, num_bits, num_weights = [], [], 0.0, 0
    for weight_FD in weights:
        packed = pack(weight_FD, format)
        x_TD = torch.randn((NUM_ROWS, weight_FD.shape[1]), generator=generator)
        of_weight.append(relative(packed.unpack(torch.float32), weight_FD))
        of_matmul.append(relative(integer_linear(x_TD, to_panels(packed)), x_TD @ weight_FD.float().T))
        num_bits += 8 * QUANTISED[format].matrix_bytes(*weight_FD.shape)
        num_weights += weight_FD.numel()
    return {
        "weight_error": sum(of_weight) / len(of_weight),
        "matmul_error": sum(of_matmul) / len(of_matmul),
        "bits_per_weight": num_bits / num_weights,
    }


def kv_errors(format: KvFormat) -> dict[str, float]:
    """Mean errors of rows of keys and values and of attention over them, and bits per number."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn((KV_TOKENS, KV_WIDTH), generator=generator) for _ in range(3))

    def attended(keys: Tensor, values: Tensor) -> Tensor:
        return (q @ keys.T * KV_WIDTH**-0.5).softmax(dim=-1) @ values

    rounded = [unpack_rows(pack_rows(rows, POOL_DTYPES[format])) for rows in (keys, values)]
    return {
        "row_error": (relative(rounded[0], keys) + relative(rounded[1], values)) / 2,
        "attention_error": relative(attended(*rounded), attended(keys, values)),
        "bits_per_number": 8 * kv_row_bytes(format, KV_WIDTH) / KV_WIDTH,
    }


def matrices(folder: Path) -> list[Tensor]:
    """The matrices of a checkpoint that a matmul meets: not the embedding, not the routers."""
    checkpoint = Checkpoint.open(folder)
    names = [name for name, entry in checkpoint.tensors.items() if len(entry.shape) == 2]
    kept = [name for name in names if "embed" not in name and not name.endswith("gate.weight")]
    return [checkpoint.read(name, shape=checkpoint.tensors[name].shape) for name in kept]


def held_out(folder: Path, tokenizer: Tokenizer, num_texts: int) -> tuple[list[list[int]], float]:
    """Token rows of held-out stories, and bytes per token of them."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_demo"))
    from data import read_corpus

    stories = read_corpus(folder).held_out_stories
    text = "\n".join(stories)[: 8 * num_texts * TEXT_TOKENS]
    ids = tokenizer.encode(text, add_special_tokens=False)
    rows = [ids[i : i + TEXT_TOKENS] for i in range(0, len(ids) - TEXT_TOKENS, TEXT_TOKENS)][:num_texts]
    return rows, len(text.encode()) / len(ids)


def bits_per_byte(
    folder: Path, rows: list[list[int]], bytes_per_token: float, threads: int, **formats: Any
) -> float:
    """Of a model whose weights are rounded to `format`, or its keys and values to `kv_format`."""
    model = load(folder, num_threads=threads, **formats)
    nats, count = 0.0, 0
    for row in rows:
        logits_TV = torch.from_numpy(run_prompt(model, row)[1])
        nats += float(F.cross_entropy(logits_TV[:-1], torch.tensor(row[1:]), reduction="sum"))
        count += len(row) - 1
    return nats / count / math.log(2) / bytes_per_token


def main() -> None:
    """Print one table, or its JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--corpus", type=Path, help="folder of held-out text; without it none is read")
    parser.add_argument("--texts", type=int, default=16, help=f"rows of {TEXT_TOKENS} tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = locate(arguments.model, hub=None, needs_weights=True).weights_folder()
    drawn = [torch.randn(RANDOM_SHAPE, generator=torch.Generator().manual_seed(1))]
    own = matrices(folder)
    texts = None
    if arguments.corpus is not None:
        texts = held_out(arguments.corpus, Tokenizer.load(folder), arguments.texts)
    rows = []
    for format in (None, *QUANTISED):
        row: dict[str, Any] = {"format": format or "unrounded"}
        if format is not None:
            row |= {"random": errors_of(drawn, format), "model": errors_of(own, format)}
        if texts is not None:
            row["bits_per_byte"] = bits_per_byte(folder, *texts, arguments.threads, format=format)
        rows.append(row)
    kv_rows = []
    for kv_format in KV_FORMATS:
        row = {"format": kv_format, **kv_errors(kv_format)}
        if texts is not None:
            row["bits_per_byte"] = bits_per_byte(folder, *texts, arguments.threads, kv_format=kv_format)
        kv_rows.append(row)
    if arguments.json:
        print(
            json.dumps(
                {
                    "model": arguments.model,
                    "rows": rows,
                    "kv": kv_rows,
                    **describe_machine(),
                    **describe_versions(),
                }
            )
        )
        return
    print("format        bits   random: weight matmul   model: weight matmul   bits per byte")
    for row in rows:
        line = f"{row['format']:<12}"
        if "random" in row:
            line += f"  {row['random']['bits_per_weight']:5.3f}"
            for name in ("random", "model"):
                line += f"  {row[name]['weight_error']:14.4f} {row[name]['matmul_error']:6.4f}"
        print(line + (f"   {row['bits_per_byte']:.4f}" if "bits_per_byte" in row else ""))
    print("KV            bits   rows: error  attention: error   bits per byte")
    for row in kv_rows:
        line = f"{row['format']:<12}  {row['bits_per_number']:5.2f}  {row['row_error']:11.4f}"
        line += f"  {row['attention_error']:16.4f}"
        print(line + (f"   {row['bits_per_byte']:.4f}" if "bits_per_byte" in row else ""))


if __name__ == "__main__":
    main()
