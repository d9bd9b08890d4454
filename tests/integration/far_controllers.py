"""Controllers and workers on hosts of their own, as network namespaces: `Controllers` whose cables can be hindered.

    with far_controllers(folder, workers=4) as cluster:
        cluster.cut("a", "w0")
        cluster.hosts.heal()

etcd is on host 0, where the test is; each controller and each worker has another one. Needs root (`Hosts.can_be_had`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etcd_cluster import Cluster as Etcd
from etcd_cluster import etcd_cluster
from faults.hosts import Hosts, enter_host
from integration.cluster import fork
from integration.controllers import Controllers

ETCD = 0
CONTROLLERS = 2


def on_host(space: str, call: str, arguments: Mapping[str, Any]) -> None:
    """Run a call of `warm.py` on that host."""
    enter_host(space)
    module, _, function = call.partition(":")
    getattr(importlib.import_module(module), function)(**arguments)


class FarControllers(Controllers):
    """See the module's text."""

    def __init__(self, hosts: Hosts, etcd: Etcd, workers: int, **given: Any) -> None:
        self.hosts = hosts
        self._workers = workers
        super().__init__(etcd, CONTROLLERS, workers=workers, **given)
        for one in self.all:
            one.host = hosts.address(self.host_of(one.name))

    def host_of(self, who: str) -> int:
        """The number of the host of a worker or controller. One more worker is where an earlier one was."""
        names = [one.name for one in self.all]
        if who in names:
            return 1 + names.index(who)
        return 1 + CONTROLLERS + int(who.removeprefix("w")) % self._workers

    def cut(self, one: str, *others: str) -> None:
        """The cables between these, in both directions."""
        for other in others:
            self.hosts.cut(self.host_of(one), self.host_of(other))
            self.hosts.cut(self.host_of(other), self.host_of(one))

    def lose_to_etcd(self, percent: int) -> None:
        """So many of a hundred packets between every controller and etcd."""
        for one in self.all:
            self.hosts.lose(self.host_of(one.name), ETCD, percent)
            self.hosts.lose(ETCD, self.host_of(one.name), percent)

    def fork(self, who: str, call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> int:
        space = self.hosts.space(self.host_of(who))
        given = {"space": space, "call": call, "arguments": dict(arguments)}
        here = {"SHOAL_OPEN": "true"} if who in [one.name for one in self.all] else {"SHOAL_FAILURE_DOMAIN": space}
        return fork("integration.far_controllers:on_host", given, {**env, **here}, log)


@contextmanager
def far_controllers(folder: Path, workers: int, **given: Any) -> Iterator[FarControllers]:
    """Hosts, a real etcd of three servers, and what runs on them."""
    with (
        Hosts(CONTROLLERS + workers) as hosts,
        etcd_cluster(folder / "etcd", 3, host=hosts.address(ETCD)) as etcd,
        FarControllers(hosts, etcd, workers, **given) as cluster,
    ):
        yield cluster
