"""Weights between `shoal.initialize` and the loop: those that the script has made, and perhaps not the job's.

Where this process goes on from a checkpoint, or may join a job that trains, the job's weights come when its loop
begins. What a script computes from the first ones before that (a score, a file) looks like any other result: refused.
Told by checkpoint_loading.py, which knows what there is to go on from, and by the loop.
"""

from __future__ import annotations

from shoal_protos.errors import UserError

from shoal.data.seeds import ForwardSeed


class FirstWeights:
    """Whether the model's weights may be read."""

    def __init__(self, forward_seed: ForwardSeed) -> None:
        self._forward_seed = forward_seed
        self._why = ""

    def hold_back(self, why: str) -> None:
        """From now on they are not to be read. `why`: where the job's are, as a clause."""
        self._why = why
        self._forward_seed.refuse(self._sentence("the model was called"))

    def on_loop(self) -> None:
        """The loop begins: from now on they are the job's, or a warm-up's."""
        self._why = ""
        self._forward_seed.disarm()

    def check(self, call: str) -> None:
        """Raises `UserError` where they are not to be read. `call`: what reads them."""
        if self._why:
            raise UserError(self._sentence(f"{call} was called"))

    def _sentence(self, call: str) -> str:
        return (
            f"{call} before the loop, when the model has its first values: {self._why}, whose weights come when the "
            "loop begins. Do this at the top of the loop's body or after the loop; for the first values, before "
            "shoal.initialize."
        )
