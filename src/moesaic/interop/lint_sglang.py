"""Rules about SGLang's flags in company, and of KTransformers' fork of it.

Source: SGLang 0.5.23, sglang/srt/arg_groups/*_hook.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from moesaic.interop.lint_line import Finding, Line, finding

Findings = Iterator[Finding]


def attention_groups(line: Line) -> int | None:
    """Data parallel groups of attention inside the tensor parallel group."""
    if line.get("--attn-dp-size") is not None:
        return line.size("--attn-dp-size")
    return line.size("--dp-size") if line.is_on("--enable-dp-attention") else 1


def expert_ranks(line: Line) -> int | None:
    """Expert parallel as it is in force: a transport between ranks makes it as wide as tensor parallel."""
    if line.text("--moe-a2a-backend") not in (None, "none") or line.is_on("--enable-deepep-moe"):
        return line.size("--tp-size")
    return line.size("--ep-size")


def sglang_rules(line: Line) -> Findings:
    """Findings about combinations of SGLang's flags."""
    tp, ep, dp = line.size("--tp-size"), expert_ranks(line), line.size("--dp-size")
    if line.is_on("--enable-eplb") and ep == 1:
        yield finding(
            "--enable-eplb", "error", "balancer-needs-experts-apart",
            "--enable-eplb is refused while the expert parallel size is 1", "--ep-size N",
        )  # fmt: skip
    if tp and ep and (ep > tp or tp % ep):
        yield finding(
            "--ep-size", "error", "experts-over-ranks",
            f"expert parallel {ep} must divide tensor parallel {tp}: tp-size counts all ranks of a stage",
            f"--tp-size {ep}" if ep > tp else f"--ep-size {tp}",
        )  # fmt: skip
    yield from _attention(line, tp, dp)
    yield from _caches(line)
    yield from _nodes(line, tp)
    yield from _needs(line)
    yield from _dispatch(line)
    yield from _recorder(line)
    yield from _buffer(line)


def _attention(line: Line, tp: int | None, dp: int | None) -> Findings:
    groups = attention_groups(line)
    if tp and groups and tp % groups:
        yield finding(
            "--attn-dp-size" if line.get("--attn-dp-size") else "--dp-size", "error", "groups-divide",
            f"tensor parallel {tp} / {groups} attention groups = {tp / groups:.2f}, and must be whole: the "
            "groups lie inside the tensor parallel ranks",
            f"--tp-size {groups * max(tp // groups, 1)}",
        )  # fmt: skip
    if line.is_on("--enable-dp-attention") and dp == 1:
        yield finding(
            "--enable-dp-attention", "warning", "no-effect",
            "--enable-dp-attention with one group has no effect",
            "--dp-size N",
        )  # fmt: skip
    if line.get("--attn-dp-size") and dp and dp > 1 and (groups or 1) > 1:
        yield finding(
            "--dp-size", "error", "two-kinds-of-replicas",
            "--dp-size and --attn-dp-size above 1 are refused together: one counts whole replicas, the other "
            "groups of attention inside one",
            "one of them",
        )  # fmt: skip


def _caches(line: Line) -> Findings:
    """Source: kv_cache_hook.py, handle_cache_compatibility."""
    pairs = (
        (
            "--disable-radix-cache",
            "--enable-hierarchical-cache",
            "its second tier holds what the prefix cache drops",
        ),
        ("--disable-radix-cache", "--enable-lmcache", "it extends the prefix cache"),
        ("--enable-lmcache", "--enable-hierarchical-cache", "both are the second tier of the prefix cache"),
    )
    for one, other, why in pairs:
        if line.is_on(one) and line.is_on(other):
            yield finding(
                one, "error", "one-of-two", f"{one} is refused with {other}: {why}", f"{one} or {other}"
            )
    is_decode = line.text("--disaggregation-mode") == "decode"
    if not line.is_on("--enable-hierarchical-cache") and not is_decode:
        for name in ("--hicache-size", "--hicache-ratio", "--hicache-write-policy", "--hicache-io-backend"):
            found = line.get(name)
            if found is not None:
                yield finding(
                    found.word, "warning", "no-effect",
                    f"{name} has no effect without --enable-hierarchical-cache",
                    "--enable-hierarchical-cache, or leave it out",
                )  # fmt: skip


def _nodes(line: Line, tp: int | None) -> Findings:
    """Source: validation_hook.py, check_server_args."""
    nodes, pp, dp = (line.size(name) for name in ("--nnodes", "--pp-size", "--dp-size"))
    if tp and pp and nodes and (tp * pp) % nodes:
        yield finding(
            "--nnodes", "error", "nodes-divide",
            f"{tp * pp} ranks / {nodes} nodes = {tp * pp / nodes:.2f}, and must be whole: --tp-size counts "
            "the ranks of all nodes",
            f"--tp-size {-(-tp // nodes) * nodes}",
        )  # fmt: skip
    is_groups = line.is_on("--enable-dp-attention")
    if nodes and nodes > 1 and dp and dp > 1 and not is_groups and line.get("--attn-dp-size") is None:
        has_own = line.inventory.find("--attn-dp-size") is not None
        yield finding(
            "--dp-size", "error", "replicas-on-one-node",
            f"{dp} whole replicas are refused on {nodes} nodes: only groups of attention span them",
            f"--attn-dp-size {dp}" if has_own else f"--dp-size {dp} --enable-dp-attention",
        )  # fmt: skip
    dense = line.number("--moe-dense-tp-size", 1)
    if tp and dense and dense not in (1, tp):
        yield finding(
            "--moe-dense-tp-size", "error", "wrong-value",
            f"--moe-dense-tp-size is 1 or the tensor parallel size, {tp}, not {dense}",
            "--moe-dense-tp-size 1",
        )  # fmt: skip


NEEDS = (
    ("--export-metrics-to-file", "--export-metrics-to-file-dir", "error"),
    ("--tokenizer-metrics-allowed-custom-labels", "--tokenizer-metrics-custom-labels-header", "error"),
    ("--disable-priority-preemption", "--enable-priority-scheduling", "warning"),
    ("--default-priority-value", "--enable-priority-scheduling", "warning"),
    ("--watermark-config", "--enable-watermark", "error"),
)
"""A flag, the one that it needs, and whether it is refused or without effect. Source: validation_hook.py."""


def _needs(line: Line) -> Findings:
    for name, needed, severity in NEEDS:
        found = line.get(name)
        if found is None or line.get(needed) is not None or line.inventory.find(needed) is None:
            continue
        if severity == "error":
            message = f"{name} is refused without {needed}"
            yield finding(found.word, "error", "needs-another", message, f"{name} {needed}")
        else:
            message = f"{name} has no effect without {needed}"
            yield finding(found.word, "warning", "no-effect", message, f"{needed}, or leave it out")
    if line.text("--retraction-policy") == "priority" and not line.is_on("--enable-priority-scheduling"):
        yield finding(
            "--retraction-policy", "error", "needs-another",
            "--retraction-policy priority is refused without --enable-priority-scheduling",
            "--enable-priority-scheduling",
        )  # fmt: skip
    if line.is_on("--disable-cuda-graph-padding") and line.is_on("--enable-torch-compile"):
        yield finding(
            "--disable-cuda-graph-padding", "error", "one-of-two",
            "--disable-cuda-graph-padding is refused with --enable-torch-compile: every batch size would be "
            "compiled", "one of the two",
        )  # fmt: skip
    name_served = line.text("--served-model-name") or ""
    if ":" in name_served and "$" not in name_served and "://" not in name_served:
        yield finding(
            "--served-model-name", "error", "wrong-value",
            f"a served name has no colon, which parts a model from its adapter: {name_served!r}",
            f"--served-model-name {name_served.replace(':', '-')}",
        )  # fmt: skip
    chunk, page = line.number("--chunked-prefill-size", 0), line.number("--page-size", 1)
    if chunk and page and chunk > 0 and page > 0 and chunk % page:
        yield finding(
            "--chunked-prefill-size", "error", "pages-divide",
            f"chunks of {chunk} tokens / pages of {page} = {chunk / page:.2f}, and must be whole",
            f"--chunked-prefill-size {-(-chunk // page) * page}",
        )  # fmt: skip


def _has_a2a(line: Line) -> bool:
    return line.inventory.find("--moe-a2a-backend") is not None


def _dispatch(line: Line) -> Findings:
    a2a = line.text("--moe-a2a-backend") or "none"
    rule = line.text("--ep-dispatch-algorithm")
    if line.inventory.find("--moe-a2a-backend") and a2a == "none" and rule in ("static", "lp"):
        yield finding(
            "--ep-dispatch-algorithm", "error", "copies-differ-by-rank",
            f"--ep-dispatch-algorithm {rule} is refused without a transport: ranks would pick other "
            "copies of "
            "an expert for one token",
            "--ep-dispatch-algorithm dynamic, or --moe-a2a-backend deepep",
        )  # fmt: skip
    is_apart = (attention_groups(line) or 2) > 1
    if line.is_on("--enable-two-batch-overlap") and a2a == "none" and not is_apart and _has_a2a(line):
        yield finding(
            "--enable-two-batch-overlap", "error", "overlap-needs-transport",
            "--enable-two-batch-overlap is refused without a transport between ranks or groups of attention",
            "--moe-a2a-backend deepep, or --attn-dp-size N",
        )  # fmt: skip
    if line.get("--deepep-mode") is not None and a2a == "none" and line.inventory.find("--moe-a2a-backend"):
        yield finding(
            "--deepep-mode", "warning", "no-effect", "--deepep-mode without a transport has no effect",
            "--moe-a2a-backend deepep",
        )  # fmt: skip


def _recorder(line: Line) -> Findings:
    mode = line.text("--expert-distribution-recorder-mode")
    if mode is None and line.is_on("--enable-eplb"):
        mode = "stat"
    is_deepep = line.text("--moe-a2a-backend") == "deepep"
    deepep = line.text("--deepep-mode") or "auto"
    is_single_phase = line.text("--disaggregation-mode") in ("prefill", "decode")
    why = "--enable-eplb records the load, and the" if line.is_on("--enable-eplb") else "the"
    if mode in ("stat", "per_pass") and is_deepep and deepep == "auto" and not is_single_phase:
        yield finding(
            "--deepep-mode", "error", "recorder-needs-one-mode",
            f"{why} recorder has no counts for --deepep-mode auto: the first step fails",
            "--deepep-mode normal or --deepep-mode low_latency",
        )  # fmt: skip
    if mode == "stat_approx" and not (is_deepep and deepep == "normal"):
        yield finding(
            "--expert-distribution-recorder-mode", "error", "recorder-needs-one-mode",
            "stat_approx counts with DeepEP's normal mode only",
            "--moe-a2a-backend deepep --deepep-mode normal, or the mode stat",
        )  # fmt: skip
    if mode == "per_token" and line.is_on("--enable-two-batch-overlap"):
        yield finding(
            "--expert-distribution-recorder-mode", "error", "recorder-and-overlap",
            "per_token cannot be recorded with --enable-two-batch-overlap", "one of the two",
        )  # fmt: skip
    if line.is_on("--enable-eplb"):
        interval = line.number("--eplb-rebalance-num-iterations", 1000)
        buffered = line.number("--expert-distribution-recorder-buffer-size", 0)
        if interval and buffered and buffered > interval:
            yield finding(
                "--expert-distribution-recorder-buffer-size", "error", "buffer-over-interval",
                f"a buffer of {buffered} steps is longer than the {interval} steps between rebalances",
                f"--expert-distribution-recorder-buffer-size {interval}",
            )  # fmt: skip


def _buffer(line: Line) -> Findings:
    """DeepEP's low-latency buffer holds so many tokens a rank; one more ends the server mid-serving."""
    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    if line.text("--moe-a2a-backend") != "deepep" or line.text("--deepep-mode") == "normal":
        return
    if line.text("--disaggregation-mode") == "prefill":
        return
    held = line.command.env.get(name, "128")
    running, groups = line.number("--max-running-requests", 0), attention_groups(line)
    if not held.isdigit() or not running or running < 0 or not groups:
        return
    each = -(-running // groups)
    if each > int(held):
        yield finding(
            "--max-running-requests", "error", "dispatch-buffer",
            f"{running} requests / {groups} attention groups = {each} tokens a rank in a decode step, and "
            f"DeepEP's buffer holds {held}: the server dies when it is exceeded",
            f"{name}={each}, or --max-running-requests {int(held) * groups}",
        )  # fmt: skip


def kt_rules(line: Line) -> Findings:
    """The same, and about the flags that the fork adds."""
    yield from sglang_rules(line)
    deferred = line.number("--kt-max-deferred-experts-per-token", 0)
    if deferred and deferred > 4:
        yield finding(
            "--kt-max-deferred-experts-per-token", "warning", "deferred-too-many",
            f"{deferred} deferred experts change answers: from 5 on accuracy is lost", "1 to 4",
        )  # fmt: skip
    is_set = [line.get(n) for n in ("--kt-num-gpu-experts", "--kt-gpu-experts-ratio")]
    if all(is_set):
        yield finding(
            "--kt-gpu-experts-ratio", "error", "said-twice",
            "--kt-num-gpu-experts and --kt-gpu-experts-ratio say the same thing", "one of the two",
        )  # fmt: skip
    if (
        line.text("--kt-expert-placement-strategy") == "frequency"
        and line.get("--init-expert-location") is None
    ):
        yield finding(
            "--kt-expert-placement-strategy", "error", "placement-needs-counts",
            "the strategy frequency reads recorded counts, and none are given",
            "--init-expert-location stats.pt",
        )  # fmt: skip
