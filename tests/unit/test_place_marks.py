"""Marks in a place for checkpoints: workers that share it see one in common, whatever the order in which they come."""

from __future__ import annotations

import errno
import os
import threading
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from rule import Edit, rule
from shoal.checkpoint import place_marks
from shoal.checkpoint.place_marks import MARK, host_of, leave_mark, marks_in
from shoal.checkpoint.storage import LocalStorage, as_storage_error
from shoal.core.checkpoint_errors import StorageFailed

OPERATIONS = ("list", "publish", "list")
"""What a worker does in an empty place."""


class Turns(LocalStorage):
    """A place in which workers, each a thread, take turns in a given order, operation by operation."""

    def __init__(self, root: Path, order: list[str]) -> None:
        super().__init__(root)
        self.order, self.changed = order, threading.Condition()

    def _turn(self) -> None:
        name = threading.current_thread().name
        with self.changed:
            self.changed.wait_for(lambda: name not in self.order or self.order[0] == name)
            if name in self.order:
                self.order.pop(0)
            self.changed.notify_all()

    def list(self, folder: str = "") -> dict[str, int | None]:
        self._turn()
        return super().list(folder)

    def publish(self, name: str, content: bytes) -> None:
        self._turn()
        super().publish(name, content)


@rule(
    "Of the marks that two workers see in one place for checkpoints at least one is the same, in whatever order they "
    "come",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.checkpoint.place_marks",
        "        return ()  # it says so with every save\n    return marks_in(storage)\n",
        "        return ()  # it says so with every save\n    return (mark,)\n",
    ),
)
@pytest.mark.parametrize("order", sorted(set(permutations("aaabbb"))), ids="".join)
def test_two_workers_see_a_common_mark_in_whatever_order_they_come(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, seen = Turns(tmp_path, list(order)), dict[str, tuple[str, ...]]()
    monkeypatch.setattr(place_marks, "open_storage", lambda _: storage)

    def come(name: str) -> None:
        seen[name] = leave_mark("place")
        with storage.changed:
            storage.order = [one for one in storage.order if one != name]
            storage.changed.notify_all()

    threads = [threading.Thread(target=come, args=(name,), name=name) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen["a"]) & set(seen["b"])


def test_a_mark_is_left_only_where_there_is_none_and_names_its_host(tmp_path: Path) -> None:
    (mark,) = leave_mark(str(tmp_path))
    assert leave_mark(str(tmp_path)) == (mark,) == marks_in(LocalStorage(tmp_path))
    assert MARK.fullmatch(mark) and host_of(mark) in mark and host_of("mark") == "another host"
    assert leave_mark(str(tmp_path / "other")) != (mark,)


class Broken(LocalStorage):
    """A place of which one operation fails."""

    def __init__(self, root: Path, operation: str, number: int) -> None:
        super().__init__(root)
        self.operation, self.error = operation, OSError(number, os.strerror(number))

    def __getattribute__(self, name: str) -> Any:
        if name in ("list", "publish") and name == self.operation:
            with as_storage_error(name, self.url):
                raise self.error
        return super().__getattribute__(name)


@pytest.mark.parametrize(("operation", "number"), [("list", errno.EACCES), ("publish", errno.EROFS)])
def test_a_place_that_cannot_be_listed_or_written_gets_one_sentence(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_marks, "open_storage", lambda _: Broken(tmp_path, operation, number))
    with pytest.raises(StorageFailed) as seen:
        leave_mark("place")
    assert f"in {tmp_path}: {os.strerror(number).lower()}; give this user the right to write there" in str(seen.value)


def test_a_full_place_is_not_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_marks, "open_storage", lambda _: Broken(tmp_path, "publish", errno.ENOSPC))
    assert leave_mark("place") == ()
