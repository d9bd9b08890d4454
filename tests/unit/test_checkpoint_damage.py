"""Whatever happens to the files of a checkpoint: it is seen, named, and the one before is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import fresh, origin, save, train, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import Found, Own, SaveName, look_into, resolve
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.manifest import MANIFEST, OLDEST_VERSION, VERSION, Manifest, sealed
from shoal.checkpoint.restore import has_scheduler_of, load_blocks, load_small_state
from shoal.checkpoint.snapshot import Arena, take_snapshot
from shoal.checkpoint.storage import LocalStorage
from shoal.checkpoint.writer import Author, commit, draft_of, part_of, write_content
from shoal.core.checkpoint_errors import CheckpointDamaged, NoneReadable
from shoal.core.manifest_parts import gone_on
from shoal.state.given_values import GivenHyperParameters
from shoal_protos.errors import NotFound, UserError
from shoal_protos.release import RELEASE
from shoal_protos.runs import Runs, every
from shoal_protos.text import of_shoal


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A checkpoint; a test that changes it puts it back."""
    storage = LocalStorage(tmp_path_factory.mktemp("one"))
    name, _ = save(trained(1), storage)
    return look_into(storage, name)


def files_of(found: Found) -> list[Path]:
    return sorted(file for file in Path(found.storage.url).rglob("*") if file.is_file())


def test_a_whole_one_is_whole(one: Found) -> None:
    assert len(files_of(one)) == 4  # two writers' files, the manifest, the frozen parameters
    assert verify(one.reader()).bytes_read > sum(file.stat().st_size for file in files_of(one)[1:3]) // 2


@given(st.data())
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bit_that_flips_anywhere_is_seen(one: Found, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files_of(one)))
    right = file.read_bytes()
    changed = bytearray(right)
    changed[data.draw(st.integers(0, len(right) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(changed)
    try:
        with pytest.raises(CheckpointDamaged) as seen:
            verify(look_into(one.storage, one.name).reader())
        assert one.storage.url in str(seen.value)
    finally:
        file.write_bytes(right)


@given(st.data())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_is_cut_short_or_gone_is_seen_before_any_is_read(one: Found, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files_of(one)))
    right = file.read_bytes()
    left = data.draw(st.integers(-1, len(right) - 1))
    if left < 0:
        file.unlink()
    else:
        file.write_bytes(right[:left])
    try:
        with pytest.raises(CheckpointDamaged, match=r"is incomplete|is damaged|is not the manifest"):
            look_into(one.storage, one.name)
    finally:
        file.write_bytes(right)


def test_a_block_with_a_changed_bit_is_named_when_it_is_read(one: Found) -> None:
    piece = one.manifest.files[1].pieces[0]
    number = one.manifest.blocks.numbers_of(piece.stretch)[1]
    file = Path(one.path) / one.manifest.files[1].name
    right = file.read_bytes()
    changed = bytearray(right)
    changed[piece.state["exp_avg"].at + 4096 * 4 + 5] ^= 1
    file.write_bytes(changed)
    try:
        with pytest.raises(
            CheckpointDamaged, match=rf"is damaged: the checksum of state exp_avg of block {number} in \S+ differs"
        ):
            load_blocks(one.reader(), fresh(), every(12))
        load_blocks(one.reader(), fresh(), every(12) - Runs(((number, number + 1),)))
    finally:
        file.write_bytes(right)


def test_a_number_that_all_blocks_of_a_piece_share_is_verified_in_every_piece(one: Found) -> None:
    for file in one.manifest.files:
        path = Path(one.path) / file.name
        right = path.read_bytes()
        for piece in file.pieces:
            changed = bytearray(right)
            changed[piece.state["step"].at] ^= 1
            path.write_bytes(changed)
            with pytest.raises(CheckpointDamaged, match=r"the checksum of state step of block \d+ in \S+ differs"):
                verify(one.reader())
        path.write_bytes(right)


@pytest.fixture
def two(tmp_path: Path) -> tuple[LocalStorage, list[SaveName]]:
    """Checkpoints of steps 2 and 4, oldest first."""
    storage, state = LocalStorage(tmp_path / "c"), trained(2)
    first, _ = save(state, storage)
    second, _ = save(train(state, 2), storage)
    return storage, [first, second]


def latest(storage: LocalStorage, generations: set[int] | None = None) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    found = resolve(storage.url, "latest", lines.append, Own("", generations) if generations is not None else None)
    return (found.manifest.step if found else None), lines


Two = tuple[LocalStorage, list[SaveName]]


def test_the_latest_is_the_newest(two: Two) -> None:
    assert latest(two[0]) == (4, [])


@holds("A save that was given")
def test_what_was_given_up_is_never_the_latest_though_what_came_after_cannot_be_read(tmp_path: Path) -> None:
    storage, state = LocalStorage(tmp_path / "c"), trained(2)
    save(state, storage)
    save(train(state, 2), storage)  # step 4, then all go back to step 2 and save step 3
    state = train(trained(2), 1)
    state.lineage = gone_on("", 1, 2, (), began=2)
    newest, _ = save(state, storage, generation=2)
    lines: list[str] = []
    found = resolve(storage.url, "latest", lines.append, unreadable=[f"{storage.url}/{newest.folder}"])
    assert found is not None and found.manifest.step == 2
    assert [sentence.partition(" was ")[2] for sentence in lines] == [
        "given up: training went back to an earlier step and continued without it."
    ]


def test_one_without_a_manifest_is_skipped_for_the_one_before(two: Two) -> None:
    storage, (_, newest) = two
    (Path(storage.url) / newest.folder / MANIFEST).unlink()
    where = f"{storage.url}/{newest.folder}"
    sentence = f"{where} is incomplete: it has no manifest.json. Its save is still running, or was interrupted."
    assert latest(storage) == (2, [sentence])


def test_one_with_a_file_missing_is_skipped_for_the_one_before(two: Two) -> None:
    storage, (_, newest) = two
    file = next((Path(storage.url) / newest.folder).glob("*-w1-*"))
    size = file.stat().st_size
    file.unlink()
    where = f"{storage.url}/{newest.folder}"
    assert latest(storage) == (2, [f"{where} is damaged: {file.name} is not there; it was written with {size}."])


def test_one_of_a_newer_version_is_skipped_for_the_one_before(two: Two) -> None:
    storage, (_, newest) = two
    manifest = Path(storage.url) / newest.folder / MANIFEST
    written, later = f'"version":{VERSION}'.encode(), f'"version":{VERSION + 4}'.encode()
    manifest.write_bytes(manifest.read_bytes().replace(written, later, 1))
    step, (sentence,) = latest(storage)
    assert step == 2
    both = f"has format version {VERSION + 4}, written by {of_shoal(RELEASE)}; this is {of_shoal(RELEASE)}, which reads"
    assert f"manifest.json {both} {OLDEST_VERSION} to {VERSION}. Use the release that wrote it, or " in sentence


def test_one_under_another_steps_name_is_skipped(two: Two) -> None:
    storage, (first, newest) = two
    folder = Path(storage.url) / newest.folder
    (folder / MANIFEST).write_bytes((Path(storage.url) / first.folder / MANIFEST).read_bytes())
    for file in (Path(storage.url) / first.folder).glob("*.safetensors"):
        shutil.copy(file, folder)
    assert latest(storage)[0] == 2


def test_one_of_a_generation_that_the_job_did_not_have_is_skipped(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(trained(2), storage, generation=3)
    theirs, _ = save(trained(1), storage, generation=9)
    lines = [f"{storage.url}/{theirs.folder} is of generation 9, which this job did not have."]
    assert latest(storage, {1, 2, 3}) == (2, lines)
    assert latest(storage) == (1, [])  # without a set the newest generation is the newest


def test_a_step_is_found_and_one_that_is_not_there_gets_a_sentence(two: Two) -> None:
    storage, _ = two
    found = resolve(storage.url, 2, print)
    assert found and found.manifest.step == 2
    with pytest.raises(NotFound, match=r"has no complete checkpoint of step 3; there are \[2, 4\]\.$"):
        resolve(storage.url, 3, print)
    with pytest.raises(NotFound, match=r"^resume is step 3, and no `shoal.checkpoint.path` says where"):
        resolve(None, 3, print)


def test_a_path_is_one_checkpoint_or_a_folder_of_them(two: Two) -> None:
    storage, (first, _) = two
    one, newest = resolve(None, f"{storage.url}/{first.folder}/", print), resolve("unused", storage.url, print)
    assert one and one.manifest.step == 2 and newest and newest.manifest.step == 4
    with pytest.raises(NotFound, match=r"^there is no checkpoint at \S+step-000000000009-1-9-x\.$"):
        resolve(None, f"{storage.url}/step-000000000009-1-9-x", print)
    with pytest.raises(NotFound, match=r"^there is no complete checkpoint in \S+nowhere\.$"):
        resolve(None, f"{storage.url}/nowhere", print)


def test_nothing_to_resume_from_is_no_error_for_latest(tmp_path: Path) -> None:
    assert resolve(str(tmp_path / "none"), "latest", print) is None
    assert resolve(None, "latest", print) is None
    assert resolve(str(tmp_path), False, print) is None


# ---- absence of proof is no proof of absence


def newer_version(folder: Path) -> None:
    manifest = folder / MANIFEST
    content = {"tomorrow": {"more": 1}, **json.loads(manifest.read_bytes()), "version": 99}
    del content["layout"]["block_elements"]
    manifest.write_bytes(sealed(json.dumps(content, separators=(",", ":")).encode()))


def unknown_key(folder: Path) -> None:
    manifest = folder / MANIFEST
    content = {"tomorrow": 1, **json.loads(manifest.read_bytes())}
    manifest.write_bytes(sealed(json.dumps(content, separators=(",", ":")).encode()))


def changed_bit(folder: Path) -> None:
    manifest = folder / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"job":"job"', b'"job":"bob"', 1))


def file_is_gone(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def manifest_is_empty(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"")


def manifest_is_a_pipe(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


SPOILS = [newer_version, unknown_key, changed_bit, file_is_gone, manifest_is_empty, manifest_is_a_pipe]


@pytest.mark.parametrize("spoil", SPOILS)
def test_checkpoints_of_which_none_can_be_read_are_not_the_same_as_none(
    two: Two, spoil: Callable[[Path], None]
) -> None:
    storage, (first, newest) = two
    spoil(Path(storage.url) / newest.folder)
    assert latest(storage)[0] == 2, "one that can be read is enough"
    spoil(Path(storage.url) / first.folder)
    with pytest.raises(NoneReadable, match=rf"^there are checkpoints in \S+, and none can be read: \S+{newest.folder}"):
        latest(storage)
    assert resolve(storage.url, False, print) is None, "that is how somebody says so"


def test_one_that_could_not_be_read_is_not_none_either(two: Two) -> None:
    storage, both = two
    paths = [f"{storage.url}/{name.folder}" for name in both]
    with pytest.raises(NoneReadable, match="cannot be read"):
        resolve(storage.url, "latest", print, unreadable=paths)


def test_what_the_run_saved_and_an_older_store_does_not_know_is_not_none_either(tmp_path: Path) -> None:
    """Begun at step 0 beside them, it would push them out: they are of its run."""
    storage = LocalStorage(tmp_path)
    name, _ = save(trained(2), storage, generation=3, run="r1")
    with pytest.raises(NoneReadable, match=rf"{name.folder} is of generation 3, which this job did not have\."):
        resolve(storage.url, "latest", print, Own("r1", {1, 2}))
    assert resolve(storage.url, "latest", print, Own("r2", {1, 2})) is None, "another run's is no affair of it"
    (tmp_path / name.folder / MANIFEST).unlink()
    assert resolve(storage.url, "latest", print, Own("r1", {1, 2})) is None, "nor is what never was one"


def test_rests_of_saves_and_what_is_not_the_jobs_are_nothing_to_go_on_from(two: Two) -> None:
    storage, both = two
    step, lines = latest(storage, {9})
    assert step is None and all("is of generation 1, which this job did not have." in line for line in lines)
    for name in both:
        (Path(storage.url) / name.folder / MANIFEST).unlink()
    assert latest(storage)[0] is None


def test_the_format_of_a_manifest_is_judged_before_its_keys(two: Two) -> None:
    storage, (_, newest) = two
    newer_version(Path(storage.url) / newest.folder)
    with pytest.raises(
        CheckpointDamaged, match=r"manifest\.json has format version 99, written by shoal .*which reads"
    ):
        look_into(storage, newest)


# ---- what makes no checkpoint in the first place


def parts(storage: LocalStorage, owners: list[Runs]) -> tuple[Manifest, str, list[str]]:
    state = trained(1)
    draft, beside = draft_of(state, origin(state), 1, {})
    folder, files = SaveName.of(1, 1, 1, "x").folder, []
    for number, owned in enumerate(owners):
        snapshot = take_snapshot(state.layout, state.weights, state.held, owned, {} if number else beside, Arena())
        files.append(write_content(storage, folder, 1, Author(f"w{number}", "x"), snapshot).name)
    return draft, folder, files


@pytest.mark.parametrize(
    ("owners", "sentence"),
    [
        ([Runs(((0, 5),)), Runs(((6, 12),))], "block 5 is in none of its files"),
        ([Runs(((0, 8),)), Runs(((6, 12),))], "blocks 6 to 7 are in it twice"),
        ([Runs(((0, 5),))], "blocks 5 to 11 are in none of its files"),
    ],
)
def test_writers_that_left_out_or_doubled_a_block_make_no_checkpoint(
    tmp_path: Path, owners: list[Runs], sentence: str
) -> None:
    storage = LocalStorage(tmp_path)
    draft, folder, files = parts(storage, owners)
    with pytest.raises(CheckpointDamaged, match=f"cannot be completed: {sentence}"):
        commit(storage, folder, draft, files)
    assert MANIFEST not in storage.list(folder)


def test_a_writer_that_did_not_finish_makes_no_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    draft, folder, files = parts(storage, [Runs(((0, 5),)), Runs(((5, 12),))])
    (tmp_path / folder / part_of(files[1])).unlink()
    with pytest.raises(CheckpointDamaged, match=r"-w1-x\.safetensors\.json does not exist: its writer did not finish"):
        commit(storage, folder, draft, files)


def test_a_file_that_shrank_after_it_was_written_makes_no_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    draft, folder, files = parts(storage, [Runs(((0, 12),))])
    (tmp_path / folder / files[0]).write_bytes(b"short")
    with pytest.raises(CheckpointDamaged, match=r"cannot be completed: .* has 5 bytes, its writer wrote"):
        commit(storage, folder, draft, files)


def test_two_writers_of_one_step_do_not_touch_each_others_files(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first, _ = save(trained(2), storage, generation=4)
    second, _ = save(trained(2), storage, generation=5)
    assert first.folder != second.folder
    for name in (first, second):
        verify(look_into(storage, name).reader())
    assert latest(storage)[0] == 2
    with pytest.raises(Exception, match="a file of that name is in the way"):
        save(trained(2), storage, generation=4)
    verify(look_into(storage, first).reader())


def test_once_the_manifest_is_there_nothing_else_is_but_the_data(tmp_path: Path) -> None:
    name, manifest = save(trained(1), LocalStorage(tmp_path))
    names = {file.name for file in (tmp_path / name.folder).iterdir()}
    assert names == {MANIFEST, *(file.name for file in manifest.files)}


# ---- a manifest with the right checksum that holds what no object of this job can take over


def resealed(two: Two, **changes: object) -> None:
    """The newest checkpoint's manifest with other values, and the checksum that fits them."""
    storage, (_, newest) = two
    manifest = Path(storage.url) / newest.folder / MANIFEST
    content = json.loads(manifest.read_bytes())
    manifest.write_bytes(sealed(json.dumps({**content, **changes}, separators=(",", ":")).encode()))


RATES = {"lr": 0.1, "betas": {"$": "tuple", "of": [0.9, 0.999]}}


@rule(
    "A checkpoint's contents are compared with the kind of state that this job has before anything is taken over",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.checkpoint.restore",
        "    if sentence:\n        raise CheckpointDamaged",
        "    if False:\n        raise CheckpointDamaged",
    ),
)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scheduler": [1]}, "scheduler is a list; expected a mapping."),
        ({"scheduler": {"last_epoch": "four"}}, "scheduler.last_epoch is a string; expected a number."),
        ({"scheduler": {"base_lrs": 0.1}}, "scheduler.base_lrs is a number; expected a list."),
        ({"scheduler": {"base_lrs": [0.1]}}, "base_lrs has 1 values for 2 optimizer groups"),
        ({"groups": [{**RATES, "lr": "fast"}, RATES]}, "optimizer groups.0.lr is a string; expected a number."),
        ({"groups": [{**RATES, "betas": 0.9}, RATES]}, "optimizer groups.0.betas is a number; expected a list."),
        ({"record": "[]"}, "its step's record cannot be read: TypeError"),
        ({"record": "{}"}, "its step's record cannot be read: KeyError('requests')"),
    ],
)
def test_a_sealed_manifest_whose_states_cannot_be_this_jobs_is_a_damaged_one(
    two: Two, changes: dict[str, object], sentence: str
) -> None:
    resealed(two, **changes)
    found = resolve(two[0].url, "latest", print)
    assert found is not None and found.manifest.step == 4
    with pytest.raises(CheckpointDamaged, match=re.escape(sentence)) as refused:
        load_small_state(found.reader(), fresh(), {})
    assert found.path in str(refused.value)


def test_a_buffer_of_another_shape_is_named(two: Two) -> None:
    found = resolve(two[0].url, "latest", print)
    state = fresh()
    state.buffers.committed["norm.running_mean"] = torch.zeros(3)
    assert found is not None
    with pytest.raises(UserError, match=r'buffer "norm.running_mean" has shape \(3,\) and torch.float32, the checkp'):
        load_small_state(found.reader(), state, {})


def test_a_scheduler_of_another_class_does_not_take_the_checkpoints_state_over(two: Two) -> None:
    found, state = resolve(two[0].url, "latest", print), fresh()
    state.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(state.optimizer, T_max=10)
    state.given = GivenHyperParameters(state.optimizer, state.scheduler, {})
    before = state.scheduler.state_dict()
    assert found is not None and not has_scheduler_of(found.manifest, state)
    load_small_state(found.reader(), state, {})
    assert state.scheduler.state_dict() == before and "step_size" not in before
    assert has_scheduler_of(found.manifest, fresh())
