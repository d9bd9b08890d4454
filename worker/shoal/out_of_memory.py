"""Memory that runs out: beneath the error it is said what was being made, and what would need less.

The error itself stays what it is, since scripts catch torch's own; Python prints its notes, and the controller gets
them with the traceback. `note_what` is called where Shoal makes something large, `explain` where nobody has caught it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch

from shoal.config.training import TrainingConfig

OF_THE_CPU = ("can't allocate memory", "not enough memory")
"""What torch's allocators for the CPU say; they have no class of their own."""
OF_A_DRIVER = ("error: out of memory",)
"""What an accelerator's driver says (`torch.AcceleratorError`): of pinned memory above all."""


ESTIMATE = "`shoal estimate`"


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


def explain(error: BaseException, where: str, config: TrainingConfig, workers: int) -> None:
    """`where` training stood."""
    if not is_out_of_memory(error) or any(ESTIMATE in note for note in getattr(error, "__notes__", ())):
        return
    note_what(error, "activations, gradients or the script's own tensors were made")
    less = "\n".join(f"  - {way}" for way in _ways(config))
    error.add_note(
        f"That was {where}, in ZeRO stage {config.stage} with {workers} worker{'s' if workers > 1 else ''}. "
        f"Less is needed with\n{less}\n{ESTIMATE} says how much a worker needs with each of them."
    )


def _ways(config: TrainingConfig) -> Iterator[str]:
    """Those that the config does not go yet."""
    if config.micro_batch_size > 1:
        yield "a smaller `train_micro_batch_size_per_gpu`, and more of them in a lane (`shoal.micro_batches_per_lane`);"
    if not config.activation_checkpointing:
        yield '`shoal.activation_checkpointing: "units"`;'
    if config.stage < 3:
        yield f"`zero_optimization.stage: {config.stage + 1}`;"
    else:
        yield "smaller units (`shoal.units`);"
    if config.precision.parameters is None:
        yield "`bf16.enabled: true`;"
    if config.state_folder is None:
        yield "optimizer state in a file (`zero_optimization.offload_optimizer`);"
    if config.mirrors > 0 and config.stage:
        yield "fewer `shoal.mirrors`, and so fewer workers that may die at once;"
    yield "more workers, in every stage above 0."


def place_of(names: Sequence[str]) -> str:
    """Where in a model parameters of these names are: what their names have in common."""
    if len(names) == 1:
        return f'"{names[0]}"'
    levels = zip(*(name.split(".") for name in names), strict=False)
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return f'"{".".join(common)}"' if common else f'"{names[0]}" and {len(names) - 1} more parameters'
