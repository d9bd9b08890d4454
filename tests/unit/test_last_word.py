"""A worker that the controller has told to end ends, whatever its script does about it."""

from types import SimpleNamespace

import pytest
from shoal.session.link import Ended
from shoal.training.resize import Resize
from shoal_protos.errors import JobFailed
from shoal_protos.messages import START_AGAIN, Ending


def resize_hearing(*items: Ended) -> Resize:
    waiting = list(items)
    link = SimpleNamespace(stopping=True, take=lambda: waiting.pop(0))
    step = SimpleNamespace(parameters=SimpleNamespace(forget=lambda: None))
    context = SimpleNamespace(link=link, world=object(), leaving=False)
    return Resize(context, step, *[SimpleNamespace(publish=lambda: None)] * 4)  # type: ignore[arg-type]


def test_a_failure_of_the_job_that_a_script_swallows_in_its_forward_is_raised_again_at_the_next_change() -> None:
    resize = resize_hearing(Ended(Ending.FAILED, "lr differs"))
    for _ in range(3):
        with pytest.raises(JobFailed, match="lr differs"):
            resize.take_part(broken=True)


def test_a_worker_that_is_replaced_where_nothing_launched_it_leaves_with_its_status_and_the_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    resize = resize_hearing(Ended(Ending.REPLACED, "the job begins anew", START_AGAIN))
    with pytest.raises(SystemExit) as left:
        resize.take_part()
    assert left.value.code == START_AGAIN
    assert "shoal: the job begins anew.\n" in capfd.readouterr().err


def test_a_worker_that_is_told_to_leave_leaves_however_often_it_is_asked_to_go_on() -> None:
    resize = resize_hearing(Ended(Ending.DRAINED, "drained"))
    for _ in range(2):
        with pytest.raises(SystemExit):
            resize.take_part()
