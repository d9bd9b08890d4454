"""What needs a GPU: `make test-gpu`. On a machine without one all of it is skipped, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integration import cluster
from integration.warm import Warm

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.device_count():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_report_header() -> str:
    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    return f"GPUs: {', '.join(names)}" if names else "no GPU here: everything in tests/gpu is skipped"


@pytest.fixture(scope="session", autouse=True)
def warm(temporary: Path) -> Iterator[Warm]:
    """Started before the first test; it never uses a GPU itself, as what has used one cannot be forked."""
    with cluster.warmed() as process:
        yield process
