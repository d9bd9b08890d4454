"""Makes the token of role `view` with which Prometheus reads `/metrics`, once, and keeps it in a Secret.

Run by a job after each install and upgrade. A Secret that has a token stays as it is. Where the controllers know a
token of that name that the Secret has lost, it gets a new secret. `SHOAL_VIEW_TOKEN_SECRET` is the Secret's name.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx
from rest import REQUEST_SECONDS, Rest, environment, fail

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PATIENCE_SECONDS = 300.0


def main() -> None:
    given = environment()
    account = Path(given.get("SHOAL_SERVICE_ACCOUNT", ACCOUNT))
    name = given["SHOAL_VIEW_TOKEN_SECRET"]
    with cluster(given, account) as client:
        path = f"/api/v1/namespaces/{(account / 'namespace').read_text().strip()}/secrets/{name}"
        found = client.get(path)
        if found.is_error:
            fail(f"the secret {name} cannot be read: {found.status_code} {found.text[:500]}")
        if (found.json().get("data") or {}).get("token"):
            print(f"the secret {name} has a token already")
            return
        token = base64.b64encode(made(given, name).encode()).decode()
        kept = client.patch(
            path, json={"data": {"token": token}}, headers={"Content-Type": "application/merge-patch+json"}
        )
        if kept.is_error:
            fail(f"the secret {name} cannot be changed: {kept.status_code} {kept.text[:500]}")
    print(f"the secret {name} has a token of role view")


def cluster(given: Mapping[str, str], account: Path) -> httpx.Client:
    """The API server, as this pod's service account."""
    host, port = given["KUBERNETES_SERVICE_HOST"], given["KUBERNETES_SERVICE_PORT"]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return httpx.Client(
        base_url=f"https://{place}", timeout=REQUEST_SECONDS,
        verify=ssl.create_default_context(cafile=account / "ca.crt"),
        headers={"Authorization": f"Bearer {(account / 'token').read_text().strip()}"},
    )  # fmt: skip


def made(given: Mapping[str, str], name: str) -> str:
    """A token's secret, new at the controllers."""
    rest = Rest(given, PATIENCE_SECONDS)
    try:
        names = [token["name"] for token in rest.ask("GET", "/v1/tokens")["tokens"]]
        if name in names:
            answer = rest.ask("POST", f"/v1/tokens/{name}/rotate", {"keep_seconds": 0})
        else:
            answer = rest.ask("POST", "/v1/tokens", {"name": name, "role": "view"})
        return str(answer["token"])
    finally:
        rest.close()


if __name__ == "__main__":
    main()
