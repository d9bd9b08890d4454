"""Requests: what a script or the controller asks for once, the vote carries, and all carry out at the same boundary.

One caller is enough, through any change of the world: a request stays with its caller until it was carried out. At the
last step every worker asks for the fingerprint by itself, so that each can give the digests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from shoal_protos.errors import JobFailed, UserError
from shoal_protos.messages import Result

from shoal.exchange.framing import FramedSend, receive_framed
from shoal.exchange.traffic import DIGESTS
from shoal.exchange.vote import Record, Request, check_requests
from shoal.export import export
from shoal.fingerprint import fingerprint
from shoal.group.group import Group
from shoal.logs import get_logger
from shoal.optim.hyper import first_difference, hyper_parameters
from shoal.training.initial_state import share_frozen

if TYPE_CHECKING:
    from shoal.training.engine import Engine

CALLS = {"save": "save_checkpoint"}
"""Methods whose name is not their request's."""

log = get_logger("shoal")


class Requests:
    """This worker's own requests, and how any is carried out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mine: list[Request] = []
        self._scripts: set[Request] = set()
        """Those that the script has asked for, and whose end it may wait for."""
        self._digest: tuple[int, str] | None = None
        self._failure: UserError | None = None

    def ask(self, request: Request) -> str | None:
        """In the loop returns at once; after it blocks until carried out, and until a save under way has come to its
        end. A fingerprint's digest is returned then.

        In a warm-up it is ignored: whoever warms up is not in the job yet.
        """
        engine, call = self._engine, f"engine.{CALLS.get(request.kind, request.kind)}"
        if engine.warming_up:
            return None
        if engine.ended:
            raise UserError(f"{call} was called after the script's end.")
        if engine.left_loop and not engine.over:
            raise UserError(
                f"{call} was called after the loop was left at step {engine.state.step} of {engine.state.last_step}; "
                "call it in the loop (engine.stop() ends it early), and go through the loop to its end."
            )
        if engine.world is None and not engine.over:
            raise UserError(f"{call} was called before the loop; ask in the loop or after it.")
        check_requests([*self._mine, request], call)
        self.add(request)
        self._scripts.add(request)
        if not engine.left_loop:
            return None
        self.settle()
        while engine.saving.busy:
            engine.guarded_vote()
        failure = self._failure or engine.saving.failure
        self._failure = engine.saving.failure = None
        if failure is not None:
            raise failure
        return self._digest[1] if request.kind == "fingerprint" and self._digest else None

    def settle(self) -> None:
        """After the last step: waits until what this worker's script has asked for is carried out."""
        while self._scripts.intersection(self._mine):
            self._engine.guarded_vote()
        self._scripts.clear()

    def add(self, request: Request) -> None:
        if request.kind == "save":
            self._engine.saving.remember_request()
        if request not in self._mine:
            self._mine.append(request)

    def for_vote(self) -> tuple[Request, ...]:
        """What this worker brings into its next vote."""
        if self._engine.resize.frozen_in_place:  # a recovery on the way has brought them
            self._mine = [request for request in self._mine if request.kind != "frozen"]
        self._drop_saved()
        if self._engine.over and not self._engine.done:
            self.add(Request("fingerprint"))
        save = self._engine.saving.pending
        return tuple(save if save and request.kind == "save" else request for request in self._mine)

    def on_commit(self, record: Record) -> None:
        """A voted stop is part of the commit: whoever rolls forward with the record follows it too."""
        if any(request.kind == "stop" for request in record.requests):
            self._engine.state.last_step = min(self._engine.state.last_step, record.step)

    def carry_out(self, requests: tuple[Request, ...]) -> None:
        """Every member calls it with the same requests at the same boundary. Raises `WorldChanged`; then they stay."""
        for request in requests:
            match request.kind:
                case "fingerprint":
                    self._fingerprint()
                case "export":
                    self._export(Path(request.detail))
                case "frozen":
                    self._frozen(request)
            if request in self._mine:
                self._mine.remove(request)
        self._drop_saved()

    def _drop_saved(self) -> None:
        if not self._engine.saving.pending:
            self._mine = [request for request in self._mine if request.kind != "save"]

    def _fingerprint(self) -> None:
        engine = self._engine
        assert engine.world is not None
        self._digest = (engine.state.step, fingerprint(engine.state, engine.world))
        if engine.over and not engine.done:
            engine.done = True
            engine.link.result(Result(engine.state.step, self._digest[1], engine.state.loss))

    def _export(self, path: Path) -> None:
        if self._engine.rank != 0:
            return
        try:
            export(self._engine.module, path)
        except UserError as error:
            log.error("export_failed", path=str(path), reason=str(error))
            self._failure = error

    def _frozen(self, request: Request) -> None:
        """The builder sends its frozen parameters to a joiner whose own differ."""
        world = self._engine.world
        assert world is not None
        if world.rank in (world.plan.builder, request.rank):
            share_frozen(world.group, self._engine.module, world.plan.builder, [request.rank])
        if world.rank == request.rank:
            self._engine.resize.frozen_in_place = True
            if self._engine.state.current:
                self._engine.state.current = self._engine.state.everything


def refuse_other_hyper_parameters(group: Group, record: Record, optimizer: torch.optim.Optimizer) -> None:
    """Raises `JobFailed` naming group and key where members' hyper-parameters differ; all see it in the same vote."""
    if len(set(record.hypers)) <= 1:
        return
    rank = next(r for r, hyper in enumerate(record.hypers) if hyper != record.hypers[0])
    mine = hyper_parameters(optimizer)
    content = json.dumps(mine).encode()
    others = [peer for peer in range(group.size) if peer != group.rank]
    sends = [FramedSend(group, peer, DIGESTS, content) for peer in others] if group.rank in (0, rank) else []
    theirs = {peer: json.loads(receive_framed(group, peer, DIGESTS)) for peer in (0, rank) if peer != group.rank}
    for send in sends:
        send.wait()
    difference = first_difference(theirs.get(rank, mine), theirs.get(0, mine))
    raise JobFailed(
        f"the hyper-parameters of rank {rank} differ from rank 0's at step {record.step}: {difference}. "
        "Set them by the scheduler or by what all workers know alike, such as engine.global_step."
    )
