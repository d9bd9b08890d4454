"""The form in which the store keeps what is durable: a small state, and a record of its own for whatever is large.

`state_of` is small whatever the size of the job: numbers, and which plans are in force. Every plan, worker and resize,
and every field named in `FIELDS`, is a text of its own, so that a change writes what has changed and nothing else.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from shoal_protos.plan import check_plan

from shoal_controller.core.machine.codec import plain, restored
from shoal_controller.core.machine.durable import Durable

FIELDS = (
    "spec", "cell", "changed_bounds", "description", "reason", "paused_because", "last_refusal", "corruption",
    "restored_from", "failures", "link_faults", "backoff_counts", "backoff_until", "figures", "opened_generations",
    "checkpoints", "unreadable_checkpoints", "failed_save", "anew",
    "reports", "sharing",
)  # fmt: skip
"""Those of no bounded size, or that seldom change. One that has its default has no record."""

PLANS, WORKERS, RESIZES = "plans", "workers", "resizes"
"""Rooms, in which every entry is a record."""

_DEFAULTS = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in fields(Durable)
}
_SMALL = tuple(name for name in _DEFAULTS if name not in (*FIELDS, "roster", "history", "current", "planned"))


def state_of(durable: Durable) -> dict[str, Any]:
    """What is small, as `json.dumps` takes it; plans by their generations."""
    state: dict[str, Any] = {name: plain(getattr(durable, name)) for name in _SMALL}
    state["current"] = durable.current.generation if durable.current is not None else None
    state["planned"] = [plan.generation for plan in durable.planned]
    return state


def changed_records(before: Durable | None, after: Durable) -> dict[str, str | None]:
    """The texts of all records that are not as they were, by name; None: there is none any more. Plans come first."""
    changed: dict[str, str | None] = {}
    rooms = _rooms(before) if before is not None else {}
    for room, entries in _rooms(after).items():
        changed.update(_changed_entries(room, rooms.get(room, {}), entries))
    for name in FIELDS:
        value, default = getattr(after, name), _DEFAULTS[name]
        if _differs(value, default if before is None else getattr(before, name)):
            changed[name] = _text(value) if _differs(value, default) else None
    return changed


def durable_from(state: Mapping[str, Any], records: Mapping[str, str]) -> Durable:
    """The inverse, of a state and all its records. Raises `ValueError` or a `PeerError` where they are not what was
    written: a job that went on with them would fail, and end its workers with all that they hold.
    """
    found = {name: json.loads(text) for name, text in records.items()}
    entries = {room: _entries_of(room, found) for room in (PLANS, WORKERS, RESIZES)}
    texts = {name: value for name, value in found.items() if "/" not in name}
    if unknown := [name for name in texts if name not in FIELDS]:
        raise ValueError(f"there is no record {', '.join(unknown)}; a newer Shoal may have written it")
    resizes = entries[RESIZES]
    whole = {
        **state,
        **texts,
        "current": _plan(entries[PLANS], state["current"]) if state["current"] is not None else None,
        "planned": [_plan(entries[PLANS], generation) for generation in state["planned"]],
        "roster": entries[WORKERS],
        "history": [resizes[generation] for generation in sorted(resizes, key=int)],
    }
    durable = restored(Durable, whole)
    assert isinstance(durable, Durable)
    _check_entries(durable)
    by_age = sorted(durable.roster.values(), key=lambda record: record.join_order)
    return replace(durable, roster={record.worker: record for record in by_age})


def _check_entries(durable: Durable) -> None:
    """Each lies where it belongs, plans are sound, and their members are known."""
    for name, record in durable.roster.items():
        if record.worker != name:
            raise ValueError(f"record {WORKERS}/{name} is that of worker {record.worker!r:.30}")
    for plan in (durable.current, *durable.planned):
        if plan is not None:
            check_plan(plan)
            if strangers := plan.workers - durable.roster.keys():
                raise ValueError(f"plan {plan.generation} has member {min(strangers)!r:.30}, who has no record")
    if strange := durable.backoff_until.keys() - durable.backoff_counts.keys():
        raise ValueError(f"the back-off of {min(strange)!r:.30} was never counted")


def _rooms(durable: Durable) -> dict[str, Mapping[str, Any]]:
    plans = [durable.current, *durable.planned] if durable.current is not None else durable.planned
    return {
        PLANS: {str(plan.generation): plan for plan in plans},
        WORKERS: durable.roster,
        RESIZES: {str(resize.generation): resize for resize in durable.history},
    }


def _changed_entries(
    room: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, str | None]]:
    if before is after:
        return
    for name, value in after.items():
        if name not in before or _differs(value, before[name]):
            yield f"{room}/{name}", _text(value)
    for name in before:
        if name not in after:
            yield f"{room}/{name}", None


def _entries_of(room: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{room}/"): value for name, value in found.items() if name.startswith(f"{room}/")}


def _plan(plans: Mapping[str, Any], generation: object) -> Any:
    if str(generation) not in plans:
        raise ValueError(f"the plan of generation {generation} is not there")
    plan = plans[str(generation)]
    if plan["generation"] != generation:
        raise ValueError(f"the plan of generation {generation} is that of {plan['generation']!r:.30}")
    return plan


def _differs(value: object, other: object) -> bool:
    """Most of what is compared is the very same object, and large. Equal ones may differ in what is not part of their
    identity: a checkpoint that was compared only later.
    """
    return value is not other and (value != other or plain(value) != plain(other))


def _text(value: object) -> str:
    return json.dumps(plain(value), separators=(",", ":"), sort_keys=True)
