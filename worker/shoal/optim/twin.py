"""A twin of the user's optimizer: its class on the engine's tensors, what passes between both, and what a trial shows.

What a step changes in a group (a count of steps, a sum of weights) is the optimizer's own. It goes back into the user's
group, where vote, joiners and checkpoints find it beside rates. A number that stands in the state beside tensors is
carried as a tensor without dimensions, and given back as the type that it was. Called by held blocks and by the probe.

`effects_of_steps` asks the optimizer itself, once, what its steps do beside training: by steps of a twin on few
elements. Called by the held blocks, when training state is made; they, the optimizer's steps and what a run is given go
by it. Whether an optimizer is elementwise is probed in probe.py.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.core.layout import SMALLEST_BLOCK, Layout
from shoal.optim.hyper import PLAIN, has_turn, is_plain_tuple, plain_value
from shoal.optim.muon import muon_updates
from shoal.optim.several import Several, member_of, members_of
from shoal.optim.state_form import KINDS, StateForm, carried, form_of, given_back, is_packed
from shoal.optim.whole import UPDATES, OnBlocks, Updates, WholeUpdate, on_blocks

LEFT_OUT = ("state", "param_groups")
"""Attributes of an optimizer that are looked at by themselves."""


def twin_of(optimizer: Optimizer, as_it_is: bool = False) -> Optimizer:
    """An optimizer of the same class, hyper-parameters and attributes, without parameters. Of several: theirs, which
    keep their state in one place.
    """
    if isinstance(optimizer, Several):
        return _joined([twin_of(member) for member in optimizer.members])
    twin = copy.copy(optimizer)  # torch copies no attribute that a class of the user's own has set
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler has put a wrapper there that is bound to the user's object
            twin.__dict__.setdefault(name, value)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    updates = whole_updates(optimizer) if not as_it_is else ()
    if any(updates) and not isinstance(twin, OnBlocks):
        kind = on_blocks(type(optimizer))
        on_its_blocks = kind.__new__(kind)  # an object of a class of several bases takes no other class
        vars(on_its_blocks).update(vars(twin), **{UPDATES: updates})
        return on_its_blocks
    return twin


def whole_updates(optimizer: Optimizer) -> Updates:
    """By group, how tensors are updated that must be seen whole; None where elements are updated by themselves."""
    found: list[WholeUpdate | None] = []
    for member in members_of(optimizer):
        found += vars(member).get(UPDATES) or muon_updates(member) or [None] * len(member.param_groups)
    return found


def probing_twin_of(optimizer: Optimizer, as_it_is: bool = False) -> Optimizer:
    """The same, for steps that must leave nothing behind: lists, tensors and plain objects in it are its own.
    `as_it_is`: its class, also where blocks step whole tensors otherwise.
    """
    if isinstance(optimizer, Several):
        return _joined([probing_twin_of(member) for member in optimizer.members])
    twin = twin_of(optimizer, as_it_is)
    for name, value in vars(twin).items():
        if name not in LEFT_OUT:
            twin.__dict__[name] = _own_object(value) if _is_plain_object(value) else own(value)
    take_over_hyper_parameters(twin, optimizer)
    return twin


def _joined(twins: Sequence[Optimizer]) -> Several:
    joined = Several(twins)
    for twin in twins:
        twin.state = joined.state
    return joined


def own(value: Any) -> Any:
    """A copy of a value that a step could change where it is; parameters, and what else there is, are the same."""
    kind = type(value)
    if kind is Tensor:
        return value.detach().clone()
    if kind in (list, tuple, set):
        return kind(own(item) for item in value)
    return {key: own(item) for key, item in value.items()} if kind is dict else value


def _is_plain_object(value: Any) -> bool:
    """One of a class that somebody wrote for values: a schedule, a meter."""
    if callable(value) or isinstance(value, Tensor | Optimizer) or not hasattr(value, "__dict__"):
        return False
    reduce: Any = type(value).__reduce_ex__
    return reduce is object.__reduce_ex__


def _own_object(value: Any) -> Any:
    copied = copy.copy(value)
    vars(copied).update({name: own(one) for name, one in vars(copied).items()})
    return copied


@contextmanager
def without_hooks_on_all() -> Iterator[None]:
    """Nothing that the process has hooked on every optimizer's steps hears of those that are made within."""
    hooks: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, content in zip(hooks, kept, strict=True):
            one.update(content)


def may_step_in_parts(optimizer: Optimizer) -> bool:
    """Whether it makes no difference that one step is several, each for some of the parameters.

    It does where a class of the user's own counts its steps. Step hooks are refused.
    """
    return all(type(member).__module__.startswith("torch.optim.") for member in members_of(optimizer))


# ---- values of groups


def take_over_hyper_parameters(mine: Optimizer, users: Optimizer) -> None:
    """Those of the user's object, as they are now, and no others."""
    for here, theirs in zip(mine.param_groups, users.param_groups, strict=True):
        parameters = here["params"]
        here.clear()
        here.update(
            {
                key: value if type(value) in PLAIN or is_plain_tuple(value) else own(value)
                for key, value in theirs.items()
                if key != "params"
            },
            params=parameters,
        )


def give_back_own_values(mine: Optimizer, users: Optimizer) -> None:
    """What the step that `mine` has made changed in groups whose turn it was."""
    for number, (here, theirs) in enumerate(zip(mine.param_groups, users.param_groups, strict=True)):
        for key in changed_values(here, theirs, number) if has_turn(theirs) else ():
            value, before = here[key], theirs.get(key)
            theirs[key] = before.fill_(plain_value(value, key)) if isinstance(before, Tensor) else own(value)


def changed_values(now: Mapping[str, Any], before: Mapping[str, Any], number: int) -> list[str]:
    """Keys of a group whose values have others bits, or another type, than before. Raises `UserError` for a value that
    no hyper-parameter can be. `number`: the group's.
    """

    def text(group: Mapping[str, Any], key: str) -> str:
        return repr(plain_value(group[key], f"{key} of optimizer group {number}")) if key in group else ""

    keys = [key for key, value in now.items() if key != "params" and value is not before.get(key, now)]
    return [key for key in keys if text(now, key) != text(before, key)]


def failure_from(
    optimizer: Optimizer,
    group: int,
    kept: Mapping[str, tuple[torch.dtype, bool]],
    one: Tensor,  # (elements,)
) -> str:
    """Why a step of a parameter of this group fails that goes on from such a state, or empty. `kept`: by key, the dtype
    of what the state has, and whether it is one number for all elements; what some share is not
    tried. `one`: a parameter.
    """
    if is_packed(kept):
        return ""
    optimizer, group = member_of(optimizer, group)
    twin, one.grad = probing_twin_of(optimizer), torch.zeros_like(one)
    twin.param_groups[group]["params"] = [one]
    state = {key: one.new_zeros(() if scalar else 1, dtype=dtype) for key, (dtype, scalar) in kept.items()}
    numbers = {} if may_step_in_parts(optimizer) else {key: KINDS.get(value.dtype) for key, value in state.items()}
    twin.state[one] = given_back(state, {key: kind for key, kind in numbers.items() if kind is not None})
    try:
        with without_hooks_on_all():
            twin.step()
    except Exception as error:  # of the script's class, which may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def with_no_empty_group(twin: Optimizer) -> Iterator[None]:
    """While it steps, a zero stands in where this worker has nothing of a group: what a step changes in the group is
    then the same on all workers.
    """
    empty = [group for group in twin.param_groups if not group["params"]]
    like = next((one for group in twin.param_groups for one in group["params"]), torch.zeros(1, device="cpu"))
    for group in empty:
        group["params"] = [torch.zeros(1, dtype=like.dtype, device=like.device)]
        group["params"][0].grad = torch.zeros_like(group["params"][0])
    yield
    for group in empty:
        twin.state.pop(group["params"].pop(), None)


# ---- what steps do beside training

STEPS = 3
"""ASGD averages from its second step on."""
SIZES = (SMALLEST_BLOCK, 2 * SMALLEST_BLOCK)
"""Elements that are tried: of fewer no optimizer keeps 8-bit state, and two tell what depends on their number."""

Kind = tuple[int, torch.dtype]
"""The group of a parameter, and what its optimizer computes in."""


@dataclass(frozen=True, slots=True)
class StepEffects:
    """Nothing: of an optimizer that could not be tried, and was taken at the script's word."""

    moved: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By group, keys whose values a step changes; of groups without any nothing."""
    forms: Mapping[Kind, StateForm] = field(default_factory=dict)
    """Of the state of each kind."""
    only_counts: bool = False
    """Whether each number that is kept of a parameter, tensors without dimensions too, grows by one with every step;
    also where there are none. A parameter that has missed steps then has the others' numbers less these. NAdam's
    product of momenta, or ASGD's averaging rate, is no such number, nor is a scale that neighbours share.
    """
    own_forms: tuple[str, ...] = ()
    """By group, what of its state the optimizer alone can read, to be compared; empty: nothing. None where stages have
    each its own parameters, of which that is said.
    """


def effects_of_steps(optimizer: Optimizer, layout: Layout) -> StepEffects:
    """Seen in steps of a twin on few elements of each kind; of several by each one's own."""
    first, seen = 0, list[StepEffects]()
    for member in members_of(optimizer):
        seen.append(_effects_of_steps(member, first, layout))
        first += len(member.param_groups)
    forms = {kind: form for one in seen for kind, form in one.forms.items()}
    of_elements = {group: form.title for (group, _), form in forms.items()}
    updates = () if layout.stages else enumerate(whole_updates(optimizer))
    return StepEffects(
        {group: keys for one in seen for group, keys in one.moved.items()},
        forms,
        all(one.only_counts for one in seen),
        tuple(one.form if one is not None else of_elements.get(group, "") for group, one in updates),
    )


def _effects_of_steps(optimizer: Optimizer, first: int, layout: Layout) -> StepEffects:
    """`first`: the number that its first group has in the layout."""
    twin = probing_twin_of(optimizer)
    groups = range(first, first + len(twin.param_groups))
    kinds = {(bucket.group, bucket.wide_dtype) for bucket in layout.buckets if bucket.group in groups}
    probed = {
        kind: [torch.zeros(size, dtype=kind[1], device=layout.device) for size in SIZES]
        for kind in sorted(kinds, key=str)
    }
    for (group, _), both in probed.items():
        twin.param_groups[group - first]["params"] += both
    before = [own(group) for group in twin.param_groups]
    states: dict[Kind, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {kind: ([], []) for kind in probed}
    seen = list[list[float]]()
    try:
        with without_hooks_on_all(), with_no_empty_group(twin):
            for _ in range(STEPS):
                for one in (one for both in probed.values() for one in both):
                    one.grad = torch.ones_like(one)
                twin.step()
                for kind, both in probed.items():
                    for kept, one in zip(states[kind], both, strict=True):
                        kept.append({key: own(value) for key, value in twin.state[one].items()})
                large = [carried(kept[-1]) for _, kept in states.values()]
                seen.append([float(value) for state in large for value in state.values() if not value.dim()])
        forms = {kind: form_of(small, large, SIZES) for kind, (small, large) in states.items()}
    except Exception:  # of the script's class, which may raise anything
        return StepEffects()
    pairs = zip(groups, twin.param_groups, before, strict=True)
    moved = {number: frozenset(changed_values(now, then, number)) for number, now, then in pairs}
    counts = all(now == [number + 1 for number in last] for last, now in pairwise(seen))
    counts &= not any(form.is_packed for form in forms.values())
    return StepEffects({number: keys for number, keys in moved.items() if keys}, forms, counts)
