"""Marks that tests of several rooms share."""

from __future__ import annotations

import pytest

from moesaic.kernels import native

needs_native = pytest.mark.skipif(not native.levels(), reason="the native kernels are not built here")
