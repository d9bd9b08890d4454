"""Other names of keys, as DeepSpeed's files carry them, given the ones of today before anything is checked.

Which ones there are says `shoal.config.deepspeed` (`Renamed`); here is what their values become. Called by whoever
reads a config: `shoal.config`, the Trainer, and `shoal estimate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_protos.config_file import whole
from shoal_protos.text import shown

ZERO = "zero_optimization"
OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Switches of `zero_optimization`, and the sections whose device is "cpu" where they are on."""


CELL_SIZES = {
    "tensor_parallel.autotp_size": "tensor",
    "pipeline.stages": "pipeline",
    "sequence_parallel_size": "context",
    "expert_parallel.autoep_size": "expert",
}
"""DeepSpeed's names of the sizes in the section `shoal.cell`."""
ONE_PROCESS = (None, False, "auto", 0, 1)
"""Values of such a size that say nothing."""
SAID_BY_THEIR_SIZE = ("tensor_parallel", "expert_parallel")
"""Sections of which nothing is read where their size says nothing."""


def with_todays_names(given: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """A copy with today's names. What is given by both names, or is no switch, is added to `faults`."""
    found = dict(given)
    if "bfloat16" in found:
        if "bf16" in found:
            faults.append(
                "`bfloat16` and `bf16` are both given, and the first is an old name of the second; keep `bf16`."
            )
        else:
            found["bf16"] = found["bfloat16"]
        del found["bfloat16"]
    if isinstance(found.get(ZERO), bool):
        found[ZERO] = {"stage": int(found[ZERO])}
    if isinstance(found.get(ZERO), Mapping):
        found[ZERO] = _offloads(found[ZERO], faults)
    for key, dimension in CELL_SIZES.items():
        _take_size(found, key, dimension, faults)
    return found


def _take_size(found: dict[str, Any], key: str, dimension: str, faults: list[str]) -> None:
    """Move DeepSpeed's size of a dimension to the section `shoal.cell`."""
    section, _, name = key.rpartition(".")
    given = found.get(section) if section else found
    if not isinstance(given, Mapping):
        return
    left = {other: value for other, value in given.items() if other != name}
    size = whole(given.get(name))
    if section == "expert_parallel" and given.get("enabled") is not True:
        size = None
    says_nothing = any(type(size) is type(off) and size == off for off in ONE_PROCESS)
    if not section:
        found.pop(name, None)
    elif left and not (says_nothing and section in SAID_BY_THEIR_SIZE):
        found[section] = left
    else:
        del found[section]
    if says_nothing:
        return
    shoal = found.get("shoal")
    mine = shoal.get("cell") if isinstance(shoal, Mapping) else None
    if not (isinstance(shoal, Mapping | None) and isinstance(mine, Mapping | None)):
        return  # which is a fault of its own
    beside = (mine or {}).get(dimension, size)
    if type(size) is not int or size < 0:
        faults.append(f"`{key}` is {shown(size)}; expected a whole number of at least 0.")
    elif whole(beside) != size:
        faults.append(
            f"`{key}` is {shown(size)} and `shoal.cell.{dimension}` {shown(beside)}; both say how many processes a "
            "cell has there. Keep one."
        )
    else:
        found["shoal"] = {**(shoal or {}), "cell": {**(mine or {}), dimension: size}}


def _offloads(given: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    found = {name: value for name, value in given.items() if name not in OFFLOADS}
    for old, section in OFFLOADS.items():
        value = given.get(old)
        if value in (None, False, "auto"):
            continue
        key = f"{ZERO}.{old}"
        beside = found.get(section)
        if value is not True:
            faults.append(f"`{key}` is {shown(value)}; expected true or false.")
        elif beside is None:
            found[section] = {"device": "cpu"}
        elif not isinstance(beside, Mapping) or beside.get("device", "cpu") != "cpu":
            faults.append(
                f"`{key}` is true, and `{ZERO}.{section}` says another place; keep the second, it is the new name."
            )
    return found
