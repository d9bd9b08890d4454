"""What of a configuration its models check. The rest is DeepSpeed's, or unknown: it is left alone, or refused by name.

Called by `load.py`, before the models (`document.py`) see the file; `deepspeed.py` says what becomes of DeepSpeed's
keys. A key that neither Shoal nor DeepSpeed reads does no harm and is told in the log, but where it is one edit from a
known one, somebody counts on it. The section `shoal` is not sifted: its models refuse every key that they do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shoal_protos.config_file import whole
from shoal_protos.text import shown_name
from shoal_protos.validation import MOST_READ

from shoal.config.deepspeed import FATES, OFF, VALUES_REFUSED, Ignored, Switched, Unsupported
from shoal.config.document import Checkpoint, Document
from shoal.config.sentences import ELSEWHERE, keys_of, not_built, refused_value, unknown_key, wrong_value

OURS = frozenset(keys_of(Document))
KNOWN = OURS | FATES.keys()
OUR_SECTIONS = frozenset(key.rpartition(".")[0] for key in OURS) - {""}
"""Dotted names of the models' sections."""
SECTIONS = frozenset(key.rpartition(".")[0] for key in KNOWN) - {""}
"""And of those that only DeepSpeed has."""


@dataclass(slots=True)
class Sifted:
    """What a file says, in parts. Keys are dotted."""

    faults: list[str]
    """Sentences."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What the models must check."""
    left_alone: list[str] = field(default_factory=list)
    """Keys of DeepSpeed's that mean nothing here."""
    unknown: list[str] = field(default_factory=list)
    """Keys that are not read."""
    misplaced: dict[str, str] = field(default_factory=dict)
    """Such keys that are read elsewhere, and where."""


def sift(given: Mapping[str, Any], faults: list[str]) -> Sifted:
    """The parts of a file; what is refused is added to `faults`."""
    found = Sifted(faults)
    found.kept = _sift_section(given, "", found)
    return found


def _sift_section(given: Mapping[str, Any], section: str, found: Sifted) -> dict[str, Any]:
    """What the models must check of one section."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{section}.{key}" if section else key
        fate = FATES.get(name)
        if name in VALUES_REFUSED and _is_among(value, VALUES_REFUSED[name][0]):
            found.faults.append(refused_value(name, value, VALUES_REFUSED[name][1]))
        elif isinstance(fate, Ignored):
            misplaced = _of_the_section_shoal(name, value)
            found.faults += misplaced
            found.left_alone += [] if misplaced else [name]
        elif isinstance(fate, Unsupported):
            if not _is_among(value, fate.off):
                found.faults.append(not_built(name, value, fate.why))
        elif isinstance(fate, Switched):
            if is_on(value, fate):
                found.faults.append(not_built(name, value, fate.why))
            else:
                _refuse_a_misspelt_switch(value, name, fate.switch, found)
        elif name == "shoal" or (name in OURS and name not in OUR_SECTIONS):
            kept[key] = value
        elif name not in SECTIONS:
            _sort_unknown(name, value, found)
        elif isinstance(value, Mapping):
            if f"{name}.enabled" in OURS and not is_on(value):
                _refuse_a_misspelt_switch(value, name, "enabled", found)
            elif inner := _sift_section(value, name, found):
                kept[key] = inner
        elif value is not None:
            found.faults.append(wrong_value(name, value, "an object {…}"))
    return kept


HAS_A_SWITCH = Switched(why="")
"""As the sections have one that the models know."""


def is_on(value: object, by: Switched = HAS_A_SWITCH) -> bool:
    """Whether a section asks for its feature."""
    if not isinstance(value, Mapping):
        return not _is_among(value, OFF)
    if by.switch and (by.switch not in value or _is_among(value[by.switch], by.off)):
        return False
    return not by.in_parts or any(map(_is_part_on, value.values()))


def _is_part_on(value: object) -> bool:
    """Of what stands in a section: whether it is a section that is on, or has no switch and holds one that is on."""
    if not isinstance(value, Mapping):
        return False
    return is_on(value) if "enabled" in value else any(map(_is_part_on, value.values()))


def _is_among(value: object, values: tuple[object, ...]) -> bool:
    """`True` is not 1 here, and 1.0 is."""
    value = whole(value)
    return any(value is one or (type(value) is type(one) and value == one) for one in values)


def _refuse_a_misspelt_switch(value: object, section: str, switch: str, found: Sifted) -> None:
    """What stands in a section that is off is not looked at, but for what was to switch it on."""
    if not isinstance(value, Mapping) or switch in value:
        return
    for key in value:
        if is_one_edit(key, switch):
            found.faults.append(unknown_key(f"{section}.{key}", value[key], f"{section}.{switch}"))


def _sort_unknown(name: str, value: object, found: Sifted) -> None:
    """The nearest known key is looked for only of the first few."""
    if len(found.faults) + len(found.unknown) + len(found.misplaced) > MOST_READ:
        found.unknown.append(shown_name(name))
    elif meant := _one_edit_away(name):
        found.faults.append(unknown_key(name, value, meant))
    elif place := _where_it_is_read(name):
        found.misplaced[name] = place
    else:
        found.unknown.append(shown_name(name))


def _one_edit_away(name: str) -> str | None:
    """The known key of the same section that was meant."""
    section, _, key = name.rpartition(".")
    meant = next((other for other in _names_in(section) if is_one_edit(key, other)), None)
    return f"{section}.{meant}" if section and meant else meant


@cache
def _names_in(section: str) -> tuple[str, ...]:
    return tuple(key.rpartition(".")[2] for key in sorted(KNOWN) if key.rpartition(".")[0] == section)


def is_one_edit(one: str, other: str) -> bool:
    """Whether one character too many, too few, wrong or in the place of its neighbour makes two names differ, capitals
    and dashes for underscores aside.
    """
    one, other = (name.lower().replace("-", "_") for name in (one, other))
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
    one, other = one[same:], other[same:]
    swapped = one[:2] == other[1::-1] and one[2:] == other[2:]
    return one[1:] == other[1:] or one[1:] == other or one == other[1:] or swapped


def _where_it_is_read(name: str) -> str | None:
    """The key that this one is called elsewhere: by other programs, or the only one of this name."""
    last = name.rpartition(".")[2]
    same = [other for other in KNOWN - SECTIONS if other.rpartition(".")[2] == last]
    return ELSEWHERE.get(name) or (same[0] if len(same) == 1 else None)


def _of_the_section_shoal(name: str, value: object) -> list[str]:
    """DeepSpeed has a section `checkpoint` too, whose keys mean nothing here; ours are looked for under `shoal`."""
    if name != "checkpoint" or not isinstance(value, Mapping):
        return []
    ours = [key for key in value if key in Checkpoint.model_fields]
    return [
        f"`checkpoint.{key}` is given at the top level, where it has no meaning; did you mean `shoal.checkpoint.{key}`?"
        for key in ours
    ]
