"""What a job survives, as a sentence for people: what its mirrors and its saves are worth.

Said once, when it is known what the job is made of. Pure words; nothing is decided here.
"""

from __future__ import annotations

from shoal_protos.description import Description
from shoal_protos.plan import EVERYONE
from shoal_protos.plural import plural


def sentence(made_of: Description) -> str:
    """How many may be lost at once, and what becomes of the job where more are."""
    return f"{_copies(made_of.mirrors)}; {_without_a_copy(made_of)}"


def _copies(mirrors: int) -> str:
    if mirrors == EVERYONE:
        return "every worker keeps every block, so the job goes on while one of them lives"
    if not mirrors:
        return "each block is kept by one worker alone (mirrors 0), so none may be lost"
    return f"each block is kept by {mirrors + 1} workers, so {plural(mirrors, 'worker')} may be lost at once"


def _without_a_copy(made_of: Description) -> str:
    if made_of.can_checkpoint:
        place = f" in {made_of.saves_to}" if made_of.saves_to else ""
        return f"where all who keep a block are lost, all go back to the newest checkpoint{place}"
    return "where all who keep a block are lost, the job begins anew at step 0, because no checkpoint.path is set"
