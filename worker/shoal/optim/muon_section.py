"""`optimizer.type: "Muon"`: which parameters are matrices of hidden layers, for torch's Muon; AdamW trains all others.

Keys and their defaults are DeepSpeed's, whose numbers are others where it computes by `ns_method: "gram"`, its default.
As there, embeddings and output heads are for AdamW, and a parameter's own attribute `use_muon` decides where it is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from shoal_protos.errors import UserError
from shoal_protos.text import shown
from shoal_protos.training_log import get_logger
from torch import nn
from torch.optim import Optimizer

from shoal.core.units import plain_name
from shoal.optim.several import several

log = get_logger("shoal.optim")

FOR_MUON: Mapping[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
FOR_ADAM: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
OWN_RATES = {"muon_lr": "Muon", "adam_lr": "AdamW"}
"""Rates of one of both, in the place of `lr`."""
NOT_HIDDEN = ("embed", "lm_head")
"""Parts of names."""
STANDARD = "standard"


def build_muon(given: Mapping[str, Any], model: nn.Module, over: Sequence[Any]) -> Optimizer:
    """Return both optimizers as one, or the one that has parameters. `over`: parameters, or groups of them.

    Raises `UserError` naming a key that neither has, and for other arithmetic than torch's.
    """
    known = [*dict.fromkeys([*FOR_MUON, *FOR_ADAM, *OWN_RATES, "ns_method"])]
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"`optimizer.params.{key}` is an unknown parameter of Muon (given: {shown(value)}); expected one of "
                f"{', '.join(known)}."
            )
    if given.get("ns_method", STANDARD) != STANDARD:
        raise UserError(
            f"`optimizer.params.ns_method` is {shown(given['ns_method'])}, which is other arithmetic than "
            f'torch.optim.Muon has; leave it out, or set "{STANDARD}".'
        )
    groups = [_listed(group) for group in over] if over and isinstance(over[0], dict) else [{"params": over}]
    hidden = _hidden_matrices(model)
    for_muon = [_part(group, lambda one: id(one) in hidden) for group in groups]
    for_adam = [_part(group, lambda one: id(one) not in hidden) for group in groups]
    for_muon, for_adam = ([group for group in part if group["params"]] for part in (for_muon, for_adam))
    made: list[Optimizer] = []
    try:
        if for_muon:
            made.append(torch.optim.Muon(for_muon, **_values(given, FOR_MUON, "muon_lr")))
        if for_adam:
            made.append(torch.optim.AdamW(for_adam, fused=True, **_values(given, FOR_ADAM, "adam_lr")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"`optimizer.params` do not fit Muon: {str(error).rstrip('.')}.") from error
    matrices, others = ([one for group in part for one in group["params"]] for part in (for_muon, for_adam))
    log.info("muon", matrices=len(matrices), matrix_elements=sum(one.numel() for one in matrices),
             others=len(others), other_elements=sum(one.numel() for one in others), others_by="AdamW")  # fmt: skip
    return several(made) if len(made) > 1 else made[0]


def _values(given: Mapping[str, Any], defaults: Mapping[str, Any], own_rate: str) -> dict[str, Any]:
    found = {key: given.get(key, value) for key, value in defaults.items()}
    return {**found, "lr": given.get(own_rate, found["lr"])}


def _listed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Its parameters as a list: torch takes a generator too, which is gone through once, and one alone."""
    given = group["params"]
    return {**group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}


def _part(group: Mapping[str, Any], is_in: Any) -> dict[str, Any]:
    return {**group, "params": [one for one in group["params"] if is_in(one)]}


def _hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of parameters."""
    embeddings = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    others: Iterable[nn.Module] = [*embeddings, *([head] if isinstance(head, nn.Module) else [])]
    outside = {id(parameter) for module in others for parameter in module.parameters()}
    found = set()
    for name, parameter in model.named_parameters():
        named = any(part in plain_name(name).lower() for part in NOT_HIDDEN)
        is_matrix = parameter.dim() == 2 and not named and id(parameter) not in outside
        if getattr(parameter, "use_muon", is_matrix):
            found.add(id(parameter))
    return found
