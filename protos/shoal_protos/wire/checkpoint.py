"""Checkpoints on the wire: what a worker knows of them, and how its saves went."""

from __future__ import annotations

from shoal_protos import session_pb2 as pb
from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport, UnreadableCheckpoint
from shoal_protos.wire import bounds

OUTCOMES = {
    pb.SAVE_OUTCOME_DONE: SaveOutcome.DONE,
    pb.SAVE_OUTCOME_FAILED: SaveOutcome.FAILED,
    pb.SAVE_OUTCOME_SKIPPED: SaveOutcome.SKIPPED,
}
OUTCOME_NUMBERS = {outcome: number for number, outcome in OUTCOMES.items()}


def write_checkpoint_ref(ref: CheckpointRef) -> pb.CheckpointRef:
    return pb.CheckpointRef(
        generation=ref.generation,
        step=ref.step,
        path=ref.path,
        bytes=ref.bytes,
        run=ref.run,
        verified=ref.verified,
    )


def read_checkpoint_ref(message: pb.CheckpointRef) -> CheckpointRef:
    return CheckpointRef(
        generation=bounds.whole("checkpoint.generation", message.generation),
        step=bounds.whole("checkpoint.step", message.step),
        path=bounds.label("checkpoint.path", message.path),
        bytes=bounds.whole("checkpoint.bytes", message.bytes),
        run=message.run and bounds.name("checkpoint.run", message.run),
        verified=message.verified,
    )


def write_unreadable(unreadable: UnreadableCheckpoint) -> pb.UnreadableCheckpoint:
    return pb.UnreadableCheckpoint(path=unreadable.path, sentence=bounds.readable(unreadable.sentence))


def read_unreadable(message: pb.UnreadableCheckpoint) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(
        path=bounds.label("unreadable.path", message.path),
        sentence=bounds.text("unreadable.sentence", message.sentence),
    )


def write_save_report(saved: SaveReport) -> pb.SaveReport:
    return pb.SaveReport(
        number=saved.number,
        step=saved.step,
        outcome=OUTCOME_NUMBERS[saved.outcome],
        path=saved.path,
        bytes=saved.bytes,
        copy_seconds=saved.copy_seconds,
        write_seconds=saved.write_seconds,
        commit_seconds=saved.commit_seconds,
        why=bounds.readable(saved.why),
    )


def read_save_report(message: pb.SaveReport) -> SaveReport:
    return SaveReport(
        number=bounds.whole("saved.number", message.number),
        step=bounds.whole("saved.step", message.step),
        outcome=bounds.word("saved.outcome", OUTCOMES, message.outcome),
        path=bounds.label("saved.path", message.path),
        bytes=bounds.whole("saved.bytes", message.bytes),
        copy_seconds=bounds.seconds("saved.copy_seconds", message.copy_seconds),
        write_seconds=bounds.seconds("saved.write_seconds", message.write_seconds),
        commit_seconds=bounds.seconds("saved.commit_seconds", message.commit_seconds),
        why=bounds.text("saved.why", message.why),
    )
