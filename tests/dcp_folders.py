"""Folders of torch.distributed.checkpoint for tests: `written(content, folder)` is one, `content_of(form, …)` what the
programs of others put into one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shoal.checkpoint.catalogue import Found, resolve
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

FORMS = ("by name", "torchtitan", "recipe")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def written(content: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed.*|.*no_dist.*|.*overwriting.*")
        save(content, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def found_in(place: Path) -> Found:
    found = resolve(None, str(place), print)
    assert found is not None
    return found


def content_of(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The mapping that a program of that form saves."""
    options = FLAT if form == "torchtitan" else None
    weights, states = get_state_dict(model, optimizer, options=options)
    if form == "recipe":
        return {"app": {"model": weights, "optim": states}}
    if form == "by name":
        return {"model": weights, "optimizer": states}
    others = {"lr_scheduler": {"last_epoch": 3}, "dataloader": {"dp_rank_0": b"at 7"}}
    return {**weights, "optimizer": states, **others, "train_state": {"step": torch.tensor(3), "ntokens_seen": 96}}


def plain() -> dict[str, Any]:
    """One parameter and its state, by name."""
    state = {"w": {"exp_avg": torch.zeros(3, 2), "step": torch.tensor(1.0)}}
    return {"model": {"w": torch.ones(3, 2)}, "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}


def flat() -> dict[str, Any]:
    """The same flat, with the weights at the top."""
    states = {"state.w.exp_avg": torch.zeros(3, 2), "state.w.step": torch.tensor(1.0), "param_groups.w.lr": 0.1}
    return {"w": torch.ones(3, 2), "optimizer": states}


def changed(change: Callable[[dict[str, Any]], object], content: dict[str, Any] | None = None) -> dict[str, Any]:
    content = plain() if content is None else content
    change(content)
    return content
