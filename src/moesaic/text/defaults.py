"""How a model's generation_config.json says to sample, where a request does not say it itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError, RequestError
from moesaic.sched.request import SamplingParams
from moesaic.text.files import read_json

FILE = "generation_config.json"
READ: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The keys that are read, and what they are called here."""
_WHOLE = frozenset(["top_k", "max_new_tokens"])
# They say nothing of how to sample. End tokens are read with the tokenizer.
_SILENT = frozenset(
    [
        "_from_model_config",
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Fields of `SamplingParams` that a model sets for requests that leave them out."""

    values: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # keys of the file that would change sampling elsewhere, and do not here

    @classmethod
    def load(cls, folder: str | Path) -> SamplingDefaults:
        """Those of a checkpoint folder; none when it has no generation_config.json.

        Raises: CheckpointError naming the file, the key and the value.
        """
        path = Path(folder) / FILE
        given = {key: value for key, value in read_json(path).items() if value is not None}
        values = {name: _number(path, key, given[key]) for key, name in READ.items() if key in given}
        if values.get("top_k") in (0, -1):
            del values["top_k"]  # no limit, as in a request
        found = cls(values=values, unread=tuple(sorted(given.keys() - READ.keys() - _SILENT)))
        try:
            found.params()
        except RequestError as error:
            raise CheckpointError(f"{path}: {error}; correct it or remove it there") from error
        return found

    def params(self, **given: Any) -> SamplingParams:
        """The parameters of a request: what is given, else the model's, else the project's defaults.

        Raises: RequestError as `SamplingParams`.
        """
        return SamplingParams(**{**self.values, **given})

    def summary(self) -> str:
        """`temperature 0.6, top_p 0.95 (generation_config.json; not read: do_sample)`."""
        read = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        unread = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        if not read:
            plain = {one.name: one.default for one in fields(SamplingParams)}
            return f"temperature {plain['temperature']:g}, top_p {plain['top_p']:g} (the API's own{unread})"
        return f"{read} ({FILE}{unread})"


def _number(path: Path, key: str, value: Any) -> float | int:
    is_right = isinstance(value, int if key in _WHOLE else int | float) and not isinstance(value, bool)
    if not is_right:
        kind = "a whole number" if key in _WHOLE else "a number"
        raise CheckpointError(f"{path}: {key} must be {kind}, got {value!r}; correct it or remove it there")
    found: float | int = value
    return found
