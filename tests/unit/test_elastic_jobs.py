"""Jobs from resources, against an API server that answers late, twice and of the past: the one in this process or, by
`make cluster`, a real one with the same faults before it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_server import RESOURCES
from asynchronous import asynchronous
from resource_place import hurry_resources, place
from rule import Edit, holds, rule
from shoal_controller.access.callers import Caller, Role
from shoal_controller.api import resource_rules
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.elastic_jobs import owned_job
from shoal_controller.jobs.only_if import OnlyIf, VersionMismatch
from shoal_controller.launchers.kubernetes.job_defaults import JobDefaults
from shoal_controller.launchers.kubernetes.resource_kind import FINALIZER
from shoal_protos.acts import Scale
from shoal_protos.errors import Conflict, UserError
from tiers import check

pytestmark = check("serves the API of a cluster")

SOMEBODY = Caller("kim", Role.OPERATE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_resources(monkeypatch)


@rule(
    "A resource has its finalizer before its job is made, and loses it when the job is forgotten and its pods "
    "are gone; a job that is to go saves first, and no wait of that is for ever; it goes with its resource where "
    "another finalizer keeps that, too",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "        if not has_finalizer(item):\n            item = await",
            "        if False:\n            item = await",
        ),
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "        if has_finalizer(item) and await self._pods_are_gone():\n",
            "        if has_finalizer(item):\n",
        ),
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "        if job is not None and job.resource == uid_of(item):\n            if self._deletion",
            "        if has_finalizer(item) and job is not None and job.resource == uid_of(item):\n"
            "            if self._deletion",
        ),
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "    if not can_save or now - deletion.began > SAVE_SECONDS:\n",
            "    if not can_save:\n",
        ),
    ],
)
@asynchronous
async def test_a_resource_becomes_a_job_whose_status_it_shows_and_goes_with_it(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        assert (await one.apply()).status_code == 201
        await one.until(lambda: one.status().get("phase") == "waiting", "the first status")
        assert one.item()["metadata"]["finalizers"] == [FINALIZER]
        assert one.status()["observedGeneration"] == 1 and one.condition("Accepted")["status"] == "True"
        assert one.status()["shown"]["workers"] == "0/2", "`min`, until somebody scales"
        assert one.shell.spec("train").resource == one.item()["metadata"]["uid"]
        await one.delete()
        await one.until(lambda: not one.item(), "the finalizer to go")
        assert not one.has_job()
        assert len(one.notes("Deleting")) == 1


@asynchronous
async def test_scaling_the_resource_scales_the_job_whatever_the_cluster_answers(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        one.cluster.doubles = one.cluster.reverses = True
        one.cluster.fail("POST", "/events", 500, times=3)
        one.cluster.fail("PATCH", "/elasticjobs", 409)
        one.cluster.fail("PATCH", "/elasticjobs", 429, headers={"Retry-After": "0.05"})
        await one.apply()
        await one.until(lambda: one.wanted() == 2, "two")
        one.cluster.fail("PATCH", "/status", 409)
        assert (await one.scale(8)).json()["spec"]["replicas"] == 8
        await one.until(lambda: one.wanted() == 8, "eight")
        one.cluster.compact()
        one.cluster.break_watches()
        await one.scale(3)
        await one.until(lambda: one.wanted() == 3 and one.status()["shown"]["workers"] == "0/3", "three")
        assert one.status()["observedGeneration"] == one.item()["metadata"]["generation"] == 3


@holds("A size that goes to and fro")
@asynchronous
async def test_an_autoscaler_that_flaps_makes_few_changes_and_its_last_word_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_job, "FIRST_PAUSE_SECONDS", 0.2)
    async with place(tmp_path) as one, one.term():
        await one.apply()
        await one.until(lambda: one.wanted() == 2, "two")
        seen = set()
        for number in range(60):
            await one.scale(4 - 2 * (number % 2))
            await asyncio.sleep(0.02)
            accepted = one.condition("Accepted")
            seen.add((accepted.get("reason"), accepted.get("status")))
        assert ("Settling", "True") in seen
        await one.scale(5)
        await one.until(lambda: one.wanted() == 5, "the newest")
        assert one.world.events().count("Scale") <= 12


@asynchronous
async def test_bounds_and_spares_of_a_job_follow_its_resource_and_rest_writes_them_there(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term() as sizes:
        controller: Any = SimpleNamespace(leading=lambda: one.shell, sizes=sizes)
        await one.apply()
        await one.until(one.has_job, "the job")
        run = one.shell.spec("train").run
        await one.edit({"workers": {"min": 3, "max": None}})
        await one.until(lambda: one.shell.view("train").min_workers == 3, "the new minimum")
        assert one.shell.view("train").max_workers is None and one.wanted() == 3, "`min`, until somebody scales"
        await one.until(lambda: one.status()["workers"]["min"] == 3, "the status")
        assert one.condition("Accepted")["status"] == "True" and one.shell.spec("train").run == run
        view = await resource_rules.scale(controller, "train", Scale(least=2, most=6), SOMEBODY, None)
        assert (view.min_workers, view.max_workers) == (2, 6)
        await one.until(lambda: one.item()["spec"]["workers"] == {"min": 2, "max": 6}, "the resource's bounds")
        with pytest.raises(UserError, match="cannot have at least 7 workers; expected 1 to 6"):
            await resource_rules.scale(controller, "train", Scale(least=7), SOMEBODY, None)
        await resource_rules.scale(controller, "train", Scale(spares=1), SOMEBODY, None)
        await one.edit({"workers": {"spares": 2}})
        await one.until(lambda: one.shell.view("train").spares == 2, "the spares")
        latest = one.item()["metadata"]["generation"]
        await one.until(lambda: one.status()["observedGeneration"] == latest, "the status")
        assert one.condition("Accepted")["status"] == "True"


@asynchronous
async def test_rest_scales_the_resource_and_a_job_without_one_alone(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term() as sizes:
        controller: Any = SimpleNamespace(leading=lambda: one.shell, sizes=sizes)
        await one.apply()
        await one.until(one.has_job, "the job")
        view = await resource_rules.scale(controller, "train", Scale(4), SOMEBODY, None)
        assert view.wanted == 4
        await one.until(lambda: one.item()["spec"]["workers"]["wanted"] == 4, "the resource's size")
        with pytest.raises(UserError, match="cannot be scaled to 9 workers; expected from 2 to 8"):
            await resource_rules.scale(controller, "train", Scale(9), SOMEBODY, None)
        with pytest.raises(VersionMismatch, match="job train was changed"):
            await resource_rules.scale(controller, "train", Scale(5), SOMEBODY, OnlyIf(("of-before",)))
        assert one.item()["spec"]["workers"]["wanted"] == 4, "nothing of a change that depends on another version"
        await one.shell.create(JobSpec("other", wanted=2))
        before = dict(one.cluster.objects[RESOURCES])
        assert (await resource_rules.scale(controller, "other", Scale(3), SOMEBODY, None)).wanted == 3
        assert list(before) == list(one.cluster.objects[RESOURCES]) == ["train"]
        without: Any = SimpleNamespace(leading=lambda: one.shell, sizes=None)
        with pytest.raises(Conflict, match="has no launcher kubernetes"):
            await resource_rules.scale(without, "train", Scale(5), SOMEBODY, None)


@asynchronous
async def test_another_controller_adopts_the_job_and_a_resource_that_went_meanwhile_ends_it(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        async with one.term():
            await one.apply()
            await one.until(lambda: one.status().get("phase") == "waiting", "the first status")
        run = one.shell.spec("train").run
        async with one.term():
            await one.scale(5)
            await one.until(lambda: one.wanted() == 5, "five")
            assert one.shell.spec("train").run == run
        await one.give_up()
        async with one.term():
            await one.until(lambda: not one.has_job(), "the job without a resource to end")


@asynchronous
async def test_the_claims_of_a_resource_are_its_jobs_and_a_wrong_one_is_one_sentence(tmp_path: Path) -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}
    section = {"image": "train:1", "resources": {"limits": {"nvidia.com/gpu": 1}}, "resourceClaims": [claim]}
    async with place(tmp_path) as one, one.term():
        assert (await one.apply(kubernetes=section)).status_code == 201
        await one.until(lambda: one.has_job(), "the job")
        assert json.loads(one.shell.spec("train").kubernetes) == section
        await one.apply("odd", kubernetes={"image": "a", "resourceClaims": [{"name": "gpu"}]})
        await one.until(lambda: one.condition("Accepted", "odd").get("reason") == "Refused", "the refusal")
        assert "`kubernetes.resourceClaims[0]` (gpu) has neither" in one.condition("Accepted", "odd")["message"]
        assert not one.has_job("odd")


@asynchronous
async def test_a_resource_that_does_not_fit_the_administrators_defaults_is_refused(tmp_path: Path) -> None:
    many = [{"name": f"V{number}", "value": "1"} for number in range(100)]
    async with place(tmp_path) as one, one.term():
        assert one.shell._outside is not None
        one.shell._outside = replace(one.shell._outside, prepared=JobDefaults.of('{"checkpointRoot": "/saves"}').filled)
        await one.apply(kubernetes={"image": "a", "env": many})
        await one.until(lambda: one.condition("Accepted").get("reason") == "Refused", "the refusal")
        assert "with the administrator's defaults, `kubernetes.env` is" in one.condition("Accepted")["message"]
        assert not one.has_job()


@asynchronous
async def test_what_cannot_be_followed_is_one_sentence_in_a_condition_and_an_event(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        await one.shell.create(JobSpec("train", wanted=2))
        await one.apply()
        await one.until(lambda: one.condition("Accepted").get("reason") == "NameTaken", "the name")
        assert "submitted over REST" in one.condition("Accepted")["message"] and one.status()["phase"] == "refused"
        await one.apply("odd", kubernetes={"image": "a", "gang": "kueue"})
        await one.until(lambda: one.condition("Accepted", "odd").get("reason") == "Refused", "the refusal")
        assert "`kubernetes.queue` is missing" in one.condition("Accepted", "odd")["message"]
        assert not one.has_job("odd") and one.notes("Refused")
        await one.apply("good")
        await one.until(lambda: one.has_job("good"), "the job")
        await one.edit({"kubernetes": {"image": "train:2"}}, "good")
        await one.until(lambda: one.condition("Accepted", "good").get("reason") == "Immutable", "the change")
        assert "spec.kubernetes.image" in one.condition("Accepted", "good")["message"]
        await one.edit({"kubernetes": {"image": "train:1"}, "env": {"A": "2"}}, "good")
        await one.until(lambda: "spec.env changed" in one.condition("Accepted", "good")["message"], "the other change")
        assert "would compute something else" in one.condition("Accepted", "good")["message"]


@rule(
    "A resource that was deleted and made again is told of anew: nothing that was said of the first one counts for it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.elastic_jobs.owned_job",
        "if item is not None and uid_of(item) != self._uid:",
        "if item is not None and not self._uid:",
    ),
)
@asynchronous
async def test_a_resource_that_was_deleted_and_made_again_is_told_of_anew(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        await one.apply("odd", kubernetes={"image": "a", "gang": "kueue"})
        await one.until(lambda: len(one.notes("Refused")) == 1, "the event of the first")
        seen = one.cluster.hold("GET", "/elasticjobs")
        one.cluster.break_watches()
        await one.give_up("odd")
        await one.apply("odd", kubernetes={"image": "a", "gang": "kueue"})
        seen.set()
        await one.until(lambda: len(one.notes("Refused")) == 2, "the event of the second")


@asynchronous
async def test_a_job_that_is_over_is_not_run_again_and_rest_leaves_it_to_its_resource(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        async with one.term():
            await one.apply()
            await one.until(one.has_job, "the job")
            await resource_rules.delete(one.shell, "train", SOMEBODY, None)
            await one.until(lambda: one.status().get("phase") == "cancelled", "the end")
            assert one.condition("Failed")["status"] == "True"
        with pytest.raises(Conflict, match=r"belongs to the resource elasticjobs\.shoal\.dev/train"):
            await resource_rules.delete(one.shell, "train", SOMEBODY, None)
        with pytest.raises(Conflict, match="belongs to the resource"):
            await resource_rules.create(one.shell, JobSpec("train", wanted=2), SOMEBODY)
        await one.shell.delete("train")
        async with one.term():
            await one.apply("other")
            await one.until(lambda: one.has_job("other"), "another job")
            assert not one.has_job("train")


@asynchronous
async def test_without_definition_or_rights_jobs_are_left_alone_and_it_is_served_once_both_are_there(
    tmp_path: Path,
) -> None:
    async with place(tmp_path) as one:
        one.cluster.undefined.add(RESOURCES)
        async with one.term() as found:
            await one.until(lambda: "install the chart with crd.install" in found.copy.trouble, "the sentence")
            one.cluster.undefined.clear()
            one.cluster.forbidden.add(RESOURCES)
            await one.until(lambda: "rbac.create" in found.copy.trouble, "the other sentence")
            one.cluster.forbidden.clear()
            await one.apply()
            await one.until(one.has_job, "the job")


@asynchronous
async def test_a_definition_without_status_is_named_and_its_jobs_run(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term() as found:
        missing = "the server could not find the requested resource"
        one.cluster.fail("PATCH", "/status", 404, times=1_000_000, message=missing)
        await one.apply()
        await one.until(lambda: "has no subresource `status`" in found.trouble("train"), "the sentence")
        assert one.has_job()
        one.cluster.faults.clear()
        await one.until(lambda: one.status().get("phase") == "waiting" and not found.trouble("train"), "the status")


@rule(
    "Statuses of resources are written 20 times a second at most, and all of them are gone through twice a "
    "second, not after each look: a thousand cost what they must",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.elastic_jobs.owned_job",
            "        return max(STATUS_SECONDS, self.count() / STATUSES_PER_SECOND)",
            "        return STATUS_SECONDS",
        ),
        Edit(
            "shoal_controller.elastic_jobs.resource_forms",
            '    return SECONDS.sub("", json.dumps(status, sort_keys=True))',
            "    return json.dumps(status, sort_keys=True)",
        ),
    ],
)
@asynchronous
async def test_many_resources_share_the_writes_of_their_statuses(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        for number in range(40):
            await one.apply(f"job-{number}")
        await one.until(lambda: all(one.status(f"job-{n}").get("phase") for n in range(40)), "all of them")
        surroundings = owned_job.Surroundings(one.shell, None, None, lambda: 1000)  # type: ignore[arg-type]
        assert surroundings.status_seconds() == 50.0
        assert surroundings.status_seconds(tells_news=False) == 250.0, "a minute of a few, four minutes of a thousand"


@asynchronous
async def test_an_older_definition_is_named_with_what_it_drops(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        one.cluster.dropped.add("events")
        await one.apply()
        await one.until(lambda: one.notes("DefinitionOutdated"), "the event")
        assert "it drops status.events" in one.notes("DefinitionOutdated")[0]


@holds("A resource has its finalizer")
@asynchronous
async def test_a_deleted_resource_ends_its_job_though_another_finalizer_than_ours_keeps_it(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        await one.apply()
        await one.until(one.has_job, "the job")
        await one.keep("example.org/other")
        await one.delete()
        await one.until(lambda: not one.has_job(), "the job's end")
        assert one.item()["metadata"]["finalizers"] == ["example.org/other"]
        await one.give_up()


@holds("A resource has its finalizer")
@asynchronous
async def test_pods_of_a_deleted_job_are_gone_before_its_resource(tmp_path: Path) -> None:
    async with place(tmp_path) as one, one.term():
        await one.apply()
        await one.until(one.has_job, "the job")
        labels = {
            "app.kubernetes.io/managed-by": "shoal", "app.kubernetes.io/component": "worker", "shoal.dev/job": "train",
        }  # fmt: skip
        await one.put_pod("train-w0", labels)
        await one.delete()
        await one.until(lambda: not one.has_job(), "the job's end")
        await asyncio.sleep(0.1)
        assert one.item()
        await one.remove_pod("train-w0")
        await one.until(lambda: not one.item(), "the resource's end")
        assert Phase.CANCELLED.is_over
