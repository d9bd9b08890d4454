"""Which manager a field of an object is of, for server-side apply: an API server's rules, for `whole_api.py`.

A manager that applies owns the fields of its manifest; one that writes otherwise owns what it has changed. What a
manager applies no more is removed where it is nobody else's; what is another one's and has another value is a conflict.
Lists are fields as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from api_faults import Refused

Json = dict[str, Any]
Place = tuple[str, ...]


class AppliedFields:
    """Of one object."""

    def __init__(self) -> None:
        self._owned: dict[str, set[Place]] = {}

    def applied(self, manager: str, manifest: Json, item: Json, force: bool) -> Json:
        """Return the merge patch that a manifest means. Raises `Refused`."""
        given = dict(leaves(manifest))
        others = {place: other for other, places in self._owned.items() if other != manager for place in places}
        now = dict(leaves(item))
        conflicts = [place for place, value in given.items() if place in others and now.get(place) != value]
        if conflicts and not force:
            named = "; ".join(f'conflict with "{others[place]}": .{".".join(place)}' for place in conflicts)
            raise Refused(409, "Conflict", f"Apply failed with {len(conflicts)} conflict(s): {named}")
        dropped = self._owned.get(manager, set()) - given.keys() - others.keys()
        for places in self._owned.values():
            places.difference_update(conflicts)
        self._owned[manager] = set(given)
        patch: Json = {}
        for place, value in {**dict.fromkeys(dropped), **given}.items():
            inner = patch
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            inner[place[-1]] = value
        return patch

    def written(self, manager: str, before: Json, after: Json) -> None:
        """Another kind of write has made one of the other."""
        was, now = dict(leaves(before)), dict(leaves(after))
        changed = {place for place in was.keys() | now.keys() if was.get(place) != now.get(place)}
        for places in self._owned.values():
            places -= changed
        self._owned.setdefault(manager, set()).update(changed & now.keys())


def leaves(item: Json) -> Iterator[tuple[Place, Any]]:
    """The fields of an object that a manifest says, and that hold no further ones."""
    yield from _leaves(item.get("spec") or {}, ("spec",))
    for key in ("labels", "annotations"):
        yield from _leaves(item.get("metadata", {}).get(key) or {}, ("metadata", key))


def _leaves(value: Json, place: Place) -> Iterator[tuple[Place, Any]]:
    for key, one in value.items():
        if isinstance(one, dict) and one:
            yield from _leaves(one, (*place, key))
        else:
            yield (*place, key), one
