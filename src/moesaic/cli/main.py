"""The `moesaic` command: a table of verbs. Only the verb that was typed is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from moesaic import __version__
from moesaic.errors import MoesaicError


class Verb(NamedTuple):
    """Where a verb lives. `target` is a typer app when the verb has verbs of its own, else a function."""

    name: str
    target: str
    summary: str


VERBS = (
    Verb("serve", "moesaic.cli.serve:serve_command", "Serve a model over the OpenAI HTTP API."),
    Verb("generate", "moesaic.cli.generate:generate_command", "Continue a prompt on the terminal."),
    Verb(
        "inspect",
        "moesaic.cli.inspect:inspect_command",
        "Say what a model is: layers, experts, bytes, what runs.",
    ),
    Verb(
        "verify",
        "moesaic.cli.verify:verify_command",
        "Check a model against transformers, alone and in batches.",
    ),
    Verb(
        "fit", "moesaic.cli.fit:fit_command", "Say whether a model fits a machine, and how fast it is there."
    ),
    Verb(
        "calibrate",
        "moesaic.cli.calibrate:calibrate_command",
        "Measure this machine, and write its machine file.",
    ),
    Verb(
        "accuracy",
        "moesaic.cli.accuracy:accuracy_command",
        "Compare predicted with measured serving times.",
    ),
    Verb("plan", "moesaic.cli.plan:plan_command", "Find the layout that serves a model best on machines."),
    Verb(
        "emit", "moesaic.cli.emit:emit_command", "Print a plan as launch lines of moesaic or another engine."
    ),
    Verb("lint", "moesaic.cli.lint:lint_command", "Say what is wrong with another engine's launch line."),
    Verb(
        "balance",
        "moesaic.cli.balance:balance_command",
        "Place experts and copies so that GPUs are evenly busy.",
    ),
    Verb("bench", "moesaic.cli.bench:app", "Measure throughput and latency, in process or against a server."),
    Verb(
        "simulate",
        "moesaic.cli.simulate:app",
        "Count what a mechanism does to made-up or recorded traffic.",
    ),
    Verb(
        "figures",
        "moesaic.cli.figures:figures_command",
        "Recompute figures that texts on MoE inference state.",
    ),
)

EXTRA_OF = {
    "torch": "engine", "llguidance": "engine", "fastapi": "server", "uvicorn": "server", "pydantic": "server",
    "httpx": "server", "matplotlib": "report",
}  # fmt: skip
"""Which extra of the installation brings an optional library."""


def build_app(typed: str | None = None) -> typer.Typer:
    """The command tree, with the real command behind the verb `typed` (None: behind every verb)."""
    app = typer.Typer(
        name="moesaic",
        help="Plan, run, watch and rebalance Mixture-of-Experts language models.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an expected error.")
        ] = False,
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
            ),
        ] = False,
    ) -> None:
        pass

    for verb in VERBS:
        if typed is not None and verb.name != typed:
            app.command(verb.name, help=verb.summary)(_unloaded)
            continue
        target = _load(verb.target)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=verb.name, help=verb.summary)
        else:
            app.command(verb.name, help=verb.summary)(target)
    return app


def main() -> NoReturn:
    """Run the command line and exit.

    0: fine; 1: our bug; 2: the user or the machine cannot have this; 3: a check or an objective failed.
    """
    arguments = sys.argv[1:]
    typed = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        build_app(typed)(prog_name="moesaic")
    except MoesaicError as error:
        if "--debug" in arguments:
            raise
        _refuse(str(error), error.exit_code)
    except ModuleNotFoundError as missing:
        module = (missing.name or "").split(".")[0]
        if "--debug" in arguments or module not in EXTRA_OF:
            raise
        _refuse(f"this needs {module}, which is not installed: pip install 'moesaic[{EXTRA_OF[module]}]'", 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes stdout once more
        sys.exit(0)
    sys.exit(0)


def _load(target: str) -> Callable[..., Any] | typer.Typer:
    module, _, attribute = target.partition(":")
    loaded: Callable[..., Any] | typer.Typer = getattr(import_module(module), attribute)
    return loaded


def _refuse(message: str, exit_code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(exit_code)


def _unloaded() -> None:
    raise AssertionError("the verb that was typed is always loaded")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"moesaic {__version__}")
        raise typer.Exit
