"""A checkpoint as transformers runs it: the other side of `moesaic verify`, always a process of its own.

The only file that imports transformers. Each layer is also run on the hidden state that our side had before
it, so that a difference is found in the layer that makes it and nowhere else; under bfloat16 once more with
that layer widened to float32, which gives the truth that both sides' roundings are measured against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PretrainedConfig, __version__
from transformers.utils import logging

from moesaic.audit.child import Job, Say, serve_job
from moesaic.errors import CheckpointError, UnsupportedModelError


@torch.inference_mode()
def consult(job: Job, say: Say) -> Mapping[str, Any]:
    """Logits and greedy tokens on its own, and every layer's output on our side's input to it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.num_threads)
    say("loading the checkpoint")
    model = _load(job)
    if job.is_long:
        take_long_factors(model)
    prompts = [torch.tensor([prompt]) for prompt in job.prompts]
    greedy: list[list[int]] = []
    margins: list[list[float]] = []
    for i, tokens in enumerate(prompts):
        say(f"prompt {i + 1} of {len(prompts)}, {tokens.shape[1]} tokens, and {job.num_tokens} greedy ones")
        logits_TV, found = _greedy(model, tokens, job.num_tokens)
        np.save(job.path(f"oracle.{i}.logits.npy"), _array(logits_TV))
        greedy.append([token for token, _ in found])
        margins.append([margin for _, margin in found])
    pieces = _Pieces(model)
    hidden = [torch.from_numpy(np.load(job.path(f"engine.{i}.hidden.npy"))) for i in range(len(prompts))]
    narrow = [hidden_LTD.to(model.dtype) for hidden_LTD in hidden]
    _save(job, "oracle", pieces.each_on(prompts, narrow, say))
    if model.dtype != torch.float32:
        _save(job, "truth", pieces.each_on(prompts, hidden, say, is_wide=True))
    return {"version": __version__, "greedy": greedy, "margins": margins}


def _load(job: Job) -> Any:
    dtype = getattr(torch, job.dtype or "float32")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        job.model,
        config=_config(job),
        trust_remote_code=False,  # code of a checkpoint is never run
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    model, info = loaded
    for name in ("missing_keys", "mismatched_keys"):
        if info.get(name):
            raise CheckpointError(f"transformers {__version__} has no weights for {sorted(info[name])[:5]}")
    return model.eval()


def _config(job: Job) -> Any:
    """The config by the class of its own model_type, else of the family that it is one of.

    Raises: UnsupportedModelError when transformers knows neither.
    """
    config, _ = PretrainedConfig.get_config_dict(job.model, local_files_only=True)
    model_type = config.get("model_type")
    known = next((one for one in (model_type, job.family) if one in CONFIG_MAPPING), None)
    if known is None:
        raise UnsupportedModelError(f"transformers {__version__} knows no model_type {model_type!r}")
    return CONFIG_MAPPING[known].from_dict({**config, "model_type": known})


def take_long_factors(model: nn.Module) -> None:
    """Let longrope turn every sequence as one that is longer than the original length.

    A last position beyond that length goes in with the others and its row is dropped. phimoe asks for its
    frequencies without a length, and so for the short ones at every length: it is given one.
    """
    for module in model.modules():
        rope: Any = module
        if getattr(rope, "rope_type", None) != "longrope":
            continue
        original = rope.config.rope_parameters["original_max_position_embeddings"]
        rope.rope_init_fn = partial(rope.rope_init_fn, seq_len=original + 1)
        rope.register_forward_pre_hook(_lengthened(original), with_kwargs=True)
        rope.register_forward_hook(lambda _, args, table: tuple(part[..., :-1, :] for part in table))


def _lengthened(original: int) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        beyond = positions.new_full((*positions.shape[:-1], 1), original)
        return args[:1], kwargs | {"position_ids": torch.cat((positions, beyond), dim=-1)}

    return hook


class _Pieces:
    """The parts of a model that are run one by one: its layers, the last norm and the head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embed = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        # Where the embedding stands, the layers and the last norm stand: a vision tower has none.
        [base] = [m for m in model.modules() if any(child is self.embed for child in m.children())]
        num_layers = model.config.get_text_config().num_hidden_layers
        lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
        norms = [m for name, m in base.named_children() if name in ("norm", "norm_f", "final_layernorm")]
        if len(lists) != 1 or len(norms) != 1:
            raise UnsupportedModelError(f"the layers of {type(base).__name__} are not where verify looks")
        self.layers: Sequence[nn.Module] = list(lists[0])
        self.norm = norms[0]

    def each_on(
        self, prompts: Sequence[Tensor], hidden: Sequence[Tensor], say: Say, *, is_wide: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each prompt, every layer's output on `hidden[i]`, embeddings first; logits from the last of it.

        `is_wide`: every piece computes in float32 and is narrow again when all prompts went through it, so
        one layer at a time is in memory twice.

        Shapes:  hidden [layers + 1, T, D] each; returns the same and logits [T, V] of each.
        """
        context: Any = _widened if is_wide else nullcontext
        with context([self.norm, self.head]):
            ends = [
                self._skim(tokens, hidden_LTD) for tokens, hidden_LTD in zip(prompts, hidden, strict=True)
            ]
        found = [[end.embedded_TD] for end in ends]
        for i, layer in enumerate(self.layers):
            say(f"layer {i} by itself, in {'float32' if is_wide else 'its own dtype'}")
            with context([layer]):
                for outputs, end, hidden_LTD in zip(found, ends, hidden, strict=True):
                    args, kwargs = _with_hidden(hidden_LTD[i][None], *end.calls[i])
                    output = layer(*args, **kwargs)
                    outputs.append((output[0] if isinstance(output, tuple) else output)[0])
        return [(torch.stack(outputs), end.logits_TV) for outputs, end in zip(found, ends, strict=True)]

    def _skim(self, tokens: Tensor, hidden_LTD: Tensor) -> _Skimmed:
        """A forward whose layers do nothing but note how they are called."""
        calls: list[_Call] = []
        for layer in self.layers:
            layer.forward = _noting(calls)
        given = self.norm.register_forward_pre_hook(
            lambda _, args, kwargs: _with_hidden(hidden_LTD[-1][None], args, kwargs), with_kwargs=True
        )
        try:
            embedded = self.embed(tokens).to(hidden_LTD.dtype)
            logits_TV = self.model(inputs_embeds=embedded, use_cache=False).logits[0]
        finally:
            given.remove()
            for layer in self.layers:
                del layer.forward
        return _Skimmed(calls=calls, embedded_TD=_hidden_of(*calls[0])[0], logits_TV=logits_TV)


_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Skimmed:
    """What one forward gave without its layers.

    `embedded_TD` is what the model itself gives to its first layer: embeddings, scaled as the family does.
    """

    calls: list[_Call]  # of each layer
    embedded_TD: Tensor
    logits_TV: Tensor


def _noting(calls: list[_Call]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return _hidden_of(args, kwargs)

    return forward


def _hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _with_hidden(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """The same call with another hidden state."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


@contextmanager
def _widened(pieces: Sequence[nn.Module]) -> Iterator[None]:
    """Within it these compute in float32."""
    narrow = {parameter: parameter.data for piece in pieces for parameter in piece.parameters()}
    for parameter, data in narrow.items():
        parameter.data = data.float()
    try:
        yield
    finally:
        for parameter, data in narrow.items():
            parameter.data = data


def _greedy(model: Any, prompt: Tensor, num_tokens: int) -> tuple[Tensor, list[tuple[int, float]]]:
    """Logits [T, V] of a prompt; the likeliest tokens after it, each with what it was ahead of the next."""
    cache = DynamicCache(config=model.config)
    logits_TV = model(prompt, cache=cache, use_cache=True).logits[0]
    last, found = logits_TV[-1], list[tuple[int, float]]()
    while True:
        best = last.float().topk(2)
        found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
        if len(found) == num_tokens:
            return logits_TV, found
        last = model(best.indices[None, :1], cache=cache, use_cache=True).logits[0, -1]


def _save(job: Job, side: str, outputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for i, arrays in enumerate(outputs):
        for kind, values in zip(("layers", "head"), arrays, strict=True):
            np.save(job.path(f"{side}.{i}.{kind}.npy"), _array(values))


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = values.float().contiguous().numpy()
    return array


if __name__ == "__main__":
    serve_job("oracle", consult)
