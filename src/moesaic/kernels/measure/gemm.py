"""How fast rows are multiplied with an expert's matrix, by dtype, shape, rows and library.

The matrices are cycled, so that each product finds its weights in memory and not in a cache. Without torch,
numpy multiplies float32, and the native kernels what they can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from moesaic.kernels import native
from moesaic.kernels.measure.child import Say, reading, serve, timed

EXPERTS: Mapping[str, tuple[int, int]] = {"olmoe-1b-7b": (2048, 1024), "qwen3-30b-a3b": (2048, 768)}
"""Model width and expert inner width: one matrix of an expert is [F, D]."""
ROWS = (1, 4, 16, 64, 512)
WIDTH = {"float32": 4, "bfloat16": 2, "int8": 1}

Call = Callable[[], object]
Multiply = Callable[[int], Call]
"""From a number of rows to one product of so many with the next of the matrices."""
Prepare = Callable[[str, int, int, int], Multiply]
"""From a dtype, F, D and a number of matrices to products with them."""


def measure(told: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Rates of every way there is here; `missing` says why others are not.

    `experts` and `rows` are those above unless the job says others; `cycle_bytes` is more than caches hold.
    """
    experts = told.get("experts") or EXPERTS
    all_rows = tuple(told.get("rows") or ROWS)
    ways, missing = open_ways(int(told["num_threads"]))
    budget_s = float(told["budget_s"]) / (len(ways) * len(experts) * len(all_rows))
    readings: list[dict[str, Any]] = []
    for (by, dtype), prepare in ways.items():
        say(f"multiplying {dtype} with {by}")
        for expert, (d, f) in experts.items():
            multiply = prepare(dtype, f, d, max(2, -(-int(told["cycle_bytes"]) // (d * f * WIDTH[dtype]))))
            for i, rows in enumerate(all_rows):
                samples_s = timed(multiply(rows), budget_s)
                readings.append(reading(
                    "flop/s", 2.0 * rows * d * f, samples_s,
                    dtype=dtype, by=by, expert=expert, rows=rows, hidden=d, ffn=f,
                ))  # fmt: skip
                if samples_s[0] > 2 * budget_s and i + 1 < len(all_rows):
                    missing[f"{dtype} products by {by} for {expert} above {rows} rows"] = (
                        f"{rows} rows took {samples_s[0]:.2g} s of the {budget_s:.2g} s that each case has; "
                        "more --seconds would allow them"
                    )
                    break
    return {"readings": readings, "missing": missing}


def open_ways(num_threads: int) -> tuple[dict[tuple[str, str], Prepare], dict[str, str]]:
    """(library, dtype) -> what prepares a product, and what is not here with the reason."""
    ways: dict[tuple[str, str], Prepare] = {}
    missing: dict[str, str] = {}
    if native.levels():
        level = native.levels()[-1]
        kernels = native.module().Kernels(level, num_threads)  # type: ignore[union-attr]  # levels() has looked
        for dtype in ("float32", "bfloat16"):
            ways[f"native/{level}", dtype] = partial(_native_products, kernels)
    else:
        missing["products by the native kernels"] = "they are not built in this installation"
    try:
        import torch

        torch.set_num_threads(num_threads)
        for dtype in ("float32", "bfloat16"):
            ways["torch", dtype] = _torch_products
        if (lack := _lack_of_int8()) is None:
            ways["torch", "int8"] = _torch_products
        else:
            missing["int8 products by torch"] = lack
    except ModuleNotFoundError:
        missing["products by torch (bfloat16, int8)"] = (
            "torch is not installed: pip install 'moesaic[engine]'"
        )
        ways["numpy", "float32"] = _numpy_products
    return ways, missing


def _lack_of_int8() -> str | None:
    """Why this build of torch multiplies no int8; None where it does."""
    import torch

    one = torch.ones((32, 32), dtype=torch.int8)
    try:
        torch._int_mm(one, one)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _native_products(kernels: Any, dtype: str, f: int, d: int, copies: int) -> Multiply:
    def store(values: Any) -> Any:
        """bfloat16 is the upper half of a float32."""
        return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)

    weights = np.repeat(store(_random(f, d))[None], copies, axis=0)
    turns = cycle(weights)

    def multiply(rows: int) -> Call:
        x_TD = store(_random(rows, d))
        y_TF = np.empty((rows, f), x_TD.dtype)
        return lambda: kernels.linear(
            x_TD.ctypes.data, next(turns).ctypes.data, y_TF.ctypes.data, rows, f, d, d, 1,
            dtype == "bfloat16", dtype == "float32",
        )  # fmt: skip

    return multiply


def _torch_products(dtype: str, f: int, d: int, copies: int) -> Multiply:
    import torch
    from torch.nn.functional import linear

    def store(values: Any) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return (32 * tensor if dtype == "int8" else tensor).to(getattr(torch, dtype))

    turns = cycle(store(_random(f, d)).repeat(copies, 1, 1).unbind())

    def multiply(rows: int) -> Call:
        x_TD = store(_random(rows, d))
        if dtype == "int8":
            return lambda: torch._int_mm(x_TD, next(turns).T)
        return lambda: linear(x_TD, next(turns))

    return multiply


def _numpy_products(dtype: str, f: int, d: int, copies: int) -> Multiply:
    turns = cycle(np.repeat(_random(f, d).astype(dtype)[None], copies, axis=0))

    def multiply(rows: int) -> Call:
        x_TD = _random(rows, d).astype(dtype)
        return lambda: x_TD @ next(turns).T

    return multiply


def _random(rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)


if __name__ == "__main__":
    serve(measure)
