"""Four questions on serving, answered with numbers."""

from __future__ import annotations

from moesaic.audit.figures import behaviour, memory, reading, traffic
from moesaic.audit.figures.sheet import Sheet

QWEN = "qwen3-235b-a22b"


def selftest() -> tuple[Sheet, ...]:
    """What fits, what is read, what may be reused, and what separation sends."""
    counts = (128, 64, 32, 16)
    fits = memory.resident_fits(QWEN, counts, "a100")
    found = behaviour.found_elsewhere(48, 16)
    prompt, rows = traffic.prompt_and_rows(QWEN, 4096, 64, 16)
    return (
        Sheet(
            title="1. How many experts of a layer can stay on an 80 GB card? (Qwen3-235B, bfloat16)",
            columns=("resident", "GiB over 94 layers", "fits"),
            rows=tuple(
                (count, memory.resident_gib(QWEN, count, 94), ok)
                for count, ok in zip(counts, fits, strict=True)
            ),
            figures=("S000-004", "S000-006", "S000-008"),
        ),
        Sheet(
            title="2. Why does a larger batch use weights better?",
            columns=("batch", "experts touched", "choices per expert read"),
            rows=tuple(
                (tokens, reading.distinct(128, 8, tokens), reading.weight_reuse(128, 8, tokens))
                for tokens in (1, 8, 64, 512)
            ),
            figures=("S000-017", "S000-018"),
        ),
        Sheet(
            title="3. What must be the same for KV to be reused?",
            columns=("changed", "tokens found of 48"),
            rows=(
                *((name, tokens) for name, tokens in found.items()),
                ("temperature", behaviour.found_at_other_temperature(48, 16)),
            ),
            figures=("S000-030", "S000-031", "S000-032"),
            notes=("one token of a prompt is always computed, for its logits",),
        ),
        Sheet(
            title="4. What do separated phases and separated experts send?",
            columns=("separated", "sent", "MB", "how often"),
            rows=(
                ("prefill and decode", "KV of a prompt of 4096", 1e3 * prompt, "once a request"),
                ("attention and experts", "rows between one pair, 64 tokens", rows, "twice a layer and step"),
            ),
            figures=("S000-028", "S000-024"),
        ),
    )
