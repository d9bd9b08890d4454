"""Who gets in at the REST port: tokens and their roles, hosts, pages of other sites."""

import asyncio

import pytest
from api_port import NO_JOBS, TRAIN, serving
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.access.proxies import Proxies
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.api.app import ApiSettings
from shoal_controller.process import logs
from shoal_protos.acts import ConfirmLost, DrainWorker, Pause, Resume, Save
from shoal_protos.release import RELEASE
from small_machine import SmallMachine
from tiers import check

pytestmark = check("serves REST on real ports")


@holds("A worker's token opens sessions")
@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, "no token"),
        ("Bearer nope", "another token"),
        ("Basic c2VjcmV0", "another token"),
        ("Bearer sécret", "another token"),
        (
            f"Bearer {WorkerTokens('secret').join('demo', 'run-1')}",
            "a token for workers, which is not one for operators",
        ),
    ],
)
@asynchronous
async def test_without_the_token_only_health_and_documentation_answer(tmp_path, header, found):
    async with serving(tmp_path, token="secret") as api:
        headers = {} if header is None else {"authorization": header.encode()}
        for path in ("/v1/jobs", "/metrics", "/nothing"):
            answer = await api.client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert "shoal-release" not in answer.headers
            assert answer.json()["detail"] == (
                f"the request shows {found}; send the header `Authorization: Bearer TOKEN` "
                "with the controller's SHOAL_TOKEN or a token of `shoal token create` (`shoal run` keeps its own in "
                ".shoal/token where it was started)"
            )
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/openapi.json", 200), ("/docs", 404)):
            assert (await api.client.get(path, headers=headers)).status_code == status


@asynchronous
async def test_with_the_token_everything_answers_under_any_host_name_and_says_its_release(tmp_path):
    async with serving(tmp_path, token="secret") as api:
        headers = {"authorization": "Bearer secret", "host": "shoal.example:7070"}
        answer = await api.client.get("/v1/jobs", headers=headers)
        assert (answer.json(), answer.headers["shoal-release"]) == (NO_JOBS, RELEASE)


READS = [("GET", "/v1/jobs"), ("GET", "/v1/jobs/train"), ("GET", "/v1/jobs/train/events"), ("GET", "/metrics")]
CHANGES = [
    ("POST", "/v1/jobs/train/pause"), ("POST", "/v1/jobs/train/workers/w1/lost"),
    ("POST", "/v1/jobs/train/checkpoints"), ("DELETE", "/v1/jobs/train"),
]  # fmt: skip
ABOUT_TOKENS = [
    ("GET", "/v1/tokens"), ("POST", "/v1/tokens"), ("POST", "/v1/tokens/x/rotate"), ("DELETE", "/v1/tokens/x"),
]  # fmt: skip


@rule(
    "A token opens what its role allows, and nothing more; the store has a digest of it and no secret",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.api.guard", "    if not caller.role.includes(needed):\n", "    if False:\n"),
        Edit(
            "shoal_controller.access.token_register",
            "        token = NamedToken(name, role, _digest(shown), now",
            "        token = NamedToken(name, role, shown, now",
        ),
    ],
)
@asynchronous
async def test_each_role_opens_what_is_its_own_and_nothing_more(tmp_path):
    async with serving(tmp_path, token="secret") as api:
        root = {"authorization": "Bearer secret"}
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=root)
        for role, allowed in (("view", READS), ("operate", READS + CHANGES), ("admin", READS + CHANGES + ABOUT_TOKENS)):
            made = await api.ask("POST", "/v1/tokens", 201, json={"name": role, "role": role}, headers=root)
            for method, path in READS + ABOUT_TOKENS + CHANGES:
                answer = await api.client.request(method, path, headers={"authorization": f"Bearer {made['token']}"})
                assert (answer.status_code != 403) == ((method, path) in allowed), (role, method, path, answer.text)
                if answer.status_code == 403:
                    needs = "admin" if "/tokens" in path else "operate"
                    assert answer.json()["detail"] == (
                        f"the token {role} has the role {role}; {method} {path} needs {needs}. Ask an admin for a "
                        "token with that role"
                    )


@holds("A token opens what its")
@asynchronous
async def test_every_route_that_changes_something_needs_more_than_view(tmp_path):
    from rest_listing import listing

    lines = [line.split() for line in listing().splitlines() if line.startswith(("POST", "PUT", "PATCH", "DELETE"))]
    assert len(lines) > 5
    async with serving(tmp_path, token="secret") as api:
        root = {"authorization": "Bearer secret"}
        made = await api.ask("POST", "/v1/tokens", 201, json={"name": "eye", "role": "view"}, headers=root)
        for method, path, *_ in lines:
            answer = await api.client.request(method, path, headers={"authorization": f"Bearer {made['token']}"})
            assert answer.status_code == 403, (method, path)


@rule(
    "The history says who asked for what, with which token; it outlives other events, and has a bound of its own",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.jobs.job_repository",
        "    key = audit_key if event.kind == EventKind.AUDIT else event_key\n",
        "    key = event_key\n",
    ),
)
@asynchronous
async def test_the_history_says_who_did_what_when_with_which_token(tmp_path):
    kinds = (Pause, Resume, DrainWorker, ConfirmLost, Save)
    machine = SmallMachine(dict.fromkeys(kinds, lambda job, event: ()))
    async with serving(tmp_path, machine=machine, token="secret") as api:
        root = {"authorization": "Bearer secret"}
        made = await api.ask("POST", "/v1/tokens", 201, json={"name": "ci", "role": "operate"}, headers=root)
        api.client.headers["authorization"] = f"Bearer {made['token']}"
        assert (await api.ask("POST", "/v1/jobs", 202, json=TRAIN))["owner"] == "ci"
        for path, body in (("scale", {"workers": 4}), ("pause", None), ("resume", None), ("checkpoints", None),
                           ("workers/w1/drain", {"grace_seconds": 7}), ("workers/w2/lost", None)):  # fmt: skip
            await api.ask("POST", f"/v1/jobs/train/{path}", 202, json=body)
        assert (await api.ask("DELETE", "/v1/jobs/train", 202, headers=root))["owner"] == "ci", "whoever changes it"
        assert (await api.client.post("/v1/jobs/train/scale", json={"workers": 0})).status_code == 400
        events = (await api.ask("GET", "/v1/jobs/train/events"))["events"]
        audit = [event for event in events if event["kind"] == "audit"]
        assert [event["message"] for event in audit] == [
            "token ci from 127.0.0.1: create the job",
            "token ci from 127.0.0.1: scale to 4 workers",
            "token ci from 127.0.0.1: pause the job",
            "token ci from 127.0.0.1: resume the job",
            "token ci from 127.0.0.1: save a checkpoint",
            "token ci from 127.0.0.1: drain w1 within 7 s",
            "token ci from 127.0.0.1: w2 is dead",
            "token root from 127.0.0.1: stop the job",
        ]
        assert audit[5]["worker"] == "w1" and audit[5]["data"] == {
            "action": "drain", "token": "ci", "role": "operate", "address": "127.0.0.1", "worker": "w1",
            "grace_seconds": 7.0, "why": "",
        }  # fmt: skip
        assert made["token"].rpartition(":")[2] not in str(events)


@rule(
    "A client's address is believed of proxies that are named, and of nobody else",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.access.proxies", "while hops and self._is_proxy(address) and", "while hops and"),
)
@pytest.mark.parametrize(
    ("proxies", "forwarded", "seen"),
    [
        ("", "192.0.2.1", "127.0.0.1"),
        ("10.0.0.1", "192.0.2.1", "127.0.0.1"),
        ("127.0.0.0/8", "192.0.2.1", "192.0.2.1"),
        ("127.0.0.1, 10.0.0.0/8", "192.0.2.9, 192.0.2.1, 10.0.0.7", "192.0.2.1"),
        ("127.0.0.1", "192.0.2.1, unknown", "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
    ],
)
@asynchronous
async def test_the_history_names_the_client_that_a_named_proxy_tells_and_believes_nobody_else(
    tmp_path, proxies, forwarded, seen
):
    async with serving(tmp_path, ApiSettings(2, proxies=Proxies.named(proxies)), token="secret") as api:
        headers = {"authorization": "Bearer secret"} | ({"x-forwarded-for": forwarded} if forwarded else {})
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=headers)
        events = (await api.ask("GET", "/v1/jobs/train/events", headers=headers))["events"]
        assert [event["data"]["address"] for event in events if event["kind"] == "audit"] == [seen]


@asynchronous
async def test_tokens_are_made_listed_rotated_and_revoked(tmp_path):
    async with serving(tmp_path, token="secret") as api:
        api.client.headers["authorization"] = "Bearer secret"
        made = await api.ask("POST", "/v1/tokens", 201, json={"name": "ci", "role": "operate", "days": 7})
        assert (made["name"], made["role"], made["created_by"]) == ("ci", "operate", "root")
        assert made["expires"] - made["created"] == 7 * 86_400
        shown = {key: value for key, value in made.items() if key != "token"}
        assert await api.ask("GET", "/v1/tokens") == {"tokens": [shown], "next": None}
        again = await api.ask("POST", "/v1/tokens/ci/rotate", json={"keep_seconds": 0})
        old, new = ({"authorization": f"Bearer {one['token']}"} for one in (made, again))
        assert (await api.client.get("/v1/jobs", headers=old)).status_code == 401
        assert (await api.client.get("/v1/jobs", headers=new)).status_code == 200
        assert await api.ask("DELETE", "/v1/tokens/ci") == shown
        assert (await api.client.get("/v1/jobs", headers=new)).status_code == 401
        assert (await api.client.delete("/v1/tokens/ci")).status_code == 404


@asynchronous
async def test_a_request_for_a_token_that_cannot_be_is_one_sentence(tmp_path):
    async with serving(tmp_path, token="secret") as api:
        api.client.headers["authorization"] = "Bearer secret"
        for body, sentence in [
            ({"name": "ci", "role": "king"}, '`role` is "king"; expected view, operate or admin'),
            ({"name": "../ci", "role": "view"}, '`name` is "../ci"; expected at most 63 letters, digits,'),
            ({"name": "ci"}, "`role` is missing"),
            ({"name": "ci", "role": "view", "days": 0}, "`days` is 0; expected"),
        ]:  # fmt: skip
            answer = await api.ask("POST", "/v1/tokens", 400, json=body)
            assert sentence in answer["detail"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("HEAD", "/v1/jobs", "GET, POST"), ("OPTIONS", "/v1/jobs", "GET, POST"), ("TRACE", "/v1/jobs/a", "DELETE, GET"),
        ("PROPFIND", "/healthz", "GET"), ("get", "/v1/jobs/a/scale", "POST"),
    ],
)  # fmt: skip
@asynchronous
async def test_a_method_that_is_not_allowed_is_answered_with_all_that_are(tmp_path, method, path, allowed):
    async with serving(tmp_path, token="secret") as api:
        answer = await api.client.request(method, path, headers={"authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        if method != "HEAD":
            assert answer.json()["detail"] == f"{answer.request.method} is not allowed at {path}; expected {allowed}"


STRANGE = [
    "//v1/tokens", "/v1//tokens", "/v1/./tokens", "/v1/jobs/..%2ftokens", "/v1/jobs/%2e%2e/tokens", "/V1/tokens",
    "/v1%2ftokens", "/v1/token%73", "/v1/tokens/", "/v1/tokens/%2e", "/v1/tokens%00", "http://127.0.0.1/v1/tokens",
    "*", "/v1/tokens;x", "/v1/tokens?x", "/v1/jobs/../tokens",
]  # fmt: skip


@pytest.mark.parametrize("target", STRANGE)
@asynchronous
async def test_no_way_of_writing_a_path_opens_what_its_token_does_not(tmp_path, target):
    async with serving(tmp_path, token="secret") as api:
        root = {"authorization": "Bearer secret"}
        made = await api.ask("POST", "/v1/tokens", 201, json={"name": "eye", "role": "view"}, headers=root)
        for method in ("GET", "DELETE"):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            authorization = f"authorization: Bearer {made['token']}"
            lines = [f"{method} {target} HTTP/1.1", "host: 127.0.0.1", authorization, "connection: close", "", ""]
            writer.write("\r\n".join(lines).encode())
            answer = await asyncio.wait_for(reader.read(), 100)
            assert answer.split()[1] in (b"400", b"403", b"404"), answer
            writer.close()
        assert [one["name"] for one in (await api.ask("GET", "/v1/tokens", headers=root))["tokens"]] == ["eye"]


@asynchronous
async def test_a_token_in_a_url_opens_nothing_and_reaches_no_log(tmp_path, capfd):
    async with serving(tmp_path, token="secret-word") as api:
        logs.configure("debug")
        root = {"authorization": "Bearer secret-word"}
        for path in (
            "/v1/jobs?token=secret-word",
            "/v1/jobs?access_token=secret-word",
            "/v1/secret-word",
            "/secret-word",
        ):
            assert (await api.client.get(path)).status_code == 401
            await api.client.get(path, headers=root)
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(b"GET /v1/jobs?token=secret-word\r\n\r\n")
        assert b"400" in await asyncio.wait_for(reader.read(), 100)
        writer.close()
    assert "secret-word" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:7", "127.1.2.3", "[::1]:7070"])
@asynchronous
async def test_this_machine_has_several_names(tmp_path, host):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/v1/jobs", headers={"host": host}) == NO_JOBS


@asynchronous
async def test_a_port_that_is_open_to_others_answers_to_any_name(tmp_path):
    async with serving(tmp_path, ApiSettings(2, here_only=False)) as api:
        assert await api.ask("GET", "/v1/jobs", headers={"host": "node7.cluster"}) == NO_JOBS


ELSEWHERE = {"origin": "https://example.org"}
FOREIGN = [
    ELSEWHERE,
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://["},
    {"origin": "http://127.0.0.1:3000"},
    {"origin": "http://127.0.0.1:7070.example.org"},
    {"origin": "http://example.org@127.0.0.1:7070"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@rule(
    "A page of another site cannot command a controller through a browser",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.api.guard", "        self._check_page(headers)\n", ""),
)
@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("door", [{}, {"token": "secret"}, {"settings": ApiSettings(2, here_only=False)}])
@asynchronous
async def test_what_a_browser_sends_for_another_sites_page_is_refused(tmp_path, headers, door):
    async with serving(tmp_path, **door) as api:
        given = headers | {"host": "127.0.0.1:7070", "authorization": "Bearer secret"}
        for method, path in (("POST", "/v1/jobs/demo/pause"), ("GET", "/v1/jobs"), ("GET", "/metrics")):
            answer = await api.client.request(method, path, headers=given)
            assert answer.status_code == 403
            assert answer.json()["detail"] == (
                f"the request comes from a web page of {headers.get('origin') or 'another site'}; "
                "a controller answers to programs and to its own pages only"
            )


@holds("A page of another site")
@asynchronous
async def test_a_name_that_anybody_can_give_this_address_makes_no_page_its_own(tmp_path):
    rebound = {"origin": "http://example.org:7070", "host": "example.org:7070"}
    async with serving(tmp_path, ApiSettings(2, here_only=False)) as api:
        assert (await api.client.post("/v1/jobs/demo/pause", headers=rebound)).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:7070", "host": "127.0.0.1:7070", "sec-fetch-site": "same-origin"},
        {"origin": "http://[::1]:7070", "host": "[::1]:7070"},
        {"sec-fetch-site": "none"},
        {},
    ],
)
@asynchronous
async def test_its_own_pages_and_programs_are_answered(tmp_path, headers):
    async with serving(tmp_path) as api:
        assert await api.ask("GET", "/v1/jobs", headers=headers) == NO_JOBS


@asynchronous
async def test_the_join_token_of_a_run_is_for_those_who_may_change_the_job(tmp_path):
    settings = ApiSettings(default_workers=2, worker_tokens=WorkerTokens("secret"))
    async with serving(tmp_path, settings, token="secret") as api:
        root = {"authorization": "Bearer secret"}
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN, headers=root)
        view = (await api.ask("POST", "/v1/tokens", 201, json={"name": "eve", "role": "view"}, headers=root))["token"]
        await api.ask("POST", "/v1/jobs/train/token", 403, headers={"authorization": f"Bearer {view}"})
        answered = await api.ask("POST", "/v1/jobs/train/token", headers=root)
        run = api.shell.spec("train").run
        assert answered == {"job": "train", "run": run, "token": settings.worker_tokens.join("train", run)}
        assert (await api.ask("POST", "/v1/jobs/other/token", 404, headers=root))["detail"].startswith(
            "there is no job"
        )


@asynchronous
async def test_where_workers_need_no_token_none_is_made(tmp_path):
    async with serving(tmp_path) as api:
        await api.ask("POST", "/v1/jobs", 202, json=TRAIN)
        problem = await api.ask("POST", "/v1/jobs/train/token", 409)
        assert problem["detail"] == "this controller was started without SHOAL_TOKEN: its workers need no token"
