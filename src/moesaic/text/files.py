"""The small text and JSON files beside a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a missing file is an empty one.

    Raises: CheckpointError when the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    """A text file.

    Raises: CheckpointError when it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
