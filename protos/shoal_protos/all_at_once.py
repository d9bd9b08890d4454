"""Several checks of one call, all that is wrong said in one message. Commands and `shoal.initialize` refuse by it.

Nothing heavy may be imported here before something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shoal_protos.errors import UserError

Checked = ParamSpec("Checked")
Found = TypeVar("Found")


class Refusals:
    """What is refused of a call's arguments by checks that do not depend on each other."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._sentences: list[str] = []

    def of(self, check: Callable[Checked, Found], *args: Checked.args, **kwargs: Checked.kwargs) -> Found | None:
        """What `check` returns; None where it refuses."""
        try:
            return check(*args, **kwargs)
        except UserError as error:
            from shoal_protos.validation import each_of

            self._sentences += each_of(str(error))
            return None

    def raise_all(self) -> None:
        """Raises `UserError` where anything was refused."""
        if self._sentences:
            from shoal_protos.validation import all_of

            raise UserError(all_of(self._sentences, self._call))
