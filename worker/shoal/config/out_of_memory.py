"""Memory that runs out: beneath the error it is said what was being made, and what would need less.

The error itself stays what it is, since scripts catch torch's own; Python prints its notes, and the controller gets
them with the traceback. `note_what` is called where Shoal makes something large, `explain` where nobody has caught it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import torch

from shoal.config.training import TrainingConfig

OF_THE_CPU = ("can't allocate memory", "not enough memory")
"""What torch's allocators for the CPU say; they have no class of their own."""
OF_A_DRIVER = ("error: out of memory",)
"""What an accelerator's driver says (`torch.AcceleratorError`): of pinned memory above all."""

ESTIMATE = "`shoal estimate`"


@dataclass(frozen=True, slots=True)
class Advice:
    """What needs less by the ZeRO stage of a config: ways that it does not go yet."""

    stage_number: int
    instead: str
    """What there is more of where micro-batches are smaller."""
    next_stage: str
    one_micro_batch: str = ""
    on_host: str = ""
    """With parameters in host memory; empty where they are, or cannot be."""
    has_mirrors: bool = False
    """Whether mirrors cost memory."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides which ways are open to a worker."""

    config: TrainingConfig
    by_stage: Advice
    workers: int
    is_on_host: bool
    """Whether its model is on the CPU."""
    has_units: bool
    """Whether the model has modules that `shoal.activation_checkpointing: "units"` finds."""
    steps_in_parts: bool
    """Whether its optimizer can be stepped piece by piece, as state in files must be."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*OF_THE_CPU, *OF_A_DRIVER))


def note_what(error: BaseException, making: str) -> None:
    """`making`: what was under way, if memory ran out in it; what is noted first is nearest to the error."""
    if is_out_of_memory(error) and not getattr(error, "__notes__", ()):
        error.add_note(f"Memory ran out while {making}.")


@contextmanager
def naming(making: str) -> Iterator[None]:
    """`making`: as for `note_what`."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        note_what(error, making)
        raise


@contextmanager
def initializing() -> Iterator[None]:
    """Where the model itself does not fit there is no world yet, and what a batch needs is no matter."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if is_out_of_memory(error):
            note_what(error, "shoal.initialize put the model's parameters into blocks")
            error.add_note(
                "No worker ever has the whole model in memory where the script builds it within `shoal.deferred()`, "
                f"and the config says `zero_optimization.stage: 3`. {ESTIMATE} says how much a worker needs then."
            )
        raise


def explain(error: BaseException, where: str, find: Callable[[], Setting]) -> None:
    """`where` training stood. `find`: only asked where memory ran out."""
    if not is_out_of_memory(error) or any(ESTIMATE in note for note in getattr(error, "__notes__", ())):
        return
    note_what(error, "activations, gradients or the script's own tensors were made")
    try:
        setting = find()
    except Exception:  # there may be no memory for that either, and the error itself is what has to arrive
        return
    less = "\n".join(f"  - {way}" for way in ways(setting, isinstance(error, torch.OutOfMemoryError)))
    workers = f"{setting.workers} worker{'s' if setting.workers > 1 else ''}"
    error.add_note(
        f"That was {where}, in ZeRO stage {setting.by_stage.stage_number} with {workers}. "
        f"Less is needed with\n{less}\n{ESTIMATE} says how much a worker needs with each of them."
    )


def ways(setting: Setting, is_of_device: bool) -> Iterator[str]:
    """Those that the config does not go yet, and that would not be refused.

    `is_of_device`: an accelerator's own memory ran out, so that the host's may have some left.
    """
    config, by_stage = setting.config, setting.by_stage
    if config.micro_batch_size > 1:
        yield f"a smaller `train_micro_batch_size_per_gpu`, and {by_stage.instead};"
    if by_stage.one_micro_batch:
        yield by_stage.one_micro_batch
    if not config.activation_checkpointing and setting.has_units:
        yield '`shoal.activation_checkpointing: "units"`;'
    yield by_stage.next_stage
    if config.precision.parameters is None and config.precision.autocast is None:
        yield "`bf16.enabled: true`, which halves activations;"
    if not setting.is_on_host:
        yield from _by_host_memory(setting) if is_of_device else ()
    elif config.state_folder is None and setting.steps_in_parts:
        yield 'optimizer state in a file, `zero_optimization.offload_optimizer: {"device": "nvme", "nvme_path": "…"}`;'
    if config.mirrors > 0 and by_stage.has_mirrors and setting.workers > 1:
        yield "fewer `shoal.mirrors`, and so fewer workers that may die at once;"
    yield "more workers, in every stage above 0."


def _by_host_memory(setting: Setting) -> Iterator[str]:
    """Of a model on an accelerator."""
    config = setting.config
    if config.activation_checkpointing and not config.cpu_checkpointing:
        yield "`activation_checkpointing.cpu_checkpointing: true`;"
    if not config.updates_on_host:
        yield '`zero_optimization.offload_optimizer: {"device": "cpu"}`;'
    elif setting.by_stage.on_host:
        yield setting.by_stage.on_host


def place_of(names: Sequence[str]) -> str:
    """Where in a model parameters of these names are: what their names have in common."""
    if len(names) == 1:
        return f'"{names[0]}"'
    levels = zip(*(name.split(".") for name in names), strict=False)
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return f'"{".".join(common)}"' if common else f'"{names[0]}" and {len(names) - 1} more parameters'
