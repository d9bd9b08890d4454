"""The stages of a pipeline's model: those of this process with values, all others without.

Each process builds its own stages. What the others' parameters are like it must know, too, before there is anybody whom
it could ask: the job's layout is of all stages. So every stage is built everywhere, by the script's own function, and
the others on the meta device, where they take no memory. Made by `Cell.stages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import nn

from shoal.data.seeds import RandomState, seed_from

Purpose = tuple[int, bool]
"""What a schedule is called for: so many samples, and whether a backward follows."""


class StageShapes:
    """What passes between the stages of one process and their neighbours, as their handshakes have found it."""

    def __init__(self) -> None:
        self.found: dict[Purpose, list[Any] | None] = {}  # by stage; None where schedules differ in it
        self._generation, self._learnt = 0, dict[Purpose, list[Any]]()
        """What another process of this coordinate knew when the world of that generation began."""

    @property
    def are_known(self) -> bool:
        """Whether stages have shaken hands here, by schedules that are alike, so that others can be told."""
        return bool(self.found) and all(self.found.values())

    def find(self, purpose: Purpose, found: list[Any]) -> None:
        """A schedule of training has shaken hands."""
        self.found[purpose] = found if self.found.get(purpose, found) == found else None

    def learn(self, generation: int, found: dict[Purpose, list[Any]]) -> None:
        """Another process has found them. They hold in the world of that generation."""
        self._generation, self._learnt = generation, found

    def learnt(self, generation: int, purpose: Purpose) -> list[Any] | None:
        """What is known so in the world of a generation, by stage."""
        return self._learnt.get(purpose) if generation == self._generation else None


class Stages(nn.ModuleDict):
    """The stages of one process, by their numbers as text, as `shoal.initialize` takes them for its model."""

    def __init__(self, everywhere: list[list[nn.Module]], place: int) -> None:
        """`everywhere`: the stages of each place of the pipeline. `place`: this process's own."""
        places = len(everywhere)
        self.places = [
            self if one == place else nn.ModuleDict(_numbered(stages, one, places))
            for one, stages in enumerate(everywhere)
        ]
        """By place, what it has: modules without values, but for this one."""
        self.count = sum(map(len, everywhere))
        """Of the whole pipeline."""
        self.shapes = StageShapes()
        super().__init__(_numbered(everywhere[place], place, places))


def places_of(model: nn.Module) -> list[nn.Module]:
    """What each place of a pipeline has of a model; without one, the model."""
    return list(model.places) if isinstance(model, Stages) else [model]


def shapes_of(model: nn.Module) -> StageShapes:
    """What passes between its stages. Raises `TypeError` for a model that has none."""
    if not isinstance(model, Stages):
        raise TypeError(f"{type(model).__name__} has no stages")
    return model.shapes


def _numbered(stages: list[nn.Module], place: int, places: int) -> dict[str, nn.Module]:
    return {str(place + places * turn): stage for turn, stage in enumerate(stages)}


def built_stages(build: Callable[[int], nn.Module], count: int, place: int, places: int) -> Stages:
    """The stages of one process. Raises `UserError` as `built_everywhere`."""
    return Stages(built_everywhere(build, count, place, places), place)


def built_everywhere(build: Callable[[int], nn.Module], count: int, place: int, places: int) -> list[list[nn.Module]]:
    """What `build(number)` makes of all stages, by place. Stage `n` is at place `n % places`, as torch's schedules have
    it; each draws random numbers of its own, the same wherever it is built. Raises `UserError`.
    """
    if count < places or count % places:
        raise UserError(
            f"cell.stages is given {count} stages, and the cell's pipeline has {places} places; expected as many, or "
            "a multiple of them."
        )
    drawn, outside = int(torch.randint(1 << 62, ())), RandomState.save()
    everywhere: list[list[nn.Module]] = [[] for _ in range(places)]
    try:
        for number in range(count):
            seed_from(f"{drawn} stage {number}")
            is_own = number % places == place
            with torch.device("cpu" if is_own else "meta"):
                stage = build(number)
            if not isinstance(stage, nn.Module):
                raise UserError(
                    f"cell.stages is given a function that made a {type(stage).__name__} of stage {number}; expected "
                    "an nn.Module."
                )
            everywhere[number % places].append(stage)
    finally:
        outside.restore()
    _refuse_ties(everywhere)
    return everywhere


def _refuse_ties(everywhere: list[list[nn.Module]]) -> None:
    """Raises `UserError` for a parameter that stages of two places have."""
    seen: dict[int, int] = {}
    for place, stages in enumerate(everywhere):
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if seen.setdefault(id(parameter), place) != place:
                    raise UserError(
                        f'parameter "{name}" is in stages of two places of the pipeline; make one for each stage '
                        "within the function. If they are to stay equal, mark both by shoal.tied(parameter, name)."
                    )
