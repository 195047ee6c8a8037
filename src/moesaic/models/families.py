"""The table of the families that run: how the checkpoints of each spell its parameters. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moesaic.models.deepseek_v2 import DEEPSEEK_V2
from moesaic.models.deepseek_v3 import DEEPSEEK_V3
from moesaic.models.dots1 import DOTS1
from moesaic.models.ernie4_5_moe import ERNIE4_5_MOE
from moesaic.models.gemma4 import GEMMA4
from moesaic.models.glm4_moe import GLM4_MOE
from moesaic.models.gpt_oss import GPT_OSS
from moesaic.models.granitemoe import GRANITEMOE
from moesaic.models.kimi_k25 import KIMI_K25
from moesaic.models.llama import LLAMA
from moesaic.models.llama4 import LLAMA4
from moesaic.models.minimax_m2 import MINIMAX_M2
from moesaic.models.mixtral import MIXTRAL
from moesaic.models.names import WeightMap
from moesaic.models.olmoe import OLMOE
from moesaic.models.phimoe import PHIMOE
from moesaic.models.qwen2_moe import QWEN2_MOE
from moesaic.models.qwen3_5_moe import QWEN3_5_MOE
from moesaic.models.qwen3_moe import QWEN3_MOE
from moesaic.models.qwen3_next import QWEN3_NEXT

FAMILIES: Mapping[str, WeightMap] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen3_moe": QWEN3_MOE,
        "olmoe": OLMOE,
        "mixtral": MIXTRAL,
        "deepseek_v3": DEEPSEEK_V3,
        "gemma4": GEMMA4,
        "gpt_oss": GPT_OSS,
        "llama4": LLAMA4,
        "kimi_k25": KIMI_K25,
        "qwen2_moe": QWEN2_MOE,
        "deepseek_v2": DEEPSEEK_V2,
        "glm4_moe": GLM4_MOE,
        "glm4_moe_lite": DEEPSEEK_V3,  # GLM-4.7-Flash: the same names, other sizes
        "dots1": DOTS1,
        "minimax_m2": MINIMAX_M2,
        "ernie4_5_moe": ERNIE4_5_MOE,
        "granitemoe": GRANITEMOE,
        "phimoe": PHIMOE,
        "qwen3_next": QWEN3_NEXT,
        "qwen3_5_moe": QWEN3_5_MOE,
    }
)
"""The families that run; `spec.families.RUNNABLE` says the same of configs."""
