"""Tables of known mistakes: flags that never existed or are gone, values and variables without effect.

Each entry was checked against the released packages that `flags/` was read from; what never was in one is
from public threads. What one of them had and dropped is in lint_gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Known = tuple[str, str, str | None]  # rule, message, what to write instead


@dataclass(frozen=True, kw_only=True, slots=True)
class Concept:
    """One thing that engines call differently."""

    by_engine: Mapping[str, str]
    also: tuple[str, ...] = ()  # further spellings that people type

    @property
    def spellings(self) -> frozenset[str]:
        """Every name of it."""
        names = {text.split()[0] for text in self.by_engine.values()} | set(self.also)
        return frozenset(name.replace("_", "-") for name in names)


def _same(vllm: str = "", sglang: str = "", trtllm: str = "", llamacpp: str = "", *also: str) -> Concept:
    names = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "llamacpp": llamacpp}
    return Concept(by_engine={k: v for k, v in names.items() if v}, also=also)


CONCEPTS: tuple[Concept, ...] = (
    _same(
        "--tensor-parallel-size", "--tp-size", "--tp_size", "--split-mode row", "--tp",
        "--tensor_parallel_size", "--tensor-parallel",
    ),
    _same(
        "--pipeline-parallel-size", "--pp-size", "--pp_size", "--split-mode layer", "--pp",
        "--pipeline_parallel_size",
    ),
    _same("--data-parallel-size", "--dp-size", "", "", "--dp", "--attn-dp-size", "--enable-dp-attention"),
    _same(
        "--enable-expert-parallel", "--ep-size", "--ep_size", "", "--expert-parallel-size", "--ep",
        "--expert-parallel", "--expert_parallel_size", "--moe_expert_parallel_size",
    ),
    _same(
        "--max-model-len", "--context-length", "--max_seq_len", "--ctx-size", "--max-seq-len", "--n-ctx",
        "--context-size", "--max-context-length",
    ),
    _same("--max-num-seqs", "--max-running-requests", "--max_batch_size", "--parallel", "--max-batch-size"),
    _same("--max-num-batched-tokens", "--chunked-prefill-size", "--max_num_tokens", "--batch-size"),
    _same(
        "--gpu-memory-utilization", "--mem-fraction-static", "--kv_cache_free_gpu_memory_fraction", "",
        "--gpu-memory-fraction", "--free_gpu_memory_fraction", "--memory-fraction",
    ),
    _same("--kv-cache-dtype", "--kv-cache-dtype", "--kv_cache_dtype", "--cache-type-k"),
    _same("--model", "--model-path", "", "--model"),
    _same("--served-model-name", "--served-model-name", "--served_model_name", "--alias"),
    _same("--trust-remote-code", "--trust-remote-code", "--trust_remote_code"),
    _same("--all2all-backend", "--moe-a2a-backend", "", "", "--enable-deepep-moe", "--deepep-mode"),
    _same("--enable-dbo", "--enable-two-batch-overlap"),
    _same("--enable-eplb", "--enable-eplb"),
    _same(
        "--eplb-config.num_redundant_experts", "--ep-num-redundant-experts", "", "", "--num-redundant-experts"
    ),
    _same("--eplb-config.step_interval", "--eplb-rebalance-num-iterations"),
    _same("--enforce-eager", "--disable-cuda-graph"),
    _same("--no-enable-prefix-caching", "--disable-radix-cache", "", "", "--disable-prefix-caching"),
    _same("--reasoning-parser", "--reasoning-parser", "--reasoning_parser", "--reasoning-format"),
    _same("--tool-call-parser", "--tool-call-parser", "--tool_parser"),
    _same("--master-addr", "--dist-init-addr", "", "", "--nccl-init-addr"),
    _same("--kv-transfer-config", "--disaggregation-mode", "--server_role"),
    _same("--decode-context-parallel-size", "--dcp-size", "--cp_size"),
    _same("--cpu-offload-gb", "--cpu-offload-gb", "", "--n-cpu-moe"),
    _same("--speculative-config", "--speculative-algorithm", "", "--model-draft"),
    _same("--tokenizer", "--tokenizer-path", "--tokenizer"),
    _same("--seed", "--random-seed", "", "--seed"),
    _same("", "", "", "--gpu-layers", "--num-gpu-layers", "--ngl"),
    _same("", "", "", "--flash-attn", "--flash-attention"),
    _same("", "", "", "--threads", "--n-threads", "--num-threads"),
    _same("", "", "", "--predict", "--max-tokens", "--max-new-tokens"),
)  # fmt: skip
"""What to call a thing in the engine at hand, when another's name was typed."""

EXPERT_FLAGS = frozenset({
    "--enable-expert-parallel", "-ep", "--ep-size", "--ep", "--expert-parallel-size", "--moe-a2a-backend",
    "--all2all-backend", "--ep_size",
})  # fmt: skip

_EPLB_KEY = "was a flag of old releases; it is a key of --eplb-config now"
_UNMERGED = "is in proposals that were not merged; no release has it"
_FORK = "is a flag of KTransformers' fork (sglang-kt), not of SGLang itself"
_INTENDED = "was documented ahead of its release; no released parser has it"

KNOWN_FLAGS: Mapping[tuple[str, str], Known] = {
    ("vllm", "--moe-expert-replication-ratio"): (
        "invented-flag",
        "no release of any engine had a --moe-expert-replication-ratio; copies of hot experts "
        "come from the load balancer",
        "--enable-expert-parallel --enable-eplb --eplb-config '{\"num_redundant_experts\": N}'",
    ),
    ("sglang", "--moe-expert-replication-ratio"): (
        "invented-flag",
        "no release of any engine had a --moe-expert-replication-ratio; copies of hot experts "
        "come from the load balancer", "--enable-eplb --ep-num-redundant-experts N",
    ),
    ("vllm", "--expert-parallel-size"): (
        "other-engine",
        "--expert-parallel-size is SGLang's; vLLM derives the size: expert parallel = tensor x "
        "data parallel", "--enable-expert-parallel",
    ),
    ("vllm", "--ep-size"): (
        "other-engine",
        "--ep-size is SGLang's; vLLM derives the size: expert parallel = tensor x data parallel",
        "--enable-expert-parallel",
    ),
    ("vllm", "--num-redundant-experts"): (
        "renamed-flag", f"--num-redundant-experts {_EPLB_KEY}", "--eplb-config.num_redundant_experts N",
    ),
    ("vllm", "--eplb-window-size"): (
        "renamed-flag", f"--eplb-window-size {_EPLB_KEY}", "--eplb-config.window_size N",
    ),
    ("vllm", "--eplb-step-interval"): (
        "renamed-flag", f"--eplb-step-interval {_EPLB_KEY}", "--eplb-config.step_interval N",
    ),
    ("vllm", "--eplb-log-balancedness"): (
        "renamed-flag", f"--eplb-log-balancedness {_EPLB_KEY}", "--eplb-config.log_balancedness true",
    ),
    **{
        ("vllm", flag): (
            "unmerged-flag", f"{flag} {_UNMERGED}: vLLM reads no file of expert places or loads",
            "--enable-eplb, which places experts by the load it counts itself",
        )
        for flag in (
            "--expert-placement-file", "--expert-map-path", "--load-path", "--expert-load-stats-path",
        )
    },
    **{
        ("vllm", flag): (
            "unmerged-flag", f"{flag} {_UNMERGED}",
            "--cpu-offload-gb N --cpu-offload-params experts, or --offload-backend prefetch",
        )
        for flag in ("--moe-expert-cache-size", "--moe-gpu-prefetch")
    },
    ("vllm", "--afd-config"): (
        "fork-flag",
        "--afd-config is of development branches of attention/expert disaggregation; the released "
        "plugin takes its settings "
        "elsewhere", "--additional-config '{\"afd\": {...}}' with the plugin's --worker-cls",
    ),
    ("vllm", "--cpu-offload-experts"): (
        "invented-flag", "no release had a --cpu-offload-experts: how much, and of what, are two flags",
        "--cpu-offload-gb N --cpu-offload-params experts",
    ),
    **{
        ("vllm", flag): (
            "invented-flag", f"no release had a {flag} by itself: it begins the names of other flags",
            "--enable-expert-parallel",
        )
        for flag in ("--enable-ep", "--enable-ep-parallel")
    },
    **{
        ("llamacpp", flag): ("invented-flag", f"no release of llama.cpp had a {flag}", "--n-cpu-moe N")
        for flag in ("--cpu-moe-layers", "--moe-cpu-layers", "--n-moe-cpu", "--ncmoe")
    },
    **{
        ("llamacpp", flag): (
            "other-engine",
            f"llama.cpp has no {flag}: it splits layers or rows over devices, never experts", None,
        )
        for flag in ("--expert-parallel", "--expert-parallel-size", "--enable-expert-parallel", "--ep-size")
    },
    ("sglang", "--enable-ep-moe"): (
        "removed-flag", "--enable-ep-moe is gone: a size above 1 turns expert parallelism on", "--ep-size N",
    ),
    ("sglang", "--enable-deepep-moe"): (
        "renamed-flag", "--enable-deepep-moe is gone: DeepEP is one of several transports",
        "--moe-a2a-backend deepep",
    ),
    ("sglang", "--enable-expert-distribution-metrics"): (
        "renamed-flag", "--enable-expert-distribution-metrics was renamed",
        "--expert-balancedness-report-mode MODE",
    ),
    ("sglang", "--enable-eplb-rebalance-async"): (
        "unmerged-flag", f"--enable-eplb-rebalance-async {_UNMERGED}",
        "--eplb-rebalance-layers-per-chunk N, which spreads a rebalance over steps",
    ),
    ("sglang", "--kt-amx-weight-path"): (
        "renamed-flag", "--kt-amx-weight-path was renamed", "--kt-weight-path PATH",
    ),
    ("sglang", "--kt-amx-method"): ("renamed-flag", "--kt-amx-method was renamed", "--kt-method METHOD"),
    **{
        ("sglang", flag): ("fork-flag", f"{flag} {_FORK}", instead)
        for flag, instead in (
            ("--kt-gpu-experts-ratio", "--kt-num-gpu-experts N, or install sglang-kt"),
            ("--kt-expert-placement-strategy", "install sglang-kt"),
            ("--kt-enable-dynamic-expert-update", "install sglang-kt"),
            ("--kt-gpu-prefill-token-threshold", "install sglang-kt"),
            ("--kt-numa-nodes", "--kt-threadpool-count N, or install sglang-kt"),
            ("--record-kt-gpu-expert-distribution", "install sglang-kt"),
        )
    },
    **{
        ("sglang", f"--paged-experts-{end}"): (
            "unreleased-flag", f"--paged-experts-{end} {_INTENDED}",
            "--enable-paged-experts --paged-experts-num-resident K",
        )
        for end in ("store", "eviction", "kv-reserve-gb", "cold-backing", "cold-dir")
    },
    **{
        ("llamacpp", flag): ("unmerged-flag", f"{flag} {_UNMERGED}", "--n-cpu-moe N, or --fit on")
        for flag in ("--moe-hot-count", "--lazy-experts", "--pin-hot-experts", "--moe-stream-cache")
    },
    **{
        ("llamacpp", flag): (
            "fork-flag", f"{flag} is a flag of ik_llama.cpp, a fork; llama.cpp itself has none of it", None,
        )
        for flag in ("-ser", "--smart-expert-reduction", "-ger", "-no-fmoe", "-fmoe", "-rtr", "--fit-margin")
    },
}  # fmt: skip
"""Flags that people quote and no current release takes."""

GONE_VALUES: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("vllm", "--all2all-backend", name): (
        f"the transport {name} was removed: vLLM warns and takes allgather_reducescatter",
        "--all2all-backend allgather_reducescatter",
    )
    for name in ("naive", "pplx")
}
"""Values that a parser still takes and the engine no longer follows."""

SAME_VALUES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16",), "fp16": ("float16", "f16"), "fp32": ("float32", "f32"), "bfloat16": ("bf16",),
    "float16": ("f16",), "float32": ("f32",), "q8": ("q8_0",), "q4": ("q4_0",), "true": ("on",),
    "false": ("off",), "fp8": ("fp8_e4m3",),
}  # fmt: skip
"""Other words for a value."""

PLUGIN_FLAGS: Mapping[str, str] = {
    "--tool-call-parser": "--tool-parser-plugin", "--reasoning-parser": "--reasoning-parser-plugin",
}  # fmt: skip
"""Flags whose values a plugin adds to, and the flag that loads it."""

OF_PLUGINS: Mapping[tuple[str, str], frozenset[str]] = {
    ("vllm", "--quantization"): frozenset({"ascend"}),
    ("vllm", "--load-format"): frozenset({"runai", "netloader", "rfork"}),
}
"""Values that well-known plugins of an engine register."""

Variable = tuple[str | None, Literal["error", "warning"], str, str, str | None]
KNOWN_VARIABLES: Mapping[str, Variable] = {
    "NCCL_ALGO": (
        None, "warning", "no-effect-on-all-to-all",
        "NCCL_ALGO chooses how all-reduce and its like are done; an all-to-all is sends and receives, "
        "which it "
        "does not touch",
        "NCCL_MIN_NCHANNELS, NCCL_NCHANNELS_PER_NET_PEER or NCCL_BUFFSIZE",
    ),
    "NCCL_BUFF_SIZE": (
        None, "error", "misspelt-variable",
        "NCCL reads no NCCL_BUFF_SIZE: it is ignored without a word", "NCCL_BUFFSIZE=16777216",
    ),
    "NCCL_ASYNC_ERROR_HANDLING": (
        None, "warning", "renamed-variable",
        "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING; the name without the prefix is deprecated",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    "VLLM_EP_SIZE": (
        None, "error", "fork-variable",
        "VLLM_EP_SIZE existed in a fork only: vLLM derives the size, expert parallel = tensor x data "
        "parallel",
        "--enable-expert-parallel",
    ),
}  # fmt: skip
"""name: (engine or None for all, severity, rule, message, suggestion)."""

KNOWN_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "ncclperf": (
        "there is no ncclperf: NVIDIA's nccl-tests are one program a collective",
        "alltoall_perf -b 8 -e 1G -f 2 -g 8",
    ),
    "nccl-perf": (
        "there is no nccl-perf: NVIDIA's nccl-tests are one program a collective",
        "alltoall_perf -b 8 -e 1G -f 2 -g 8",
    ),
    "vllm fserver": (
        "vllm fserver is of development branches of attention/expert disaggregation, not of a release",
        "vllm serve with the plugin's --worker-cls and --additional-config '{\"afd\": {...}}'",
    ),
    "s23_book_calc.py": (
        "this script was quoted in public and never published",
        "moesaic inspect, moesaic fit and moesaic plan",
    ),
}
"""Programs that are quoted and cannot be had."""

Severity = Literal["error", "warning"]
KNOWN_TEXT: tuple[tuple[str, str, Severity, str, str, str], ...] = (
    (
        r"torch\.cuda\.synchronize\s*\(", "torch.cuda.synchronize()", "warning", "device-wide-wait",
        "a device-wide wait ends the overlap that is to be timed, and counts other streams",
        "record two torch.cuda.Event(enable_timing=True) on the stream, wait with end.synchronize(), read "
        "start.elapsed_time(end)",
    ),
)  # fmt: skip
"""Lines of Python that come along in such texts: pattern, name, severity, rule, message, suggestion."""

MODEL_IDS: Mapping[str, str] = {
    "mistralai/Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x7B-Instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mistralai/Mixtral-8x22B": "mistralai/Mixtral-8x22B-v0.1",
    "mistralai/Mixtral-8x22B-Instruct": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "meta-llama/Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "meta-llama/Llama-3-70B-Instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "meta-llama/Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3-8B-Instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "Qwen/Qwen3-235B": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-30B": "Qwen/Qwen3-30B-A3B",
    "deepseek/DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "deepseek/DeepSeek-R1": "deepseek-ai/DeepSeek-R1",
    "moonshotai/Kimi-K2": "moonshotai/Kimi-K2-Instruct",
    "openai/gpt-oss": "openai/gpt-oss-120b",
}
"""Repositories that are typed and do not exist, and the ones that are meant."""
