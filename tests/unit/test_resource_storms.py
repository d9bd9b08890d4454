"""ElasticJobs in a storm: made, edited, scaled, deleted and made again while controllers change, the cluster fails and
REST takes the same names. Afterwards each resource has its job or says why not, and no job is left of one that is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from api_server import RESOURCES
from asynchronous import asynchronous
from resource_place import Place, hurry_resources, place
from shoal_controller.access.callers import Caller, Role
from shoal_controller.api import resource_rules
from shoal_controller.core.machine.spec import JobSpec
from shoal_protos.errors import ShoalError
from tiers import check

pytestmark = check("serves the API of a cluster")

BLOWS = 40
NAMES = ("a", "b", "c")
SOMEBODY = Caller("kim", Role.OPERATE)


class Storm:
    """One seed's."""

    def __init__(self, one: Place, chance: random.Random) -> None:
        self.one, self.chance = one, chance
        self.runs: dict[str, set[str]] = defaultdict(set)
        """Of each resource that was seen, by its uid."""
        self.term = AsyncExitStack()

    def name(self) -> str:
        return self.chance.choice(NAMES)

    async def apply(self) -> None:
        await self.one.apply(self.name(), **self.chance.choice([{}, {}, {"env": {"A": "1"}}]))

    async def delete(self) -> None:
        await self.one.delete(self.name())

    async def give_up(self) -> None:
        """By somebody who removes finalizers."""
        if (name := self.name()) in self.one.cluster.objects[RESOURCES]:
            await self.one.give_up(name)

    async def scale(self) -> None:
        await self.one.scale(self.chance.randint(1, 9), self.name())

    async def edit(self) -> None:
        spec = self.chance.choice(
            [{"env": {"A": "2"}}, {"env": None}, {"workers": {"min": 3}}, {"workers": {"max": 5}}]
        )
        await self.one.edit(spec, self.name())

    async def submit_over_rest(self) -> None:
        with suppress(ShoalError):
            await resource_rules.create(self.one.shell, JobSpec(self.name(), wanted=2), SOMEBODY)

    async def cancel_over_rest(self) -> None:
        with suppress(ShoalError):
            await resource_rules.delete(self.one.shell, self.name(), SOMEBODY, None)

    async def fault(self) -> None:
        method, status = self.chance.choice(["GET", "PATCH", "POST"]), self.chance.choice([0, 409, 429, 500])
        part = self.chance.choice(["/elasticjobs/", "/status", "/events"])
        if not (method == "GET" and status == 409) and (part != "/events" or status):
            self.one.cluster.fail(method, part, status, times=self.chance.randint(1, 3))

    async def break_watches(self) -> None:
        if self.chance.random() < 0.5:
            self.one.cluster.compact()
        self.one.cluster.break_watches()

    async def change_controller(self) -> None:
        await self.term.aclose()
        self.term = AsyncExitStack()
        await self.term.enter_async_context(self.one.term())

    async def blow(self) -> None:
        kinds = [self.apply, self.apply, self.apply, self.delete, self.give_up, self.scale, self.edit, self.fault]
        kinds += [self.submit_over_rest, self.cancel_over_rest, self.break_watches, self.change_controller]
        with suppress(OSError):
            await self.chance.choice(kinds)()
        self.look()

    def look(self) -> None:
        for view in self.one.shell.jobs():
            spec = self.one.shell.spec(view.job)
            if spec.resource:
                self.runs[spec.resource].add(spec.run)

    # ---- afterwards

    def unsettled(self) -> list[str]:
        return [why for name in NAMES if (why := self.why_unsettled(name, self.one.item(name)))]

    def why_unsettled(self, name: str, item: dict[str, Any]) -> str:
        job = self.one.shell.spec(name) if self.one.has_job(name) else None
        if not item:
            return f"{name} has a job of a resource that is gone" if job is not None and job.resource else ""
        metadata, status = item["metadata"], item.get("status") or {}
        if metadata.get("deletionTimestamp"):
            return f"{name} is not gone yet"
        if status.get("observedGeneration") != metadata["generation"]:
            return f"{name} says nothing of its generation {metadata['generation']}"
        reason = self.one.condition("Accepted", name).get("reason")
        if reason == "Accepted":
            if job is None or job.resource != metadata["uid"]:
                return f"{name} is accepted and has no job"
            workers = item["spec"]["workers"]
            view = self.one.shell.view(name)
            if not view.phase.is_over and view.wanted != workers.get("wanted", workers["min"]):
                return f"{name} has another size than its resource"
            return ""
        return "" if reason in ("NameTaken", "Immutable", "Refused", "ScaleRefused") else f"{name} says {reason}"


@pytest.mark.parametrize("seed", range(3))
@asynchronous
async def test_after_a_storm_each_resource_has_its_job_or_says_why_not_and_none_was_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    hurry_resources(monkeypatch)
    async with place(tmp_path) as one:
        storm = Storm(one, random.Random(seed))
        one.cluster.doubles = bool(seed % 2)
        await storm.change_controller()
        for _ in range(BLOWS):
            await storm.blow()
            await asyncio.sleep(storm.chance.random() * 0.05)
        one.cluster.faults.clear()
        try:
            await one.until(lambda: not storm.unsettled(), "all is settled")
        except AssertionError as error:
            raise AssertionError(f"{storm.unsettled()}: {error}") from error
        finally:
            await storm.term.aclose()
        storm.look()
        assert [runs for runs in storm.runs.values() if len(runs) > 1] == []
        assert not one.shell.stopped.done()
