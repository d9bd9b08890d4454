"""What the notes of the chart and the docs tell people to type, typed: kubectl and both helms against an API server in
this process, beside it the part of a controller that makes jobs from resources.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml
from api_server import NAMESPACE, PODS
from asynchronous import asynchronous
from charts.desk import desk, page_manifest
from charts.rendering import CHART, HELMS, ROOT
from pod_team import hurry
from shoal_controller.elastic_jobs import owned_job, reconciler
from shoal_controller.elastic_jobs.resource_kind import FINALIZER
from whole_api import DEFINITIONS

PAGE = (ROOT / "docs" / "elastic_jobs.md").read_text()
MANIFEST = page_manifest()
DEFINITION = CHART / "crd" / "elasticjobs.yaml"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    for module, name in ((reconciler, "LOOK_SECONDS"), (reconciler, "AGAIN_SECONDS"), (owned_job, "SOON_SECONDS")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(owned_job, "STATUS_SECONDS", 0.05)


def documented(command: str) -> str:
    """A command that stands in a page, as it stands there."""
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("elastic_jobs", "kubernetes")]
    assert any(command in " ".join(page.replace("\\\n", " ").split()) for page in pages), command
    return command


def noted(notes: str, *words: str) -> str:
    """The command of the notes that has these words."""
    found = [line.strip() for line in notes.splitlines() if re.match(r"\s+(kubectl|helm) ", line)]
    (command,) = [line for line in found if all(word in line for word in words)]
    return command


# ---- a resource


@asynchronous
async def test_what_the_page_of_elasticjobs_says_to_type_does_what_it_says(tmp_path: Path) -> None:
    async with desk(tmp_path) as one:
        await one.types(f"kubectl apply --filename {DEFINITION}")
        async with one.controller():
            assert "created" in await one.types("kubectl apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
            shown = await one.types(documented("kubectl get elasticjobs.shoal.dev"))
            assert re.search(r"NAME +PHASE +WORKERS", shown) and re.search(r"demo +waiting +0/2", shown)
            assert "GOODPUT" in await one.types("kubectl get ej demo --output wide")
            await one.types(documented("kubectl scale elasticjobs.shoal.dev demo --replicas 8"))
            await one.until(lambda: one.shell.view("demo").wanted == 8, "eight workers")
            assert "unchanged" in await one.types("kubectl apply --filename -", MANIFEST)
            assert one.item()["spec"]["workers"]["wanted"] == 8, "what somebody has scaled stays"
            await one.types("kubectl wait elasticjobs.shoal.dev/demo --for condition=Accepted --timeout 10s")
            described = await one.types("kubectl describe elasticjobs.shoal.dev demo")
            assert "observedGeneration" in described or "Observed Generation" in described
            await one.types("kubectl delete elasticjobs.shoal.dev demo --timeout 20s")
            assert not one.item() and not one.shell.jobs()


@asynchronous
async def test_what_cannot_be_is_refused_while_it_is_typed_in_one_sentence(tmp_path: Path) -> None:
    async with desk(tmp_path) as one:
        code, printed = await one.tries("kubectl apply --filename -", MANIFEST)
        assert code and 'no matches for kind "ElasticJob"' in printed
        await one.types(f"kubectl apply --filename {DEFINITION}")
        for before, after, sentence in (
            ("name: demo", "name: de.mo", "metadata.name must be a DNS label of at most 52 characters"),
            ("max: 16", "max: 17", "spec.workers.max must be at most spec.lanes"),
            ("lanes: 16", "lanes: sixteen", "spec.lanes"),
            ("lanes: 16", "lane: 16", 'unknown field "spec.lane"'),
        ):
            code, printed = await one.tries("kubectl apply --filename -", MANIFEST.replace(before, after))
            assert code and sentence in printed, printed
        await one.types("kubectl apply --dry-run=server --filename -", MANIFEST)
        assert not one.item(), "a dry run makes nothing"
        await one.types("kubectl apply --filename -", MANIFEST)
        for patch, sentence in (
            ('{"spec":{"lanes":32}}', "spec.lanes cannot be changed"),
            ('{"spec":{"command":["python"]}}', "spec.command cannot be changed"),
        ):
            code, printed = await one.tries(f"kubectl patch ej demo --type merge --patch '{patch}'")
            assert code and sentence in printed, printed
        code, printed = await one.tries("kubectl scale ej demo --replicas 17")
        assert code and "spec.workers.wanted must be at most spec.workers.max" in printed


@asynchronous
async def test_a_resource_that_no_controller_is_left_to_end_goes_by_the_command_of_the_page(tmp_path: Path) -> None:
    async with desk(tmp_path) as one:
        await one.types(f"kubectl apply --filename {DEFINITION}")
        async with one.controller():
            await one.types("kubectl apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
        pod = {"metadata": {"name": "demo-w0", "ownerReferences": [{"uid": one.item()["metadata"]["uid"]}]}}
        one.cluster.put(PODS, {**pod, "spec": {}, "status": {"phase": "Running"}})
        code, printed = await one.tries("kubectl delete elasticjobs.shoal.dev demo --timeout 1s")
        assert code and "timed out" in printed, printed
        assert one.item()["metadata"]["finalizers"] == [FINALIZER]
        (command,) = re.findall(r"^kubectl patch .*null.*$", PAGE, re.M)
        await one.types(command)
        assert not one.item() and not one.cluster.pods()


# ---- the chart


@pytest.mark.timeout(180)
@pytest.mark.parametrize("helm", HELMS)
@asynchronous
async def test_the_notes_lead_from_an_installation_to_its_end_and_leave_nothing_that_hangs(
    tmp_path: Path, helm: str
) -> None:
    async with desk(tmp_path, helm) as one:
        notes = await one.types(f"helm install shoal ./helm/shoal --namespace {NAMESPACE} --create-namespace")
        assert "successfully rolled out" in await one.types(noted(notes, "rollout status"))
        testing = asyncio.create_task(one.types(noted(notes, "helm test")))
        await one.until(lambda: "shoal-test" in one.cluster.pods(), "the pod of the test")
        one.cluster.update(PODS, "shoal-test", lambda pod: pod.update(status={"phase": "Succeeded"}))
        assert "Succeeded" in await testing
        async with one.controller():
            await one.types(f"kubectl --namespace {NAMESPACE} apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
            await one.types(f"helm upgrade shoal ./helm/shoal --namespace {NAMESPACE} --set controller.replicas=3")
            await one.types(noted(notes, "delete elasticjobs.shoal.dev --all"))
            assert not one.item() and not one.shell.jobs()
        uninstalled = documented("helm uninstall shoal --namespace ml").replace("ml", NAMESPACE)
        await one.types(uninstalled)
        assert list(one.cluster.objects[DEFINITIONS]) == ["elasticjobs.shoal.dev"], "the definition is kept"


@pytest.mark.timeout(180)
@asynchronous
async def test_jobs_that_are_left_when_the_chart_goes_are_ended_by_hand_as_the_notes_say(tmp_path: Path) -> None:
    async with desk(tmp_path) as one:
        notes = await one.types(f"helm install shoal ./helm/shoal --namespace {NAMESPACE}")
        async with one.controller():
            await one.types(f"kubectl --namespace {NAMESPACE} apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
        await one.types(f"helm uninstall shoal --namespace {NAMESPACE} --timeout 20s")
        assert one.item(), "a job is not part of the release"
        await one.types(f"kubectl --namespace {NAMESPACE} delete elasticjobs.shoal.dev demo --wait=false")
        await one.types(noted(notes, "patch elasticjobs.shoal.dev NAME").replace("NAME", "demo"))
        assert not one.item()
        again = f"helm install other ./helm/shoal --namespace {NAMESPACE}"
        code, printed = await one.tries(again)
        assert code and "invalid ownership metadata" in printed
        documented("helm install --take-ownership")
        await one.types(f"{again} --take-ownership")


@pytest.mark.timeout(180)
@asynchronous
async def test_an_older_definition_is_named_and_an_upgrade_of_the_chart_brings_the_new_one(tmp_path: Path) -> None:
    older = yaml.safe_load(DEFINITION.read_text())
    del older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["events"]
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    owner = {"meta.helm.sh/release-name": "shoal", "meta.helm.sh/release-namespace": NAMESPACE}
    older["metadata"] |= {"labels": labels, "annotations": {**older["metadata"]["annotations"], **owner}}
    async with desk(tmp_path) as one:
        await one.types("kubectl apply --filename -", yaml.safe_dump(older))
        async with one.controller():
            await one.types("kubectl apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
            described = ""
            for _ in range(50):
                described = await one.types("kubectl describe elasticjobs.shoal.dev demo")
                if "DefinitionOutdated" in described:
                    break
            assert "drops status.events" in described
            await one.types(f"helm install shoal ./helm/shoal --namespace {NAMESPACE}")
            await one.types("kubectl scale elasticjobs.shoal.dev demo --replicas 3")
            await one.until(lambda: "events" in one.item()["status"], "the status of the new definition")
