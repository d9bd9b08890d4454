"""What a parameter is while its values are not on this worker: touching it gathers them, or says so by name.

A freed storage is no error to torch but a crash of the process; so a released parameter has a class of its own, an
attribute's write away from `nn.Parameter`. Shapes, dtypes, hooks and `.grad` can be looked at all the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.utils._pytree import tree_leaves

OnTouch = Callable[[nn.Parameter, str], None]
"""Called with a released parameter and the name of what uses it: gathers it, or raises `UserError`."""

READS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that are values, or views of them; all others are about the tensor."""
ABOUT = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "is_same_size", "untyped_storage", "data_ptr", "get_device", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__", "is_pinned", "is_shared",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_tensor",
}  # fmt: skip
"""Methods that read no value."""
PLACES = {"untyped_storage", "data_ptr"}
"""Methods that tell where values lie, for whoever reads them past torch."""

ON_TOUCH = "_shoal_on_touch"

WRAPPERS = (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (vmap, "_add_batch_dim"),
)
"""What transforms of torch.func wrap their arguments with: in C++, past `__torch_function__`."""


F = TypeVar("F", bound=Callable[..., Any])


def looks_at_no_value(function: F) -> F:
    """To such a function a released parameter is a tensor like any other: it need not be asked about each attribute."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


class Released:
    """A parameter whose storage is empty, of any class otherwise."""

    about = frozenset(ABOUT)
    otherwise: type[Tensor]
    """Its class while its values are here."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of what it is once its values are here: a copy is nobody's to bring."""
        touch(self, "__deepcopy__")
        return copy.deepcopy(self, memo)

    def as_subclass(self, cls: type[Any]) -> Any:
        """Which torch asks nobody about."""
        touch(self, "as_subclass")
        return Tensor.as_subclass(cast(Tensor, self), cls)  # by then of another class

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As if the parameter were there, once it has been gathered. Raises `UserError` where it cannot be."""
        given = kwargs or {}
        if not _is_about(func, cls.about):
            name = _name_of(func)
            while (parameter := next(_released(args, given), None)) is not None:  # to gather one may release another
                touch(parameter, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)


class ReleasedParameter(Released, nn.Parameter):
    """One of torch's own."""

    otherwise = nn.Parameter


@functools.cache
def _of_dtensors() -> type[Released]:
    """For parameters that are DTensors, whose methods may read the part that lies here past torch."""
    from torch.distributed.tensor import DTensor

    methods = {name: _touching(name) for name in ("to_local", "full_tensor", "redistribute")}
    return type("ReleasedDTensor", (Released, DTensor), {"otherwise": DTensor, **methods})


def _touching(name: str) -> Callable[..., Any]:
    def method(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        touch(self, name)
        return getattr(self, name)(*args, **kwargs)  # by then of another class

    return method


class Arriving(ReleasedParameter):
    """A parameter into whose memory values are coming."""

    about = frozenset(ABOUT - PLACES)


def touch(
    parameter: nn.Parameter | Released,  # of its own shape: a released one, until just now at least
    use: str,
) -> None:
    """Its values are here, or are said not to be, as for a function of torch's that `use` names."""
    on_touch = vars(parameter).get(ON_TOUCH)
    if on_touch is not None:  # else another thread has just brought them
        on_touch(cast(nn.Parameter, parameter), use)


def release(
    parameters: Sequence[nn.Parameter],  # each of its own shape
    on_touch: OnTouch,
    kind: type[Released] = ReleasedParameter,
) -> None:
    """Their values go, or are about to change."""
    _transforms_ask()
    for parameter in parameters:
        vars(parameter)[ON_TOUCH] = on_touch
        is_dtensor = hasattr(parameter, "_local_tensor")  # asked without their package, which most jobs never load
        parameter.__class__ = _of_dtensors() if is_dtensor else kind  # type: ignore[assignment]


def restore(parameters: Sequence[nn.Parameter]) -> None:
    """Their values are there again."""
    for parameter in parameters:
        parameter.__class__ = getattr(type(parameter), "otherwise", type(parameter))
        vars(parameter).pop(ON_TOUCH, None)


@functools.cache
def _transforms_ask() -> None:
    """From now on transforms of torch.func touch a parameter before they wrap it: once for this process."""
    for module, name in WRAPPERS:
        if hasattr(module, name):  # they are torch's own affair
            setattr(module, name, _asking(getattr(module, name)))


def _asking(wrap: F) -> F:
    @functools.wraps(wrap)
    def call(tensor: Any, *args: Any) -> Any:
        while isinstance(tensor, Released):
            touch(tensor, "torch.func")
        return wrap(tensor, *args)

    return call  # type: ignore[return-value]


def _is_about(func: Callable[..., Any], about: Collection[str]) -> bool:
    """Whether it tells or changes something other than values."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in READS
    return name in about


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _released(args: Any, kwargs: Any) -> Iterator[Released]:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and isinstance(leaf, Released):
            yield leaf
