"""`shoal.deepspeed.moe.layer.MoE` in a cell of one process: DeepSpeed's rules of routing, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import shoal
import shoal.deepspeed as deepspeed
import torch
from expert_parallel import BOTH, EXPERT, Divided, group_of
from shoal.cells.hub import CellHub
from shoal.cells.marks import marks
from shoal.deepspeed.moe.layer import Choice, MoE, Routing, TopKGate
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, crew_of
from torch import Tensor, nn

WIDTH = 8


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    made = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, **options)
    for number, expert in enumerate(made.deepspeed_moe.experts.deepspeed_experts):
        torch.manual_seed(number)
        nn.init.normal_(expert.weight)  # type: ignore[arg-type]
    return made


def one_by_one(made: MoE, hidden: Tensor, k: int) -> Tensor:
    """What the layer computes where no token is left out and nothing is drawn, token by token."""
    rows = []
    for token in hidden.reshape(-1, WIDTH):
        probabilities = made.deepspeed_moe.gate.wg(token).softmax(0)
        best = probabilities.topk(k)
        weights = best.values / best.values.sum() if k > 1 else best.values
        experts = made.deepspeed_moe.experts.deepspeed_experts
        rows.append(sum(w * experts[int(e)](token) for w, e in zip(weights, best.indices, strict=True)))
    return torch.stack(rows).view_as(hidden)  # type: ignore[arg-type]


def numbers(tensor: Tensor) -> list[float]:
    found: list[float] = tensor.detach().flatten().tolist()
    return found


def near(tensor: Tensor) -> Any:
    """As the same is computed in another order."""
    return pytest.approx(numbers(tensor), abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_token_gets_what_its_experts_make_of_it_by_their_weights(k: int) -> None:
    made, hidden = layer(k=k, drop_tokens=False, top2_2nd_expert_sampling=False), torch.randn(2, 5, WIDTH)
    output, loss, counts = made(hidden)
    assert numbers(output) == near(one_by_one(made, hidden, k))
    assert loss.dtype == torch.float32 and loss.shape == () and counts.sum() == 10 * k
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_the_residual_is_mixed_in_by_its_coefficients() -> None:
    made, hidden = layer(use_residual=True, drop_tokens=False), torch.randn(6, WIDTH)
    share = made.coefficient(hidden).softmax(-1)
    expected = one_by_one(made, hidden, 1) * share[:, :1] + made.mlp(hidden) * share[:, 1:]
    assert numbers(made(hidden)[0]) == near(expected)


@pytest.mark.parametrize(
    ("k", "training", "tokens", "capacity"), [(1, True, 64, 8), (1, False, 64, 32), (2, True, 64, 16), (1, True, 8, 3)]
)
def test_an_expert_takes_its_share_times_the_factor_or_the_least_number(
    k: int, training: bool, tokens: int, capacity: int
) -> None:
    routing = Routing(4, k, capacity_factor=0.5, eval_capacity_factor=2.0, min_capacity=3)
    assert TopKGate(WIDTH, routing).train(training).capacity(tokens) == capacity


@pytest.mark.parametrize(("factor", "k", "tokens", "experts"), [(1.1, 1, 100, 10), (1.2, 2, 1520, 64), (0.7, 4, 60, 6)])
def test_the_room_of_an_expert_is_rounded_as_deepspeed_does_in_float32(
    factor: float, k: int, tokens: int, experts: int
) -> None:
    of_deepspeed = torch.ceil((tokens / experts) * torch.tensor(factor * k))
    routing = Routing(experts, k, capacity_factor=factor, min_capacity=0)
    assert TopKGate(WIDTH, routing).capacity(tokens) == int(of_deepspeed)


def choice_of(experts: list[list[int]], probabilities: list[list[float]]) -> Choice:
    chosen = nn.functional.one_hot(torch.tensor(experts), len(probabilities[0])).bool()
    return Choice(torch.tensor(experts), chosen, torch.tensor(probabilities))


def test_first_choices_have_room_before_second_ones_and_what_is_left_out_has_no_weight() -> None:
    gate = TopKGate(WIDTH, Routing(2, 2))
    routed = gate.routed(choice_of([[0, 1], [1, 0], [1, 0]], [[0.6, 0.4], [0.3, 0.7], [0.2, 0.8]]), capacity=2)
    assert routed.slots.tolist() == [[0, 4], [2, 1], [3, 4]]
    assert numbers(routed.weights) == near(torch.tensor([[1.0, 0.0], [0.7, 0.3], [1.0, 0.0]]))
    assert routed.counts.tolist() == [3, 3], "as they have chosen"
    assert float(routed.loss) == pytest.approx(2 * ((1.1 / 3) * (1 / 3) + (1.9 / 3) * (2 / 3)))


def test_of_more_choices_than_two_the_likelier_ones_have_room() -> None:
    gate = TopKGate(WIDTH, Routing(3, 3))
    routed = gate.routed(choice_of([[0, 1, 2], [0, 1, 2]], [[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]]), capacity=1)
    assert routed.slots.tolist() == [[3, 1, 3], [0, 3, 2]]


@pytest.mark.parametrize(("use_rts", "kept"), [(True, {0, 1, 2, 3}), (False, {0})])
def test_the_tokens_that_stay_are_drawn_or_the_first(use_rts: bool, kept: set[int]) -> None:
    gate, found = TopKGate(WIDTH, Routing(2, use_rts=use_rts)), set[int]()
    for seed in range(40):
        torch.manual_seed(seed)
        slots = gate.routed(choice_of([[0]] * 4, [[0.9, 0.1]] * 4), capacity=1).slots
        found |= {token for token, slot in enumerate(slots[:, 0].tolist()) if slot == 0}
    assert found == kept


def test_tokens_that_are_not_used_go_nowhere() -> None:
    made, hidden = layer(drop_tokens=False), torch.randn(4, WIDTH)
    output, _, counts = made(hidden, torch.tensor([1, 0, 1, 0]))
    assert counts.sum() == 2 and not output[[1, 3]].any() and output[[0, 2]].any()


@pytest.mark.parametrize("options", [{"noisy_gate_policy": "Jitter"}, {"noisy_gate_policy": "RSample"}, {"k": 2}])
def test_noise_goes_by_the_seed_of_the_micro_batch(options: dict[str, Any]) -> None:
    made, hidden = layer(**options), torch.randn(32, WIDTH)

    def output(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = made(hidden)[0]
        return found

    assert torch.equal(output(1), output(1)) and not torch.equal(output(1), output(2))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_router_computes_in_float32_under_autocast_too(k: int) -> None:
    made, hidden = layer(k=k, top2_2nd_expert_sampling=False, drop_tokens=False), torch.randn(64, WIDTH)
    _, loss, counts = made(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        output, under, as_many = made(hidden)
    assert output.dtype == torch.bfloat16, "its experts do not"
    assert torch.equal(under, loss) and torch.equal(as_many, counts)


class Returning(nn.Linear):
    """A layer that returns something made of its output."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.made = made

    def forward(self, rows: Tensor) -> Any:
        return self.made(super().forward(rows))


@pytest.mark.parametrize("use_residual", [False, True])
def test_of_a_tuple_that_an_expert_returns_the_first_counts(use_residual: bool) -> None:
    def output(made: Callable[[Tensor], Any]) -> list[float]:
        torch.manual_seed(0)
        layer = MoE(WIDTH, Returning(made), 4, use_residual=use_residual)
        return numbers(layer(torch.ones(6, WIDTH))[0])

    assert output(lambda rows: (rows, None)) == output(lambda rows: rows)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda rows: torch.cat([rows, rows], -1), r"a Returning, returns shape \(4, 16\) for rows of shape \(4, 8\)"),
        (lambda rows: {"rows": rows}, r"returns a dict for rows of shape"),
        (lambda _: (), r"returns a tuple for rows of shape"),
    ],
)
def test_an_expert_that_returns_no_rows_of_the_same_shape_is_named(made: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        MoE(WIDTH, Returning(made), 4)(torch.ones(6, WIDTH))


def test_options_may_stand_in_deepspeeds_order() -> None:
    made = MoE(WIDTH, expert(), 4, 1, 2, 1.5, 2.0, 3, True, "Jitter", False, False, top2_2nd_expert_sampling=False)
    assert made.deepspeed_moe.gate.routing == Routing(4, 2, 1.5, 2.0, 3, "Jitter", False, False, False)
    assert made.use_residual


def test_layers_that_are_given_one_expert_have_its_residual_in_common() -> None:
    shared = expert()
    layers = nn.ModuleList(MoE(WIDTH, shared, number, use_residual=True) for number in (2, 4))
    assert layers[0].mlp is layers[1].mlp is shared
    of_experts = [one for layer in layers for one in layer.deepspeed_moe.experts.parameters()]  # type: ignore[union-attr,operator]
    assert len({id(one) for one in of_experts}) == 2 * (2 + 4) and not deepspeed.moe.utils.is_moe_param(shared.weight)


def test_a_copy_of_a_layer_keeps_what_its_parameters_are_and_its_group() -> None:
    hub = CellHub(EXPERT, 1)
    made = copy.deepcopy(nn.Sequential(MoE(WIDTH, expert(), 4, 2, group=group_of(hub, "expert"))))
    found = marks(made, EXPERT, 1)
    assert {name for name, mark in found.items() if mark.of_expert} == {n for n in found if ".deepspeed_experts." in n}
    assert made[0].deepspeed_moe.group.size() == 2


def test_a_layer_of_which_each_place_has_all_experts_is_common_also_if_made_before_the_cell() -> None:
    made = MoE(WIDTH, expert(), 4)
    assert not any(mark.of_expert or mark.dealt for mark in marks(made, EXPERT, 0).values())
    assert sum(mark.dealt is not None for mark in marks(made, Shape(), 0).values()) == 8, "more places would divide it"


def expert() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MoE(WIDTH, expert(), 4, capacity_factor=0), "capacity_factor 0: no expert would take a token"),
        (lambda: MoE(WIDTH, expert(), 4, eval_capacity_factor=-1.0), r"eval_capacity_factor -1\.0: no expert would"),
        (lambda: MoE(WIDTH, expert(), 4, capacity_factor=float("nan")), "capacity_factor nan: no expert would take"),
        (lambda: MoE(WIDTH, expert(), 4, min_capacity=-1), "min_capacity -1; expected a whole number from 0 on"),
        (lambda: MoE(WIDTH, expert(), 0), "num_experts 0; expected a whole number from 1 on"),
        (lambda: MoE(WIDTH, expert(), 4, k=5), "k 5, and has 4 experts; expected at most as many"),
        (lambda: MoE(WIDTH, expert(), 4, noisy_gate_policy="Loud"), "noisy_gate_policy 'Loud'; expected None"),
        (lambda: MoE(WIDTH, expert(), 4, capacity_fator=2), "MoE has no argument capacity_fator.*capacity_factor="),
        (lambda: MoE(WIDTH, nn.Linear, 4), "the class Linear as expert; expected a torch.nn.Module, of which each"),  # type: ignore[arg-type]
        (lambda: MoE(WIDTH, expert, 4), "a function as expert; expected a torch.nn.Module"),  # type: ignore[arg-type]
        (
            lambda: MoE(WIDTH, expert(), 4, 1, 2, k=2),
            "5 arguments by position, and k by name, too; expected",
        ),
        (lambda: MoE(WIDTH, expert(), 4, 1, *range(12)), "16 arguments by position; expected hidden_size, expert, num"),
        (
            lambda: MoE(WIDTH, expert(), 4, 1.0),
            r"ep_size 1\.0, and the cell has 1 places for experts; call shoal\.cell",
        ),  # type: ignore[arg-type]
        (lambda: MoE(WIDTH, expert(), 4, 2), r"ep_size 2, and the cell has 1 places for experts; call shoal\.cell"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_in_one_sentence(make: Callable[[], MoE], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def failure_of(task: CellTask, names: str) -> str:
    with crew_of(names, task) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over or not crew.workers["a"].alive)
        return crew.job.durable.reason + crew.workers["a"].failure


class Uneven(Divided):
    """Three experts for two places."""

    def make_experts(self, expert: nn.Module, **options: Any) -> MoE:
        return MoE(64, expert, 3, 2, group=self.groups["expert"])


def test_experts_that_do_not_divide_among_the_places_are_refused() -> None:
    assert "3 experts, which do not divide among 2 processes" in failure_of(CellTask(shape=EXPERT, model=Uneven), "ab")


class Astray(Divided):
    """The places of the tensor dimension weigh the router's loss differently."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        share = self.moe.deepspeed_moe.gate.wg.weight.square().sum() * self.groups["tensor"].rank()
        return super().forward(tokens, targets) + share - share.detach()


def test_a_router_whose_gradients_differ_between_places_of_the_tensor_dimension_is_named() -> None:
    found = failure_of(CellTask(shape=BOTH, model=Astray), "abcd")
    assert 'parameter "moe.deepspeed_moe.gate.wg.weight"' in found and "gradient" in found


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"train_batch_size": 30, "shoal": {"lanes": 4}},
            r"30 does not divide into micro-batches: shoal\.lanes 4 × .*`shoal\.cell\.expert` 2 is 8",
        ),
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2}, r"into lanes: .*`shoal\.cell\.expert` 2 is 4"),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "shoal": {"lanes": 4}},
            r"× `shoal\.cell\.expert` 2 is 32",
        ),
    ],
)
def test_a_batch_that_does_not_divide_among_the_places_is_refused(sizes: dict[str, Any], words: str) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **sizes}
    config["shoal"] = {"max_steps": 1, "cell": {"expert": 2}, **config.get("shoal", {})}
    with pytest.raises(UserError, match=words):
        shoal.initialize(model=nn.Linear(2, 2), config=config, dataset=[torch.zeros(2)])


def test_the_layer_is_where_scripts_for_deepspeed_look_for_it() -> None:
    assert deepspeed.moe.layer.MoE is MoE


def test_parameters_of_experts_are_told_from_others_by_deepspeeds_names() -> None:
    utils = deepspeed.moe.utils
    layer = MoE(4, nn.Linear(4, 4), 3)
    layer.of_tutel = nn.Parameter(torch.ones(2))
    layer.of_tutel.allreduce = False
    shared, experts = utils.split_params_into_shared_and_expert_params(layer.parameters())
    assert len(experts) == 1 + 3 * 2 and len(shared) == 1 and utils.is_moe_param(layer.of_tutel)
    two = nn.Sequential(layer, MoE(4, nn.Linear(4, 4), 5))
    assert utils.has_moe_layers(two) == (True, 3) and not utils.has_moe_layers(nn.Linear(2, 2))[0]
    groups = [{"params": [*layer.parameters()], "lr": 0.5, "name": "all"}, {"params": shared, "lr": 0.25}]
    made = utils.split_params_into_different_moe_groups_for_optimizer(groups)
    assert made is groups, "as DeepSpeed's does it changes a list"
    assert [(group.get("name"), len(group["params"]), group["lr"], group.get("moe", False)) for group in made] == [
        ("all", 1, 0.5, False), (None, 1, 0.25, False), ("experts", 1, 0.5, True), ("ep_size_1", 6, 0.5, True),
    ]  # fmt: skip
    assert all(one.allreduce is False and one.group_name == "ep_size_1" for one in made[3]["params"])
    with pytest.raises(UserError, match=r"deepspeed\.moe\.utils\.configure_moe_param_groups is not in Shoal; there is"):
        utils.configure_moe_param_groups


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda layer: layer.parameters(), "is given a generator; expected a group of an optimizer, such as"),
        (lambda layer: [*layer.parameters()], "is given a Parameter; expected a group of an optimizer"),
        (lambda _: [{"lr": 0.1}], "is given a group without params; expected"),
    ],
)
def test_what_is_no_group_of_an_optimizer_is_refused(given: Callable[[nn.Module], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(given(expert()))
