"""Frozen weights of a class that wraps tensors, as a quantised base is: they stay outside blocks, and travel as what
they wrap.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Task, undisturbed
from crew_saves import saved
from integration.scripts import WIDTH, Model
from shoal.checkpoint.model_export import export
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Quantised(Tensor):
    """Bytes and a scale for each row; of all that it cannot do, `empty_like` is asked first."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantised:  # (rows, columns) int8, (rows, 1)
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)
        assert isinstance(made, Quantised)
        return made

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Quantised:
        return Quantised(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantised(args[0].values, args[0].scale)
        if func is torch.ops.aten.empty_like.default:
            raise NotImplementedError("aten.empty_like")
        plain = tree_map(lambda one: one.values * one.scale if isinstance(one, Quantised) else one, args)
        return func(*plain, **(kwargs or {}))


def quantised(weight: Tensor) -> nn.Parameter:  # (rows, columns)
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return nn.Parameter(Quantised((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)


class OnABase(Model):
    """With a frozen layer whose weights are quantised."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(0.1, True)
        drawn = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight = quantised(drawn)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        extra = torch.tanh(self.base(self.embedding(tokens))).square().mean()
        return super().forward(tokens, targets) + 0.1 * extra


class OnAnotherBase(OnABase):
    def __init__(self) -> None:
        super().__init__(seed=4)


def task(stage: int, **shoal: Any) -> Task:
    return Task({"max_steps": 12, "stage": stage, "shoal": shoal}, model=OnABase)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_quantised_base_is_rank_0s_on_all_and_on_those_that_join(stage: int) -> None:
    other = replace(task(stage), model=OnAnotherBase)
    with Crew("ab", task(stage), odd={"b": other}) as crew:
        crew.train_to(2)
        crew.add("c", other)
        crew.train_until("a world of three", lambda: len(crew.members()) == 3 and crew.at_rest())
        crew.kill("a")
        assert crew.finish() == undisturbed(task(stage)) != undisturbed(other)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_quantised_base_comes_back_with_a_checkpoint(stage: int, tmp_path: Path) -> None:
    saving = task(stage, checkpoint={"path": str(tmp_path), "every_steps": 3})
    with Crew("ab", saving) as crew:
        crew.train_to(4)
        saved(crew, 3)
    with Crew("abc", replace(saving, model=OnAnotherBase)) as crew:
        assert crew.finish() == undisturbed(task(stage))


def test_wrapped_weights_that_are_trained_or_exported_are_named(tmp_path: Path) -> None:
    class Trained(OnABase):
        def __init__(self) -> None:
            super().__init__()
            self.base.weight.requires_grad_(True)

    with pytest.raises(
        UserError, match=r'parameter "base\.weight" requires a gradient and is a Quantised, which keeps'
    ):
        undisturbed(Task({"max_steps": 1}, model=Trained))
    with pytest.raises(UserError, match=r'cannot export the model: "base\.weight" is a Quantised'):
        export(OnABase(), tmp_path / "model.safetensors")
