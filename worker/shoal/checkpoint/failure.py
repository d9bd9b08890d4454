"""A failure of this worker as the controller gets it: a sentence for people, and what identifies the same fault.

Used where a script ends in an error (exit.py) and where an update does (step.py).
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import shoal_protos
from shoal_protos.errors import JobFailed, ShoalError, StoreError, UserError
from shoal_protos.messages import Fault, Result

from shoal.core.checkpoint_errors import CheckpointDamaged, StorageFailed

LONGEST = 4_000
"""Characters of a traceback that are sent."""
LONGEST_MESSAGE = 500
"""Characters of an exception's message by which it is known again."""
NOT_THE_SCRIPT = (
    str(Path(__file__).parents[1]),
    str(Path(shoal_protos.__file__).parent),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")),
)
NO_KERNEL = ("scaled_dot_product", "for_cpu", "sharding strategy")
"""Parts of torch's error for attention over DTensors on the CPU (PyTorch 2.13)."""
OUTAGES = (OSError, StorageFailed, StoreError)


class ExportFailed(UserError):
    """The model cannot be written to where the script wants it. A script hears of it after the job's last step."""


class SaveFailed(StorageFailed):
    """A checkpoint could not be saved after the job's last step, where no later one makes up for it."""


class NeedsFreshProcess(ShoalError):
    """This process has gone too far to take part; a new one can."""


def in_a_sentence(error: BaseException) -> BaseException:
    """An error of a library that users of cells meet, as one of ours; any other as it is."""
    text = str(error)
    if not isinstance(error, NotImplementedError) or not all(part in text for part in NO_KERNEL):
        return error
    return UserError(
        "torch has no kernel on the CPU for attention over DTensors, as its context_parallel makes them; divide the "
        'sequence by an exchange over cell.group("context") instead, as examples/context_parallel.py does.'
    ).with_traceback(error.__traceback__)


def result_of(error: BaseException, step: int) -> Result:
    """What is sent to the controller."""
    return Result(max(0, step), failure=_describe(error), everyone=_is_everyones(error), fault=_fault_of(error))


def sentence_of(error: ShoalError) -> str:
    """Return the sentence of an error of Shoal; a `UserError` is followed by the script's line that caused it,
    `(train.py:212)`.
    """
    place = _place(error) if isinstance(error, UserError) else ""
    gap = "\n" if "\n" in str(error) else " "
    return f"{error}{gap}({place})" if place else str(error)


def _place(error: BaseException) -> str:
    """Return file and line of the script's last frame; empty if no file of the script took part."""
    script = [frame for frame in _frames(error) if _is_scripts(frame)]
    return f"{Path(script[-1].filename).name}:{script[-1].lineno}" if script else ""


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _is_scripts(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((*NOT_THE_SCRIPT, "<"))


def _describe(error: BaseException) -> str:
    """One of our own errors is described by its one sentence."""
    if isinstance(error, ShoalError):
        return sentence_of(error)
    lines = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n" + lines[-LONGEST:].strip()


def _is_everyones(error: BaseException) -> bool:
    """Whether no replacement helps: what the user gave cannot work, here or elsewhere.

    ● An export that fails, be it by an outage, is nobody else's to repeat: the other members may be done with it, and
    the job would end well without its model. So is a save after the last step: it has failed for all.
    """
    is_mistake = isinstance(error, UserError) and not isinstance(error, CheckpointDamaged) and not _is_outage(error)
    return isinstance(error, JobFailed | ExportFailed | SaveFailed) or is_mistake


def _fault_of(error: BaseException) -> Fault:
    return Fault(type(error).__qualname__, str(error)[:LONGEST_MESSAGE], _frame(error), _is_outage(error))


def _is_outage(error: BaseException) -> bool:
    return any(isinstance(one, OUTAGES) for one in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def script_line() -> str:
    """The script's own line that runs now, `train.py:31`; empty where none does."""
    frame = script_frame(sys._getframe(1))
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost one of the script, from `frame` on outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_SCRIPT):
        frame = frame.f_back
    return frame


def _frame(error: BaseException) -> str:
    """The last line of the script that took part; of a library where no script did."""
    frames = _frames(error)
    scripts = [frame for frame in frames if _is_scripts(frame)]
    last = (scripts or frames)[-1:]
    return "".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in last)
