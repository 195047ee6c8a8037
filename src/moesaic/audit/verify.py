"""`moesaic verify`: one checkpoint through our engine and through transformers, compared; no torch here.

Each side runs in a process of its own, one after the other, and leaves its arrays in a temporary folder: the
two models never take memory at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from moesaic.account.params import count_params
from moesaic.audit.agreement import (
    RULES,
    TOLERANCES,
    Array,
    Stage,
    StageError,
    compare_greedy,
    judge,
)
from moesaic.audit.child import ChildFailed, ChildKilled, Job, Say, run_child
from moesaic.audit.prompts import HEAVY_BYTES, HEAVY_TOKENS, NUM_TOKENS, choose_prompts
from moesaic.engine.config import EngineConfig, long_factor_lengths
from moesaic.engine.machine import Machine, read_machine
from moesaic.errors import ConfigError, MoesaicError
from moesaic.spec.families import read_config
from moesaic.spec.locate import Located
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import DTYPE_BYTES, DType, Effect

INSTALL = "pip install 'transformers>=5.24,<6'"
MEMORY_FACTOR = 1.3
"""A side's memory over its weights'. Source: measured with this verb on an OLMoE of 7.13 GB: 8.5 GB."""
LONG_NOTE = (
    "longrope: transformers was told to take the long factors at every length, as this engine does; by "
    "itself it takes the short ones in sequences of up to {} tokens"
)


LOSSY_NOTE = "{} is lossy: the distance from transformers is stated, and not judged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """The comparison in one dtype. What needs transformers is None without it."""

    dtype: str
    backend: str  # of our side's kernels
    max_abs_logit_diff: float | None
    greedy_agreement: float | None
    stages: tuple[StageError, ...]
    first_difference: str | None  # embedding, layer 3, head
    matrix: tuple[Mapping[str, Any], ...]
    negative_control_caught: bool
    failures: tuple[str, ...]
    peak_rss_bytes: Mapping[str, int]  # by side; mapped checkpoint files count, which memory need not hold
    peak_own_bytes: Mapping[str, int | None]  # by side; without files. None: this system does not say
    seconds: Mapping[str, float]  # by side


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `moesaic verify` found. The scalars are those of the first pass, the one that proves most."""

    model: str
    reference: str | None  # the folder that transformers ran, where it is another one
    model_type: str
    num_prompts: int
    num_prompt_tokens: int
    num_tokens: int
    oracle: str | None  # version of transformers
    oracle_missing: str | None  # why there is none, and what to do
    passes: tuple[Pass, ...]
    unconsumed: tuple[str, ...]
    unfilled: tuple[str, ...]
    known_unused: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Every check that failed, in words."""
        tensors = []
        if self.unconsumed:
            tensors.append(
                f"tensors that fill no parameter: {len(self.unconsumed)}; remove them, or say in config.json "
                "what they belong to"
            )
        if self.unfilled:
            tensors.append(
                f"parameters that no tensor fills: {len(self.unfilled)}; the checkpoint is incomplete, or "
                "config.json describes another model"
            )
        return (*tensors, *(f"{one.dtype}: {text}" for one in self.passes for text in one.failures))

    @property
    def first_differing_layer(self) -> int | None:
        """The number of the first layer that differs, where the first difference is in a layer."""
        for one in self.passes:
            if one.first_difference is not None:
                kind, _, number = one.first_difference.partition(" ")
                return int(number) if kind == "layer" else None
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain values; the first nine keys are a stable interface."""
        first = self.passes[0] if self.passes else None
        cells = [cell["is_equal"] for one in self.passes for cell in one.matrix]
        return {
            "ok": not self.failures,
            "max_abs_logit_diff": first.max_abs_logit_diff if first else None,
            "first_differing_layer": self.first_differing_layer,
            "greedy_agreement": first.greedy_agreement if first else None,
            "batch_invariant": all(equal is not False for equal in cells) if cells else None,
            "negative_control_caught": (
                all(one.negative_control_caught for one in self.passes) if self.passes else None
            ),
            "unconsumed": list(self.unconsumed),
            "unfilled": list(self.unfilled),
            "known_unused": list(self.known_unused),
            **{
                key: value
                for key, value in asdict(self).items()
                if key not in ("unconsumed", "unfilled", "known_unused")
            },
            "failures": list(self.failures),
        }


def verify(
    located: Located,
    wishes: EngineConfig,
    *,
    reference: Located | None = None,
    prompts: Path | None = None,
    num_tokens: int | None = None,
    show: Say = lambda phase: None,
) -> Verification:
    """Compare a checkpoint as we run it with the same one, or another, as transformers runs it.

    `wishes` says the dtype, the formats of weights and KV, the threads and the backend. Without a dtype the
    checkpoint's own is verified, since that is what is served, and before it float32, which shows the
    smallest mistakes, where memory holds it. A checkpoint beyond HEAVY_BYTES gets shorter built-in prompts
    and fewer greedy tokens, which a note says. With a lossy format the model is another function on
    purpose: its distance from transformers is stated and not judged.

    Raises: ConfigError for what was asked; MoesaicError, with the engine's reason, when the model cannot run.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {num_tokens}")
    folder = located.weights_folder()
    other = folder if reference is None else reference.weights_folder()
    spec = read_config(located.config, name=str(folder / "config.json"))
    machine = read_machine()
    threads = wishes.threads(machine)
    has_format = (wishes.format, wishes.kv_format, wishes.dispatch_format) != (None, None, None)
    dtypes, notes = _dtypes(spec, wishes.dtype or (spec.dtype if has_format else None), machine)
    effects = wishes.numerics(dtype=dtypes[-1], backend="reference").effects()
    lossy = [name for name, effect in effects if effect is Effect.LOSSY]
    notes = [*notes, *(LOSSY_NOTE.format(one) for one in lossy)]
    is_heavy = count_params(spec).num_total * max(DTYPE_BYTES[one] for one in dtypes) > HEAVY_BYTES
    chosen = num_tokens or (HEAVY_TOKENS if is_heavy else NUM_TOKENS)
    ids, more = choose_prompts(folder, spec, prompts, chosen, is_heavy=is_heavy)
    if is_heavy and num_tokens is None:
        more = [*more, f"{HEAVY_TOKENS} greedy tokens rather than {NUM_TOKENS}: --tokens asks for more"]
    long_lengths = long_factor_lengths(spec)
    missing = _oracle_missing()
    passes, tensors, version = [], dict[str, Any](), None
    for one in dtypes:
        with TemporaryDirectory(prefix="moesaic-verify-") as temporary:
            job = Job(
                model=str(folder),
                dtype=one,
                num_threads=threads,
                prompts=ids,
                num_tokens=chosen,
                folder=temporary,
                backend=wishes.backend,
                format=wishes.format,
                kv_format=wishes.kv_format,
                wire_format=wishes.dispatch_format,
                matmul_shards=wishes.matmul_shards,
                is_long=bool(long_lengths),
                family=spec.family,
            )
            engine = _run_engine(job, show)
            tensors = tensors or {
                key: engine.get(key, []) for key in ("unconsumed", "unfilled", "known_unused")
            }
            if "dtype" not in engine:
                break  # tensors that do not fit: nothing was loaded
            oracle: dict[str, Any] = {}
            if missing is None:
                oracle, missing = _run_oracle(job, str(other), show)
                version = oracle.get("version", version)
            passes.append(_compare(job, engine, oracle, is_lossy=bool(lossy)))
    return Verification(
        model=located.name,
        reference=None if reference is None else str(other),
        model_type=spec.model_type,
        num_prompts=len(ids),
        num_prompt_tokens=sum(len(prompt) for prompt in ids),
        num_tokens=chosen,
        oracle=version,
        oracle_missing=missing,
        passes=tuple(passes),
        unconsumed=tuple(tensors["unconsumed"]),
        unfilled=tuple(tensors["unfilled"]),
        known_unused=tuple(tensors["known_unused"]),
        notes=(*more, *notes, *(LONG_NOTE.format(length) for length in long_lengths)),
    )


def _run_engine(job: Job, show: Say) -> dict[str, Any]:
    result = _run_timed("moesaic.audit.probe", "engine", job, show)
    if "error" in result:
        raise MoesaicError(result["error"])
    return result


def _run_timed(module: str, name: str, job: Job, show: Say) -> dict[str, Any]:
    began_s = time.monotonic()
    result = run_child(module, name, job, show)
    return result | {"seconds": round(time.monotonic() - began_s, 1)}


def _oracle_missing() -> str | None:
    if find_spec("transformers") is None:
        return f"transformers is not installed, so nothing was compared with it: {INSTALL}"
    return None


def _run_oracle(job: Job, reference: str, show: Say) -> tuple[dict[str, Any], str | None]:
    """(what it found, None), or ({}, why there is nothing to compare with): transformers lacks the model.

    Raises: MoesaicError when it failed on a model that it has: a comparison that broke is not one that could
            not be made.
    """
    told = replace(job, model=reference)
    try:
        result = _run_timed("moesaic.audit.oracle", "oracle", told, show)
    except ChildKilled:
        raise
    except ChildFailed as error:
        raise MoesaicError(
            f"transformers could not run {reference}, so nothing was compared: {error}"
        ) from error
    if "error" not in result:
        return result, None
    if result["is_unsupported"] and reference == job.model:
        return {}, f"nothing was compared with transformers: {result['error']}"
    raise MoesaicError(f"transformers could not run {reference}, so nothing was compared: {result['error']}")


def _dtypes(spec: ModelSpec, dtype: DType | None, machine: Machine) -> tuple[list[DType], list[str]]:
    """The dtypes to verify in, the one that proves most first, and why one is left out."""
    if dtype is not None:
        return [dtype], []
    if spec.dtype == "float32":
        return ["float32"], []
    need = int(MEMORY_FACTOR * DTYPE_BYTES["float32"] * count_params(spec).num_total)
    if need > machine.available_bytes:
        return [spec.dtype], [
            f"not verified in float32: that takes about {need / 1e9:.1f} GB of memory and "
            f"{machine.available_bytes / 1e9:.1f} GB are available; {spec.dtype} is judged by its rounding"
        ]
    return ["float32", spec.dtype], []


def _compare(job: Job, engine: Mapping[str, Any], oracle: Mapping[str, Any], *, is_lossy: bool) -> Pass:
    dtype = engine["dtype"]
    failures = [
        f"batch invariance: {cell['name']} ({cell['detail']})"
        for cell in engine["matrix"]
        if cell["is_equal"] is False
    ]
    if not engine["negative_control_caught"]:
        failures.append("the matrix did not notice sums that depend on the number of rows: it proves nothing")
    sides = {name: side for name, side in (("engine", engine), ("oracle", oracle)) if side}
    diff = agreement = None
    stages: tuple[StageError, ...] = ()
    if oracle:
        stages = tuple(judge(stage, dtype) for stage in _stages(job))
        diff, greatest = _logit_diff(job)
        greedy = compare_greedy(engine["greedy"], oracle["greedy"], oracle["margins"], diff)
        agreement = greedy.agreement
        if not is_lossy:
            failures += _judge_whole(stages, dtype, diff, greatest)
            failures += [f"greedy tokens part: {text}" for text in greedy.unexplained[:3]]
    first = None if is_lossy else next((stage.name for stage in stages if stage.is_differing), None)
    return Pass(
        dtype=dtype,
        backend=engine["backend"],
        max_abs_logit_diff=diff,
        greedy_agreement=agreement,
        stages=stages,
        first_difference=first,
        matrix=tuple(engine["matrix"]),
        negative_control_caught=engine["negative_control_caught"],
        failures=tuple(failures),
        peak_rss_bytes={name: side["peak_rss_bytes"] for name, side in sides.items()},
        peak_own_bytes={name: side["peak_own_bytes"] for name, side in sides.items()},
        seconds={name: side["seconds"] for name, side in sides.items()},
    )


def _judge_whole(stages: Sequence[StageError], dtype: str, diff: float, greatest: float) -> list[str]:
    wrong = [stage for stage in stages if stage.is_differing]
    if wrong:
        first = wrong[0]
        return [
            f"{first.name} differs from transformers: {first.num_far} of {first.num_rows} rows, by up to "
            f"{first.worst:.2g} of what it computes (median {first.median:.2g}), {RULES[dtype]}"
            + ("" if len(wrong) == 1 else f"; {len(wrong) - 1} later ones differ by themselves as well")
        ]
    bound = TOLERANCES[dtype].logits
    num_ties = sum(stage.num_far for stage in stages)
    if bound is not None and not num_ties and not diff <= bound * max(1.0, greatest):
        return [f"logits differ by {diff:.3g} of {greatest:.3g} though every layer by itself agrees"]
    return []


def _stages(job: Job) -> Iterator[Stage]:
    """Every place of comparison in the order of the computation, the rows of all prompts together."""
    count = len(job.prompts)
    hidden = [np.load(job.path(f"engine.{i}.hidden.npy")) for i in range(count)]
    theirs = [np.load(job.path(f"oracle.{i}.layers.npy")) for i in range(count)]
    has_truth = job.path("truth.0.layers.npy").exists()
    truth = [np.load(job.path(f"truth.{i}.layers.npy")) for i in range(count)] if has_truth else theirs

    def at(arrays: Sequence[Array], i: int) -> Array:
        rows: Array = np.concatenate([array[i] for array in arrays])
        return rows

    for i in range(len(hidden[0])):
        yield Stage(
            name=f"layer {i - 1}" if i else "embedding",
            before=at(hidden, i - 1) if i else None,
            ours=at(hidden, i),
            theirs=at(theirs, i),
            truth=at(truth, i),
        )
    heads = {
        side: np.concatenate([np.load(job.path(f"{side}.{i}.{kind}.npy")) for i in range(count)])
        for side, kind in (
            ("engine", "logits"),
            ("oracle", "head"),
            ("truth" if has_truth else "oracle", "head"),
        )
    }
    yield Stage(
        name="head",
        before=None,
        ours=heads["engine"],
        theirs=heads["oracle"],
        truth=heads.get("truth", heads["oracle"]),
    )


def _logit_diff(job: Job) -> tuple[float, float]:
    """(greatest difference of logits from end to end, greatest logit)."""
    diff = greatest = 0.0
    for i in range(len(job.prompts)):
        ours, theirs = (np.load(job.path(f"{side}.{i}.logits.npy")) for side in ("engine", "oracle"))
        diff = max(diff, float(np.abs(ours - theirs).max()))
        greatest = max(greatest, float(np.abs(theirs).max()))
    return diff, greatest


def dump_json(found: Verification) -> str:
    """The verification as indented JSON text."""
    return json.dumps(found.to_json(), indent=2, allow_nan=False)
