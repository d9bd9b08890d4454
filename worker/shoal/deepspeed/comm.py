"""`deepspeed.comm`, as far as a script asks it which worker it is. What travels between workers is the engine's.

The world of batch sizes is the lanes, always as many; which member a worker is changes with the world.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shoal_protos.errors import UserError

from shoal.deepspeed import rank_reads
from shoal.deepspeed.deepspeed_engine import engines
from shoal.deepspeed.lone_group import init_distributed
from shoal.deepspeed.surface import module_lacks

__all__ = ["barrier", "get_rank", "get_world_size", "init_distributed"]


def get_rank(group: None = None) -> int:
    """This member's number in the world of the moment; 0 before the first one. -1 in a warm-up, whose results are
    thrown away.
    """
    _refuse_group("get_rank", group)
    rank_reads.note()
    engine = next(iter(engines()), None)
    if engine is None:
        return 0
    return engine.global_rank if engine.elastic.warming_up else max(0, engine.global_rank)


def get_world_size(group: None = None) -> int:
    """The number of lanes. Raises `UserError` before `deepspeed.initialize`, which reads it."""
    _refuse_group("get_world_size", group)
    engine = next(iter(engines()), None)
    if engine is None:
        raise UserError(
            "deepspeed.comm.get_world_size was called before deepspeed.initialize; the number of lanes, for which "
            "batch sizes are, is known after it."
        )
    return engine.dp_world_size


def barrier(*_: Any, **__: Any) -> None:
    """Returns at once: members meet in each step's vote, and one that joins later comes to no barrier of before."""


def _refuse_group(call: str, group: object) -> None:
    if group is not None:
        raise UserError(f"deepspeed.comm.{call} got a group; every lane runs the whole model. Leave it out.")


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(f"comm.{name}")
