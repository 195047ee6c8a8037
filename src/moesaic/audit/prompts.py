"""The prompts of `moesaic verify`: texts of the user's, built-in ones, or random token ids. No torch here."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from moesaic.errors import ConfigError
from moesaic.spec.model import GqaSpec, ModelSpec
from moesaic.text.tokenizer import Tokenizer

NUM_TOKENS = 32  # greedy tokens after each prompt
HEAVY_BYTES = 4_000_000_000  # guess: from here on a side takes minutes on few cores
HEAVY_PROMPT, HEAVY_TOKENS = 64, 8  # of a checkpoint that heavy: tokens of a prompt, greedy tokens after it
REACH_TOKENS = 640  # guess: the longest prompt that verify makes by itself
TEXTS = (
    "once upon a time",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. 1 + 1 = 2; 17 * 23 = 391.",
    "def greatest(values):\n    best = values[0]\n    for value in values[1:]:\n        if value > best:\n"
    "            best = value\n    return best\n",
    "A router looks at every token and sends it to a few of many experts. Most tokens of one kind go to the "
    "same ones, so some experts are busy and others idle. When a busy one is slow, the whole layer waits for "
    "it. That is why one counts which experts fire, places copies of the busy ones where there is room, and "
    "looks again after a while: yesterday's numbers, names and questions are not those of today. ",
)
"""The built-in prompts; the last one is repeated until it passes windows."""
RANDOM_LENGTHS = (5, 24, 70, 160)  # of the built-in prompts where there is no tokenizer


def choose_prompts(
    folder: Path, spec: ModelSpec, path: Path | None, num_tokens: int, *, is_heavy: bool
) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """Token ids, and what they do not reach. `path` is a file of texts, one a line; None: a built-in set.

    Raises: ConfigError for a file or a tokenizer that does not serve, and where no position is left.
    """
    room = spec.max_position - num_tokens
    if room < 1:
        raise ConfigError(
            f"--tokens {num_tokens} leaves no room in {spec.max_position} positions: ask for fewer"
        )
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if path is not None:
        if not has_tokenizer:
            raise ConfigError(
                f"{folder} has no tokenizer.json, so the text of --prompts cannot be read: copy the model's "
                "there, or leave --prompts out for random token ids"
            )
        return _checked([ids[:room] for ids in _read_prompts(path, folder)], spec, folder), []
    far, notes = reach(spec, has_tokenizer=has_tokenizer)
    if has_tokenizer:
        tokenizer = Tokenizer.load(folder)
        found = [tokenizer.encode(text) for text in TEXTS]
    else:
        draw = random.Random(0)
        found = [draw.choices(range(spec.vocab), k=length) for length in RANDOM_LENGTHS]
        notes = [*notes, "no tokenizer.json: the prompts are random token ids"]
    if is_heavy:
        found = [ids[:HEAVY_PROMPT] for ids in found]
        notes = [
            *notes,
            f"prompts are cut to {HEAVY_PROMPT} tokens for a model of more than {HEAVY_BYTES / 1e9:g} GB",
        ]
    last = found[-1]
    while len(last) < far:
        last = last + found[-1]
    found[-1] = last
    return _checked([ids[:room] for ids in found if ids], spec, folder), notes


def _checked(prompts: Sequence[Sequence[int]], spec: ModelSpec, folder: Path) -> tuple[tuple[int, ...], ...]:
    """The prompts, whose ids the model has."""
    greatest = max(max(ids, default=0) for ids in prompts)
    if greatest >= spec.vocab:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} makes token id {greatest}, but config.json gives the model "
            f"{spec.vocab} tokens (vocab_size): the tokenizer is another model's; copy this model's there"
        )
    return tuple(tuple(ids) for ids in prompts)


def _read_prompts(path: Path, folder: Path) -> Iterator[list[int]]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path} holds no prompt: write one a line")
    tokenizer = Tokenizer.load(folder)
    for line in lines:
        yield tokenizer.encode(line)


def reach(spec: ModelSpec, *, has_tokenizer: bool) -> tuple[int, list[str]]:
    """How long a prompt must be to pass every position that is not too far where a layer begins to differ.

    That is the end of a window or of a step of query scaling. Rope scalings that run turn alike everywhere.
    """
    lengths = set[int]()
    for layer in spec.layers:
        if isinstance(layer.mixer, GqaSpec):
            scaling = layer.mixer.temperature
            lengths |= {layer.mixer.window or 0, 0 if scaling is None else scaling.interval} - {0}
    beyond = sorted(length for length in lengths if length + 32 > REACH_TOKENS)
    remedy = "use --prompts" + (
        "" if has_tokenizer else ", which needs the model's tokenizer.json in the folder"
    )
    notes = [
        f"no prompt reaches position {length}, where a window or a query scaling begins: {remedy}"
        for length in beyond
    ]
    return max((length + 32 for length in lengths if length not in beyond), default=0), notes
