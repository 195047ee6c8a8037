"""The same bodies as in `test_fuzz`, against the bundled model and the engine that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from moesaic.engine.config import EngineConfig
from moesaic.engine.launch import start_engine
from moesaic.engine.loop import Engine
from moesaic.server.app import create_app
from moesaic.server.settings import ServerSettings
from moesaic.spec.locate import locate
from moesaic.text.defaults import SamplingDefaults
from moesaic.text.grammar import GrammarCompiler
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer

pytestmark = pytest.mark.long
RIGHT = {
    "/v1/completions": {"prompt": "the", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [70]},
}
CASES = 50  # of each path, 200 in all
FOLDER = locate("demo").weights_folder()
TOKENIZER = Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(model=str(FOLDER), num_threads=1, max_model_len=48, kv_bytes=4 << 20)
    found = start_engine(config, grammars=GrammarCompiler(TOKENIZER, num_logits=TOKENIZER.vocab_size))
    yield found
    found.close()


@pytest.fixture(scope="module")
def api(engine: Engine) -> Any:
    """Our own document, called through the application around the engine."""
    app = create_app(
        engine,
        TOKENIZER,
        ServerSettings(model_name="demo"),
        template=ChatTemplate.load(FOLDER, special_tokens=TOKENIZER.special_tokens),
        defaults=SamplingDefaults.load(FOLDER),
    )
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("path", RIGHT)
def test_no_body_makes_a_server_error(api: Any, path: str) -> None:
    statuses: list[int] = []
    operations = [found.ok() for found in api.include(path=path).get_all_operations()]
    assert operations, f"the document has no {path}"

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)
    @given(data=st.data())
    def send(data: st.DataObject) -> None:
        case = data.draw(st.sampled_from(operations).flatmap(lambda operation: operation.as_strategy()))
        response = case.call()
        statuses.append(response.status_code)
        case.validate_response(response, checks=(not_a_server_error,))

    send()
    assert len(statuses) >= CASES
    # Whether a made-up body is right is chance; a right one is answered after all of them.
    assert operations[0].Case(body=RIGHT[path], media_type="application/json").call().status_code == 200
