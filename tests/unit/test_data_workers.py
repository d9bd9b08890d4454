"""Data workers give the bits of the training thread, live through changes, and end with their training process.

In whole jobs of real processes: integration/test_data_workers.py.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import shoal
import torch
from matrices import shortened
from rule import Edit, holds, rule
from shoal.config.load import load_config
from shoal.core.sampler import Sampler
from shoal.data.batch_memory import receive, send
from shoal.data.data_workers import DataWorkers, Reading
from shoal.data.fetch import Fetcher
from shoal.data.source import NumberedSamples
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.start import Given, engine_with
from shoal_protos.errors import PeerError, UserError
from tiers import check
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

pytestmark = check("starts processes")

LANES, MICRO = 4, 2
SELECT_CAN_NAME = 1024
"""`FD_SETSIZE` of glibc."""


class Noisy(Dataset[dict[str, Any]]):
    """Draws from every generator; one sample cannot be put into a batch."""

    def __init__(self, count: int = 40, odd: int = -1) -> None:
        self.count, self.odd = count, odd

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.randn(3 if index != self.odd else 4) + random.random() + float(numpy.random.rand())
        return {"noise": noise, "index": index, "name": f"sample {index}"}


def source(dataset: Any = None) -> NumberedSamples:
    return NumberedSamples(dataset or Noisy(), None, Sampler(40, LANES, MICRO, 1, 3), 3)


@contextmanager
def fetching(dataset: Any = None, reading: Reading | None = None) -> Iterator[Fetcher]:
    fetcher = Fetcher(source(dataset), None, 3, "cpu", reading or Reading(processes=2))
    try:
        yield fetcher
    finally:
        fetcher.close()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = all(torch.equal(one[name], other[name]) for name in ("noise", "index"))
    return tensors and one["name"] == other["name"]


@rule(
    "A data worker gives the bits of the training thread: one thread of torch everywhere, the seed of the place, "
    "and tensors with the strides, shared memory and alignment that they had",
    "Data, evaluations and the doors",
    broken_by=[
        Edit("shoal.data.source", "    torch.set_num_threads(1)\n", "    torch.set_num_threads(threads)\n"),
        Edit("shoal.data.batch_memory", "        at += (_address(buffer) - at) % ALIGNMENT\n", ""),
        Edit(
            "shoal.data.batch_memory",
            "tuple(value.shape), value.stride())",
            "tuple(value.shape), torch.empty(value.shape).stride())",
        ),
        Edit("shoal.data.batch_memory", "        if span not in self._storages:\n", "        if span is not None:\n"),
        Edit(
            "shoal.data.data_workers",
            "        place = worker.asked.popleft()\n",
            "        place = worker.asked.pop()\n",
        ),
    ],
)
def test_what_was_read_ahead_is_what_the_training_thread_reads_in_any_order() -> None:
    places = [(step, lane, 0) for step in range(3) for lane in range(LANES)]
    # as when lanes go and come, and one is run again
    asked = [*places[:3], places[9], places[2], places[2], *places[4:]]
    with fetching() as ahead:
        for number, place in enumerate(asked):
            expected = Fetcher(source(), None, 3, "cpu").micro_batch(*place)
            assert same(ahead.micro_batch(*place, iter(places[number + 1 :])), expected)


@rule(
    "What was read ahead for a lane that has moved is dropped, and no more is read ahead than the DataLoader "
    "would: a change of the world costs no memory",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.data.data_workers",
            "        self._ready = {known: batch for known, batch in self._ready.items() if known in wanted}\n",
            "",
        ),
        Edit("shoal.data.data_workers", "islice(upcoming, self._depth)", "islice(upcoming, self._depth + 1)"),
    ],
)
def test_as_many_batches_as_a_dataloader_are_read_ahead_and_no_more() -> None:
    workers = DataWorkers(source(), Reading(processes=2, ahead=3), 3)
    try:
        upcoming = iter([(step, lane, 0) for step in range(1, 5) for lane in range(LANES)])
        workers.take((0, 0, 0), upcoming, lambda _: None)
        assert len(workers._ready) + sum(len(worker.asked) for worker in workers._workers) == 6
        for one in workers._workers:
            wait([one.channel])  # its first answer lies there
        workers.take((1, 0, 0), iter([(1, lane, 0) for lane in range(1, LANES)]), lambda _: None)
        assert workers._ready
        workers.take((4, 0, 0), iter(()), lambda _: None)
        assert set(workers._ready) == set(), "what nobody waits for any more is dropped"
    finally:
        workers.close()


def test_batches_come_to_a_process_that_has_more_files_open_than_select_can_name() -> None:
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(SELECT_CAN_NAME)]
    try:
        with fetching() as ahead:
            assert same(ahead.micro_batch(0, 0, 0), Fetcher(source(), None, 3, "cpu").micro_batch(0, 0, 0))
    finally:
        for one in others:
            os.close(one)


@holds("A data worker gives the bits")
def test_strides_shared_memory_alignment_and_other_values_survive_the_way() -> None:
    import socket

    ours, theirs = socket.socketpair()
    whole = torch.arange(40, dtype=torch.float64).reshape(5, 8)
    value = {
        "transposed": whole.t(),
        "column": whole[:, 3],
        "again": whole,
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "far": torch.arange(100_000)[70_001:70_003],
        "empty": torch.empty(0, 3),
        "array": numpy.arange(6).reshape(2, 3).T,
        "parameter": nn.Parameter(torch.ones(2)),
        "bits": torch.tensor([True, False]),
        "rest": ("text", None, [1.5]),
    }
    with ours, theirs:
        send(ours, value)
        found = receive(theirs)
    for name in ("transposed", "column", "again", "images", "far", "empty", "bits"):
        assert torch.equal(found[name], value[name]) and found[name].stride() == value[name].stride(), name
        assert found[name].data_ptr() % 64 == value[name].data_ptr() % 64 or name == "empty", name
    found["again"][0, 3] = -1
    assert found["column"][0] == -1 and found["transposed"][3, 0] == -1, "they shared memory and still do"
    assert (found["array"] == value["array"]).all() and found["array"].strides == value["array"].strides
    assert isinstance(found["parameter"], nn.Parameter) and found["rest"] == value["rest"]
    assert found["far"].untyped_storage().nbytes() < 100, "only what the tensor reaches has travelled"


def job(dataset: Any, processes: int, **options: Any) -> str:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "shoal": {"lanes": LANES, "micro_batches_per_lane": 2, "max_steps": 6},
    }
    loader = DataLoader(dataset, MICRO, shuffle=True, num_workers=processes, **options)
    engine = shoal.initialize(model=nn.Linear(3, 1), config=config, dataset=loader)
    for batch in engine:
        engine.backward(engine.module(batch["noise"]).mean() * batch["index"].float().mean())
        engine.step()
    digest = engine.fingerprint()
    assert digest is not None
    return digest


@holds("A data worker gives the bits")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_job_ends_with_the_same_bits_however_data_workers_are_started(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where a fresh process finds this module by its name
    assert job(Noisy(), 1, multiprocessing_context=method) == job(Noisy(), 0)


class Telling(Noisy):
    """Says who reads."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None and os.environ["READ_BY"] == f"init {info.id}"
        return {"noise": torch.ones(3), "index": info.num_workers}


def note_number(number: int) -> None:
    os.environ["READ_BY"] = f"init {number}"


@holds("A data worker gives the bits")
def test_worker_init_fn_and_get_worker_info_are_as_in_a_dataloader() -> None:
    job(Telling(), 2, worker_init_fn=note_number)
    assert "READ_BY" not in os.environ


@holds("A data worker gives the bits")
def test_samples_are_read_and_collated_with_one_thread_of_torch_everywhere() -> None:
    """Other counts of threads give other bits."""

    class Counts(Noisy):
        def __getitem__(self, index: int) -> Any:
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for processes in (0, 1):
            order = Sampler(40, LANES, MICRO, 1, 3)
            numbered = NumberedSamples(Counts(), lambda counts: [*counts, torch.get_num_threads()], order, 3)
            fetcher = Fetcher(numbered, None, 3, "cpu", Reading(processes))
            try:
                assert fetcher.micro_batch(0, 0, 0) == [1, 1, 1]
            finally:
                fetcher.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@rule(
    "Data workers are started before the session has threads and connections, end with their training process "
    "however that ends, and no signal to its group ends them before",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal.training.start",
            "    fetcher = Fetcher(source, given.collate_fn, settled.seed, state.device.kind, given.reading)\n"
            '    link, faults = open_link(state.device, settled.backend == "gloo")\n',
            '    link, faults = open_link(state.device, settled.backend == "gloo")\n'
            "    fetcher = Fetcher(source, given.collate_fn, settled.seed, state.device.kind, given.reading)\n",
        ),
        Edit(
            "shoal.data.data_workers",
            "        signal.signal(number, signal.SIG_IGN)\n",
            "        signal.signal(number, signal.SIG_DFL)\n",
        ),
        Edit(
            "shoal.data.data_workers",
            "            if worker.process.is_alive():\n"
            "                worker.process.kill()\n"
            "                worker.process.join()\n"
            "            worker.process.close()\n",
            "            if not worker.process.is_alive():\n                worker.process.close()\n",
        ),
    ],
)
def test_data_workers_are_started_before_there_is_a_link() -> None:
    """So that a fork copies no thread and no connection of the session."""
    children: list[str] = []

    def open_link(*_: object) -> tuple[AloneLink, Faults]:
        children.extend(child.name for child in multiprocessing.active_children())
        return AloneLink(), Faults([])

    config = load_config({
        "train_micro_batch_size_per_gpu": MICRO, "optimizer": {"type": "SGD"}, "shoal": {"lanes": 4, "max_steps": 1},
    })  # fmt: skip
    engine = engine_with(Given(nn.Linear(3, 1), config, Noisy(), reading=Reading(processes=1)), open_link)
    engine.context.loop.fetcher.close()
    assert children == ["shoal data worker 0"]


# ---- what goes wrong


@pytest.mark.parametrize("processes", [0, 1])
def test_a_batch_that_collate_fn_cannot_take_names_its_samples(processes: int) -> None:
    order = Sampler(40, LANES, MICRO, 1, 3)
    indices = order.indices(0, 1, 0)
    place = f"collate_fn failed on samples {indices[0]}, {indices[1]} of step 1, lane 1: RuntimeError: stack expects"
    with fetching(Noisy(odd=indices[1]), Reading(processes)) as fetcher, pytest.raises(UserError) as refused:
        fetcher.micro_batch(0, 0, 0)
        fetcher.micro_batch(0, 1, 0)
    assert place in str(refused.value) and "padded only by a collate_fn of yours" in str(refused.value)


def nothing(samples: list[Any]) -> None:
    """Forgets to return its batch."""


def one_by_one(samples: list[Any]) -> Iterator[Any]:
    yield from samples


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("collate", "found"), [(nothing, r"nothing \(None\)"), (one_by_one, "a generator, which is read once")]
)
def test_what_is_no_batch_names_its_samples(collate: Any, found: str, processes: int) -> None:
    fetcher = Fetcher(
        NumberedSamples(Noisy(), collate, Sampler(40, LANES, MICRO, 1, 3), 3), None, 3, "cpu", Reading(processes)
    )
    try:
        with pytest.raises(UserError, match=f"collate_fn gave {found} for samples .* of step 1, lane 0; expected"):
            fetcher.micro_batch(0, 0, 0)
    finally:
        fetcher.close()


class Broken(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise FileNotFoundError(2, "is not there", f"shard-{index % 1}.bin")


@pytest.mark.parametrize("processes", [0, 1])
def test_a_datasets_own_error_goes_through_with_a_note_of_where_it_was(processes: int) -> None:
    with fetching(Broken(), Reading(processes)) as fetcher, pytest.raises(FileNotFoundError, match="shard-0") as found:
        fetcher.micro_batch(2, 1, 0)
    assert "shoal: read for step 3, lane 1, samples " in found.value.__notes__[0]
    assert processes == 0 or "in a data worker (pid" in found.value.__notes__[1]


class Oddly(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class BrokenOddly(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise Oddly(1, 2)


def test_an_error_that_cannot_be_pickled_arrives_as_its_traceback() -> None:
    with fetching(BrokenOddly()) as fetcher, pytest.raises(RuntimeError, match="Oddly in a data worker") as found:
        fetcher.micro_batch(0, 0, 0)
    assert "in __getitem__" in str(found.value) and "1 and 2" in str(found.value)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_dataset_that_has_another_length_now_is_refused(processes: int) -> None:
    dataset = Noisy()
    with fetching(dataset, Reading(processes)) as fetcher:
        fetcher.micro_batch(0, 0, 0)
        dataset.count = 39
        with pytest.raises(UserError, match="dataset Noisy has 39 samples now, and had 40 when the job began"):
            fetcher.micro_batch(0, 1, 0)


@holds("Data workers are started before the")
def test_a_data_worker_that_was_killed_is_named_with_what_it_was_reading() -> None:
    with fetching(reading=Reading(processes=1)) as fetcher:
        fetcher.micro_batch(0, 0, 0)
        assert fetcher._workers is not None
        process = fetcher._workers._workers[0].process
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(PeerError, match=rf"data worker 0 of 1 \(pid {process.pid}\) was killed by SIGKILL while"):
            fetcher.micro_batch(4, 2, 0)


class Exiting(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sys.exit(3)


class Vanishing(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        os._exit(4)


def leaves(_: int) -> None:
    sys.exit("no data here")


@pytest.mark.parametrize(
    ("dataset", "init", "sentence"),
    [
        (
            Exiting(),
            None,
            r"was ended by sys\.exit\(3\) in the dataset, at one of samples \d+, \d+ of step 5, lane 2\. ",
        ),
        (Noisy(), leaves, r"was ended by sys\.exit\('no data here'\) in worker_init_fn\. "),
        (Vanishing(), None, r"has ended with status 4 while it was to read samples \d+, \d+ of step 5, lane 2\. "),
    ],
)
def test_a_data_worker_that_is_told_to_exit_is_named_with_what_it_was_reading(
    dataset: Any, init: Any, sentence: str
) -> None:
    """`sys.exit` ended the script, which said only that it had left its loop."""
    named = pytest.raises(PeerError, match=rf"^data worker 0 of 1 \(pid \d+\) {sentence}")
    with fetching(dataset, Reading(processes=1, init=init)) as fetcher, named:
        fetcher.micro_batch(4, 2, 0)


class Stuck(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        signal.pause()
        return {}


@holds("Data workers are started before the")
def test_the_dataloaders_timeout_is_kept_and_a_stuck_data_worker_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.data.data_workers.END_SECONDS", 0.1)
    reading = Reading(processes=1, timeout_seconds=0.2)
    with fetching(Stuck(), reading) as fetcher, pytest.raises(UserError, match=r"step 1, lane 0 for 0\.2 s"):
        fetcher.micro_batch(0, 0, 0)


def test_a_dataset_that_cannot_be_pickled_is_refused_where_data_workers_are_spawned() -> None:
    dataset = Noisy()
    dataset.transform = lambda sample: sample  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"dataset Noisy cannot be given to data workers that are started by spawn"):
        job(dataset, 1, multiprocessing_context="spawn")


class OnADevice(Noisy):
    def __getitem__(self, index: int) -> Any:
        return lambda: index


def test_a_batch_that_cannot_be_sent_is_refused() -> None:
    fetcher = Fetcher(NumberedSamples(OnADevice(), list, Sampler(40, 4, 2, 1, 3), 3), None, 3, "cpu", Reading(1))
    try:
        with pytest.raises(UserError, match="a batch cannot be sent from a data worker"):
            fetcher.micro_batch(0, 0, 0)
    finally:
        fetcher.close()


SCRIPT = """
import multiprocessing, os, signal, torch
from shoal.core.sampler import Sampler
from shoal.data.data_workers import Reading
from shoal.data.fetch import Fetcher
from shoal.data.source import NumberedSamples
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["shoal.data.fetch"])  # once, and not in each worker
    source = NumberedSamples(torch.arange(40), None, Sampler(40, 4, 2, 1, 0), 0)
    fetcher = Fetcher(source, None, 0, "cpu", Reading(2, start_method="{method}"))
    assert fetcher.micro_batch(0, 0, 0).tolist() == source.sampler.indices(0, 0, 0)
    print(*(worker.process.pid for worker in fetcher._workers._workers), flush=True)
    signal.pause()
"""


@holds("Data workers are started before the")
@pytest.mark.parametrize("method", shortened(["fork", "spawn", "forkserver"], "forkserver"))
def test_data_workers_end_with_a_training_process_that_is_killed(method: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(method=method))
    command = [sys.executable, str(tmp_path / "script.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # Python's own fork server leaves a folder there
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=100)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@holds("Data workers are started before the")
def test_ctrl_c_and_a_notice_of_preemption_do_not_reach_data_workers() -> None:
    with fetching(reading=Reading(processes=1)) as fetcher:
        assert fetcher._workers is not None
        pid = fetcher._workers._workers[0].process.pid
        fetcher.micro_batch(0, 0, 0)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        assert isinstance(fetcher.micro_batch(3, 0, 0)["noise"], Tensor)
