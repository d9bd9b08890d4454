"""Optimizers that keep more than tensors, as people write them; what they end with in every world is compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Own(torch.optim.Optimizer):
    """Adam's first half; where it counts its steps is what its kinds differ in."""

    def __init__(self, parameters: Any, **values: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, **values})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                state = self.state[parameter]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.add_(state["mean"], alpha=-group["lr"] / (1 - 0.9 ** self.count(group, state)))

    def begin(self, group: dict[str, Any]) -> None:
        """Before a group's parameters."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        raise NotImplementedError


class InGroup(Own):
    """A count that the first step puts into the group, as most packages do."""

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return int(group["step"])


class InTensor(Own):
    """Counts that are tensors of the group, and a list beside them, all written where they are."""

    def __init__(self, parameters: Any, **values: Any) -> None:
        super().__init__(parameters, **values)
        for group in self.param_groups:
            group.update(count=torch.zeros(()), again=torch.zeros(1), seen=[0, 0.0])

    def begin(self, group: dict[str, Any]) -> None:
        group["count"] += 1
        group["again"] += 1
        group["seen"][0] += 1
        group["seen"][1] += 0.5

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(group["count"] + group["again"]) - 2 * group["seen"][1]


class WherePresent(InGroup):
    """Does not count in a group without parameters."""

    def begin(self, group: dict[str, Any]) -> None:
        if group["params"]:
            super().begin(group)


class InState(Own):
    """Python numbers beside the tensors of the state: whole, a truth value, a fraction, and one that becomes it."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        assert type(state.setdefault("step", 0)) is int and type(state.setdefault("even", True)) is bool
        state["step"] += 1
        state["even"] = not state["even"]
        state["weight"] = state.get("weight", 0.0) + 0.1
        assert type(state["weight"]) is float
        state["later"] = state.get("later", 0) + (0.5 if state["step"] > 4 else 1)
        assert type(state["later"]) is (float if state["step"] > 4 else int)
        return state["step"] + state["weight"] + state["even"] + state["later"]


KINDS: tuple[type[Own], ...] = (InGroup, InTensor, WherePresent, InState)


# ---- 8-bit state


class EightBit(torch.optim.Optimizer):
    """A mean in codes of a byte, each run of 256 with a scale, and a table of what codes mean; of small tensors in
    floats, as bitsandbytes does it.
    """

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    self.begin(parameter, state)
                state["step"] += 1
                mean = self.read(state).view(parameter.shape).lerp_(parameter.grad, 0.1)
                self.write(state, mean)
                parameter.add_(self.read(state).view(parameter.shape), alpha=-group["lr"] / (1 - 0.9 ** state["step"]))

    def begin(
        self,
        parameter: Tensor,  # of any shape
        state: dict[str, Any],
    ) -> None:
        state["step"] = 0
        if parameter.numel() < 4_096:
            state["mean"] = torch.zeros_like(parameter)
            return
        state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
        state["scale"] = parameter.new_zeros(parameter.numel() // 256)
        state["table"] = torch.linspace(-1, 1, 255, dtype=parameter.dtype, device=parameter.device)

    def read(self, state: dict[str, Any]) -> Tensor:  # (elements,)
        if "mean" in state:
            return state["mean"]  # type: ignore[no-any-return]
        runs = state["table"][state["codes"].reshape(-1, 256).long()] * state["scale"].unsqueeze(1)
        return runs.view(-1)  # type: ignore[no-any-return]

    def write(
        self,
        state: dict[str, Any],
        mean: Tensor,  # of the parameter's shape
    ) -> None:
        if "mean" in state:
            return
        runs = mean.reshape(-1, 256)
        state["scale"].copy_(runs.abs().amax(1))
        codes = (runs / state["scale"].clamp(min=1e-30).unsqueeze(1) * 127).round() + 127
        state["codes"].copy_(codes.view(state["codes"].shape))


class Codes(Tensor):
    """Wraps what 8-bit state is made of, as torchao's class does; nothing can be done with it as a whole."""

    codes: Tensor
    scale: Tensor
    table: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, table: Tensor) -> Codes:  # each of any shape
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=table.dtype, device=codes.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor, table: Tensor) -> None:  # each of any shape
        self.codes, self.scale, self.table = codes, scale, table

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale", "table"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Codes:
        return Codes(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"unimplemented operator {func}")


class EightBitWrapped(EightBit):
    """The same in a tensor of its own class."""

    def begin(
        self,
        parameter: Tensor,  # of any shape
        state: dict[str, Any],
    ) -> None:
        super().begin(parameter, state)
        if "codes" in state:
            state["coded"] = Codes(state.pop("codes"), state.pop("scale"), state.pop("table"))

    def read(self, state: dict[str, Any]) -> Tensor:  # (elements,)
        return super().read(vars(state["coded"]) if "coded" in state else state)

    def write(
        self,
        state: dict[str, Any],
        mean: Tensor,  # of the parameter's shape
    ) -> None:
        super().write(vars(state["coded"]) if "coded" in state else state, mean)


# ---- what may not run on blocks


class Lars(Own):
    """A rate for each matrix, from its norms; vectors are trained as by SGD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                rate = parameter.norm() / parameter.grad.norm() * 0.01 if parameter.ndim > 1 else 1.0
                parameter.add_(parameter.grad, alpha=-group["lr"] * float(rate))


class Normed(Own):
    """Divides by the norm of each tensor, whatever its shape is."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return 1.0 + float(state["mean"].norm())


class Global(Own):
    """Divides by what it has seen of all parameters."""

    def begin(self, group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0.0) + sum(float(one.grad.abs().sum()) for one in group["params"])

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return 1.0 + float(group["seen"])


class Shared(Own):
    """Divides by the norm of all gradients of a group."""

    norm = 0.0

    def begin(self, group: dict[str, Any]) -> None:
        self.norm = float(torch.cat([one.grad for one in group["params"]]).norm())

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return 1.0 + self.norm


class InAttribute(Own):
    """A count that stands beside groups and state."""

    steps = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.steps += 1

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return self.steps


class InText(Own):
    """A count that is a text of the state."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["steps"] = state.get("steps", "") + "|"
        return len(state["steps"])


class FewNumbers(Own):
    """Seven of each tensor, whatever its size is."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["few"] = state["mean"].reshape(-1)[:7].clone()
        return 1.0


class Unevenly(Own):
    """One for 12 elements, which blocks cut."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        flat = state["mean"].reshape(-1)
        state["scale"] = flat[: flat.numel() // 12 * 12].view(-1, 12).amax(1)
        return 1.0


class Drawing(Own):
    """Adds noise."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return 1.0 + torch.rand(()).item()


class Wrapper(Own):
    """Leaves all to another optimizer, which has the parameters of the script."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.within = torch.optim.SGD(parameters, lr=0.01)

    def step(self, closure: Any = None) -> None:
        self.within.step()


class Idle(Own):
    """Does nothing."""

    def step(self, closure: Any = None) -> None:
        pass


class Asking(Own):
    """Its step wants something that the engine does not have."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("give a closure")
        super().step()


class AtOnce(Own):
    """Makes its state when it is constructed, so that nothing can be tried without it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(mean=torch.ones_like(parameter), count=torch.zeros(()))

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["count"] += 1
        return float(state["count"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"]  # KeyError
        super().step()


class Plain(Own):
    """Counts nothing."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return 1.0


class Seldom(Plain):
    """Treats what it is given otherwise where something is so that seldom is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(self.direction(parameter, parameter.grad), alpha=-group["lr"])

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:  # all of one shape
        raise NotImplementedError


class Centred(Seldom):
    """Of convolutions."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:  # all of one shape
        return gradient - gradient.mean(dim=(1, 2, 3), keepdim=True) if gradient.ndim == 4 else gradient


class Large(Seldom):
    """Scales matrices of 128 rows and columns or more."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:  # all of one shape
        is_large = gradient.ndim == 2 and min(gradient.shape) >= 128
        return gradient / gradient.norm(dim=1, keepdim=True) if is_large else gradient


class Clipping(Seldom):
    """Cuts gradients of a large norm."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:  # all of one shape
        return gradient * min(1.0, 1000.0 / (1.0 + float(gradient.norm())))


class Skipping(Seldom):
    """Leaves parameters without a gradient as they are, decay included."""

    def direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:  # all of one shape
        return gradient + 0.1 * parameter if gradient.any() else gradient


class Steady(Own):
    """Steps less far where a tensor's gradients are above those before, as StableAdamW."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        last = state["mean"].square()
        state["squares"] = last if "squares" not in state else state["squares"].lerp(last, 0.1)
        return max(1.0, float((last / state["squares"].clamp(min=1e-30)).mean().sqrt()))


# ---- what changes where no joiner is given it, and is not read in the first steps


class LateAttribute(Plain):
    """A count that stands beside groups and state."""

    steps = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.steps += 1

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return 2.0 if self.steps > 100 else 1.0


class Warming:
    """A schedule of somebody's own."""

    steps = 0


class LateObject(Plain):
    """A count in an object that it has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.warming = Warming()

    def begin(self, group: dict[str, Any]) -> None:
        self.warming.steps += 1


class LateText(Plain):
    """A count that is a text of the state."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["steps"] = state.get("steps", "") + "|"
        return 2.0 if len(state["steps"]) > 100 else 1.0


class LateShared(Plain):
    """A count in the state of no parameter."""

    def begin(self, group: dict[str, Any]) -> None:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


class Beginning(Plain):
    """Notes once that it has begun: a joiner's does so again."""

    has_begun = False

    def begin(self, group: dict[str, Any]) -> None:
        self.has_begun = True


LATE: dict[type[Own], str] = {
    LateAttribute: "attribute steps",
    LateObject: "attribute warming",
    LateText: "'steps' in its state, a str",
    LateShared: "'all' of its state, which is no parameter",
}
REFUSED: dict[type[Own], str] = {
    Lars: r"trains a matrix otherwise than its elements in a row \(\d+% of the weights differ after 6 steps\)",
    Normed: r"trains blocks by themselves otherwise than the whole",
    Global: r"keeps seen in its group, which depends on the parameters that are in it",
    Shared: r"trains a tensor otherwise when another one is beside it",
    InAttribute: r"keeps what no worker that joins could be given \(attribute steps\)",
    InText: r"keeps what no worker that joins could be given \('steps' in its state, a str\)",
    FewNumbers: r"keeps 7 numbers as 'few' of 20480 parameters, neither one of each nor one of all",
    Unevenly: r"keeps 1706 numbers as 'scale' of 20480 parameters, neither one of each nor one of all",
    Drawing: r"draws random numbers",
    Wrapper: r"steps another optimizer, which has the script's parameters \(within\)",
    Centred: r"trains 4 dimensions otherwise than their elements in a row",
    Large: r"trains a matrix otherwise than its elements in a row",
    Clipping: r"trains blocks by themselves otherwise than the whole",
    Skipping: r"trains blocks by themselves otherwise than the whole",
    Steady: r"trains blocks by themselves otherwise than the whole",
    Idle: r"leaves the parameters that it is given as they are",
}
