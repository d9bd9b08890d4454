"""Datasets of others: Hugging Face's two kinds, and torchdata's loader, with and without data workers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import datasets
import pytest
import shoal
import torch
from matrices import shortened
from rule import holds
from shoal.core.stream_position import StreamOrder
from shoal.data.stream_source import STATE_EVERY, StreamSamples
from shoal_protos.errors import UserError
from tiers import check
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = check("starts processes")

LANES, MICRO = 4, 2
ROWS = datasets.Dataset.from_dict({"x": [[float(number)] for number in range(40)]}).with_format("torch")


def job(dataset: Any) -> str:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "shoal": {"lanes": LANES, "max_steps": 8},
    }
    engine = shoal.initialize(model=nn.Linear(1, 1), config=config, dataset=dataset)
    for batch in engine:
        engine.backward((engine.module(batch["x"]) ** 2).mean())
        engine.step()
    digest = engine.fingerprint()
    assert digest is not None
    return digest


def read(stream: Any, lane: int, steps: int) -> list[float]:
    with closing(StreamSamples(stream, None, StreamOrder(LANES, MICRO, 1), 5)) as source:
        return [x for step in range(steps) for x in source.read((step, lane, 0)).batch["x"].flatten().tolist()]


def test_a_dataset_of_hugging_face_is_read_by_its_numbers() -> None:
    listed = [{"x": torch.tensor([float(number)])} for number in range(40)]
    assert job(ROWS) == job(listed) == job(DataLoader(ROWS, MICRO, shuffle=True, num_workers=2))


def test_a_dict_of_splits_is_refused() -> None:
    with pytest.raises(UserError, match="dataset DatasetDict is a dict of train, test; give one of them"):
        job(datasets.DatasetDict({"train": ROWS, "test": ROWS}))


@holds("A stream is shared by lane,")
@pytest.mark.parametrize("shards", [1, 3, 4, 8])
def test_lanes_share_a_stream_of_hugging_face_however_many_shards_it_has(shards: int) -> None:
    stream = ROWS.to_iterable_dataset(num_shards=shards)
    assert sorted(x for lane in range(LANES) for x in read(stream, lane, 5)) == list(range(40))


def test_a_stream_of_hugging_face_has_the_same_bits_with_data_workers() -> None:
    stream = ROWS.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=5)
    assert job(stream) == job(DataLoader(stream, MICRO, num_workers=2))


@holds("A lane of a stream goes")
@pytest.mark.parametrize("shuffles", shortened([False, True], True))
@pytest.mark.parametrize("shards", shortened([3, 4], 3))
def test_a_stream_of_hugging_face_goes_on_elsewhere_with_the_same_samples(shuffles: bool, shards: int) -> None:
    stream = ROWS.to_iterable_dataset(num_shards=shards)
    stream = stream.shuffle(seed=3, buffer_size=5) if shuffles else stream
    order = StreamOrder(LANES, MICRO, 1)
    with closing(StreamSamples(stream, None, order, 5)) as source:
        reads = [source.read((step, 1, 0)) for step in range(2 * STATE_EVERY + 3)]
    marks = [one.bookmark for one in reads if one.bookmark is not None]
    assert marks and all(bool(mark.state) is not shuffles for mark in marks)
    for mark in marks:
        for step in range(mark.batches, len(reads)):
            with closing(StreamSamples(stream, None, order, 5)) as elsewhere:
                found = elsewhere.read((step, 1, 0), mark).batch
            assert torch.equal(found["x"], reads[step].batch["x"]), (mark, step)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 beside torch 2.13
def test_torchdatas_loader_is_taken_as_a_dataloader() -> None:
    listed = [{"x": torch.tensor([float(number)])} for number in range(40)]
    assert job(StatefulDataLoader(listed, MICRO, shuffle=True, num_workers=1)) == job(listed)
    stream = ROWS.to_iterable_dataset(num_shards=4)
    assert job(StatefulDataLoader(stream, MICRO, num_workers=2, snapshot_every_n_steps=5)) == job(stream)
