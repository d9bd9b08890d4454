"""What an ElasticJob is called in a cluster: group, version, kind, paths, and what we write on one. Pure.

The only place that names the group. Imported by the launcher of pods, too, so nothing of this room is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_controller.launchers.kubernetes.section import Json

GROUP, VERSION, KIND, PLURAL = "shoal.dev", "v1alpha1", "ElasticJob", "elasticjobs"
API_VERSION = f"{GROUP}/{VERSION}"
FULL_NAME = f"{PLURAL}.{GROUP}"
"""Other projects have a kind of the same name: this is what people type."""
FINALIZER = f"{GROUP}/drain"
"""Keeps a deleted resource until its job is drained and its pods are gone."""
REPORTER = f"{GROUP}/controller"
"""Who Kubernetes' events are from."""


def resources_path(namespace: str) -> str:
    """All of a namespace."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"


def owner_reference(name: str, uid: str) -> Json:
    """What makes an object go with its resource."""
    return {
        "apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": uid, "controller": True,
        "blockOwnerDeletion": True,
    }  # fmt: skip


def uid_of(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["uid"])


def is_deleted(item: Mapping[str, Any]) -> bool:
    """Whether it is to go; it is there as long as it has finalizers."""
    return bool(item["metadata"].get("deletionTimestamp"))


def has_finalizer(item: Mapping[str, Any]) -> bool:
    return FINALIZER in (item["metadata"].get("finalizers") or ())
