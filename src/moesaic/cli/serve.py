"""`moesaic serve`: a model over the OpenAI HTTP API."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic import log
from moesaic.cli.options import (
    ENGINE_DEFAULTS,
    DispatchFormatName,
    DtypeName,
    FormatName,
    KvBytes,
    KvFormatName,
    LayoutOptions,
    MatmulShards,
    MaxNumSeqs,
    Model,
    NumericsName,
    ReplicaChoiceName,
    Threads,
    defaults_of,
    with_options,
)
from moesaic.engine.config import EngineConfig, read_environment, read_hub_cache, read_world
from moesaic.errors import ConfigError
from moesaic.server.settings import ServerSettings
from moesaic.spec.families import read_config
from moesaic.spec.locate import Located, locate
from moesaic.text.defaults import SamplingDefaults
from moesaic.units import parse_bytes

if TYPE_CHECKING:
    from moesaic.text.grammar import GrammarCompiler
    from moesaic.text.tokenizer import Tokenizer

_log = log.get_logger("cli")
_PROGRESS_S = 2.0
_SERVER_DEFAULTS = defaults_of(ServerSettings)


@with_options(LayoutOptions, "layout")
def serve_command(
    model: Model,
    *,
    layout: LayoutOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name for clients [default: the folder's].")
    ] = None,
    max_num_seqs: MaxNumSeqs = ENGINE_DEFAULTS["max_num_seqs"],
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together [default: the model's].")
    ] = None,
    max_tokens_per_step: Annotated[
        int, typer.Option(min=1, help="Longer prompts are computed in chunks.")
    ] = ENGINE_DEFAULTS["max_tokens_per_step"],
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")
    ] = ENGINE_DEFAULTS["max_waiting"],
    kv_bytes: KvBytes = None,
    dtype: DtypeName = None,
    weight_format: FormatName = None,
    kv_format: KvFormatName = None,
    dispatch_format: DispatchFormatName = None,
    numerics: NumericsName = ENGINE_DEFAULTS["preset"],
    matmul_shards: MatmulShards = None,
    threads: Threads = None,
    replica_choice: ReplicaChoiceName = ENGINE_DEFAULTS["replica_choice"],
    generation_config: Annotated[
        str,
        typer.Option(help="auto: sampling defaults are those of the model's generation_config.json; none."),
    ] = "auto",
    api_key: Annotated[
        str | None, typer.Option(help="Key for all paths but /health and /ready [default: MOESAIC_API_KEY].")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the server; may be repeated.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have after SIGTERM.")
    ] = _SERVER_DEFAULTS["drain_timeout_s"],
    log_style: Annotated[str | None, typer.Option(help="text or json [default: text].")] = None,
) -> None:
    """Serve a model over the OpenAI HTTP API, until a signal."""
    _configure_log(log_style)
    if generation_config not in ("auto", "none"):
        raise ConfigError(f"--generation-config must be auto or none, got {generation_config!r}")
    located = locate(model, hub=read_hub_cache(), needs_weights=True)
    folder = located.weights_folder()
    settings = ServerSettings(
        model_name=served_model_name if served_model_name is not None else located.short_name,
        api_key=api_key if api_key is not None else read_environment().api_key,
        cors_origins=tuple(cors or ()),
        # More could never all be queued, and would be told to come again for ever.
        max_sequences=min(_SERVER_DEFAULTS["max_sequences"], max_waiting),
        drain_timeout_s=drain_timeout,
    )
    config = EngineConfig(
        model=str(folder),
        preset=numerics,  # type: ignore[arg-type]  # checked by the dataclass
        dtype=dtype,  # type: ignore[arg-type]  # checked by the dataclass
        format=weight_format,  # type: ignore[arg-type]  # checked by the dataclass
        kv_format=kv_format,  # type: ignore[arg-type]  # checked by the dataclass
        dispatch_format=dispatch_format,  # type: ignore[arg-type]  # checked by the dataclass
        matmul_shards=matmul_shards,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_tokens_per_step=max_tokens_per_step,
        max_waiting=max_waiting,
        kv_bytes=None if kv_bytes is None else parse_bytes(kv_bytes),
        num_threads=threads,
        **layout.options(),
        replica_choice=replica_choice,  # type: ignore[arg-type]  # checked by the dataclass
    )
    world = read_world(config)
    if world is not None and world.rank > 0:
        from moesaic.engine.launchers.torchrun import serve_as_rank  # heavy

        serve_as_rank(config, world)
        return
    defaults = SamplingDefaults.load(folder) if generation_config == "auto" else SamplingDefaults()
    _serve(located, config, settings, defaults, host=host, port=port)


def _serve(
    located: Located,
    config: EngineConfig,
    settings: ServerSettings,
    defaults: SamplingDefaults,
    *,
    host: str,
    port: int,
) -> None:
    from moesaic.server.run import bind, listen, run, url_of

    with bind(host, port) as sock:  # before the weights are loaded, which may take minutes
        from moesaic.text.template import ChatTemplate
        from moesaic.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(config.model)
        template = ChatTemplate.load(config.model, special_tokens=tokenizer.special_tokens)
        if template is None:
            _log.warning("no chat template in %s: /v1/chat/completions will refuse", config.model)
        if settings.api_key is None and not host.startswith("127.") and host not in ("localhost", "::1"):
            _log.warning("anyone who reaches %s may use this server: give --api-key", host)
        with _uncollected():
            # Heavy imports: the arguments, the port and the tokenizer are good.
            from moesaic.engine.launch import start_engine
            from moesaic.server.app import create_app

            engine = start_engine(
                config,
                tokenizer_digest=tokenizer.digest,
                grammars=_grammars(located, tokenizer),
                progress=_progress(),
            )
        try:
            app = create_app(
                engine,
                tokenizer,
                settings,
                template=template,
                defaults=defaults,
                created_s=int(time.time()),
            )
            _log.info("sampling defaults: %s", defaults.summary())
            listen(sock)
            url = url_of(sock)
            typer.echo(f"serving {settings.model_name} on {url}")
            typer.echo(_example(url, settings, is_chat=template is not None))
            run(app, engine, sock, settings)
        finally:
            engine.close()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Start-up without the garbage collector: nearly all of it stays, and walking it costs half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _grammars(located: Located, tokenizer: Tokenizer) -> GrammarCompiler | None:
    """Structured output, where the model and its tokenizer allow it."""
    from moesaic.text.grammar import GrammarCompiler

    vocab = read_config(located.config, name=located.name).vocab
    try:
        return GrammarCompiler(tokenizer, num_logits=vocab)
    except ConfigError as error:
        _log.warning("response_format will be refused: %s", error)
        return None


def _configure_log(style: str | None) -> None:
    environment = read_environment()
    chosen = style or environment.log_style or "text"
    if chosen not in ("text", "json"):
        raise ConfigError(f"--log-style must be text or json, got {chosen!r}")
    log.configure(style=chosen, level=environment.log_level or "INFO")  # type: ignore[arg-type]
    for name in ("uvicorn", "asyncio"):  # what they have to complain about, in the same form
        other = logging.getLogger(name)
        other.handlers[:] = logging.getLogger("moesaic").handlers
        other.setLevel(logging.WARNING)
        other.propagate = False


def _progress() -> Callable[[int, int], None]:
    """A log line every few seconds of loading."""
    shown_s = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _PROGRESS_S:
            shown_s = time.monotonic()
            _log.info("loading weights: %d %%", 100 * done // max(total, 1))

    return show


def _example(url: str, settings: ServerSettings, *, is_chat: bool) -> str:
    """Lines to paste into another terminal, and into Python."""
    key = "" if settings.api_key is None else " -H 'Authorization: Bearer KEY'"
    path, body = "completions", '{"prompt": "once upon a time", "max_tokens": 64}'
    call = f'completions.create(model="{settings.model_name}", prompt="once upon a time", max_tokens=64)'
    if is_chat:
        messages = '[{"role": "user", "content": "tell me a story"}]'
        path, body = "chat/completions", f'{{"messages": {messages}, "max_tokens": 64}}'
        call = f'chat.completions.create(model="{settings.model_name}", messages={messages}, max_tokens=64)'
    return f"""
  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'

  from openai import OpenAI  # pip install openai
  client = OpenAI(base_url="{url}/v1", api_key="{"none" if settings.api_key is None else "KEY"}")
  print(client.{call})
"""
