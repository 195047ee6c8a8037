"""Bodies and parameters made from our own OpenAPI document, right and wrong ones: never a 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from fakes import FakeEngine, train_tokenizer
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from moesaic.server.app import create_app
from moesaic.server.settings import ServerSettings
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
TOKENIZER = Tokenizer(train_tokenizer().to_str(), config={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
ENGINE = FakeEngine(vocab=TOKENIZER.vocab_size, max_model_len=64)
APP = create_app(ENGINE, TOKENIZER, ServerSettings(model_name="tiny"), template=TEMPLATE)
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[FakeEngine]:
    yield ENGINE
    assert ENGINE.wait_idle()
    ENGINE.close()


@schema.parametrize()
@settings(max_examples=12, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)
def test_no_body_makes_a_server_error(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)
