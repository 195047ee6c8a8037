"""Settings of the HTTP server; the engine has its own."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """What the server allows. Limits bound what one client can make it hold."""

    model_name: str  # as clients write it in `model`
    api_key: str | None = None  # None: no key is asked for
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call; "*" for any
    max_body_bytes: int = 16 * 2**20
    max_sequences: int = 128  # prompts times n of one request
    max_concurrent: int = 1024  # generation requests answered at once, streams included
    body_timeout_s: float = 30.0  # for a body to arrive
    drain_timeout_s: float = 30.0  # for running requests after SIGTERM

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("the served model name is empty: give --served-model-name")
        if self.api_key is not None and not self.api_key:
            raise ConfigError("the API key is empty: give one, or leave the option out for an open server")
        for name in ("max_body_bytes", "max_sequences", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("body_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
