"""The two tables of launchers: what the core knows of each kind, and how each is made."""

from __future__ import annotations

from typing import get_args

from shoal_controller.core.machine.spec import LAUNCHER_TRAITS, LauncherKind, traits_of
from shoal_controller.launchers.registry import LAUNCHERS


def test_every_kind_has_traits_and_is_made_by_the_registry_if_it_starts_workers() -> None:
    assert list(LAUNCHER_TRAITS) == list(get_args(LauncherKind))
    assert LAUNCHERS.keys() == {kind for kind, traits in LAUNCHER_TRAITS.items() if traits.starts}


def test_a_kind_that_only_a_newer_shoal_knows_starts_workers_and_lets_them_come_back() -> None:
    traits = traits_of("newer")
    assert traits.starts and traits.readmits
