"""REST for programs: versions and keys that keep changes apart, pages, codes, specs that can be read back."""

import asyncio
import json
from pathlib import Path

import pytest
from api_port import TRAIN, serving
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.core.machine.spec import State, WorkerView
from shoal_protos.acts import DrainWorker, Pause, Save
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.error_codes import ErrorCode
from small_machine import SmallMachine
from tiers import check

pytestmark = check("serves REST on real ports")

NO_SIZE = {"wanted": None, "min": None, "max": None, "spares": 0, "spares_train": None}
SPEC = {
    "job": "whole", "launcher": "local", "command": ["python", "a.py"],
    "workers": {"wanted": 2, "min": 2, "max": 4, "spares": 0, "spares_train": None},
    "env": {"SECRET": "s3cret"}, "heartbeat_seconds": 0.5, "suspect_after": 5, "reconnect_seconds": 3.0,
    "progress_seconds": 4.0, "stall_seconds": 60.0, "max_restarts": 0, "resume": False, "lanes": 4, "kubernetes": None,
    "cell": {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1, "tight": ["tensor"]},
}  # fmt: skip


# ---- versions


@rule(
    "A change with `If-Match` is held against the job's version at the moment at which nothing else changes it, "
    "and what merely happens to a job leaves its version as it is",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal_controller.jobs.runner",
            "                only_if.check(self.spec.job, version_of(self.view()))\n",
            "                version_of(self.view())\n",
        ),
        Edit(
            "shoal_controller.jobs.shell",
            "                    only_if.check(job, version_of(view))\n",
            "                    version_of(view)\n",
        ),
        Edit(
            "shoal_controller.api.routes",
            '(tag.strip(\'"\') for tag in tags if not tag.startswith("W/"))',
            '(tag.removeprefix("W/").strip(\'"\') for tag in tags)',
        ),
        Edit(
            "shoal_controller.core.machine.machine",
            "    if carried_out or _asked_of(before) != _asked_of(after):\n",
            "    if carried_out or before != after:\n",
        ),
        Edit("shoal_controller.core.machine.machine", "    if carried_out or _asked_of", "    if _asked_of"),
    ],
)
@holds("Of two changes that name one version")
@asynchronous
async def test_a_change_that_names_an_old_version_gets_the_version_of_now_and_changes_nothing(tmp_path):
    machine = SmallMachine(dict.fromkeys((Pause, DrainWorker, Save), ()))
    async with serving(tmp_path, machine=machine) as api:
        made = await api.client.post("/v1/jobs", json=TRAIN)
        old = made.headers["etag"]
        assert old == f'"{made.json()["version"]}"'
        scaled = await api.client.post("/v1/jobs/train/scale", json={"workers": 4}, headers={"If-Match": old})
        assert scaled.status_code == 202 and scaled.headers["etag"] != old
        for method, path, body in [
            ("POST", "scale", {"workers": 2}), ("POST", "pause", None), ("POST", "workers/w0/drain", None),
            ("POST", "checkpoints", None), ("DELETE", "", None),
        ]:  # fmt: skip
            path = f"/v1/jobs/train/{path}".rstrip("/")
            late = await api.client.request(method, path, json=body, headers={"If-Match": old})
            assert (late.status_code, late.json()["code"]) == (412, "version_mismatch"), path
            assert late.headers["etag"] == scaled.headers["etag"]
        now = await api.client.get("/v1/jobs/train")
        assert now.json()["workers"]["wanted"] == 4 and now.headers["etag"] == scaled.headers["etag"]
        assert now.json()["version"] in late.json()["detail"] and machine.events["train"] == ["Started", "Scale"]


@rule(
    "Of two changes that name one version of a job one is made: the version is looked at where nothing else "
    "changes the job, and grows with all that is asked of it, by whomever, and with nothing that merely happens",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.jobs.runner",
            "                only_if.check(self.spec.job, version_of(self.view()))\n",
            "                pass\n",
        ),
        Edit(
            "shoal_controller.core.machine.machine",
            "    if carried_out or _asked_of(before) != _asked_of(after):\n",
            "    if carried_out:\n",
        ),
    ],
)
@holds("A change with `If-Match` is held")
@asynchronous
async def test_of_two_changes_that_name_one_version_one_is_made(tmp_path):
    async with serving(tmp_path) as api:
        tag = (await api.client.post("/v1/jobs", json=TRAIN)).headers["etag"]
        answers = await asyncio.gather(*(
            api.client.post("/v1/jobs/train/scale", json={"workers": workers}, headers={"If-Match": tag})
            for workers in (2, 4, 5)
        ))  # fmt: skip
        assert sorted(answer.status_code for answer in answers) == [202, 412, 412]


@holds("A change with `If-Match` is held")
@pytest.mark.parametrize(
    ("header", "status"),
    [("*", 202), ('"other", {}', 202), ("W/{}", 412), ('"other"', 412), ("{}x", 400), ("abc", 400), ("", 400)],
)
@asynchronous
async def test_if_match_is_read_as_http_has_it(tmp_path, header, status):
    async with serving(tmp_path) as api:
        tag = (await api.client.post("/v1/jobs", json=TRAIN)).headers["etag"]
        headers = {"If-Match": header.format(tag)}
        await api.ask("POST", "/v1/jobs/train/scale", status, json={"workers": 4}, headers=headers)


@asynchronous
async def test_the_version_of_another_job_or_of_another_run_matches_nothing(tmp_path):
    async with serving(tmp_path) as api:
        mine = (await api.client.post("/v1/jobs", json=TRAIN)).headers["etag"]
        theirs = (await api.client.post("/v1/jobs", json={**TRAIN, "job": "other"})).headers["etag"]
        assert mine != theirs
        for tag in (theirs, '"none-1"', '"' + "x" * 5000 + '"', f'{theirs}, "x"'):
            headers = {"If-Match": tag}
            problem = await api.ask("POST", "/v1/jobs/train/scale", 412, json={"workers": 4}, headers=headers)
            assert problem["code"] == "version_mismatch"
        await api.ask("DELETE", "/v1/jobs/train", 202, headers={"If-Match": mine})
        again = (await api.client.post("/v1/jobs", json=TRAIN)).headers["etag"]
        assert again != mine
        await api.ask("DELETE", "/v1/jobs/train", 412, headers={"If-Match": mine})


@holds("A change with `If-Match` is held")
@asynchronous
async def test_a_job_that_is_over_is_forgotten_only_at_the_version_that_was_seen(tmp_path):
    async with serving(tmp_path) as api:
        old = (await api.client.post("/v1/jobs", json=TRAIN)).headers["etag"]
        await api.ask("DELETE", "/v1/jobs/train", 202, headers={"If-Match": old})
        await api.ask("DELETE", "/v1/jobs/train", 412, headers={"If-Match": old})
        assert (await api.ask("GET", "/v1/jobs/train"))["phase"] == "cancelled"


# ---- keys


@rule(
    "A request for a job that comes once more with its key makes no second run, also of the controller that takes over",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.jobs.shell",
        "            if any(is_repeated(spec, runner.spec) for runner in self._runners.values()):\n",
        "            if False:\n",
    ),
)
@rule(
    "A request for a new job that comes once more with its key makes no second run, also of another controller; "
    "with another body it is refused",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal_controller.jobs.only_if",
            "    if spec.request_digest != known.request_digest:\n",
            "    if not spec.request_digest:\n",
        ),
        Edit(
            "shoal_controller.jobs.shell",
            "            if any(is_repeated(spec, runner.spec) for runner in self._runners.values()):\n"
            "                return self.view(spec.job)\n",
            "",
        ),
        Edit(
            "shoal_controller.api.routes",
            "    if not key:\n        return spec\n",
            "    if key:\n        return spec\n",
        ),
    ],
)
@asynchronous
async def test_a_request_that_comes_once_more_gets_the_job_that_it_has_made(tmp_path):
    async with serving(tmp_path) as api:
        key = {"Idempotency-Key": "6c1b"}
        made = await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=key)
        assert await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=key) == made
        over = await api.ask("DELETE", "/v1/jobs/train", 202)
        assert await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=key) == over, "it is not begun anew"
        for other in ({**TRAIN, "lanes": 7}, {**TRAIN, "job": "other"}):
            problem = await api.ask("POST", "/v1/jobs", 422, json=other, headers=key)
            assert problem["code"] == "key_reused" and "6c1b" in problem["detail"]
        assert (await api.ask("POST", "/v1/jobs", 202, json=TRAIN))["version"] != made["version"]


@holds("A request for a job that comes once more")
@holds("A request for a new job")
@asynchronous
async def test_a_key_is_remembered_by_the_controller_that_takes_over(tmp_path):
    key = {"Idempotency-Key": "6c1b"}
    async with serving(tmp_path) as api:
        made = await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=key)
    async with serving(tmp_path) as api:
        assert await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=key) == made
        assert (await api.ask("POST", "/v1/jobs", 409, json=TRAIN))["code"] == "job_exists"


@holds("A request for a job that comes once more")
@holds("A request for a new job")
@asynchronous
async def test_of_many_requests_at_once_with_one_key_one_makes_the_job(tmp_path):
    async with serving(tmp_path) as api:
        key = {"Idempotency-Key": "6c1b"}
        answers = await asyncio.gather(*(api.client.post("/v1/jobs", json=TRAIN, headers=key) for _ in range(5)))
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["version"] for answer in answers}) == 1


@holds("A request for a new job")
@pytest.mark.parametrize("key", ["", "two words", "x" * 256])
@asynchronous
async def test_a_key_that_is_none_is_refused(tmp_path, key):
    async with serving(tmp_path) as api:
        problem = await api.ask("POST", "/v1/jobs", 400, json=TRAIN, headers={"Idempotency-Key": key})
        assert problem["code"] == "invalid_request" and "Idempotency-Key" in problem["detail"]


# ---- what a job was made with


@asynchronous
async def test_a_spec_is_read_back_as_it_can_be_sent_again(tmp_path):
    async with serving(tmp_path) as api:
        made = await api.ask("POST", "/v1/jobs", 202, json=SPEC)
        answer = await api.client.get("/v1/jobs/whole/spec")
        assert answer.json() == SPEC and answer.headers["etag"] == f'"{made["version"]}"'
        await api.ask("POST", "/v1/jobs/whole/scale", 202, json={"workers": 3})
        assert await api.ask("GET", "/v1/jobs/whole/spec") == SPEC, "what it was made with"
        await api.ask("POST", "/v1/jobs", 202, json={"job": "plain"})
        plain = await api.ask("GET", "/v1/jobs/plain/spec")
        assert plain["workers"] == NO_SIZE and plain["heartbeat_seconds"] == 1.0
        await api.ask("POST", "/v1/jobs", 202, json={**plain, "job": "again"})


POD = {
    "job": "pods", "launcher": "kubernetes", "command": ["a"], "env": {"A": "s3cret"},
    "kubernetes": {
        "image": "i",
        "env": [{"name": "B", "value": "s3cret"}, {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
        "podTemplate": {"spec": {"initContainers": [{"name": "i", "env": [{"name": "D", "value": "s3cret"}]}]}},
    },
}  # fmt: skip


@asynchronous
async def test_a_role_that_may_only_view_reads_no_values_of_variables(tmp_path):
    from shoal_controller.api.app import ApiSettings

    async with serving(tmp_path, ApiSettings(2, launchers=frozenset({"kubernetes"})), token="secret") as api:
        root = {"authorization": "Bearer secret"}
        await api.ask("POST", "/v1/jobs", 202, json=POD, headers=root)
        for role, shows in (("view", False), ("operate", True)):
            made = await api.ask("POST", "/v1/tokens", 201, json={"name": role, "role": role}, headers=root)
            spec = await api.ask("GET", "/v1/jobs/pods/spec", headers={"authorization": f"Bearer {made['token']}"})
            assert ("s3cret" in json.dumps(spec)) == shows
            assert set(spec["env"]) == {"A"} and [one["name"] for one in spec["kubernetes"]["env"]] == ["B", "C"]


# ---- pages


WORKERS = tuple(
    WorkerView(f"w{number}", "h", None, State.ACTIVE, None, (), 0, 0, 0, 0.0, {}, "") for number in (0, 2, 10, 1, 11)
)
CHECKPOINTS = tuple(CheckpointRef(generation, step, f"/c/{step}") for generation, step in ((3, 40), (2, 50), (1, 20)))


async def pages(api, path, name, limit):
    """All pages of a list."""
    found, after = [], None
    while True:
        answer = await api.ask("GET", path, params={"limit": limit} | ({"after": after} if after is not None else {}))
        found.append(answer[name])
        if (after := answer["next"]) is None:
            return found


@asynchronous
async def test_pages_one_after_another_are_the_whole_list(tmp_path):
    machine = SmallMachine(shown={"workers": WORKERS, "checkpoints": CHECKPOINTS})
    async with serving(tmp_path, machine=machine, token="secret") as api:
        api.client.headers["authorization"] = "Bearer secret"
        for job in "bac":
            await api.ask("POST", "/v1/jobs", 202, json={"job": job})
            await api.ask("POST", "/v1/tokens", 201, json={"name": job, "role": "view"})
        for workers in (2, 3, 4):
            await api.ask("POST", "/v1/jobs/a/scale", 202, json={"workers": workers})
        for path, name, key, expected in [
            ("/v1/jobs", "jobs", "job", [["a", "b"], ["c"]]),
            ("/v1/tokens", "tokens", "name", [["a", "b"], ["c"]]),
            ("/v1/jobs/a/workers", "workers", "worker", [["w0", "w1"], ["w2", "w10"], ["w11"]]),
            ("/v1/jobs/a/checkpoints", "checkpoints", "step", [[40, 50], [20]]),
            ("/v1/jobs/a/events", "events", "revision", [[1, 2], [3, 4], [5, 6], [7]]),
        ]:
            found = await pages(api, path, name, 2)
            assert [[one[key] for one in page] for page in found] == expected
            whole = await api.ask("GET", path)
            assert whole == {name: [one for page in found for one in page], "next": None}


@asynchronous
async def test_a_page_goes_on_where_its_last_entry_was_though_that_is_gone(tmp_path):
    machine = SmallMachine(shown={"workers": WORKERS, "checkpoints": CHECKPOINTS})
    async with serving(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json={"job": "b"})
        assert [one["job"] for one in (await api.ask("GET", "/v1/jobs?after=a"))["jobs"]] == ["b"]
        assert [one["worker"] for one in (await api.ask("GET", "/v1/jobs/b/workers?after=w9"))["workers"]] == [
            "w10", "w11",
        ]  # fmt: skip
        found = (await api.ask("GET", "/v1/jobs/b/checkpoints?after=3-30"))["checkpoints"]
        assert [one["step"] for one in found] == [50, 20]
        problem = await api.ask("GET", "/v1/jobs/b/checkpoints?after=latest", 400)
        assert problem["detail"] == "`after` is 'latest'; expected `next` of the page before, such as 3-400"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("limit=-1", 400), ("limit=0", 400), ("limit=99999999999999999999", 400), ("limit=x", 400), ("limit=1e3", 400),
        ("limit=", 400), ("after=" + "9" * 300, None), ("after=" + "x" * 301, 400), ("after=%00", None),
        ("after=-1", None), ("after=%ff%fe", None), ("limit=1&limit=2", None), ("aftre=a", 400),
    ],
)  # fmt: skip
@asynchronous
async def test_garbage_for_a_page_is_refused_or_begins_somewhere_and_never_fails(tmp_path, query, status):
    machine = SmallMachine(shown={"workers": WORKERS, "checkpoints": CHECKPOINTS})
    async with serving(tmp_path, machine=machine) as api:
        await api.ask("POST", "/v1/jobs", 202, json={"job": "b"})
        for path in ("/v1/jobs", "/v1/jobs/b/workers", "/v1/jobs/b/checkpoints", "/v1/jobs/b/events", "/v1/events"):
            answer = await api.client.get(f"{path}?{query}")
            assert answer.status_code == status or (status is None and answer.status_code in (200, 400)), answer.text
            assert answer.status_code == 200 or answer.json()["code"] == "invalid_request"


# ---- what a program goes by


@asynchronous
async def test_every_problem_has_a_code_and_every_operation_a_name_that_can_be_read(tmp_path):
    async with serving(tmp_path, token="secret") as api:
        document = await api.ask("GET", "/openapi.json")
        operations = [one for methods in document["paths"].values() for one in methods.values()]
        names = [one["operationId"] for one in operations]
        assert len(set(names)) == len(names) and all(name.isidentifier() and "v1" not in name for name in names)
        assert {"list_jobs", "create_job", "get_job_spec", "drain_worker", "get_health"} <= set(names)
        problem = document["components"]["schemas"]["Problem"]
        assert "code" in problem["required"]
        assert document["components"]["schemas"]["ErrorCode"]["enum"] == [code.value for code in ErrorCode]
        assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
        needs = {one["operationId"]: one["security"] for one in operations}
        assert needs.pop("get_health") == needs.pop("get_readiness") == []
        assert set(map(str, needs.values())) == {"[{'token': []}]"}


@asynchronous
async def test_what_is_refused_has_these_codes(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        codes = {
            (method, path): (await api.client.request(method, path, json=body)).json()["code"]
            for method, path, body in [
                ("GET", "/v1/jobs/nope", None), ("POST", "/v1/jobs", TRAIN), ("GET", "/nowhere", None),
                ("PUT", "/v1/jobs", None), ("POST", "/v1/jobs/train/scale", {"workers": "x"}),
                ("GET", "/v1/jobs?limit=0", None),
                ("POST", "/v1/jobs/train/token", None), ("DELETE", "/v1/tokens/x", None),
            ]
        }  # fmt: skip
        assert codes == {
            ("GET", "/v1/jobs/nope"): "job_unknown", ("POST", "/v1/jobs"): "job_exists",
            ("GET", "/nowhere"): "path_unknown", ("PUT", "/v1/jobs"): "method_not_allowed",
            ("POST", "/v1/jobs/train/scale"): "invalid_request", ("GET", "/v1/jobs?limit=0"): "invalid_request",
            ("POST", "/v1/jobs/train/token"): "no_tokens_here", ("DELETE", "/v1/tokens/x"): "token_unknown",
        }  # fmt: skip


def test_the_page_on_rest_lists_every_code():
    page = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()
    assert [code.value for code in ErrorCode if f"| `{code}` | {code.meaning} |" not in page] == []
