"""`moesaic emit`: the launch lines of a deployment file, for moesaic or another engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from moesaic import __version__
from moesaic.cli.plan import write_text
from moesaic.errors import ConfigError, nearest
from moesaic.hashing import digest
from moesaic.interop.emit import emit
from moesaic.interop.inventory import ENGINES, TITLES
from moesaic.interop.launch import Emission, Lack, Launch
from moesaic.interop.placement_file import parse_target, placement_bytes
from moesaic.spec.deployment import Deployment, from_json
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.families import read_config
from moesaic.spec.locate import PRESET_FOLDER, locate, preset_names
from moesaic.spec.model import ModelSpec

TARGETS = ("moesaic", *ENGINES)
OWN_NEAREST = "one rank on this machine, in the engine's own numerics"
PLACED = ("sglang", "trtllm")
"""Engines that read a file of where each expert is."""
MAX_BYTES = 2**28  # of a deployment file; one of DeepSeek-V3 on 16 devices has 2**20
MAX_SHOWN = 1000  # guess: characters of a line of a file; placements have hundreds of thousands
FILE_ENDINGS = (".sh", ".json", ".yaml", ".yml", ".txt")


def emit_command(
    deployment: Annotated[Path, typer.Argument(help="A deployment file, as moesaic plan -o writes it.")],
    target: Annotated[str, typer.Option("--for", help="vllm, sglang, trtllm, llamacpp, kt or moesaic.")],
    version: Annotated[
        str | None, typer.Option("--version", help="Release of the engine [default: the newest known].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="What the engine is to load [default: the preset of the same model]."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="[default: the plan's]")
    ] = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Also a LeaderWorkerSet manifest.")
    ] = False,
    image: Annotated[
        str | None, typer.Option("--image", help="Container image of the manifest [default: the release's].")
    ] = None,
    is_partial: Annotated[
        bool, typer.Option("--partial", help="Print the nearest lines, and name what they leave out.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write lines and files to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the launch lines of a deployment: one a node, each flag checked against the engine's release.

    Exit code 2: the engine cannot carry all of it; what, why and the nearest is named, --partial goes on.
    """
    if target not in TARGETS:
        raise ConfigError(f"--for {target}: {nearest(target, TARGETS)}")
    found = from_json(_read(deployment), name=str(deployment))
    name, spec = _model(found, model)
    if target == "moesaic":
        made = _own(found, deployment, name, version, kubernetes)
    else:
        made = emit(
            found, target, model=name, spec=spec, version=version, devices_per_node=gpus_per_node,
            placement=partial(_places, target) if target in PLACED else None, image=image,
            with_manifest=kubernetes,
        )  # fmt: skip
    if made.lacks and not is_partial:
        raise ConfigError(_refusal(made))
    if output is not None:
        _write(made, output)
    typer.echo(json.dumps(_plain(made), indent=2) if as_json else render(made))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}; moesaic plan -o writes one"
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: more than the {MAX_BYTES} bytes that a deployment may have; moesaic plan -o writes one"
        )
    return data


def _model(deployment: Deployment, given: str | None) -> tuple[str, ModelSpec | None]:
    """The name to load, and the facts of the model that the deployment was made for.

    Raises: ConfigError when the given model is another, or none is given and no preset is the one.
    """
    if given is not None and (given.lower() in preset_names() or Path(given).exists()):
        located = locate(given)
        spec = read_config(located.config, name=located.name)
        if digest(spec) != deployment.model_digest:
            raise ConfigError(
                f"--model {given} is another model than the deployment was made for (digest {digest(spec)}, "
                f"not {deployment.model_digest})"
            )
        return _repository(given), spec
    for stem in sorted(set(preset_names().values())):
        own_digest, spec = _preset(stem)
        if own_digest == deployment.model_digest:
            return given or _repository(stem), spec
    if given is not None:
        return given, None  # a model of one's own, on another machine
    raise ConfigError(
        f"no preset is the model of the deployment (digest {deployment.model_digest}); say what the engine "
        "is to load with --model"
    )


def _places(target: str, plan: ExpertPlan, spec: ModelSpec | None) -> str:
    """The text of an engine's placement file.

    Raises: ConfigError where it is not known which layers have experts.
    """
    if spec is None:
        raise ConfigError(
            "the deployment has a placement of its own, and which layers have experts is not known here: "
            "--model has to be a preset, a config.json or a folder"
        )
    layer_idxs = [idx for idx, _ in spec.moe_layers]
    no_load = np.zeros((len(layer_idxs), spec.moe_layers[0][1].num_experts))
    made = placement_bytes(parse_target(target), plan, no_load, layer_idxs, len(spec.layers), ".json")
    return made.decode()


@cache
def _preset(stem: str) -> tuple[str, ModelSpec]:
    spec = read_config(locate(stem).config, name=stem)
    return digest(spec), spec


def _repository(name: str) -> str:
    """The repository that a preset's short name stands for, which is what engines load."""
    stem = preset_names().get(name.lower())
    if stem is None or "/" in name or Path(name).exists():
        return name
    aliases: list[str] = json.loads((PRESET_FOLDER / f"{stem}.json").read_text(encoding="utf-8"))["aliases"]
    return next((alias for alias in aliases if "/" in alias), name)


def _own(
    deployment: Deployment, path: Path, model: str, version: str | None, with_manifest: bool
) -> Emission:
    """Our own server, which reads the deployment itself; where it does not run all of it, it gets none."""
    instance = deployment.instances[0]
    lacks = [
        Lack(path=one.path, value=one.value, reason=one.message, nearest=OWN_NEAREST)
        for one in deployment.not_runnable()
    ]
    own = () if lacks else ("--deployment", str(path))
    launch = Launch(
        instance=instance.name, node=0, num_nodes=1, count=1, env={}, words=("moesaic", "serve", model, *own)
    )
    if with_manifest:
        reason = "moesaic has no manifest: a LeaderWorkerSet is for other engines"
        lacks.append(
            Lack(
                path="instances[0]",
                value="--kubernetes",
                reason=reason,
                nearest="the line without a manifest",
            )
        )
    is_other = version is not None and version.removeprefix("v") != __version__
    note = f"the options of moesaic {version} are not known; this line is of {__version__}, installed here"
    return Emission(
        engine="moesaic", version=__version__, basis="parser", model=model, launches=(launch,), files={},
        lacks=tuple(lacks), notes=(note,) if is_other else (),
    )  # fmt: skip


def _refusal(made: Emission) -> str:
    title = TITLES[made.engine]
    listed = "".join(f"\n  {lack}" for lack in made.lacks)
    return (
        f"{title} {made.version} cannot carry the whole deployment:{listed}\n"
        "--partial prints the nearest lines all the same"
    )


def _write(made: Emission, folder: Path) -> None:
    if folder.suffix in FILE_ENDINGS and not folder.is_dir():
        raise ConfigError(
            f"-o {folder}: lines and files are written to a folder, and this is a file's name; as in "
            f"-o {folder.with_suffix('')}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror or error}") from error
    for launch in made.launches:
        name = f"{launch.instance}-node{launch.node}.sh" if launch.num_nodes > 1 else f"{launch.instance}.sh"
        write_text(folder / name, f"#!/bin/sh\n{launch.text}\n")
    for name, text in made.files.items():
        write_text(folder / name, text)


def render(made: Emission) -> str:
    """The lines and files as text; what explains is a shell comment."""
    title = TITLES.get(made.engine, made.engine)
    basis = ", documented only" if made.basis == "documented" else ""
    lines = [f"# {made.model} on {title} {made.version}{basis}"]
    lines += [f"# note: {note}" for note in made.notes]
    lines += [f"# left out: {lack}" for lack in made.lacks]
    for launch in made.launches:
        many = f", {launch.count} such instances" if launch.count > 1 else ""
        node = f", node {launch.node} of {launch.num_nodes}" if launch.num_nodes > 1 else ""
        lines += ["", f"# {launch.instance}{node}{many}", launch.text]
    for name, text in made.files.items():
        lines += ["", f"# {name}", *(f"#   {_shown(line)}" for line in text.splitlines())]
    return "\n".join(lines)


def _shown(line: str) -> str:
    """A line of a file as far as a screen takes it; -o and --json have all of it."""
    if len(line) <= MAX_SHOWN:
        return line
    return f"{line[:MAX_SHOWN]} ... ({len(line)} characters; -o FOLDER writes the file)"


def _plain(made: Emission) -> dict[str, Any]:
    plain = asdict(made)
    for one, launch in zip(plain["launches"], made.launches, strict=True):
        one["text"] = launch.text
    return plain
