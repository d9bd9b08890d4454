"""What is wrong with a body or a setting, in one sentence: the key, what was given, what was expected.

pydantic finds what is wrong and says it for programmers; here its findings become sentences for users.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

LONGEST_VALUE = 80
"""Characters of a wrong value that are repeated."""

ALLOWED = {
    "greater_than_equal": "expected {ge} or more",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected {le} or less",
    "less_than": "expected less than {lt}",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected a string",
    "list_type": "expected a list",
    "dict_type": "expected an object",
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "too_long": "expected at most {max_length} entries",
}
"""pydantic's kinds of errors, and what was expected."""


def sentence_for(errors: Sequence[Mapping[str, Any]], whole: str, model: type[BaseModel] | None = None) -> str:
    """The first error that helps. `whole` names what is checked, `model` is asked for its keys and descriptions."""
    error = min(errors, key=_rank)
    kind, context = error["type"], error.get("ctx", {})
    key = key_of(error["loc"])
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind == "json_invalid":
        return f"{whole} is not JSON: {context.get('error', error['msg'])} at character {error['loc'][-1]}"
    if kind == "extra_forbidden":
        return _unknown(error["loc"], whole, model)
    if kind == "missing":
        return f"{key} is missing from {whole}{_meaning(error['loc'], model)}" if key else f"{whole} is missing"
    if not key and isinstance(error.get("input"), bytes):
        return f"{whole} came without the header `Content-Type: application/json`; send it as JSON, and say so"
    given = f"{key or whole} is {shown(error.get('input'))}"
    if kind == "string_pattern_mismatch":
        return f"{given}; expected {_docstring(error['loc'], model).partition(': ')[2] or context['pattern']}"
    if kind in ALLOWED:
        return f"{given}; {ALLOWED[kind].format(**_plain(context))}"
    return f"{given}; {error['msg']}"


def key_of(location: Iterable[str | int]) -> str:
    """`workers.min`, `command[2]`. What pydantic adds for unions and frameworks for bodies is left out."""
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part not in ("body", "query", "path") and part.isidentifier():
            key += f".{part}" if key else part
    return key


def shown(value: object) -> str:
    """A wrong value as it was written, not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _rank(error: Mapping[str, Any]) -> int:
    """A key that is not known explains one that is missing; what does not fit together comes last."""
    return {"extra_forbidden": 0, "value_error": 2}.get(error["type"], 1)


def _unknown(location: Sequence[str | int], whole: str, model: type[BaseModel] | None) -> str:
    name = str(location[-1])
    key = key_of([*location[:-1]]) + "." + name if key_of(location[:-1]) else name
    fields = [*_model_at(location[:-1], model).model_fields] if _model_at(location[:-1], model) else []
    near = difflib.get_close_matches(name, fields, 1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    among = "one of " if len(fields) > 1 else ""
    return f"{shown(key)[1:-1]} is not a key of {whole}{guess}; expected {among}{', '.join(fields)}"


def _model_at(location: Iterable[str | int], model: type[BaseModel] | None) -> Any:
    """The model that has the fields at a place; None where there is none."""
    for part in location:
        if model is None:
            return None
        if part == "body":
            continue
        field = model.model_fields.get(str(part))
        kind = None if field is None else field.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return model


def _docstring(location: Sequence[str | int], model: type[BaseModel] | None) -> str:
    owner = _model_at(location[:-1], model)
    field = None if owner is None else owner.model_fields.get(str(location[-1]))
    text = "" if field is None else (field.description or "").partition(". ")[0].rstrip(".")
    return text[:1].lower() + text[1:]


def _meaning(location: Sequence[str | int], model: type[BaseModel] | None) -> str:
    text = _docstring(location, model)
    return f" ({text})" if text else ""


def _plain(context: Mapping[str, Any]) -> dict[str, str]:
    """`'none', 'local' or 'kubernetes'` → `none, local or kubernetes`; 65536.0 → 65536."""
    plain = {}
    for name, value in context.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        plain[name] = text.replace("'", "") if name == "expected" else text
    return plain
