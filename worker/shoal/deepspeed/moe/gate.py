"""The router of a layer of experts: which tokens go to which of them, with which weights, as far as there is room.

The rules are DeepSpeed's, for each k: how many tokens an expert takes, which ones are left out, what noise is added and
what the auxiliary loss is. Random numbers come from torch's default generator, which is seeded for each micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

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
        """How many tokens an expert takes of so many, where others are left out."""
        routing = self.routing
        factor = routing.capacity_factor if self.training else routing.eval_capacity_factor
        return max(math.ceil(tokens / routing.num_experts * (factor * routing.k)), routing.min_capacity, 1)

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


def _gumbel(like: Tensor) -> Tensor:  # of its shape
    return -torch.empty_like(like).exponential_().log()
