from __future__ import annotations

import pytest
import torch

from moesaic.errors import ConfigError
from moesaic.kernels.formats import pack, torch_dtype


def test_pack_rounds_as_to_does() -> None:
    x_RD = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    packed = pack(x_RD, "bfloat16")
    assert packed.data.dtype == torch.bfloat16
    assert (packed.num_rows, packed.width, packed.scales) == (5, 7, None)
    assert torch.equal(packed.unpack(torch.float32), x_RD.to(torch.bfloat16).float())


def test_pack_copies_nothing_in_its_own_format() -> None:
    x_RD = torch.ones(2, 3)
    packed = pack(x_RD, "float32")
    assert packed.data is x_RD
    assert packed.unpack(torch.float32) is x_RD


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean float32"):
        torch_dtype("float33")  # type: ignore[arg-type]
