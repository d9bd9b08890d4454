"""`deepspeed.moe.layer.MoE`: a layer of experts, divided among the processes of a cell, and its router.

Each place of the dimension `expert` has some of the experts, and trains samples of its own. The router says which
tokens go to which experts, with which weights, as far as there is room, by the rules of DeepSpeed for each k; its
random numbers come from the default generator of torch, which is seeded for each micro-batch. Tokens go to their
experts by an all-to-all within the cell, and back by another; an expert sees those of all places in the order of
coordinates, so its gradient has the same bits whichever members make a cell. Names of parts and parameters are those
of DeepSpeed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch import Tensor, nn

from shoal.cells.marks import common, sharded
from shoal.guards.arguments import refuse_unknown
from shoal.session.cell_opening import opened_cell

JITTER = 1e-2
POLICIES = (None, "None", "Jitter", "RSample")


@dataclass(frozen=True, slots=True)
class Routing:
    """What a script says of it, by DeepSpeed's names."""

    num_experts: int = 1
    k: int = 1
    """How many experts a token goes to."""
    capacity_factor: float = 1.0
    """An expert takes so many times its even share of a micro-batch's tokens."""
    eval_capacity_factor: float = 1.0
    """The same out of training."""
    min_capacity: int = 4
    """Or so many tokens, where that is more."""
    noisy_gate_policy: str | None = None
    """What is added while training: "Jitter" multiplies the router's input, "RSample" adds to its output."""
    drop_tokens: bool = True
    """Whether tokens beyond that are left out; else an expert takes as many as the fullest one of the cell gets."""
    use_rts: bool = True
    """Whether those that stay are chosen at random, for k 1; else the first ones do."""
    top2_2nd_expert_sampling: bool = True
    """Whether the second expert is drawn, for k 2; else it is the second best."""

    def check(self) -> None:
        """Raises `UserError`."""
        least = {"num_experts": 1, "k": 1, "min_capacity": 0}
        for name, smallest in least.items():
            if not _is_whole(value := getattr(self, name)) or value < smallest:
                raise UserError(f"MoE is given {name} {value!r:.60}; expected a whole number from {smallest} on.")
        for name in ("capacity_factor", "eval_capacity_factor"):
            if not isinstance(value := getattr(self, name), int | float) or not 0 < value < math.inf:
                raise UserError(
                    f"MoE is given {name} {value!r:.60}: no expert would take a token; expected more than 0."
                )
        if self.k > self.num_experts:
            raise UserError(f"MoE is given k {self.k}, and has {self.num_experts} experts; expected at most as many.")
        if self.noisy_gate_policy not in POLICIES:
            raise UserError(
                f'MoE is given noisy_gate_policy {self.noisy_gate_policy!r:.60}; expected None, "Jitter" or "RSample".'
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Routed(NamedTuple):
    """Of a micro-batch's tokens here."""

    slots: Tensor  # (tokens, choices) int64
    """Where each goes in `(experts, capacity)`, as one row; one beyond the last where it is left out."""
    weights: Tensor  # (tokens, choices) float32
    """What its expert's output is multiplied by."""
    loss: Tensor  # () float32
    """The auxiliary loss, which is least where all experts get equally many."""
    counts: Tensor  # (experts,) int64
    """How many tokens have chosen each."""


class TopKGate(nn.Module):
    """DeepSpeed's, by its name."""

    def __init__(self, model_dim: int, routing: Routing) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, routing.num_experts, bias=False)
        self.routing = routing

    def capacity(self, tokens: int) -> int:
        """How many tokens an expert takes of so many, where others are left out. In float32, as DeepSpeed computes it:
        in float64 1.1 times a share of 10 is a little more than 11, and would have room for 12.
        """
        routing = self.routing
        factor = routing.capacity_factor if self.training else routing.eval_capacity_factor
        share = _single(tokens / routing.num_experts)
        return max(math.ceil(_single(share * _single(factor * routing.k))), routing.min_capacity, 1)

    def choose(
        self,
        tokens: Tensor,  # (tokens, model_dim)
        used: Tensor | None = None,  # (tokens,): 0 for those that are to go nowhere
    ) -> Choice:
        """Which experts they go to, in float32."""
        routing, rows = self.routing, tokens.float()
        policy = routing.noisy_gate_policy if self.training else None
        if policy == "Jitter":
            rows = rows * torch.empty_like(rows).uniform_(1 - JITTER, 1 + JITTER)
        with torch.autocast(rows.device.type, enabled=False):
            logits = nn.functional.linear(rows, self.wg.weight.float())
        score = logits + _gumbel(logits) if policy == "RSample" and routing.k == 1 else logits
        if routing.k == 2 and routing.top2_2nd_expert_sampling:
            best = score.argmax(1, keepdim=True)
            second = (score + _gumbel(score)).scatter(1, best, -math.inf).argmax(1, keepdim=True)
            experts = torch.cat([best, second], 1)
        else:
            experts = score.topk(routing.k, 1).indices
        is_used = torch.ones(len(rows), dtype=torch.bool, device=rows.device) if used is None else used.reshape(-1) != 0
        chosen = nn.functional.one_hot(experts, routing.num_experts).bool() & is_used[:, None, None]
        return Choice(experts, chosen, logits.softmax(1))

    def routed(self, choice: Choice, capacity: int) -> Routed:
        """Gives the tokens their slots, as far as there is room, and their weights."""
        routing, k, probabilities = self.routing, self.routing.k, choice.probabilities
        places = _places(self._precedence(choice)).gather(1, choice.experts)
        has_room = choice.chosen.any(2) & (places < capacity)
        slots = torch.where(has_room, choice.experts * capacity + places, routing.num_experts * capacity)
        weights = probabilities.gather(1, choice.experts) * has_room
        if k > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        counted = choice.chosen[:, 0] if k <= 2 else choice.chosen.any(1)
        share = counted.float().mean(0) / (1 if k <= 2 else k)
        loss = (probabilities.mean(0) * share).sum() * routing.num_experts
        return Routed(slots, weights, loss, choice.counts)

    def _precedence(self, choice: Choice) -> Tensor:  # (tokens, experts) float32
        """Of tokens for the room that an expert has, the larger one first; below 0 for those that have not chosen it.
        First choices come before second ones, and of more choices the likelier before others.
        """
        k, probabilities = self.routing.k, choice.probabilities.detach()
        if k > 2:
            found = probabilities
        elif k == 2:
            found = choice.chosen[:, 0].float()
        else:
            found = torch.rand_like(probabilities) if self.routing.use_rts else torch.zeros_like(probabilities)
        return torch.where(choice.chosen.any(1), found, -1.0)


class Choice(NamedTuple):
    """Of the experts, before anyone knows how much room there is."""

    experts: Tensor  # (tokens, choices) int64
    chosen: Tensor  # (tokens, choices, experts) bool
    probabilities: Tensor  # (tokens, experts) float32

    @property
    def counts(self) -> Tensor:  # (experts,) int64
        """How many tokens have chosen each."""
        return self.chosen.sum((0, 1))


def _places(
    precedence: Tensor,  # (tokens, experts) float32
) -> Tensor:  # (tokens, experts) int64
    """How many tokens come before each one; of equals the earlier one comes first."""
    order = precedence.argsort(stable=True, dim=0, descending=True)
    return torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)[:, None].expand_as(order)
    )


def _single(number: float) -> float:
    """The nearest float32, by Veltkamp's splitting: dynamo traces it."""
    split = number * (2.0**29 + 1)
    return split - (split - number)


def _gumbel(like: Tensor) -> Tensor:  # of its shape
    return -torch.empty_like(like).exponential_().log()


log = get_logger("shoal")
ARGUMENTS = ("hidden_size", "expert", "num_experts", "ep_size")
POSITIONAL = (
    "k", "capacity_factor", "eval_capacity_factor", "min_capacity", "use_residual", "noisy_gate_policy", "drop_tokens",
    "use_rts", "use_tutel", "enable_expert_tensor_parallelism", "top2_2nd_expert_sampling",
)  # fmt: skip
"""Those after them, in DeepSpeed's order."""
UNREAD = {
    "use_tutel": "tokens are laid out by torch's own kernels",
    "enable_expert_tensor_parallelism": "an expert says itself which of its parameters are divided over tensor",
}
"""DeepSpeed's arguments that change nothing here, and why."""


class MoE(nn.Module):
    """A layer of experts with its router. Called with the hidden states, it returns what the experts make of them, the
    auxiliary loss and how many tokens of this process have chosen each expert.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        *positional: Any,
        group: Any = None,
        **options: Any,
    ) -> None:
        """`expert`: of which every expert is a copy. `ep_size`: among how many processes they are divided: those of the
        cell's dimension `expert`, or 1. `group`: of these, in place of the cell's. `options`: those of `Routing`, and
        `use_residual`; by DeepSpeed's names, or `positional` in its order. Raises `UserError`.
        """
        super().__init__()
        options = _by_name(positional, options)
        if not isinstance(expert, nn.Module):
            of = f"the class {expert.__name__}" if isinstance(expert, type) else f"a {type(expert).__name__}"
            raise UserError(f"MoE is given {of} as expert; expected a torch.nn.Module, of which each expert is a copy.")
        self.use_residual = bool(options.pop("use_residual", False))
        self.num_experts, self.ep_size, self.expert_group_name = num_experts, ep_size, f"ep_size_{ep_size}"
        gate = TopKGate(hidden_size, _routing(num_experts, options))
        group = group if group is not None else _group(ep_size)
        if num_experts % ep_size:
            raise UserError(
                f"MoE is given {num_experts} experts, which do not divide among {ep_size} processes (ep_size); "
                "expected a multiple of them."
            )
        self.num_local_experts = num_experts // ep_size
        self.deepspeed_moe = MOELayer(gate, Experts(expert, self.num_local_experts, ep_size), group)
        if self.use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def forward(
        self,
        hidden_states: Tensor,  # (…, hidden_size)
        used_token: Tensor | None = None,  # (…): 0 for tokens that go to no expert
    ) -> tuple[Tensor, Tensor, Tensor]:  # (…, hidden_size); () float32; (experts,) int64
        output, loss, counts = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            of_mlp, parts = _made_by(self.mlp, hidden_states), self.coefficient(hidden_states).softmax(-1)
            output = output * parts[..., 0:1] + of_mlp * parts[..., 1:]
        return output, loss, counts


class Experts(nn.Module):
    """Those of one place."""

    is_one_unit = True

    def __init__(self, expert: nn.Module, count: int, ep_size: int) -> None:
        """`ep_size`: among how many processes they are divided; 1: each has all, in a cell of more places, too."""
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(_copied(expert) for _ in range(count))
        self.ep_size = ep_size
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: one by `copy.deepcopy` has parameters without attributes."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _mark(self) -> None:
        """As DeepSpeed marks them, too, which scripts read."""
        for parameter in self.deepspeed_experts.parameters():
            (sharded if self.ep_size > 1 else common)(parameter, over="expert")
            vars(parameter).update(allreduce=False, group_name=f"ep_size_{self.ep_size}")

    def forward(
        self,
        rows: Tensor,  # (experts here, rows, model_dim)
    ) -> Tensor:  # the same shape
        """Each expert's of its rows."""
        return torch.stack([_made_by(one, own) for one, own in zip(self.deepspeed_experts, rows.unbind(), strict=True)])


class MOELayer(nn.Module):
    """Brings tokens to their experts, and what these make of them back."""

    def __init__(self, gate: TopKGate, experts: Experts, group: Any) -> None:
        """`group`: of the processes among which experts are divided; None: this one has all."""
        super().__init__()
        self.gate, self.experts, self.group = gate, experts, group

    def forward(
        self,
        hidden: Tensor,  # (…, model_dim)
        used: Tensor | None = None,  # (…)
    ) -> tuple[Tensor, Tensor, Tensor]:  # as of `MoE`
        tokens = hidden.reshape(-1, hidden.size(-1))
        choice = self.gate.choose(tokens, used)
        capacity = self.gate.capacity(len(tokens)) if self.gate.routing.drop_tokens else self._fullest(choice.counts)
        slots, weights, loss, counts = self.gate.routed(choice, capacity)
        rows = tokens.new_zeros(self.gate.routing.num_experts * capacity + 1, tokens.size(1))
        of_choices = tokens[:, None].expand(-1, slots.size(1), -1).reshape(-1, tokens.size(1))
        rows = rows.index_copy(0, slots.reshape(-1), of_choices)[:-1]
        made = nn.functional.pad(self._by_experts(rows, capacity), (0, 0, 0, 1))
        back = made.index_select(0, slots.reshape(-1)).unflatten(0, slots.shape)
        return (back * weights.to(back.dtype)[..., None]).sum(1).view_as(hidden), loss, counts

    def _by_experts(
        self,
        rows: Tensor,  # (experts × capacity, model_dim)
        capacity: int,
    ) -> Tensor:  # the same shape
        """What the experts of all places make of these. An expert has the rows of all places in one call."""
        here, width = len(self.experts.deepspeed_experts), rows.size(1)
        came = self._exchanged(rows).view(-1, here, capacity, width).transpose(0, 1)
        made = self.experts(came.reshape(here, -1, width)).view(here, -1, capacity, width).transpose(0, 1)
        return self._exchanged(made.reshape(-1, width))

    def _exchanged(self, rows: Tensor) -> Tensor:
        """Equal parts, one for each place."""
        return rows if self.group is None else _all_to_all(rows, self.group)

    def _fullest(
        self,
        counts: Tensor,  # (experts,) int64
    ) -> int:
        """How many tokens of a place an expert gets at most, on any place."""
        most = counts.max().reshape(1)
        if self.group is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return max(int(most), 1)


def _all_to_all(rows: Tensor, group: Any) -> Tensor:
    return cast(Tensor, _AllToAll.apply(rows, group))  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to place i; gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, found = group, torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, rows.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _made_by(
    expert: nn.Module,
    rows: Tensor,  # (…, model_dim)
) -> Tensor:  # the same shape
    """Of a tuple its first, as DeepSpeed takes it: Megatron's layers return a bias beside it. Raises `UserError`."""
    made = expert(rows)
    made = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(made, Tensor) or made.shape != rows.shape:
        output = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise UserError(
            f"an expert of MoE, a {type(expert).__name__}, returns {output} for rows of shape {tuple(rows.shape)}; "
            "expected a tensor of that shape, or a tuple that begins with one."
        )
    return made


def _copied(expert: nn.Module) -> nn.Module:
    """With the marks of its parameters."""
    made = copy.deepcopy(expert)
    for mine, other in zip(expert.parameters(), made.parameters(), strict=True):
        vars(other).update(vars(mine))
    return made


def _routing(num_experts: int, options: dict[str, Any]) -> Routing:
    """Raises `UserError`."""
    names = [one.name for one in fields(Routing) if one.name != "num_experts"]
    refuse_unknown("MoE", [name for name in options if name not in (*names, *UNREAD)], [*ARGUMENTS, *names])
    if unread := {name: UNREAD[name] for name, value in options.items() if name in UNREAD and value}:
        log.info("arguments of MoE are left alone", **unread)
    routing = Routing(num_experts, **{name: value for name, value in options.items() if name in names})
    routing.check()
    return routing


def _by_name(positional: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """All options, those that are given by position, too. Raises `UserError`."""
    named = dict(zip(POSITIONAL, positional, strict=False))
    if len(positional) > len(POSITIONAL) or not named.keys().isdisjoint(options):
        count, twice = len(ARGUMENTS) + len(positional), ", ".join(name for name in named if name in options)
        raise UserError(
            f"MoE is given {count} arguments by position{twice and ', and ' + twice + ' by name, too'}; expected "
            f"{', '.join((*ARGUMENTS, *POSITIONAL))}, each once."
        )
    return {**named, **options}


def _group(ep_size: int) -> Any:
    """That of the cell's experts; None where each process has all. Raises `UserError`."""
    if ep_size == 1 and _is_whole(ep_size):
        return None
    cell = opened_cell()
    places = cell.size("expert") if cell is not None else 1
    if cell is None or ep_size != places or not _is_whole(ep_size):
        raise UserError(
            f"MoE is given ep_size {ep_size!r:.60}, and the cell has {places} places for experts; call "
            'shoal.cell(expert=…) before, and give MoE ep_size=cell.size("expert").'
        )
    return cell.group("expert")
