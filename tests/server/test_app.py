"""Everything around the answers: key, limits, health, metrics, reports, draining, clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness import Server
from prometheus_client.parser import text_string_to_metric_families

from moesaic.errors import ConfigError
from moesaic.log import JsonFormatter
from moesaic.obs.names import METRICS
from moesaic.server.settings import ServerSettings

GETS = (
    "/v1/models",
    "/v1/models/tiny",
    "/metrics",
    "/v1/internal/active",
    "/v1/internal/experts",
    "/v1/internal/placement",
    "/openapi.json",
)


def metric(server: Server, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return 0.0


def test_models(server: Server) -> None:
    card = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "moesaic",
        "max_model_len": 256,
    }
    assert server.client.get("/v1/models").json() == {"object": "list", "data": [card]}
    assert server.client.get("/v1/models/tiny").json() == card
    missing = server.client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_wrong_paths_and_methods_have_error_bodies(server: Server) -> None:
    assert server.client.get("/nothing").status_code == 404
    answer = server.client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert "Method Not Allowed" in answer.json()["error"]["message"]
    assert server.client.post("/v1/completions/", json={}).status_code == 404


def test_every_answer_has_an_id_of_its_own(server: Server) -> None:
    ids = {server.client.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/health")}
    assert len(ids) == 3
    answer = server.post("/v1/completions", {"prompt": "a"})
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


def test_the_key_guards_everything_but_the_probes(make_server: Callable[..., Server]) -> None:
    server = make_server(settings={"api_key": "s3cret \u00e9"})
    right = "Bearer s3cret \u00e9".encode()
    for path in GETS:
        for key in (
            None,
            b"",
            b"Bearer",
            b"Bearer s3cret",
            b"s3cret \xc3\xa9",
            b"\xff\xfe",
        ):
            headers = {} if key is None else {"Authorization": key}
            answer = server.client.get(path, headers=headers)
            assert answer.status_code == 401, (path, key)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert server.client.get(path, headers={"Authorization": right}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 401
    assert server.client.post("/v1/completions", content=b"{").status_code == 401
    assert server.client.get("/nothing").status_code == 401
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 200


def test_pages_of_other_origins_only_when_allowed(make_server: Callable[..., Server]) -> None:
    headers = {
        "Origin": "http://page.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    closed = make_server().client.options("/v1/completions", headers=headers)
    assert closed.status_code == 405
    assert "access-control-allow-origin" not in closed.headers
    server = make_server(settings={"cors_origins": ("http://page.test",), "api_key": "k"})
    assert server.client.options("/v1/completions", headers=headers).status_code == 200
    answer = server.client.get("/v1/models", headers={"Origin": "http://page.test"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "http://page.test"
    other = server.client.options("/v1/completions", headers=headers | {"Origin": "http://evil.test"})
    assert other.status_code == 400


def test_health_and_readiness_follow_the_engine(server: Server) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.engine.is_ready = False
    assert server.client.get("/health").status_code == 503
    assert server.client.get("/ready").status_code == 503
    server.engine.is_draining = True
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").headers["retry-after"] == "5"


def test_while_draining_new_requests_are_sent_elsewhere(server: Server) -> None:
    server.app.state.api.is_draining = True
    answer = server.post("/v1/completions", {"prompt": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "unavailable"
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/metrics").status_code == 200
    server.app.state.api.is_draining = False
    server.engine.is_ready, server.engine.is_draining = False, True
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503


def test_metrics_equal_the_table_and_count(server: Server) -> None:
    server.complete(max_tokens=3)
    server.complete(max_tokens=0)
    server.events("/v1/completions", {"prompt": "a", "max_tokens": 4, "n": 2})
    server.post("/v1/completions", {"prompt": 5})
    server.client.get("/nothing")
    server.client.get("/openapi.json")
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert set(families) == {
        m.name.removesuffix("_total") if m.kind == "counter" else m.name for m in METRICS
    }
    assert metric(server, "moesaic_requests_total", finish_reason="length") == 4
    assert metric(server, "moesaic_time_to_first_token_seconds_count") == 3
    assert metric(server, "moesaic_time_per_output_token_seconds_count") == 3
    assert metric(server, "moesaic_request_duration_seconds_count") == 4
    route = "/v1/completions"
    assert metric(server, "moesaic_http_requests_total", route=route, status="200") == 3
    assert metric(server, "moesaic_http_requests_total", route=route, status="400") == 1
    assert metric(server, "moesaic_http_requests_total", route="unmatched", status="404") == 1
    assert metric(server, "moesaic_http_requests_total", route="/openapi.json", status="200") == 1
    assert metric(server, "moesaic_http_requests_in_flight") == 0
    assert metric(server, "moesaic_output_tokens_total") == 11
    assert metric(server, "moesaic_expert_tokens_total", layer="1", expert_id="3", phase="decode") == 40
    picked = server.client.get("/metrics", params={"name[]": "moesaic_steps_total"}).text
    assert [family.name for family in text_string_to_metric_families(picked)] == ["moesaic_steps"]


def test_refusals_at_the_gate_are_counted_under_their_route(make_server: Callable[..., Server]) -> None:
    server = make_server(settings={"api_key": "k"})
    server.post("/v1/completions", {"prompt": "a"})
    server.client.get("/v1/models/tiny")
    server.client.get("/nothing")
    server.client.headers["Authorization"] = "Bearer k"
    for route in ("/v1/completions", "/v1/models/{model_id:path}", "unmatched"):
        assert metric(server, "moesaic_http_requests_total", route=route, status="401") == 1, route


def test_what_fails_and_what_is_refused_is_counted_as_what_it_is(make_server: Callable[..., Server]) -> None:
    failing = make_server(fail_after=1)
    assert failing.post("/v1/completions", {"prompt": "a"}).status_code == 500
    assert metric(failing, "moesaic_requests_total", finish_reason="error") == 1
    assert metric(failing, "moesaic_requests_total", finish_reason="cancelled") == 0
    full = make_server(max_waiting=1, settings={"max_body_bytes": 100})
    assert full.post("/v1/completions", {"prompt": "a", "n": 2}).status_code == 429
    assert full.engine.wait_idle()
    assert metric(full, "moesaic_requests_total", finish_reason="cancelled") == 0
    assert full.post("/v1/completions", {"prompt": "a" * 200}).status_code == 413
    for status in ("429", "413"):
        assert metric(full, "moesaic_http_requests_total", route="/v1/completions", status=status) == 1


def test_labels_do_not_grow_with_traffic(server: Server) -> None:
    def series() -> int:
        return sum(len(f.samples) for f in text_string_to_metric_families(server.client.get("/metrics").text))

    server.client.get("/metrics")
    server.client.get("/nothing/0")
    server.client.get("/v1/models/m0")
    before = series()
    for i in range(1, 9):
        server.client.get(f"/nothing/{i}")
        server.client.get(f"/v1/models/m{i}")
    assert series() == before


def test_active_says_what_runs(server: Server) -> None:
    found = server.client.get("/v1/internal/active").json()
    assert found["model"] == "tiny"
    assert found["system_fingerprint"] == "fp_0123456789ab"
    assert found["tokenizer_digest"] == server.tokenizer.digest
    assert found["engine"]["numerics_digest"] == "0123456789abcdef0123456789abcdef"
    assert found["engine"]["max_model_len"] == 256


def test_experts_have_every_field_of_the_load(server: Server) -> None:
    found = server.client.get("/v1/internal/experts").json()
    assert found["window_s"] is None
    assert found["layer_idxs"] == [1, 2]
    prefill, decode = found["loads"]
    assert prefill == {
        "phase": "prefill",
        "num_tokens": 4,
        "num_steps": 1,
        "since_s": 0.0,
        "until_s": 1.5,
        "plan_version": 0,
        "source": "engine",
        "counts": [[3, 1, 0, 4], [2, 2, 2, 2]],
    }
    assert decode["counts"][0] == [30, 10, 0, 40]
    assert found["skew"][0]["max_mean"] == 2.0
    assert server.client.get("/v1/internal/experts?window_s=2.5").json()["window_s"] == 2.5
    assert server.engine.windows[-2:] == [None, 2.5]
    for bad in ("0", "-1", "nan", "inf", "x"):
        answer = server.client.get(f"/v1/internal/experts?window_s={bad}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "window_s"


def test_openapi_describes_bodies_and_errors(server: Server) -> None:
    document = server.client.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    text = json.dumps(document)
    whole = document["paths"]["/v1/completions"]["post"]["responses"]["200"]
    assert whole["headers"]["x-moesaic-max-tokens"]["schema"] == {"type": "integer"}
    assert "cut to that" in str(document["components"]["schemas"]["ChatBody"]["properties"]["max_tokens"])
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    assert "422" not in document["paths"]["/v1/internal/experts"]["get"]["responses"]


def test_an_unexpected_error_says_nothing_of_the_inside(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.engine, "snapshot", explode)
    with caplog.at_level(logging.CRITICAL, "moesaic"):
        answer = server.client.get("/health")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"]


def test_one_line_per_request_and_no_contents(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("moesaic"), "propagate", True)
    with caplog.at_level(logging.INFO, "moesaic"):
        server.complete(prompt="the secret", max_tokens=2, n=2)
        server.events("/v1/completions", {"prompt": "the secret", "max_tokens": 2})
    lines = [
        json.loads(JsonFormatter().format(record)) for record in caplog.records if "route" in vars(record)
    ]
    assert len(lines) == 2
    for line in lines:
        assert line["status"] == 200
        assert line["route"] == "/v1/completions"
        assert line["finish"] == "length"
        assert line["prompt_tokens"] > 2
        assert line["seconds"] >= 0
        assert line["event"].startswith("POST /v1/completions 200 ")
    assert [line["output_tokens"] for line in lines] == [4, 2]
    assert "secret" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "moesaic"):
        for path in ("/health", "/ready", "/metrics"):
            server.client.get(path)
    assert not caplog.records


def test_settings_are_checked() -> None:
    for wrong in (
        {"model_name": ""},
        {"api_key": ""},
        {"max_body_bytes": 0},
        {"max_concurrent": 0},
        {"drain_timeout_s": -1.0},
        {"body_timeout_s": float("nan")},
    ):
        with pytest.raises(ConfigError):
            ServerSettings(**({"model_name": "m"} | wrong))


# -- clients that come together, and clients that leave ------------------------------------------------------


class Visit:
    """One request straight into the application, whose client can leave."""

    def __init__(self, server: Server, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.sent: list[dict[str, Any]] = []
        self.has_left = asyncio.Event()
        self.has_begun = asyncio.Event()
        self._body: list[bytes] = [json.dumps(body).encode()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(server.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.has_begun.set()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_requests(make_server: Callable[..., Server], is_stream: bool) -> None:
    server = make_server(step_s=0.001, max_model_len=100_000)

    async def leave() -> None:
        visit = Visit(server, {"prompt": "a", "max_tokens": 50_000, "n": 3, "stream": is_stream})
        if is_stream:
            await asyncio.wait_for(visit.has_begun.wait(), 5)
        while len(server.engine.submitted) < 3:
            await asyncio.sleep(0.005)
        visit.has_left.set()
        await asyncio.wait_for(visit.task, 5)

    asyncio.run(leave())
    assert server.engine.wait_idle()
    assert len(server.engine.cancelled) == 3
    assert metric(server, "moesaic_requests_total", finish_reason="cancelled") == 3
    route = "/v1/completions"
    assert metric(server, "moesaic_http_requests_total", route=route, status="499") == 1
    assert metric(server, "moesaic_http_requests_in_flight") == 0


def test_a_client_that_leaves_before_the_first_token(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.engine.gate.clear()

    async def leave() -> None:
        visit = Visit(server, {"prompt": "a", "stream": True})
        while not server.engine.submitted:
            await asyncio.sleep(0.005)
        visit.has_left.set()
        await asyncio.wait_for(visit.task, 5)
        assert not any(message.get("status") == 200 for message in visit.sent)

    asyncio.run(leave())
    assert len(server.engine.cancelled) == 1


def test_a_task_cancelled_from_outside_ends_its_requests(make_server: Callable[..., Server]) -> None:
    server = make_server(step_s=0.001, max_model_len=100_000)

    async def stop() -> None:
        visit = Visit(server, {"prompt": "a", "max_tokens": 50_000, "stream": True})
        await asyncio.wait_for(visit.has_begun.wait(), 5)
        visit.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visit.task

    asyncio.run(stop())
    assert server.engine.wait_idle()
    assert len(server.engine.cancelled) == 1


def test_a_slow_body_times_out(make_server: Callable[..., Server]) -> None:
    server = make_server(settings={"body_timeout_s": 0.05})

    async def slow() -> int:
        async def body() -> Any:
            yield b'{"prompt": '
            await asyncio.sleep(1)
            yield b'"a"}'

        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Content-Type": "application/json"}
            return (await client.post("/v1/completions", content=body(), headers=headers)).status_code

    assert asyncio.run(slow()) == 408


def test_two_hundred_at_once(make_server: Callable[..., Server]) -> None:
    server = make_server(step_s=0.001)

    async def all_at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            bodies = ({"prompt": "a" * (i + 1), "max_tokens": 8, "seed": i} for i in range(200))
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    answers = asyncio.run(all_at_once())
    assert [answer.status_code for answer in answers] == [200] * 200
    by_prompt = {request.seed: request for request in server.engine.submitted}
    assert len(by_prompt) == 200
    for i, answer in enumerate(answers):
        expected = server.tokenizer.decode(server.engine._answer(by_prompt[i])[:8])
        assert answer.json()["choices"][0]["text"] == expected


def test_more_than_the_limit_at_once_are_429(make_server: Callable[..., Server]) -> None:
    server = make_server(settings={"max_concurrent": 2})
    server.engine.gate.clear()

    async def three() -> None:
        first = [Visit(server, {"prompt": "a", "max_tokens": 1}) for _ in range(2)]
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0.005)
        third = Visit(server, {"prompt": "a"})
        await asyncio.wait_for(third.task, 5)
        assert third.sent[0]["status"] == 429
        assert metric(server, "moesaic_http_requests_total", route="/v1/completions", status="429") == 1
        assert (b"retry-after", b"1") in third.sent[0]["headers"]
        server.engine.gate.set()
        await asyncio.gather(*(visit.task for visit in first))
        assert all(visit.sent[0]["status"] == 200 for visit in first)

    asyncio.run(three())
    server.complete()
