"""What is agreed with torch's compiler, without loading it: what it must not compile, and where it is at work.

`torch._dynamo` takes as long to load as the rest of torch, some two seconds of CPU in which a joiner does nothing else.
While it is not loaded nothing can be compiled, so whoever needs no compiler never waits for it. Torch itself loads it
when an optimizer is made, and when one steps: `leave_unloaded` makes that wait too
(docs/decisions/0031-the-compiler-is-loaded-by-who-compiles.md). No other file of Shoal imports `torch._dynamo`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., Any])

COMPILER = "torch._dynamo"
_LEFT_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
_DISABLED = "__dynamo_disable"
"""Where `torch._compile` keeps the form of a function that is left alone; where there is none it loads the compiler."""


def is_loaded() -> bool:
    """Whether anything can be compiled."""
    return COMPILER in sys.modules


def is_in_compiled_module() -> bool:
    """Whether the call at hand came by a module that `torch.compile` has made."""
    return is_loaded() and bool(sys.modules[COMPILER].eval_frame._is_in_optimized_module())


def is_compiling_calls() -> bool:
    """Whether what the frame at hand calls is to be compiled, or was."""
    return get_eval_frame_callback() is not None


def has_compiled() -> bool:
    """Whether anything was compiled in this process, or is to be: such code reads parameters past their class."""
    frames, asked = sys.modules.get(f"{COMPILER}.convert_frame"), sys.modules.get(f"{COMPILER}.eval_frame")
    if frames is not None and frames.FRAME_COUNTER:
        return True
    backends = getattr(asked, "cached_backends", {}).values()  # torch may rename it; None where it compiles nothing
    return any(map(callable, backends))


def call_before_compiling(call: Callable[[], None]) -> None:
    """From now on `call` comes before whatever `torch.compile` is asked for; `Module.compile` asks it too. Once for a
    process. The function's code is replaced and not its name, by which a script may have imported it; the name, where
    the script has put a function of its own there.
    """
    entry = torch.compile
    own = _copy_of(entry) if isinstance(entry, FunctionType) and entry.__closure__ is None else entry

    def ask_first(*args: Any, **kwargs: Any) -> Any:
        call()
        return own(*args, **kwargs)

    if own is entry:
        torch.compile = wraps(entry)(ask_first)
        return
    _asked.append(ask_first)
    entry.__dict__["__wrapped__"] = own  # whose signature it has
    entry.__defaults__ = entry.__kwdefaults__ = None
    entry.__code__ = _asking.__code__


_asked: list[Callable[..., Any]] = []
"""What stands for `torch.compile`."""


def _asking(*args: Any, **kwargs: Any) -> Any:
    """The code of `torch.compile` then, which runs among the names of torch."""
    from shoal.process.compiler import _asked

    return _asked[0](*args, **kwargs)


def _copy_of(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    return copy


def uncompiled(function: F, reason: str = "") -> F:
    """Not compiled, nor anything that it calls. `reason`: what the compiler says where it must not stop here.

    As `torch.compiler.disable`, but where nothing is being compiled it costs nothing to say so.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        if get_eval_frame_callback() is None:
            return function(*args)
        before = set_eval_frame(None)
        try:
            return function(*args)
        finally:
            set_eval_frame(before)

    if reason:
        call.__dict__["_torchdynamo_disable_msg"] = reason
    return uncompiled_frame(call)  # type: ignore[return-value]


def uncompiled_frame(function: F) -> F:
    """Itself alone. Not `torch.compiler.disable`, whose wrapper costs as much as most of what is called here; as
    `torch._dynamo.skip`.
    """
    set_code_exec_strategy(function.__code__, _LEFT_ALONE)
    function.__dict__["_torchdynamo_disable"] = True
    return function


def leave_unloaded() -> None:
    """From now on optimizers of torch load no compiler, and once it is loaded they are as they were."""
    if is_loaded():
        return
    for kept in vars(Optimizer).values():
        own = _within(kept, "_disable_dynamo")
        if own is not None and not hasattr(own, _DISABLED):
            setattr(own, _DISABLED, _as_it_is(own, kept))
    for kind in vars(torch.optim).values():
        step: Any = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        own = _within(step, "_use_grad_for_differentiable")
        if own is not None:
            kind.step = _step_of(own, step)


def _within(made: Any, by: str) -> Callable[..., Any] | None:
    """The function that `by` has put this one around; None: it has not."""
    code = getattr(made, "__code__", None)
    is_from = code is not None and code.co_qualname.startswith(f"{by}.<locals>.")
    return getattr(made, "__wrapped__", None) if is_from else None


def _as_it_is(own: Callable[..., Any], kept: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_loaded():
            return own(*args, **kwargs)
        vars(own).pop(_DISABLED, None)
        return kept(*args, **kwargs)

    return call


def _step_of(own: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_loaded():
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return own(self, *args, **kwargs)

    return call
