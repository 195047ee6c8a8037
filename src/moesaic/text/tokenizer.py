"""Text to token ids and back, over the `tokenizers` library. A token is a run of bytes, decoding joins them.

Knows nothing about chat, stop strings or logits; `decoder.py` beside this has the bytes of a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from moesaic.errors import CheckpointError, RequestError
from moesaic.hashing import digest_bytes
from moesaic.text.decoder import StreamDecoder, TokenBytes
from moesaic.text.files import read_json, read_text

_PRIME_TOKENS = 4  # a character has at most 4 bytes
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe: nothing changes after construction but caches."""

    def __init__(
        self,
        text: str,
        *,
        config: Mapping[str, Any],
        eos_token_ids: Iterable[int] = (),
        source: str | Path = "tokenizer.json",
        eos_source: str | Path = "generation_config.json",
    ) -> None:
        """Build from the text of a tokenizer.json.

        `config` is the content of tokenizer_config.json (may be empty); `eos_token_ids` come from the
        generation config and are joined by the tokenizer's own end token. `source` and `eos_source` are the
        files that errors name.

        Raises: CheckpointError when the text is no tokenizer; UnsupportedModelError naming a decoder whose
                text cannot be streamed.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # all that the library raises for a damaged file
            raise CheckpointError(
                f"{source} is no tokenizer that can be read, or is cut off ({error}): copy the model's "
                "tokenizer.json there again"
            ) from error
        # Both may be stored in the file, and would cut or pad every prompt in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = _add_missing_tokens(self._tokenizer, config)
        decoder = json.loads(self._tokenizer.to_str())["decoder"]
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes = TokenBytes(self._tokenizer.id_to_token, decoder, special)
        self._digest = digest_bytes(text.encode(), json.dumps(added).encode()).hex()
        self._vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.special_tokens = _special_tokens(config)
        self.eos_token_ids = self._resolve_eos(eos_token_ids, source, eos_source)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        Raises: CheckpointError naming the file that is missing or damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            hint = "it has none at all"
            if list(folder.glob("*.model")) or list(folder.glob("*.tiktoken")):
                hint = "it has another format: transformers' save_pretrained converts it"
            raise CheckpointError(
                f"{folder} has no tokenizer.json ({hint}); copy the model's tokenizer.json there"
            )
        config = read_json(folder / "tokenizer_config.json")
        generation, model = read_json(folder / "generation_config.json"), read_json(folder / "config.json")
        source, name = (
            (generation, "generation_config.json") if "eos_token_id" in generation else (model, "config.json")
        )
        eos = source.get("eos_token_id")
        if eos is None and isinstance(source.get("text_config"), dict):
            eos = source["text_config"].get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise CheckpointError(
                f"{folder / name}: eos_token_id must be an integer or a list of them, got {eos!r}"
            )
        return cls(read_text(path), config=config, eos_token_ids=ids, source=path, eos_source=folder / name)

    @property
    def digest(self) -> str:
        """Identity of the vocabulary and the rules: part of the KV key."""
        return self._digest

    @property
    def vocab_size(self) -> int:
        """The highest id plus one; ids in between may be unused."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._bytes.special_ids

    def to_json(self) -> str:
        """The tokenizer.json as it is in force, missing tokens added."""
        return self._tokenizer.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the file's post-processor says, such as a BOS.

        Raises: RequestError when the text holds half a surrogate pair, which no UTF-8 text can.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            position = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if position is None:
                raise
            raise RequestError(
                f"the text holds half of a surrogate pair at position {position}: it is not valid Unicode",
                param="prompt",
            ) from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids: bytes that are no UTF-8 become U+FFFD, unknown ids are left out."""
        return self._bytes.join(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that has begun; special tokens give their name."""
        return self._bytes.of(token_id, is_first=False)

    def stream_decoder(
        self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> StreamDecoder:
        """A decoder for the tokens that follow `prompt_ids`: they may complete a character begun there."""
        decoder = StreamDecoder(self._bytes, skip_special_tokens=skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        last = islice((i for i in reversed(prompt_ids) if i not in skipped), _PRIME_TOKENS)
        for token_id in reversed(list(last)):
            decoder.feed(token_id)
        return decoder

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its name, if there is one."""
        return self._tokenizer.token_to_id(token)

    def _resolve_eos(self, ids: Iterable[int], source: str | Path, eos_source: str | Path) -> tuple[int, ...]:
        found = set(ids)
        name = self.special_tokens.get("eos_token")
        own = None if name is None else self.id_of(name)
        if own is not None:
            found.add(own)
        wrong = sorted(i for i in found if self._tokenizer.id_to_token(i) is None)
        if wrong:
            raise CheckpointError(
                f"{eos_source}: eos_token_id {wrong} names no token of {source} ({self.vocab_size} ids): "
                "correct it, or copy both files from the same model"
            )
        return tuple(sorted(found))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, as chat templates see them; a token is a string or an object with `content`."""
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _add_missing_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, with the ids declared.

    Raises: CheckpointError when an id is taken by another token.
    """
    declared = config.get("added_tokens_decoder") or {}
    added = []
    for token_id, entry in sorted((int(i), entry) for i, entry in declared.items()):
        content = entry["content"]
        if tokenizer.token_to_id(content) is None:
            flags = {
                k: bool(entry.get(k, False))
                for k in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            tokenizer.add_tokens([tokenizers.AddedToken(content, **flags)])
            added.append((token_id, content))
        if tokenizer.token_to_id(content) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json "
                f"{tokenizer.token_to_id(content)}: the two files are of different models"
            )
    return added
