"""Identity of cached KV: what must be equal for one request to read what another computed.

A full block's key chains over every token before it, starting from the scope. How the next token is drawn is
no part of it. Knows nothing of blocks' places.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.hashing import digest, digest_bytes

KvKey = bytes
"""16 bytes naming the content of one full block and all that came before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvKeyScope:
    """All but the tokens that decides the bits of a cached key or value."""

    model_digest: str  # architecture and weights
    numerics_digest: str
    tokenizer_digest: str
    positions: (
        str  # how positions are encoded and the cache compressed: rope scaling, latent width and the like
    )
    salt: str = ""  # separates tenants that must not see each other's timing

    def with_salt(self, salt: str) -> KvKeyScope:
        """The same scope for another tenant."""
        return replace(self, salt=salt)

    def root(self) -> KvKey:
        """The key that the first block chains from."""
        return bytes.fromhex(digest(self))


def extend_keys(keys: list[KvKey], root: KvKey, token_ids: Sequence[int], block: int) -> None:
    """Append to `keys` the keys of the full blocks of `token_ids` that it lacks."""
    tokens = struct.Struct(f"<{block}q")
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block, len(token_ids) - block + 1, block):
        parent = digest_bytes(parent, tokens.pack(*token_ids[start : start + block]))
        keys.append(parent)


def block_keys(scope: KvKeyScope, token_ids: Sequence[int], block: int) -> tuple[KvKey, ...]:
    """The keys of the full blocks of `token_ids`; a change at token t changes those from t // block on."""
    keys: list[KvKey] = []
    extend_keys(keys, scope.root(), token_ids, block)
    return tuple(keys)
