"""Backups of a store: what is in them, that they are whole, and what a restore refuses."""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
from pathlib import Path

import pytest
from asynchronous import asynchronous
from etcd_cluster import Cluster, etcd_cluster
from shoal_controller.cli.backups import backup as backup_command
from shoal_controller.cli.backups import restore as restore_command
from shoal_controller.jobs import backups
from shoal_controller.jobs.backups import (
    RESTORING,
    Backup,
    backup_of,
    read_backup,
    restore,
    write_backup,
    write_into_folder,
)
from shoal_controller.store.etcd_store import EtcdAccess
from shoal_controller.store.open import all_entries, open_store
from shoal_controller.store.store import Delete, Put, Store
from shoal_protos.errors import StoreError, UserError
from tiers import check

pytestmark = [pytest.mark.xdist_group("stores"), check("starts a server of etcd")]

KEYS = {
    **{f"/records/train/workers/w{number}/1/0": bytes([number]) * 20_000 for number in range(150)},
    "/cluster": b"id", "/events/train/0000000000000001": b"{}", "/jobs/train": b"head", "/tokens/ann": b"hash",
    "/forwarding": b"secret", "/ready": b"1", "/controllers/term": b"mine",
}  # fmt: skip
LOST = ("/forwarding", "/ready", "/controllers/term")
ACCESS = EtcdAccess()


@pytest.fixture(name="etcd", scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


async def filled(url: str) -> Store:
    store = await open_store(url)
    for key, value in KEYS.items():
        await store.transact([], [Put(key, value)])
    return store


async def backed_up(file: Path, url: str, tokens: bool = False) -> Backup:
    write_backup(backup_of(await all_entries(url, ACCESS), tokens, 1000.0), file)
    return read_backup(file)


@pytest.mark.parametrize(("source", "goal"), [("embedded", "embedded"), ("etcd", "embedded"), ("embedded", "etcd")])
@asynchronous
async def test_what_is_backed_up_beside_a_controller_is_in_an_empty_store_of_either_kind_afterwards(
    tmp_path: Path, etcd: Cluster, source: str, goal: str
) -> None:
    prefixes = {name: f"etcd://{','.join(etcd.addresses)}/{tmp_path.name}-{name}" for name in ("from", "to")}
    begin = prefixes["from"] if source == "etcd" else f"embedded:{tmp_path / 'from'}"
    end = prefixes["to"] if goal == "etcd" else f"embedded:{tmp_path / 'to'}"
    store = await filled(begin)
    try:
        async with store.lease(10.0) as lease:
            await store.transact([], [Put("/controllers/leader", b"me", lease.id)])
            found = await backed_up(tmp_path / "file", begin)
            whole = await backed_up(tmp_path / "whole", begin, tokens=True)
    finally:
        await store.close()
    assert (found.kept.jobs, found.kept.tokens, whole.kept.tokens) == (1, 0, 1)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    empty = await open_store(end)
    try:
        await restore(empty, whole)
        entries = {one.key: one.value for one in (await empty.list("/")).entries}
        assert entries == {key: value for key, value in KEYS.items() if key not in LOST}
        with pytest.raises(
            UserError, match="the store is in use: it has keys such as /cluster; end its controllers, and"
        ):
            await restore(empty, whole)
    finally:
        await empty.close()


@asynchronous
async def test_an_interrupted_restore_goes_on_and_only_by_its_own_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(f"embedded:{tmp_path / 'from'}")
    await store.close()
    found = await backed_up(tmp_path / "file", f"embedded:{tmp_path / 'from'}")
    empty = await open_store(f"embedded:{tmp_path / 'to'}")
    whole = list(backups._transactions(found.keys))
    assert len(whole) > 2
    monkeypatch.setattr(backups, "_transactions", lambda _: iter(whole[:-1]))
    transact = empty.transact

    async def cut(compares, operations):
        if operations[0].key == RESTORING and not isinstance(operations[0], Put):
            raise StoreError("away")
        return await transact(compares, operations)

    monkeypatch.setattr(empty, "transact", cut)
    with pytest.raises(StoreError, match="away"):
        await restore(empty, found)
    monkeypatch.undo()
    keys = {one.key for one in (await empty.list("/")).entries}
    assert "/jobs/train" not in keys and RESTORING in keys
    other = Backup({**found.head, "time": 2000.0}, found.keys)
    with pytest.raises(UserError, match="another backup is being restored into this store"):
        await restore(empty, other)
    await restore(empty, found)
    keys = {one.key for one in (await empty.list("/")).entries}
    assert keys == {key for key in KEYS if key not in (*LOST, "/tokens/ann")}
    await empty.close()


@asynchronous
async def test_a_store_that_an_interrupted_restore_has_left_is_backed_up_and_overwritten_by_nobody(
    tmp_path: Path,
) -> None:
    url, used = f"embedded:{tmp_path / 'to'}", Put("/jobs/train", b"later")
    store, found = await open_store(url), Backup(HEAD, (("/events/train/1", b"{}"), ("/jobs/train", b"head")))
    await store.transact([], [Put(RESTORING, backups._mark(found)), Put("/jobs/train", b"head")])
    with pytest.raises(UserError, match="a restore into this store is under way, or was interrupted: repeat it, or"):
        await backup_command(tmp_path / "file", url)
    for written, undone in ((used, Put("/jobs/train", b"head")), (Put("/controllers/term", b"9"), None)):
        await store.transact([], [written])
        with pytest.raises(UserError, match=f"the store is in use: it has keys such as {written.key}; end its"):
            await restore(store, found)
        assert (await store.get(written.key)).value == written.value
        await store.transact([], [undone or Delete(written.key)])
    await restore(store, found)
    assert {one.key: one.value for one in (await store.list("/")).entries} == dict(found.keys)
    await store.close()


def written(file: Path, *lines: object) -> Path:
    file.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    return file


HEAD = {"shoal_backup": 1, "release": "9.9.9", "records": 6, "time": 1.0, "tokens": False}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [{**HEAD, "shoal_backup": 2}, {"keys": 0}],
            "was written by shoal 9.9.9 as a backup of version 2; this is shoal",
        ),
        (
            [{**HEAD, "records": 7}, {"keys": 0}],
            "with records of format 7; this is shoal .*, which reads 5 to 6. Restore",
        ),
        ([{**HEAD, "records": "6"}, {"keys": 0}], "with records of format 6; this is"),
        ([HEAD, {"key": "/a", "value": "AA=="}, {"keys": 2}], "is damaged .lines are missing.; restore another one"),
        ([HEAD], "is damaged"),
        (
            [{**HEAD, "time": 1e300}, {"keys": 0}],
            "is damaged .`time` is .*, not seconds since the epoch.; restore another one",
        ),
        ([{**HEAD, "time": math.nan}, {"keys": 0}], "is damaged .`time` is .*, not seconds since the epoch."),
        ([{**HEAD, "time": 10**400}, {"keys": 0}], "is damaged .`time` is .*, not seconds since the epoch."),
        ([HEAD, {"key": "/a", "value": "?"}, {"keys": 1}], "is damaged"),
        ([{"other": 1}], "is no backup of Shoal; expected a file of `shoal backup`"),
        ([], "is no backup of Shoal"),
    ],
)
def test_a_file_that_is_no_whole_backup_of_this_version_is_refused(tmp_path: Path, lines: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_backup(written(tmp_path / "file", *lines))


def test_a_file_that_was_cut_or_is_another_or_is_not_there_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "file", HEAD, {"keys": 0}).read_bytes()
    deep = gzip.compress(b"[" * 200_000)
    for content, words in (
        (deep, "its JSON is nested too deeply"),
        (whole[:-4], "is damaged"),
        (b"text", "is no backup"),
        (b"", "is no backup"),
    ):
        (tmp_path / "cut").write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_backup(tmp_path / "cut")
    for path, words in ((tmp_path / "none", "cannot be read: No such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=words):
            read_backup(path)


@asynchronous
async def test_the_command_names_its_files_in_a_folder_and_keeps_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder = f"embedded:{tmp_path / 'from'}", tmp_path / "backups"
    store = await filled(url)
    folder.mkdir()
    for day in ("20200101", "20200102"):
        (folder / f"shoal-{day}T000000Z.gz").touch()
    (folder / "mine.gz").touch()
    await backup_command(folder, url, tokens=True, keep=2)
    names = sorted(one.name for one in folder.iterdir())
    assert names[:2] == ["mine.gz", "shoal-20200102T000000Z.gz"] and len(names) == 3
    assert "has 1 job and 1 named token" in capsys.readouterr().out
    await store.close()
    await restore_command(folder / names[2], f"embedded:{tmp_path / 'to'}")
    assert "restored 1 job and 1 named token, as of 20" in capsys.readouterr().out
    with pytest.raises(UserError, match="--keep counts the backups of a folder"):
        await backup_command(tmp_path / "file", url, keep=2)
    with pytest.raises(UserError, match="is there already; name another file, or remove it"):
        await backup_command(folder / "mine.gz", url)
    with pytest.raises(UserError, match=r"there is no store at .*nowhere: it has no store.db"):
        await backup_command(tmp_path / "file", f"embedded:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match=r"the backup cannot be written to .*: No such file"):
        await backup_command(tmp_path / "no" / "file", url)


def test_a_folder_loses_its_oldest_backups_and_old_drafts_but_no_file_of_another_name(tmp_path: Path) -> None:
    now, kept = Backup({**HEAD, "time": 946684800.0}, ()), ["shoal-before-upgrade.gz", "shoal-20980101T000000Z.gz"]
    old, fresh = (tmp_path / f".shoal-20000101T000000Z.gz.{number}.new" for number in (1, 2))
    for file in (*(tmp_path / name for name in kept), old, fresh, tmp_path / "shoal-19990101T000000Z.gz"):
        file.touch()
    os.utime(old, (0, 0))
    written = write_into_folder(now, tmp_path, 2)
    assert written.name == "shoal-20000101T000000Z.gz" and read_backup(written) == now
    assert {one.name for one in tmp_path.iterdir()} == {*kept, written.name, fresh.name}
    (tmp_path / "shoal-20000101T000000Z.gz").unlink()
    write_into_folder(now, tmp_path, 1)
    assert {one.name for one in tmp_path.iterdir()} == {kept[0], written.name, fresh.name}


@asynchronous
async def test_a_restore_beside_a_controller_is_refused_by_whom_it_is(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path / 'from'}"
    store = await filled(url)
    await backup_command(tmp_path / "file", url)
    with pytest.raises(StoreError, match="controller"):
        await restore_command(tmp_path / "file", url)
    await store.close()
