"""What a member concludes about checkpoints to go on from. With files: test_checkpoint_worlds.py; in whole jobs:
tests/simulation/loading.py.
"""

from __future__ import annotations

import pytest
from shoal.core.loading import Loading, StepZero
from shoal_protos.checkpoint import CheckpointRef

OLD, NEW = CheckpointRef(1, 10, "old"), CheckpointRef(1, 20, "new")


def test_what_could_not_be_read_is_said_until_another_plan_is_carried_out() -> None:
    loading = Loading()
    loading.on_found(NEW)
    loading.on_recovery("new")
    loading.on_take_up("new")
    loading.on_unreadable("new", "new is damaged.")
    loading.on_found(OLD)
    loading.on_recovery("new")
    assert loading.unreadable_checkpoint and loading.unreadable_checkpoint.sentence == "new is damaged."
    loading.on_recovery("old")
    assert (loading.reference, loading.unreadable_checkpoint, loading.unreadable) == (OLD, None, {"new"})


@pytest.mark.parametrize("resume, only", [("latest", False), (20, True), ("new", True)])
def test_only_for_the_latest_another_one_may_be_taken(resume: int | str, only: bool) -> None:
    loading = Loading()
    loading.on_found(NEW)
    assert loading.is_the_only_one("new", resume) is only
    assert not loading.is_the_only_one("old", resume), "a plan named it, though this member knows of a newer one"


def test_a_process_begins_at_step_0_only_with_its_initial_state() -> None:
    fresh, trained, restored, hopeless = Loading(), Loading(), Loading(), Loading()
    for loading in (restored, hopeless):
        loading.on_take_up("old")
    hopeless.on_unreadable("old", "old is damaged.")
    assert fresh.step_zero(has_trained=False) is StepZero.POSSIBLE
    assert trained.step_zero(has_trained=True) is StepZero.WITH_A_FRESH_PROCESS
    assert restored.step_zero(has_trained=False) is StepZero.WITH_A_FRESH_PROCESS
    assert hopeless.step_zero(has_trained=True) is StepZero.UNREADABLE, "a fresh process would fare alike"
