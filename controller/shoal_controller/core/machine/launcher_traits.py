"""Traits of launchers by kind: the core asks a job for a trait of its launcher (`JobSpec.traits`), never for its name.

A new launcher is a kind and a line of `TRAITS` here, a line of `launchers/registry.py`, and its module there; if it has
settings, they are in `settings.py` and come by `LauncherMeans`, which `server.py` fills; a section of a job's body is
in `api/models.py` and `spec.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "local", "kubernetes"]
"""Kinds as a job's specification names them: the keys of `TRAITS`."""
NO_LAUNCHER: Kind = "none"


@dataclass(frozen=True, slots=True)
class LauncherTraits:
    """A launcher's, as far as decisions depend on them."""

    starts: bool = True
    """It starts workers and sees their ends; without it they come by themselves (`shoal worker`)."""
    readmits: bool = True
    """An evicted worker may thaw and join again; else its process is ended, for it holds what another one needs."""


TRAITS: Mapping[str, LauncherTraits] = {
    "none": LauncherTraits(starts=False),
    "local": LauncherTraits(),
    "kubernetes": LauncherTraits(readmits=False),
}


def traits_of(launcher: str) -> LauncherTraits:
    """Return the traits of a kind; the ordinary ones of one that only a newer Shoal knows, which may have stored it."""
    return TRAITS.get(launcher, LauncherTraits())
