"""Requests to a cluster's API server and a local copy of its objects, both as plain dictionaries.

The only module that imports `kubernetes_asyncio`, which finds the server, its authorities and the credentials, inside
a cluster and by a kubeconfig. Imported only where a cluster is used. Requests are retried where that is right. Nothing
here knows of jobs.

`ObjectWatch` lists objects of one kind, watches them from there, and lists again after a gap. What this process has
written is in the copy at once (`learn`, `forget`), and an older sight of it does not come back, so no decision uses a
list that is older than the write.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import structlog
from kubernetes_asyncio import client, config
from shoal_protos.errors import PeerError, UserError

from shoal_controller.launchers.kubernetes.request_outcomes import SILENT, Asked, nobody_counts, outcome_of, verb_of
from shoal_controller.launchers.kubernetes.section import Json

REQUEST_SECONDS = 15.0
"""How long the server may take for one answer."""
PATIENCE_SECONDS = 40.0
"""How long a request is tried, answers that ask for patience included."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
LONGEST_RETRY_AFTER_SECONDS = 900.0
"""A server that asks to be left alone for longer is asked again after this."""
WATCH_SECONDS = 60
"""After so long the server ends a watch, and another one goes on where it ended. ● A line that is dead and says nothing
hides every notice of a preemption for as long as it is waited for.
"""
SILENT_SECONDS = WATCH_SECONDS + 10.0
PAGE = 500
"""Objects of one answer to a list."""
LONGEST_REFUSAL = 1000
"""So much is taken of a refusal that is no object."""
FOLLOW = "follow"
"""The parameter of a log that goes on as its pod writes."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

AGAIN = frozenset({429, 500, 502, 503, 504})
TROUBLES = (aiohttp.ClientError, TimeoutError, ConnectionError, OSError, ValueError, config.ConfigException)
"""The server cannot be reached, its answer was cut off, or the token of this pod cannot be read just now."""

log = structlog.get_logger("shoal.kubernetes")


class ClusterRefusal(PeerError):
    """The API server has refused a request."""

    def __init__(self, status: int, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = status
        """HTTP status."""
        self.why = reason
        """Kubernetes' word for it, such as `AlreadyExists`."""


class ClusterSilence(PeerError):
    """The API server has given no answer."""


@dataclass(frozen=True, slots=True)
class WatchNews:
    """One line of a watch: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, and the object."""

    kind: str
    item: Json


class ClusterApi:
    """One cluster. `connect`, then requests, then `close`."""

    def __init__(self, api: client.ApiClient, namespace: str, asked: Asked = nobody_counts) -> None:
        self._api, self._asked = api, asked
        self.namespace = namespace
        self._left_alone: dict[tuple[str, str], tuple[float, str]] = {}
        """Methods and paths that are not to be asked before that time, and why."""

    @classmethod
    async def connect(cls, kubeconfig: str = "", namespace: str = "", asked: Asked = nobody_counts) -> ClusterApi:
        """By the kubeconfig that is named, else as the service account of this pod. `asked` hears of every request.
        Raises `UserError`.
        """
        configuration = client.Configuration()
        try:
            if kubeconfig:
                await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
                own = _namespace_of(kubeconfig)
            else:
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                own = await asyncio.to_thread(NAMESPACE_FILE.read_text)
        except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
            where = f"the kubeconfig {kubeconfig}" if kubeconfig else "no cluster around this process"
            raise UserError(
                f"launcher kubernetes finds {where}{' cannot be used' if kubeconfig else ''} ({error}); run the "
                "controller in a pod with a service account, or set KUBECONFIG to a file that names a cluster"
            ) from error
        return cls(client.ApiClient(configuration), namespace or own.strip() or "default", asked)

    async def close(self) -> None:
        await self._api.close()

    # ---- requests

    async def get(self, path: str) -> Json:
        return await self.ask("GET", path)

    async def create(self, path: str, item: Json) -> Json:
        """● Where an answer was cut off the object may be there: whoever is told that it exists looks whose it is."""
        return await self.ask("POST", path, item)

    async def patch(self, path: str, patch: Json) -> Json:
        """A merge patch."""
        return await self.ask("PATCH", path, patch)

    async def delete(self, path: str, options: Json) -> Json:
        return await self.ask("DELETE", path, options)

    async def list(self, path: str, selector: str = "") -> tuple[list[Json], str]:
        """All that there is, as the server has it now, and the version that it is of."""
        items: list[Json] = []
        query = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        while True:
            answer = await self.ask("GET", path, query=query)
            items += answer.get("items") or []
            metadata = answer.get("metadata", {})
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]

    async def ask(
        self, method: str, path: str, body: Json | None = None, query: Mapping[str, str] | None = None
    ) -> Json:
        """One request, tried again until it is answered. Raises `ClusterRefusal`, and `ClusterSilence` in the end.

        ● Whoever asks again and again heeds a `Retry-After` that is longer than a request's patience, too: until then
        nothing is sent.
        """
        loop = asyncio.get_running_loop()
        deadline, pause, why = loop.time() + PATIENCE_SECONDS, FIRST_PAUSE_SECONDS, ""
        verb, unserved = verb_of(method, query or {}), f"the cluster's API server has not served {method} {path}"
        until, reason = self._left_alone.get((method, path), (0.0, ""))
        if until > loop.time():
            raise ClusterSilence(f"{unserved}: {reason}")
        while True:
            wait, outcome, asked_for = pause, SILENT, 0.0
            try:
                status, headers, text = await self._once(method, path, body, query)
                if status not in AGAIN:
                    found = _parsed(status, text)
                    self._asked(verb, outcome_of(status), False)
                    return _accepted(status, found)
                outcome = outcome_of(status)
                why, asked_for = f"it answers {status}", _retry_after(headers)
                wait = asked_for or pause
            except TROUBLES as error:
                why = str(error) or type(error).__name__
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            gives_up = loop.time() + wait > deadline
            self._asked(verb, outcome, not gives_up)
            if gives_up:
                if asked_for:
                    why = f"{why}, and wants to be left alone for {asked_for:g} s"
                    self._leave_alone(method, path, loop.time() + asked_for, why)
                raise ClusterSilence(f"{unserved}: {why}")
            await asyncio.sleep(wait)

    def _leave_alone(self, method: str, path: str, until: float, why: str) -> None:
        now = asyncio.get_running_loop().time()
        self._left_alone = {place: one for place, one in self._left_alone.items() if one[0] > now}
        self._left_alone[method, path] = until, why

    async def _once(
        self, method: str, path: str, body: Json | None, query: Mapping[str, str] | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        async with asyncio.timeout(REQUEST_SECONDS):
            answer = await self._send(method, path, body, query, kind)
            async with answer:
                return answer.status, answer.headers, await answer.read()

    async def _send(
        self, method: str, path: str, body: Json | None, query: Mapping[str, str] | None, kind: str = "application/json"
    ) -> aiohttp.ClientResponse:
        answer: aiohttp.ClientResponse = await self._api.call_api(
            path, method, query_params=list((query or {}).items()), body=body, auth_settings=["BearerToken"],
            header_params={"Accept": "application/json, */*", "Content-Type": kind}, _preload_content=False,
            _request_timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=REQUEST_SECONDS, sock_read=None if FOLLOW in (query or {}) else SILENT_SECONDS
            ),
        )  # fmt: skip
        return answer

    async def text(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes]:
        """What is no object, in parts as they come, asked for once; with `FOLLOW` it may say nothing for as long as it
        likes. Raises `ClusterRefusal`, and `ClusterSilence` where it breaks off.
        """
        try:
            answer = await self._send("GET", path, None, query)
            self._asked("get", outcome_of(answer.status), False)
            async with answer:
                if answer.status != 200:
                    _accepted(answer.status, _parsed(answer.status, await answer.read()))
                async for part in answer.content.iter_any():
                    yield part
        except TROUBLES as error:
            self._asked("get", SILENT, False)
            why = str(error) or type(error).__name__
            raise ClusterSilence(f"the cluster's API server has not served all of {path}: {why}") from error

    # ---- watches

    async def watch(self, path: str, version: str, selector: str = "") -> AsyncGenerator[WatchNews]:
        """What has changed since that version, until the server ends it. Raises `ClusterRefusal` (410: that version is
        too old), and `ClusterSilence` where the line breaks.
        """
        query = {
            "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS), **({"labelSelector": selector} if selector else {}),
        }  # fmt: skip
        try:
            answer = await self._send("GET", path, None, query)
            self._asked("watch", outcome_of(answer.status), False)
            async with answer:
                if answer.status != 200:
                    _accepted(answer.status, _parsed(answer.status, await answer.read()))
                async with aclosing(_lines(answer.content)) as lines:
                    async for line in lines:
                        news = json.loads(line)
                        if news["type"] == "ERROR":
                            raise _refusal(int(news["object"].get("code", 500)), news["object"])
                        yield WatchNews(news["type"], news["object"])
        except (*TROUBLES, KeyError) as error:
            self._asked("watch", SILENT, True)
            raise ClusterSilence(f"a watch of {path} has ended: {error or type(error).__name__}") from error


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Whole lines, however long; what a broken connection leaves of one is none."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield line


def _parsed(status: int, text: bytes) -> Json:
    """A path that a server does not have is refused in plain text. Raises `ValueError` for half an answer."""
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError:
        if status < 400:
            raise
        found = {"message": text.decode(errors="replace").strip()[:LONGEST_REFUSAL]}
    return found if isinstance(found, dict) else {}


def _accepted(status: int, found: Json) -> Json:
    if status >= 400:
        raise _refusal(status, found)
    return found


def _refusal(status: int, found: Json) -> ClusterRefusal:
    message = str(found.get("message") or f"HTTP status {status}")
    return ClusterRefusal(status, str(found.get("reason") or ""), message)


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return min(LONGEST_RETRY_AFTER_SECONDS, max(0.0, float(headers.get("Retry-After", ""))))
    except ValueError:
        return 0.0


def _namespace_of(kubeconfig: str) -> str:
    """Of the context in use."""
    _, active = config.list_kube_config_contexts(config_file=kubeconfig)
    return str((active or {}).get("context", {}).get("namespace") or "default")


AGAIN_SECONDS = 1.0
"""After a failure, before it is listed or watched again."""
FORBIDDEN_SECONDS = 60.0
"""How often it is tried whether what is not allowed, or not there, is so now."""
FORGOTTEN = 10_000
"""How many uids of deleted objects are remembered."""


Changed = Callable[[str, Json | None], None]
"""Called with an object's name and what it is now; None: it is gone."""


class ObjectWatch:
    """Objects of one kind, by name. `run` as a task; `items` are right once `synced` is set."""

    def __init__(self, api: ClusterApi, path: str, selector: str, changed: Changed) -> None:
        self._api, self._path, self._selector, self._changed = api, path, selector, changed
        self.listed: Callable[[], None] = lambda: None
        """Called whenever all of them were listed."""
        self.explain: Callable[[Exception], str] = str
        """What to do about a failure, as a sentence."""
        self.items: dict[str, Json] = {}
        self.synced = asyncio.Event()
        self.trouble = ""
        """Why the copy may be old; empty while it is not."""
        self._gone: dict[str, None] = {}
        """Uids that are there no more."""

    async def run(self) -> None:
        """Until it is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                version = await self._list()
                self.trouble = ""
                while True:
                    began = clock()
                    version = await self._follow(version)
                    await self._not_too_soon(began)
            except ClusterRefusal as error:
                if error.code == 410:
                    await self._not_too_soon(began)
                    continue
                await self._pause(error, FORBIDDEN_SECONDS if error.code in (401, 403, 404) else AGAIN_SECONDS)
            except ClusterSilence as error:
                await self._pause(error, AGAIN_SECONDS)

    async def _not_too_soon(self, began: float) -> None:
        """● Whoever ends each watch as soon as it has begun is not asked without end."""
        if asyncio.get_running_loop().time() - began < AGAIN_SECONDS:
            await asyncio.sleep(AGAIN_SECONDS)

    async def _pause(self, error: Exception, seconds: float) -> None:
        if (sentence := self.explain(error)) != self.trouble:
            log.warning("what the cluster has cannot be seen", path=self._path, error=sentence)
        self.trouble = sentence
        await asyncio.sleep(seconds)

    async def _list(self) -> str:
        items, version = await self._api.list(self._path, self._selector)
        there = {str(item["metadata"]["uid"]) for item in items}
        for name, known in list(self.items.items()):
            if known["metadata"]["uid"] not in there and not _is_younger(known, version):
                self.forget(name, known)
        for item in items:
            self.learn(item)
        self.synced.set()
        self.listed()
        return version

    async def _follow(self, version: str) -> str:
        """One watch; returns the version from which the next one goes on."""
        async with aclosing(self._api.watch(self._path, version, self._selector)) as news:
            async for one in news:
                version = str(one.item["metadata"].get("resourceVersion") or version)
                if one.kind == "DELETED":
                    self.forget(one.item["metadata"]["name"], one.item)
                elif one.kind in ("ADDED", "MODIFIED"):
                    self.learn(one.item)
        return version

    # ---- what is known

    def learn(self, item: Json) -> None:
        """This is how an object is, unless something newer of it is known."""
        metadata = item["metadata"]
        name, known = metadata["name"], self.items.get(metadata["name"])
        if metadata["uid"] in self._gone:
            return
        if known is not None and not _is_newer(item, known):
            return
        self.items[name] = item
        self._changed(name, item)

    def forget(self, name: str, item: Json) -> None:
        """This very object is gone."""
        uid = item["metadata"]["uid"]
        self._gone[uid] = None
        while len(self._gone) > FORGOTTEN:
            del self._gone[next(iter(self._gone))]
        known = self.items.get(name)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.items[name]
            self._changed(name, None)


def _version(item: Json) -> int:
    """Versions are numbers of one series, which Kubernetes promises since 1.35; before, etcd's revisions are."""
    text = str(item["metadata"].get("resourceVersion") or "")
    return int(text) if text.isdecimal() else 0


def _is_newer(item: Json, known: Json) -> bool:
    return _version(item) > _version(known) or not _version(item)


def _is_younger(item: Json, version: str) -> bool:
    """Whether it was written after a list was made."""
    return version.isdecimal() and _version(item) > int(version)
