"""What an operator would ask for, as the query of a preview has it: the requests of the routes that carry them out.

The bodies of those routes say what is valid; so do the limits here. Annotations are read at the import: none is a text.
"""

from dataclasses import dataclass, fields
from typing import Annotated

from fastapi import Depends, Query
from shoal_protos.acts import Act, OperatorRequest
from shoal_protos.errors import UserError

from shoal_controller.api.models import MOST_WORKERS

MOST_NAME = 300


def _acts_with(name: str) -> str:
    return " and ".join(f"`{act}`" for act in Act if name in _names(act))


def _names(act: Act) -> set[str]:
    return {field.name for field in fields(act.asks)}


@dataclass(frozen=True, slots=True)
class AskedAct:
    """The query of a preview."""

    act: Annotated[Act, Query(description="What would be asked for.")]
    workers: Annotated[
        int | None, Query(ge=1, le=MOST_WORKERS, description=f"Of {_acts_with('workers')}: how many workers.")
    ] = None
    worker: Annotated[
        str | None, Query(max_length=MOST_NAME, description=f"Of {_acts_with('worker')}: id of the worker.")
    ] = None

    def request(self) -> OperatorRequest:
        """Raises `UserError` where something is missing."""
        names = _names(self.act)
        if "workers" in names and self.workers is None:
            raise UserError(f"`workers` is missing; expected a whole number from 1 to {MOST_WORKERS} to scale to")
        if "worker" in names and not self.worker:
            raise UserError(f"`worker` is missing; expected the id of the worker that {self.act} concerns, such as w3")
        given = {"workers": self.workers, "worker": self.worker}
        return self.act.asks(**{name: value for name, value in given.items() if name in names})


AnAct = Annotated[AskedAct, Depends(AskedAct)]
