"""Calls of a model's modules, where their parameters come and go: who is told that a forward begins and ends.

Every module that has parameters, or holds modules that do, gets a `forward` of its instance around its own. The first
call that is made while no other is under way is the outermost one; whatever fails in it because the world changes is
run again there. As in activation_checkpointing.py, what is put on a module is a function of this file, so that copies
and pickled modules go on with their class's own `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

from shoal.process.compiler import uncompiled_frame

OWN_FORWARD = "_forward_before_units"
"""Where a module keeps a `forward` that it had besides its class's."""


class CallListener(Protocol):
    """Who is told."""

    def around(self, module: nn.Module, forward: Callable[[], Any]) -> Any:
        """A call of `module`: `forward()` is its own. Returns the call's result."""


_MADE: WeakKeyDictionary[type[nn.Module], Callable[..., Any]] = WeakKeyDictionary()
_LISTENERS: WeakKeyDictionary[nn.Module, ReferenceType[CallListener]] = WeakKeyDictionary()
"""A listener keeps its modules, so it is not kept for them: else none of both would ever go."""


def listen(modules: list[nn.Module], listener: CallListener) -> None:
    """From now on `listener` is around every call of these modules."""
    for module in modules:
        _LISTENERS[module] = ref(listener)
        before = vars(module).get("forward")
        if getattr(before, "_shoal_is_around", False):
            continue
        if before is not None:
            vars(module)[OWN_FORWARD] = before
        vars(module)["forward"] = MethodType(_around(type(module)), module)


def _around(kind: type[nn.Module]) -> Callable[..., Any]:
    """One for each class: what reads the signature of a `forward` finds the class's."""
    if kind not in _MADE:
        _MADE[kind] = _make(kind)
    return _MADE[kind]


def _make(kind: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get(OWN_FORWARD)
        bound = MethodType(kind.forward, self) if own is None else own
        known = _LISTENERS.get(self)
        listener = known() if known is not None else None
        if listener is None:  # of a copy, or the engine has gone
            return bound(*args, **kwargs)
        return listener.around(self, functools.partial(bound, *args, **kwargs))

    forward.__dict__["_shoal_is_around"] = True
    return uncompiled_frame(forward)
