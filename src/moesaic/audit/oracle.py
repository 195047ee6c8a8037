"""A checkpoint as transformers runs it: the other side of `moesaic verify`, always a process of its own.

The only file that imports transformers. Each layer is also run on the hidden state that our side had before
it, so that a difference is found in the layer that makes it and nowhere else; under bfloat16 once more with
that layer widened to float32, which gives the truth that both sides' roundings are measured against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, __version__
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
    pieces = _Pieces(model)
    greedy: list[list[int]] = []
    margins: list[list[float]] = []
    for i, prompt in enumerate(job.prompts):
        say(f"prompt {i + 1} of {len(job.prompts)}, {len(prompt)} tokens")
        tokens = torch.tensor([prompt])
        np.save(job.path(f"oracle.{i}.logits.npy"), _array(model(tokens, use_cache=False).logits[0]))
        ours = torch.from_numpy(np.load(job.path(f"engine.{i}.hidden.npy")))
        _save(job, f"oracle.{i}", pieces.each_on(tokens, ours.to(model.dtype)))
        if model.dtype != torch.float32:
            with pieces.widened():
                _save(job, f"truth.{i}", pieces.each_on(tokens, ours))
        found = _greedy(model, prompt, job.num_tokens)
        greedy.append([token for token, _ in found])
        margins.append([margin for _, margin in found])
    return {"version": __version__, "greedy": greedy, "margins": margins}


def _load(job: Job) -> Any:
    dtype = getattr(torch, job.dtype or "float32")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        job.model,
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

    def each_on(self, tokens: Tensor, hidden_LTD: Tensor) -> tuple[Tensor, Tensor]:
        """Every layer's output on `hidden_LTD[i]`, embeddings first; logits from the last of `hidden_LTD`.

        Shapes:  hidden_LTD [layers + 1, T, D]; returns the same and logits [T, V].
        """
        found: list[Tensor] = []
        handles = [self.layers[0].register_forward_pre_hook(_taken(found), with_kwargs=True)]
        for i, layer in enumerate([*self.layers, self.norm]):
            handles.append(layer.register_forward_pre_hook(_given(hidden_LTD[i][None]), with_kwargs=True))
        for layer in self.layers:
            handles.append(layer.register_forward_hook(_kept(found)))
        try:
            embedded = self.embed(tokens).to(hidden_LTD.dtype)
            logits_TV = self.model(inputs_embeds=embedded, use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(found), logits_TV

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Within it each piece computes in float32, and is narrow again when it is done."""
        handles = []
        for piece in [*self.layers, self.norm, self.head]:
            narrow: dict[nn.Parameter, Tensor] = {}
            handles.append(piece.register_forward_pre_hook(_widen(narrow)))
            handles.append(piece.register_forward_hook(_narrow(narrow)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _given(hidden: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    return hook


def _taken(found: list[Tensor]) -> Any:
    """Keep what the model itself gives to its first layer: embeddings, scaled as the family does."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[0])

    return hook


def _kept(found: list[Tensor]) -> Any:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0])

    return hook


def _widen(narrow: dict[nn.Parameter, Tensor]) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        for parameter in module.parameters():
            narrow[parameter] = parameter.data
            parameter.data = parameter.data.float()

    return hook


def _narrow(narrow: dict[nn.Parameter, Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for parameter, data in narrow.items():
            parameter.data = data
        narrow.clear()

    return hook


def _greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[tuple[int, float]]:
    """The most likely tokens after a prompt, each with what it was ahead of the next."""
    cache = DynamicCache(config=model.config)
    tokens, found = torch.tensor([list(prompt)]), []
    for _ in range(num_tokens):
        best = model(tokens, cache=cache, use_cache=True).logits[0, -1].float().topk(2)
        found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
        tokens = best.indices[None, :1]
    return found


def _save(job: Job, name: str, outputs: tuple[Tensor, Tensor]) -> None:
    for kind, values in zip(("layers", "head"), outputs, strict=True):
        np.save(job.path(f"{name}.{kind}.npy"), _array(values))


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = values.float().contiguous().numpy()
    return array


if __name__ == "__main__":
    serve_job("oracle", consult)
