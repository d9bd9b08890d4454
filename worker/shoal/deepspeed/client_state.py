"""What a script saves beside the model with `engine.save_checkpoint(folder, tag, client_state)`.

A state that is registered with the engine: rank 0's is saved in elastic checkpoints and given to joiners.
"""

from __future__ import annotations

from typing import Any

from shoal_protos.errors import UserError

from shoal.checkpoint.catalogue import at
from shoal.checkpoint.plain import decode, encode

NAME = "deepspeed"
"""Under which it is registered."""


class ClientState:
    """The last one that was to be saved."""

    def __init__(self) -> None:
        self.tag: str | None = None
        self.content: dict[str, Any] = {}

    def put(self, tag: object, content: object) -> None:
        """Raises `UserError` for what no checkpoint can keep."""
        if not isinstance(content, dict | None):
            raise UserError(f"engine.save_checkpoint got a {type(content).__name__} as client_state; expected a dict.")
        encode(content or {}, {}, "client_state")
        self.tag, self.content = None if tag is None else str(tag), dict(content or {})

    def state_dict(self) -> dict[str, Any]:
        return {"tag": self.tag, "client_state": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tag, self.content = state["tag"], state["client_state"]


def saved_in(path: str) -> ClientState:
    """What a checkpoint has of it; empty for one that was saved without."""
    found, state = at(path, _nothing), ClientState()
    tree = found.manifest.states.get(NAME)
    if tree is not None:
        state.load_state_dict(decode(tree, found.reader().tensors()))
    return state


def _nothing(_: str) -> None:
    """No other folder is looked into."""
