"""generation_config.json as the defaults of requests: what is read, what is not, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import CheckpointError
from moesaic.sched.request import SamplingParams
from moesaic.text.defaults import SamplingDefaults


def load(folder: Path, **config: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return SamplingDefaults.load(folder)


def test_what_is_stated_wins_over_the_model_and_the_model_over_the_project(tmp_path: Path) -> None:
    found = load(
        tmp_path, temperature=0.6, top_k=20, top_p=0.95, min_p=None, eos_token_id=[1], do_sample=True
    )
    assert found.params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert found.params(top_p=1.0, top_k=None, seed=3) == SamplingParams(temperature=0.6, seed=3)
    assert found.summary() == (
        "temperature 0.6, top_p 0.95, top_k 20 (generation_config.json; not read: do_sample)"
    )


def test_names_of_the_file_become_ours(tmp_path: Path) -> None:
    found = load(tmp_path, max_new_tokens=7, repetition_penalty=1, top_k=0, num_beams=4, bos_token_id=0)
    assert found.params() == SamplingParams(max_tokens=7)
    assert found.unread == ("num_beams",)


def test_without_a_file_or_a_word_in_it_the_projects_own_hold(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path).params() == SamplingParams()
    assert SamplingDefaults.load(tmp_path).summary() == "temperature 1, top_p 1 (the API's own)"
    assert "(the API's own; not read: do_sample)" in load(tmp_path, do_sample=False).summary()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'; correct it or remove it"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": -1}, "temperature must be at least 0 and at most 100, got -1"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"max_new_tokens": -3}, "max_tokens must be at least 0"),
    ],
)
def test_wrong_values_name_the_file_and_the_key(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"/generation_config.json: {message}"):
        load(tmp_path, **config)
