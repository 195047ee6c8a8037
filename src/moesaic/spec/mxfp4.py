"""The sizes of MXFP4 as checkpoints store it; `kernels.mxfp4` has the format and its decoding."""

from __future__ import annotations

BLOCK = 32  # numbers under one scale
BLOCK_BYTES = BLOCK // 2
