"""What every test shares: one torch thread, the folder of reference data, hypothesis without surprises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("moesaic", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("moesaic")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public reference data (configs, traces, corpora); tests that read it skip without it."""
    folder = os.environ.get("MOESAIC_DATA")
    if not folder:
        pytest.skip("MOESAIC_DATA is not set: point it at the folder of reference data to run this test")
    return Path(folder)
