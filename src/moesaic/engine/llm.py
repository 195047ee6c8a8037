"""A model in this process, for scripts: prompts in, completions out. Closes with its `with` block."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from moesaic.engine.config import EngineConfig, read_hub_cache, read_world
from moesaic.engine.launch import start_engine
from moesaic.engine.launchers.torchrun import serve_as_rank
from moesaic.engine.loop import Engine
from moesaic.engine.philox import sibling_seed
from moesaic.engine.rebalance import Swapped
from moesaic.engine.transcript import Completion, Transcript
from moesaic.errors import ConfigError, MoesaicError, Overloaded, RequestError
from moesaic.sched.request import Request, RequestEvent, SamplingParams
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.locate import locate
from moesaic.text.defaults import SamplingDefaults
from moesaic.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """What `LLM.stream` yields: new text, and with the last one the whole completion."""

    text: str
    completion: Completion | None = None


class LLM:
    """An engine and a tokenizer.

    Owns:    the engine, until `close` or the end of the `with` block.
    """

    def __init__(
        self, path: str | Path, *, progress: Callable[[int, int], None] | None = None, **options: Any
    ) -> None:
        """Load a folder, a cached ORG/NAME, or `"demo"`; `options` are the fields of `EngineConfig`.

        A folder without tokenizer.json takes token ids and gives token ids. Where torchrun started this
        process as another rank than 0, it serves as that rank, and exits when rank 0 has closed its own.

        Raises: ConfigError for the path, and naming the nearest option; what `start_engine` raises.
        """
        folder = locate(str(path), hub=read_hub_cache(), needs_weights=True).weights_folder()
        config = EngineConfig.parse(str(folder), options)
        world = read_world(config)
        if world is not None and world.rank > 0:
            serve_as_rank(config, world)
            raise SystemExit(0)
        self.defaults = SamplingDefaults.load(folder)
        has_tokenizer = (folder / "tokenizer.json").is_file()
        self.tokenizer: Tokenizer | None = Tokenizer.load(folder) if has_tokenizer else None
        digest = self.tokenizer.digest if self.tokenizer is not None else ""
        self.engine: Engine = start_engine(config, tokenizer_digest=digest, progress=progress)
        self._ids = count()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; unfinished requests end with finish_reason 'error'."""
        self._is_closed = True
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[Completion]:
        """`n` completions of each prompt, prompt by prompt, all computed together.

        One `sampling` serves all prompts, or there is one for each; None takes the model's own (`defaults`).
        Choice i of a seeded prompt always draws the same numbers; without a seed one is drawn.

        Raises: RequestError for a prompt or parameter that cannot run, before anything is computed for it;
                ConfigError after `close`.
        """
        transcripts = self._transcripts(prompts, sampling, n)
        by_id = {transcript.request.request_id: transcript for transcript in transcripts}
        for transcript, _ in self._run(by_id):
            if transcript.finish_reason is not None:
                self.engine.cancel(transcript.request.request_id)  # a stop string ended it
        return [transcript.completion() for transcript in transcripts]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Piece]:
        """One completion as it grows. Leaving the iterator cancels it.

        Raises: RequestError as `generate`.
        """
        (transcript,) = self._transcripts([prompt], sampling, 1)
        for _, text in self._run({transcript.request.request_id: transcript}):
            if transcript.finish_reason is None and text:
                yield Piece(text=text)
            elif transcript.finish_reason is not None:
                self.engine.cancel(transcript.request.request_id)
                yield Piece(text=text, completion=transcript.completion())
                return

    def adopt(self, plan: ExpertPlan) -> Swapped:
        """Go over to another expert plan, while others may generate; no answer changes.

        Raises: as `Engine.adopt`.
        """
        return self.engine.adopt(plan)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; ids stay as they are.

        Raises: ConfigError for text when the checkpoint has no tokenizer; RequestError for anything else.
        """
        if isinstance(prompt, str):
            return tuple(self._get_tokenizer().encode(prompt))
        ids = [token_id for token_id in prompt if isinstance(token_id, int)] if _is_list(prompt) else []
        if not _is_list(prompt) or len(ids) != len(prompt):
            shown = repr(prompt)[:80]
            raise RequestError(f"a prompt is a text or a list of token ids, got {shown}", param="prompt")
        return tuple(ids)

    def _get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.engine.config.model} has no tokenizer.json, so text cannot be read: give token ids, "
                "or copy the model's tokenizer.json there"
            )
        return self.tokenizer

    def _transcripts(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
    ) -> list[Transcript]:
        """One per choice, with its request."""
        if self._is_closed:
            raise ConfigError(f"this LLM of {self.engine.config.model} was closed: make a new one")
        if n < 1:
            raise ConfigError(f"n must be at least 1, got {n}")
        listed = _listed(prompts)
        if isinstance(sampling, Sequence):
            params = list(sampling)
        else:
            params = [sampling or self.defaults.params()] * len(listed)
        if len(params) != len(listed):
            raise ConfigError(f"{len(listed)} prompts need as many SamplingParams, or one: got {len(params)}")
        eos = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        made = []
        for prompt_idx, (prompt, chosen) in enumerate(zip(listed, params, strict=True)):
            if not isinstance(chosen, SamplingParams):
                raise ConfigError(f"sampling must be SamplingParams, got {repr(chosen)[:80]}")
            if chosen.stop:
                self._get_tokenizer()
            prompt_ids = self.encode(prompt)
            seed = secrets.randbits(64) if chosen.seed is None else chosen.seed
            for choice_idx in range(n):
                request = Request(
                    request_id=f"llm-{next(self._ids)}",
                    prompt_ids=prompt_ids,
                    sampling=chosen,
                    seed=sibling_seed(seed, choice_idx),
                    eos_token_ids=eos or self.engine.spec.eos_token_ids,
                )
                made.append(
                    Transcript(
                        request=request,
                        prompt_idx=prompt_idx,
                        choice_idx=choice_idx,
                        tokenizer=self.tokenizer,
                    )
                )
        return made

    def _run(self, transcripts: dict[str, Transcript]) -> Iterator[tuple[Transcript, str]]:
        """Submit as the queue allows, and yield each transcript with the text of every event that it took.

        Raises: MoesaicError when the engine failed.
        """
        events: SimpleQueue[RequestEvent] = SimpleQueue()
        waiting = deque(transcripts.values())
        unfinished: set[str] = set()
        try:
            while waiting or unfinished:
                while waiting:
                    request = waiting[0].request
                    try:
                        self.engine.submit(request, events.put)
                    except Overloaded:
                        if not unfinished:
                            raise
                        break  # a place is free when one of ours ends
                    unfinished.add(request.request_id)
                    waiting.popleft()
                event = events.get()
                if event.finish_reason is not None:
                    unfinished.discard(event.request_id)
                transcript = transcripts[event.request_id]
                if transcript.finish_reason is None:
                    text = transcript.add(event)
                    if event.finish_reason == "error" and not self.engine.snapshot().is_ready:
                        raise MoesaicError(event.error)
                    yield transcript, text
        finally:
            for request_id in unfinished:
                self.engine.cancel(request_id)


def _is_list(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, bytes)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text, or a single list of ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    return [ids] if ids else [item for item in prompts if not isinstance(item, int)]
