"""An object of a controller's answer, as its clients read it: in place of a `KeyError` the sentence that explains it.

Made by the command's client (`cli/client.py`) and by `shoal.client`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal_protos.errors import ShoalError
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

Unread = Callable[[str], ShoalError]
"""What is wrong with an answer → the error."""


class AnswerObject(dict[str, Any]):
    """Where a key is missing, the controller is of another release, or is no controller."""

    def __init__(self, unread: Unread, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.unread = unread

    def __missing__(self, key: str) -> Any:
        raise self.unread(f"it has no {key}")


def is_list_of_objects(value: Any) -> bool:
    """Whether it is what a list of jobs, workers or events looks like."""
    return isinstance(value, list) and all(isinstance(one, AnswerObject) for one in value)


def unread_answer(url: str, request: str, release: str, why: str = "") -> str:
    """What a client says of an answer that it cannot read. `release`: the controller's, from `RELEASE_HEADER`."""
    found = f"{url} returned an unknown answer to {request}{f' ({why})' if why else ''}"
    if not release:
        return f"{found}; is it a Shoal controller? This is {of_shoal(RELEASE)}"
    return f"{found}; its controller is of {of_shoal(release)}, this is {of_shoal(RELEASE)}. Use one release for both"
