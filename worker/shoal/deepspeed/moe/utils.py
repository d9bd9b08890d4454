"""`deepspeed.moe.utils`: which parameters are experts', and groups of them for an optimizer, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from shoal.cells.marks import is_of_expert
from shoal.deepspeed.moe.layer import MoE
from shoal.deepspeed.surface import module_lacks

__all__ = [
    "has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]  # fmt: skip

Group = Mapping[str, Any]
"""Of an optimizer: `params`, and what it says of them."""


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and how many experts the last of them has; 0 without."""
    counts = [part.num_experts for part in m.modules() if isinstance(part, MoE)]
    return bool(counts), counts[-1] if counts else 0


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
) -> list[dict[str, Any]]:
    """The groups, and behind them one of each that has experts, with the same options and `moe: True`; of a group with
    a name it is named after it. `max_group_size` changes nothing: blocks are cut from all parameters alike.
    """
    del max_group_size
    groups = [param_groups] if isinstance(param_groups, Mapping) else [*param_groups]
    split = [(group, *split_params_into_shared_and_expert_params(group["params"])) for group in groups]
    return [
        *({**group, "params": shared} for group, shared, _ in split),
        *(_of_experts(group, experts) for group, _, experts in split if experts),
    ]


def _of_experts(group: Group, experts: list[Tensor]) -> dict[str, Any]:
    name = {"name": f"experts of {group['name']}"} if "name" in group else {}
    return {**group, **name, "params": experts, "moe": True}


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(f"moe.utils.{name}")
