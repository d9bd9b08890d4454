"""One member's ballot: what it brings into a vote. Called by the engine right before it votes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.exchange.vote import Ballot
from shoal.optim.hyper import digest, hyper_parameters

if TYPE_CHECKING:
    from shoal.training.engine import Engine


def ballot_of(engine: Engine, step: int, bad_gradient: str) -> Ballot:
    """`step`: the one that the vote would commit; the last committed one where it commits none."""
    state, numbers = engine.state, engine.loop.numbers
    trained, before = step > state.step, state.record
    save_status = engine.saving.ballot_status()
    return Ballot(
        step=step,
        generation=engine.link.enter_vote(state.pending if trained else state.held.runs),
        hyper=digest(hyper_parameters(state.optimizer)).hex(),
        losses=numbers.losses if trained else (),
        reports=numbers.reports if trained else {},
        skipped=numbers.skipped if trained else 0,
        micro_batches=engine.config.micro_batches_per_lane,
        skipped_before=before.skipped_micro_batches if before else 0,
        bad_loss=numbers.not_finite if trained else "",
        bad_gradient=bad_gradient if trained else "",
        not_finite_before=before.not_finite_steps if before else 0,
        evaluations=engine.evaluation.sums(),
        requests=engine.requests.for_vote() + (engine.saving.scheduled() if trained else ()),
        saving=save_status,
        saved=engine.saving.saved,
    )
