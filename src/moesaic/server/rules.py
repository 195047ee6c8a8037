"""What a checked field must be, in the words of an error message. Knows pydantic's kinds of error."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_RULES: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "true or false",
        "dict_type": "a JSON object",
        "finite_number": "a finite number",
        "float_parsing": "a number",
        "float_type": "a number",
        "greater_than": "above {gt:g}",
        "greater_than_equal": "at least {ge:g}",
        "int_from_float": "a whole number",
        "int_type": "a whole number",
        "less_than_equal": "at most {le:g}",
        "list_type": "a list",
        "literal_error": "{expected}",
        "model_type": "a JSON object",
        "none_required": "null",
        "string_too_long": "a text of at most {max_length} characters",
        "string_too_short": "a text of at least {min_length} characters",
        "string_type": "a text",
        "too_long": "a list of at most {max_length}",
        "too_short": "a list of at least {min_length}",
        "union_tag_invalid": "an object whose {discriminator} is one of {expected_tags}",
        "union_tag_not_found": "an object with the key {discriminator}",
    }
)


def rule_of(error: Mapping[str, Any]) -> str:
    """The broken rule as a clause: `must be at least 0`; what pydantic says of a kind that is not listed."""
    context = error.get("ctx", {})
    if isinstance(cause := context.get("error"), ValueError):
        return f": {cause}"
    rule = _RULES.get(error["type"])
    return f": {error['msg']}" if rule is None else f" must be {rule.format_map(context)}"
