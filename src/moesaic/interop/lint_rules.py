"""Rules about flags in company: what is refused at start, what has no effect, and what the model forbids.

Every rule states what the released engine does; none is advice about speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moesaic.errors import ConfigError
from moesaic.interop.divisibility import problems
from moesaic.interop.lint_known import MODEL_IDS
from moesaic.interop.lint_line import Finding, Line, Severity
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate, preset_names
from moesaic.spec.model import ModelSpec
from moesaic.units import parse_bytes

Findings = Iterator[Finding]
SIZES = (
    "--tensor-parallel-size", "--data-parallel-size", "--prefill-context-parallel-size",
    "--decode-context-parallel-size", "--tp-size", "--dp-size", "--ep-size", "--attn-dp-size", "--tp_size",
    "--ep_size", "--cp_size",
)  # fmt: skip
CONTEXT = {"vllm": "--max-model-len", "sglang": "--context-length", "kt": "--context-length"}


def check_line(line: Line, model: str | None, text: str) -> Findings:
    """Findings of the rules of the line's engine. `text` is all that was given: options files come in it.

    Raises: ConfigError when `model` was given and cannot be found.
    """
    yield from _model_id(line)
    yield from _counts(line)
    rules = RULES.get(line.engine)
    if rules is not None:
        yield from rules(line)
    if line.engine == "trtllm":
        yield from _trtllm_text(line, text)
    spec = model_of(line, model)
    if spec is not None:
        yield from _sizes(line, spec)


def _find(flag: str, severity: Severity, rule: str, message: str, suggestion: str | None = None) -> Finding:
    return Finding(flag=flag, severity=severity, rule=rule, message=message, suggestion=suggestion)


def _counts(line: Line) -> Findings:
    named = dict.fromkeys(flag.name for name in SIZES if (flag := line.inventory.find(name)) is not None)
    for name in named:
        found = line.get(name)
        if found is not None and line.number(name, 1) is not None and line.size(name) is None:
            yield _find(
                found.word,
                "error",
                "wrong-value",
                f"{name} is a number of ranks, at least 1, not {found.value}",
            )


# --- the model


def _model_id(line: Line) -> Findings:
    name = line.model
    if name is None:
        if line.engine in ("vllm", "sglang") and line.get("--config") is None:
            default = (
                "vLLM serves its default, a small demonstration model"
                if line.engine == "vllm"
                else "SGLang refuses to start"
            )
            yield _find("model", "error", "no-model", f"the line names no model: {default}")
        return
    if line.engine == "vllm" and line.command.program == "serve" and line.get("--model") is not None:
        yield _find(
            "--model", "warning", "deprecated-flag",
            "vllm serve takes the model as its first word; --model still works there and will be removed",
            f"vllm serve {name}",
        )  # fmt: skip
    meant = {wrong.lower(): right for wrong, right in MODEL_IDS.items()}.get(name.lower())
    if meant is not None:
        yield _find(name, "error", "unknown-model", f"there is no repository {name}", meant)


def model_of(line: Line, name: str | None) -> ModelSpec | None:
    """The model's facts, where it is a preset or a folder; None where it is not known."""
    if name is not None:
        located = locate(name)
        return read_config(located.config, name=located.name)
    typed = line.model
    if typed is None:
        return None
    known = typed.lower() in preset_names()
    if not known and not (Path(typed).is_dir() and (Path(typed) / "config.json").is_file()):
        return None
    try:
        located = locate(typed)
        return read_config(located.config, name=located.name)
    except ConfigError:
        return None  # a folder that no engine could serve either: that is not this line's fault


def _sizes(line: Line, spec: ModelSpec) -> Findings:
    layout = _layout(line)
    if layout is not None:
        tp, ep, expert_tp, redundant, kvp = layout
        flags = {"heads-divide": "--tensor-parallel-size", "blocks-divide": "--tensor-parallel-size"}
        for one in problems(spec, tp=tp, ep=ep, expert_tp=expert_tp, num_redundant=redundant, kvp=kvp):
            if one.rule != "context-parallel-divides":
                typed = _typed(line, flags.get(one.rule, "--enable-expert-parallel"), one.rule)
                yield _find(typed, "error", one.rule, one.message, one.suggestion)
    flag = CONTEXT.get(line.engine)
    length = line.number(flag, 0) if flag else None
    stretched = ("--hf-overrides", "--rope-scaling", "--json-model-override-args")
    allowed = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    is_free = any(line.get(name) for name in stretched) or any(name in line.command.env for name in allowed)
    if flag and length and length > spec.max_position and not is_free:
        yield _find(
            flag, "error", "context-too-long",
            f"{length} positions are more than the model's {spec.max_position}: refused at start",
            f"{flag} {spec.max_position}, or scale the rotary embedding",
        )  # fmt: skip
    yield from _quantization(line, spec)


def _quantization(line: Line, spec: ModelSpec) -> Findings:
    method = line.text("--quantization") if line.engine in ("vllm", "sglang", "kt") else None
    if method is None:
        return
    needs = {"awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4", "mxfp4": "mxfp4"}
    wanted, stored = needs.get(method), spec.weight_format
    if wanted is not None and stored != wanted:
        yield _find(
            "--quantization", "error", "format-of-checkpoint",
            f"{method} is a format that a checkpoint is stored in, and this one stores {stored}",
            "leave it out, or name a checkpoint that was made with it",
        )  # fmt: skip


def _typed(line: Line, vllm_flag: str, rule: str) -> str:
    """What the line calls the number that does not divide."""
    names = {
        "heads-divide": ("--tensor-parallel-size", "--tp-size", "--tp_size"),
        "blocks-divide": ("--tensor-parallel-size", "--tp-size", "--tp_size"),
    }.get(rule, ("--eplb-config", "--enable-expert-parallel", "--ep-num-redundant-experts", "--ep-size"))
    for name in names:
        found = line.get(name)
        if found is not None:
            return found.word
    return vllm_flag


def _layout(line: Line) -> tuple[int, int, int, int | None, int] | None:
    """(heads are over, experts are over, experts are sliced by, redundant or None, KV is over)."""
    if line.engine == "vllm":
        tp, dp = line.size("--tensor-parallel-size"), line.size("--data-parallel-size")
        if tp is None or dp is None:
            return None
        is_ep = line.is_on("--enable-expert-parallel")
        redundant = line.json("--eplb-config").get("num_redundant_experts", 0)
        is_count = isinstance(redundant, int) and redundant >= 0
        copies = redundant if line.is_on("--enable-eplb") and is_count else None
        return tp, tp * dp if is_ep else 1, 1 if is_ep else tp * dp, copies, 1
    if line.engine in ("sglang", "kt"):
        tp, ep, groups = line.size("--tp-size"), _sglang_ep(line), _attention_groups(line)
        redundant = line.number("--ep-num-redundant-experts", 0)
        if tp is None or ep is None or groups is None or tp % groups or tp % ep:
            return None
        return tp // groups, ep, tp // ep, redundant, 1
    if line.engine == "trtllm":
        tp, ep, cp = (line.size(name) for name in ("--tp_size", "--ep_size", "--cp_size"))
        if tp is None or ep is None or cp is None or (tp * cp) % ep:
            return None
        return tp, ep, tp * cp // ep, None, 1
    return None


# --- vLLM


def _vllm(line: Line) -> Findings:
    tp, dp = line.size("--tensor-parallel-size"), line.size("--data-parallel-size")
    pcp = line.size("--prefill-context-parallel-size")
    ranks = None if tp is None or dp is None or pcp is None else tp * dp * pcp
    is_ep, is_eplb = line.is_on("--enable-expert-parallel"), line.is_on("--enable-eplb")
    if is_eplb and not is_ep:
        yield _find(
            "--enable-eplb", "error", "balancer-needs-experts-apart",
            "--enable-eplb is refused without --enable-expert-parallel",
            "--enable-expert-parallel --enable-eplb",
        )  # fmt: skip
    if is_ep and ranks == 1:
        yield _find(
            "--enable-expert-parallel", "error" if is_eplb else "warning", "no-effect",
            "expert parallel is over tensor x data parallel ranks, and the line has one",
            "--tensor-parallel-size N or --data-parallel-size N",
        )  # fmt: skip
    yield from _vllm_eplb(line, is_eplb)
    dcp = line.size("--decode-context-parallel-size")
    if tp and dcp and pcp == 1 and tp % dcp:
        yield _find(
            "--decode-context-parallel-size", "error", "context-parallel-divides",
            f"tensor parallel {tp} / decode context parallel {dcp} = {tp / dcp:.2f}, and must be whole",
            f"--decode-context-parallel-size {max(d for d in range(1, min(tp, dcp) + 1) if tp % d == 0)}",
        )  # fmt: skip
    backend = line.text("--all2all-backend")
    if backend is not None and (not is_ep or dp == 1):
        yield _find(
            "--all2all-backend", "warning", "no-effect",
            "rows are exchanged between data parallel ranks with --enable-expert-parallel only; here "
            f"{'data parallel is 1' if is_ep else 'expert parallel is off'}",
            "--data-parallel-size N --enable-expert-parallel",
        )  # fmt: skip
    carried = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
    if line.is_on("--enable-dbo") and (backend or "allgather_reducescatter") not in carried:
        yield _find(
            "--enable-dbo", "error", "overlap-needs-transport",
            "--enable-dbo is refused with the transport "
            f"{backend or 'allgather_reducescatter (the default)'}",
            f"--all2all-backend {' or '.join(carried)}",
        )  # fmt: skip
    local = line.number("--data-parallel-size-local", 0)
    if local and dp and local > dp:
        yield _find(
            "--data-parallel-size-local", "error", "more-local-than-all",
            f"{local} replicas on this node are more than the {dp} of all nodes",
            f"--data-parallel-size {local} or more",
        )  # fmt: skip


def _vllm_eplb(line: Line, is_eplb: bool) -> Findings:
    config = line.json("--eplb-config")
    redundant = config.get("num_redundant_experts", 0)
    if config and not is_eplb:
        is_refused = redundant not in (0, None)
        yield _find(
            "--eplb-config", "error" if is_refused else "warning",
            "balancer-is-off" if is_refused else "no-effect",
            f"--eplb-config without --enable-eplb {'is refused' if is_refused else 'has no effect'}",
            "--enable-eplb",
        )  # fmt: skip
    for key in ("window_size", "step_interval", "log_balancedness_interval"):
        if isinstance(config.get(key), int | float) and config[key] <= 0:
            yield _find(
                f"--eplb-config.{key}", "error", "wrong-value", f"{key} must be above 0, got {config[key]}"
            )
    if isinstance(redundant, int) and redundant < 0:
        yield _find(
            "--eplb-config.num_redundant_experts",
            "error",
            "wrong-value",
            "redundant experts cannot be negative",
        )
    if config.get("use_async", True) and config.get("communicator") in ("torch_nccl", "pynccl"):
        yield _find(
            "--eplb-config.communicator", "error", "communicator-blocks",
            f"the communicator {config['communicator']} cannot move experts while steps run",
            "--eplb-config.use_async false, or the communicators torch_gloo and nixl",
        )  # fmt: skip


# --- SGLang and its fork


def _attention_groups(line: Line) -> int | None:
    """Data parallel groups of attention inside the tensor parallel group."""
    if line.get("--attn-dp-size") is not None:
        return line.size("--attn-dp-size")
    return line.size("--dp-size") if line.is_on("--enable-dp-attention") else 1


def _sglang_ep(line: Line) -> int | None:
    """Expert parallel as it is in force: a transport between ranks makes it as wide as tensor parallel."""
    if line.text("--moe-a2a-backend") not in (None, "none") or line.is_on("--enable-deepep-moe"):
        return line.size("--tp-size")
    return line.size("--ep-size")


def _sglang(line: Line) -> Findings:
    tp, ep, dp = line.size("--tp-size"), _sglang_ep(line), line.size("--dp-size")
    if line.is_on("--enable-eplb") and ep == 1:
        yield _find(
            "--enable-eplb", "error", "balancer-needs-experts-apart",
            "--enable-eplb is refused while the expert parallel size is 1", "--ep-size N",
        )  # fmt: skip
    if tp and ep and (ep > tp or tp % ep):
        yield _find(
            "--ep-size", "error", "experts-over-ranks",
            f"expert parallel {ep} must divide tensor parallel {tp}: tp-size counts all ranks of a stage",
            f"--tp-size {ep}" if ep > tp else f"--ep-size {tp}",
        )  # fmt: skip
    yield from _sglang_attention(line, tp, dp)
    yield from _sglang_dispatch(line)
    yield from _sglang_recorder(line)
    yield from _sglang_buffer(line)


def _sglang_attention(line: Line, tp: int | None, dp: int | None) -> Findings:
    groups = _attention_groups(line)
    if tp and groups and tp % groups:
        yield _find(
            "--attn-dp-size" if line.get("--attn-dp-size") else "--dp-size", "error", "groups-divide",
            f"tensor parallel {tp} / {groups} attention groups = {tp / groups:.2f}, and must be whole: the "
            "groups lie inside the tensor parallel ranks",
            f"--tp-size {groups * max(tp // groups, 1)}",
        )  # fmt: skip
    if line.is_on("--enable-dp-attention") and dp == 1:
        yield _find(
            "--enable-dp-attention", "warning", "no-effect",
            "--enable-dp-attention with one group has no effect",
            "--dp-size N",
        )  # fmt: skip
    if line.get("--attn-dp-size") and dp and dp > 1 and (groups or 1) > 1:
        yield _find(
            "--dp-size", "error", "two-kinds-of-replicas",
            "--dp-size and --attn-dp-size above 1 are refused together: one counts whole replicas, the other "
            "groups of attention inside one",
            "one of them",
        )  # fmt: skip


def _sglang_dispatch(line: Line) -> Findings:
    a2a = line.text("--moe-a2a-backend") or "none"
    rule = line.text("--ep-dispatch-algorithm")
    if line.inventory.find("--moe-a2a-backend") and a2a == "none" and rule in ("static", "lp"):
        yield _find(
            "--ep-dispatch-algorithm", "error", "copies-differ-by-rank",
            f"--ep-dispatch-algorithm {rule} is refused without a transport: ranks would pick other "
            "copies of "
            "an expert for one token",
            "--ep-dispatch-algorithm dynamic, or --moe-a2a-backend deepep",
        )  # fmt: skip
    if line.get("--deepep-mode") is not None and a2a == "none" and line.inventory.find("--moe-a2a-backend"):
        yield _find(
            "--deepep-mode", "warning", "no-effect", "--deepep-mode without a transport has no effect",
            "--moe-a2a-backend deepep",
        )  # fmt: skip


def _sglang_recorder(line: Line) -> Findings:
    mode = line.text("--expert-distribution-recorder-mode")
    if mode is None and line.is_on("--enable-eplb"):
        mode = "stat"
    is_deepep = line.text("--moe-a2a-backend") == "deepep"
    deepep = line.text("--deepep-mode") or "auto"
    is_single_phase = line.text("--disaggregation-mode") in ("prefill", "decode")
    why = "--enable-eplb records the load, and the" if line.is_on("--enable-eplb") else "the"
    if mode in ("stat", "per_pass") and is_deepep and deepep == "auto" and not is_single_phase:
        yield _find(
            "--deepep-mode", "error", "recorder-needs-one-mode",
            f"{why} recorder has no counts for --deepep-mode auto: the first step fails",
            "--deepep-mode normal or --deepep-mode low_latency",
        )  # fmt: skip
    if mode == "stat_approx" and not (is_deepep and deepep == "normal"):
        yield _find(
            "--expert-distribution-recorder-mode", "error", "recorder-needs-one-mode",
            "stat_approx counts with DeepEP's normal mode only",
            "--moe-a2a-backend deepep --deepep-mode normal, or the mode stat",
        )  # fmt: skip
    if mode == "per_token" and line.is_on("--enable-two-batch-overlap"):
        yield _find(
            "--expert-distribution-recorder-mode", "error", "recorder-and-overlap",
            "per_token cannot be recorded with --enable-two-batch-overlap", "one of the two",
        )  # fmt: skip
    if line.is_on("--enable-eplb"):
        interval = line.number("--eplb-rebalance-num-iterations", 1000)
        buffered = line.number("--expert-distribution-recorder-buffer-size", 0)
        if interval and buffered and buffered > interval:
            yield _find(
                "--expert-distribution-recorder-buffer-size", "error", "buffer-over-interval",
                f"a buffer of {buffered} steps is longer than the {interval} steps between rebalances",
                f"--expert-distribution-recorder-buffer-size {interval}",
            )  # fmt: skip


def _sglang_buffer(line: Line) -> Findings:
    """DeepEP's low-latency buffer holds so many tokens a rank; one more ends the server mid-serving."""
    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    if line.text("--moe-a2a-backend") != "deepep" or line.text("--deepep-mode") == "normal":
        return
    if line.text("--disaggregation-mode") == "prefill":
        return
    held = line.command.env.get(name, "128")
    running, groups = line.number("--max-running-requests", 0), _attention_groups(line)
    if not held.isdigit() or not running or running < 0 or not groups:
        return
    each = -(-running // groups)
    if each > int(held):
        yield _find(
            "--max-running-requests", "error", "dispatch-buffer",
            f"{running} requests / {groups} attention groups = {each} tokens a rank in a decode step, and "
            f"DeepEP's buffer holds {held}: the server dies when it is exceeded",
            f"{name}={each}, or --max-running-requests {int(held) * groups}",
        )  # fmt: skip


def _kt(line: Line) -> Findings:
    yield from _sglang(line)
    deferred = line.number("--kt-max-deferred-experts-per-token", 0)
    if deferred and deferred > 4:
        yield _find(
            "--kt-max-deferred-experts-per-token", "warning", "deferred-too-many",
            f"{deferred} deferred experts change answers: from 5 on accuracy is lost", "1 to 4",
        )  # fmt: skip
    is_set = [line.get(n) for n in ("--kt-num-gpu-experts", "--kt-gpu-experts-ratio")]
    if all(is_set):
        yield _find(
            "--kt-gpu-experts-ratio", "error", "said-twice",
            "--kt-num-gpu-experts and --kt-gpu-experts-ratio say the same thing", "one of the two",
        )  # fmt: skip
    if (
        line.text("--kt-expert-placement-strategy") == "frequency"
        and line.get("--init-expert-location") is None
    ):
        yield _find(
            "--kt-expert-placement-strategy", "error", "placement-needs-counts",
            "the strategy frequency reads recorded counts, and none are given",
            "--init-expert-location stats.pt",
        )  # fmt: skip


# --- TensorRT-LLM, llama.cpp, nccl-tests


def _trtllm(line: Line) -> Findings:
    tp, ep, cp = (line.size(name) for name in ("--tp_size", "--ep_size", "--cp_size"))
    ranks = None if tp is None or cp is None else tp * cp
    if ranks and ep and (ep > ranks or ranks % ep):
        yield _find(
            "--ep_size", "error", "experts-over-ranks",
            f"expert parallel {ep} must divide the {ranks} ranks of a stage, tensor x context parallel",
            f"--tp_size {ep}" if ep > ranks else f"--ep_size {ranks}",
        )  # fmt: skip
    env = line.command.env
    if "EXPERT_STATISTIC_ITER_RANGE" in env and "EXPERT_STATISTIC_PATH" not in env:
        yield _find(
            "EXPERT_STATISTIC_ITER_RANGE", "warning", "no-effect",
            "without EXPERT_STATISTIC_PATH no statistics are written", "EXPERT_STATISTIC_PATH=FOLDER",
        )  # fmt: skip


def _trtllm_text(line: Line, text: str) -> Findings:
    if not re.search(r"^\s*load_balancer\s*:", text, re.MULTILINE):
        return
    missing = []
    if (line.size("--ep_size") or 2) <= 1:
        missing.append("--ep_size above 1")
    if not re.search(r"^\s*enable_attention_dp\s*:\s*[Tt]rue", text, re.MULTILINE):
        missing.append("enable_attention_dp: true")
    if missing:
        yield _find(
            "load_balancer", "error", "balancer-ignored",
            "the load balancer is ignored without a word unless experts are apart and attention is data "
            f"parallel; missing: {' and '.join(missing)}",
            "; ".join(missing),
        )  # fmt: skip


def _llamacpp(line: Line) -> Findings:
    for option in line.settings:
        if option.flag.name != "--override-tensor" or option.value is None:
            continue
        for part in option.value.split(","):
            pattern, sign, buffer = part.rpartition("=")
            try:
                re.compile(pattern)
            except re.error as error:
                yield _find(
                    option.word, "error", "wrong-value", f"{pattern!r} is no regular expression: {error}"
                )
            if not sign or not buffer:
                yield _find(
                    option.word, "error", "wrong-value", f"{part!r} must be a pattern, =, and a buffer",
                    f"{option.word} '\\.ffn_(up|down|gate)_exps=CPU'",
                )  # fmt: skip
    if line.is_on("--cpu-moe") and line.get("--n-cpu-moe") is not None:
        yield _find(
            "--n-cpu-moe", "warning", "no-effect",
            "--cpu-moe already keeps every layer's experts in host memory",
            "one of the two",
        )  # fmt: skip
    if line.number("--gpu-layers", -1) == 0 and (line.is_on("--cpu-moe") or line.get("--n-cpu-moe")):
        yield _find(
            "--gpu-layers", "warning", "no-effect",
            "with no layer on a GPU everything is in host memory, experts too", "--gpu-layers 99",
        )  # fmt: skip


def _nccltests(line: Line) -> Findings:
    smallest, largest = line.text("--minbytes"), line.text("--maxbytes")
    if smallest is None or largest is None:
        return
    try:
        wrong = parse_bytes(smallest) > parse_bytes(largest)
    except ConfigError:
        return
    if wrong:
        yield _find(
            "-b", "error", "sizes-go-down", f"sizes go from -b {smallest} to -e {largest}, which is smaller",
            f"-b {largest} -e {smallest}",
        )  # fmt: skip


RULES: Mapping[str, Callable[[Line], Findings]] = {
    "vllm": _vllm, "sglang": _sglang, "kt": _kt, "trtllm": _trtllm, "llamacpp": _llamacpp,
    "nccltests": _nccltests,
}  # fmt: skip
