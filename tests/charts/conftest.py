"""One empty cluster for all tests of the chart that render it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from charts import rendering


@pytest.fixture(scope="session", autouse=True)
def cluster_that_is_asked() -> Iterator[None]:
    with rendering.empty_cluster() as kubeconfig:
        rendering.CLUSTERS.append(kubeconfig)
        yield
    rendering.CLUSTERS.clear()
