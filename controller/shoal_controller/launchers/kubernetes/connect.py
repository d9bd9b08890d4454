"""The connection to a cluster, and a launcher of pods over it: for `server.py`, where one is allowed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi
from shoal_controller.launchers.kubernetes.options import ClusterOptions, PodOptions
from shoal_controller.launchers.kubernetes.pod_launcher import KubernetesLauncher, Submit
from shoal_controller.launchers.kubernetes.request_outcomes import Asked, nobody_counts


@asynccontextmanager
async def connected(cluster: ClusterOptions, asked: Asked = nobody_counts) -> AsyncIterator[ClusterApi]:
    """For as long as the context lasts. `asked` hears of all requests. Raises `UserError` where there is no cluster."""
    api = await ClusterApi.connect(cluster.kubeconfig, cluster.namespace, asked)
    try:
        yield api
    finally:
        await api.close()


@asynccontextmanager
async def kubernetes_launcher(
    api: ClusterApi, pods: PodOptions, cluster: ClusterOptions, submit: Submit
) -> AsyncIterator[KubernetesLauncher]:
    """For as long as the context lasts; its pods outlive it."""
    launcher = KubernetesLauncher(api, pods, cluster, submit)
    try:
        yield launcher
    finally:
        await launcher.release()
