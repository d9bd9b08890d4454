"""`deepspeed.moe.utils`: which parameters are experts', and groups of them for an optimizer, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.cells.marks import is_of_expert
from shoal.deepspeed.moe.layer import MoE
from shoal.deepspeed.surface import module_lacks

__all__ = [
    "has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]  # fmt: skip

Group = MutableMapping[str, Any]
"""Of an optimizer: `params`, and what it says of them."""
WITHOUT_NAME = "experts"
"""The name of a group of parameters that are not `MoE`'s, and say none in `group_name`."""


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and how many experts the first of them has; 0 without."""
    first = next((part for part in m.modules() if isinstance(part, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: Tensor) -> bool:
    """Whether it is an expert's."""
    return is_of_expert(param)


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that all places of experts have, and experts'."""
    both: tuple[list[Tensor], list[Tensor]] = [], []
    for parameter in params:
        both[is_moe_param(parameter)].append(parameter)
    return both


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Sequence[Group], max_group_size: float | None = None
) -> list[Group]:
    """The groups without their experts, and behind them those of experts, with the same options, `moe: True` and the
    name of the processes that divide them (`ep_size_2`). As DeepSpeed's does, it changes the groups that are given,
    and a list of them. `max_group_size` changes nothing: blocks are cut from all parameters alike. Raises `UserError`.
    """
    del max_group_size
    given: Any = param_groups
    groups = given if isinstance(given, list) else [*given] if isinstance(given, tuple) else [given]
    _check(groups)
    split = [split_params_into_shared_and_expert_params(group["params"]) for group in groups]
    of_experts = [
        {**group, "name": name, "moe": True, "params": own}
        for group, (_, experts) in zip(groups, split, strict=True)
        for name, own in _by_name(experts).items()
    ]
    for group, (shared, _) in zip(groups, split, strict=True):
        group["params"] = shared
    groups.extend(of_experts)
    return groups


def _check(groups: Sequence[Any]) -> None:
    unfit = next((one for one in groups if not isinstance(one, MutableMapping) or "params" not in one), None)
    if unfit is not None:
        kind = "a group without params" if isinstance(unfit, Mapping) else f"a {type(unfit).__name__}"
        raise UserError(
            f"split_params_into_different_moe_groups_for_optimizer is given {kind}; expected a group of an optimizer, "
            'such as {"params": [*model.parameters()], "name": "all"}, or a list of them.'
        )


def _by_name(experts: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for parameter in experts:
        found.setdefault(getattr(parameter, "group_name", WITHOUT_NAME), []).append(parameter)
    return found


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(f"moe.utils.{name}")
