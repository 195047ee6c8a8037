"""Options that several verbs take, written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from moesaic.engine.config import EngineConfig
from moesaic.engine.layout import LayoutWish

CHECK_FAILED = 3
"""Exit code of a verb that checked something and found it wrong."""

Model = Annotated[str, typer.Argument(help="A model folder, a cached ORG/NAME, or demo.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Requests computed in one step.")]
KvBytes = Annotated[
    str | None, typer.Option(help="Size of the KV pool, as in 512MiB [default: from free memory].")
]
DtypeName = Annotated[str | None, typer.Option(help="float32 or bfloat16 [default: the checkpoint's].")]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Weights are rounded to it while they load: int8, int8-g32, int4-g32, int4-g64, int4-g128, or "
        "int4-g32-zp and its like with zero points [default: the dtype].",
    ),
]
KvFormatName = Annotated[
    str | None,
    typer.Option(
        "--kv-format",
        help="Keys and values are rounded to it: int8 or fp8, one scale for each token and head, or bfloat16 "
        "[default: the dtype].",
    ),
]
DispatchFormatName = Annotated[
    str | None,
    typer.Option(
        "--dispatch-format",
        help="Rows are rounded to it on their way to experts, on one rank too: fp8, one scale for 128 "
        "numbers, or bfloat16 [default: the dtype].",
    ),
]
MatmulShards = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Parts of each sum that --tp and slices of experts may split, a power of two: bits follow it, "
        "on one rank too "
        "[default: the preset's].",
    ),
]
NumericsName = Annotated[str, typer.Option(help="Numerics preset: portable or fast.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to compute with [default: all processors].")
]
ReplicaChoiceName = Annotated[
    str,
    typer.Option(
        "--replica-choice",
        help="Which copy of an expert a row goes to: turns (by the plan's shares), least-loaded (by the last "
        "steps' loads) or hash (a row stays with its copy when others come and go). No bit depends on it.",
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")]


def defaults_of(kind: type[Any]) -> dict[str, Any]:
    """The defaults that a dataclass states, so that no verb states them again."""
    return {field.name: field.default for field in fields(kind)}


def with_options(
    kind: type[Any], name: str = "options"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A verb with every field of a dataclass as an option; together they reach it as the parameter `name`."""
    hints, shared = get_type_hints(kind, include_extras=True), fields(kind)

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in signature(verb, eval_str=True).parameters.values() if one.name != name]
        added = [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
            for one in shared
        ]

        @wraps(verb)
        def command(**given: Any) -> None:
            verb(**{name: kind(**{one.name: given.pop(one.name) for one in shared})}, **given)

        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in own] + added
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutOptions:
    """Over how many processes and memories a model is spread; what all verbs that run an engine share."""

    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that share the experts, each with requests of its own "
            "[default: as many as --placement is for, else 1].",
        ),
    ] = None
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", min=1, help="Ranks that share one replica's attention; see --matmul-shards [default: 1]."
        ),
    ] = None
    tp_wires: Annotated[
        str | None,
        typer.Option(
            help="What ranks of a replica sum over: gloo or shared_memory [default: memory that they share]."
        ),
    ] = None
    expert_tp: Annotated[
        int | None,
        typer.Option(
            "--expert-tp",
            min=1,
            help="Ranks over which each expert is cut along its width; see --matmul-shards [default: 1].",
        ),
    ] = None
    placement: Annotated[
        str | None,
        typer.Option(help="File of moesaic balance -o: which rank has which experts [default: equal runs]."),
    ] = None
    deployment: Annotated[
        str | None,
        typer.Option(help="File of moesaic plan -o: layout, placement and numerics, instead of options."),
    ] = None
    dispatcher: Annotated[
        str | None,
        typer.Option(
            help="gathered, shared_memory, exchange, two_level or local [default: the fastest here]."
        ),
    ] = None
    returns: Annotated[
        str | None,
        typer.Option(help="What experts send back: choices, or subtrees of sums [default: choices]."),
    ] = None
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of a step; one computes while another's rows travel [default: 1]."),
    ] = None
    chunks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Parts in which rows are sent to experts; one is computed while others travel [default: 1].",
        ),
    ] = None
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks that follow each other on a node; for two_level.")
    ] = None

    launcher: Annotated[
        str | None,
        typer.Option(help="What starts the processes: local, torchrun or ray [default: as it was started]."),
    ] = None
    rank_address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of this machine where ranks meet [default: by the launcher, a free port]."
        ),
    ] = None

    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights",
            help="Have weights in memory once for all processes of a machine that load the same ones alike.",
        ),
    ] = False
    numa: Annotated[
        str,
        typer.Option(help="spread: weights lie on all NUMA nodes; off: where the loading thread runs."),
    ] = "spread"

    def options(self) -> dict[str, Any]:
        """The same as `EngineConfig` takes it.

        Raises: ConfigError for what is unknown, or contradicts itself.
        """
        wish = LayoutWish(
            num_ranks=self.ranks,
            tp=self.tp,
            expert_tp=self.expert_tp,
            placement=self.placement,
            deployment=self.deployment,
            dispatcher=self.dispatcher,  # type: ignore[arg-type]  # checked by the dataclass
            returns=self.returns,  # type: ignore[arg-type]  # checked by the dataclass
            num_micro_batches=self.micro_batches,
            num_chunks=self.chunks,
            ranks_per_node=self.ranks_per_node,
        )
        return {
            "layout": wish,
            "tp_wires": self.tp_wires,
            "launcher": self.launcher,
            "rank_address": self.rank_address,
            "share_weights": self.share_weights,
            "numa": self.numa,
        }


ENGINE_DEFAULTS = defaults_of(EngineConfig)
