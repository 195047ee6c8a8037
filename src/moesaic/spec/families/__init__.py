"""Families of models: a config.json becomes a `ModelSpec`. Hugging Face keys live here and nowhere else."""

from __future__ import annotations

from moesaic.spec.families.table import FAMILIES, RUNNABLE, RUNNABLE_TYPES, Family, assumed_sizes, read_config

__all__ = ["FAMILIES", "RUNNABLE", "RUNNABLE_TYPES", "Family", "assumed_sizes", "read_config"]
