"""The transcripts in `scenarios/`: what each command leads to.

`SHOAL_REWRITE=1` writes them anew, to be read as a diff. Together they take every arrow of the table of phases, so
that docs/phases.md draws none that cannot happen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rule import Edit, holds, rule
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import ALLOWED, Turn

from .script import play

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@pytest.fixture(scope="module")
def taken() -> Iterator[set[tuple[Phase, Phase]]]:
    """The arrows that the scenarios of this module have taken so far."""
    arrows: set[tuple[Phase, Phase]] = set()
    enter = Turn.enter

    def note_and_enter(self: Turn, phase: Phase, reason: str = "") -> None:
        arrows.add((self.durable.phase, phase))
        enter(self, phase, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turn, "enter", note_and_enter)
        yield arrows


@pytest.fixture(scope="module")
def played() -> set[Path]:
    """The scenarios of this module that were played so far."""
    return set()


RULES = [
    ("two_worlds", "No generation opens before, in"),
    ("sharded_parameters", "Where parameters are sharded"),
    ("stale_inventory", "An inventory counts only if"),
    ("controller_cut_off", "Silence of more than half"),
    ("controller_always_late", "Silence is counted in the"),
    ("controller_cut_off", "… and the time during"),
    ("firewall", "A refused connection proves a"),
    ("lone_member_dies", "… but at once where the host"),
    ("most_hosts_vanish", "The wait for a silent"),
    ("operator_confirms_deaths", "… or at once, when an operator"),
    ("old_run", "Every run of a job has a uid; a"),
    ("link_down", "When no vote passes although"),
    ("link_down_one_way", "When no vote passes although"),
    ("link_down_between_many", "When no vote passes although"),
    ("straggler", "… and a chain that ends in user"),
    ("stuck_user_code", "… and a chain that ends in user"),
    ("joiner_out_of_reach", "… the same applies while"),
    ("sole_holders_apart", "… and if neither can"),
    ("second_process", "A living member keeps its"),
    ("frozen_then_thawed", "A process that was replaced"),
    ("frozen_and_replaced", "A process that was replaced"),
    ("thawed_before_the_first_step", "A process that was replaced"),
    ("pods_wait_for_room", "Time in which a pod waits"),
    ("node_is_to_go", "… and a drain whose notice"),
    ("evicted_pod", "An evicted worker's pod is"),
    ("damaged_checkpoint", "When a block is lost"),
    ("damaged_checkpoint", "… and a checkpoint that"),
    ("cancel_lost", "A cancelled job is over where no world trains"),
    ("grace_over_a_restart", "Besides numbers, a controller's restart"),
    ("flipped_bit_drained", "Before a planned change begins, copies"),
    ("cell_broken", "There are as many cells as the rarest"),
    ("cell_broken_in_a_round", "No lane in flight is kept where a lane"),
    ("cells_scaled", "Where a job is scaled down its youngest"),
    ("flipped_bit", "When copies differ, all members return to a checkpoint whose"),
    ("no_sound_checkpoint_left", "When copies differ, all members return to a checkpoint whose"),
]


@rule(
    "Those who go back to a checkpoint begin once every coordinate has a member; workers that are ready join them",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "        if absent := turn.durable.absent(fencing.beginners(turn, attempt)):\n",
        '        if absent := "":\n',
    ),
    case="cell_without_a_coordinate",
)
@rule(
    "Within `reconnect_seconds` of a controller's start, until all whom an earlier controller knew have come back, "
    "silence evicts nobody",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.silence",
        "    return now - job.started_at < job.durable.spec.reconnect_seconds and _awaits_somebody(job)",
        "    return False",
    ),
    case="controller_started_while_one_is_frozen",
)
@rule(
    "… and who comes back to a job that waits, from a world that lost all its other members before the first "
    "step, begins again: it would be waited for for ever",
    "A change of the world",
    broken_by=Edit("shoal_controller.core.machine.phases.waiting", "    _dismiss_the_left_behind(turn)\n", ""),
    after="A process that was replaced",
    case="thawed_after_the_others_were_lost",
)
@rule(
    "… and others that begin again from step 0 do not open once it is known that a step was committed: who was "
    "not heard comes back with it",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "    if plan.reason is Reason.START and not attempt.start and ",
        "    if False and ",
    ),
    after="… and who comes back to a job that waits",
    case="first_commit_comes_to_light",
)
@rule(
    "A block is given up only when nobody may still hold it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.lost_blocks",
        "    return bool(_possible_holders(turn, attempt)) and turn.now - attempt.since <= turn.spec.stall_seconds\n",
        "    return False\n",
    ),
    case="sole_holder_thaws",
)
@rule(
    "A worker that was absent when all returned to a checkpoint changes nothing any more",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "        turn.keep(first_valid_generation=plan.generation)\n",
        "",
    ),
    case="thawed_after_all_went_back",
)
@rule(
    "The shown step never goes down when steps are run again",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "    shown = max(turn.durable.step, step)\n",
        "    shown = step\n",
    ),
    case="shown_step",
)
@rule(
    "Every phase of a recovery has its own time limit: a plan may come after a long wait",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "    if _overdue(turn, attempt.planned_at):\n",
        "    if _overdue(turn, attempt.since):\n",
    ),
    case="checkpoint_after_a_long_wait",
)
@rule(
    "The last workers may leave when their step is saved, whichever world saved it: no step is saved twice",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.running",
        "    if found is not None and found.step == step:  # perhaps by an earlier world: no step is saved twice\n",
        "    if found is not None and found.step == step and found.generation == world.generation:\n",
    ),
    case="last_ones_save",
)
@rule(
    "No two requests to save have the same number, in any life of the controller",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.checkpoints",
        'whichever controller\'s life."""\n    number = turn.durable.saves_requested + 1\n',
        'whichever controller\'s life."""\n    number = 1\n',
    ),
    case="saves_asked",
)
@rule(
    "A cancelled job is over where no world trains, paused or lost: nothing is left to wait for",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.operator_requests",
            "turn.durable.phase is Phase.RUNNING and turn.world is not None and turn.world.steps",
            "turn.durable.phase is Phase.RUNNING and turn.world is not None",
        ),
        Edit(
            "shoal_controller.core.machine.phases.operator_requests",
            "turn.durable.phase is Phase.RUNNING and turn.world is not None and turn.world.steps",
            "turn.world is None or turn.world.steps",
        ),
    ],
    case="cancel_paused",
)
@rule(
    "Where nothing says beforehand which step is the last, it is the one at which the scripts of all have ended that "
    "trained it; one that has ended waits outside all exchange, and another of these that goes on fails the job",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.running",
            "    if not at_work <= (followers if is_broken else beyond):\n",
            "    if False:\n",
        ),
        Edit("shoal_controller.core.machine.phases.running", "    if ahead:\n", "    if False:\n"),
    ],
    case="ends_apart",
)
@holds(RULES)
@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_goes_as_its_transcript_says(file: Path, taken: set[tuple[Phase, Phase]], played: set[Path]) -> None:
    before = file.read_text()
    after = play(before)
    played.add(file)
    if os.environ.get("SHOAL_REWRITE"):
        file.write_text(after)
    assert "!!" not in after, after
    assert after == before or os.environ.get("SHOAL_REWRITE"), after


@holds("A job's phase changes only")
def test_every_arrow_of_the_phases_is_taken_by_a_scenario(taken: set[tuple[Phase, Phase]], played: set[Path]) -> None:
    for file in SCENARIOS:
        if file not in played:
            play(file.read_text())
    assert ALLOWED.keys() - taken == set()
