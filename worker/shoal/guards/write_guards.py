"""That a module still has its parameters in the flats, and that its script writes neither to them nor to gradients.

A module that was cut off from its flats trains nothing; a parameter that a script changes is changed on one worker
only; a gradient that it changes between `engine.backward` and `engine.step` may have left for its owner. Each would be
other bits without a word, so it is looked for and refused in a sentence. Writes are seen by tensors' version counters;
those past them (`.data`, numpy) by comparing one window of the flats, another one each time.

`ModuleGuard` looks once a step. `UnitWatch` and `ShownWatch` look for writes past autograd to parameters that come and
go: a window is compared as it is when its unit has come, and when that is freed; of parameters that are seen in their
owners' memory the kernel says which pages were written to, and what is written there stays, so it is asked for all of
them in each step. Called by gathered_units.py. `GradientGuard` looks in each micro-batch, at what lies at `.grad` too.

Where gradients were taken already there is no `.grad` to look at. With None there, `clip_grad_norm_` and all else that
passes over parameters without a gradient would do nothing, and say nothing. So a `TakenGradient` is there, and every
use of it is refused in a sentence. It is sparse without a value: it takes no memory, and a backward pass of the
script's own puts another tensor in its place rather than adding to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks import unit_flats
from shoal.blocks.flat import BEFORE, Flats, Gradients, moved, versions
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.released import looks_at_no_value
from shoal.blocks.shared_weights import MappedFlats
from shoal.core.layout import Layout
from shoal.exchange.pieces import Extent
from shoal.exchange.vote import Record
from shoal.guards.step_guard import Checksum, Comparisons, StepGuard, checksums

WINDOW_ELEMENTS = 1 << 14

_REQUIRES = attrgetter("requires_grad")
"""Mapped over all parameters in each step: without a line of Python for each."""
_KEY = attrgetter("_cdata")
"""Of a storage: as `storage_key` has it."""


class Windows:
    """One window of the flats after the other."""

    def __init__(self, flats: Flats) -> None:
        self._places = [
            Extent(bucket, start, min(start + WINDOW_ELEMENTS, flat.numel()))
            for bucket, flat in enumerate(flats)
            for start in range(0, flat.numel(), WINDOW_ELEMENTS)
        ]
        self._at = 0

    def turn(self) -> None:
        self._at = (self._at + 1) % max(1, len(self._places))

    @property
    def bucket(self) -> int:
        """The bucket that the window at hand is of; -1 where there are no flats."""
        return self._places[self._at].bucket if self._places else -1

    def of(self, flats: Flats) -> Tensor:
        """The window at hand; empty where there are no flats."""
        if not self._places:
            return torch.empty(0)
        bucket, start, stop = self._places[self._at]
        return flats[bucket][start:stop]

    def of_all_but(self, flats: Flats, extents: Iterable[Extent]) -> list[Tensor]:
        """What of the window at hand lies in none of these extents, which do not overlap."""
        bucket, at, end = self._places[self._at]
        found = []
        for _, start, stop in sorted(one for one in extents if one.bucket == bucket and one.stop > at):
            found.append(flats[bucket][at : max(at, min(start, end))])
            at = min(stop, end)
        return [*found, flats[bucket][at:end]]


class ModuleGuard(StepGuard):
    """`trained`: the parameters in the flats, by name, in the order of `flats`' slots; frozen ones too where they are
    there. `flats`: those whose values are here all the time; none where parameters come and go: then a write is seen by
    its version alone.
    """

    def __init__(
        self, module: nn.Module, trained: Mapping[str, Tensor], flats: Flats, comparisons: Comparisons
    ) -> None:
        self._module, self._names, self._trained, self._flats = module, list(trained), list(trained.values()), flats
        self._comparisons = comparisons
        self._places = self._where()
        self._windows = Windows(flats)
        self._versions: list[int] = []
        self._as_initialized: list[int] | None = versions(self._trained)
        """Until the first batch."""
        self._content: tuple[object, Checksum] | None = None
        """The world and the checksum of the window, as of the last commit."""
        self._awaited: tuple[object, int] | None = None
        """The world and the window's bucket, while that is still to come."""
        self._look_at_structure()

    # ---- structure

    def _look_at_structure(self) -> None:
        parts = list(self._module.modules())
        containers = [part._parameters for part in parts] + [part._modules for part in parts]
        self._containers: list[dict[str, Any]] = [one for one in containers if isinstance(one, dict)]  # not torch.jit's
        self._content_of_containers = self._contained()
        self._by_name = dict(self._module.named_parameters(remove_duplicate=False))
        self._all = list(self._module.parameters())
        self._requires = list(map(_REQUIRES, self._all))

    def _contained(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._containers)))

    @looks_at_no_value
    def before_last_step(self, world: object, /) -> None:
        """Raises `UserError` naming a parameter that was added, removed, replaced, frozen, unfrozen, moved away, or
        changed since the last commit in this world.
        """
        if list(map(_REQUIRES, self._all)) != self._requires:
            self._name_what_is_frozen_otherwise()
        now, known = self._contained(), self._content_of_containers
        if len(now) != len(known) or not all(map(is_, now, known)):
            self._name_what_differs()
            self._look_at_structure()  # parts without parameters may come and go
        if self._where() != self._places:
            self._name_what_was_moved()
        self._check_values(world)

    def _where(self) -> list[Any]:
        """Where the values of each parameter lie: in which memory, and where in it; the same where that comes and goes.
        Flats that are here all the time keep their addresses from others.
        """
        if self._flats:
            return list(map(Tensor.data_ptr, self._trained))
        storages = map(_KEY, map(Tensor.untyped_storage, self._trained))
        return list(zip(storages, map(Tensor.storage_offset, self._trained), strict=True))

    def _name_what_differs(self) -> None:
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name in sorted(now.keys() | self._by_name.keys()):
            if now.get(name) is self._by_name.get(name):
                continue
            change = "added" if name not in self._by_name else "removed" if name not in now else "replaced"
            raise UserError(
                f'parameter "{name}" was {change} after shoal.initialize (another layer, or load_state_dict with '
                f"assign=True), and would not be trained. {BEFORE}"
            )

    def _name_what_is_frozen_otherwise(self) -> None:
        required = {id(parameter): was for parameter, was in zip(self._all, self._requires, strict=True)}
        for name, parameter in self._by_name.items():
            if parameter.requires_grad != required[id(parameter)]:
                change = "unfrozen" if parameter.requires_grad else "frozen"
                raise UserError(f'parameter "{name}" was {change} after shoal.initialize. {BEFORE}')

    def _name_what_was_moved(self) -> None:
        for name, now, place in zip(self._names, self._where(), self._places, strict=True):
            if now != place:
                raise moved(name)

    # ---- values

    def check_before_the_loop(self) -> None:
        """Once, before the engine itself changes a parameter: raises `UserError` where the script has done so."""
        known, self._as_initialized = self._as_initialized, None
        if known is None:
            return
        for name, version, now in zip(self._names, known, versions(self._trained), strict=True):
            if now != version:
                raise UserError(
                    f'parameter "{name}" was changed between shoal.initialize and the loop (load_state_dict, an '
                    "initialization), when the engine has taken its value over: master weights, and a start anew, "
                    "would have the old one. Do this before shoal.initialize."
                )

    def before_batch(self, world: object, _: Record | None, /) -> None:
        """The engine itself has made the parameters what they are before the first batch of a world."""
        if self._awaited is not None and self._awaited[0] is world:
            return
        self._awaited = None
        if self._content is None or self._content[0] is not world:
            self._versions = versions(self._trained)
            self._content = (world, self._checksum())

    def on_commit(self, world: object, coming: Collection[int] = ()) -> None:
        """The engine has changed the parameters, and changes those of the buckets that are coming."""
        self._windows.turn()
        bucket = self._windows.bucket
        self._awaited = (world, bucket) if bucket in coming else None
        self._content = None if self._awaited else (world, self._checksum())

    def on_arrived(self, bucket: int) -> None:
        """All of this bucket has come, and it has not been used yet."""
        if self._awaited is not None and self._awaited[1] == bucket:
            self._content = (self._awaited[0], self._checksum())
            self._awaited = None

    def _check_values(self, world: object) -> None:
        now = versions(self._trained)
        if self._versions and now != self._versions:
            at = next(i for i, (new, old) in enumerate(zip(now, self._versions, strict=True)) if new != old)
            raise UserError(f'parameter "{self._names[at]}" {CHANGED}')
        if self._content is None or self._content[0] is not world:
            return
        self._comparisons.expect_equal(self._content[1], self._checksum(), f"a parameter {CHANGED}")

    def _checksum(self) -> Checksum:
        return self._comparisons.checksum(self._windows.of(self._flats))

    def whole(self) -> list[int]:
        """Checksums of all parameters."""
        return checksums(self._flats)

    def forget_writes(self) -> None:
        """What was written is no more: it was written to copies."""
        self._versions = versions(self._trained) if self._versions else []

    def forgive(self, before: list[int]) -> None:
        """Parameters that were changed since `before` (`whole()`) and have their values again were not changed."""
        if self._flats and self._versions and self.whole() == before:
            self.forget_writes()


CHANGED = (
    "was changed by the script or the model's forward (a step of another optimizer, a clamp, a renormalization, "
    "load_state_dict): each worker would change its own copy. Train it by the optimizer that shoal.initialize was "
    "given, and make what else changes it part of the loss; to look at other weights for a while, put them in and back "
    "within `with engine.evaluating():`."
)


class UnitWatch:
    """Of these flats; `comparisons` makes the checksums."""

    def __init__(self, flats: Flats, comparisons: Comparisons) -> None:
        self._flats, self._windows, self._comparisons = flats, Windows(flats), comparisons
        self._content: Checksum | None = None
        self._is_done = True
        self._are_equal: list[bool | Tensor] = []
        """What was found since `refuse` was last called; `()` bool of a device that may still look for it."""

    def turn(self) -> None:
        """Another step begins: the next window."""
        self._windows.turn()
        self._content, self._is_done = None, False

    def on_here(self, buckets: tuple[int, ...]) -> None:
        """The values of these have come."""
        if not self._is_done and self._content is None and self._windows.bucket in buckets:
            self._content = self._checksum()

    def on_free(self, buckets: tuple[int, ...], by_script: bool) -> None:
        """They go. `by_script`: the script alone can have written to them."""
        if self._content is None or self._windows.bucket not in buckets:
            return
        if by_script:
            self._are_equal.append(self._checksum() == self._content)
        self._content, self._is_done = None, True

    def refuse(self) -> None:
        """Raises `UserError` where something was written. Waits for a device, where a window was compared."""
        if not all(map(bool, self._are_equal)):
            raise UserError(f"a parameter {CHANGED}")
        self._are_equal.clear()

    def forget(self) -> None:
        """What was written until now was allowed, and is gone."""
        self._content = None
        self._are_equal.clear()

    def _checksum(self) -> Checksum:
        return self._comparisons.checksum(self._windows.of(self._flats))


class ShownWatch:
    """Of buckets that show their owners' memory."""

    def __init__(self, layout: Layout, mapped: MappedFlats) -> None:
        self._layout, self._mapped = layout, mapped

    def refuse(self) -> None:
        """Raises `UserError` naming a parameter that was changed. What has its values again was not."""
        for bucket in self._layout.buckets:
            pages = self._written(bucket.index)
            element = self._mapped.changed(bucket.index, pages) if pages else None
            if element is not None:
                last = next(slot for slot in reversed(bucket.slots) if slot.start <= element)
                raise UserError(f'parameter "{last.parameter.name}" {CHANGED}')
            if pages:
                self._mapped.show(bucket.index)

    def take_back(self, buckets: Iterable[int] | None = None) -> None:
        """What was written to these was allowed, and goes. None: to any."""
        for bucket in range(len(self._layout.buckets)) if buckets is None else buckets:
            if self._written(bucket):
                self._mapped.show(bucket)

    def _written(self, bucket: int) -> list[int]:
        """Pages. Tests that poison memory write to all."""
        if unit_flats.POISON or not self._mapped.is_shown(bucket):
            return []
        return self._mapped.written(bucket)


GRADIENTS_CHANGED = (
    "gradients were changed between engine.backward and engine.step (clip_grad_norm_ and the like), when some have "
    "already been sent to other workers. Remove this from the loop; to clip, set `gradient_clipping` in the config."
)
TAKEN = (
    "gradients cannot be read or changed between engine.backward and engine.step where they are sharded (ZeRO stage "
    "2), in half precision or a DTensor's: they have already left for their owners. Remove this from the loop "
    "(clip_grad_norm_, p.grad and the like); to clip, set `gradient_clipping` in the config; to look at a gradient use "
    "parameter.register_hook."
)


@dataclass(slots=True)
class _Made:
    """What `engine.backward` left."""

    gradients: Gradients
    versions: list[int]
    parts: list[Tensor]
    """Of the window at hand."""
    content: list[Checksum]


class GradientGuard(StepGuard):
    """Between `engine.backward` and `engine.step` gradients are looked at only."""

    def __init__(self, sums: LaneSums, parameters: Sequence[nn.Parameter], comparisons: Comparisons) -> None:
        self._sums, self._parameters, self._comparisons = sums, parameters, comparisons
        self._windows = Windows(sums.live.flats)
        self._made: _Made | None = None

    def before_backward(self, _: str, is_continued: bool, /) -> None:
        if is_continued:
            self.before_step()

    def after_backward(self, arriving: Iterable[Extent], /) -> None:
        self._windows.turn()
        gradients = self._sums.live
        parts = self._windows.of_all_but(gradients.flats, arriving)
        content = list(map(self._comparisons.checksum, parts))
        self._made = _Made(gradients, versions(gradients.flats), parts, content)

    def before_step(self) -> None:
        """Raises `UserError` where the script has changed them since."""
        made = self._made
        if made is None:
            return
        if versions(made.gradients.flats) != made.versions or not made.gradients.are_in_place(self._parameters):
            raise UserError(GRADIENTS_CHANGED)
        for before, part in zip(made.content, made.parts, strict=True):
            self._comparisons.expect_equal(before, self._comparisons.checksum(part), GRADIENTS_CHANGED)
        self._made = None


class TakenGradient(Tensor):
    """Of a parameter's shape and dtype, and good for nothing."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises `UserError` for every use; but a compiler may look at it where it looks at a parameter."""
        if _is_compiling():
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise UserError(TAKEN)


def _is_compiling() -> bool:
    """Whether a forward is being compiled: then the compiler describes parameters with their `.grad`."""
    return torch._guards.TracingContext.try_get() is not None or torch.compiler.is_compiling()


def _without_values(
    parameter: nn.Parameter,  # of its own shape
) -> Tensor:  # of the same shape
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)


class TakenGradientGuard(StepGuard):
    """Where gradients are taken from their parameters: the script can use none, and must put none there."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._taken = [Tensor._make_subclass(TakenGradient, _without_values(parameter)) for parameter in parameters]

    def before_backward(self, _: str, is_continued: bool, /) -> None:
        if is_continued:
            self.before_step()

    @looks_at_no_value
    def after_backward(self, _: Iterable[Extent], /) -> None:
        """Refuse each use of a gradient by the script from now on."""
        for parameter, taken in zip(self._parameters, self._taken, strict=True):
            parameter.grad = taken

    @looks_at_no_value
    def before_step(self) -> None:
        """Raises `UserError` where the script has given a parameter a gradient; None is none."""
        pairs = zip(self._parameters, self._taken, strict=True)
        if not all(parameter.grad is None or parameter.grad is taken for parameter, taken in pairs):
            raise UserError(GRADIENTS_CHANGED)
