"""A Kubernetes launcher with its connection to a cluster, for `server.py` where a controller has this launcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi
from shoal_controller.launchers.kubernetes.options import ClusterOptions, PodOptions
from shoal_controller.launchers.kubernetes.pod_launcher import KubernetesLauncher, Submit
from shoal_controller.launchers.kubernetes.request_outcomes import Asked, nobody_counts


@asynccontextmanager
async def kubernetes_launcher(
    pods: PodOptions, cluster: ClusterOptions, submit: Submit, asked: Asked = nobody_counts
) -> AsyncIterator[KubernetesLauncher]:
    """For as long as the context lasts; its pods outlive it. `asked` hears of every request to the cluster. Raises
    `UserError` where there is no cluster.
    """
    api = await ClusterApi.connect(cluster.kubeconfig, cluster.namespace, asked)
    launcher = KubernetesLauncher(api, pods, cluster, submit)
    try:
        yield launcher
    finally:
        await launcher.release()
        await api.close()
