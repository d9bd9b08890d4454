"""Old names of DeepSpeed's keys, as files still carry them, given their names of today before anything is checked.

Which ones there are says `shoal.config.deepspeed` (`Renamed`); here is what their values become. Called by whoever
reads a config: `shoal.config`, the Trainer, and `shoal estimate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_protos.text import shown

ZERO = "zero_optimization"
OFFLOADS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Switches of `zero_optimization`, and the sections whose device is "cpu" where they are on."""


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
    return found


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
