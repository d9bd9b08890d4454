"""Where a second `shoal run` of a folder has its state, its name and its ports, and how commands find each of them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shoal.client import Client
from shoal_controller.cli.options import DEFAULT_URL
from shoal_controller.cli.runs import announced, beside, clients_of
from shoal_controller.cli.serve import Places
from shoal_protos.errors import UserError
from shoal_protos.living_runs import BESIDE, FILE, LOCK, living_runs

NO_FLAGS = Places(None, None, None, None)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """As a controller holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SHOAL_DATA", "SHOAL_TOKEN", "SHOAL_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".shoal"


def test_a_run_alone_in_its_folder_has_the_folders_own_state_whoever_was_there_before(base: Path) -> None:
    assert beside(NO_FLAGS, "a", False)[0].data is None
    base.mkdir()
    (base / LOCK).touch()
    (base / FILE).write_text(json.dumps({"job": "a", "url": "http://127.0.0.1:1", "pid": 1}))
    assert beside(NO_FLAGS, "a", True) == (beside(NO_FLAGS, "b", False)[0], "a")
    assert living_runs(base) == [], "nobody holds it"


def test_a_run_beside_another_has_a_name_and_a_folder_of_its_own_and_finds_it_again(base: Path) -> None:
    with held(base), announced(base, "a", "http://127.0.0.1:1"):
        places, name = beside(NO_FLAGS, "a", False)
        assert (places.data, places.store, name) == (base / BESIDE / "a-2", f"embedded:{base / BESIDE / 'a-2'}", "a-2")
        with pytest.raises(UserError, match=rf"job a \(pid {os.getpid()}\) is trained by another shoal run of this"):
            beside(NO_FLAGS, "a", True)
        assert beside(Places(None, None, None, base / "own"), "a", True)[1] == "a", "where it was told to be"
        with held(base / BESIDE / "a-2"), announced(base / BESIDE / "a-2", "a-2", "http://127.0.0.1:2"):
            assert [run.job for run in living_runs(base)] == ["a", "a-2"]
            assert beside(NO_FLAGS, "a", False)[1] == "a-3"
    assert living_runs(base) == [] and not (base / FILE).exists()
    assert beside(NO_FLAGS, "a-2", True)[0].data == base / BESIDE / "a-2", "its unfinished job is there"


def test_ports_are_the_default_ones_or_any_where_something_listens_there(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal_controller.settings import Settings

    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        busy, free = (f"127.0.0.1:{one.getsockname()[1]}" for one in (taken, other))
        other.close()
        monkeypatch.setattr(Settings.model_fields["http"], "default", busy)
        monkeypatch.setattr(Settings.model_fields["grpc"], "default", free)
        places, _ = beside(NO_FLAGS, "a", False)
        assert (places.http, places.grpc) == ("127.0.0.1:0", free)
        given, _ = beside(Places(busy, None, None, None), "a", False)
        assert given.http == busy, "what was asked for is refused where it is taken"


def test_a_command_asks_the_run_that_trains_the_job_with_its_token_and_all_where_it_names_none(base: Path) -> None:
    assert [one.address.url for one in clients_of(DEFAULT_URL, "a")] == [DEFAULT_URL]
    first, second = (base, "a", "http://127.0.0.1:1"), (base / BESIDE / "b", "b", "http://127.0.0.1:2")
    with held(base), announced(*first), held(second[0]), announced(*second):
        (second[0] / "token").write_text("of-the-second")
        assert [one.address.url for one in clients_of(DEFAULT_URL)] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        [client] = clients_of(DEFAULT_URL, "b")
        assert client.address.url == "http://127.0.0.1:2"
        assert client._http.headers["authorization"] == "Bearer of-the-second"
        assert clients_of(DEFAULT_URL, "attached")[0].address.url == "http://127.0.0.1:1", (
            "one that was given to the first"
        )
        assert [one.address.url for one in clients_of("http://127.0.0.1:3", "b")] == ["http://127.0.0.1:3"]
        (base / FILE).unlink()
        assert clients_of(DEFAULT_URL)[0].address.url == DEFAULT_URL, "a controller that `shoal run` has not started"


def test_a_client_in_python_asks_the_runs_that_the_commands_ask(base: Path) -> None:
    first, second = (base, "a", "http://127.0.0.1:1"), (base / BESIDE / "b", "b", "http://127.0.0.1:2")
    with Client() as client, held(base), announced(*first), held(second[0]), announced(*second):
        (second[0] / "token").write_text("of-the-second")
        found = client._controllers
        assert [one.address.url for one in found.all()] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        assert found.of("b").address.url == "http://127.0.0.1:2" and found.of("b") is found.of("b")
        assert found.of("b")._http.headers["authorization"] == "Bearer of-the-second"
        assert found.of("attached").address.url == found.of().address.url == "http://127.0.0.1:1"
        with Client("http://127.0.0.1:3") as other:
            assert other._controllers.of("b").address.url == "http://127.0.0.1:3"
        (base / FILE).unlink()
        assert found.of().address.url == DEFAULT_URL, "a controller that `shoal run` has not started"
    assert found.of("b").address.url == DEFAULT_URL, "the runs are over"


@pytest.mark.parametrize("content", ["", "[]", '{"job": "a"}', '{"job": "a", "url": "u", "pid": 1, "more": 2}'])
def test_a_file_that_is_none_of_a_run_names_no_run(base: Path, content: str) -> None:
    with held(base):
        (base / FILE).write_text(content)
        assert living_runs(base) == []
