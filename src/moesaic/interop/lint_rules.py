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
from moesaic.interop.lint_line import Finding, Line, finding
from moesaic.interop.lint_sglang import attention_groups, expert_ranks, kt_rules, sglang_rules
from moesaic.interop.lint_vllm import vllm_rules
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate, preset, preset_names
from moesaic.spec.model import ModelSpec
from moesaic.units import parse_bytes

Findings = Iterator[Finding]
OWNERS = {
    "qwen": "qwen", "deepseek-ai": "deepseek", "openai": "gpt-oss", "zai-org": "glm", "moonshotai": "kimi",
    "allenai": "olmoe", "databricks": "dbrx", "mistralai": "mixtral",
}  # fmt: skip
"""Owners of repositories on the Hub and what their models' names, which the presets have, begin with."""
SIZES = (
    "--tensor-parallel-size", "--data-parallel-size", "--prefill-context-parallel-size",
    "--decode-context-parallel-size", "--tp-size", "--dp-size", "--ep-size", "--attn-dp-size", "--tp_size",
    "--ep_size", "--cp_size",
)  # fmt: skip
_DEMO = "vLLM serves its default, a small demonstration model"
WITHOUT_MODEL = {
    ("vllm", "serve"): _DEMO, ("vllm", "api_server"): _DEMO,
    ("sglang", "launch_server"): "SGLang refuses to start", ("moesaic", "serve"): "moesaic refuses to start",
}  # fmt: skip
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


def _counts(line: Line) -> Findings:
    named = dict.fromkeys(flag.name for name in SIZES if (flag := line.inventory.find(name)) is not None)
    for name in named:
        found = line.get(name)
        if found is not None and line.number(name, 1) is not None and line.size(name) is None:
            yield finding(
                found.word,
                "error",
                "wrong-value",
                f"{name} is a number of ranks, at least 1, not {found.value}",
            )


# --- the model


def _model_id(line: Line) -> Findings:
    name = line.model
    if name is None:
        without = WITHOUT_MODEL.get((line.engine, line.command.program))
        if without is not None and line.get("--config") is None:
            yield finding("model", "error", "no-model", f"the line names no model: {without}")
        return
    if line.engine == "vllm" and line.command.program == "serve" and line.get("--model") is not None:
        yield finding(
            "--model", "warning", "deprecated-flag",
            "vllm serve takes the model as its first word; --model still works there and will be removed",
            f"vllm serve {name}",
        )  # fmt: skip
    meant = {wrong.lower(): right for wrong, right in MODEL_IDS.items()}.get(name.lower())
    if meant is not None:
        yield finding(name, "error", "unknown-model", f"there is no repository {name}", meant)


def model_of(line: Line, name: str | None) -> ModelSpec | None:
    """The model's facts, where it is a preset, its repository or a folder; None where it is not known."""
    if name is not None:
        located = locate(name)
        return read_config(located.config, name=located.name)
    typed = line.model
    if typed is None:
        return None
    if (published := _published(typed)) is not None:
        return published
    known = typed.lower() in preset_names()
    if not known and not (Path(typed).is_dir() and (Path(typed) / "config.json").is_file()):
        return None
    try:
        located = locate(typed)
        return read_config(located.config, name=located.name)
    except ConfigError:
        return None  # a folder that no engine could serve either: that is not this line's fault


def _published(typed: str) -> ModelSpec | None:
    """A preset by the repository that its maker publishes it in; Qwen's -FP8 ones share a scale in blocks."""
    owner, _, name = typed.lower().partition("/")
    is_narrow = owner == "qwen" and name.endswith("-fp8")
    name = name.removesuffix("-fp8") if is_narrow else name
    if OWNERS.get(owner) is None or not name.startswith(OWNERS[owner]) or name not in preset_names():
        return None
    config = dict(preset(name).config)
    if is_narrow:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return read_config(config, name=name)


def _sizes(line: Line, spec: ModelSpec) -> Findings:
    layout = _layout(line)
    if layout is not None:
        tp, ep, expert_tp, redundant, kvp = layout
        flags = {"heads-divide": "--tensor-parallel-size", "blocks-divide": "--tensor-parallel-size"}
        for one in problems(spec, tp=tp, ep=ep, expert_tp=expert_tp, num_redundant=redundant, kvp=kvp):
            if one.rule != "context-parallel-divides":
                typed = _typed(line, flags.get(one.rule, "--enable-expert-parallel"), one.rule)
                yield finding(typed, "error", one.rule, one.message, one.suggestion)
    flag = CONTEXT.get(line.engine)
    length = line.number(flag, 0) if flag else None
    stretched = ("--hf-overrides", "--rope-scaling", "--json-model-override-args")
    allowed = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    is_free = any(line.get(name) for name in stretched) or any(name in line.command.env for name in allowed)
    if flag and length and length > spec.max_position and not is_free:
        yield finding(
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
        yield finding(
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
        tp, ep, groups = line.size("--tp-size"), expert_ranks(line), attention_groups(line)
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


# --- TensorRT-LLM, llama.cpp, nccl-tests


def _trtllm(line: Line) -> Findings:
    tp, ep, cp = (line.size(name) for name in ("--tp_size", "--ep_size", "--cp_size"))
    ranks = None if tp is None or cp is None else tp * cp
    if ranks and ep and (ep > ranks or ranks % ep):
        yield finding(
            "--ep_size", "error", "experts-over-ranks",
            f"expert parallel {ep} must divide the {ranks} ranks of a stage, tensor x context parallel",
            f"--tp_size {ep}" if ep > ranks else f"--ep_size {ranks}",
        )  # fmt: skip
    env = line.command.env
    if "EXPERT_STATISTIC_ITER_RANGE" in env and "EXPERT_STATISTIC_PATH" not in env:
        yield finding(
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
        yield finding(
            "load_balancer", "error", "balancer-ignored",
            "the load balancer is ignored without a word unless experts are apart and attention is data "
            f"parallel; missing: {' and '.join(missing)}",
            "; ".join(missing),
        )  # fmt: skip


def _llamacpp(line: Line) -> Findings:
    yield from _llamacpp_devices(line)
    for option in line.settings:
        if option.flag.name != "--override-tensor" or option.value is None:
            continue
        for part in option.value.split(","):
            pattern, sign, buffer = part.rpartition("=")
            try:
                re.compile(pattern)
            except re.error as error:
                yield finding(
                    option.word, "error", "wrong-value", f"{pattern!r} is no regular expression: {error}"
                )
            if not sign or not buffer:
                yield finding(
                    option.word, "error", "wrong-value", f"{part!r} must be a pattern, =, and a buffer",
                    f"{option.word} '\\.ffn_(up|down|gate)_exps=CPU'",
                )  # fmt: skip
    if line.is_on("--cpu-moe") and line.get("--n-cpu-moe") is not None:
        yield finding(
            "--n-cpu-moe", "warning", "no-effect",
            "--cpu-moe already keeps every layer's experts in host memory",
            "one of the two",
        )  # fmt: skip
    if line.number("--gpu-layers", -1) == 0 and (line.is_on("--cpu-moe") or line.get("--n-cpu-moe")):
        yield finding(
            "--gpu-layers", "warning", "no-effect",
            "with no layer on a GPU everything is in host memory, experts too", "--gpu-layers 99",
        )  # fmt: skip


def _llamacpp_devices(line: Line) -> Findings:
    """Source: llama.cpp, src/llama-context.cpp (micro-batch, values) and src/llama.cpp (devices)."""
    for name in ("--split-mode", "--tensor-split", "--main-gpu"):
        found = line.get(name)
        if found is not None and found.value != "none" and line.number("--gpu-layers", -1) == 0:
            yield finding(
                found.word, "warning", "no-effect",
                f"{name} says how layers are spread over GPUs, and --gpu-layers 0 leaves none there",
                "--gpu-layers 99, or leave it out",
            )  # fmt: skip
    split = line.get("--tensor-split")
    if split is not None and line.text("--split-mode") == "none":
        yield finding(
            split.word, "warning", "no-effect", "--tensor-split has no effect with --split-mode none",
            "--split-mode layer, or leave it out",
        )  # fmt: skip
    batch, micro = line.number("--batch-size", 2048), line.number("--ubatch-size", 512)
    if batch and micro and micro > batch > 0:
        yield finding(
            "--ubatch-size", "warning", "no-effect",
            f"a micro-batch of {micro} tokens is cut to the batch, {batch}"
            + ("" if line.get("--batch-size") else " by default"),
            f"--batch-size {micro} --ubatch-size {micro}",
        )  # fmt: skip
    values = line.get("--cache-type-v")
    is_whole = values is None or values.value in ("f32", "f16", "bf16")
    if values is not None and not is_whole and line.text("--flash-attn") in ("off", "0", "false", "disabled"):
        yield finding(
            values.word, "error", "needs-flash-attention",
            f"values of {values.value} are refused with --flash-attn off", "--flash-attn on",
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
        yield finding(
            "-b", "error", "sizes-go-down", f"sizes go from -b {smallest} to -e {largest}, which is smaller",
            f"-b {largest} -e {smallest}",
        )  # fmt: skip


RULES: Mapping[str, Callable[[Line], Findings]] = {
    "vllm": vllm_rules, "sglang": sglang_rules, "kt": kt_rules, "trtllm": _trtllm, "llamacpp": _llamacpp,
    "nccltests": _nccltests,
}  # fmt: skip
