"""Turns: groups of one optimizer that are stepped in turn, as the networks of a GAN or of an actor and its critic are.

Whose turn it is stands in the groups beside rates and decays, so the vote compares it, and joiners, members without
lanes and checkpoints take it over as they do these. Set by `engine.turn`, at the top of the loop's body.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal_protos.errors import UserError

NAME, TURN = "name", "turn"
"""Keys of an optimizer's group."""


def has_turn(group: Mapping[str, Any]) -> bool:
    """Whether the next update is one of this group."""
    return bool(group.get(TURN, True))


def set_turn(groups: Sequence[dict[str, Any]], names: Collection[str]) -> None:
    """From now on only these groups are updated. Raises `UserError` for names that no group has."""
    known = [str(group[NAME]) for group in groups if NAME in group]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        have = ", ".join(dict.fromkeys(known)) or 'none (give each a "name" beside its "params")'
        raise UserError(
            f"engine.turn got {', '.join(map(repr, unknown)) or 'no name'}; expected names of the optimizer's groups: "
            f"{have}."
        )
    for group in groups:
        group[TURN] = group.get(NAME) in names
