"""What DeepSpeed has and Shoal does not: an attribute that is missing says so by name, with what to do instead."""

from __future__ import annotations

from shoal_protos.errors import UserError

from shoal.deepspeed.surface import ABSENT, OTHERS

PAGE = "docs/deepspeed.md says what there is"


class NotInShoal(UserError, AttributeError):
    """An `AttributeError` too, so that `hasattr` answers."""


def engine_lacks(name: str) -> NotInShoal:
    why = ABSENT.get(name, PAGE)
    return NotInShoal(f"engine.{name} of DeepSpeed is not in Shoal, nor does the model have it; {why}.")


def module_lacks(name: str) -> NotInShoal:
    """`name`: of a module within it with that module's."""
    why = OTHERS.get(name) or OTHERS.get(name.partition(".")[0], PAGE)
    return NotInShoal(f"deepspeed.{name} is not in Shoal; {why}.")
