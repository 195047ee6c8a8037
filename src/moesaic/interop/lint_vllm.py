"""Rules about vLLM's flags in company: what is refused at start, and what has no effect.

Source: vLLM 0.33.0, vllm/config/parallel.py and scheduler.py, vllm/entrypoints/common/cli_args.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from moesaic.interop.lint_line import Finding, Line, finding

Findings = Iterator[Finding]


def vllm_rules(line: Line) -> Findings:
    """Findings about combinations of vLLM's flags."""
    tp, dp = line.size("--tensor-parallel-size"), line.size("--data-parallel-size")
    pcp = line.size("--prefill-context-parallel-size")
    ranks = None if tp is None or dp is None or pcp is None else tp * dp * pcp
    is_ep, is_eplb = line.is_on("--enable-expert-parallel"), line.is_on("--enable-eplb")
    if is_eplb and not is_ep:
        yield finding(
            "--enable-eplb", "error", "balancer-needs-experts-apart",
            "--enable-eplb is refused without --enable-expert-parallel",
            "--enable-expert-parallel --enable-eplb",
        )  # fmt: skip
    if is_ep and ranks == 1:
        yield finding(
            "--enable-expert-parallel", "error" if is_eplb else "warning", "no-effect",
            "expert parallel is over tensor x data parallel ranks, and the line has one",
            "--tensor-parallel-size N or --data-parallel-size N",
        )  # fmt: skip
    yield from _eplb(line, is_eplb)
    yield from _context_parallel(line, tp, pcp)
    yield from _elastic(line, is_eplb)
    yield from _needs(line)
    yield from _steps(line)
    backend = line.text("--all2all-backend")
    if backend is not None and (not is_ep or dp == 1):
        yield finding(
            "--all2all-backend", "warning", "no-effect",
            "rows are exchanged between data parallel ranks with --enable-expert-parallel only; here "
            f"{'data parallel is 1' if is_ep else 'expert parallel is off'}",
            "--data-parallel-size N --enable-expert-parallel",
        )  # fmt: skip
    carried = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
    if line.is_on("--enable-dbo") and (backend or "allgather_reducescatter") not in carried:
        yield finding(
            "--enable-dbo", "error", "overlap-needs-transport",
            "--enable-dbo is refused with the transport "
            f"{backend or 'allgather_reducescatter (the default)'}",
            f"--all2all-backend {' or '.join(carried)}",
        )  # fmt: skip
    elif not line.is_on("--enable-dbo"):
        for name in ("--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"):
            if line.get(name) is not None:
                yield _no_effect(line, name, "--enable-dbo")
    yield from _replicas_here(line, dp)


def _replicas_here(line: Line, dp: int | None) -> Findings:
    """Which replicas of attention a node runs."""
    local = line.number("--data-parallel-size-local", 0)
    if local and dp and local > dp:
        yield finding(
            "--data-parallel-size-local", "error", "more-local-than-all",
            f"{local} replicas on this node are more than the {dp} of all nodes",
            f"--data-parallel-size {local} or more",
        )  # fmt: skip
    for name in ("--data-parallel-rank", "--data-parallel-start-rank"):
        rank = line.number(name, 0)
        if rank and dp and 1 < dp <= rank:  # with one, the size may come from VLLM_DP_SIZE
            yield finding(
                name, "error", "rank-beyond-replicas",
                f"replica {rank} of {dp}: they are numbered from 0 to {dp - 1}",
                f"--data-parallel-size {rank + 1} or more, or {name} {dp - 1} or less",
            )  # fmt: skip


def _no_effect(line: Line, name: str, needed: str) -> Finding:
    found = line.get(name)
    word = name if found is None else found.word
    return finding(
        word, "warning", "no-effect", f"{name} has no effect without {needed}", f"{needed}, or leave it out"
    )


def _context_parallel(line: Line, tp: int | None, pcp: int | None) -> Findings:
    dcp = line.size("--decode-context-parallel-size")
    if tp and dcp and pcp == 1 and tp % dcp:
        yield finding(
            "--decode-context-parallel-size", "error", "context-parallel-divides",
            f"tensor parallel {tp} / decode context parallel {dcp} = {tp / dcp:.2f}, and must be whole",
            f"--decode-context-parallel-size {max(d for d in range(1, min(tp, dcp) + 1) if tp % d == 0)}",
        )  # fmt: skip
    if tp and dcp and pcp and pcp > 1 and dcp not in (1, pcp, tp * pcp):
        yield finding(
            "--decode-context-parallel-size", "error", "context-parallel-divides",
            f"beside prefill context parallel {pcp}, decode context parallel is 1, {pcp} or {tp * pcp}, "
            f"not {dcp}",
            f"--decode-context-parallel-size {pcp}",
        )  # fmt: skip


def _elastic(line: Line, is_eplb: bool) -> Findings:
    if line.is_on("--enable-elastic-ep"):
        if not is_eplb:
            yield finding(
                "--enable-elastic-ep", "error", "elastic-needs-balancer",
                "--enable-elastic-ep is refused without --enable-eplb", "--enable-eplb --enable-elastic-ep",
            )  # fmt: skip
        for name in ("--pipeline-parallel-size", "--data-parallel-hybrid-lb"):
            found = line.get(name)
            is_used = line.is_on(name) if found is None or found.value is None else found.value != "1"
            if found is not None and is_used:
                yield finding(
                    found.word, "error", "elastic-and-others",
                    f"--enable-elastic-ep is refused with {name}", "one of the two",
                )  # fmt: skip
    servers = line.number("--api-server-count", 1)
    if line.is_on("--enable-fault-tolerance") and servers and servers > 1:
        yield finding(
            "--api-server-count", "error", "one-api-server",
            f"--enable-fault-tolerance is refused with {servers} API servers", "--api-server-count 1",
        )  # fmt: skip


NEEDS = (
    ("--enable-auto-tool-choice", "--tool-call-parser", "--tool-call-parser NAME"),
    ("--enable-log-outputs", "--enable-log-requests", "--enable-log-requests"),
    ("--numa-bind-nodes", "--numa-bind", "--numa-bind"),
    ("--numa-bind-cpus", "--numa-bind", "--numa-bind"),
)
"""A flag, the one that it is refused without, and how to write that."""


def _needs(line: Line) -> Findings:
    for name, needed, how in NEEDS:
        found = line.get(name)
        if (
            found is not None
            and not found.is_off
            and line.inventory.find(needed)
            and line.get(needed) is None
        ):
            yield finding(
                found.word, "error", "needs-another", f"{name} is refused without {needed}", f"{name} {how}"
            )
    if line.is_on("--data-parallel-external-lb") and line.size("--data-parallel-size") == 1:
        yield finding(
            "--data-parallel-external-lb", "error", "needs-another",
            "--data-parallel-external-lb is refused with one replica", "--data-parallel-size N",
        )  # fmt: skip
    if line.get("--kv-offloading-backend") is not None and line.get("--kv-offloading-size") is None:
        yield _no_effect(line, "--kv-offloading-backend", "--kv-offloading-size N")
    if line.get("--cpu-offload-params") is not None and line.get("--cpu-offload-gb") is None:
        yield _no_effect(line, "--cpu-offload-params", "--cpu-offload-gb N")
    nodes = line.number("--nnodes", 1)
    if nodes and nodes > 1 and line.text("--distributed-executor-backend") == "ray":
        yield finding(
            "--nnodes", "error", "two-launchers",
            "--nnodes above 1 is refused with the executor ray, which finds its nodes itself",
            "leave out --nnodes, or --distributed-executor-backend mp",
        )  # fmt: skip


def _steps(line: Line) -> Findings:
    """Sizes of a step; 0 stands for a default that the line does not say."""
    tokens, seqs = line.number("--max-num-batched-tokens", 0), line.number("--max-num-seqs", 0)
    length = line.number("--max-model-len", 0)
    if tokens and seqs and 0 < tokens < seqs:
        yield finding(
            "--max-num-batched-tokens", "error", "step-too-small",
            f"a step of {tokens} tokens is refused: it must hold one of each of the {seqs} sequences",
            f"--max-num-batched-tokens {seqs}",
        )  # fmt: skip
    chunked = line.get("--enable-chunked-prefill")
    if tokens and length and tokens < length and chunked is not None and chunked.is_off:
        yield finding(
            "--max-num-batched-tokens", "error", "step-too-small",
            f"a step of {tokens} tokens is refused: without chunks it must hold a prompt of {length}",
            f"--max-num-batched-tokens {length}, or --enable-chunked-prefill",
        )  # fmt: skip
    share = line.text("--gpu-memory-utilization")
    try:
        is_share = share is None or 0 < float(share) <= 1
    except ValueError:
        return
    if not is_share:
        yield finding(
            "--gpu-memory-utilization", "error", "wrong-value",
            f"--gpu-memory-utilization is a share of the device, above 0 and at most 1, not {share}",
        )  # fmt: skip


def _eplb(line: Line, is_eplb: bool) -> Findings:
    config = line.json("--eplb-config")
    redundant = config.get("num_redundant_experts", 0)
    if config and not is_eplb:
        is_refused = redundant not in (0, None)
        yield finding(
            "--eplb-config", "error" if is_refused else "warning",
            "balancer-is-off" if is_refused else "no-effect",
            f"--eplb-config without --enable-eplb {'is refused' if is_refused else 'has no effect'}",
            "--enable-eplb",
        )  # fmt: skip
    for key in ("window_size", "step_interval", "log_balancedness_interval"):
        if isinstance(config.get(key), int | float) and config[key] <= 0:
            yield finding(
                f"--eplb-config.{key}", "error", "wrong-value", f"{key} must be above 0, got {config[key]}"
            )
    if isinstance(redundant, int) and redundant < 0:
        yield finding(
            "--eplb-config.num_redundant_experts",
            "error",
            "wrong-value",
            "redundant experts cannot be negative",
        )
    if config.get("use_async", True) and config.get("communicator") in ("torch_nccl", "pynccl"):
        yield finding(
            "--eplb-config.communicator", "error", "communicator-blocks",
            f"the communicator {config['communicator']} cannot move experts while steps run",
            "--eplb-config.use_async false, or the communicators torch_gloo and nixl",
        )  # fmt: skip
