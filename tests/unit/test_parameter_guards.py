"""Wrong training that used to say nothing: the module cut off from its flats, parameters and gradients that the script
changes. Each is one sentence that names the parameter, before the step is committed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from integration.scripts import Model
from late_device import LateDevice
from rule import Edit, holds, rule
from shoal.exchange import traffic
from shoal.exchange.pieces import Extent
from shoal.guards.step_guard import Guards, StepGuard
from shoal.guards.write_guards import WINDOW_ELEMENTS, Windows
from shoal.process.device import HOST, Device
from shoal.training.engine import Engine
from shoal_protos.acts import Pause
from shoal_protos.errors import UserError
from small_pieces import limits_of
from torch import Tensor, nn

OPTIONS = {"max_steps": 4, "micro_batches_per_lane": 2}
At = Callable[[Engine], Any]


def at_step_2(action: At) -> At:
    """The action, each time that the loop stands behind step 2."""

    def act(engine: Engine) -> None:
        if engine.global_step == 2:
            action(engine)

    return act


def load_by_assignment(engine: Engine) -> None:
    engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)


def load_in_place(engine: Engine) -> None:
    engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()})


def to_double_and_back(engine: Engine) -> None:
    engine.module.double().float()


def to_half(engine: Engine) -> None:
    engine.module.unused.data = engine.module.unused.data.half()  # as module.half() does


def from_a_vector(engine: Engine) -> None:
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach(), parameters)


def replace_a_layer(engine: Engine) -> None:
    engine.module.up = nn.Linear(64, 256)


def add_a_parameter(engine: Engine) -> None:
    engine.module.extra = nn.Parameter(torch.zeros(3))


def remove_a_layer(engine: Engine) -> None:
    engine.module.unused = None


def unfreeze(engine: Engine) -> None:
    engine.module.frozen.requires_grad_(True)


def freeze(engine: Engine) -> None:
    engine.module.unused.requires_grad_(False)


@torch.no_grad()
def clamp(engine: Engine) -> None:
    engine.module.down.weight.clamp_(-0.01, 0.01)


def clamp_data(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("options", [{}, {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 3}}])
def test_weights_that_are_loaded_between_initialize_and_the_loop_are_refused(options: dict[str, Any]) -> None:
    """In half precision they would be lost without a word: masters have the values of before."""
    with pytest.raises(UserError, match=r"was changed between shoal\.initialize and the loop \(load_state_dict"):
        undisturbed(Task(OPTIONS | options, prepare=load_in_place))


STRUCTURE = [
    (load_by_assignment, r'parameter ".*" was replaced after shoal\.initialize .*would not be trained'),
    (to_double_and_back, r'parameter ".*" got new memory after shoal\.initialize .*would not be trained'),
    (to_half, r'parameter "unused" got new memory after shoal\.initialize'),
    (from_a_vector, r'parameter ".*" got new memory after shoal\.initialize'),
    (replace_a_layer, r'parameter "up\.bias" was replaced after shoal\.initialize'),
    (add_a_parameter, r'parameter "extra" was added after shoal\.initialize'),
    (remove_a_layer, r'parameter "unused" was removed after shoal\.initialize'),
    (unfreeze, r'parameter "frozen" was unfrozen after shoal\.initialize'),
    (freeze, r'parameter "unused" was frozen after shoal\.initialize'),
]


@rule(
    "A module that no longer uses its flats (parameters replaced, moved, added, removed, frozen or unfrozen) is "
    "refused at the next step, and the parameter is named",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.guards.write_guards", "!= self._places:", "== []:"),
        Edit("shoal.guards.write_guards", "not all(map(is_, now, known))", "not known"),
    ],
)
@pytest.mark.parametrize(("action", "sentence"), STRUCTURE)
@pytest.mark.parametrize("when", ["before the loop", "in the loop", "after a step"])
def test_a_module_that_is_not_the_one_that_was_given_is_refused_by_the_parameters_name(
    action: At, sentence: str, when: str
) -> None:
    def step(engine: Engine) -> None:
        if engine.step():
            at_step_2(action)(engine)

    task = {
        "before the loop": Task(OPTIONS, prepare=action),
        "in the loop": Task(OPTIONS, in_loop=at_step_2(action)),
        "after a step": Task(OPTIONS, step=step),
    }[when]
    with pytest.raises(UserError, match=sentence):
        undisturbed(task)


@rule(
    "Only the engine writes parameters: any other write, whether version counters show it or not, is refused "
    "before the next commit; an evaluation may write if it restores them",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.guards.write_guards",
            'self._comparisons.expect_equal(self._content[1], self._checksum(), f"a parameter {CHANGED}")',
            "return",
        ),
        Edit(
            "shoal.guards.write_guards",
            "if self._flats and self._versions and self.whole() == before:",
            "if self._versions:",
        ),
        Edit(
            "shoal.guards.write_guards",
            "self._checksum() == self._content",
            "self._content is not None",
            by="test_a_write_past_autograd_in_a_forward_is_refused",
        ),
        Edit(
            "shoal.guards.step_guard",
            "            if not are_equal:\n",
            "            if not are_equal and not otherwise:\n",
            by="test_a_parameter_that_the_script_changes_is_refused_before_the_next_commit",
        ),
        Edit(
            "shoal.training.step",
            "        for check in self._context.state.guards.before_vote:  # also where it broke before its vote\n"
            "            check()\n",
            "",
            by="test_what_a_device_has_found_late_is_refused_before_a_vote_without_a_step",
        ),
    ],
)
@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (clamp, r'parameter "down\.weight" was changed by the script or the model\'s forward \(a step of another opt'),
        (load_in_place, r'parameter ".*" was changed by the script'),
        (clamp_data, r"a parameter was changed by the script"),
    ],
)
@pytest.mark.parametrize("when", ["before the forward", "after the step"])
@pytest.mark.parametrize("device", [lambda: HOST, LateDevice], ids=["on the CPU", "on a device"])
def test_a_parameter_that_the_script_changes_is_refused_before_the_next_commit(
    action: At, sentence: str, when: str, device: Callable[[], Device]
) -> None:
    seen: list[int] = []

    def step(engine: Engine) -> None:
        seen.append(engine.global_step)
        if engine.step() and when == "after the step":
            at_step_2(action)(engine)

    in_loop = at_step_2(action) if when == "before the forward" else Task().in_loop
    with pytest.raises(UserError, match=sentence):
        undisturbed(Task(OPTIONS, in_loop=in_loop, step=step, device=device))
    assert max(seen) == 2


@pytest.mark.parametrize("device", [lambda: HOST, LateDevice], ids=["on the CPU", "on a device"])
def test_gradients_that_the_script_changes_past_their_versions_are_refused_before_the_commit(
    device: Callable[[], Device],
) -> None:
    def step(engine: Engine) -> None:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.5)
        engine.step()

    with pytest.raises(UserError, match=r"gradients were changed between engine\.backward and engine\.step"):
        undisturbed(Task(OPTIONS | {"stage": 0, "lanes": 4}, step=step, device=device))


def test_a_script_that_swallows_what_a_device_has_found_late_gets_no_further() -> None:
    """All but the commit of that step was made, and no lane is left."""
    found: list[str] = []

    def step(engine: Engine) -> None:
        try:
            if engine.step():
                at_step_2(clamp_data)(engine)
        except UserError as error:
            found.append(str(error))

    with pytest.raises(UserError, match=r"step \d was not made: the script caught the error"):
        undisturbed(Task(OPTIONS, step=step, device=LateDevice))
    assert found[0].startswith("a parameter was changed by the script")


@holds("Only the engine writes parameters")
def test_what_a_device_has_found_late_is_refused_before_a_vote_without_a_step() -> None:
    """A save that it carries, or a joiner's blocks, would have the script's values."""

    def step(engine: Engine) -> None:
        if engine.step() and engine.rank == 1:
            at_step_2(clamp_data)(engine)

    with Crew("abc", Task(OPTIONS, step=step, device=LateDevice)) as crew:
        crew.train_to(2)
        b = crew.workers["b"]
        crew.plant("b", 3, "exchange", "abort")
        crew.request(Pause())
        crew.allow()
        crew.until("b to be refused", lambda: "a parameter was changed by the script" in b.failure)
        assert "vote_alone" in b.failure and b.engine.global_step == 2


class Renormalizing(Model):
    """Its forward changes a weight, as `max_norm` does."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(1.0)
        return super().forward(tokens, targets)


@holds("Only the engine writes parameters")
def test_a_forward_that_changes_a_parameter_is_refused() -> None:
    with pytest.raises(UserError, match=r'parameter "up\.weight" was changed by .* the model\'s forward'):
        undisturbed(Task(OPTIONS, model=lambda: Renormalizing(0.1, True)))


def clip(engine: Engine) -> None:
    nn.utils.clip_grad_norm_(engine.module.parameters(), 1e9)


def scale_data(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.5)


def replace_gradients(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def zero_in_place(engine: Engine) -> None:
    engine.module.zero_grad(set_to_none=False)


@rule(
    "Between `engine.backward` and `engine.step` nobody writes gradients: some are already being sent",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.guards.write_guards", "if versions(made.gradients.flats) != made.versions or not", "if not"),
        Edit("shoal.guards.write_guards", " or not made.gradients.are_in_place(self._parameters):", ":"),
    ],
)
@pytest.mark.parametrize("action", [clip, scale_data, replace_gradients, zero_in_place])
@pytest.mark.parametrize("calls", [1, 2, 8])
def test_gradients_that_are_changed_between_backward_and_step_are_refused(action: At, calls: int) -> None:
    """In a lane's first micro-batch, in its last one, and in the step's last, whose buckets have left."""
    count = 0

    def step(engine: Engine) -> None:
        nonlocal count
        count += 1
        if count == calls:
            action(engine)
        engine.step()

    with pytest.raises(UserError, match=r"changed between engine\.backward and engine\.step .*`gradient_clipping`"):
        undisturbed(Task(OPTIONS, step=step))
    assert count == calls


# ---- what is fine


def look(engine: Engine) -> None:
    """Norms, copies, an average of the weights, another mode, a part without parameters."""
    for parameter in engine.module.parameters():
        assert parameter.grad is None or parameter.grad.norm() >= 0
    copy.deepcopy(engine.module)
    nn.utils.get_total_norm([p for p in engine.module.parameters() if p.requires_grad])
    engine.module.dropout = nn.Dropout(engine.module.dropout.p)


@torch.no_grad()
def swap(engine: Engine) -> None:
    """Other weights for an evaluation, then the own ones again."""
    with engine.evaluating():
        own = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict({name: value * 0 for name, value in own.items()})
        for _ in engine.shard([]):
            raise AssertionError("there is nothing to evaluate")
        engine.module.load_state_dict(own)


def look_and_step(engine: Engine) -> None:
    look(engine)
    if engine.step():
        swap(engine)


@holds("Only the engine writes parameters")
@pytest.mark.parametrize("workers", ["", "ab", "abcd"])
def test_who_only_looks_or_puts_back_what_it_changed_gets_the_same_bits(workers: str) -> None:
    task = Task(OPTIONS, step=look_and_step)
    right = undisturbed(Task(OPTIONS))
    if not workers:
        assert undisturbed(task) == right
        return
    with Crew(workers, task) as crew:
        crew.train_to(2)
        crew.kill(workers[-1])
        assert crew.finish() == right


def test_what_others_send_while_the_script_holds_its_gradients_is_not_taken_for_the_scripts_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four workers of a lane each, so that a mirror's values arrive in the very copy that the last backward filled."""
    monkeypatch.setattr(traffic, "piece_limits", limits_of(1 << 14))
    task = Task({"max_steps": 12})
    right = undisturbed(task)
    arrived = 0

    def hold(engine: Engine) -> None:
        """Between backward and step, until all others have done what they can."""
        nonlocal arrived
        worker = next(one for one in crew.workers.values() if one.engine is engine)
        live, rounds = engine.context.state.sums.live, crew.rounds
        before = [flat.clone() for flat in live.flats]
        worker.wait(lambda: crew.rounds > rounds + 3)
        arrived += sum(int((now != then).sum()) for now, then in zip(live.flats, before, strict=True))
        engine.step()

    crew = Crew("abcd", replace(task, step=hold))
    with crew:
        assert crew.finish() == right
    assert arrived


@holds("Only the engine writes parameters")
def test_weights_that_an_evaluation_does_not_put_back_are_refused() -> None:
    @torch.no_grad()
    def forget(engine: Engine) -> None:
        if engine.step():
            with engine.evaluating():
                engine.module.up.weight.mul_(0.5)

    with pytest.raises(UserError, match=r'parameter "up\.weight" was changed by the script'):
        undisturbed(Task(OPTIONS, step=forget))


@holds("Only the engine writes parameters")
def test_the_windows_pass_over_every_element() -> None:
    flats = [torch.zeros(3 * WINDOW_ELEMENTS + 5), torch.zeros(7)]
    windows = Windows(flats)
    for _ in range(5):
        windows.of(flats).add_(1)
        windows.turn()
    assert all(bool((flat == 1).all()) for flat in flats)


def test_a_window_without_some_extents_is_the_rest_of_it() -> None:
    flats = [torch.zeros(WINDOW_ELEMENTS + 20), torch.zeros(7)]
    windows = Windows(flats)
    arriving = [
        Extent(0, 30, 40),
        Extent(1, 2, 3),
        Extent(0, 0, 10),
        Extent(0, WINDOW_ELEMENTS - 5, WINDOW_ELEMENTS + 8),
    ]
    for _ in range(3):
        for part in windows.of_all_but(flats, arriving):
            part.add_(1)
        windows.turn()
    right = [torch.ones_like(flat) for flat in flats]
    for bucket, start, stop in arriving:
        right[bucket][start:stop] = 0
    assert all(map(torch.equal, flats, right))


def test_a_guard_is_told_of_those_moments_alone_in_which_it_has_something_to_do() -> None:
    calls = []

    class Counts(StepGuard):
        def before_vote(self) -> None:
            calls.append("vote")

        def before_step(self) -> None:
            calls.append("step")

    guards = Guards(StepGuard(), Counts())
    for check in (*guards.before_step, *guards.before_vote):
        check()
    assert calls == ["step", "vote"]
    assert not (guards.on_batch or guards.before_backward or guards.after_backward or guards.before_last_step)
