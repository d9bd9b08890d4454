"""A cluster's API server inside a test: objects with versions and uids, watches, and the faults of a real one.

It keeps resourceVersions, uids, finalizers and owners, serves lists in pages, watches with bookmarks and 410, merge
patches, `/status`, `/scale` and deletion with grace, refuses unknown fields of what is sent, and fails where a test
says so (`api_faults.py`). Nodes and kubelets are in `kubelet.py`, what ElasticJobs have of their definition in
`custom_resources.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web
from api_faults import ApiFaults, Refused, answer, status_of
from api_logs import served_log
from cluster_choice import NAMESPACE
from custom_resources import CustomResources, Invalid, definition
from custom_resources import at as value_at
from kubernetes_asyncio.client import models

Json = dict[str, Any]
PODS, NODES, SECRETS = (
    f"/api/v1/namespaces/{NAMESPACE}/pods",
    "/api/v1/nodes",
    f"/api/v1/namespaces/{NAMESPACE}/secrets",
)
RESOURCES = f"/apis/shoal.dev/v1alpha1/namespaces/{NAMESPACE}/elasticjobs"
EVENTS = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"
POD_GROUPS = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{NAMESPACE}/podgroups"
KINDS = {PODS: "Pod", NODES: "Node", SECRETS: "Secret", RESOURCES: "ElasticJob", EVENTS: "Event"}
KINDS |= {POD_GROUPS: "PodGroup"}
MODELS = {PODS: "V1Pod", SECRETS: "V1Secret", EVENTS: "EventsV1Event"}
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
NEEDED_IN_EVENTS = ("action", "eventTime", "note", "reason", "regarding", "reportingController", "reportingInstance")
BOOKMARK_SECONDS = 0.2


class FakeCluster(ApiFaults):
    """See the module's text. What a test changes itself it changes with `put` and `remove`."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.models = dict(KINDS), dict(MODELS)
        """By path of all objects of a kind; `models`: those whose fields are checked."""
        self.objects: dict[str, dict[str, Json]] = {path: {} for path in KINDS}
        self.resources: CustomResources | None = CustomResources(definition())
        """None: nobody has installed the definition."""
        self.history: list[tuple[int, str, str, Json]] = []
        self.quota: int | None = None
        self.logs = Path()
        """Where pods' logs lie, each in a file of the pod's name."""
        self.missing = {POD_GROUPS}
        """Paths of kinds that are not installed."""
        self.changed: Callable[[str, str, Json], None] = lambda path, kind, item: None
        self._version, self._uids = itertools.count(1), itertools.count(1)
        self.version = 0
        self._oldest = 0
        self._news = asyncio.Event()

    # ---- for tests and kubelets

    def put(self, path: str, item: Json) -> Json:
        """Make or replace an object, as one in the cluster would."""
        metadata = item.setdefault("metadata", {})
        known = self.objects[path].get(metadata["name"])
        metadata.setdefault("uid", known["metadata"]["uid"] if known else f"uid-{next(self._uids)}")
        metadata.setdefault("creationTimestamp", _now())
        return self._write(path, "MODIFIED" if known else "ADDED", item)

    def update(self, path: str, name: str, change: Callable[[Json], object]) -> Json:
        item = deepcopy(self.objects[path][name])
        change(item)
        return self._write(path, "MODIFIED", item)

    def remove(self, path: str, name: str) -> None:
        """The object is gone, and all that it owns."""
        item = self.objects[path].pop(name)
        self._write(path, "DELETED", item)
        uid = item["metadata"]["uid"]
        for other, items in self.objects.items():
            for one in list(items.values()):
                if uid in [owner["uid"] for owner in one["metadata"].get("ownerReferences", ())]:
                    self.remove(other, one["metadata"]["name"])

    def node(self, name: str, *taints: str, ready: str = "True", **spec: Any) -> Json:
        """`ready`: what its kubelet says; `Unknown`: it says nothing."""
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        keys = [{"key": key, "effect": "NoSchedule"} for key in taints]
        return self.put(NODES, {"metadata": {"name": name}, "spec": {**spec, "taints": keys}, "status": status})

    def pods(self) -> dict[str, Json]:
        return self.objects[PODS]

    def compact(self) -> None:
        """Nobody can go on from an older version."""
        self._oldest = self.version
        self.history.clear()

    def _write(self, path: str, kind: str, item: Json) -> Json:
        self.version = next(self._version)
        item = deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind != "DELETED":
            self.objects[path][item["metadata"]["name"]] = item
        self.history.append((self.version, path, kind, item))
        self._news.set()
        self._news = asyncio.Event()
        self.changed(path, kind, item)
        return item

    # ---- requests

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        path, name, sub = self._place(request.path)
        body = self.thinned(request.path, self._parsed(await request.read()))
        if request.method == "GET" and not name:
            return await self._listed(request, path)
        if path == RESOURCES:
            self._refuse_unknown(request, body)
        if request.method == "POST" and sub == "binding":
            self.update(path, name, lambda pod: pod["spec"].update(nodeName=body["target"]["name"]))
            return answer(201, {"kind": "Status", "status": "Success"})
        if request.method == "POST":
            return answer(201, self._create(path, body))
        item = self.objects[path].get(name)
        if item is None:
            raise Refused(404, "NotFound", f'{path.rpartition("/")[2]} "{name}" not found')
        if path == PODS and sub == "log":
            file = self.logs / f"{name}.log"
            return await served_log(request, lambda: self.objects[PODS].get(name), file, self._watches)
        if request.method == "DELETE":
            return answer(200, self._delete(path, item, body))
        if request.method == "PATCH":
            item = self._patch(path, item, body, sub)
        return answer(200, self.resources.scale_of(item) if sub == "scale" and self.resources else item)

    def _refuse_unknown(self, request: web.Request, item: Json) -> None:
        strict = request.query.get("fieldValidation") == "Strict"
        if strict and self.resources is not None and (unknown := self.resources.unknown(item)):
            raise Refused(400, "BadRequest", f'strict decoding error: unknown field "{unknown[0]}"')

    def _parsed(self, body: bytes) -> Json:
        return dict(json.loads(body or b"{}"))

    def _place(self, whole: str) -> tuple[str, str, str]:
        fitting = (known for known in self.objects if whole == known or whole.startswith(f"{known}/"))
        path = max(fitting, key=len, default=None)
        if path in self.missing:
            raise web.HTTPNotFound(text="404 page not found\n")  # as an API server refuses what it does not know
        if path is None:
            raise Refused(404, "NotFound", f"namespaces {whole.split('/')[4]!r} not found")
        if path == RESOURCES and self.resources is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        name, _, sub = whole.removeprefix(path).strip("/").partition("/")
        return path, name, sub

    def _create(self, path: str, item: Json) -> Json:
        name = item.get("metadata", {}).get("name", "")
        if not (DNS_LABEL if path == PODS else DNS_NAME).fullmatch(name):
            raise Refused(
                422, "Invalid", f'{self.kinds[path]} "{name}" is invalid: metadata.name: a DNS label is expected'
            )
        if path in self.models:
            check_fields(item, self.models[path], self.kinds[path])
        if path == EVENTS:
            _check_event(item)
        if name in self.objects[path]:
            raise Refused(409, "AlreadyExists", f'{path.rpartition("/")[2]} "{name}" already exists')
        if path == PODS and self.quota is not None and len(self.objects[PODS]) >= self.quota:
            message = (
                f'pods "{name}" is forbidden: exceeded quota: team, used: pods={self.quota}, limited: {self.quota}'
            )
            raise Refused(403, "Forbidden", message)
        if path == RESOURCES:
            item = self._admitted(lambda rules: rules.created(item))
        item["metadata"]["uid"] = f"uid-{next(self._uids)}"
        item["metadata"]["creationTimestamp"] = _now()
        return self._write(path, "ADDED", item | ({"status": {"phase": "Pending"}} if path == PODS else {}))

    def _patch(self, path: str, item: Json, patch: Json, sub: str) -> Json:
        version = patch.get("metadata", {}).pop("resourceVersion", None)
        if version not in (None, item["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", "the object has been modified; please apply your changes to the latest")
        if patch.get("metadata", {}).get("uid") not in (None, item["metadata"]["uid"]):
            raise Refused(409, "Conflict", "Precondition failed: UID in precondition and in object meta differ")
        if path == RESOURCES:
            return self._patch_resource(item, patch, sub)
        patch = {"status": patch.get("status", {})} if sub == "status" else patch
        return self._write(path, "MODIFIED", merge(item, patch))

    def _admitted(self, admit: Callable[[CustomResources], Json]) -> Json:
        assert self.resources is not None
        try:
            return admit(self.resources)
        except Invalid as error:
            raise Refused(422, "Invalid", f"ElasticJob is invalid: {error}") from error

    def _patch_resource(self, item: Json, patch: Json, sub: str) -> Json:
        new = merge(item, patch)
        if sub == "status":
            if self.resources is not None and not self.resources.has_status:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            new = self._admitted(lambda rules: rules.with_status(new, item))
        elif sub == "scale":
            new = self._admitted(lambda rules: rules.scaled(item, patch["spec"]["replicas"]))
        else:
            new = self._admitted(lambda rules: rules.changed(new, item))
        if new == item:
            return item
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self.remove(RESOURCES, new["metadata"]["name"])
            return new
        return self._write(RESOURCES, "MODIFIED", new)

    def _delete(self, path: str, item: Json, options: Json) -> Json:
        metadata = item["metadata"]
        if options.get("preconditions", {}).get("uid") not in (None, metadata["uid"]):
            raise Refused(409, "Conflict", "the UID in the precondition does not match the UID in record")
        grace = options.get("gracePeriodSeconds", item.get("spec", {}).get("terminationGracePeriodSeconds", 0))
        bound = path == PODS and item.get("spec", {}).get("nodeName")
        ended = item.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if (not bound or not grace or ended) and not metadata.get("finalizers"):
            self.remove(path, metadata["name"])
            return item
        end = datetime.now(UTC) + timedelta(seconds=grace)
        mark = {"deletionTimestamp": _text(end), "deletionGracePeriodSeconds": grace}
        before = metadata.get("deletionTimestamp")
        if before is not None and before <= mark["deletionTimestamp"]:
            return item
        return self._write(path, "MODIFIED", item | {"metadata": {**metadata, **mark}})

    # ---- lists and watches

    async def _listed(self, request: web.Request, path: str) -> web.StreamResponse:
        if request.query.get("watch"):
            return await self._watched(request, path)
        items = [one for one in self.objects[path].values() if is_selected(one, request.query)]
        items.sort(key=lambda one: str(one["metadata"]["name"]))
        begin, size = int(request.query.get("continue", 0)), int(request.query.get("limit", 0)) or len(items) or 1
        metadata: Json = {"resourceVersion": str(self.version)}
        if begin + size < len(items):
            metadata["continue"] = str(begin + size)
        return answer(200, self._list_of(path, items[begin : begin + size], metadata))

    def _list_of(self, path: str, items: list[Json], metadata: Json) -> Json:
        return {"kind": f"{self.kinds[path]}List", "metadata": metadata, "items": items}

    def _bookmark(self, path: str, version: int) -> Json:
        return {"metadata": {"resourceVersion": str(version)}}

    async def _watched(self, request: web.Request, path: str) -> web.StreamResponse:
        at = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if at < self._oldest:
            await _line(response, "ERROR", status_of(410, "Expired", f"too old resource version: {at}"))
            return response
        self._watches.add(response)
        try:
            while request.transport is not None and not request.transport.is_closing():
                news_now = self.history[bisect_right(self.history, at, key=lambda one: one[0]) :]
                for _, where, kind, item in reversed(news_now) if self.reverses else news_now:
                    if where == path and is_selected(item, request.query):
                        for _ in range(1 + self.doubles):
                            await _line(response, kind, item)
                at = news_now[-1][0] if news_now else at
                news = self._news
                try:
                    async with asyncio.timeout(BOOKMARK_SECONDS):
                        await news.wait()
                except TimeoutError:
                    await _line(response, "BOOKMARK", self._bookmark(path, at))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._watches.discard(response)
        return response


def is_selected(item: Json, query: Mapping[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    right = [labels.get(key) == value for key, value in _parts(query.get("labelSelector", ""))]
    right += [value_at(item, key) == value for key, value in _parts(query.get("fieldSelector", ""))]
    return all(right)


def _parts(selector: str) -> list[list[str]]:
    return [part.split("=", 1) for part in selector.split(",") if part]


def merge(item: Json, patch: Json) -> Json:
    """A JSON merge patch."""
    found = deepcopy(item)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = merge(found.get(key) or {}, value)
        else:
            found[key] = value
    return found


def check_fields(value: Any, kind: str, place: str) -> None:
    """Refuses a field that Kubernetes does not have there, as `fieldValidation=Strict` does."""
    if (listed := re.fullmatch(r"list\[(.+)\]", kind)) and isinstance(value, list):
        for index, one in enumerate(value):
            check_fields(one, listed[1], f"{place}[{index}]")
    elif (mapped := re.fullmatch(r"dict\(str, (.+)\)", kind) or re.fullmatch(r"dict\[str, (.+)\]", kind)) is not None:
        for key, one in value.items():
            check_fields(one, mapped[1], f"{place}.{key}")
    elif (model := getattr(models, kind, None)) is not None and isinstance(value, dict):
        names = {outer: inner for inner, outer in model.attribute_map.items()}
        for key, one in value.items():
            if key not in names:
                raise Refused(400, "BadRequest", f'{place} in version "v1" cannot be handled: unknown field "{key}"')
            check_fields(one, model.openapi_types[names[key]], f"{place}.{key}")


def _check_event(item: Json) -> None:
    missing = [key for key in NEEDED_IN_EVENTS if not item.get(key)]
    if missing or item.get("type") not in ("Normal", "Warning") or len(item["note"]) > 1024:
        raise Refused(422, "Invalid", f'Event "{item["metadata"]["name"]}" is invalid: {", ".join(missing)}')


async def _line(response: web.StreamResponse, kind: str, item: Json) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


def _now() -> str:
    return _text(datetime.now(UTC))


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def kubeconfig(url: str) -> str:
    """A kubeconfig of this cluster, as JSON, which is YAML."""
    return json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "sesame"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
    })  # fmt: skip
