"""The wire gives back what was put on it, and answers everything else with one sentence.

Round trips and fuzzing by hypothesis; inputs that attack are files in tests/attacks/wire: which side reads it, the
message (protobuf text, or `hex:`), the sentence that it must get.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import holds
from shoal_protos import session_pb2 as pb
from shoal_protos import wire
from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport, UnreadableCheckpoint
from shoal_protos.description import Description, Parameter
from shoal_protos.errors import UserError
from shoal_protos.gpu import ALL_THROTTLES, MOST_GPUS, Gpu, Throttle
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    Ask,
    AskKind,
    AskSeat,
    Change,
    Drain,
    Ending,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Open,
    Ping,
    PlanMessage,
    Prepare,
    Ready,
    Refusal,
    Request,
    RequestKind,
    Result,
    Seat,
    SessionToken,
    Shutdown,
    Status,
    Telemetry,
    ToController,
    ToWorker,
    Welcome,
)
from shoal_protos.plan import Fill, Member, Plan, Reason, Recovery, Share
from shoal_protos.runs import NO_BLOCKS, Runs, every
from shoal_protos.shape import Shape
from shoal_protos.wire import bounds

ROOT = Path(__file__).parents[2]
ATTACKS = sorted((ROOT / "tests/attacks/wire").glob("*.txt"))
BLOCKS = 40
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of the wire."""

numbers = st.integers(0, bounds.MAX_NUMBER)
positive = st.integers(1, bounds.MAX_NUMBER)
steps = st.integers(-1, bounds.MAX_NUMBER)
seconds = st.floats(0, bounds.MAX_SECONDS)
losses = st.none() | st.floats(allow_nan=False)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
labels = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=20)
texts = labels | st.just("two\nlines\tof text")
addresses = st.sampled_from(["10.0.0.7:29500", "localhost:1", "[::1]:65535", "w0.train.svc:7071"])
runs = st.sets(st.integers(0, BLOCKS - 1)).map(Runs.of)
records = st.binary(max_size=50)

references = st.builds(CheckpointRef, generation=numbers, step=numbers, path=labels, bytes=numbers)
statuses = st.builds(
    Status, sequence=numbers, generation=numbers, state=st.sampled_from(MemberState), promised=numbers, step=steps,
    committed_in=numbers, boundaries=numbers, holds=runs,
    broken=st.lists(names, max_size=3).map(tuple), done=st.booleans(), ended=st.booleans(), drain=st.booleans(),
    checkpoint=st.none() | references,
    unreadable_checkpoint=st.none() | st.builds(UnreadableCheckpoint, path=labels, sentence=texts),
)  # fmt: skip
parameters = st.builds(
    Parameter, name=labels, shape=st.lists(numbers, max_size=4).map(tuple), dtype=labels, group=st.integers(-1, 99)
)
in_one_process = st.builds(
    Description, lanes=st.integers(1, bounds.MAX_LANES), blocks=st.just(BLOCKS), block_elements=numbers,
    state_bytes=numbers, mirrors=st.integers(0, 1 << 30),
    mirror_partners=st.integers(1, bounds.MAX_PARTNERS), fill_bytes_per_step=numbers, max_steps=numbers,
    parameters=st.lists(parameters, max_size=3).map(tuple), optimizer=labels,
    config=st.dictionaries(labels, texts, max_size=3), numerics=st.dictionaries(labels, texts, max_size=3),
    mixed_numerics=st.booleans(), can_checkpoint=st.booleans(), keep=numbers, keep_every=numbers,
    samples_per_step=numbers, stage=st.integers(0, 3),
    min_workers=st.integers(0, bounds.MAX_LANES), max_workers=st.integers(0, bounds.MAX_LANES),
    checkpoint_places=st.lists(labels, max_size=2).map(tuple), checkpoint_marks=st.lists(labels, max_size=3).map(tuple),
)  # fmt: skip
PAIRS = {
    "cell": Shape(tensor=2, tight=("tensor",)),
    "homes": (Runs(((0, 30),)), Runs(((30, BLOCKS),))),
    "models": (Runs(((0, 40),)), Runs(((20, BLOCKS),))),
}
descriptions = st.builds(lambda made_of, cell: replace(made_of, **cell), in_one_process, st.sampled_from([{}, PAIRS]))
changes = st.builds(
    Change, generation=numbers, from_step=numbers, pause_seconds=seconds,
    phases=st.dictionaries(names, seconds, max_size=3), promoted_blocks=numbers, pause_bytes=numbers,
    checkpoint_bytes=numbers,
)  # fmt: skip
saves = st.builds(
    SaveReport, number=numbers, step=numbers, outcome=st.sampled_from(SaveOutcome), path=labels, bytes=numbers,
    copy_seconds=seconds, write_seconds=seconds, commit_seconds=seconds, why=texts,
)  # fmt: skip
gpus = st.builds(
    Gpu, name=labels.map(lambda text: " ".join(text.split())), index=st.integers(0, MOST_GPUS - 1),
    use_ratio=st.none() | st.floats(0, 1), memory_bytes=st.none() | st.integers(0, 1 << 50),
    memory_total_bytes=st.none() | st.integers(0, 1 << 50),
    celsius=st.none() | st.floats(0, 200), throttled=st.none() | st.integers(0, ALL_THROTTLES).map(Throttle), why=texts,
)  # fmt: skip
telemetries = st.builds(
    Telemetry, loss=losses, step_seconds=seconds, step_seconds_median=seconds,
    training_seconds=seconds, fill_bytes=numbers,
    memory_bytes=st.dictionaries(names, numbers, max_size=3), changes=st.lists(changes, max_size=2).map(tuple),
    saves=st.lists(saves, max_size=2).map(tuple), skipped_folders=texts, changed_values=texts,
    skipped_micro_batches=numbers, not_finite_steps=numbers, not_finite=texts, state_file_bytes_per_second=numbers,
    reports=st.dictionaries(labels.map(lambda text: " ".join(text.split())), seconds, max_size=3),
    void_lanes=numbers, cell_wait_seconds=seconds, gpu=st.none() | gpus, lane_seconds=seconds,
)  # fmt: skip
from_worker = st.one_of(
    st.builds(
        Hello, version=st.just(PROTOCOL_VERSION), job=names, worker=names | st.just(""), incarnation=names,
        address=addresses, host=labels, pid=positive, domain=labels, description=descriptions, status=statuses,
        next_generation=numbers, release=labels,
    ).map(lambda hello: replace(hello, coordinate=hello.description.cell.processes - 1)),
    st.builds(
        AskSeat, job=names, worker=names | st.just(""), incarnation=names, host=labels, pid=positive,
        cell=st.builds(Shape, tensor=st.integers(1, 8), pipeline=st.integers(1, 8), expert=st.integers(1, 8)),
        run=names | st.just(""), wish=st.integers(-1, 1023),
    ),
    st.builds(Heartbeat, status=statuses, telemetry=telemetries, echo=numbers),
    st.builds(Ready, generation=positive, status=statuses),
    st.builds(
        Inventory, answers=positive, generation=numbers, step=steps, committed_in=numbers, record=records, holds=runs,
        pending=runs, current=runs, lane=st.integers(-1, bounds.MAX_LANES - 1),
    ),
    st.builds(Request, kind=st.sampled_from(RequestKind), grace_seconds=seconds, generation=numbers),
    st.builds(
        Result, step=steps, fingerprint=names | st.just(""), loss=losses, failure=texts, everyone=st.booleans(),
        generation=numbers,
    ),
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan within bounds, sound or not."""
    size, lanes = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    ranks = st.integers(0, size - 1)

    def each(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
        return st.lists(strategy, min_size=size, max_size=size).map(tuple)

    lane_sets = st.sets(st.integers(0, lanes - 1)).map(sorted).map(tuple)
    partners = st.lists(st.integers(0, size - 1), max_size=size - 1).map(tuple)
    shares = st.builds(Share, lanes=lane_sets, owned=runs, mirrored=runs, partners=partners, awaited=runs)
    recoveries = st.builds(
        Recovery, step=numbers, record=records, counted=each(st.booleans()), stale=each(runs), checkpoint=labels,
        lanes_in_flight=st.just(()) | each(st.integers(-1, lanes - 1)), first_fill_blocks=numbers,
    )  # fmt: skip
    fills = st.lists(st.builds(Fill, source=ranks, target=ranks, blocks=runs), max_size=4).map(tuple)
    members = st.builds(Member, names, names, addresses, st.integers(0, bounds.MAX_COORDINATES - 1))
    homes, cells = st.lists(runs, max_size=3), st.lists(st.lists(ranks, max_size=4).map(tuple), max_size=size)
    return draw(
        st.builds(
            Plan, generation=positive, base=numbers, reason=st.sampled_from(Reason), lanes=st.just(lanes),
            blocks=st.just(BLOCKS), members=each(members), shares=each(shares),
            fills=fills, fill_blocks_per_step=numbers, builder=ranks, steps=st.booleans(),
            recovery=st.none() | recoveries, hosts=st.just(()) | each(ranks),
            homes=homes.map(tuple), cells=cells.map(tuple),
        )
    )  # fmt: skip


from_controller = st.one_of(
    st.builds(
        Welcome,
        names,
        st.floats(bounds.LEAST_HEARTBEAT_SECONDS, bounds.MAX_SECONDS),
        seconds,
        seconds,
        numbers,
        st.sampled_from(["", '"latest"', "12", "false"]),
        runs,
        checkpoint=labels,
        checkpoint_marks=st.lists(labels, max_size=3).map(tuple),
    ),
    st.builds(Seat, names, st.integers(0, 1023)),
    st.builds(SessionToken, st.sampled_from(["join:a:b:c", "x"]), seconds),
    st.builds(Ping, numbers, numbers),
    st.builds(Prepare, positive),
    st.builds(PlanMessage, plans()),
    st.builds(Open, positive),
    st.builds(Ask, st.sampled_from(AskKind), numbers, numbers),
    st.builds(Drain, seconds, numbers),
    st.builds(Shutdown, st.sampled_from(Ending), texts, numbers),
    st.builds(Refusal, texts, st.booleans(), numbers),
)


@patient
@given(from_worker)
def test_what_a_worker_says_is_what_the_controller_hears(message: ToController) -> None:
    assert wire.decode_worker(wire.encode_worker(message), BLOCKS) == message


@patient
@given(from_controller)
def test_what_the_controller_says_is_what_a_worker_hears(message: ToWorker) -> None:
    assert wire.decode_controller(wire.encode_controller(message)) == message


@patient
@given(plans())
def test_a_plan_survives_its_bytes_and_gives_the_same_bytes_again(plan: Plan) -> None:
    data = wire.plan_to_bytes(plan)
    assert wire.plan_from_bytes(data) == plan
    assert wire.plan_to_bytes(wire.plan_from_bytes(data)) == data


def test_a_plan_of_a_shape_of_one_process_has_no_field_of_cells_in_its_bytes() -> None:
    member = Member("w0", "a", "h:1")
    plan = Plan(1, 0, Reason.START, 1, 4, (member,), (Share((0,), every(4)),), (), 1, 0, True)
    message = pb.Plan.FromString(wire.plan_to_bytes(plan))
    assert not {field.name for field, _ in message.ListFields()} & {"homes", "cells"}
    assert [field.name for field, _ in message.members[0].ListFields()] == ["worker", "incarnation", "address"]


READERS: tuple[Callable[[bytes], object], ...] = (wire.decode_worker, wire.decode_controller, wire.plan_from_bytes)


def _hears_a_sentence(read: Callable[[bytes], object], data: bytes) -> None:
    """Any bytes are a message, or get one clear sentence. Whatever else is raised fails the test."""
    try:
        read(data)
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error) and len(str(error)) < 1500


@given(st.binary(max_size=200))
def test_random_bytes_get_a_sentence_and_nothing_else(data: bytes) -> None:
    for read in READERS:
        _hears_a_sentence(read, data)


def test_a_figure_of_a_gpu_that_cannot_be_is_left_out_and_its_message_is_read() -> None:
    status = Status(9, 3, MemberState.TRAINING, 0, 12, 3)
    for wrong in (
        {"use_ratio": 1.01}, {"use_ratio": math.nan}, {"celsius": -5.0}, {"celsius": float((1 << 32) - 5)},
        {"celsius": math.inf}, {"memory_bytes": (1 << 64) - 1}, {"memory_total_bytes": (1 << 64) - 1},
        {"throttled": 16},
    ):  # fmt: skip
        right = {"use_ratio": 0.5, "memory_bytes": 5, "memory_total_bytes": 10, "celsius": 71.0, "throttled": 2}
        data = wire.encode_worker(Heartbeat(status, Telemetry()))
        message = pb.WorkerMessage.FromString(data)
        for name, value in (right | wrong).items():
            setattr(message.heartbeat.telemetry.gpu, name, value)
        read = wire.decode_worker(message.SerializeToString())
        assert isinstance(read, Heartbeat) and read.telemetry.gpu is not None
        figures = {name: getattr(read.telemetry.gpu, name) for name in right}
        assert figures == right | dict.fromkeys(wrong), wrong


@settings(max_examples=examples(150))
@given(st.one_of(from_worker.map(wire.encode_worker), from_controller.map(wire.encode_controller)), st.data())
def test_a_message_with_some_bytes_changed_gets_a_sentence_and_nothing_else(data: bytes, draw: st.DataObject) -> None:
    garbled = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        if garbled:
            garbled[draw.draw(st.integers(0, len(garbled) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(garbled)))
    for read in READERS:
        _hears_a_sentence(read, bytes(garbled))
        _hears_a_sentence(read, bytes(garbled[:cut]))


@holds("Whatever a field of a")
@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: path.stem)
def test_an_attack_gets_its_sentence(path: Path) -> None:
    side, message, sentence = (part.strip() for part in path.read_text().split("---"))
    read, form = {
        "worker": (wire.decode_worker, pb.WorkerMessage()),
        "controller": (wire.decode_controller, pb.ControllerMessage()),
    }[side]
    if message.startswith("hex:"):
        data = bytes.fromhex(message.removeprefix("hex:"))
    else:
        data = text_format.Parse(message.replace("NOW", str(PROTOCOL_VERSION)), form).SerializeToString()
    with pytest.raises(UserError) as raised:
        read(data)
    assert str(raised.value) == sentence


def test_there_are_attacks() -> None:
    assert len(ATTACKS) >= 25


HELLO = Hello(
    version=PROTOCOL_VERSION, job="demo", worker="w0", incarnation="a1", address="127.0.0.1:29500", host="here",
    pid=1, domain="here", description=Description(8, BLOCKS, 4096, 1, 1, 0, 10, (), "AdamW", {}, {}, False, False),
    status=Status(1, 0, MemberState.WARMING_UP, 0, -1, 0),
)  # fmt: skip


def _numbered_parameters(count: int) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"p{number}", (1,), "float32", 0) for number in range(count))


def test_lists_and_texts_beyond_their_bounds_are_refused_by_name() -> None:
    described = HELLO.description
    too_long = {
        "hello.host has 1025 characters": replace(HELLO, host="h" * 1025),
        "description.parameters has 262145 entries": replace(
            HELLO, description=replace(described, parameters=_numbered_parameters(bounds.MAX_PARAMETERS + 1))
        ),
        "description.config has 16385 entries": replace(
            HELLO, description=replace(described, config={f"key{n}": "" for n in range(bounds.MAX_ENTRIES + 1)})
        ),
        "description.config.seed has 65537 characters": replace(
            HELLO, description=replace(described, config={"seed": "9" * (bounds.VALUE_CHARACTERS + 1)})
        ),
        "inventory.record has 1048577 bytes": Inventory(
            1, 1, 1, 1, bytes(bounds.RECORD_BYTES + 1), NO_BLOCKS, NO_BLOCKS, NO_BLOCKS
        ),
    }
    for start, message in too_long.items():
        with pytest.raises(UserError, match=f"^{start}; at most"):
            wire.decode_worker(wire.encode_worker(message))


def test_a_block_beyond_what_the_stream_s_hello_told_is_refused() -> None:
    data = wire.encode_worker(Ready(1, replace(HELLO.status, holds=Runs(((0, BLOCKS),)))))
    assert wire.decode_worker(data, BLOCKS) == wire.decode_worker(data)
    with pytest.raises(UserError, match=r"^status.holds: block runs reach block 39; the job has 39 blocks"):
        wire.decode_worker(data, BLOCKS - 1)


def test_text_for_people_is_made_readable_when_it_is_written() -> None:
    failure = "Boom\x1b[31m \udcff\n" + "x" * 100_000 + "\nValueError: the last line"
    decoded = wire.decode_worker(wire.encode_worker(Result(3, failure=failure)))
    assert isinstance(decoded, Result)
    assert len(decoded.failure) == bounds.TEXT_CHARACTERS
    assert decoded.failure.startswith("Boom\N{REPLACEMENT CHARACTER}[31m ?\n")
    assert decoded.failure.endswith("\nValueError: the last line")


def _plan_of_a_thousand(rng: random.Random, workers: int = 1000, blocks: int = 65536) -> Plan:
    """After many changes: owners half broken up, mirrors spread over all others, a tenth of the owners being copied."""
    owned: list[list[int]] = [[] for _ in range(workers)]
    mirrored: list[list[int]] = [[] for _ in range(workers)]
    for block in range(blocks):
        owner = block * workers // blocks if rng.random() < 0.5 else rng.randrange(workers)
        owned[owner].append(block)
        mirrored[(owner + rng.randrange(1, workers)) % workers].append(block)
    sent: dict[tuple[int, int], list[int]] = {}
    for source in range(workers // 10):
        for block in owned[source]:
            target = (source + rng.randrange(1, workers)) % workers
            if block not in mirrored[target]:
                sent.setdefault((source, target), []).append(block)
    members = (
        Member(f"w{n}", f"{rng.getrandbits(128):032x}", f"host-{n}.train.svc:{40000 + n}") for n in range(workers)
    )
    return Plan(
        generation=77, base=0, reason=Reason.KILL, lanes=workers, blocks=blocks, members=tuple(members),
        shares=tuple(Share((n,), Runs.of(owned[n]), Runs.of(mirrored[n])) for n in range(workers)),
        fills=tuple(Fill(source, target, Runs.of(some)) for (source, target), some in sent.items()),
        fill_blocks_per_step=8, builder=1, steps=True,
        recovery=Recovery(
            1_000_000, rng.randbytes(20_000), (True,) * workers, (NO_BLOCKS,) * workers,
            lanes_in_flight=tuple(range(workers)),
        ),
        hosts=tuple(n // 8 for n in range(workers)),
    )  # fmt: skip


def test_a_plan_for_a_thousand_workers_and_65536_blocks_fits_in_one_mebibyte() -> None:
    plan = _plan_of_a_thousand(random.Random(3))
    data = wire.encode_controller(PlanMessage(plan))
    assert len(plan.fills) > 5000
    assert len(data) <= 1 << 20
    assert wire.decode_controller(data) == PlanMessage(plan)


def test_the_generated_code_is_what_the_proto_files_say() -> None:
    command = [sys.executable, str(ROOT / "protos/generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
