"""`moesaic simulate`: mechanisms on made-up or recorded traffic, counted. No weights, no torch."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from moesaic.cli.gate_view import render
from moesaic.cli.simulate_drift import drift_command
from moesaic.cli.simulate_engine import fleet_command, serve_command
from moesaic.cli.simulate_layer import capacity_command, ep_command, pingpong_command
from moesaic.planner.sim.case import GateCase

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
DEFAULT = GateCase()


@app.callback()
def simulate() -> None:
    """Count what a mechanism does to made-up or recorded traffic, without weights."""


@app.command("gate")
def gate_command(
    experts: Annotated[int, typer.Option(help="Experts of the layer.")] = DEFAULT.num_experts,
    top_k: Annotated[int, typer.Option(help="Experts that each token chooses.")] = DEFAULT.experts_per_token,
    tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = DEFAULT.num_tokens,
    topics: Annotated[int, typer.Option(help="Topics that tokens cluster by.")] = DEFAULT.num_topics,
    strength: Annotated[
        float, typer.Option(help="Of the topics; a token's own noise is 1.")
    ] = DEFAULT.strength,
    share: Annotated[
        float, typer.Option(help="Share of a topical batch that is of one topic.")
    ] = DEFAULT.share,
    capacity_factor: Annotated[
        float, typer.Option(help="Pairs an expert takes, as a multiple of an even part.")
    ] = DEFAULT.capacity_factor,
    importance_weight: Annotated[
        float, typer.Option(help="Of the importance loss of noisy top-k; the ratio counts.")
    ] = DEFAULT.importance_weight,
    load_weight: Annotated[
        float, typer.Option(help="Of the load loss of noisy top-k.")
    ] = DEFAULT.load_weight,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = DEFAULT.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How gates load experts, what balancing changes, and what dropping does to answers."""
    case = GateCase(
        num_experts=experts,
        experts_per_token=top_k,
        num_tokens=tokens,
        num_topics=topics,
        strength=strength,
        share=share,
        capacity_factor=capacity_factor,
        importance_weight=importance_weight,
        load_weight=load_weight,
        seed=seed,
    )
    from moesaic.planner.sim.study import study_gates  # numpy: after the arguments were found good

    report = study_gates(case)
    typer.echo(
        json.dumps(dataclasses.asdict(report), indent=2, allow_nan=False) if as_json else render(report)
    )


app.command("pingpong")(pingpong_command)
app.command("ep")(ep_command)
app.command("capacity")(capacity_command)
app.command("serve")(serve_command)
app.command("fleet")(fleet_command)
app.command("drift")(drift_command)
