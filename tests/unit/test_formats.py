"""The formats that other processes and later releases read: each is as it is listed, and a release's keeps its number.

`tests/formats.py` makes the listings; CONTRIBUTING.md, "Numbers of formats", has the rule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import formats
import pytest
from formats import Format, Released, fault

WIRE = Format("session", "the wire", 2, "NUMBER in wire.py", ("Hello:", "  1 version: int"))
CHANGED = replace(WIRE, lines=("Hello:", "  1 version: str"))
HAD = [Released("0.1.0", "store", 7, "x"), Released("0.1.0", "session", 2, WIRE.digest)]


def test_every_format_is_as_it_is_listed_and_differs_from_a_released_one_in_its_number() -> None:
    found, released = formats.formats(), formats.read_released()
    listed = {one.name: one.file.read_text() if one.file.exists() else "" for one in found}
    faults = [fault(one, listed[one.name], released) for one in found]
    assert not any(faults), "\n".join(filter(None, faults))
    assert {path.stem for path in formats.FOLDER.glob("*.txt")} == {*listed, "released"}
    assert {one.name for one in released} <= listed.keys()


def test_a_format_that_no_release_has_may_change_and_is_listed_anew() -> None:
    assert fault(WIRE, WIRE.listing, HAD[:1]) == ""
    assert fault(CHANGED, WIRE.listing, HAD[:1]) == (
        "the wire is not as session.txt lists it (first: -   1 version: int; +   1 version: str), and no release has "
        "its number, 2: run `make formats`, and look at what has changed."
    )
    assert fault(CHANGED, CHANGED.listing, HAD[:1]) == ""


@pytest.mark.parametrize("number", [2, 1])
def test_a_format_that_a_release_has_is_changed_with_its_number_once_until_the_next_release(number: int) -> None:
    assert fault(WIRE, WIRE.listing, HAD) == ""
    changed = replace(CHANGED, number=number)
    assert fault(changed, changed.listing, HAD) == (
        "the wire differs from that of release 0.1.0, which has number 2: raise NUMBER in wire.py to 3, then run "
        "`make formats`."
    )
    raised = replace(CHANGED, number=3)
    assert fault(raised, raised.listing, HAD) == ""
    again = replace(raised, lines=("Hello:",))
    assert fault(again, again.listing, HAD) == ""


def test_a_release_is_noted_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FOLDER", tmp_path)
    monkeypatch.setattr(formats, "RELEASED", tmp_path / "released.txt")
    monkeypatch.setattr(formats, "formats", lambda: [WIRE])
    formats.RELEASED.write_text("# release format number digest\n")
    assert formats.main([]) == 0 and formats.read_released() == []
    assert WIRE.file.read_text() == WIRE.listing
    assert formats.main(["--release", "0.1.0"]) == 0
    assert formats.read_released() == [Released("0.1.0", "session", 2, WIRE.digest)]
    assert formats.main(["--published"]) == 2
