"""`moesaic inspect`: what a model is, before anything is loaded; what joins the GPUs of a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.audit.inspect import Inspection, MachineView, dump_json, inspect
from moesaic.spec.hub import parse_repo
from moesaic.units import format_bytes, format_count

if TYPE_CHECKING:
    from moesaic.spec.topology import Topology

MAX_TOPOLOGY_BYTES = 2**20

_SHOWN = ("int8", "int8-g32", "int4-g32", "int4-g128")


def inspect_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder, config.json, GGUF file, cached ORG/NAME, or a preset: deepseek-v3; or the "
            "output of nvidia-smi topo -m."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Also show what a decode step of this many tokens reads."),
    ] = None,
    machines: Annotated[
        list[str] | None,
        typer.Option("--machine", help="Machine to judge by; may be repeated [default: h100]."),
    ] = None,
) -> None:
    """Say what a model is: layers, experts, parameters, bytes, and whether this engine runs it.

    Of a file with the output of nvidia-smi topo -m: which GPUs NVLink joins and which adapters are near.
    """
    topology = _topology(Path(model))
    if topology is not None:
        typer.echo(topology.to_json() if as_json else render_topology(model, topology), nl=not as_json)
        return
    found = inspect(model, hub=_hub(model), batch=batch, machines=machines or ["h100"])
    typer.echo(dump_json(found) if as_json else render(found))


def _topology(path: Path) -> Topology | None:
    """The topology in a file, as nvidia-smi prints it or as `--json` wrote it; None for anything else."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_TOPOLOGY_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # whatever it is, the reader of models says so
    if "GPU0" not in text:
        return None
    # Not at the head: they take numpy, and with it half the time in which a preset is shown.
    from moesaic.interop.nvidia_smi import is_matrix, read_matrix
    from moesaic.spec.topology import from_json

    if is_matrix(text):
        return read_matrix(text, name=str(path))
    return from_json(text, name=str(path)) if '"nic_names"' in text else None


def render_topology(name: str, found: Topology) -> str:
    """A node as text."""
    lines = [f"{name}: {len(found.gpus)} GPUs, {len(found.nics)} network adapters"]
    for group in found.nvlink_groups:
        if len(group) > 1:
            lines.append(_row("NVLink", " ".join(group)))
    alone = [group[0] for group in found.nvlink_groups if len(group) == 1]
    if alone:
        lines.append(_row("no NVLink", " ".join(alone)))
    if found.is_all_to_all and len(found.gpus) > 1:
        lines.append(_row("", "every pair has NVLink: experts may be on any of them"))
    for node, gpus in found.numa_groups:
        lines.append(_row("NUMA", f"{'unknown' if node is None else node}: {' '.join(gpus)}"))
    for gpu in found.gpus if found.nics else ():
        near, link = found.nearest_nics(gpu)
        names = dict(zip(found.nics, found.nic_names or found.nics, strict=True))
        lines.append(_row(gpu, f"nearest adapter {', '.join(names[nic] for nic in near)} over {link}"))
    return "\n".join(lines)


def _hub(model: str) -> Path | None:
    """The Hugging Face cache, for names that may be in it; where that is takes long to import."""
    if parse_repo(model) is None:
        return None
    from moesaic.engine.config import read_hub_cache

    return read_hub_cache()


def render(found: Inspection) -> str:
    """The inspection as text."""
    lines = [
        f"{found.name} ({found.kind.replace('_', ' ')})",
        _row("type", f"{found.model_type}, read {_reader(found)}"),
        _row("layers", f"{found.num_layers}, sparse: {_layer_ranges(found)}"),
    ]
    if found.num_moe_layers:
        lines.append(
            _row(
                "experts",
                f"{_spread(found.num_experts_per_layer)} a layer, "
                f"{_spread(found.experts_per_token_per_layer)} chosen "
                f"per token (E/k = {found.sparsity:g}), {format_bytes(found.expert_bytes)} each",
            )
        )
    lines += [
        _row("width", f"{found.hidden}, vocabulary {found.vocab}, up to {found.max_position} positions"),
        _row(
            "parameters", f"{format_count(found.total_params)}, {format_count(found.active_params)} per token"
        ),
        *_components(found),
        _row("weights", f"{format_bytes(found.weight_bytes)}, experts stored as {found.weight_format}"),
        *_rounded(found),
        _row("KV", _kv(found)),
        _row(
            "operations",
            f"{_flops(found.flops_per_token)} per token at a context of {found.context_len}",
        ),
    ]
    for view in found.machines:
        lines.append(_row(view.machine, _machine(view)))
    if found.step is not None:
        step = found.step
        lines.append(
            _row(
                f"batch {step.batch}",
                f"reads {format_bytes(step.total)} a decode step: experts {format_bytes(step.expert_bytes)} "
                f"({step.distinct_experts:.1f} distinct a layer, {step.rows_per_expert:.1f} rows each), "
                "other weights "
                f"{format_bytes(step.other_weight_bytes)}, KV {format_bytes(step.kv_bytes)}",
            )
        )
    lines += _beside(found)
    if found.checkpoint is not None:
        files = found.checkpoint
        lines.append(
            _row("files", f"{files.num_files}, {format_bytes(files.file_bytes)}, {files.num_tensors} tensors")
        )
    for kind, size in found.bytes_by_tensor_type.items():
        lines.append(f"    {kind:<26}  {format_bytes(size):>8}")
    lines += [_row("note", note) for note in found.notes]
    if found.runnable:
        lines.append(_row("runs", _runs(found)))
    else:
        lines.append(_row("runs", "no"))
        lines += [f"    {reason}" for reason in found.reasons]
    return "\n".join(lines)


def _runs(found: Inspection) -> str:
    if found.kind != "folder":
        return "yes"
    if found.checkpoint is None:
        return "the config yes; there are no weights here"
    # Whether the numbers themselves are whole is verify's question.
    return (
        "yes: every weight has its name, shape and dtype; only headers were read here, "
        f"`moesaic verify {found.name}` reads and runs the weights"
    )


def _row(label: str, text: str) -> str:
    return f"  {label:<12}{text}"


def _reader(found: Inspection) -> str:
    return "exactly" if found.reader == "exact" else "by the usual keys only: counts may miss parts"


def _layer_ranges(found: Inspection) -> str:
    """`3-60` for a run of layers, `1, 3, 5, ...` for scattered ones."""
    layers = found.moe_layers
    if not layers:
        return "none"
    if layers[-1] - layers[0] + 1 == len(layers):
        return f"{layers[0]}-{layers[-1]} ({len(layers)})"
    shown = ", ".join(str(layer_idx) for layer_idx in layers[:6])
    return f"{shown}{', ...' if len(layers) > 6 else ''} ({len(layers)})"


def _spread(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def _rounded(found: Inspection) -> list[str]:
    """What the weights take in memory when `serve --format` rounds them, in the formats most asked for."""
    sizes = [
        f"{one} {format_bytes(found.rounded_bytes[one])}" for one in _SHOWN if one in found.rounded_bytes
    ]
    return [_row("--format", f"about {', '.join(sizes)} in memory: lossy")] if sizes else []


def _components(found: Inspection) -> list[str]:
    rows = []
    for component, count in found.params_by_component.items():
        if count:
            size = format_bytes(found.weight_bytes_by_component[component])
            rows.append(f"    {component.replace('_', ' '):<16}{format_count(count):>10}  {size:>8}")
    return rows


def _flops(count: int) -> str:
    """`90.6 GFLOP`."""
    unit, name = next((one for one in ((10**12, "T"), (10**9, "G")) if count >= one[0]), (10**6, "M"))
    return f"{count / unit:.1f} {name}FLOP"


def _kv(found: Inspection) -> str:
    parts = [f"{found.kv_bytes_per_token_unbounded} B per token"]
    parts += [f"{size} B per token of the last {window}" for window, size in found.kv_windows]
    if found.state_bytes_per_sequence:
        parts.append(f"{format_bytes(found.state_bytes_per_sequence)} of state per sequence")
    return ", ".join(parts) + " (bfloat16)"


def _machine(view: MachineView) -> str:
    text = f"{view.devices_for_weights} x {format_bytes(view.memory_bytes)} for the weights alone"
    balance = view.balance
    if balance is None:
        return text
    return (
        f"{text}; experts are bound by compute from a batch of {balance.batch} ({balance.rows:.0f} rows "
        "each; "
        f"{balance.peak_batch} at datasheet rates), {balance.compute_dtype}"
    )


def _beside(found: Inspection) -> list[str]:
    rows = []
    if found.mtp_params:
        rows.append(_row("beside it", f"multi-token prediction, {format_count(found.mtp_params)} parameters"))
    rows += [_row("beside it", f"{part}, not counted") for part in found.other_parts]
    return rows
