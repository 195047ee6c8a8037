"""gpt-oss from MXFP4 experts; `test_family_table` compares the plain ones."""

from __future__ import annotations

from pathlib import Path

from checkpoints import gpt_oss_config, write_checkpoint
from parity import FLOAT32_TOLERANCE, max_difference

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def test_equal_logits_from_mxfp4_experts(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, gpt_oss_config(quantization_config=MXFP4), layout="mxfp4", num_files=3
    )
    assert max_difference(folder) < FLOAT32_TOLERANCE
