"""Several optimizers as one, and their schedulers: `shoal.initialize(optimizer=[a, b])`, or `{"generator": a, …}`.

Their groups stand one after the other, and are the script's own objects; so all that reads groups sees one optimizer.
What is a class's own affair (its step, its defaults, what its state is) is asked of the member that a group is of.
Called wherever an optimizer is given, and by its twin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from shoal_protos.errors import UserError
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

NAME = "name"
"""A key of an optimizer's group, for `engine.turn`."""
PLUS = " + "
"""Between the classes' names in that of several optimizers or schedulers."""


Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""What a script may give as its optimizer."""
Schedulers = LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]
"""And as its scheduler."""


class Several(Optimizer):
    """Its members' groups, and a step of each. `state` is a twin's; members of the script's have each its own."""

    def __init__(self, members: Sequence[Optimizer], names: Sequence[str] = ()) -> None:
        """`names`: of the members, for `engine.turn`; empty: they have none.

        It is no optimizer that torch's constructor knows: it has no defaults, and no hook hears of its steps, which are
        its members'.
        """
        self.members, self.names = tuple(members), tuple(names)
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all members, the same objects, in a list of its own."""
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One of each member."""
        for member in self.members:
            member.step()

    def load_state_dict(self, *_: object) -> NoReturn:
        """Raises `UserError`: each member has a state of its own."""
        raise UserError("these are several optimizers; load the state of each by its own load_state_dict.")


def several(given: Sequence[Optimizer] | Mapping[str, Optimizer]) -> Several:
    """The optimizers of a list, or of a mapping by their names. Raises `UserError` where a name is a group's too."""
    if not isinstance(given, Mapping):
        return Several(given)
    for name in given:
        for other, optimizer in given.items():
            if any(group.get(NAME) == name for group in optimizer.param_groups):
                raise UserError(
                    f'"{name}" is the name of an optimizer and of a group of optimizer "{other}", so engine.turn would '
                    "mean both; give one of them another name."
                )
    return Several([*given.values()], [*given])


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Those of several; else itself."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def member_of(optimizer: Optimizer, group: int) -> tuple[Optimizer, int]:
    """Which optimizer a group is of, and its number there."""
    for member in members_of(optimizer):
        if group < len(member.param_groups):
            return member, group
        group -= len(member.param_groups)
    raise AssertionError("the layout has the optimizer's groups")


def title_of(optimizer: Optimizer) -> str:
    """The name of its class; of several: `SGD + Adam`."""
    return PLUS.join(type(member).__name__ for member in members_of(optimizer))


def classes_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Of several: by group the class of its optimizer. Else none."""
    if not isinstance(optimizer, Several):
        return ()
    return tuple(type(member).__name__ for member in optimizer.members for _ in member.param_groups)


def own_state_of(
    optimizer: Optimizer,
    parameter: Tensor,  # of its own shape
) -> Mapping[str, Any]:
    """What the script's object keeps of a parameter; empty where it keeps nothing."""
    found = (member.state[parameter] for member in members_of(optimizer) if parameter in member.state)
    return next(found, {})


def names_by_group(optimizer: Optimizer) -> list[set[str]]:
    """Of each group its own name and its optimizer's, as far as they have any."""
    members = members_of(optimizer)
    names = optimizer.names if isinstance(optimizer, Several) and optimizer.names else [""] * len(members)
    return [
        {str(one) for one in (group.get(NAME, ""), name) if one != ""}
        for member, name in zip(members, names, strict=True)
        for group in member.param_groups
    ]


def groups_by_parameter(optimizer: Optimizer) -> dict[int, set[int]]:
    """The numbers of the groups that have a parameter, by its `id`."""
    found: dict[int, set[int]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            found.setdefault(id(parameter), set()).add(number)
    return found


def only_group(name: str, optimizer: Optimizer, groups: Collection[int]) -> int:
    """The number of the only group that a parameter is in. Raises `UserError` where it is in none, or in two."""
    if not groups:
        raise UserError(
            f'parameter "{name}" requires a gradient but is in no group of the optimizer. '
            "Give it to the optimizer, or freeze it with requires_grad_(False)."
        )
    first, *others = sorted(groups)
    if others:  # torch lets a parameter be in one group of an optimizer
        kinds = " and ".join(type(member_of(optimizer, group)[0]).__name__ for group in (first, *others))
        raise UserError(f'parameter "{name}" is in several optimizers, {kinds}; give it to one of them.')
    return first


class Schedules(LRScheduler):
    """The schedulers of several optimizers, each over one of them."""

    def __init__(self, optimizer: Several, members: Mapping[int, LRScheduler]) -> None:
        """`members`: by the number of the optimizer. They have set their first rates when they were made."""
        self.optimizer, self.members = optimizer, dict(sorted(members.items()))

    def step(self, epoch: int | None = None) -> None:
        """One of each. `epoch`: as torch has it."""
        for member in self.members.values():
            member.step(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Theirs, by the number of the optimizer."""
        return {str(number): member.state_dict() for number, member in self.members.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a state of schedulers of other optimizers."""
        if state_dict.keys() != {str(number) for number in self.members}:
            raise ValueError(f"it has the schedulers of optimizers {', '.join(state_dict)}")
        for number, member in self.members.items():
            member.load_state_dict(state_dict[str(number)])


def schedulers_of(scheduler: LRScheduler | None) -> tuple[LRScheduler, ...]:
    """Those of several optimizers; else itself, where there is one."""
    if scheduler is None:
        return ()
    return tuple(scheduler.members.values()) if isinstance(scheduler, Schedules) else (scheduler,)


def schedulers_by_optimizer(scheduler: LRScheduler | None) -> Mapping[int, LRScheduler]:
    """The same by the number of the optimizer that each is over; of one over all, 0."""
    if isinstance(scheduler, Schedules):
        return scheduler.members
    return {0: scheduler} if scheduler is not None else {}


def pairs_of(optimizer: Optimizer, scheduler: LRScheduler | None) -> list[tuple[Optimizer, LRScheduler | None]]:
    """Each optimizer with the scheduler over it; several that one scheduler is over as one."""
    if not isinstance(optimizer, Several) or not (scheduler is None or isinstance(scheduler, Schedules)):
        return [(optimizer, scheduler)]
    over = {} if scheduler is None else scheduler.members
    return [(member, over.get(number)) for number, member in enumerate(optimizer.members)]


def schedules(given: Sequence[LRScheduler] | Mapping[str, LRScheduler], optimizer: Optimizer) -> LRScheduler | None:
    """The schedulers of a list, or of a mapping by their optimizers' names, as one; None: there are none. Raises
    `UserError` for one over no given optimizer, or over another than it is named for, and for two over one.
    """
    members, found = members_of(optimizer), dict[int, LRScheduler]()
    names = optimizer.names if isinstance(optimizer, Several) else ()
    if isinstance(given, Mapping) and (unknown := [name for name in given if name not in names]):
        have = f"are called {', '.join(names)}" if names else "have no names: give a list, or name them too"
        raise UserError(f"scheduler {unknown[0]!r} has the name of no optimizer; the optimizers {have}.")
    for called, scheduler in given.items() if isinstance(given, Mapping) else enumerate(given):
        kind, where = type(scheduler).__name__, f"scheduler {called!r}"
        number = next((n for n, one in enumerate(members) if one is scheduler.optimizer), None)
        if number is None:
            raise UserError(
                f"{where}, a {kind}, sets the rates of an optimizer that is not given; build it over one of those that "
                "are (optimizer=)."
            )
        if isinstance(called, str) and names[number] != called:
            raise UserError(f"{where}, a {kind}, is over optimizer {names[number]!r}; build it over {called!r}.")
        if number in found:
            raise UserError(
                f"{where}, a {kind}, is a second one over its optimizer; give each optimizer one, such as a "
                "ChainedScheduler of both."
            )
        found[number] = scheduler
    return Schedules(optimizer, found) if isinstance(optimizer, Several) and found else next(iter(found.values()), None)
