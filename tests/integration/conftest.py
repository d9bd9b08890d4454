"""The warm process that all multi-process tests fork from, once per test session; a browser, once per file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration import cluster
from integration.warm import Warm

LONG_AND_LATE = ("test_worlds.py", "test_store_etcd.py", "test_suite_on_a_cluster.py", "test_rules.py", "test_seeds.py")
"""Long files that are late by name: whole files are given to two processes, and one would be idle beside the last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_AND_LATE)


@pytest.fixture(scope="session", autouse=True)
def warm(temporary: Path) -> Iterator[Warm]:
    """Started before the first test, so that nobody takes it for something left behind."""
    with cluster.warmed() as process:
        yield process


@pytest.fixture(scope="module")
def browser(temporary: Path) -> Iterator[None]:
    """Started before the first test that asks for it, as the warm process is."""
    from integration.browser import one_browser

    with one_browser():
        yield
