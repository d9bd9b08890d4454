"""The kinds of events in a job's history: what `Note` carries, REST answers, and docs/events.md lists.

The names are public: people filter by them. A kind is added here with its meaning, and never renamed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class EventKind(StrEnum):
    """What an event tells. `meaning` is one sentence for people who read the history."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = member.__doc__ = meaning
        return member

    SURVIVES = "survives", "The job's mirrors and saves are known; the message says which losses it survives, and how."
    JOINED = "joined", "A worker connected for the first time."
    RETURNED = "returned", "An evicted worker connected again."
    REFUSED = "refused", "A worker was refused; the message says why."
    STARTING = "starting", "The launcher was asked to start a worker."
    PENDING = "pending", "A worker cannot start yet, or may have to go; the message is the cluster's own."
    DISCONNECTED = "disconnected", "A worker's connection to the controller ended; the worker may still be alive."
    UNREACHABLE = "unreachable", "A worker is connected, but the controller cannot connect to the worker's port."
    SUSPECTED = "suspected", "A worker missed heartbeats and was asked directly."
    LOST = "lost", "A worker is dead or was evicted, or the state of the last workers to leave is lost."
    KILLED = "killed", "A process did not end in time and was killed."
    FAILED = "failed", "A worker's script failed, or the job failed for good; the message gives the reason."
    CLAIM_REFUSED = "claim_refused", "A worker claimed something that cannot be true; its claim was ignored."
    NOT_BIT_EXACT = "not_bit_exact", "A worker with another numeric identity joined a job with `mixed_numerics`."
    KEPT_OUT = "kept_out", "A worker may not join for a while, because its connection to another worker is broken."
    STRAGGLER = "straggler", "All workers wait for one that is busy in user code."
    SLOW = "slow", "A worker takes longer for a lane than the others, or no longer does."
    LANES_SHARED = (
        "lanes_shared",
        "Lanes are shared by the workers' speed, or evenly again; the message says by how much.",
    )
    SILENT = "silent", "Most workers are silent; the controller may be cut off, so no worker is evicted."
    HEARD = "heard", "At least half of the workers respond again, or are known to be dead."

    SEATED = "seated", "A process was given its coordinate: its place in a cell."
    PAIRED = "paired", "Workers train lanes together that did not before; the message names the new cells."
    COORDINATE_MISSING = "coordinate_missing", "A coordinate has lost its last worker: no cell is whole without one."

    PREPARE = "prepare", "Workers were asked to stop and report their inventory, for a new generation."
    PLAN = "plan", "A plan for a new generation was made."
    OPEN = "open", "A new generation may train, after a start or a loss."
    BEGUN = "begun", "A planned generation has replaced the previous one during training."
    TRAINS = "trains", "The first step of a generation was committed."
    RESIZED = "resized", "A change of the world is complete; the data has its pause, phases and bytes."
    WAITING = "waiting", "A new generation cannot begin yet; the message gives the reason."
    STALLED = "stalled", "Training cannot continue: blocks have no living copy, or two workers cannot reach each other."
    ANEW = "anew", "Every copy of a block is lost; the job starts again from a checkpoint or from step 0."

    AUDIT = (
        "audit",
        "An operator's request was carried out; the data has the action and the token's name.",
    )
    SCALED = "scaled", "The wanted number of workers, or its bounds, changed."
    DRAINING = (
        "draining",
        "A worker is being drained, or released because the job is scaled down; the data has the step.",
    )
    STAYS = "stays", "A drain was cancelled, because the worker's end is no longer announced."
    LEFT = "left", "A drained worker was released."
    DISMISSED = "dismissed", "A worker was told to end for another reason; the message gives it."
    PARTING = "parting", "All workers are leaving without a replacement; their state is being saved."
    PAUSED = "paused", "The job is being paused."
    RESUMED = "resumed", "A paused job continues."
    CANCELLING = "cancelling", "An operator cancelled the job; its workers stop after their step."

    SAVING = "saving", "An operator requested a checkpoint."
    CHECKPOINT_SAVED = "checkpoint_saved", "A checkpoint was saved."
    CHECKPOINT_FOUND = "checkpoint_found", "A worker found a checkpoint in the job's folder."
    CHECKPOINT_FAILED = "checkpoint_failed", "A checkpoint could not be saved."
    CHECKPOINT_SKIPPED = "checkpoint_skipped", "A checkpoint was due and was not saved; the message says why."
    OTHER_VALUES = "other_values", "Script or config give values other than those of the checkpoint's run."
    CHECKPOINT_PASSED_OVER = "checkpoint_passed_over", "An incomplete or unreadable folder was skipped."
    CHECKPOINT_DAMAGED = "checkpoint_damaged", "A checkpoint could not be read; the previous one is used."
    CORRUPT_BLOCK = "corrupt_block", "Copies of a block differ: silent corruption."
    RESTORING = "restoring", "All workers go back to a checkpoint because of silent corruption."

    MICRO_BATCHES_SKIPPED = "micro_batches_skipped", "The script has skipped 1, 10, 100, … micro-batches."
    NOT_FINITE = "not_finite", "1, 10, 100, … steps had a loss or gradient that was not finite."

    UNREADABLE_EVENT = "unreadable_event", "The record of an event is damaged; the message names it."

    SUCCEEDED = "succeeded", "The job is done."
    CANCELLED = "cancelled", "The job was cancelled."
