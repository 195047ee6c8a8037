"""Stand-ins that tests share: a tiny tokenizer made on the spot, and an engine that answers from a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moesaic.engine.client import EngineSnapshot
from moesaic.engine.rank_window import RANK_COLUMNS, RankFigures
from moesaic.engine.rebalance import Rebalance, Swapped
from moesaic.errors import Overloaded, RequestError
from moesaic.sched.request import Logprobs, Request, RequestEvent
from moesaic.spec.experts import ExpertLoad, ExpertPlan, contiguous_plan
from moesaic.spec.model import DenseSpec, GateSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = (
    "the cat sat on the mat and the dog sat on the log while the small bird sang a song for the whole farm. "
    "once upon a time there was a little girl who had a red ball and a blue hat; she ran and ran and ran! "
    '{"name": "value", "list": [1, 2, 3], "true": true, "null": null} '
    "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f600"
)


def train_tokenizer(vocab_size: int = 380) -> Tokenizer:
    """A byte-level BPE with a BOS, trained in a few milliseconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """The tokenizer files of a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return folder


def tiny_spec(vocab: int) -> ModelSpec:
    """Three layers, the last two sparse with four experts."""
    mixer = GqaSpec(num_heads=2, num_kv_heads=1, head_dim=8, rope=None, softmax_scale=0.35)
    moe = MoeSpec(
        num_experts=4,
        experts_per_token=2,
        expert_width=8,
        gate=GateSpec(score="softmax"),
        shared=None,
        row_width=16,
    )
    layers = (
        LayerSpec(mixer=mixer, ffn=DenseSpec(width=32)),
        *(LayerSpec(mixer=mixer, ffn=moe) for _ in range(2)),
    )
    return ModelSpec(
        model_type="fake",
        family="fake",
        reader="exact",
        hidden=16,
        vocab=vocab,
        layers=layers,
        norm_eps=1e-6,
        max_position=4096,
        dtype="float32",
        has_tied_head=False,
        weight_format="float32",
        eos_token_ids=(1,),
    )


def spell(tokenizer_json: str, text: str) -> list[int]:
    """Token ids of a text without a BOS."""
    return Tokenizer.from_str(tokenizer_json).encode(text, add_special_tokens=False).ids


def counting(request: Request) -> list[int]:
    """The default answer: printable bytes that depend on the prompt and the seed, without end."""
    start = (sum(request.prompt_ids) + request.seed) % 26
    return [5 + 64 + (start + i) % 26 for i in range(4096)]


class FakeEngine:
    """An `EngineClient` that answers `answer(request)`, one token of each running request a step.

    `gate` closed: nothing moves; the token number `pause_after` of a request closes it. Events come from its
    own thread, as those of the real engine do.
    """

    def __init__(
        self,
        *,
        vocab: int = 380,
        max_model_len: int = 256,
        answer: Callable[[Request], Sequence[int]] = counting,
        step_s: float = 0.0,
        max_waiting: int = 10_000,
        fail_after: int | None = None,
        is_lost: bool = False,
        failure: str = "logits are not finite",
        pause_after: int | None = None,
        logprob: float = -0.5,
        num_cached_tokens: int = 0,
    ) -> None:
        self.spec = tiny_spec(vocab)
        self.max_model_len = max_model_len
        self.gate = threading.Event()
        self.gate.set()
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.is_ready = True
        self.is_draining = False
        self.num_cached_tokens = num_cached_tokens
        self.windows: list[float | None] = []
        self._answer, self._step_s, self._max_waiting = answer, step_s, max_waiting
        self._failure, self._is_lost = failure, is_lost
        self._fail_after, self._pause_after, self._logprob = fail_after, pause_after, logprob
        self._running: dict[str, _Running] = {}
        self._totals = {"prompt": 0, "output": 0, "steps": 0}
        self._lock = threading.Condition()
        self._is_closed = False
        num_experts = tuple(moe.num_experts for _, moe in self.spec.moe_layers)
        self.rebalance = Rebalance(
            contiguous_plan(num_experts, 2),
            self.spec,
            num_ranks=2,
            expert_bytes=[1000] * len(num_experts),
            available_bytes=lambda: 100_000,
        )
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[RequestEvent], None]) -> None:
        sampling = request.sampling
        room = self.max_model_len - (0 if sampling.max_tokens == 0 else 1)
        if len(request.prompt_ids) > room:
            raise RequestError("the prompt is longer than the context", param="prompt")
        if any(not 0 <= i < self.spec.vocab for i in request.prompt_ids):
            raise RequestError("a token id is out of range", param="prompt")
        with self._lock:
            if self.is_draining or len(self._running) >= self._max_waiting:
                raise Overloaded("the queue is full", retry_after_s=2.5)
            self.submitted.append(request)
            self._running[request.request_id] = _Running(
                request,
                on_event,
                list(self._answer(request)),
                room=self.max_model_len - len(request.prompt_ids),
            )
            self._totals["prompt"] += len(request.prompt_ids)
            self._lock.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            running = self._running.pop(request_id, None)
            if running is None:
                return
            self.cancelled.append(request_id)
            self._lock.notify_all()
        running.on_event(RequestEvent(request_id=request_id, finish_reason="cancelled"))

    def snapshot(self) -> EngineSnapshot:
        with self._lock:
            return EngineSnapshot(
                is_ready=self.is_ready,
                is_draining=self.is_draining,
                num_running=len(self._running),
                num_waiting=0,
                kv_blocks_total=64,
                kv_blocks_used=len(self._running),
                kv_block_tokens=16,
                kv_bytes=4096,
                weight_bytes=8192,
                max_num_seqs=16,
                max_model_len=self.max_model_len,
                prompt_tokens_total=self._totals["prompt"],
                cached_tokens_total=0,
                output_tokens_total=self._totals["output"],
                preemptions_total=0,
                steps_total=self._totals["steps"],
                span_seconds_total={"forward": 1.5, "sample": 0.25},
                ranks=RankFigures(
                    **{name: {"0": 1.0, "1": 2.0} for name in RANK_COLUMNS},
                    compute_skew=1.5,
                    communication_skew=1.25,
                ),
                active={"numerics_digest": "0123456789abcdef0123456789abcdef", "backend": "fake"},
            )

    def expert_load(self, window_s: float | None) -> tuple[ExpertLoad, ...]:
        self.windows.append(window_s)
        counts = (np.array([3, 1, 0, 4]), np.array([2, 2, 2, 2]))
        load = ExpertLoad(
            counts=counts,
            phase="prefill",
            num_tokens=4,
            num_steps=1,
            since_s=0.0,
            until_s=1.5,
            plan_version=0,
            source="engine",
        )
        return (
            load,
            replace(load, phase="decode", counts=tuple(c * 10 for c in counts), num_tokens=40, num_steps=40),
        )

    def placement(self) -> ExpertPlan:
        return self.rebalance.plan

    def adopt(self, plan: ExpertPlan) -> Swapped:
        """With the gate closed the swap stays under way."""
        answer = self.rebalance.ask(plan, 0.0)
        self.gate.wait()
        while (stage := self.rebalance.next_stage()) is not None:
            self.rebalance.done(stage, 1000, 0.5)
        return answer.result(1.0)

    def drain(self, timeout_s: float) -> bool:
        with self._lock:
            self.is_draining = True
            return self._lock.wait_for(lambda: not self._running, timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            left, self._running = list(self._running.values()), {}
            self._lock.notify_all()
        for running in left:
            running.on_event(
                RequestEvent(request_id=running.request.request_id, finish_reason="error", error="closed")
            )
        self.gate.set()
        self._thread.join(5.0)

    def wait_idle(self, timeout_s: float = 5.0) -> bool:
        """Until nothing runs."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._running, timeout_s)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._running or self._is_closed)
                if self._is_closed:
                    return
                batch = list(self._running.values())
                self._totals["steps"] += 1
            self.gate.wait()
            if self._step_s:
                pause.wait(self._step_s)
            for running in batch:
                event = running.next_event(self._logprob, self._fail_after, self.num_cached_tokens)
                if event.finish_reason == "error":
                    event = replace(event, error=self._failure, is_retriable=self._is_lost)
                with self._lock:
                    if self._running.get(running.request.request_id) is not running:
                        continue
                    self._totals["output"] += len(event.token_ids)
                    if event.finish_reason is not None:
                        del self._running[running.request.request_id]
                        self._lock.notify_all()
                running.on_event(event)
                if running.num_done == self._pause_after:
                    self.gate.clear()


class _Running:
    def __init__(
        self, request: Request, on_event: Callable[[RequestEvent], None], answer: list[int], room: int
    ) -> None:
        self.request, self.on_event, self.answer, self.room = request, on_event, answer, room
        self.num_done = 0

    def next_event(self, logprob: float, fail_after: int | None, num_cached_tokens: int) -> RequestEvent:
        request, sampling = self.request, self.request.sampling
        first = self.num_done == 0
        prompt_logprobs: tuple[Logprobs | None, ...] | None = None
        if first and sampling.prompt_logprobs is not None:
            prompt_logprobs = (
                None,
                *(_scored(i, -1.0, sampling.prompt_logprobs) for i in request.prompt_ids[1:]),
            )
        event = RequestEvent(
            request_id=request.request_id,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens if first else 0,
        )
        limit = self.room if sampling.max_tokens is None else min(sampling.max_tokens, self.room)
        if limit == 0:
            return replace(event, finish_reason="length")
        if fail_after is not None and self.num_done >= fail_after:
            return replace(event, finish_reason="error")
        token_id = (
            self.answer[self.num_done] if self.num_done < len(self.answer) else request.eos_token_ids[0]
        )
        self.num_done += 1
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        logprobs = () if sampling.logprobs is None else (_scored(token_id, logprob, sampling.logprobs),)
        event = replace(event, token_ids=(token_id,), logprobs=logprobs)
        if token_id in ends and self.num_done > sampling.min_tokens:
            return replace(event, finish_reason="stop", stop_token_id=token_id)
        if self.num_done >= limit:
            return replace(event, finish_reason="length")
        return event


def _scored(token_id: int, logprob: float, num_top: int) -> Logprobs:
    top = tuple((token_id + i, logprob - i) for i in range(num_top))
    return Logprobs(token_id=token_id, logprob=logprob, rank=1, top=top)
