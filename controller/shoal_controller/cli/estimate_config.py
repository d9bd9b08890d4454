"""What a training config says of memory, for `shoal estimate`. Keys that say nothing of it are not looked at.

Workers check the whole of a config (`shoal.config`), which the controller's side does not import: it is asked in a
process of its own what training would refuse.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal_protos.config_file import whole
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MOST, MOST_LANES, state_bytes_of
from shoal_protos.old_config_keys import with_todays_names
from shoal_protos.shape import DIMENSIONS, MOST_PROCESSES, Shape
from shoal_protos.validation import wrong_value

from shoal_controller.cli.estimate_counts import LaneSpread, elastic_spread, spread_of

DEVICES = {"none": "none", "cpu": "host", "nvme": "file"}
CHECK_SECONDS = 30.0
"""How long the check of a config may take; it takes a second."""
FAULTS = 1
"""The exit status of a check that has found some."""


def wanted_by(given: Mapping[str, Any], state_bytes: int | None, workers: int) -> dict[str, Any]:
    """Fields of `MemorySetup` that the config decides, and the sizes of a cell. `state_bytes`: where somebody knows
    better than its optimizer.

    Raises `UserError`.
    """
    config = _Keys(with_todays_names(given, []))
    elastic = elastic_spread(given, _stage(config), workers, _cell(config))
    found = {
        "stage": _stage(config),
        "mirrors": config.at("shoal.mirrors", _is_natural, "a whole number of at least 0"),
        "lanes": elastic.lanes.lanes if elastic else _lanes(config),
        "micro_batches": elastic.lanes.micro_batches_per_lane if elastic else _micro_batches(config),
        "precision": _precision(config),
        "state_bytes": state_bytes if state_bytes is not None else _state_bytes(config),
        **{name: getattr(_cell(config), name) for name in DIMENSIONS},
        "offload": _device(config, "zero_optimization.offload_optimizer.device", DEVICES),
    }
    if config.at("shoal.average", lambda given: isinstance(given, dict), "an object {…}") is not None:
        found["average"] = True
    if _device(config, "zero_optimization.offload_param.device", {"none": "none", "cpu": "host"}) == "host":
        found["offload_parameters"] = True
    if _device(config, "shoal.mirrors_on", {"device": "device", "host": "host"}) == "host":
        found["mirrors_on_host"] = True
    return {name: value for name, value in found.items() if value is not None}


def counts_of(given: Mapping[str, Any], workers: int | None) -> LaneSpread:
    """The lanes of a config, and for how many workers they are. Raises `UserError`."""
    config = _Keys(with_todays_names(given, []))
    elastic, lanes = elastic_spread(given, _stage(config), workers, _cell(config)), _lanes(config)
    if elastic is None and lanes is None:
        raise UserError(
            "the config does not say how many lanes there are; it needs a section elasticity, `shoal.lanes`, or both "
            "`train_batch_size` and `train_micro_batch_size_per_gpu`."
        )
    micro_batch = config.count("train_micro_batch_size_per_gpu")
    found = elastic or spread_of(lanes or 1, micro_batch, _micro_batches(config) or 1)
    return replace(found, cell=_cell(config))


def refused_by_training(given: Mapping[str, Any], file: Path, workers: int | None = None) -> str:
    """What `shoal.initialize` would refuse of this config whatever the script adds, in its words; empty: nothing.

    It is no error here: the answer may be good for what it is asked, and nobody trains yet.
    """
    command = (sys.executable, "-X", "utf8", "-P", "-m", "shoal.config")
    environment = {**os.environ, "SHOAL_WANTED_WORKERS": str(workers or 1)}
    try:
        check = subprocess.run(
            command, input=json.dumps(given), capture_output=True, encoding="utf-8", errors="replace",
            timeout=CHECK_SECONDS, check=False, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"whether training takes config {file} is not known: {error}"
    if check.returncode == FAULTS and check.stdout:
        return f"training refuses config {file}: {check.stdout.strip()}"
    if check.returncode:
        why = check.stderr.strip().rpartition("\n")[2]
        return f"whether training takes config {file} is not known: its check ended with {check.returncode}: {why}"
    return ""


class _Keys:
    """The values of a config by their dotted keys."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def at(self, key: str, is_right: Callable[[Any], bool], allowed: str) -> Any:
        """None where nothing is given, or "auto". Raises `UserError` for a value that is not right."""
        value: Any = self._given
        parts = key.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(value, dict):
                raise UserError(f"{wrong_value('.'.join(parts[:depth]), value, 'an object {…}')}.")
            value = whole(value.get(part))
            if value is None or value == "auto":
                return None
        if not is_right(value):
            raise UserError(f"{wrong_value(key, value, allowed)}.")
        return value

    def count(self, key: str, most: int = MOST) -> int | None:
        """A whole number of at least 1."""
        allowed = f"a whole number from 1 to {most if most < MOST else '10^15'}"
        value: int | None = self.at(key, lambda given: _is_natural(given) and 1 <= given <= most, allowed)
        return value


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _cell(config: _Keys) -> Shape:
    sizes: dict[str, Any] = {name: config.count(f"shoal.cell.{name}", MOST_PROCESSES) or 1 for name in DIMENSIONS}
    return Shape(**sizes)


def _stage(config: _Keys) -> int | None:
    stage: int | None = config.at("zero_optimization.stage", _is_stage, "0, 1, 2 or 3")
    return stage


def _is_stage(value: Any) -> bool:
    return _is_natural(value) and value <= 3


def _lanes(config: _Keys) -> int | None:
    """As given, or what is left of the batch; None where the config does not say."""
    lanes, batch = config.count("shoal.lanes", MOST_LANES), config.count("train_batch_size")
    micro = config.count("train_micro_batch_size_per_gpu")
    if lanes is not None or batch is None or micro is None:
        return lanes
    derived = max(1, batch // (micro * (_micro_batches(config) or 1) * _cell(config).expert))
    if derived > MOST_LANES:
        raise UserError(
            f"`train_batch_size` {batch} and `train_micro_batch_size_per_gpu` {micro} make {derived} lanes; at most "
            f"{MOST_LANES} are allowed."
        )
    return derived


def _micro_batches(config: _Keys) -> int | None:
    """Of a lane, as given by either name."""
    return config.count("shoal.micro_batches_per_lane") or config.count("gradient_accumulation_steps")


def _precision(config: _Keys) -> str | None:
    for name in ("bf16", "fp16"):
        if config.at(f"{name}.enabled", lambda value: isinstance(value, bool), "true or false"):
            return name
    return None


def _device(config: _Keys, key: str, known: dict[str, str]) -> str | None:
    names = list(known)
    allowed = f"{', '.join(names[:-1])} or {names[-1]}"
    device = config.at(key, lambda value: isinstance(value, str) and value in known, allowed)
    return None if device is None else known[device]


def _state_bytes(config: _Keys) -> int | None:
    name = config.at("optimizer.type", lambda value: isinstance(value, str), "a string")
    arguments = config.at("optimizer.params", lambda value: isinstance(value, dict), "a section of parameters")
    if name is None:
        return None
    found = state_bytes_of(name, arguments or {})
    if found is None:
        raise UserError(
            f"how much state optimizer {name} keeps is not known; say with --state-bytes how many bytes it has of one "
            "parameter."
        )
    return found
