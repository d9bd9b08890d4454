"""Requests: what a script or the controller asks for once, the vote carries, and all carry out at the same boundary.

One caller is enough, through any change of the world: a request stays with its caller until it was carried out. At the
last step every worker asks for the fingerprint by itself, so that each can give the digests.
"""

from __future__ import annotations

from pathlib import Path

from shoal_protos.errors import UserError
from shoal_protos.messages import Result
from shoal_protos.training_log import get_logger

from shoal.checkpoint.failure import NeedsFreshProcess
from shoal.checkpoint.fingerprint import fingerprint
from shoal.checkpoint.model_export import export
from shoal.exchange.ballot import AVERAGES_TO, HALT, Request
from shoal.exchange.vote import check_requests
from shoal.state.training_state import ENDS
from shoal.training.checkpoint_saving import SAVE, CheckpointSaving
from shoal.training.context import NOTHING, TrainingContext
from shoal.training.evaluation import Evaluation
from shoal.training.gathered_rows import GATHER
from shoal.training.parameters import Parameters

FINGERPRINT = Request("fingerprint")

log = get_logger("shoal")


class Requests:
    """This worker's own requests, and how any is carried out."""

    def __init__(
        self, context: TrainingContext, saving: CheckpointSaving, parameters: Parameters, evaluation: Evaluation
    ) -> None:
        self._context, self._saving, self._parameters = context, saving, parameters
        self._rows = evaluation.rows
        self._evaluation = evaluation
        self._mine: list[Request] = []
        self._at_hand: list[tuple[int, str]] = []
        """Exports of the weights of a step, where the next one is still to come: the step, and the path."""
        self._scripts: set[Request] = set()
        """Requests of the script, whose end it may wait for."""
        self.digest = ""
        """The last fingerprint that was asked for."""
        self._failed: dict[Request, UserError] = {}
        """Exports that rank 0, which this worker was then, could not make, and has made none of since."""

    def check(self, request: Request, call: str) -> None:
        """Raises `UserError` for what the script cannot ask for now. `call`: how it asks."""
        context = self._context
        if context.ended:
            raise UserError(f"{call} was called after the script's end.")
        if context.left_loop and not context.is_over:
            if not context.is_cell_whole:
                raise NeedsFreshProcess("failed in a void lane: its loop was left (a new process takes part).")
            raise UserError(
                f"{call} was called after the loop was left at step {context.state.step} of {context.state.last_step}; "
                "call it in the loop (engine.stop() ends it early), and go through the loop to its end."
            )
        if context.world is None and not context.is_over:
            raise UserError(f"{call} was called before the loop; ask in the loop or after it.")
        check_requests([*self._open, request], call)

    def add(self, request: Request, by_script: bool = False) -> None:
        """From now on it is in this worker's votes, until it is carried out."""
        if request.kind == "export" and self._takes_at_hand(request):
            return
        if by_script:
            self._scripts.add(request)
        if request.kind == "save":
            self._saving.remember_request(at_hand=by_script and self._evaluation.can_ask)
        elif request not in self._mine:
            self._mine.append(request)

    def _takes_at_hand(self, export: Request) -> bool:
        """Whether it is made before the next update, of the weights of now: where rank 0 still hears of it in time."""
        context, path = self._context, export.detail
        if context.is_over:
            return False  # no update follows
        if self._evaluation.can_ask or (context.is_busy and context.rank == 0):
            self._at_hand.append((context.state.step, path))
            return True
        return path in self._evaluation.asked

    @property
    def at_hand(self) -> list[str]:
        """Where this worker wants the model of now to be. Those of an earlier step are there: it could not end without
        them; and where all have gone back, the script comes by that step again.
        """
        if not self._at_hand:
            return []
        self._at_hand = [(step, path) for step, path in self._at_hand if step == self._context.state.step]
        return [path for _, path in self._at_hand]

    def export_at_hand(self) -> None:
        """Before the next vote: rank 0 writes what was asked for of the weights of now; the others' votes wait for its
        own. Raises `WorldChanged`; then those who have asked ask again.
        """
        paths = dict.fromkeys([*self._evaluation.asked, *self.at_hand])
        # of a cell one member says what all ask for at that place
        self._mine = [one for one in self._mine if one.kind != "export" or one.detail not in paths]
        if paths and self._context.rank == 0:
            self._context.state.buffers.put_back()  # lanes of the next step have changed them
            for path in paths:
                self._export(Request("export", path))

    def asks(self, request: Request) -> bool:
        """Whether it is this worker's, and still to be carried out."""
        return request in self._mine

    @property
    def has_awaited(self) -> bool:
        """Whether something that the script has asked for is still to be carried out."""
        return any(request in self._scripts for request in self._open)

    def forget_scripts(self) -> None:
        """The script waits for nothing any more."""
        self._scripts.clear()

    def take_failure(self, request: Request) -> Exception | None:
        """Why what the script asks for could not be done, once."""
        return self._saving.take_failure() if request.kind == "save" else self._failed.pop(request, None)

    def check_exports(self) -> None:
        """At the job's end: raises why an export failed that was asked for in the loop, or only on another worker: no
        script has heard of it.
        """
        for failure in self._failed.values():
            raise failure

    @property
    def _open(self) -> list[Request]:
        return [*self._mine, SAVE] if self._saving.pending else self._mine

    @property
    def pending(self) -> tuple[Request, ...]:
        """What this worker brings into its next vote."""
        mine, save = list(self._mine), self._saving.in_ballot
        if self._context.is_over and not self._context.done and FINGERPRINT not in mine:
            mine.append(FINGERPRINT)
        if self._rows.is_pending:
            mine.append(GATHER)
        return (*mine, save) if save else tuple(mine)

    def on_return(self) -> None:
        """All have gone back to a checkpoint, or to the start: the script comes again by the step before which it has
        asked for a halt.
        """
        self._mine = [request for request in self._mine if request != HALT]

    def carry_out(self, requests: tuple[Request, ...]) -> None:
        """Every member calls it with the same requests at the same boundary. Raises `WorldChanged`; then they stay.

        A stop is carried out by the commit of a step: where the vote committed none, it stays as well.
        """
        if requests:
            self._parameters.settle()
        for request in requests:
            match request.kind:
                case "fingerprint":
                    self._fingerprint()
                case "gather":
                    self._rows.exchange()
                case "export":
                    self._export(request)
            if request in self._mine and (request.kind not in ENDS or self._context.is_over):
                self._mine.remove(request)

    def _fingerprint(self) -> None:
        context = self._context
        assert context.world is not None
        self.digest = fingerprint(context.state, context.world)
        if context.is_over and not context.done:
            context.done = True
            context.link.result(Result(context.state.step, self.digest, context.state.loss))

    def _export(self, request: Request) -> None:
        self._failed.pop(request, None)
        if self._context.rank != 0:
            return
        path, parameters = request.detail.removeprefix(AVERAGES_TO), self._parameters
        state, averaged = self._context.state, path != request.detail
        try:
            with parameters.averaged(is_owed=True) if averaged else NOTHING:
                if parameters.parts is not None:
                    parameters.parts.export(Path(path), parameters.reading, averaged)
                else:
                    export(state.module, Path(path), parameters.reading)
        except UserError as error:
            log.error("export_failed", path=path, reason=str(error))
            self._failed[request] = error
