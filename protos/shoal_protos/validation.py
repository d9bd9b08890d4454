"""What is wrong with a document, in sentences: the key, what was given, what was expected, the nearest right key.

pydantic finds what is wrong and says it for programmers; here its findings become sentences for users, in one
vocabulary for training configs, job specs, settings and manifests. A sentence has no full stop: whoever shows several
of them adds one to each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shoal_protos.text import shown, shown_name

BULLET = "\n  - "
"""Between the sentences of one message."""
MOST_FAULTS = 20
"""SeveralFaults that are listed, of however many."""
MOST_READ = 200
"""Faults that become sentences at all: each takes its time, and a stranger may send tens of thousands."""

Fault = Mapping[str, Any]
"""One entry of pydantic's `ValidationError.errors()`."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a field may have, as the end of the sentence "expected …". Annotates the field."""

    text: str


class SeveralFaults(ValueError):
    """Several things that a validator has found at once, each a sentence. Raised by validators of models."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = tuple(sentences)


def raise_all(sentences: Iterable[str]) -> None:
    """Raises `SeveralFaults` where there are any."""
    if found := list(sentences):
        raise SeveralFaults(found)


@dataclass(frozen=True, slots=True)
class Unshown:
    """Annotates a field whose values no sentence repeats, because they may be secrets. Nor does one repeat what stands
    under an unknown key beside it, which may be this field's name misspelt.
    """


BY_TYPE = {
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_unicode": "a string of Unicode characters",
    "string_pattern_mismatch": "a match of {pattern}",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object {{…}}",
    "model_type": "an object {{…}}",
    "model_attributes_type": "an object {{…}}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "too_long": "at most {max_length} entries",
}
"""pydantic's types of errors, and what was expected, where the field has no `Allowed`."""


def kind_of(value: object) -> str:
    """In place of a value that is not shown."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    kinds = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "something else")


def wrong_value(key: str, value: object, allowed: str) -> str:
    return f"`{key}` is {shown(value)}; expected {allowed}"


def unknown_key(section: str, name: str, given: str, allowed: Iterable[str], guess: str | None) -> str:
    """`given`: what is shown of its value. `allowed`: the keys of the section ("": the top level). `guess`: the whole
    key that was probably meant.
    """
    known = sorted(allowed)
    refused = f"`{_key(section, shown_name(name))}` is an unknown key (given: {given})"
    hint = f"; did you mean `{guess}`?" if guess else ""
    if not known:
        return refused + hint
    place = f"in `{section}`" if section else "at the top level"
    return f"{refused}{hint or '.'} Allowed {place} {'are' if len(known) > 1 else 'is'} {', '.join(known)}"


def sentence(fault: Fault, whole: str, model: type[BaseModel] | None = None, section: str = "") -> str:
    """What is wrong. `whole` names what is checked; `model`, which stands in `section` of it, knows what is allowed."""
    kind, context, location = fault["type"], fault.get("ctx", {}), fault["loc"]
    if kind == "value_error":
        return str(context.get("error", fault["msg"]))
    if kind == "json_invalid":
        where = f" at character {location[-1]}" if location else ""
        return f"{whole} is not JSON: {context.get('error', fault['msg'])}{where}"
    if kind == "extra_forbidden":
        place, guess = _guess(fault, model, section)
        _, _, holder = find(location[:-1], model, section)
        name, known = str(location[-1]), [*keys_of(holder)]
        given = shown(fault["input"])
        if holder and any(map(_is_unshown, holder.model_fields.values())) and not _is_plain(fault["input"]):
            given = kind_of(fault["input"])
        return unknown_key(place, name, given, known, guess)
    key, field, _ = find(location, model, section)
    allowed = allowed_in(field) or BY_TYPE.get(kind, "").format(**_plain(context))
    if kind == "missing":
        wanted = f"; expected {allowed}" if allowed else ""
        return f"`{key}` is missing from {whole}{wanted}" if key else f"{whole} is missing"
    value = fault.get("input")
    given = f"{f'`{key}`' if key else whole} is {kind_of(value) if _may_be_secret(location, model) else shown(value)}"
    return f"{given}; expected {allowed}" if allowed else f"{given}: {fault['msg']}"


def every_sentence(
    faults: Sequence[Fault], whole: str, model: type[BaseModel] | None = None, given: object = None
) -> str:
    """All that is wrong: one sentence, or a list of them. Unknown keys come first: they explain what is missing.

    `given`: the document, as it was checked. With it also what does not fit together in the rest of it is found, which
    pydantic looks for only where nothing else is wrong.
    """
    found: list[str] = []
    read = sorted(faults, key=_rank)[:MOST_READ]
    guessed = {_guess(fault, model)[1] for fault in read if fault["type"] == "extra_forbidden"}
    for fault in read:
        if fault["type"] != "missing" or find(fault["loc"], model)[0] not in guessed:
            found += _sentences(fault, whole, model)
    if model is not None and isinstance(given, dict) and len(read) == len(faults):
        found += _unfit(faults, whole, model, given)
    return all_of(_without_repeats(dict.fromkeys(found)), whole, len(faults) - len(read))


def all_of(sentences: Sequence[str], whole: str, unread: int = 0) -> str:
    """One sentence, or a list of them. `unread`: further faults, of which no sentence was made."""
    count = len(sentences) + unread
    if count == 1:
        return sentences[0]
    more = [f"… and {count - MOST_FAULTS} more"] if count > MOST_FAULTS else []
    return BULLET.join([f"{whole} has {count} faults:", *sentences[:MOST_FAULTS], *more])


def each_of(message: str) -> list[str]:
    """The sentences that `all_of` has made one message of."""
    _, *sentences = message.split(BULLET)
    return sentences or [message]


def find(
    location: Iterable[str | int], model: type[BaseModel] | None, section: str = ""
) -> tuple[str, FieldInfo | None, type[BaseModel] | None]:
    """The key that a location means (`workers.min`, `command[2]`), its field, and the model that is there.

    What pydantic adds for unions is left out, and so is a place within a value that `Allowed` describes as a whole.
    """
    key, field = section, None
    for part in location:
        if allowed_in(field):
            break
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        field = keys_of(model).get(part)
        model = model_in(field)
        if field is not None or part.isidentifier():
            key = _key(key, part)
    return key, field, model


def model_in(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model that a field holds, None where it holds a plain value."""
    for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if field else ():
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def keys_of(model: type[BaseModel] | None) -> dict[str, FieldInfo]:
    """The fields of a model by their keys in a document, which may be written otherwise than their names in Python."""
    return {field.alias or name: field for name, field in model.model_fields.items()} if model else {}


def allowed_in(field: FieldInfo | None) -> str:
    """How the sentence "expected …" ends for a field that has an `Allowed`; else empty."""
    return next((mark.text for mark in field.metadata if isinstance(mark, Allowed)), "") if field else ""


def _guess(fault: Fault, model: type[BaseModel] | None, section: str = "") -> tuple[str, str | None]:
    """Of an unknown key: the section that it stands in, and the whole key that was probably meant."""
    place, _, holder = find(fault["loc"][:-1], model, section)
    near = difflib.get_close_matches(str(fault["loc"][-1]), [*keys_of(holder)], 1)
    return place, _key(place, near[0]) if near else None


def _sentences(fault: Fault, whole: str, model: type[BaseModel] | None) -> Sequence[str]:
    """What a fault says: several sentences where a validator has found several."""
    error = fault.get("ctx", {}).get("error")
    return error.sentences if isinstance(error, SeveralFaults) else [sentence(fault, whole, model)]


def _without_repeats(sentences: Iterable[str]) -> list[str]:
    """Which keys are allowed in a section is said once."""
    kept, seen = [], set()
    for one in sentences:
        beginning, separator, allowed = one.partition(" Allowed ")
        kept.append(beginning.removesuffix(".") if allowed in seen else one)
        if separator:
            seen.add(allowed)
    return kept


def what_is_left(given: Mapping[str, Any], faults: Sequence[Fault], model: type[BaseModel]) -> tuple[Any, set[str]]:
    """A document without its faults, and the whole keys of these: a further fault that names one may come of that."""
    left: Any = given
    keys: set[str] = set()
    for fault in faults:
        keys.add(find(fault["loc"], model)[0].partition("[")[0])
        if fault["type"] == "extra_forbidden" and (meant := _guess(fault, model)[1]):
            keys.add(meant)
        left = _without(left, _entry_at(given, fault["loc"]))
    return left, keys - {""}


def _unfit(faults: Sequence[Fault], whole: str, model: type[BaseModel], given: Mapping[str, Any]) -> Iterator[str]:
    """What does not fit together in what is left of a document without its faults, where that can be checked."""
    left, keys = what_is_left(given, faults, model)
    try:
        model.model_validate(left)
    except ValidationError as error:
        for fault in error.errors():
            if fault["type"] == "value_error":
                sentences = _sentences(fault, whole, model)
                yield from (one for one in sentences if not any(f"`{key}`" in one for key in keys))


def _entry_at(document: Any, location: Sequence[str | int]) -> Sequence[str | int]:
    """Where the entry stands that is at a place, or that holds it: in a list, or where nothing is.

    It is looked for in the whole document: several faults may be of one entry, one for each kind of a union.
    """
    for depth, part in enumerate(location):
        if not isinstance(document, dict) or part not in document:
            return location[:depth]
        document = document[part]
    return location


def _without(document: Any, place: Sequence[str | int]) -> Any:
    """A document without an entry, which may be gone already."""
    if not place or not isinstance(document, dict) or place[0] not in document:
        return document
    name, *below = place
    if below:
        return {**document, name: _without(document[name], below)}
    return {other: value for other, value in document.items() if other != name}


def _is_unshown(field: FieldInfo) -> bool:
    return any(isinstance(mark, Unshown) for mark in field.metadata)


def _is_plain(value: object) -> bool:
    """A number, true, false or null, as which no secret is written."""
    return value is None or isinstance(value, bool | int | float)


def _may_be_secret(location: Iterable[str | int], model: type[BaseModel] | None) -> bool:
    """Whether a place is within a field that is not shown, or is the whole of a model that has one."""
    field: FieldInfo | None = None
    for part in location:
        field = keys_of(model).get(str(part))
        if field is not None and _is_unshown(field):
            return True
        model = model_in(field)
    return model is not None and any(map(_is_unshown, model.model_fields.values()))


def _key(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _rank(fault: Fault) -> int:
    """What does not fit together comes last."""
    return {"extra_forbidden": 0, "value_error": 2}.get(fault["type"], 1)


def _plain(context: Mapping[str, Any]) -> dict[str, str]:
    """`'none', 'local' or 'kubernetes'` → `none, local or kubernetes`; 65536.0 → 65536."""
    plain = {}
    for name, value in context.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        plain[name] = text.replace("'", "") if name == "expected" else text
    return plain
