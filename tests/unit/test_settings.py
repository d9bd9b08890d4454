"""Settings: from the environment or given, parsed once, each mistake one sentence that names the setting."""

import json
import sys
from pathlib import Path

import pytest
import structlog
from rule import Edit, rule
from shoal_controller.process import logs
from shoal_controller.settings import Settings, inherited_environment
from shoal_protos.addresses import join_address, split_address
from shoal_protos.errors import UserError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("HTTP", "GRPC", "STORE", "DATA", "TOKEN", "OPEN", "LAUNCHERS", "LOG_LEVEL"):
        monkeypatch.delenv(f"SHOAL_{name}", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_defaults_are_these():
    settings = Settings()
    assert (settings.http, settings.grpc, settings.store) == ("127.0.0.1:7070", "127.0.0.1:7071", "embedded:.shoal")
    assert settings.token is None


def test_the_environment_is_read_and_flags_win(monkeypatch):
    monkeypatch.setenv("SHOAL_HTTP", "0.0.0.0:80")
    monkeypatch.setenv("SHOAL_STORE", "embedded:/var/shoal")
    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    settings = Settings(http="127.0.0.1:0")
    assert (settings.http, settings.store) == ("127.0.0.1:0", "embedded:/var/shoal")
    assert settings.token.get_secret_value() == "secret"
    assert "secret" not in repr(settings)


def test_proxies_are_addresses_and_networks(monkeypatch):
    monkeypatch.setenv("SHOAL_PROXIES", "10.0.0.7, fd00::/8")
    assert Settings().proxies == "10.0.0.7, fd00::/8"
    monkeypatch.setenv("SHOAL_PROXIES", "10.0.0.7,proxy.example")
    with pytest.raises(UserError, match=r"SHOAL_PROXIES: 'proxy\.example' is not an address or a network"):
        Settings()


def test_an_empty_token_asks_for_none(monkeypatch):
    monkeypatch.setenv("SHOAL_TOKEN", "")
    assert Settings().token is None


ADDRESS = "is not a valid address; expected HOST:PORT, such as 127.0.0.1:7070"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"http": "7070"}, f"--http (SHOAL_HTTP): '7070' {ADDRESS}"),
        ({"http": "localhost:"}, f"--http (SHOAL_HTTP): 'localhost:' {ADDRESS}"),
        ({"grpc": ":7071"}, f"--grpc (SHOAL_GRPC): ':7071' {ADDRESS}"),
        ({"grpc": "h:65536"}, f"--grpc (SHOAL_GRPC): 'h:65536' {ADDRESS}"),
        ({"grpc": "h:７"}, f"--grpc (SHOAL_GRPC): 'h:７' {ADDRESS}"),
        ({"log_level": "loud"}, '`SHOAL_LOG_LEVEL` is "loud"; expected debug, info, warning or error'),
        ({"token": "a\nb"}, "SHOAL_TOKEN has characters that an HTTP header cannot carry; use printable ones"),
        ({"token": "sécret"}, "SHOAL_TOKEN has characters that an HTTP header cannot carry; use printable ones"),
        ({"token": "secret "}, "SHOAL_TOKEN has characters that an HTTP header cannot carry; use printable ones"),
        ({"forget_after_seconds": "a week"}, '`SHOAL_FORGET_AFTER_SECONDS` is "a week"; expected a number'),
        ({"htpp": "x"}, '`SHOAL_HTPP` is an unknown key (given: "x")'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(given, sentence):
    with pytest.raises(UserError) as refusal:
        Settings(**given)
    assert str(refusal.value) == sentence


def test_of_several_wrong_settings_each_is_named():
    with pytest.raises(UserError) as refusal:
        Settings(http="7070", grpc="x")
    assert str(refusal.value).splitlines() == [
        "the controller's configuration has 2 faults:",
        f"  - --http (SHOAL_HTTP): '7070' {ADDRESS}",
        f"  - --grpc (SHOAL_GRPC): 'x' {ADDRESS}",
    ]


OPEN_DOOR = (
    "can be reached from other machines without a token: set SHOAL_TOKEN (gRPC: or certificates), "
    "listen on 127.0.0.1, or use --open to admit everybody"
)


@rule(
    "A port that can be reached from other machines requires a token, unless it was opened on purpose",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.settings",
        "            if not is_here(split_address(address)[0]):\n",
        "            if False:\n",
    ),
)
@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:0", "10.0.0.7:1", "node7:7070", "128.0.0.1:1"])
@pytest.mark.parametrize("door", ["http", "grpc"])
def test_what_is_reached_from_elsewhere_asks_for_a_token_or_is_open_on_purpose(door, address):
    with pytest.raises(UserError) as refusal:
        Settings(**{door: address})
    assert str(refusal.value) == f"--{door} {address} {OPEN_DOOR}"
    Settings(**{door: address}, token="secret")
    Settings(**{door: address}, open=True)


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "127.8.8.8:0", "[::1]:1", "localhost:7070"])
def test_what_is_reached_from_this_machine_only_needs_no_token(address):
    assert Settings(http=address, grpc=address).token is None


def test_certificates_guard_the_workers_port_and_not_rest(tmp_path):
    certificates = {"grpc_certificate": tmp_path / "c", "grpc_key": tmp_path / "k", "grpc_client_ca": tmp_path / "a"}
    Settings(grpc="0.0.0.0:7071", **certificates)
    with pytest.raises(UserError, match=r"--http 0\.0\.0\.0:7070 can be reached from other machines"):
        Settings(http="0.0.0.0:7070", **certificates)


@pytest.mark.parametrize("given", ["http_certificate", "http_key"])
def test_half_of_what_https_needs_is_refused(given, tmp_path):
    with pytest.raises(UserError) as refusal:
        Settings(**{given: tmp_path / "file"})
    assert str(refusal.value) == "SHOAL_HTTP_CERTIFICATE and SHOAL_HTTP_KEY go together; only one of them is set"
    assert Settings().http_scheme == "http"
    assert Settings(http_certificate=tmp_path / "c", http_key=tmp_path / "k").http_scheme == "https"


def test_which_launchers_are_allowed_is_a_list():
    assert Settings().allowed_launchers == {"local", "none"}
    assert Settings(launchers="none").allowed_launchers == {"none"}
    with pytest.raises(UserError, match="SHOAL_LAUNCHERS names 'slurm'; expected kubernetes, local or none"):
        Settings(launchers="local, slurm")


def test_logs_and_the_token_lie_in_a_folder_of_their_own_whatever_the_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Settings().folder == tmp_path / ".shoal"
    assert Settings(store="embedded:/var/shoal").folder == Path(".shoal").resolve()
    assert Settings(store="embedded:/var/shoal", data=tmp_path / "data").folder == tmp_path / "data"


def test_workers_inherit_the_environment_without_what_is_the_controllers_alone(monkeypatch):
    for name in ("SHOAL_TOKEN", "SHOAL_STORE", "SHOAL_GRPC_KEY", "SHOAL_URL", "SHOAL_DATA"):
        monkeypatch.setenv(name, "the controller's")
    monkeypatch.setenv("shoal_etcd_password", "the controller's")  # settings are read in small letters, too
    monkeypatch.setenv("SHOAL_FAULT", "w1@3:vote:kill")
    inherited = inherited_environment()
    assert "the controller's" not in inherited.values()
    assert inherited["SHOAL_FAULT"] == "w1@3:vote:kill"


@pytest.mark.parametrize(("devices", "workers"), [("0,1,2", 3), ("", 2), ("-1", 2), ("GPU-1, GPU-2", 2), ("0", 1)])
def test_a_job_wants_one_worker_per_visible_device_or_two(monkeypatch, devices, workers):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert Settings().default_workers == workers


@pytest.mark.parametrize(
    ("address", "host", "port"), [("a:1", "a", 1), ("[::1]:0", "::1", 0), ("0.0.0.0:65535", "0.0.0.0", 65535)]
)
def test_an_address_is_split_and_joined_again(address, host, port):
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


# ---- logs


def test_the_log_is_json_on_standard_error_when_no_person_reads_it(capsys):
    logs.configure("info")
    structlog.get_logger("shoal.test").info("something", job="train", number=3)
    structlog.get_logger("shoal.test").debug("too little")
    captured = capsys.readouterr()
    line = json.loads(captured.err)
    assert line.pop("timestamp")
    assert line == {"event": "something", "job": "train", "number": 3, "level": "info", "logger": "shoal.test"}
    assert captured.out == ""


def test_a_traceback_is_part_of_its_entry(capsys):
    logs.configure("info")
    try:
        raise ValueError("what")
    except ValueError as error:
        structlog.get_logger("shoal.test").error("it failed", exc_info=error)
    assert "ValueError: what" in json.loads(capsys.readouterr().err)["exception"]


def test_libraries_are_heard_from_warnings_on_in_the_same_form(capsys):
    import logging

    logs.configure("debug")
    logging.getLogger("httpx").info("a request")
    logging.getLogger("uvicorn.error").warning("oh %s", "no")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["logger"]) for line in lines] == [("oh no", "uvicorn.error")]


def test_configuring_twice_logs_once(capsys):
    logs.configure("info")
    logs.configure("info")
    structlog.get_logger("shoal.test").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_person_reads_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logs.configure("info")
    structlog.get_logger("shoal.test").info("something", job="train")
    assert "something" in capsys.readouterr().err
