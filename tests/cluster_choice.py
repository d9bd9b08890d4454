"""Which cluster the tests of pods and resources ask: the one in this process, or, by `make cluster`, a real one."""

from __future__ import annotations

import os

REAL = os.environ.get("SHOAL_CLUSTER", "")
"""A kubeconfig; empty: the one in this process."""
FAKE_NODES = bool(REAL) and os.environ.get("SHOAL_CLUSTER_NODES") == "fake"
"""Its pods are placed and run by the tests' own nodes: far_cluster.py."""
NAMESPACE = os.environ.get("SHOAL_CLUSTER_NAMESPACE", "team")
"""In a real cluster one that was made for the tests."""
