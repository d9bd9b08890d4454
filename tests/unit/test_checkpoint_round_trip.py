"""What is saved comes back bit by bit, whoever wrote which blocks and whoever reads which."""

from __future__ import annotations

import copy
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import fresh, save, train, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from safetensors import safe_open
from shoal.checkpoint.catalogue import delete, look_into
from shoal.checkpoint.fingerprint import block_digests, digest_of_buffers, total_of, verify
from shoal.checkpoint.manifest import CHECKSUM_BYTES
from shoal.checkpoint.restore import fits, load_blocks, load_small_state
from shoal.checkpoint.storage import LocalStorage, Storage, open_storage
from shoal.state.training_state import TrainingState
from shoal_protos.errors import UserError
from shoal_protos.runs import NO_BLOCKS, Runs, every
from xxhash import xxh3_128_digest

BLOCKS = fresh().layout.blocks
OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.Adadelta,
]


def digest(state: TrainingState) -> str:
    """The fingerprint of a state that holds every block."""
    return total_of(
        state.step,
        state.layout,
        block_digests(state, state.everything),
        [digest_of_buffers(state.buffers.committed)],
        state.misses,
    )


def restored(storage: Storage, save_name: object, keeps: Runs, into: TrainingState) -> TrainingState:
    found = look_into(storage, save_name)  # type: ignore[arg-type]
    assert fits(found.manifest, into, (), found.path)
    load_small_state(found.reader(), into, {})
    load_blocks(found.reader(), into, keeps)
    found.reader().parameters(into.layout.stretches(into.everything), into.weights)  # a hand-out's part
    into.current = into.everything
    return into


def owners_of(draw: st.DataObject, blocks: int) -> list[Runs]:
    """A random map from blocks to a few owners; an owner may have none."""
    owner = draw.draw(st.lists(st.integers(0, 3), min_size=blocks, max_size=blocks))
    return [Runs.of(block for block, who in enumerate(owner) if who == number) for number in range(4)]


@given(st.data())
@settings(max_examples=examples(25), deadline=None)
def test_any_set_of_blocks_comes_back_from_any_split_among_writers(data: st.DataObject) -> None:
    state = trained(2)
    # the state lies in many segments, as after fills
    for part in owners_of(data, BLOCKS):
        state.held.take({span: copy.deepcopy(s) for span, s in state.held.home.states(part).items()})
    held = state.held.home.states(every(BLOCKS))
    state.held.keep_only(NO_BLOCKS)
    state.held.take(held)
    keeps = Runs.of(data.draw(st.sets(st.integers(0, BLOCKS - 1))))
    storage = open_storage("memory://round-trip")
    name, _ = save(state, storage, owners_of(data, BLOCKS))
    fingerprint = verify(look_into(storage, name).reader()).fingerprint
    other = restored(storage, name, keeps, fresh(seed=1))
    delete(storage, name.folder)
    assert fingerprint == digest(state)
    assert other.held.runs == keeps
    assert block_digests(other, keeps) == {b: d for b, d in block_digests(state, every(BLOCKS)).items() if b in keeps}
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.weights.flats, state.weights.flats, strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_run_that_was_saved_and_restored_ends_in_the_same_bits(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    undisturbed = digest(trained(6, kind=kind))
    storage = LocalStorage(tmp_path)
    name, _ = save(trained(3, kind=kind), storage)
    state = restored(storage, name, every(BLOCKS), fresh(seed=1, kind=kind))
    assert state.step == 3
    assert digest(train(state, 3)) == undisturbed


def test_a_checkpoint_of_step_0_has_no_optimizer_state_and_is_one_all_the_same(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name, manifest = save(fresh(), storage)
    assert all(not piece.state for file in manifest.files for piece in file.pieces)
    assert digest(train(restored(storage, name, every(BLOCKS), fresh(seed=1)), 2)) == digest(trained(2))


def test_every_block_has_the_xxh3_of_its_bytes_in_the_file(tmp_path: Path) -> None:
    name, manifest = save(trained(2), LocalStorage(tmp_path))
    for file in manifest.files:
        content = (tmp_path / name.folder / file.name).read_bytes()
        for piece in file.pieces:
            itemsize = manifest.blocks.buckets[piece.bucket].dtype.itemsize
            size = manifest.blocks.block_elements * itemsize
            for index, found in enumerate(piece.by_block):
                at = piece.at + index * size
                assert found[:CHECKSUM_BYTES] == xxh3_128_digest(content[at : at + size])
                assert len(found) == CHECKSUM_BYTES * (1 + len(piece.state))


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_checkpoint_that_is_verified_has_the_fingerprint_of_its_state(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    for steps in (0, 2):
        storage, state = LocalStorage(tmp_path), trained(steps, kind=kind)
        name, _ = save(state, storage)
        assert verify(look_into(storage, name).reader()).fingerprint == digest(state)


def test_the_small_state_comes_back_too(tmp_path: Path) -> None:
    state, other = trained(3), fresh(seed=1)
    storage = LocalStorage(tmp_path)
    name, manifest = save(state, storage)
    restored(storage, name, NO_BLOCKS, other)
    assert other.scheduler and state.scheduler
    assert other.scheduler.state_dict() == state.scheduler.state_dict()
    assert [g["lr"] for g in other.optimizer.param_groups] == [g["lr"] for g in state.optimizer.param_groups]
    assert other.record == state.record
    assert {n: b.tolist() for n, b in other.buffers.committed.items()} == {
        n: b.tolist() for n, b in state.buffers.committed.items()
    }
    assert torch.equal(other.module.get_parameter("frozen"), state.module.get_parameter("frozen"))
    assert manifest.data == checkpoints.DATA


def test_a_reader_reads_no_more_than_its_blocks(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name, manifest = save(trained(2), storage)
    reader = look_into(storage, name).reader()
    reader.states(manifest.blocks.stretches(Runs(((2, 3), (5, 6)))))
    sizes = {bucket.dtype.itemsize * 4096 * 2 + 4 for bucket in manifest.blocks.buckets}
    assert reader.bytes_read in {a + b for a in sizes for b in sizes}


def test_what_was_many_pieces_becomes_one_run_for_each_bucket(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name, manifest = save(trained(2), storage, [Runs.of(range(n, BLOCKS, 4)) for n in range(4)])
    states = (
        look_into(storage, name).reader().states([manifest.blocks.whole(bucket) for bucket in manifest.blocks.buckets])
    )
    assert len(states) == len(manifest.blocks.buckets)


def test_the_files_are_safetensors_for_everybody(tmp_path: Path) -> None:
    state = trained(2)
    name, manifest = save(state, LocalStorage(tmp_path))
    seen = set()
    for file in manifest.files:
        with safe_open(tmp_path / name.folder / file.name, framework="pt") as opened:
            seen |= set(opened.keys())
            for key in opened.keys():  # noqa: SIM118 (it is no mapping)
                kind, _, text = key.partition("/")
                if kind == "parameters":
                    bucket, start, stop = map(int, text.split(":"))
                    assert torch.equal(opened.get_tensor(key), state.weights.flats[bucket][start * 4096 : stop * 4096])
    assert {"buffer/norm.running_mean", "buffer/norm.num_batches_tracked"} <= seen


def test_a_checkpoint_takes_hardly_more_bytes_than_the_state(tmp_path: Path) -> None:
    state = trained(2)
    storage = LocalStorage(tmp_path)
    name, _ = save(state, storage, [every(BLOCKS)])
    held = state.held.home.state_bytes() + sum(flat.numel() * flat.element_size() for flat in state.weights.flats)
    frozen = sum(file.stat().st_size for file in tmp_path.glob("frozen-*"))
    small = 12_000  # names, hyper-parameters, buffers: what does not grow with the blocks
    assert sum(file.stat().st_size for file in (tmp_path / name.folder).iterdir()) - small < 1.01 * held
    assert frozen < 1_000
    assert verify(look_into(storage, name).reader()).bytes_read >= held


def test_frozen_parameters_are_written_once_for_all_checkpoints(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    _, first = save(trained(1), storage)
    _, second = save(trained(2), storage)
    assert first.frozen == second.frozen
    assert len(list(tmp_path.glob("frozen-*"))) == 1


class Counter:
    """What a user may register."""

    def __init__(self, count: int) -> None:
        self.count, self.history = count, {1: (0.5, float("inf")), 2: torch.arange(count)}

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, given: dict[str, object]) -> None:
        self.count, self.history = given["count"], given["history"]  # type: ignore[assignment]


def test_a_users_own_state_comes_back(tmp_path: Path) -> None:
    storage, mine = LocalStorage(tmp_path), Counter(0)
    name, _ = save(trained(1), storage, registered={"counter": Counter(5)})
    load_small_state(look_into(storage, name).reader(), fresh(), {"counter": mine})
    assert (mine.count, mine.history[1]) == (5, (0.5, float("inf")))
    assert torch.equal(mine.history[2], torch.arange(5))  # type: ignore[arg-type]


def test_registered_states_must_be_those_of_the_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name, _ = save(trained(1), storage, registered={"counter": Counter(5)})
    with pytest.raises(UserError, match='has a state "counter"; this script must register it with'):
        load_small_state(look_into(storage, name).reader(), fresh(), {})
    with pytest.raises(UserError, match='has no state "other", which this script registers'):
        load_small_state(look_into(storage, name).reader(), fresh(), {"other": Counter(1), "counter": Counter(1)})


def test_a_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, object]:
            return {"when": Path("x")}

    with pytest.raises(UserError, match=r'the state registered as "odd".when is a pathlib\S*Path, which cannot'):
        save(trained(1), LocalStorage(tmp_path), registered={"odd": Odd(1)})
