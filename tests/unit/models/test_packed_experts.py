"""MXFP4 experts: decoded exactly into what a plain checkpoint holds, said aloud, refused when damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import gpt_oss_config, random_tensors, write_checkpoint
from checkpoints_stacked import pack_mxfp4
from engine_runs import make_engine
from paged import PagedModel, random_tokens
from torch import Tensor

from moesaic.errors import CheckpointError, HostMemoryShort
from moesaic.kernels import mxfp4
from moesaic.models.build import LoadedModel, load

CONFIG = gpt_oss_config(quantization_config={"quant_method": "mxfp4"})
PACKED = pack_mxfp4(random_tensors(CONFIG))


def logits_of(model: LoadedModel) -> Tensor:
    return PagedModel(model).run("r", random_tokens(40, model.spec.vocab, seed=3))


def decoded() -> dict[str, Tensor]:
    """The packed tensors as a plain checkpoint has them: columns of x @ W."""
    plain = dict(PACKED)
    for name in [name for name in PACKED if name.endswith("_blocks")]:
        key = name.removesuffix("_blocks")
        plain[key] = mxfp4.decode(plain.pop(name), plain.pop(f"{key}_scales")).transpose(1, 2)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_and_plain_experts_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = write_checkpoint(tmp_path / "plain", gpt_oss_config(), tensors=decoded(), dtype=dtype)
    packed = write_checkpoint(tmp_path / "packed", CONFIG, tensors=PACKED, dtype=dtype)
    first, second = load(plain, num_threads=1), load(packed, num_threads=1)
    assert torch.equal(logits_of(first), logits_of(second))
    assert first.weight_bytes == second.weight_bytes
    assert (first.notes, len(second.notes)) == ((), 1)


def test_what_is_decoded_is_said_with_its_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, CONFIG, tensors=PACKED, dtype=torch.bfloat16)
    packed = sum(value.numel() for value in PACKED.values() if value.dtype == torch.uint8)
    numbers = sum(value.numel() * 2 for name, value in PACKED.items() if name.endswith("_blocks"))
    [note] = load(folder, num_threads=1).notes
    assert note == (
        "expert weights: 78.3 kB of mxfp4 in the checkpoint are decoded, exactly, to 295 kB of bfloat16 "
        "in memory"
    )
    assert (packed, 2 * numbers) == (78_336, 294_912)
    with caplog.at_level(logging.INFO, "moesaic"):
        make_engine(load(folder, num_threads=1)).close()
    assert note in [record.getMessage() for record in caplog.records]


def test_memory_counts_what_is_decoded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIG, tensors=PACKED)
    weights = load(folder, num_threads=1).weight_bytes
    with pytest.raises(HostMemoryShort):
        load(folder, num_threads=1, available_bytes=weights)


def damaged(name: str, value: Tensor) -> dict[str, Tensor]:
    key = f"model.layers.1.mlp.experts.{name}"
    assert key in PACKED
    return PACKED | {key: value}


SCALES = PACKED["model.layers.1.mlp.experts.down_proj_scales"].clone()
SCALES[5, 3, 0] = 255
DAMAGE = {
    "a scale of NaN": (
        damaged("down_proj_scales", SCALES),
        r"down_proj_blocks .* holds 32 values that are NaN",
    ),
    "floats for bytes": (
        damaged("gate_up_proj_scales", torch.ones(8, 64, 2)),
        r"gate_up_proj_scales .* dtype F32 where bytes of packed numbers \(U8\) are due",
    ),
    "another shape": (
        damaged("gate_up_proj_blocks", torch.zeros(8, 64, 4, 8, dtype=torch.uint8)),
        r"gate_up_proj_blocks .* shape \[8, 64, 4, 8\], but config.json implies \[8, 64, 2, 16\]",
    ),
    "no scales": (
        {name: value for name, value in PACKED.items() if "1.mlp.experts.down_proj_scales" not in name},
        r"1 parameters are filled by no tensor: model\.layers\.1\.mlp\.experts\.down_proj_scales",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    tensors, message = DAMAGE[case]
    with pytest.raises(CheckpointError, match=message):
        load(write_checkpoint(tmp_path, CONFIG, tensors=tensors), num_threads=1)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 48}
    with pytest.raises(CheckpointError, match=r"in blocks of 32 numbers, and config\.json .* rows of 48"):
        load(write_checkpoint(tmp_path, config, tensors=PACKED), num_threads=1)
