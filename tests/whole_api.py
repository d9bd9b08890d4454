"""An API server that kubectl and helm can talk to: the one of `api_server.py`, with discovery, OpenAPI, tables, dry
runs, apply patches, warnings of policies, commands in pods, and the kinds that the chart makes. No controllers but one:
a Deployment is rolled out at once.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from typing import Any

import yaml
from admission_policies import Request, denials_of, warnings_of
from aiohttp import web
from api_faults import Refused
from api_server import PODS, RESOURCES, FakeCluster, Json, is_selected, merge
from applied_fields import AppliedFields
from cluster_choice import NAMESPACE
from custom_resources import CustomResources
from custom_resources import at as value_at
from protobuf_objects import MAGIC, json_of

GROUP = "shoal.dev/v1alpha1"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
QUOTAS = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
CORE_EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
NAMESPACES = "/api/v1/namespaces"
NAMESPACED: dict[str, dict[str, str]] = {
    "v1": {
        "pods": "Pod", "secrets": "Secret", "services": "Service", "serviceaccounts": "ServiceAccount",
        "configmaps": "ConfigMap", "persistentvolumeclaims": "PersistentVolumeClaim", "events": "Event",
        "resourcequotas": "ResourceQuota",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet", "replicasets": "ReplicaSet"},
    "batch/v1": {"jobs": "Job", "cronjobs": "CronJob"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "events.k8s.io/v1": {"events": "Event"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"},
    "cert-manager.io/v1": {"certificates": "Certificate"},
    GROUP: {"elasticjobs": "ElasticJob"},
}  # fmt: skip
OF_THE_CLUSTER: dict[str, dict[str, str]] = {
    "v1": {"namespaces": "Namespace", "nodes": "Node"},
    "rbac.authorization.k8s.io/v1": {"clusterroles": "ClusterRole", "clusterrolebindings": "ClusterRoleBinding"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "admissionregistration.k8s.io/v1": {
        "validatingadmissionpolicies": "ValidatingAdmissionPolicy",
        "validatingadmissionpolicybindings": "ValidatingAdmissionPolicyBinding",
    },
}
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
CHANNELS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""How a command in a pod is spoken with: each message begins with the number of its stream."""
STANDARD_OUTPUT, STATUS = b"\x01", b"\x03"
VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
STRICT = ("Deployment", "Service", "StatefulSet", "ConfigMap", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")
"""Kinds whose fields are checked beside those of `api_server.py`."""


class WholeCluster(FakeCluster):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        for version, kinds in NAMESPACED.items():
            self._serve(version, kinds, f"namespaces/{NAMESPACE}/")
        for version, kinds in OF_THE_CLUSTER.items():
            self._serve(version, kinds, "")
        for name in (NAMESPACE, "kube-system"):
            self.put(NAMESPACES, {"metadata": {"name": name}})
        self.resources = None
        self.run_in_pod: Callable[[list[str]], Awaitable[tuple[int, bytes]]] | None = None
        """What becomes of a command in a pod: its exit status and what it prints."""
        self._fields: dict[str, AppliedFields] = {}
        """Of ElasticJobs, by uid."""

    def _serve(self, version: str, kinds: dict[str, str], within: str) -> None:
        for plural, kind in kinds.items():
            path = f"{_root(version)}/{within}{plural}"
            self.kinds[path] = kind
            self.objects.setdefault(path, {})
            if kind in STRICT:
                self.models[path] = f"V1{kind}"

    # ---- requests

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        found = self._about_itself(request.path.rstrip("/"))
        if found is not None:
            return web.json_response(found)
        if request.path == "/openapi/v2":
            return web.Response(body=b"", content_type="application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
        if request.query.get("sendInitialEvents"):
            raise Refused(422, "Invalid", "sendInitialEvents is forbidden: this server has no such watches")
        if request.path == CORE_EVENTS and request.method == "GET":
            return web.json_response(self._core_events(request))
        before = (deepcopy(self.objects), list(self.history), self.resources, dict(self._fields))
        try:
            return await self._one(request)
        finally:
            if "dryRun" in request.query:
                self.objects, self.history, self.resources, self._fields = before

    async def _one(self, request: web.Request) -> web.StreamResponse:
        if not any(request.path == known or request.path.startswith(f"{known}/") for known in self.objects):
            raise web.HTTPNotFound(text="404 page not found\n")
        path, name, sub = self._place(request.path)
        if path == PODS and sub == "exec":
            return await self._execute(request)
        if path == RESOURCES and not sub and _wants_a_table(request):
            return web.json_response(self._table(request, name))
        warnings = list(self._warnings(path, name)) if request.method == "DELETE" else []
        applied = request.content_type == "application/apply-patch+yaml"
        known = self.objects[path].get(name)
        if applied and path == RESOURCES:
            answer: web.StreamResponse = await self._applied(request, name)
        elif request.method == "PUT" or (applied and known is None):
            answer = self._put(path, name, self._parsed(await request.read()))
        else:
            answer = await super()._answered(request)
        if path == RESOURCES and request.method in ("POST", "PUT", "PATCH") and not applied:
            self._note_fields(request, known or {})
        if path == DEFINITIONS and request.method != "GET":
            self._take_definition()
        if path == QUOTAS and request.method != "GET":
            quota = next(iter(self.objects[QUOTAS].values()), None)
            self.quota = int(quota["spec"]["hard"]["pods"]) if quota else None
        for sentence in warnings:
            answer.headers.add("Warning", f'299 - "{sentence}"')
        return answer

    async def _applied(self, request: web.Request, name: str) -> web.Response:
        """An ElasticJob as its appliers want it."""
        manifest, known = self._parsed(await request.read()), self.objects[RESOURCES].get(name)
        self._refuse_unknown(request, manifest)
        fields = deepcopy(self._fields[known["metadata"]["uid"]]) if known else AppliedFields()
        force = request.query.get("force") == "true"
        patch = fields.applied(request.query["fieldManager"], manifest, known or {}, force)
        made = self._patch(RESOURCES, known, patch, "") if known else self._create(RESOURCES, manifest)
        self._fields[made["metadata"]["uid"]] = fields
        return web.json_response(made, status=200 if known else 201)

    def _note_fields(self, request: web.Request, known: Json) -> None:
        """What a write that was taken has made its writer's."""
        name = self._place(request.path)[1] or next(reversed(self.objects[RESOURCES]))
        if (item := self.objects[RESOURCES].get(name)) is not None:
            fields = self._fields.setdefault(item["metadata"]["uid"], AppliedFields())
            fields.written(request.query.get("fieldManager", ""), known, item)

    def install(self, crd: Json) -> None:
        """Make the definition, as the chart does."""
        self._create(DEFINITIONS, crd)
        self._take_definition()

    def _take_definition(self) -> None:
        crd = next(iter(self.objects[DEFINITIONS].values()), None)
        self.resources = CustomResources(crd) if crd else None

    def _warnings(self, path: str, name: str) -> Iterator[str]:
        of_kind = {"ElasticJob": lambda: list(self.objects[RESOURCES].values())}
        bindings = self.objects[BINDINGS].values()
        asked = _request("DELETE", path, name)
        return warnings_of(self.objects[POLICIES], bindings, asked, lambda kind: of_kind[kind]())

    def _refuse_change(self, path: str, old: Json, new: Json) -> None:
        """What a policy denies, or the object itself by `immutable`."""
        name, kind = new["metadata"]["name"], self.kinds[path]
        if kind == "ConfigMap" and old.get("immutable") and old.get("data") != new.get("data"):
            why = "data: Forbidden: field is immutable when `immutable` is set"
            raise Refused(422, "Invalid", f'ConfigMap "{name}" is invalid: {why}')
        asked = _request("UPDATE", path, name)
        for sentence in denials_of(self.objects[POLICIES], self.objects[BINDINGS].values(), asked, new, old):
            raise Refused(422, "Invalid", f'{kind} "{name}" is forbidden: {sentence}')

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        """`kubectl exec`, without an input."""
        assert self.run_in_pod is not None, "the test has not said what becomes of commands in pods"
        line = web.WebSocketResponse(protocols=CHANNELS)
        await line.prepare(request)
        code, printed = await self.run_in_pod(request.query.getall("command"))
        await line.send_bytes(STANDARD_OUTPUT + printed)
        failure = {"reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}}
        status = {"metadata": {}, "status": "Failure", **failure} if code else {"metadata": {}, "status": "Success"}
        await line.send_bytes(STATUS + json.dumps(status).encode())
        await line.close()
        return line

    def _put(self, path: str, name: str, item: Json) -> web.Response:
        known = self.objects[path].get(name)
        if known is None:
            return web.json_response(self._create(path, item), status=201)
        return web.json_response(self._patch(path, known, item, ""))

    def _parsed(self, body: bytes) -> Json:
        return json_of(body) if body.startswith(MAGIC) else dict(yaml.safe_load(body) or {})

    def _create(self, path: str, item: Json) -> Json:
        made = super()._create(path, deepcopy(item))
        if path == DEFINITIONS:
            known = {"conditions": [{"type": "Established", "status": "True"}]}
            return self._write(path, "MODIFIED", {**made, "status": known})
        if path == QUOTAS:
            return self._write(path, "MODIFIED", {**made, "status": {"hard": made["spec"]["hard"]}})
        return self._rolled_out(made) if path == DEPLOYMENTS else made

    def _patch(self, path: str, item: Json, patch: Json, sub: str) -> Json:
        made = super()._patch(path, item, deepcopy(patch), sub)
        return self._rolled_out(made) if path == DEPLOYMENTS else made

    def _rolled_out(self, deployment: Json) -> Json:
        count = deployment["spec"]["replicas"]
        numbers = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        status = {"observedGeneration": 1, **numbers}
        return self._write(
            DEPLOYMENTS, "MODIFIED", merge(deployment, {"metadata": {"generation": 1}, "status": status})
        )

    def _write(self, path: str, kind: str, item: Json) -> Json:
        if kind == "MODIFIED":
            self._refuse_change(path, self.objects[path][item["metadata"]["name"]], item)
        within = {"namespace": NAMESPACE} if "/namespaces/" in path else {}
        metadata = {**within, **item["metadata"]}
        return super()._write(path, kind, {**self._typed(path), **item, "metadata": metadata})

    def _typed(self, path: str) -> Json:
        parts = path.split("/")
        return {"apiVersion": parts[2] if parts[1] == "api" else "/".join(parts[2:4]), "kind": self.kinds[path]}

    def _list_of(self, path: str, items: list[Json], metadata: Json) -> Json:
        return {**self._typed(path), **super()._list_of(path, items, metadata)}

    def _bookmark(self, path: str, version: int) -> Json:
        return {**self._typed(path), **super()._bookmark(path, version)}

    # ---- what it says of itself

    def _about_itself(self, path: str) -> Json | None:
        versions = [one for one in {**NAMESPACED, **OF_THE_CLUSTER} if one != GROUP or self.resources]
        groups = [one for one in versions if "/" in one]
        if path == "/version":
            return dict(VERSION)
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"apiVersion": "v1", "kind": "APIGroupList", "groups": list(map(_group, groups))}
        for version in versions:
            if path == _root(version):
                return {"kind": "APIResourceList", "groupVersion": version, "resources": list(_resources(version))}
            if path == f"/openapi/v3{_root(version)}":
                return _openapi(version)
        if path == "/openapi/v3":
            places = {_root(one).strip("/"): {"serverRelativeURL": f"/openapi/v3{_root(one)}"} for one in versions}
            return {"paths": places}
        return None

    def _core_events(self, request: web.Request) -> Json:
        """The same objects by their older names."""
        older = []
        for item in self.objects[f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"].values():
            names = {"involvedObject": item["regarding"], "message": item["note"], "firstTimestamp": item["eventTime"]}
            older.append({**item, **names, "apiVersion": "v1", "source": {"component": item["reportingController"]}})
        items = [one for one in older if is_selected(one, request.query)]
        return self._list_of(CORE_EVENTS, items, {"resourceVersion": str(self.version)})

    def _table(self, request: web.Request, name: str) -> Json:
        """What `kubectl get` prints: the columns of the definition."""
        (crd,) = self.objects[DEFINITIONS].values()
        columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
        if name and name not in self.objects[RESOURCES]:
            raise Refused(404, "NotFound", f'elasticjobs.shoal.dev "{name}" not found')
        items = [one for key, one in self.objects[RESOURCES].items() if name in ("", key)]
        rows = [_row(one, columns) for one in items if is_selected(one, request.query)]
        heads = [{"name": "Name", "type": "string", "format": "name", "priority": 0}]
        heads += [{"format": "", "description": "", "priority": 0, **one} for one in columns]
        return {
            "apiVersion": "meta.k8s.io/v1", "kind": "Table", "metadata": {"resourceVersion": str(self.version)},
            "columnDefinitions": heads, "rows": rows,
        }  # fmt: skip


def _request(operation: str, path: str, name: str) -> Request:
    group = path.split("/")[2] if path.startswith("/apis/") else ""
    namespace = NAMESPACE if f"/namespaces/{NAMESPACE}/" in path else ""
    return Request(operation, group, path.rpartition("/")[2], name, namespace)


def _wants_a_table(request: web.Request) -> bool:
    once = request.method == "GET" and not request.query.get("watch")
    return once and "as=Table" in request.headers.get("Accept", "")


def _row(item: Json, columns: list[Json]) -> Json:
    cells = [item["metadata"]["name"], *(_cell(value_at(item, one["jsonPath"])) for one in columns)]
    part = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": item["metadata"]}
    return {"cells": cells, "object": part}


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _group(version: str) -> Json:
    name, _, number = version.partition("/")
    found = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [found], "preferredVersion": found}


def _resources(version: str) -> Iterator[Json]:
    for namespaced, kinds in ((True, NAMESPACED), (False, OF_THE_CLUSTER)):
        for plural, kind in kinds.get(version, {}).items():
            one = {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": VERBS}
            yield one | ({"shortNames": ["ej"], "categories": ["all"]} if version == GROUP else {})
            if version == GROUP:
                scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
                yield {**one, "name": f"{plural}/status", "verbs": ["get", "patch", "update"]}
                yield {**one, **scale, "name": f"{plural}/scale", "verbs": ["get", "patch", "update"]}


def _openapi(version: str) -> Json:
    """So much of it that clients leave it to the server to check fields, and know that dry runs can be had."""
    group, _, number = version.rpartition("/")
    checked = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")]
    paths: Json = {}
    schemas: Json = {}
    for namespaced, kinds in ((True, NAMESPACED), (False, OF_THE_CLUSTER)):
        for plural, kind in kinds.get(version, {}).items():
            known = {"group": group, "version": number, "kind": kind}
            verb = {"parameters": checked, "x-kubernetes-group-version-kind": known, "responses": {}}
            within = "/namespaces/{namespace}" if namespaced else ""
            paths[f"{_root(version)}{within}/{plural}/{{name}}"] = {"patch": verb, "put": verb}
            schemas[f"{group}.{number}.{kind}"] = {"type": "object", "x-kubernetes-group-version-kind": [known]}
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
