"""The probe: whether an optimizer may run on blocks, asked of itself at `shoal.initialize`.

Twins of it train the same few thousand numbers whole, in shapes of several dimensions, with a second tensor beside, and
in blocks that take over in the middle what is carried to a worker that joins: tensors, numbers of the state, values of
the group. All that comes out is compared bit by bit. The user's object, hooks and random state are left as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.layout import SMALLEST_BLOCK
from shoal.data.seeds import RandomState
from shoal.optim.hyper import hyper_parameters, load_into, rated
from shoal.optim.state_form import NUMBERS, OddState, StateForm, form_of
from shoal.optim.twin import (
    LEFT_OUT,
    changed_values,
    own,
    probing_twin_of,
    whole_updates,
    without_hooks_on_all,
)
from shoal.process.host_memory import tensor_bytes

BLOCK, BLOCKS = SMALLEST_BLOCK, 5
SHAPES = ((128, -1), (128, 10, -1), (128, 10, 4, -1), (128, 10, 4, 2, -1))
"""Of no fewer rows and columns than what treats small matrices as vectors wants; convolutions have the later ones."""
SWELLS = (1.0, 1e-2, 0.1, 1.0, 1e3, 10.0)
"""By step, what its gradient is times: what is cut where a norm is large shows only where one is."""
STEPS, MIDDLE = len(SWELLS), 3
"""A look-ahead of five steps is seen."""
QUIET = {1: slice(0, BLOCK), 5: slice(2 * BLOCK, 4 * BLOCK)}
"""By step, which gradients are zero: what leaves out a tensor without any shows only there."""
ELEMENTS = BLOCK * BLOCKS
FEW = (32, 64)
"""Elements of two rows of numbers: what keeps a matrix for each has four times as much for the longer one."""
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What groups differ in that are probed once."""
NOT_GIVEN = "no worker that joins could be given"


@dataclass(frozen=True, slots=True)
class Tried:
    """An optimizer that was tried: what the probe saw."""

    reason: str = ""
    """Why the optimizer may not run on blocks; empty: it may."""
    failure: str = ""
    """Why the probe could not run; empty: it ran."""
    keeps: str = "tensors"
    """What of it is carried, in words: members of a job must agree."""


class _Failed(Exception):
    """A step raised something, which is its text."""


def probe(optimizer: Optimizer) -> Tried:
    """Of all groups: the first that may not run on blocks decides, then the first that could not be probed. Those
    whose tensors are updated whole need not.
    """
    random, read, tried = RandomState.save(), set[str](), dict[int, Tried]()
    tried |= {number: Tried(keeps=one.keeps) for number, one in enumerate(whole_updates(optimizer)) if one is not None}
    try:
        with without_hooks_on_all():
            while (number := _next(optimizer.param_groups, read, tried)) is not None:
                tried[number] = _Probe(optimizer, number, read).tried()
    finally:
        random.restore()
    found = list(tried.values())
    keeps = "; ".join(dict.fromkeys(one.keeps for one in found))
    decisive = [one for one in found if one.reason] or [one for one in found if one.failure]
    return decisive[0] if decisive else Tried(keeps=keeps)


def _next(groups: Sequence[Mapping[str, Any]], read: Collection[str], tried: Collection[int]) -> int | None:
    """The first group that is of no tried one's kind."""
    known = {_kind(groups[number], read) for number in tried}
    return next((number for number, group in enumerate(groups) if _kind(group, read) not in known), None)


def _kind(group: Mapping[str, Any], read: Collection[str]) -> str:
    """Alike for groups trained alike but for rates, sizes of fractions, and what no step reads, as names are."""
    kinds = {key: _sort(value, key in read) for key, value in sorted(group.items()) if key not in ("params", *RATES)}
    first = next(iter(group["params"]), None)
    return repr((kinds, None if first is None else (first.dtype == torch.float64, first.device)))


def _sort(value: Any, is_read: bool) -> Any:
    if type(value) in (list, tuple):
        return [_sort(one, is_read) for one in value]
    if type(value) is float or not is_read:
        return bool(value) if type(value) in NUMBERS else type(value).__name__
    return repr(value)


class _Watched(dict[str, Any]):
    """A group that notes which of its values are read."""

    def __init__(self, group: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(group)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self._read.update(self)
        return super().items()


class _Trained:
    """A twin in the midst of training `parts`, each of any shape, all in one group."""

    def __init__(self, optimizer: Optimizer, number: int, read: set[str], parts: Sequence[Tensor]) -> None:
        """`read`: notes the keys of the group that steps read."""
        self.twin, self.number, self._read = probing_twin_of(optimizer), number, read
        self.twin.param_groups[number] = rated(self.group)
        self.parts = [part.clone() for part in parts]
        self.before = own(dict(self.group))
        self.left_behind = [self._left_behind()]
        """Before each step, and after the last."""

    @property
    def group(self) -> dict[str, Any]:
        found: dict[str, Any] = self.twin.param_groups[self.number]
        return found

    def step(
        self,
        gradient: Tensor,  # (elements of all parts,)
    ) -> None:
        watched = self.twin.param_groups[self.number] = _Watched({**self.group, "params": self.parts}, self._read)
        for part, own_gradient in zip(self.parts, gradient.split([part.numel() for part in self.parts]), strict=True):
            part.grad = own_gradient.view(part.shape).clone()
        try:
            self.twin.step()
        except Exception as error:  # it is the script's class: nobody knows what it raises
            raise _Failed(f"{type(error).__name__}: {str(error).strip() or 'no text'}".splitlines()[0]) from error
        finally:
            self.twin.param_groups[self.number] = {**watched, "params": []}
        self.left_behind.append(self._left_behind())

    def states(self) -> list[dict[str, Any]]:
        """Of each part, by the optimizer's keys."""
        return [self.twin.state[part] for part in self.parts]

    def weights(self) -> Tensor:  # (elements of all parts,)
        return torch.cat([part.detach().reshape(-1) for part in self.parts])

    def changed(self) -> list[str]:
        """Keys of the group that its steps have changed. Raises `UserError` where one can be no hyper-parameter."""
        return changed_values(self.group, self.before, self.number)

    def left_behind_since(self, step: int) -> str:
        """Names of what has changed after that step and is given to no worker that joins."""
        before = self.left_behind[step]
        return ", ".join(key for key, text in self.left_behind[-1].items() if before.get(key) != text)

    def _left_behind(self) -> dict[str, str]:
        """As texts, by name."""
        found = {f"attribute {key}": text_of(one) for key, one in vars(self.twin).items() if key not in LEFT_OUT}
        for owner, state in self.twin.state.items():
            if not isinstance(owner, Tensor):
                found[f"{owner!r} of its state, which is no parameter"] = text_of(state)
                continue
            for key, one in state.items():
                if not isinstance(one, Tensor) and type(one) not in NUMBERS:
                    found[f"{key!r} in its state, a {type(one).__name__}"] = text_of(one)
        return found


def text_of(value: Any, deeper: bool = True) -> str:
    """To be compared: of lists how many they hold; of objects and mappings their class, and what is in them."""
    if type(value) in (*NUMBERS, str) or (type(value) is Tensor and value.numel() == 1):
        return repr(value)
    kind = type(value).__name__
    if type(value) in (list, tuple, set):
        return f"{kind} {len(value)}"
    within = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return f"{kind} {[text_of(one, deeper=False) for one in within.values()] if deeper else len(within)}"


class _Probe:
    """Of one group."""

    def __init__(self, optimizer: Optimizer, number: int, read: set[str]) -> None:
        self._optimizer, self._number, self._read = optimizer, number, read
        first = next(iter(optimizer.param_groups[number]["params"]), torch.zeros(()))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        device = torch.device("cpu") if first.is_meta else first.device
        made = torch.Generator("cpu").manual_seed(5)
        drawn = torch.randn(1 + STEPS, ELEMENTS, generator=made, device="cpu", dtype=dtype)
        drawn[1:] *= torch.tensor(SWELLS, device="cpu", dtype=dtype).unsqueeze(1)
        for step, elements in QUIET.items():
            drawn[1 + step, elements] = 0.0
        self._whole, *self._gradients = drawn.to(device)

    def tried(self) -> Tried:
        within = [name for name, value in vars(self._optimizer).items() if isinstance(value, Optimizer)]
        if within:
            return Tried(reason=f"steps another optimizer, which has the script's parameters ({within[0]})")
        if squares := self._squares():
            return Tried(reason=squares)
        random = RandomState.save()
        try:
            whole, failure = self._train([self._whole]), ""
        except _Failed as error:
            whole, failure = None, str(error)
        try:
            matrix = self._train([self._whole.view(SHAPES[0])])
        except _Failed as error:
            return Tried(failure=failure or str(error))
        if whole is None:
            return Tried(reason=f"trains no tensor without rows and columns ({failure})")
        if not random.is_here():
            return Tried(reason="draws random numbers, which are others in every world")
        try:
            form, reason = StateForm(), self._shapes(whole, matrix) or self._differentiates()
            if not reason:
                form = self._form(whole)
                reason = self._beside(whole) or self._blocks(whole, form)
        except OddState as error:
            return Tried(reason=str(error))
        except _Failed as error:
            return Tried(reason=f"fails on a part of the parameters ({error})")
        later = whole.left_behind_since(MIDDLE)
        if later and not reason:
            return Tried(failure=f"it changes {later}, which {NOT_GIVEN}, and may be read after the steps of a trial")
        return Tried(reason=reason, keeps=self._keeps(whole, form))

    def _train(self, parts: Sequence[Tensor], more: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> _Trained:
        """All steps. `more`: what the gradient is made longer by."""
        trained = _Trained(self._optimizer, self._number, self._read, parts)
        for gradient in self._gradients:
            trained.step(more(gradient))
        return trained

    def _shapes(self, whole: _Trained, matrix: _Trained) -> str:
        """Whether they count."""
        if _equal(whole.weights(), self._whole):
            return "leaves the parameters that it is given as they are"
        if not _equal(whole.weights(), matrix.weights()):
            return f"trains a matrix otherwise than its elements in a row ({_share(whole, matrix)})"
        for shape in SHAPES[1:]:
            shaped = self._train([self._whole.view(shape)])
            if not _equal(whole.weights(), shaped.weights()):
                dims = len(shape)
                return f"trains {dims} dimensions otherwise than their elements in a row ({_share(whole, shaped)})"
        return ""

    def _squares(self) -> str:
        """Whether its state of a row of numbers is a matrix: a step on as many as are tried would take hours."""
        few = list[int]()
        for elements in FEW:
            trained = _Trained(self._optimizer, self._number, self._read, [self._whole[:elements]])
            try:
                trained.step(self._gradients[0][:elements])
            except _Failed:
                return ""  # of so few: the others tell
            few.append(sum(map(_numbers_within, trained.states()[0].values())))
        if few[1] < FEW[1] ** 2 or few[1] < 3 * few[0]:
            return ""
        return f"keeps a matrix for a row of numbers ({few[1]} numbers for {FEW[1]}), too large for long ones"

    def _differentiates(self) -> str:
        """Whether it asks for gradients of gradients: it does so of parameters that require one."""
        trained = _Trained(self._optimizer, self._number, self._read, [self._whole])
        trained.parts[0].requires_grad_()
        try:
            with torch.no_grad():
                trained.step(self._gradients[0])
        except _Failed as error:
            return f"fails on parameters that require a gradient, as one that differentiates gradients does ({error})"
        return ""

    def _beside(self, whole: _Trained) -> str:
        """Whether it counts what else is in the group, or that nothing is."""
        beside = self._train([self._whole, 3 * self._whole], lambda gradient: torch.cat([gradient, -2 * gradient]))
        if not _equal(whole.weights(), beside.weights()[:ELEMENTS]):
            return f"trains a tensor otherwise when another one is beside it ({_share(whole, beside)})"
        nothing = self._train([torch.zeros_like(self._whole[:1])], lambda gradient: torch.zeros_like(gradient[:1]))
        for other in (beside, nothing):
            keys = changed_values(other.group, whole.group, self._number)
            if keys:
                return f"keeps {', '.join(keys)} in its group, which depends on the parameters that are in it"
        return ""

    def _form(self, whole: _Trained) -> StateForm:
        """Of its state, beside that of a smaller tensor. Raises `OddState`."""
        small, states = _Trained(self._optimizer, self._number, self._read, [self._whole[:BLOCK]]), []
        for gradient in self._gradients:
            small.step(gradient[:BLOCK])
            states.append({key: own(value) for key, value in small.states()[0].items()})
        return form_of(states, whole.states(), (BLOCK, ELEMENTS))

    def _blocks(self, whole: _Trained, form: StateForm) -> str:
        """Blocks that go on with what is carried come to the same."""
        half = _Trained(self._optimizer, self._number, self._read, [self._whole])
        for gradient in self._gradients[:MIDDLE]:
            half.step(gradient)
        blocks = self._taken_over(half, form)
        for gradient in self._gradients[MIDDLE:]:
            blocks.step(gradient)
        if _equal(whole.weights(), blocks.weights()) and self._are_alike(whole, blocks, form):
            return ""
        parts = self._train(list(self._whole.split(BLOCK)))
        if not _equal(whole.weights(), parts.weights()):
            return f"trains blocks by themselves otherwise than the whole ({_share(whole, parts)})"
        lost = whole.left_behind_since(0)
        return (
            f"keeps what {NOT_GIVEN} ({lost or 'the probe saw no name'}); it would have to be a value of its groups, "
            "or a tensor or a number of its state"
        )

    def _taken_over(self, half: _Trained, form: StateForm) -> _Trained:
        """Blocks in the state that a joiner is given."""
        blocks = _Trained(self._optimizer, self._number, self._read, list(half.weights().split(BLOCK)))
        load_into(blocks.twin, json.loads(json.dumps(hyper_parameters(half.twin))))
        state = form.carried(half.states()[0])
        for index, part in enumerate(blocks.parts):
            cut = {
                key: value[index * BLOCK : (index + 1) * BLOCK].clone() if value.dim() else value.clone()
                for key, value in state.items()
            }
            blocks.twin.state[part].update(form.given_back(cut))
        return blocks

    def _are_alike(self, whole: _Trained, blocks: _Trained, form: StateForm) -> bool:
        """State and group of both."""
        (state,), states = map(form.carried, whole.states()), [form.carried(one) for one in blocks.states()]
        if any(one.keys() != state.keys() for one in states):
            return False
        for key, value in state.items():
            parts = [one[key] for one in states]
            if (
                not all(_equal(value, part) for part in parts)
                if not value.dim()
                else not _equal(value, torch.cat(parts))
            ):
                return False
        return not changed_values(blocks.group, whole.group, self._number)

    def _keeps(self, whole: _Trained, form: StateForm) -> str:
        found = [f"{key} of the group" for key in sorted(whole.changed())]
        found += [f"{key} ({kind.__name__}) of the state" for key, kind in sorted(form.numbers.items())]
        found += [f"{key} per {elements} elements" for key, (elements, _) in sorted(form.shared.items())]
        found += [f"{key}, a table ({_digest(table)})" for key, table in sorted(form.tables.items())]
        return ", ".join(["tensors", *found])


def _numbers_within(value: Any) -> int:
    """Those of tensors, in lists too."""
    if isinstance(value, Tensor):
        return value.numel()
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_numbers_within, within))


def _digest(
    table: Tensor,  # of any shape
) -> str:
    return hashlib.sha256(tensor_bytes(table.cpu().contiguous())).hexdigest()[:12]


def _equal(
    one: Tensor,  # both of one shape
    other: Tensor,
) -> bool:
    """In all bits."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _share(one: _Trained, other: _Trained) -> str:
    differ = (one.weights() != other.weights()[:ELEMENTS]).double().mean().item()
    return f"{differ:.0%} of the weights differ after {STEPS} steps"
