"""The manifest: what is written can be read, and whatever else lies in its place gets one sentence.

Wrong ones are files in tests/attacks/checkpoint: changes to a right one (`key key = JSON`, one a line; `text = …` for
the whole file), a line `---`, the sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkpoints import save, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, rule
from shoal.checkpoint.manifest import OLDEST_VERSION, VERSION, FileEntry, Manifest, parse, parse_part, sealed
from shoal.checkpoint.storage import open_storage
from shoal.core.checkpoint_errors import CheckpointDamaged
from shoal.core.layout import MOST_BLOCKS
from shoal.core.layout import VERSION as LAYOUT_VERSION
from shoal.core.plain import decode, encode
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

ATTACKS = sorted((Path(__file__).parents[1] / "attacks" / "checkpoint").glob("*.txt"))


@pytest.fixture(scope="module")
def right() -> Manifest:
    """A manifest of two files, three buckets."""
    return save(trained(1), open_storage("memory://manifest"))[1]


def changed(manifest: Manifest, text: str) -> bytes:
    """The manifest with an attack's changes."""
    content: Any = json.loads(manifest.to_bytes())
    for line in filter(None, text.splitlines()):
        place, _, value = line.partition(" = ")
        if place == "text":
            return value.encode().decode("unicode_escape").encode("latin-1")
        *path, last = place.split()
        at = content
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        if value == "gone":
            del at[int(last) if isinstance(at, list) else last]
        else:
            at[int(last) if isinstance(at, list) else last] = json.loads(value)
    if isinstance(content, dict):
        content["checksum"] = content.pop("checksum")  # it stands last
    return sealed(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.stem)
def test_a_wrong_manifest_gets_its_sentence(attack: Path, right: Manifest) -> None:
    text, _, expected = attack.read_text().rpartition("---\n")
    with pytest.raises(CheckpointDamaged) as refusal:
        parse(changed(right, text), "manifest.json")
    read = {"SHOAL": of_shoal(RELEASE), "READ": f"{OLDEST_VERSION} to {VERSION}", "LAYOUT": str(LAYOUT_VERSION)}
    for name, value in read.items():
        expected = expected.replace(name, value)
    assert str(refusal.value) == expected.rstrip("\n")


def test_a_manifest_of_the_oldest_version_is_read_without_what_has_come_since(
    right: Manifest,
) -> None:
    older = changed(right, f"version = {OLDEST_VERSION}\nrelease = gone")
    read = parse(older, "manifest.json")
    assert (read.version, read.release) == (OLDEST_VERSION, "")
    assert read.model_copy(update={"version": VERSION, "release": RELEASE, "checksum": right.checksum}) == right


@rule(
    "A manifest with more pieces than a model has blocks is refused before they are looked at",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.checkpoint.manifest", "    if pieces > MOST_BLOCKS:", "    if False:"),
)
@pytest.mark.parametrize("colon", [b":", b" : ", b"\n:"])
@pytest.mark.parametrize("part", [False, True], ids=["manifest", "part"])
def test_more_pieces_than_a_model_has_blocks_are_refused_before_any_of_them_is_looked_at(
    right: Manifest, part: bool, colon: bytes
) -> None:
    """One look takes as long as 60 µs: of 200,000, more than ten seconds."""
    piece = right.files[0].pieces[0].model_dump_json().encode()
    whole = right.files[0].model_dump_json().encode() if part else right.to_bytes()
    content = whole.replace(piece, b",".join([piece.replace(b":", colon)] * (MOST_BLOCKS + 1)), 1)
    with (
        patch.object(FileEntry if part else Manifest, "model_validate_json", side_effect=AssertionError("looked at")),
        pytest.raises(
            CheckpointDamaged, match=r"^it is damaged: it has 655\d\d pieces; no model has more than 65536 blocks"
        ),
    ):
        parse_part(content, "it") if part else parse(sealed(content), "it")


def test_a_text_that_looks_like_a_piece_is_none(right: Manifest) -> None:
    texts = {"name": '"checksums": ' * (MOST_BLOCKS + 1)}
    assert parse(right.model_copy(update={"config": texts}).to_bytes(), "it").config == texts


def test_what_is_written_is_read(right: Manifest) -> None:
    assert parse(right.to_bytes(), "it").model_copy(update={"checksum": right.checksum}) == right
    parse(changed(right, ""), "it")  # what an attack changes is right before


def test_a_changed_number_that_nothing_else_says_is_seen_by_the_checksum(right: Manifest) -> None:
    content = right.to_bytes().replace(b'"lr":0.01', b'"lr":0.02', 1)
    with pytest.raises(CheckpointDamaged, match=r"^it is damaged: its checksum differs, so it was changed"):
        parse(content, "it")


@given(st.data())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_changed_byte_is_seen_and_told_in_one_sentence(right: Manifest, data: st.DataObject) -> None:
    content = bytearray(right.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    if content[:cut] != right.to_bytes():
        with pytest.raises(CheckpointDamaged, match=r"^it ") as refusal:
            parse(bytes(content[:cut]), "it")
        assert len(str(refusal.value)) < 400


@given(st.recursive(st.floats() | st.integers() | st.text(), lambda v: st.lists(v) | st.tuples(v, v), max_leaves=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_and_texts_survive_the_manifests_json(right: Manifest, value: Any) -> None:
    written = right.model_copy(update={"scheduler": encode(value, {}, "it")})
    assert repr(decode(parse(written.to_bytes(), "it").scheduler, {})) == repr(value)
