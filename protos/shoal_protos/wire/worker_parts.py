"""Parts of a worker's messages on the wire: what it does, what it knows of checkpoints, and the job that it describes.

`worker.py` writes and reads the messages. Reading raises `UserError` for a value that is out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_protos import session_pb2 as pb
from shoal_protos.activity import MOST_NAMED, Activity, StepPhase
from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport, UnreadableCheckpoint
from shoal_protos.corruption import OnCorruption
from shoal_protos.description import HIGHEST_STAGE, Description, OnSlow, Parameter
from shoal_protos.errors import UserError
from shoal_protos.plan import DEFAULT_MIRROR_PARTNERS, EVERYONE
from shoal_protos.runs import Runs, every, union
from shoal_protos.shape import DIMENSIONS, ONE, Shape, broken_shape
from shoal_protos.wire import bounds

LAST_PHASE = max(StepPhase)

OUTCOMES = {
    pb.SAVE_OUTCOME_DONE: SaveOutcome.DONE,
    pb.SAVE_OUTCOME_FAILED: SaveOutcome.FAILED,
    pb.SAVE_OUTCOME_SKIPPED: SaveOutcome.SKIPPED,
}
OUTCOME_NUMBERS = {outcome: number for number, outcome in OUTCOMES.items()}

ON_CORRUPTION = {
    pb.ON_CORRUPTION_RESTORE: OnCorruption.RESTORE,
    pb.ON_CORRUPTION_PAUSE: OnCorruption.PAUSE,
    pb.ON_CORRUPTION_CONTINUE: OnCorruption.CONTINUE,
}
ON_CORRUPTION_NUMBERS = {policy: number for number, policy in ON_CORRUPTION.items()}
ON_SLOW = {
    pb.ON_SLOW_SHARE: OnSlow.SHARE,
    pb.ON_SLOW_NAME: OnSlow.NAME,
    pb.ON_SLOW_REPLACE: OnSlow.REPLACE,
}
ON_SLOW_NUMBERS = {policy: number for number, policy in ON_SLOW.items()}


def write_activity(activity: Activity) -> pb.Activity:
    return pb.Activity(
        generation=activity.generation,
        boundary=activity.boundary,
        phase=activity.phase,
        bucket=activity.bucket,
        waits_for=activity.waits_for[:MOST_NAMED],
        seconds=activity.seconds,
        slowest_piece_seconds=activity.slowest_piece_seconds,
    )


def read_activity(message: pb.Activity) -> Activity:
    """Decode an activity. Raises `UserError` for a value that is out of bounds."""
    return Activity(
        bounds.whole("activity.generation", message.generation),
        bounds.whole("activity.boundary", message.boundary),
        StepPhase(bounds.whole("activity.phase", message.phase, most=LAST_PHASE)),
        bounds.whole("activity.bucket", message.bucket),
        tuple(
            bounds.name("activity.waits_for", peer)
            for peer in bounds.few("activity.waits_for", message.waits_for, MOST_NAMED)
        ),
        bounds.seconds("activity.seconds", message.seconds),
        bounds.seconds("activity.slowest_piece_seconds", message.slowest_piece_seconds),
    )


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


def write_description(description: Description) -> pb.Description:
    return pb.Description(
        lanes=description.lanes,
        blocks=description.blocks,
        block_elements=description.block_elements,
        state_bytes=description.state_bytes,
        mirrors=description.mirrors,
        mirror_partners=description.mirror_partners,
        fill_bytes_per_step=description.fill_bytes_per_step,
        max_steps=description.max_steps,
        parameters=[
            pb.Parameter(name=parameter.name, shape=parameter.shape, dtype=parameter.dtype, group=parameter.group)
            for parameter in description.parameters
        ],
        optimizer=description.optimizer,
        config=dict(description.config),
        numerics=dict(description.numerics),
        mixed_numerics=description.mixed_numerics,
        can_checkpoint=description.can_checkpoint,
        keep=description.keep,
        keep_every=description.keep_every,
        samples_per_step=description.samples_per_step,
        on_corruption=ON_CORRUPTION_NUMBERS[description.on_corruption],
        on_slow=ON_SLOW_NUMBERS[description.on_slow],
        checkpoint_places=description.checkpoint_places,
        checkpoint_marks=description.checkpoint_marks,
        parameters_digest=description.parameters_digest,
        stage=description.stage,
        peers=description.peers,
        min_workers=description.min_workers,
        max_workers=description.max_workers,
        cell=write_shape(description.cell) if description.cell != ONE else None,
        homes=[pb.Blocks(runs=blocks.encode()) for blocks in description.homes],
        models=[pb.Blocks(runs=blocks.encode()) for blocks in description.models],
    )


def write_shape(shape: Shape) -> pb.Shape:
    return pb.Shape(
        tensor=shape.tensor, pipeline=shape.pipeline, context=shape.context, expert=shape.expert, tight=shape.tight
    )


def read_shape(message: pb.Shape) -> Shape:
    """Decode the shape of a cell. Raises `UserError` for one that there is not."""
    shape = Shape(
        tensor=message.tensor or 1,
        pipeline=message.pipeline or 1,
        context=message.context or 1,
        expert=message.expert or 1,
        tight=bounds.labels("cell.tight", message.tight, len(DIMENSIONS)),
    )
    if why := broken_shape(shape):
        raise UserError(f"there is no cell of such a shape: {why}")
    return shape


def _read_homes(message: pb.Description, cell: Shape) -> tuple[Runs, ...]:
    """Decode the homes of all blocks: each is at one coordinate. Where there is only one, nothing is said of it."""
    homes = tuple(bounds.runs("description.homes", one.runs, message.blocks) for one in message.homes)
    expected = cell.processes if cell.processes > 1 else 0
    if len(homes) != expected or (homes and union(homes) != every(message.blocks)):
        raise UserError(
            f"description.homes has {len(homes)} homes with {len(union(homes))} of {message.blocks} blocks; expected "
            f"{expected} homes that have all of them"
        )
    if homes and sum(map(len, homes)) != message.blocks:
        raise UserError("description.homes has a block twice; expected each at one coordinate")
    return homes


def _read_models(message: pb.Description, homes: tuple[Runs, ...]) -> tuple[Runs, ...]:
    """Decode the blocks of each coordinate's model, which has its home at least."""
    models = tuple(bounds.runs("description.models", one.runs, message.blocks) for one in message.models)
    if len(models) != len(homes):
        raise UserError(f"description.models has {len(models)} models; expected {len(homes)}, one of each coordinate")
    for coordinate, (home, model) in enumerate(zip(homes, models, strict=True)):
        if not home <= model:
            raise UserError(f"description.models lacks {home - model} at coordinate {coordinate}, their home")
    return models


def read_description(message: pb.Description) -> Description:
    cell = read_shape(message.cell)
    homes = _read_homes(message, cell)
    parameters = bounds.few("description.parameters", message.parameters, bounds.MAX_PARAMETERS)
    return Description(
        lanes=bounds.whole("description.lanes", message.lanes, least=1, most=bounds.MAX_LANES),
        blocks=bounds.whole("description.blocks", message.blocks, most=bounds.MAX_BLOCKS),
        block_elements=bounds.whole("description.block_elements", message.block_elements),
        state_bytes=bounds.whole("description.state_bytes", message.state_bytes),
        mirrors=bounds.whole("description.mirrors", message.mirrors, most=EVERYONE),
        mirror_partners=bounds.whole("description.mirror_partners", message.mirror_partners, most=bounds.MAX_PARTNERS)
        or DEFAULT_MIRROR_PARTNERS,
        fill_bytes_per_step=bounds.whole("description.fill_bytes_per_step", message.fill_bytes_per_step),
        max_steps=bounds.whole("description.max_steps", message.max_steps),
        parameters=tuple(map(_read_parameter, parameters)),
        optimizer=bounds.label("description.optimizer", message.optimizer),
        config=_read_texts("description.config", message.config),
        numerics=_read_texts("description.numerics", message.numerics),
        mixed_numerics=message.mixed_numerics,
        can_checkpoint=message.can_checkpoint,
        keep=bounds.whole("description.keep", message.keep),
        keep_every=bounds.whole("description.keep_every", message.keep_every),
        samples_per_step=bounds.whole("description.samples_per_step", message.samples_per_step),
        on_corruption=bounds.word("description.on_corruption", ON_CORRUPTION, message.on_corruption),
        on_slow=bounds.word("description.on_slow", ON_SLOW, message.on_slow),
        checkpoint_places=bounds.labels("description.checkpoint_places", message.checkpoint_places, bounds.MAX_PLACES),
        checkpoint_marks=bounds.labels("description.checkpoint_marks", message.checkpoint_marks, bounds.MAX_MARKS),
        parameters_digest=bounds.label("description.parameters_digest", message.parameters_digest),
        stage=bounds.whole("description.stage", message.stage, most=HIGHEST_STAGE),
        peers=bounds.whole("description.peers", message.peers),
        min_workers=bounds.whole("description.min_workers", message.min_workers, most=bounds.MAX_LANES),
        max_workers=bounds.whole("description.max_workers", message.max_workers, most=bounds.MAX_LANES),
        cell=cell,
        homes=homes,
        models=_read_models(message, homes),
    )


def _read_parameter(message: pb.Parameter) -> Parameter:
    shape = bounds.few("description.parameters.shape", message.shape, bounds.MAX_DIMENSIONS)
    return Parameter(
        name=bounds.label("description.parameters.name", message.name),
        shape=tuple(bounds.whole("description.parameters.shape", size) for size in shape),
        dtype=bounds.label("description.parameters.dtype", message.dtype),
        group=bounds.whole("description.parameters.group", message.group, least=-1),
    )


def _read_texts(field: str, table: Mapping[str, str]) -> dict[str, str]:
    bounds.few(field, table, bounds.MAX_ENTRIES)
    return {
        bounds.label(f"{field}'s key", key): bounds.text(f"{field}.{key}", value, bounds.VALUE_CHARACTERS)
        for key, value in table.items()
    }
