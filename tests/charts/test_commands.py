"""What the notes of the chart and the docs tell people to type, typed: kubectl and both helms against an API server in
this process, beside it the part of a controller that makes jobs from resources.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest
import yaml
from api_port import serving
from api_server import PODS
from asynchronous import asynchronous
from charts.desk import desk, page_manifest
from charts.rendering import CHART, HELMS, ROOT
from cluster_choice import NAMESPACE
from pod_team import hurry
from shoal_controller.elastic_jobs import owned_job, reconciler
from shoal_controller.launchers.kubernetes.resource_kind import FINALIZER
from whole_api import DEFINITIONS, DEPLOYMENTS

MANIFEST = page_manifest()
DEFINITION = CHART / "crd" / "elasticjobs.yaml"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    for module, name in ((reconciler, "LOOK_SECONDS"), (reconciler, "AGAIN_SECONDS"), (owned_job, "SOON_SECONDS")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(owned_job, "STATUS_SECONDS", 0.05)


class Documented(StrEnum):
    """The commands that stand in pages, as they stand there but for line ends."""

    INSTALL = (
        "helm install shoal ./helm/shoal --namespace ml --create-namespace "
        "--set image.repository=registry.example.org/shoal-controller "
        "--set workerImage.repository=registry.example.org/shoal-worker"
    )
    ROLLOUT = "kubectl --namespace ml rollout status deployment/shoal --timeout 5m"
    TEST = "helm test shoal --namespace ml"
    DELETE_ALL = "kubectl --namespace ml delete elasticjobs.shoal.dev --all"
    UNINSTALL = "helm uninstall shoal --namespace ml"
    TAKE_OVER = "helm install --take-ownership"
    SCALE = "kubectl scale elasticjobs.shoal.dev demo --replicas 8"
    SHOW = "kubectl get elasticjobs.shoal.dev"
    GIVE_UP = """kubectl patch elasticjobs.shoal.dev demo --type merge --patch '{"metadata":{"finalizers":null}}'"""
    RANKS = (
        "kubectl get pods --selector shoal.dev/job=demo --output "
        r"custom-columns='POD:.metadata.name,RANK:.metadata.annotations.shoal\.dev/rank'"
    )
    PODS_OF_A_JOB = "kubectl get pods --selector shoal.dev/job=JOB"

    @property
    def here(self) -> str:
        """In the test's namespace."""
        return re.sub(r"\bml\b", NAMESPACE, self.value)


TYPED_ELSEWHERE = "first_job.md"
"""By tests/integration/test_first_job.py."""
NAMED = re.compile(r"(kubectl|helm) [a-z]+")
"""A command that is only spoken of."""


def commands_of_pages() -> Iterator[str]:
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name == TYPED_ELSEWHERE:
            continue
        text = re.sub(r"\\\n\s*", "", page.read_text())
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M)
        lines = [line for block in blocks for line in block.splitlines()]
        spoken = [" ".join(one.split()) for one in re.findall(r"`((?:kubectl|helm)\s[^`]+)`", text)]
        found = (one for one in (*lines, *spoken) if one.startswith(("kubectl ", "helm ")))
        yield from (one for one in found if not NAMED.fullmatch(one))


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
            shown = await one.types(Documented.SHOW.here)
            assert re.search(r"NAME +PHASE +WORKERS", shown) and re.search(r"demo +waiting +0/2", shown)
            assert "GOODPUT" in await one.types("kubectl get ej demo --output wide")
            await one.types(Documented.SCALE.here)
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
        await one.types(Documented.GIVE_UP.here)
        assert not one.item() and not one.cluster.pods()


# ---- the chart


@pytest.mark.timeout(180)
@pytest.mark.parametrize("helm", HELMS)
@asynchronous
async def test_the_notes_lead_from_an_installation_to_its_end_and_leave_nothing_that_hangs(
    tmp_path: Path, helm: str
) -> None:
    async with desk(tmp_path, helm) as one:
        notes = await one.types(Documented.INSTALL.here)
        assert noted(notes, "rollout status") == Documented.ROLLOUT.here
        assert "successfully rolled out" in await one.types(Documented.ROLLOUT.here)
        assert noted(notes, "helm test") == Documented.TEST.here
        testing = asyncio.create_task(one.types(Documented.TEST.here))
        await one.until(lambda: "shoal-test" in one.cluster.pods(), "the pod of the test")
        one.cluster.update(PODS, "shoal-test", lambda pod: pod.update(status={"phase": "Succeeded"}))
        assert "Succeeded" in await testing
        async with one.controller():
            await one.types(f"kubectl --namespace {NAMESPACE} apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
            await one.types(f"helm upgrade shoal ./helm/shoal --namespace {NAMESPACE} --set controller.replicas=3")
            assert noted(notes, "delete elasticjobs.shoal.dev --all") == Documented.DELETE_ALL.here
            await one.types(Documented.DELETE_ALL.here)
            assert not one.item() and not one.shell.jobs()
        assert "Warning" not in await one.types(Documented.UNINSTALL.here), "nothing is left to warn of"
        assert list(one.cluster.objects[DEFINITIONS]) == ["elasticjobs.shoal.dev"], "the definition is kept"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("helm", HELMS)
@asynchronous
async def test_jobs_that_are_left_when_the_chart_goes_are_warned_of_and_ended_by_hand_as_the_notes_say(
    tmp_path: Path, helm: str
) -> None:
    async with desk(tmp_path, helm) as one:
        notes = await one.types(f"helm install shoal ./helm/shoal --namespace {NAMESPACE}")
        async with one.controller():
            await one.types(f"kubectl --namespace {NAMESPACE} apply --filename -", MANIFEST)
            await one.until(lambda: one.item().get("status"), "a status")
        printed = await one.types(f"{Documented.UNINSTALL.here} --timeout 20s")
        assert "the ElasticJob demo is left, and no controller will be there to end it" in printed, printed
        assert one.item(), "a job is not part of the release"
        await one.types(f"kubectl --namespace {NAMESPACE} delete elasticjobs.shoal.dev demo --wait=false")
        await one.types(noted(notes, "patch elasticjobs.shoal.dev NAME").replace("NAME", "demo"))
        assert not one.item()
        again = f"helm install other ./helm/shoal --namespace {NAMESPACE}"
        code, printed = await one.tries(again)
        assert code and "invalid ownership metadata" in printed
        await one.types(f"{Documented.TAKE_OVER.here.replace('install', again.removeprefix('helm '))}")


@pytest.mark.timeout(180)
@asynchronous
async def test_jobs_are_shown_from_inside_a_controller_as_the_notes_say(tmp_path: Path) -> None:
    async with desk(tmp_path) as one, serving(tmp_path / "rest", token="root-token") as rest:
        await rest.ask("POST", "/v1/jobs", 202, json={"job": "gpt"}, headers={"Authorization": "Bearer root-token"})
        notes = await one.types(f"helm install shoal ./helm/shoal --namespace {NAMESPACE}")
        (deployment,) = one.cluster.objects[DEPLOYMENTS].values()
        template = deployment["spec"]["template"]
        metadata = {"name": "shoal-0", "namespace": NAMESPACE, **template["metadata"]}
        pod = {"metadata": metadata, "spec": {**template["spec"], "nodeName": "a"}}
        one.cluster.put(PODS, {**pod, "status": {"phase": "Running"}})

        async def run(command: list[str]) -> tuple[int, bytes]:
            words = [word.replace("127.0.0.1:7070", f"127.0.0.1:{rest.port}") for word in command]
            program = Path(sys.executable).with_name(words[0])
            environment = {"SHOAL_TOKEN": "root-token", "HOME": str(tmp_path)}
            process = await asyncio.create_subprocess_exec(
                program, *words[1:], env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            printed, _ = await process.communicate()
            return process.returncode or 0, printed

        one.cluster.run_in_pod = run
        assert re.search(r"gpt +waiting", await one.types(noted(notes, "exec deployment/shoal")))


@asynchronous
async def test_pods_are_shown_as_the_pages_say(tmp_path: Path) -> None:
    async with desk(tmp_path) as one:
        labels = {"shoal.dev/job": "demo"}
        for name, rank in (("demo-w0", "1"), ("demo-w3", "0")):
            metadata = {"name": name, "labels": labels, "annotations": {"shoal.dev/rank": rank}}
            one.cluster.put(PODS, {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Pending"}})
        one.cluster.put(PODS, {"metadata": {"name": "another"}, "spec": {}, "status": {}})
        ranks = [line.split() for line in (await one.types(Documented.RANKS.here)).splitlines()]
        assert ranks == [["POD", "RANK"], ["demo-w0", "1"], ["demo-w3", "0"]]
        shown = await one.types(Documented.PODS_OF_A_JOB.here.replace("JOB", "demo"))
        assert "demo-w0" in shown and "another" not in shown
        assert re.search(r"Status: +Pending", await one.types("kubectl describe pods demo-w0"))


def test_no_command_of_a_page_or_of_the_notes_is_left_out() -> None:
    assert set(commands_of_pages()) == {one.value for one in Documented}
    tests = Path(__file__).read_text()
    assert [one.name for one in Documented if f"Documented.{one.name}.here" not in tests] == []
    lines = (CHART / "templates" / "NOTES.txt").read_text().splitlines()
    assert sum(line.startswith(("     kubectl ", "     helm ")) for line in lines) == tests.count("noted" + "(notes, ")


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
