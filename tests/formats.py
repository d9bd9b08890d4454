"""What Shoal writes for other processes and later releases, as listings: `python tests/formats.py` (`make formats`).

Each format has a number, by which two releases tell each other apart. The listings lie in `tests/unit/frozen/formats`;
`unit/test_formats.py` fails where a format has changed and its listing has not, and where it differs from what a
release had under the same number (`released.txt`). CONTRIBUTING.md, "Numbers of formats", has the rule.
`python tests/formats.py --release 0.1.0` adds what is here to `released.txt`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel

FOLDER = Path(__file__).parent / "unit" / "frozen" / "formats"
RELEASED = FOLDER / "released.txt"
COMMAND = "make formats"
KINDS = {number: name[5:].lower() for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
"""Types of fields in protobuf, by their numbers."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format, as the code has it."""

    name: str
    title: str
    """As a sentence names it."""
    number: int
    where: str
    """Where its number stands."""
    lines: tuple[str, ...]

    @property
    def file(self) -> Path:
        """Its listing."""
        return FOLDER / f"{self.name}.txt"

    @property
    def listing(self) -> str:
        """The text of its file."""
        return "\n".join((f"number {self.number}", *self.lines, ""))

    @property
    def digest(self) -> str:
        """Of its content, whatever its number is."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Released:
    """What a release had under a number."""

    release: str
    name: str
    number: int
    digest: str

    @property
    def line(self) -> str:
        """As it stands in the file."""
        return f"{self.release} {self.name} {self.number} {self.digest}"


def fault(found: Format, listing: str, released: Sequence[Released]) -> str:
    """What is to be done about a format, in one sentence; empty where its listing and its number are right."""
    past = [one for one in released if one.name == found.name]
    highest = max(past, key=lambda one: one.number, default=None)
    taken = highest is not None and (
        found.number < highest.number or (found.number == highest.number and found.digest != highest.digest)
    )
    if highest is not None and taken:
        return (
            f"{found.title} differs from that of release {highest.release}, which has number {highest.number}: raise "
            f"{found.where} to {highest.number + 1}, then run `{COMMAND}`."
        )
    if listing != found.listing:
        return (
            f"{found.title} is not as {found.file.name} lists it (first: {_first_difference(listing, found.listing)}), "
            f"and no release has its number, {found.number}: run `{COMMAND}`, and look at what has changed."
        )
    return ""


def _first_difference(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    lost, come = [line for line in old if line not in new], [line for line in new if line not in old]
    return "; ".join(f"{sign} {lines[0]}" for sign, lines in (("-", lost), ("+", come)) if lines) or "another order"


def read_released() -> list[Released]:
    """All that was released, as the file has it."""
    rows = [line.split() for line in RELEASED.read_text().splitlines() if line and not line.startswith("#")]
    return [Released(release, name, int(number), digest) for release, name, number, digest in rows]


def formats() -> list[Format]:
    """All formats, as the code has them. What they are made of is imported here: that takes torch."""
    from shoal.checkpoint import manifest
    from shoal.core import layout
    from shoal.exchange.world import PEER_FORM
    from shoal_controller.jobs import records
    from shoal_protos.messages import PROTOCOL_VERSION

    return [
        Format(
            "session", "what workers and the controller say to each other", PROTOCOL_VERSION,
            "PROTOCOL_VERSION in protos/shoal_protos/messages.py", tuple(_session()),
        ),
        Format(
            "peers", "what workers send each other", PEER_FORM, "PEER_FORM in worker/shoal/exchange/world.py",
            tuple(_peers()),
        ),
        Format(
            "store", "what the controller keeps in its store", records.FORMAT,
            "FORMAT in controller/shoal_controller/jobs/records.py", tuple(_store()),
        ),
        Format(
            "manifest", "what stands in a checkpoint", manifest.VERSION,
            "VERSION in worker/shoal/checkpoint/manifest.py", tuple(_checkpoint()),
        ),
        Format(
            "layout", "how parameters lie in blocks", layout.VERSION, "VERSION in worker/shoal/core/layout.py",
            tuple(_layout()),
        ),
    ]  # fmt: skip


# ---- the session


def _session() -> Iterator[str]:
    from shoal_controller.access.worker_tokens import WorkerTokens
    from shoal_controller.core.machine.events import Proof
    from shoal_controller.launchers.launcher import SET_IN_PODS
    from shoal_protos import channel, session_pb2

    yield f"method {channel.METHOD}, header {channel.SESSION_TOKEN}"
    tokens = WorkerTokens("secret")
    yield f"token {tokens.join('job', 'run')}"
    yield f"token {tokens.session(Proof('job', 'run', 'w0', 'a1'), 1.0)}"
    yield f"variables {', '.join(sorted(SET_IN_PODS))}"
    for message in session_pb2.DESCRIPTOR.message_types_by_name.values():
        yield from _message(message)
    for enum in session_pb2.DESCRIPTOR.enum_types_by_name.values():
        yield f"{enum.name}: {', '.join(f'{value.number} {value.name}' for value in enum.values)}"


def _message(message: Any) -> Iterator[str]:
    yield f"{message.name}:"
    for field in sorted(message.fields, key=lambda field: field.number):
        inner = field.message_type or field.enum_type
        kind = inner.name if inner is not None else KINDS[field.type]
        repeated = "repeated " if field.is_repeated else ""
        yield f"  {field.number} {field.name}: {repeated}{kind}"
    for nested in message.nested_types:
        yield from _message(nested)


# ---- peers


def _peers() -> Iterator[str]:
    from shoal.blocks import shared_weights
    from shoal.checkpoint import fingerprint
    from shoal.core.stream_position import Bookmark
    from shoal.exchange import ballot, traffic, vote
    from shoal.group import asked_order, group, host_peers
    from shoal.process import deaths, unnamed_memory
    from shoal.state import small_state
    from shoal_protos.rendezvous import entry

    yield from shape(ballot.Ballot, vote.Record)
    request = ballot.Request("save", "path", 1, 2)
    cast = ballot.Ballot(3, 4, "hyper", [0.5], {"loss": [0.25]}, evaluations={"accuracy": [1.0, 2.0]}, saving="saving")
    yield f"ballot {_hex(cast.to_bytes())}"
    yield f"request {_hex(ballot.Ballot(3, 4, '', requests=(request,)).to_bytes()[-60:])}"
    record = vote.Record(3, (4,), 0.5, None, {"loss": 0.25}, {}, (request,), ("hyper",))
    yield f"record {record.to_bytes().decode()}"
    yield f"row {vote.BALLOT_BYTES} and {vote.SUBTREE_BYTES} bytes"
    named = {
        name: value for name, value in vars(traffic).items() if name.isupper() and type(value) is int and value >= 0
    }
    yield f"tags {', '.join(f'{value} {name}' for name, value in sorted(named.items(), key=lambda one: one[1]))}"
    yield f"tags from {group.RESERVED_TAGS}, gathering {group.GATHER_TAG}"
    yield f"frame {_frames()}"
    yield f"digests {fingerprint.ENTRY.format}, in order {fingerprint.ENTRY.pack(1, 64).hex()}"
    yield f"fill {_fill_head()}"
    fields = [*small_state.FIELDS, *(f"{name} (optional)" for name in small_state.OPTIONAL)]
    yield f"small state {small_state.LENGTH.format}: {', '.join(sorted(fields))}"
    yield f"place in a stream {Bookmark(1, 2, 3, 4, 5, 'state').to_text()}"
    yield f"rendezvous {entry('key', b'value').hex()}"
    memory = (unnamed_memory.ADDRESS, host_peers.ANNOUNCED, host_peers.PLACE, shared_weights.KEY, shared_weights.PAGE)
    for struct in memory:
        yield f"memory {struct.format}"
    yield f"life: mark at {deaths.MARK_AT} (by itself {deaths.ENDS_BY_ITSELF.hex()}), mutex at {deaths.MUTEX_AT}"
    yield f"order of posts: {asked_order.NUMBERS} numbers, tags {asked_order.POSTED_TAG}, {asked_order.CARRY_TAG}"


def _hex(content: bytes) -> str:
    return f"{len(content)} bytes {content.hex()}"


def _frames() -> str:
    """A framed message as it is sent."""
    import torch
    from shoal.exchange.packing import FramedSend

    sent: list[str] = []

    class Sending:
        def send(self, message: torch.Tensor, to: int, tag: int) -> None:
            sent.append(f"{message.dtype} {message.tolist()} with tag {tag}")

    FramedSend(Sending(), 1, 7, b"ab")  # type: ignore[arg-type]
    return ", ".join(sent)


def _fill_head() -> str:
    import torch
    from shoal.core.layout import Stretch
    from shoal.exchange.fill_slices import head_of

    return head_of({Stretch(1, 2, 3): {"exp_avg": torch.zeros(2), "step": torch.tensor(4.0)}}).decode()


# ---- the store


def _store() -> Iterator[str]:
    from shoal_controller.access import token_register
    from shoal_controller.core.machine import stored_form
    from shoal_controller.core.machine.durable import Durable
    from shoal_controller.jobs import records
    from shoal_controller.launchers.process_records import ProcessRecord
    from shoal_controller.leadership import election, introductions
    from shoal_controller.store import database

    keys = [records.head_key("job"), records.record_key("job", "workers/w0", 1, 2), records.event_key("job", 3)]
    yield f"keys {', '.join([*keys, records.audit_key('job', 4), token_register.PREFIX, introductions.KEY])}"
    yield f"keys {', '.join([election.PLACES, election.LEADER, election.TERM])}"
    yield f"record {records.packed('text').hex()}"
    yield f"rooms {stored_form.PLANS}, {stored_form.WORKERS}, {stored_form.RESIZES}"
    yield f"records {', '.join(sorted(stored_form.FIELDS))}"
    yield f"tokens' format {token_register.FORMAT}, files' format {database.FORMAT}"
    yield from (line.strip() for line in database.TABLES.strip().splitlines())
    yield from shape(
        records.Head, records.JobEvent, Durable, token_register.NamedToken, election.ControllerPlace, ProcessRecord
    )


# ---- a checkpoint


def _checkpoint() -> Iterator[str]:
    from shoal.checkpoint import manifest
    from shoal.checkpoint.catalogue import SaveName
    from shoal.core import plain
    from shoal.core.sampler import Sampler
    from shoal.exchange.vote import Record

    yield f"folder {SaveName.of(12, 3, 1, 'a1', 'run').folder}, file {manifest.MANIFEST}"
    yield f"buffers {manifest.buffer_tensor('mean')}, {manifest.buffer_tensor('mean', 1)}"
    yield f"seal {manifest.sealed(b'{' + b' ' * 79).decode()}"
    yield f"checksum {manifest.checksum(b'content').hex()}"
    values = {"a": (1, 2.5, float("inf")), 3: {b"b"}, "d": {"e": None, "f": [True, "text"]}}
    yield f"values {json.dumps(plain.encode(values, {}, 'values'))}"
    order = Sampler(samples=50, lanes=2, micro_batch_size=3, micro_batches_per_lane=2, seed=7)
    for step in (0, 9):
        yield f"samples of step {step}, lane 1: {order.indices(step, 1, 1)}"
    yield from shape(manifest.Manifest, Record)


# ---- the layout


def _layout() -> Iterator[str]:
    import torch
    from shoal.checkpoint.fingerprint import digest_of_buffers, digests_of, total_of
    from shoal.core.laying_out import lay_out
    from shoal.core.layout import FROZEN, Trainable
    from shoal.core.misses import Misses

    model = [
        Trainable("embedding.weight", (96, 64), torch.float32, 0),
        Trainable("first.weight", (64, 64), torch.bfloat16, 1, 1),
        Trainable("first.bias", (65,), torch.float32, 1, 1),
        Trainable("second.weight", (70, 64), torch.float32, 0, 2),
        Trainable("head.weight", (10, 64), torch.float32, FROZEN),
    ]
    layout = lay_out(model, bucket_bytes=1 << 15)
    yield from layout.text().splitlines()
    for bucket in layout.buckets:
        yield f"numbers of bucket {bucket.index}: {list(layout.numbers_of(layout.whole(bucket)))}"
    digests: dict[int, bytes] = {}
    for bucket in layout.trained.buckets:
        values = (torch.arange(bucket.elements) % 7).to(bucket.dtype)
        state = (torch.arange(bucket.elements) % 5).float(), torch.tensor(2.0)
        digests.update(digests_of(layout.trained, layout.trained.whole(bucket), (values, *state)))
    buffers = digest_of_buffers({"mean": torch.ones(2)})
    yield f"fingerprint {total_of(3, layout.trained, digests, [buffers], Misses(()))}"


# ---- classes as lines


def shape(*kinds: type) -> Iterator[str]:
    """The fields of dataclasses and models, and of all that they are made of."""
    seen: dict[type, None] = dict.fromkeys(kinds)
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop(0)
        lines, others = _one_shape(kind)
        yield from lines
        for other in others:
            if other not in seen:
                seen[other] = None
                waiting.append(other)


def _one_shape(kind: type) -> tuple[list[str], list[type]]:
    if issubclass(kind, Enum):
        return [f"{kind.__name__}: {', '.join(str(one.value) for one in kind)}"], []
    hints = get_type_hints(kind)
    names = list(kind.model_fields) if issubclass(kind, BaseModel) else [field.name for field in fields(kind)]
    others: list[type] = []
    lines = [f"  {name}: {_named(hints[name], others.append)}" for name in names]
    return [f"{kind.__name__}:", *lines], others


def _named(hint: Any, note: Callable[[type], None]) -> str:
    """A type as text; classes that have a shape of their own are noted."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Union, UnionType):
        return " | ".join(_named(part, note) for part in parts)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_named(part, note) for part in parts)}]"
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel | Enum)):
        note(hint)
    return "..." if hint is Ellipsis else getattr(hint, "__name__", str(hint))


def main(arguments: list[str]) -> int:
    """Write the listings; with `--release NUMBER`, also that a release has them."""
    found = formats()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in found:
        one.file.write_text(one.listing)
    if arguments[:1] == ["--release"] and len(arguments) == 2:
        lines = [Released(arguments[1], one.name, one.number, one.digest).line for one in found]
        RELEASED.write_text("\n".join((RELEASED.read_text().rstrip("\n"), *lines, "")))
    elif arguments:
        print("usage: python tests/formats.py [--release NUMBER]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
