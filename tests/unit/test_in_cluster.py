"""A controller that runs in a pod: it asks as its service account, whose token the cluster replaces every hour."""

from __future__ import annotations

import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web
from api_faults import served
from api_server import PODS, FakeCluster
from asynchronous import asynchronous
from certificates import authority, certificate
from cluster_choice import NAMESPACE
from kubernetes_asyncio.config import incluster_config
from pod_team import hurry
from ports import free_port
from shoal_controller.launchers.kubernetes import cluster_api
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterSilence
from shoal_protos.errors import UserError
from tiers import check

pytestmark = check("serves the API of a cluster")


class Listening(FakeCluster):
    """One that remembers who asked last."""

    shown = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.shown = request.headers["Authorization"]
        return await super().handle(request)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service account's folder, as a pod has it, with an authority beside it."""
    authority(tmp_path, "ca")
    certificate(tmp_path, "server", "ca", names="IP:127.0.0.1")
    for name, text in (("token", "first"), ("namespace", f"{NAMESPACE}\n")):
        (tmp_path / name).write_text(text)
    hurry(monkeypatch)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", timedelta(0))
    monkeypatch.setattr(cluster_api, "NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    return tmp_path


@asynchronous
async def test_a_token_that_the_cluster_has_replaced_is_shown_from_then_on(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(account / "server.pem", account / "server.key")
    cluster, port = Listening(), free_port()
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    async with served(cluster, port, tls):
        api = await ClusterApi.connect()
        try:
            assert api.namespace == NAMESPACE
            assert await api.list(PODS) == ([], "0") and cluster.shown == "Bearer first"
            (account / "token").write_text("second")
            assert await api.list(PODS) == ([], "0") and cluster.shown == "Bearer second"
            (account / "token").write_text("")
            with pytest.raises(ClusterSilence, match="Token file exists but empty"):
                await api.list(PODS)
            (account / "token").write_text("third")
            assert await api.list(PODS) == ([], "0") and cluster.shown == "Bearer third"
        finally:
            await api.close()


@asynchronous
async def test_a_pod_without_a_service_account_is_told_in_one_sentence(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (account / "token").unlink()
    with pytest.raises(UserError, match="run the controller in a pod with a service account, or set KUBECONFIG"):
        await ClusterApi.connect()
