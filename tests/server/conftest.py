"""A tiny tokenizer, a fake engine and an application over them, fresh for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, write_tokenizer
from harness import Server

from moesaic.server.app import create_app
from moesaic.server.settings import ServerSettings
from moesaic.text.defaults import SamplingDefaults
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def template(model_folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    return ChatTemplate.load(model_folder, special_tokens=tokenizer.special_tokens)


@pytest.fixture
def make_server(tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(
        *,
        has_template: bool = True,
        settings: dict[str, Any] | None = None,
        defaults: SamplingDefaults | None = None,
        **engine: Any,
    ) -> Server:
        fake = FakeEngine(vocab=tokenizer.vocab_size, **engine)
        app = create_app(
            fake,
            tokenizer,
            ServerSettings(model_name="tiny", **(settings or {})),
            template=template if has_template else None,
            defaults=defaults,
            created_s=1_700_000_000,
        )
        servers.append(Server(app, fake, tokenizer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()
