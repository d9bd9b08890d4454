"""What an ElasticJob is said, and how one goes, as functions: bursts of events, columns, patches, steps of an end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_driver import training
from rule import holds
from shoal_controller.core.machine.figures import Figures, series_key
from shoal_controller.core.machine.spec import JobSpec, JobView, Phase
from shoal_controller.elastic_jobs.owned_job import (
    END_SECONDS,
    FAILED_SAVES,
    SAVE_SECONDS,
    Deletion,
    DeletionStep,
    next_step,
)
from shoal_controller.elastic_jobs.resource_forms import (
    changed_keys,
    columns,
    job_spec_of,
    patch_between,
    span,
    tells_news,
)
from shoal_controller.elastic_jobs.resource_writer import ClusterEvent, EventBursts
from shoal_protos.errors import UserError

# ---- events


def lost(number: int) -> ClusterEvent:
    return ClusterEvent("WorkerLost", "Warning", f"w{number} is lost", number, float(number))


def test_a_hundred_kills_within_a_minute_are_a_handful_of_events_that_count_them_all() -> None:
    bursts = EventBursts()
    written: list[ClusterEvent] = []
    for number in range(100):
        now = 0.6 * number
        if (first := bursts.put(lost(number), now)) is not None:
            written.append(first)
        written += bursts.take_due(now)
    written += bursts.take_due(60.0, all_of_them=True)
    assert len(written) <= 5
    counted = [1 if " times since" not in one.sentence else int(one.sentence.split()[0]) for one in written]
    assert sum(counted) == 100
    assert written[-1].sentence.endswith("w99 is lost")


def test_one_kind_does_not_wait_for_another_and_after_a_pause_the_first_goes_out_at_once_again() -> None:
    bursts = EventBursts()
    assert bursts.put(lost(1), 0.0) == lost(1)
    saved = ClusterEvent("Saved", "Normal", "saved", 2, 2.0)
    assert bursts.put(saved, 0.1) == saved
    assert bursts.take_due(11.0) == []
    assert bursts.put(lost(3), 12.0) == lost(3)


# ---- keys


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"max_restarts": 1}, "`max_restarts` is an unknown key .*did you mean `maxRestarts`"),
        ({"heartbeatSeconds": 0}, "`heartbeatSeconds` is 0; expected 0.01 or more"),
        ({"kubernetes": {"node_selector": {}}}, "did you mean `kubernetes.nodeSelector`"),
        ({"kubernetes": {"graceSeconds": 5}}, "`kubernetes.graceSeconds` is 5; expected 10 or more"),
    ],
)
def test_what_an_older_definition_lets_through_is_refused_by_the_resources_own_keys(spec: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        job_spec_of({"metadata": {"name": "a", "uid": "u"}, "spec": {"command": ["x"], **spec}})


def test_a_changed_key_is_named_as_the_resource_writes_it() -> None:
    def asked(**spec: Any) -> JobSpec:
        return job_spec_of({"metadata": {"name": "a", "uid": "u"}, "spec": {"command": ["x"], **spec}})

    section = {"image": "a", "shmSize": "1Gi"}
    before, after = asked(kubernetes={"image": "a"}), asked(maxRestarts=9, kubernetes=section)
    assert changed_keys(before, after) == ["maxRestarts", "kubernetes.shmSize"]
    assert changed_keys(asked(), asked(workers={"sparesTrain": True})) == ["workers.sparesTrain"]


# ---- columns


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (4800, "1h20m"), (7200, "2h"), (183_600, "2d3h")],
)
def test_a_span_is_coarse(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_columns_are_short_strings_and_leave_out_what_is_not_known() -> None:
    view = replace(training().view, step=12_000, max_steps=50_000, step_seconds_median=0.1, active=2, wanted=3)
    shown = columns(view, now=view.resizes[-1].began_at + 240)
    assert shown["workers"] == "2/3"
    assert shown["step"] == "12,000/50,000"
    assert shown["left"] == "1h3m"
    assert shown["lastResize"] == "start 4m" if view.resizes[-1].began_at else "start"
    assert "checkpoint" not in shown
    assert "left" not in columns(replace(view, phase=Phase.STALLED), now=0.0)


# ---- patches

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def without_null(value: Any) -> Any:
    """A merge patch cannot say null."""
    if isinstance(value, dict):
        return {key: without_null(one) for key, one in value.items() if one is not None}
    return value


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396, as it stands there."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4).map(without_null)


@given(objects, objects)
def test_a_patch_makes_one_status_of_the_other_and_none_of_the_same(before: Any, after: Any) -> None:
    assert merged(before, patch_between(before, after)) == after
    assert patch_between(after, after) == {}


@holds("Statuses of resources are written 20 times")
def test_for_how_long_it_has_been_so_is_no_news() -> None:
    before = {"reason": "0 of 2 workers ready; waiting for 9 s", "conditions": [{"message": "and 1.5 s so far"}]}
    later = {"reason": "0 of 2 workers ready; waiting for 14 s", "conditions": [{"message": "and 6.5 s so far"}]}
    assert not tells_news(before, later)
    assert tells_news(before, {**later, "step": 7})
    assert tells_news(before, {**later, "reason": "1 of 2 workers ready; waiting for 14 s"})


# ---- an end


def view_of(phase: Phase, **fields: Any) -> JobView:
    shape = {"can_checkpoint": True, "active": 3, "step": 7, "last_checkpoint_step": None, **fields}
    return replace(training().view, phase=phase, **shape)


@holds("A resource has its finalizer")
def test_a_job_that_can_save_stops_saves_ends_and_is_forgotten_in_this_order() -> None:
    deletion = Deletion("run", 0.0)
    assert next_step(view_of(Phase.RUNNING), deletion, 3, 1.0) is DeletionStep.PAUSE
    assert next_step(view_of(Phase.RESIZING), deletion, 3, 1.0) is DeletionStep.WAIT
    assert next_step(view_of(Phase.PAUSED), deletion, 3, 1.0) is DeletionStep.SAVE
    deletion.asked_to_save = True
    assert next_step(view_of(Phase.PAUSED), deletion, 3, 1.0) is DeletionStep.WAIT
    saved = view_of(Phase.PAUSED, last_checkpoint_step=7)
    assert next_step(saved, deletion, 3, 1.0) is DeletionStep.CANCEL
    deletion.over_since = 2.0
    over = view_of(Phase.CANCELLED, active=0)
    assert next_step(over, deletion, 1, 3.0) is DeletionStep.WAIT
    assert next_step(over, deletion, 0, 3.0) is DeletionStep.FORGET


@pytest.mark.parametrize("fields", [{"can_checkpoint": False}, {"active": 0}])
def test_what_cannot_be_saved_ends_at_once(fields: dict[str, Any]) -> None:
    assert next_step(view_of(Phase.RUNNING, **fields), Deletion("run", 0.0), 3, 1.0) is DeletionStep.CANCEL


@holds("A resource has its finalizer")
def test_no_wait_of_an_end_is_for_ever() -> None:
    deletion = Deletion("run", 0.0, asked_to_save=True)
    paused = view_of(Phase.PAUSED)
    assert next_step(paused, deletion, 3, SAVE_SECONDS + 1) is DeletionStep.CANCEL, "nothing comes of the save"
    failed = replace(paused, figures=Figures(counters={series_key(FAILED_SAVES, {}): 1.0}))
    assert next_step(failed, deletion, 3, 1.0) is DeletionStep.CANCEL, "the save has failed"
    deletion.over_since = 0.0
    over = view_of(Phase.CANCELLED, active=0)
    assert next_step(over, deletion, 3, END_SECONDS + 1) is DeletionStep.FORGET, "pods that do not end"
