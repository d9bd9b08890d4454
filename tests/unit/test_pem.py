"""Whichever side names a file of certificates: what is wrong with it is one sentence, and of the same form."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from asynchronous import asynchronous
from certificates import authority, certificate
from rule import Edit, rule
from shoal.session.settings import SessionSettings as WorkerSettings
from shoal_controller.sessions.settings import SessionSettings as PortSettings
from shoal_controller.store.etcd_store import EtcdAccess, EtcdStore, parsed_etcd_url
from shoal_protos.errors import UserError

pytestmark = pytest.mark.xdist_group("keys")

URL = parsed_etcd_url("etcd://127.0.0.1:1/shoal")


def of_a_worker(file: Path) -> None:
    WorkerSettings(controller="127.0.0.1:1", job="j", tls_ca=file).credentials()


def of_the_workers_port(file: Path) -> None:
    PortSettings(certificate=file, key=file, client_ca=file).credentials()


@asynchronous
async def of_etcd(file: Path) -> None:
    await EtcdStore.open(URL, EtcdAccess(authorities=file), None)


READERS = {
    "SHOAL_TLS_CA": of_a_worker,
    "SHOAL_GRPC_(KEY|CERTIFICATE)": of_the_workers_port,
    "SHOAL_ETCD_CA": of_etcd,
}


@pytest.mark.parametrize(("setting", "read"), READERS.items(), ids=list(READERS))
def test_a_file_of_no_use_is_named_with_its_setting(tmp_path: Path, setting: str, read: Callable[[Path], None]) -> None:
    file = tmp_path / "house.pem"
    with pytest.raises(UserError, match=rf"^{setting} names .*house\.pem, which cannot be read: No such file"):
        read(file)
    file.write_text("half a certificate, or none")
    with pytest.raises(UserError, match=rf"^{setting} names .*house\.pem, which is not a PEM file \(no line"):
        read(file)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `house.pem`, `one.pem`, and `one.key`, which has a password."""
    folder = tmp_path_factory.mktemp("locked")
    authority(folder, "house")
    certificate(folder, "one", "house")
    lock = ["openssl", "ec", "-in", "one.key", "-aes128", "-passout", "pass:hush", "-out", "locked.key"]
    subprocess.run(lock, cwd=folder, check=True, capture_output=True, timeout=100)
    (folder / "locked.key").replace(folder / "one.key")
    return folder


def of_a_worker_with_its_own(folder: Path) -> None:
    own = {"tls_certificate": folder / "one.pem", "tls_key": folder / "one.key"}
    WorkerSettings(controller="127.0.0.1:1", job="j", tls_ca=folder / "house.pem", **own).credentials()


def of_the_workers_port_with_its_own(folder: Path) -> None:
    files = {"certificate": folder / "one.pem", "key": folder / "one.key", "client_ca": folder / "house.pem"}
    PortSettings(**files).credentials()


@asynchronous
async def of_etcd_with_its_own(folder: Path) -> None:
    own = {"certificate": folder / "one.pem", "key": folder / "one.key"}
    await EtcdStore.open(URL, EtcdAccess(authorities=folder / "house.pem", **own), None)


@rule(
    "A private key with a password is refused in one sentence; nobody is asked for it, and no handshake fails "
    "without a word",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.session.settings",
        'load_cert_chain(self.certificate, self.key, password="")',
        "load_cert_chain(self.certificate, self.key)",
    ),
)
@pytest.mark.parametrize("read", [of_a_worker_with_its_own, of_the_workers_port_with_its_own, of_etcd_with_its_own])
def test_a_key_with_a_password_is_one_sentence_and_nobody_is_asked_for_it(
    locked: Path, read: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"_KEY .*one\.key.* cannot be used together .*without a password$"):
        read(locked)
    assert capfd.readouterr() == ("", "")  # where there is no terminal, OpenSSL asks here
