from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost.layouts import Split, largest_batch
from moesaic.cost.ops import Formats
from moesaic.cost.profile import LAUNCHES, PAPER
from moesaic.cost.serving import KV_ROOM, Interference, Traffic, phases
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import preset

SPLIT = Split(tp=2, expert_tp=2)
MINIMAX = read_config(preset("minimax-m2").config, name="minimax-m2")


def seen(batch: float, formats: Formats, **interference: float):
    return phases(
        MINIMAX, cluster("b200x2"), SPLIT, Traffic(prompt=8192.0, output=1024.0, batch=batch), profile=PAPER,
        interference=Interference(**interference), formats=formats,
    )  # fmt: skip


def test_sequences_beyond_the_memory_for_kv_wait_for_a_slot() -> None:
    fp8 = Formats(dense="fp8", experts="fp8")
    fits = KV_ROOM * float(
        largest_batch(MINIMAX, cluster("b200x2"), SPLIT, context=8192 + 512, profile=PAPER, formats=fp8)
    )
    full, twice = seen(fits, fp8, slot_share=1.0), seen(2 * fits, fp8, slot_share=1.0)
    assert twice.tpot_s == pytest.approx(full.tpot_s)
    # As many as decode wait for a whole answer of one of them.
    assert twice.ttft_s - full.ttft_s == pytest.approx(1024 * full.tpot_s)
    assert seen(2 * fits, fp8).ttft_s == pytest.approx(full.ttft_s)


def test_more_requests_wait_where_prompts_take_more_of_the_time() -> None:
    formats = Formats(dense="fp8", experts="fp8")
    few, many = (seen(b, formats, backlog=1.0).ttft_s - seen(b, formats).ttft_s for b in (8.0, 16.0))
    assert many > 2.2 * few  # twice the requests, and each finds a prompt at work more often
    assert seen(16.0, formats, backlog=1.0).tpot_s == seen(16.0, formats).tpot_s


def test_a_prompt_pays_its_launches_one_by_one() -> None:
    formats = Formats(dense="fp8", experts="fp8")
    more = seen(4.0, formats, eager=3.0).ttft_s - seen(4.0, formats).ttft_s
    launches = PAPER.launch_s["gqa"] + PAPER.launch_s["experts"]
    assert more == pytest.approx(3 * launches * len(MINIMAX.layers))


def test_narrow_products_quantise_their_rows_first() -> None:
    profile = replace(PAPER, launch_s={**dict.fromkeys(LAUNCHES, 0.0), "quantise": 1.0})
    layers, traffic = len(MINIMAX.layers), Traffic(prompt=64.0, output=64.0, batch=1.0)
    for experts, dense, launches in (("fp8", "fp8", 2), ("nvfp4", "bfloat16", 1), ("int4", "int4", 0)):
        found = phases(
            MINIMAX, cluster("b200x2"), SPLIT, traffic, profile=profile, interference=Interference(),
            formats=Formats(dense=dense, experts=experts),
        )  # fmt: skip
        assert np.round(float(found.decode_s)) == launches * layers
