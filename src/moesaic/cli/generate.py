"""`moesaic generate`: continue a prompt on the terminal, and show which experts fired."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.options import (
    ENGINE_DEFAULTS,
    DispatchFormatName,
    DtypeName,
    FormatName,
    IgnoreEos,
    KvFormatName,
    LayoutOptions,
    MatmulShards,
    Model,
    NumericsName,
    Threads,
    with_options,
)
from moesaic.engine.config import read_hub_cache
from moesaic.errors import ConfigError
from moesaic.spec.locate import locate
from moesaic.text.defaults import SamplingDefaults

if TYPE_CHECKING:
    from moesaic.engine.llm import LLM
    from moesaic.engine.transcript import Completion
    from moesaic.sched.request import SamplingParams
    from moesaic.spec.experts import ExpertLoad

_MODELS = "[default: generation_config.json's]"
MAX_TOKENS = 256  # of this verb: a terminal is not the place for a whole context


@with_options(LayoutOptions, "layout")
def generate_command(
    model: Model,
    *,
    layout: LayoutOptions,
    prompt: Annotated[str | None, typer.Option(help="Text to continue [default: standard input].")] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt through the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = MAX_TOKENS,
    temperature: Annotated[float | None, typer.Option(help=f"0 is greedy {_MODELS}.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"Draw from the most likely tokens of this mass {_MODELS}.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help=f"Draw from this many tokens {_MODELS}.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help=f"Leave out tokens below this part of the likeliest {_MODELS}.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text [default: drawn].")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: IgnoreEos = False,
    show_experts: Annotated[
        bool, typer.Option("--show-experts", help="Show which experts fired, layer by layer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when all is done.")] = False,
    dtype: DtypeName = None,
    weight_format: FormatName = None,
    kv_format: KvFormatName = None,
    dispatch_format: DispatchFormatName = None,
    numerics: NumericsName = ENGINE_DEFAULTS["preset"],
    matmul_shards: MatmulShards = None,
    threads: Threads = None,
) -> None:
    """Continue a prompt on the terminal."""
    stated = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    folder = locate(model, hub=read_hub_cache(), needs_weights=True).weights_folder()
    sampling = SamplingDefaults.load(folder).params(
        **{name: value for name, value in stated.items() if value is not None},
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, so text cannot be read: copy the model's there")
    text = _read_prompt(prompt)
    from moesaic.engine.llm import LLM  # heavy: after the arguments were found good

    with LLM(
        model,
        progress=_progress(),
        max_num_seqs=1,
        preset=numerics,
        dtype=dtype,
        format=weight_format,
        kv_format=kv_format,
        dispatch_format=dispatch_format,
        matmul_shards=matmul_shards,
        num_threads=threads,
        **layout.options(),
    ) as llm:
        prompt_ids = _encode_chat(llm, text) if chat else llm.encode(text)
        completion = _stream(llm, prompt_ids, sampling, write=None if as_json else _write)
        loads = llm.engine.expert_load(None)
        layer_idxs = [layer_idx for layer_idx, _ in llm.engine.spec.moe_layers]
        if as_json:
            numerics_digest = llm.engine.snapshot().active["numerics_digest"]
            typer.echo(json.dumps(_plain(text, completion, loads, layer_idxs, numerics_digest)))
        elif show_experts:
            _show_experts(loads, layer_idxs)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None:
        try:
            return os.fsencode(prompt).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--prompt is not UTF-8 text (byte {error.start}): convert it, or pipe it in as UTF-8"
            ) from error
    if sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt TEXT, or pipe a text into standard input")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text (byte {error.start})") from error


def _encode_chat(llm: LLM, text: str) -> tuple[int, ...]:
    from moesaic.text.template import ChatTemplate

    folder, tokenizer = llm.engine.config.model, llm.tokenizer
    template = None
    if tokenizer is not None:
        template = ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens)
    if tokenizer is None or template is None:
        raise ConfigError(
            f"{folder} has no chat template: leave --chat out, or add chat_template.jinja there"
        )
    rendered = template.render([{"role": "user", "content": text}])
    return tuple(tokenizer.encode(rendered, add_special_tokens=False))


def _stream(
    llm: LLM, prompt_ids: Sequence[int], sampling: SamplingParams, write: Callable[[str], None] | None
) -> Completion:
    """Show the text as it comes; an interrupt from the keyboard ends it like any error."""
    for piece in llm.stream(prompt_ids, sampling):
        if write is not None:
            write(piece.text)
        if piece.completion is not None:
            if write is not None:
                write("\n")
            if piece.completion.error is not None:
                raise ConfigError(f"the model failed on this prompt: {piece.completion.error}")
            return piece.completion
    raise RuntimeError("a stream ends with its completion")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _plain(
    prompt: str,
    completion: Completion,
    loads: Sequence[ExpertLoad],
    layer_idxs: Sequence[int],
    numerics_digest: str,
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt_ids),
        "numerics_digest": numerics_digest,
        "experts": {
            load.phase: {
                "num_tokens": load.num_tokens,
                "counts": {
                    str(layer_idx): counts.tolist()
                    for layer_idx, counts in zip(layer_idxs, load.counts, strict=True)
                },
            }
            for load in loads
        },
    }


def _show_experts(loads: Sequence[ExpertLoad], layer_idxs: Sequence[int]) -> None:
    from rich.console import Console

    from moesaic.cli.heat_map import draw
    from moesaic.obs.load import total_counts

    console = Console(highlight=False)
    if not layer_idxs:
        typer.echo("this model is dense: it has no experts")
        return
    num_tokens = sum(load.num_tokens for load in loads)
    typer.echo(f"which experts fired over {num_tokens} tokens (brightest: the hottest of its layer)")
    counts = total_counts(loads)
    layers = list(zip(layer_idxs, counts, strict=True))
    for line in draw(layers, width=console.width, is_plain=not console.is_terminal):
        console.print(line, no_wrap=True, crop=False, soft_wrap=True)


def _progress() -> Callable[[int, int], None] | None:
    """Percent of the weights on standard error, when someone looks at it."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r\x1b[K" if done >= total else ""
        sys.stderr.write(f"\rloading weights: {100 * done // max(total, 1)} %{end}")
        sys.stderr.flush()

    return show
