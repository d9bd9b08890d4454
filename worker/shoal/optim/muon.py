"""Muon: momentum, made orthogonal matrix by matrix, as three functions of which only the middle one needs a matrix.

`part` is what a matrix's home needs of some of its elements; `whole` makes the matrix's direction of it; `commit`
updates some elements by it. Nothing but `commit` writes. The first and the last go element by element; pieces have to
be cut equally in every world (core/anchors.py). `Muon` offers them as the update of a group (whole.py).

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). `TORCH` has the numbers of
torch.optim.Muon, `JORDAN` those of the classes that came with that text. Both compute in bfloat16. The class itself is
asked which of them it has.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from shoal_protos.errors import UserError
from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.hyper import Group, rated
from shoal.optim.whole import Columns, Pieces

MOMENTUM = "momentum_buffer"
"""The key of the state."""
CLASSES = ("Muon", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam")
"""Names of classes that may have such numbers."""
USE_MUON = "use_muon"
"""A key of groups of classes that train others by Adam."""
TRIAL_SHAPES, TRIAL_STEPS = ((24, 40), (40, 24)), 3
LEFT_OUT = ("lr", "initial_lr", "name", "turn")
"""What groups differ in that are tried once."""
TRIAL_DECAY = 0.1
"""In the place of 0, which other groups or a later step may not have."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What differs between classes."""

    whole: Callable[[Tensor, Group], Tensor]  # bfloat16, of a parameter's shape → the same
    """The direction."""
    rate: Callable[[Group, Sequence[int]], float]
    """What a direction is times: of a group, and a parameter's shape."""


def part(
    pieces: Pieces,
    group: Group,
    into: Tensor,  # (elements of all pieces,) bfloat16
) -> None:
    """Make what the matrix's home gets of these pieces."""
    beta, places = float(group["momentum"]), into.split(pieces.sizes)
    for momentum, gradient, place in zip(pieces.state[MOMENTUM], pieces.scaled(), places, strict=True):
        moved = torch.lerp(momentum, gradient, 1 - beta)
        if group.get("nesterov", True):
            torch.lerp(gradient, moved, beta, out=moved)
        place.copy_(moved)


def commit(
    pieces: Pieces,
    direction: Tensor,  # (elements of all pieces,) bfloat16
    group: Group,
    rate: float,
) -> None:
    """Update weights and momenta in place."""
    share, kept = 1 - float(group["momentum"]), 1 - float(group["lr"]) * group["weight_decay"]
    columns = pieces.weights, pieces.state[MOMENTUM], pieces.scaled(), direction.split(pieces.sizes)
    for weights, momentum, gradient, own in zip(*columns, strict=True):
        momentum.lerp_(gradient, share)
        weights.mul_(kept).add_(own, alpha=-rate)


def _by_torch(
    matrix: Tensor,  # (rows, columns) bfloat16
    group: Group,
) -> Tensor:  # (rows, columns) bfloat16
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    found = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    direction: Tensor = found.T if is_tall else found
    return direction


def _by_jordan(
    tensor: Tensor,  # (…, rows, columns) bfloat16; (filters, channels, height, width): each filter is a row
    _: Group,
) -> Tensor:  # bfloat16, of the same shape
    a, b, c = 3.4445, -4.7750, 2.0315
    matrix = tensor.view(len(tensor), -1) if tensor.dim() == 4 else tensor
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    found = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _step in range(5):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    found = found.mT if is_tall else found
    direction: Tensor = found * max(1, tensor.shape[-2] / tensor.shape[-1]) ** 0.5
    return direction.reshape(tensor.shape)


def _rate_of_torch(group: Group, shape: Sequence[int]) -> float:
    rows, columns = shape
    match group["adjust_lr_fn"]:
        case None | "original":
            ratio = math.sqrt(max(1, rows / columns))
        case "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        case _:
            ratio = 1.0
    return float(group["lr"]) * ratio


TORCH = Numbers(_by_torch, _rate_of_torch)
JORDAN = Numbers(_by_jordan, lambda group, _: float(group["lr"]))


class Muon:
    """The `WholeUpdate` of a group. `muon`: its class's numbers."""

    name, keeps, form, steps_group = "Muon", "momentum of whole matrices", "", False

    def __init__(self, muon: Numbers) -> None:
        self.muon = muon

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises `UserError` for a parameter that has no rows and columns."""
        if len(shape) < 2 or (self.muon is TORCH and len(shape) != 2):
            raise UserError(
                f'parameter "{name}" of shape {tuple(shape)} is in a group of Muon, which trains matrices; give it to '
                "another optimizer of the list, such as AdamW."
            )

    def cost(self, shape: Sequence[int]) -> int:
        """Multiplications of the first product of an iteration."""
        rows, columns = shape[0], math.prod(shape[1:])
        return max(1, min(rows, columns) ** 2 * max(rows, columns))

    def columns(self, _: torch.dtype) -> Columns:
        return Columns((torch.bfloat16,), (torch.bfloat16,))

    def first_state(
        self,
        weights: Tensor,  # (elements,)
    ) -> dict[str, Tensor]:  # each (elements,)
        return {MOMENTUM: torch.zeros_like(weights)}

    def odd(self, _: Sequence[int]) -> Mapping[str, int]:
        return {}

    def part(
        self,
        pieces: Pieces,
        group: Group,
        _: bool,
        into: Sequence[Tensor],  # one, (elements of all pieces,) bfloat16
    ) -> None:
        part(pieces, group, into[0])

    def whole(
        self,
        sent: Sequence[Tensor],  # one, (elements of the tensor,) bfloat16
        shape: Sequence[int],
        group: Group,
        _: bool,
    ) -> list[Tensor]:  # one, (elements of the tensor,) bfloat16
        return [self.muon.whole(sent[0].view(tuple(shape)), group).reshape(-1)]

    def commit(
        self,
        pieces: Pieces,
        returned: Sequence[Tensor],  # one, (elements of all pieces,) bfloat16
        group: Group,
        shape: Sequence[int],
    ) -> None:
        commit(pieces, returned[0], group, self.muon.rate(group, shape))


def muon_updates(optimizer: Optimizer) -> list[Muon | None]:
    """Return, by group, the update of those that are trained by Muon; empty for another class."""
    if type(optimizer).__name__ not in CLASSES:
        return []
    numbers = map(partial(_numbers_of, optimizer), range(len(optimizer.param_groups)))
    updates = [None if one is None else Muon(one) for one in numbers]
    return updates if any(updates) else []


_known: dict[tuple[type[Optimizer], str], Numbers | None] = {}
"""By what a group's steps may go by."""


def _numbers_of(optimizer: Optimizer, number: int) -> Numbers | None:
    """Of a group; None: others, or it is not trained by Muon."""
    group = optimizer.param_groups[number]
    if not group.get(USE_MUON, True):
        return None
    values = {key: value for key, value in group.items() if key not in ("params", *LEFT_OUT)}
    tried = type(optimizer), repr(sorted(values.items()))
    if tried not in _known:
        _known[tried] = next((one for one in (TORCH, JORDAN) if _has(optimizer, number, one)), None)
    return _known[tried]


def _has(optimizer: Optimizer, number: int, muon: Numbers) -> bool:
    """Whether steps of its own class come to the same bits, for wide and for tall matrices."""
    made = torch.Generator("cpu").manual_seed(5)
    for shape in TRIAL_SHAPES:
        own = torch.randn(shape, generator=made, device="cpu")
        twin, mine = copy.copy(optimizer), own.flatten().clone()
        twin.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
        twin.state = defaultdict(dict)
        group = {**rated(optimizer.param_groups[number]), "params": [own]}
        if group.get("weight_decay") == 0:
            group["weight_decay"] = TRIAL_DECAY
        twin.param_groups, update = [group], Muon(muon)
        pieces = Pieces([mine], {key: [one] for key, one in update.first_state(mine).items()}, [])
        sent = [torch.empty_like(mine, dtype=torch.bfloat16)]
        for _ in range(TRIAL_STEPS):
            own.grad = torch.randn(shape, generator=made, device="cpu")
            pieces = Pieces(pieces.weights, pieces.state, [own.grad.flatten()])
            try:
                update.part(pieces, group, False, sent)
                update.commit(pieces, update.whole(sent, shape, group, False), group, shape)
                type(optimizer).step(twin)
            except Exception:  # of a class that only has the name, which may raise anything
                return False
        if not own.flatten().equal(mine):
            return False
    return True
