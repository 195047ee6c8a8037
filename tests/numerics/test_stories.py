"""A small real model (llama2.c's stories260K) tells its known story through our loader and paged path."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from paged import PagedModel, random_tokens
from parity import FLOAT32_TOLERANCE, Oracle
from tokenizers import Tokenizer

from moesaic.models.build import LoadedModel, load

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)
BOS_ID = 1


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).parents[2] / "examples" / "convert_llama2c.py"
    spec = importlib.util.spec_from_file_location("convert_llama2c", source)
    assert spec is not None
    assert spec.loader is not None
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    out = tmp_path_factory.mktemp("stories")
    models = shared_data / "models"
    converter.convert(models / "stories260K.bin", models / "tok512.bin", out)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder, num_threads=1)


def test_tells_its_known_story(model: LoadedModel, folder: Path) -> None:
    tokens = PagedModel(model).greedy([BOS_ID], 100)
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens)
    print(text)
    assert text.startswith(STORY)


def test_equals_transformers(model: LoadedModel, folder: Path) -> None:
    oracle = Oracle(folder)
    expected, _ = oracle.greedy([BOS_ID], 100)
    assert PagedModel(model).greedy([BOS_ID], 100) == expected
    prompt = random_tokens(200, model.spec.vocab, seed=0)
    difference = (PagedModel(model).run("r", prompt, chunk=64) - oracle.logits(prompt)).abs().max()
    assert difference < FLOAT32_TOLERANCE


def test_the_converted_tokenizer_gives_the_text_back(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Lily and Ben had 3 cats; \u20ac5 each!"
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS_ID
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(STORY).ids) < 50
