"""Checkpoints on the wire: what a worker knows of them, and how its saves went."""

from __future__ import annotations

from shoal_protos import session_pb2 as pb
from shoal_protos.checkpoint import Damage, Saved, SaveOutcome, Sighting
from shoal_protos.wire import bounds

OUTCOMES = {
    pb.SAVE_OUTCOME_DONE: SaveOutcome.DONE,
    pb.SAVE_OUTCOME_FAILED: SaveOutcome.FAILED,
    pb.SAVE_OUTCOME_SKIPPED: SaveOutcome.SKIPPED,
}
OUTCOME_NUMBERS = {outcome: number for number, outcome in OUTCOMES.items()}


def write_sighting(sighting: Sighting) -> pb.Sighting:
    return pb.Sighting(
        generation=sighting.generation,
        step=sighting.step,
        path=sighting.path,
        bytes=sighting.bytes,
        run=sighting.run,
        verified=sighting.verified,
    )


def read_sighting(message: pb.Sighting) -> Sighting:
    return Sighting(
        generation=bounds.whole("checkpoint.generation", message.generation),
        step=bounds.whole("checkpoint.step", message.step),
        path=bounds.label("checkpoint.path", message.path),
        bytes=bounds.whole("checkpoint.bytes", message.bytes),
        run=message.run and bounds.name("checkpoint.run", message.run),
        verified=message.verified,
    )


def write_damage(damage: Damage) -> pb.Damage:
    return pb.Damage(path=damage.path, sentence=bounds.readable(damage.sentence))


def read_damage(message: pb.Damage) -> Damage:
    return Damage(
        path=bounds.label("damage.path", message.path), sentence=bounds.text("damage.sentence", message.sentence)
    )


def write_saved(saved: Saved) -> pb.Saved:
    return pb.Saved(
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


def read_saved(message: pb.Saved) -> Saved:
    return Saved(
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
