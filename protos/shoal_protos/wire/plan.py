"""A plan on the wire and in the store.

Block maps are run-length encoded, which keeps a plan for 1,000 workers and 65,536 blocks below 1 MiB even where the
owners are half broken up. Reading holds every list to its bounds and every rank to the world;
whether the plan is sound as a whole is `check_plan`'s affair.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from shoal_protos import session_pb2 as pb
from shoal_protos.errors import UserError
from shoal_protos.plan import Fill, Member, Plan, Reason, Recovery, Share
from shoal_protos.wire import bounds

REASONS = {
    pb.REASON_START: Reason.START,
    pb.REASON_KILL: Reason.KILL,
    pb.REASON_JOIN: Reason.JOIN,
    pb.REASON_DRAIN: Reason.DRAIN,
    pb.REASON_SCALE_UP: Reason.SCALE_UP,
    pb.REASON_SCALE_DOWN: Reason.SCALE_DOWN,
    pb.REASON_BALANCE: Reason.BALANCE,
    pb.REASON_RESTORE: Reason.RESTORE,
}
REASON_NUMBERS = {reason: number for number, reason in REASONS.items()}


def plan_to_bytes(plan: Plan) -> bytes:
    """Encode a plan; the same plan gives the same bytes."""
    return write_plan(plan).SerializeToString(deterministic=True)


def plan_from_bytes(data: bytes) -> Plan:
    """The inverse. Raises `UserError` where the bytes are not a plan."""
    try:
        return read_plan(pb.Plan.FromString(data))
    except DecodeError:
        raise UserError(f"{len(data)} bytes are not a plan of this version of Shoal") from None


def write_plan(plan: Plan) -> pb.Plan:
    return pb.Plan(
        generation=plan.generation,
        base=plan.base,
        reason=REASON_NUMBERS[plan.reason],
        lanes=plan.lanes,
        blocks=plan.blocks,
        members=[
            pb.Member(worker=m.worker, incarnation=m.incarnation, address=m.address, coordinate=m.coordinate)
            for m in plan.members
        ],
        shares=[
            pb.Share(
                lanes=share.lanes,
                owned=share.owned.encode(),
                mirrored=share.mirrored.encode(),
                partners=share.partners,
                awaited=share.awaited.encode(),
            )
            for share in plan.shares
        ],
        fills=[pb.Fill(source=fill.source, target=fill.target, blocks=fill.blocks.encode()) for fill in plan.fills],
        fill_blocks_per_step=plan.fill_blocks_per_step,
        builder=plan.builder,
        steps=plan.steps,
        recovery=_write_recovery(plan.recovery) if plan.recovery else None,
        hosts=plan.hosts,
        homes=[pb.Blocks(runs=home.encode()) for home in plan.homes],
        cells=[pb.Cell(ranks=cell) for cell in plan.cells],
    )


def _write_recovery(recovery: Recovery) -> pb.Recovery:
    return pb.Recovery(
        step=recovery.step,
        record=recovery.record,
        counted=recovery.counted,
        stale=[pb.Blocks(runs=stale.encode()) for stale in recovery.stale],
        checkpoint=recovery.checkpoint,
        lanes_in_flight=recovery.lanes_in_flight,
        first_fill_blocks=recovery.first_fill_blocks,
    )


def read_plan(message: pb.Plan) -> Plan:
    """Raises `UserError` where a list, number or text is out of bounds."""
    blocks = bounds.whole("plan.blocks", message.blocks, most=bounds.MAX_BLOCKS)
    lanes = bounds.whole("plan.lanes", message.lanes, most=bounds.MAX_LANES)
    size = len(bounds.few("plan.members", message.members, bounds.MAX_MEMBERS))
    last = max(0, size - 1)
    return Plan(
        generation=bounds.whole("plan.generation", message.generation, least=1),
        base=bounds.whole("plan.base", message.base),
        reason=bounds.word("plan.reason", REASONS, message.reason),
        lanes=lanes,
        blocks=blocks,
        members=tuple(map(_read_member, message.members)),
        shares=tuple(
            _read_share(share, lanes, blocks, last) for share in bounds.few("plan.shares", message.shares, size)
        ),
        fills=tuple(
            _read_fill(fill, last, blocks) for fill in bounds.few("plan.fills", message.fills, bounds.MAX_FILLS)
        ),
        fill_blocks_per_step=bounds.whole("plan.fill_blocks_per_step", message.fill_blocks_per_step),
        builder=bounds.whole("plan.builder", message.builder, most=last),
        steps=message.steps,
        recovery=_read_recovery(message.recovery, size, blocks, lanes) if message.HasField("recovery") else None,
        hosts=tuple(
            bounds.whole("plan.hosts", host, most=last) for host in bounds.few("plan.hosts", message.hosts, size)
        ),
        homes=tuple(
            bounds.runs("plan.homes", home.runs, blocks)
            for home in bounds.few("plan.homes", message.homes, bounds.MAX_COORDINATES)
        ),
        cells=tuple(_read_cell(cell, last) for cell in bounds.few("plan.cells", message.cells, size)),
    )


def _read_member(message: pb.Member) -> Member:
    return Member(
        worker=bounds.name("plan.members.worker", message.worker),
        incarnation=bounds.name("plan.members.incarnation", message.incarnation),
        address=bounds.address("plan.members.address", message.address),
        coordinate=bounds.whole("plan.members.coordinate", message.coordinate, most=bounds.MAX_COORDINATES - 1),
    )


def _read_cell(message: pb.Cell, last: int) -> tuple[int, ...]:
    ranks = bounds.few("plan.cells", message.ranks, bounds.MAX_COORDINATES)
    return tuple(bounds.whole("plan.cells", rank, most=last) for rank in ranks)


def _read_share(message: pb.Share, lanes: int, blocks: int, last: int) -> Share:
    bounds.few("plan.shares.lanes", message.lanes, lanes)
    bounds.few("plan.shares.partners", message.partners, last)
    return Share(
        lanes=tuple(bounds.whole("plan.shares.lanes", lane, most=max(0, lanes - 1)) for lane in message.lanes),
        owned=bounds.runs("plan.shares.owned", message.owned, blocks),
        mirrored=bounds.runs("plan.shares.mirrored", message.mirrored, blocks),
        partners=tuple(bounds.whole("plan.shares.partners", partner, most=last) for partner in message.partners),
        awaited=bounds.runs("plan.shares.awaited", message.awaited, blocks),
    )


def _read_fill(message: pb.Fill, last: int, blocks: int) -> Fill:
    return Fill(
        source=bounds.whole("plan.fills.source", message.source, most=last),
        target=bounds.whole("plan.fills.target", message.target, most=last),
        blocks=bounds.runs("plan.fills.blocks", message.blocks, blocks),
    )


def _read_recovery(message: pb.Recovery, size: int, blocks: int, lanes: int) -> Recovery:
    flights = bounds.few("plan.recovery.lanes_in_flight", message.lanes_in_flight, size)
    return Recovery(
        step=bounds.whole("plan.recovery.step", message.step),
        record=bounds.raw("plan.recovery.record", message.record),
        counted=tuple(bounds.few("plan.recovery.counted", message.counted, size)),
        stale=tuple(
            bounds.runs("plan.recovery.stale", stale.runs, blocks)
            for stale in bounds.few("plan.recovery.stale", message.stale, size)
        ),
        checkpoint=bounds.label("plan.recovery.checkpoint", message.checkpoint),
        lanes_in_flight=tuple(
            bounds.whole("plan.recovery.lanes_in_flight", lane, least=-1, most=max(0, lanes - 1)) for lane in flights
        ),
        first_fill_blocks=bounds.whole("plan.recovery.first_fill_blocks", message.first_fill_blocks),
    )
