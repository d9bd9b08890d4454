"""A place for checkpoints: what it does, and the sentence when it cannot."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, rule
from shoal.checkpoint.catalogue import checkpoints, look_into
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.retrying_storage import TRIES, Chunks, RetryingStorage
from shoal.checkpoint.storage import LocalStorage, ObjectStorage, Storage, Target, as_storage_error, open_storage
from shoal.core.checkpoint_errors import StorageFailed, StorageFull
from shoal.process.host_memory import host_memory
from shoal_protos.errors import UserError


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """The two kinds."""
    return LocalStorage(tmp_path / "a" / "b") if request.param == "folder" else open_storage(f"memory:/{tmp_path}")


def test_files_are_written_listed_read_and_removed(storage: Storage) -> None:
    storage.prepare()
    assert storage.list() == {}
    assert storage.write("one/data", [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]) == 7
    storage.publish("one/manifest", b"{}")
    storage.publish("beside", b"x")
    assert storage.list() == {"one": None, "beside": 1}
    assert storage.list("one") == {"data": 7, "manifest": 2}
    assert storage.read("one/data", 7) == b"abcdefg"
    storage.remove_folder("one")  # not empty: it stays
    for name in ("data", "manifest", "manifest"):
        storage.remove(f"one/{name}")
    storage.remove_folder("one")
    storage.remove_folder("one")
    assert "one" not in storage.list()
    with pytest.raises(FileNotFoundError):
        storage.read("one/data", 9)


def test_a_file_that_is_larger_than_it_can_be_is_not_read(storage: Storage) -> None:
    storage.publish("large", bytes(100))
    with pytest.raises(StorageFailed, match=r"^large in \S+ is larger than 99 bytes; it is not a file of Shoal\.$"):
        storage.read("large", 99)


@rule(
    "A file that is gone while its folder is listed, or a link to nothing, hides none of its neighbours",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.checkpoint.storage",
        "    except FileNotFoundError:\n        return None\n",
        "    finally:\n        pass\n",
    ),
)
def test_a_link_to_nothing_hides_no_checkpoint(tmp_path: Path) -> None:
    """Beside it a job would begin at step 0."""
    storage = LocalStorage(tmp_path)
    name, _ = save(trained(1), storage)
    (tmp_path / "latest").symlink_to("step-that-is-deleted")
    assert [one.name for one in checkpoints(storage, pytest.fail)] == [name]
    assert "latest" not in storage.list()


@rule(
    "What is not a plain file in the place of one is not read, and keeps no reader waiting",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.checkpoint.storage",
        "        if not stat.S_ISREG(os.fstat(descriptor).st_mode):\n",
        "        if False:\n",
    ),
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_not_a_plain_file_is_not_read_and_keeps_no_reader_waiting(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "one"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](place)
    sentence = r"^one in \S+ is not a plain file; it is not a file of Shoal\.$"
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageFailed, match=sentence):
        storage.read("one", 99)
    with pytest.raises(StorageFailed, match=sentence):
        storage.read_ranges("one", [(0, memoryview(bytearray(1)))])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Storage]:
    """The two kinds with a file each."""
    places: list[Storage] = [LocalStorage(tmp_path_factory.mktemp("ranges")), open_storage("memory://ranges")]
    for place in places:
        place.publish("f", CONTENT)
    return places


CONTENT = bytes(range(256)) * 3


@given(st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(1, 80))))
@settings(max_examples=examples(50), deadline=None)
def test_ranges_are_what_plain_slices_are(both: list[Storage], spans: list[tuple[int, int]]) -> None:
    spans = [(at, min(count, len(CONTENT) - at)) for at, count in spans]
    for place in both:
        targets: list[Target] = [(at, memoryview(bytearray(count))) for at, count in spans]
        place.read_ranges("f", targets)
        assert [bytes(target) for _, target in targets] == [CONTENT[at : at + count] for at, count in spans]


def test_a_range_beyond_the_end_is_told(storage: Storage) -> None:
    storage.publish("f", b"12345")
    with pytest.raises(EOFError):
        storage.read_ranges("f", [(3, memoryview(bytearray(3)))])


def test_many_ranges_that_follow_each_other_are_filled_in_few_calls(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    content = bytes(i % 251 for i in range(20_000))
    storage.publish("f", content)
    targets: list[Target] = [(at, memoryview(bytearray(10))) for at in range(0, 20_000, 10)]
    storage.read_ranges("f", targets[::-1])
    assert b"".join(bytes(target) for _, target in targets) == content


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("f", [memoryview(b"first")])
    with pytest.raises(StorageFailed, match=r"cannot write f in \S+: a file of that name is in the way"):
        storage.write("f", [memoryview(b"second")])
    assert storage.read("f", 10) == b"first"


def test_what_breaks_off_in_the_middle_of_a_file_leaves_none(storage: Storage) -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise StorageFailed("no more")

    with pytest.raises(StorageFailed, match=r"^no more$"):
        storage.write("f", chunks())
    assert storage.list() == {}


# ---- places that fail for a moment


class Flaky(LocalStorage):
    """Each operation fails for the first times that it is called, in the middle of what it does; `tells` says how."""

    def __init__(self, root: Path, failures: int, tells: Exception) -> None:
        super().__init__(root)
        self.failures, self.tells, self.calls = failures, tells, Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def tried(*given: Any) -> Any:
            self.calls[name] += 1
            if self.calls[name] <= self.failures:
                if name == "write":
                    next(iter(given[1]))
                with as_storage_error(name, self.url):
                    raise self.tells
            return found(*given)

        return tried


OPERATIONS = ("prepare", "write", "publish", "read", "read_ranges", "list", "remove", "remove_folder")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pauses between tries."""
    monkeypatch.setattr("shoal.checkpoint.retrying_storage.FIRST_PAUSE_SECONDS", 0.0)


@rule(
    "Each operation on a place for checkpoints that fails for a reason that may pass is tried again by itself",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.checkpoint.retrying_storage", "range(1, TRIES)", "range(1, 1)"),
)
@pytest.mark.parametrize("tells", [OSError(errno.EIO, "input/output error"), OSError("slow down"), RuntimeError("503")])
@pytest.mark.usefixtures("hasty")
def test_each_operation_is_tried_again_by_itself(tmp_path: Path, tells: Exception) -> None:
    flaky = Flaky(tmp_path, TRIES - 1, tells)
    storage = RetryingStorage(flaky)
    storage.prepare()
    content = Chunks(lambda: iter([memoryview(b"abc"), memoryview(b"de")]))
    assert storage.write("one/data", content) == 5
    storage.publish("one/manifest", b"{}")
    assert storage.list("one") == {"data": 5, "manifest": 2}
    into = memoryview(bytearray(2))
    storage.read_ranges("one/data", [(3, into)])
    assert (bytes(into), storage.read("one/data", 9)) == (b"de", b"abcde")
    for name in ("data", "manifest"):
        storage.remove(f"one/{name}")
    storage.remove_folder("one")
    assert storage.list() == {} and flaky.calls.keys() == set(OPERATIONS)


@pytest.mark.parametrize("operation", ["prepare", "list"])
@pytest.mark.usefixtures("hasty")
def test_a_place_that_stays_away_is_told_after_the_last_try(tmp_path: Path, operation: str) -> None:
    flaky = Flaky(tmp_path, 1 << 30, OSError(errno.EIO, "input/output error"))
    with pytest.raises(StorageFailed, match="input/output error"):
        getattr(RetryingStorage(flaky), operation)()
    assert flaky.calls[operation] == TRIES


@pytest.mark.usefixtures("hasty")
def test_a_place_that_takes_a_minute_to_fail_is_not_waited_for_two_dozen_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky = Flaky(tmp_path, 1 << 30, TimeoutError("timed out"))
    clock = SimpleNamespace(monotonic=lambda: 60.0 * flaky.calls["list"])
    monkeypatch.setattr("shoal.checkpoint.retrying_storage.time", clock)
    with pytest.raises(StorageFailed, match="timed out"):
        RetryingStorage(flaky).list()
    assert flaky.calls["list"] == 2


@pytest.mark.usefixtures("hasty")
def test_tries_to_publish_a_file_leave_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(path: Path, _: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageFailed):
        RetryingStorage(LocalStorage(tmp_path)).publish("manifest", b"{}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.ENOTDIR, errno.EROFS])
@pytest.mark.usefixtures("hasty")
def test_what_will_not_pass_is_not_tried_again(tmp_path: Path, number: int) -> None:
    flaky = Flaky(tmp_path, 1 << 30, OSError(number, os.strerror(number)))
    with pytest.raises(StorageFailed):
        RetryingStorage(flaky).list()
    assert flaky.calls["list"] == 1


@pytest.mark.usefixtures("hasty")
def test_content_that_cannot_be_gone_through_again_is_written_once(tmp_path: Path) -> None:
    flaky = Flaky(tmp_path, 1, OSError(errno.EIO, "input/output error"))
    with pytest.raises(StorageFailed):
        RetryingStorage(flaky).write("f", iter([memoryview(b"abc")]))
    assert flaky.calls["write"] == 1


@pytest.mark.usefixtures("hasty")
def test_a_save_succeeds_though_each_operation_on_its_place_fails_at_first(tmp_path: Path) -> None:
    storage = RetryingStorage(Flaky(tmp_path, TRIES - 1, TimeoutError("timed out")))
    name, _ = save(trained(1), storage)
    assert [one.name for one in checkpoints(LocalStorage(tmp_path), pytest.fail)] == [name]
    verify(look_into(storage, name).reader())


def test_a_driver_that_tries_again_by_itself_is_not_wrapped(tmp_path: Path) -> None:
    assert isinstance(open_storage(str(tmp_path)), RetryingStorage)
    assert isinstance(open_storage("memory://x"), RetryingStorage)
    assert isinstance(open_storage("s3://bucket/x"), ObjectStorage)


# ---- places that cannot be used


def test_a_path_below_a_file_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        with pytest.raises(StorageFailed, match=r"^cannot keep checkpoints in \S+: a file of that name is in the way;"):
            LocalStorage(tmp_path / place).prepare()


def test_a_place_where_no_folder_can_be_made_gets_a_sentence() -> None:
    with pytest.raises(StorageFailed, match=r"^cannot keep checkpoints in /proc/shoal/x: no folder can be made there"):
        LocalStorage(Path("/proc/shoal/x")).prepare()


def test_a_place_without_permission_gets_a_sentence() -> None:
    with pytest.raises(StorageFailed, match=r"^cannot keep checkpoints in /sys/shoal: .* the right to write there, or"):
        LocalStorage(Path("/sys/shoal")).prepare()


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 100 kB, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_beyond_the_limit_gets_a_sentence_and_no_rest_is_left_on_it(tmp_path: Path, small_disk: None) -> None:
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageFailed, match=r"^cannot write \S+ in \S+: file too large; raise the limit of file sizes"):
        save(trained(1), storage)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    assert list(checkpoints(storage, print)) == []


def test_a_disk_without_room_is_told_from_other_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", no_room)
    with pytest.raises(
        StorageFull, match=r"^cannot write f in \S+: no space left on device; free some space, "
    ) as full:
        LocalStorage(tmp_path).write("f", [memoryview(b"content")])
    remedy = "lower `shoal.checkpoint.keep` (there must be room for one more), or choose another place."
    assert str(full.value).endswith(f"; free some space, {remedy}")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nowhere://x", "nowhere://x is not a path or URL for checkpoints: Protocol not known: nowhere."),
        ("abfs://x/y", "abfs:// needs a library that is not installed: install its fsspec driver ("),
    ],
)
def test_a_url_that_nothing_knows_gets_a_sentence(url: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        open_storage(url)
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize("refuses", ["nothing", "the flag", "the write"])
def test_a_file_is_the_same_whether_or_not_pages_go_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    pages = memoryview(host_memory(4 << 20, torch.uint8).random_(0, 256).numpy().data)
    chunks = [pages[: 1 << 20], pages[1 << 20 : 3 << 20], pages[:5], pages[3 << 20 :], pages[: 1 << 20]]
    direct: list[bool] = []
    write, control = os.write, fcntl.fcntl

    def seen(file: int, content: memoryview) -> int:
        direct.append(bool(control(file, fcntl.F_GETFL) & os.O_DIRECT))
        if refuses == "the write" and direct[-1]:
            raise OSError(errno.EINVAL, "not here")
        return write(file, content)

    def flags(file: int, command: int, value: int = 0) -> int:
        if refuses == "the flag" and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return int(control(file, command, value))

    monkeypatch.setattr(os, "write", seen)
    monkeypatch.setattr(fcntl, "fcntl", flags)
    storage = LocalStorage(tmp_path)
    assert storage.write("one", chunks) == sum(chunk.nbytes for chunk in chunks)
    assert (tmp_path / "one").read_bytes() == b"".join(chunks)
    expected = {
        "nothing": [True, True, False, False, False],
        "the flag": [False] * 5,
        "the write": [True, False, False, False, False, False],
    }
    assert direct == expected[refuses]
