"""`deepspeed.zero`: models that are built without memory, and parameters that are elsewhere. Named as in DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from shoal_protos.errors import UserError
from torch import nn

from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine, engine_with
from shoal.first_values.building import deferred


def Init(module: nn.Module | None = None, *, enabled: bool = True, **settings: Any) -> AbstractContextManager[None]:
    """A context in which a model is built without memory (`shoal.deferred`).

    The other settings of DeepSpeed's say where and how it spreads parameters, which the engine decides later.
    """
    del settings
    return deferred() if enabled and module is None else nullcontext()


def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None, *, enabled: bool = True, **_: Any
) -> AbstractContextManager[None]:
    """A context in which these parameters can be read whole. Raises `UserError` where they are to be changed."""
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    if not enabled or not given:
        return nullcontext()
    engine = engine_with(given[0])
    if engine is None and any(parameter.is_meta for parameter in given):
        raise UserError(
            "deepspeed.zero.GatheredParameters was asked for parameters that have no values yet; say what they begin "
            "with where the model is built (shoal.deferred(init=…), docs/sharded_parameters.md)."
        )
    if engine is None:
        return nullcontext()
    if modifier_rank is not None:
        raise UserError(
            "deepspeed.zero.GatheredParameters got a modifier_rank after deepspeed.initialize; the engine alone "
            "changes parameters then. Change them before, or leave modifier_rank out to read them."
        )
    return _gathered(engine, given)


@contextmanager
def _gathered(engine: DeepSpeedEngine, given: list[nn.Parameter]) -> Iterator[None]:
    wanted = {id(parameter) for parameter in given}
    modules = [
        module
        for module in engine.module.modules()
        if any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
    ]
    with engine.elastic.gathered(*modules):
        yield
