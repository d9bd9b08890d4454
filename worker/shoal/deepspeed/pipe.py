"""`deepspeed.pipe`: a model as a list of layers, of which each process of a cell builds those of its stage.

`PipelineModule` cuts the list into as many stages as the cell's pipeline has places, and opens the cell where the
script has not. `deepspeed.initialize` makes a `PipelineEngine` for it (pipeline_engine.py). A layer has the same first
values in every stage, wherever it is built. Names are DeepSpeed's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import numpy
import torch
from shoal_protos.errors import UserError
from shoal_protos.shape import ONE, Shape
from torch import nn

from shoal.cells.cell import Cell
from shoal.cells.marks import tied
from shoal.cells.stages import Stages, built_everywhere
from shoal.data.seeds import RandomState, seed_from
from shoal.deepspeed import checkpointing, lone_group
from shoal.deepspeed.surface import module_lacks
from shoal.guards.arguments import refuse_unknown
from shoal.session.cell_opening import cell as open_cell
from shoal.session.cell_opening import opened_cell

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
ARGUMENTS = ("layers", "num_stages", "topology", "loss_fn")
DIVIDED_BY = ("pipe", "data")
"""Axes of a topology that a list of layers has by itself."""


class LayerSpec:
    """A layer that is built where it is needed."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """`typename`: its class, called with the other arguments. Raises `UserError` for another class."""
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UserError(f"{type(self).__name__} is given {typename!r:.60}; expected a class of torch.nn.Module.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join([*map(repr, self.module_args), *named])})"

    def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002
        """Returns the layer, with new values."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """One of several layers that share parameters: the copies that stages have of them stay equal."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        """`key`: names those that share, within a stage one module. `forward_fn`: called with the module and its input,
        in place of its forward. `tied_weight_attr`: names of the parameters that stages share. Raises `UserError`.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key:
            raise UserError(f"TiedLayerSpec is given the key {key!r:.60}; expected a text without a dot.")
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How a list becomes stages, by DeepSpeed's names."""

    seed_layers: bool = False
    """Whether layer `i` is built from the seed `base_seed + i`, and not from the script's."""
    seed_fn: Callable[[int], object] | None = None
    """Seeds generators, in place of all of torch's, Python's and numpy's."""
    base_seed: int = 1234
    partition_method: str = "parameters"
    activation_checkpoint_interval: int = 0
    """Layers whose activations are made again at once; 0: none are."""
    activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint
    checkpointable_layers: list[str] | None = None
    """Classes of layers whose activations may be; None: any that has parameters."""
    dynamic_shape: bool = False

    def check(self) -> None:
        """Raises `UserError`."""
        interval = self.activation_checkpoint_interval
        if not isinstance(interval, int) or interval < 0:
            raise UserError(f"PipelineModule is given activation_checkpoint_interval {interval!r:.60}; expected 0 or a "
                            "number of layers.")  # fmt: skip
        if self.activation_checkpoint_func is not checkpointing.checkpoint:
            raise UserError(
                "PipelineModule is given an activation_checkpoint_func, and one that Shoal does not know may draw "
                "other random numbers when activations are made again; leave it out, which means "
                "deepspeed.checkpointing.checkpoint."
            )
        if self.dynamic_shape:
            raise UserError(
                "PipelineModule is given dynamic_shape=True, and stages of a cell agree on one shape of activations; "
                "pad batches to one length, and leave it out."
            )

    def seed(self, layer: int, drawn: int) -> None:
        """Random numbers of a layer's first values begin. `drawn`: by the script's own seed."""
        if not self.seed_layers:
            seed_from(f"{drawn} layer {layer}")
        elif self.seed_fn is not None:
            self.seed_fn(self.base_seed + layer)
        else:
            torch.manual_seed(self.base_seed + layer)
            random.seed(self.base_seed + layer)
            numpy.random.seed(self.base_seed + layer)


class HasPlace(Protocol):
    """What is asked of a `shoal.cell`."""

    @property
    def shape(self) -> Shape: ...

    def index(self, dimension: str) -> int: ...

    def group(self, dimension: str) -> Any: ...


class StageLayers(nn.Sequential):
    """The layers of one stage, by their numbers in the whole list; functions among them have no name. Called with what
    the stage before returns, a tensor or several, each as an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[Any], Any]] = []
        self._spans: list[tuple[int, int, bool]] = []
        """Layers that are called at once: the first, the one after them, and whether their activations are not kept."""

    def add(self, layer: Any, number: int) -> None:
        """The next one."""
        if isinstance(layer, nn.Module):
            self.add_module(str(number), layer)
        self._calls.append(layer)

    def add_tied(self, spec: TiedLayerSpec, made: Callable[[], nn.Module]) -> None:
        """The next one. `made`: what makes the module, if this stage has none of its key yet."""
        if "tied_modules" not in self._modules:
            self.add_module("tied_modules", nn.ModuleDict())
        modules = self.tied_modules
        assert isinstance(modules, nn.ModuleDict)
        if spec.key not in modules:
            modules[spec.key] = made()
        module = modules[spec.key]
        self._calls.append(module if spec.forward_fn is None else partial(spec.forward_fn, module))

    def divide(self, interval: int, classes: Sequence[str] | None) -> None:
        """All are there. `interval`: how many are checkpointed at once; 0: none. `classes`: that may be."""
        size = interval or len(self._calls) or 1
        for start in range(0, len(self._calls), size):
            calls = self._calls[start : start + size]
            if classes is not None:
                can_be = all(type(call).__name__ in classes for call in calls)
            else:
                can_be = any(isinstance(call, nn.Module) and any(True for _ in call.parameters()) for call in calls)
            self._spans.append((start, start + len(calls), bool(interval) and can_be))

    def forward(self, *inputs: Any) -> Any:
        """What the last layer returns."""
        x: Any = inputs
        for start, stop, checkpoints in self._spans:
            given = x if isinstance(x, tuple) else (x,)
            if checkpoints and torch.is_grad_enabled():
                x = checkpointing.checkpoint(self.of_span, *given, start=start, stop=stop)
            else:
                x = self.of_span(*given, start=start, stop=stop)
        return x

    def of_span(self, *inputs: Any, start: int, stop: int) -> Any:
        """What these layers make of the output of the one before."""
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        for call in self._calls[start:stop]:
            x = call(x)
        return x


class PipelineModule(Stages):
    """A list of layers in stages, one to each place of the cell's pipeline, of which this process has its own."""

    cell: HasPlace
    loss_fn: Callable[..., Any] | None
    num_stages: int
    stage_id: int
    """This process's place among them."""
    parts: list[int]
    """The number of the first layer of each stage, and how many layers there are."""

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        cell: HasPlace | None = None,
        **options: Any,
    ) -> None:
        """`layers`: `LayerSpec`s, modules and functions, each of which takes what the one before returns.
        `num_stages`: places of the cell's pipeline; or those of a `topology` of the axes pipe and data. `loss_fn`: of
        the last layer's output and the labels; None: that output is the loss. `cell`: in place of the one that
        `shoal.cell` has opened, or that is opened here. `options`: those of `StageOptions`. Raises `UserError`.
        """
        known = [one.name for one in fields(StageOptions)]
        refuse_unknown("PipelineModule", [name for name in options if name not in known], (*ARGUMENTS, *known))
        building, specs = StageOptions(**options), _checked(layers)
        building.check()
        wanted = num_stages if topology is None else _stages_of(topology)
        cell = cell or _cell_of(wanted)
        places, place = cell.shape.pipeline, cell.index("pipeline")
        if wanted not in (None, places):
            raise UserError(
                f"PipelineModule is given num_stages {wanted!r:.60}, and the cell's pipeline has {places} places; "
                "expected as many. Leave num_stages out, or say the same in `shoal.cell`."
            )
        bounds = _bounds(specs, building.partition_method, places)
        ties = _ties(specs, bounds)
        drawn = int(torch.randint(1 << 62, ()))
        build = partial(_built, specs, list(pairwise(bounds)), building, ties, drawn)
        super().__init__(built_everywhere(build, places, place, places), place)
        vars(self).update(
            cell=cell, loss_fn=loss_fn, num_stages=places, stage_id=place, parts=bounds
        )  # a loss function that is a module is none of the model's

    def forward(self, *inputs: Any) -> Any:
        """What this process's stage makes of its inputs."""
        (stage,) = self.values()
        return stage(*inputs)


def _checked(layers: Any) -> list[Any]:
    """Raises `UserError` for what is no list of layers."""
    try:
        specs = list(layers)
    except TypeError:
        raise UserError(f"PipelineModule is given a {type(layers).__name__}; expected a list of layers.") from None
    for number, one in enumerate(specs):
        if isinstance(one, PipelineModule) or not (isinstance(one, LayerSpec) or callable(one)):
            raise UserError(
                f"layer {number} of the PipelineModule is a {type(one).__name__}; expected a LayerSpec, a torch.nn."
                "Module or a function."
            )
    return specs


def _stages_of(topology: Any) -> int:
    """Those of a topology. Raises `UserError` for one with other axes than a list of layers has by itself."""
    sizes = {str(axis): int(topology.get_dim(axis)) for axis in topology.get_axis_names()}
    others = [f"{axis} {size}" for axis, size in sizes.items() if axis not in DIVIDED_BY and size > 1]
    if others or "pipe" not in sizes:
        raise UserError(
            f"PipelineModule is given a {type(topology).__name__} with {', '.join(others) or 'no axis pipe'}; expected "
            "the axes pipe and data. Give num_stages, and the cell's other dimensions to shoal.cell before."
        )
    return sizes["pipe"]


def _cell_of(wanted: int | None) -> HasPlace:
    """The cell of this process, which is opened where the script has not done it. Raises `UserError`."""
    opened = opened_cell()
    if opened is not None:
        return opened
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise UserError(
            f"PipelineModule is given num_stages {wanted!r:.60}; expected a number of stages, where shoal.cell has not "
            "said it before."
        )
    if wanted == 1:
        return Cell(ONE, 0)
    lone_group.leave()
    return open_cell(pipeline=wanted)


def _ties(specs: Sequence[Any], bounds: Sequence[int]) -> dict[str, tuple[int, bool]]:
    """By key of tied layers the number of the first, and whether they are in several stages."""
    found: dict[str, tuple[int, bool]] = {}
    for start, stop in pairwise(bounds):
        for number in range(start, stop):
            if isinstance(spec := specs[number], TiedLayerSpec):
                first, are_apart = found.get(spec.key, (number, False))
                found[spec.key] = first, are_apart or first < start
    return found


def _built(
    specs: Sequence[Any],
    spans: Sequence[tuple[int, int]],
    building: StageOptions,
    ties: dict[str, tuple[int, bool]],
    drawn: int,
    stage: int,
) -> StageLayers:
    """One stage. Raises `UserError` for a tie of a parameter that a layer does not have."""
    layers, (start, stop) = StageLayers(), spans[stage]

    def made(spec: TiedLayerSpec) -> nn.Module:
        first, are_apart = ties[spec.key]
        building.seed(first, drawn)
        module = spec.build()
        for name in spec.tied_weight_attr:
            parameter = dict(module.named_parameters()).get(name)
            if parameter is None:
                raise UserError(
                    f'TiedLayerSpec "{spec.key}" ties "{name}", and {spec!r:.80} has no such parameter; give its name '
                    "as tied_weight_attr."
                )
            if are_apart:
                tied(parameter, f"{spec.key}.{name}")
        return module

    for number in range(start, stop):
        spec = specs[number]
        if isinstance(spec, TiedLayerSpec):
            layers.add_tied(spec, partial(made, spec))
        elif isinstance(spec, LayerSpec):
            building.seed(number, drawn)
            layers.add(spec.build(), number)
        else:
            layers.add(spec, number)
    layers.divide(building.activation_checkpoint_interval, building.checkpointable_layers)
    return layers


# ---- which layers a stage has


def _bounds(specs: Sequence[Any], method: str, stages: int) -> list[int]:
    """Numbers of the first layer of each stage, and how many layers there are. Raises `UserError`."""
    count, kind = len(specs), str(method).lower()
    if count < stages:
        raise UserError(f"PipelineModule is given {count} layers for {stages} stages; expected one for each at least.")
    if kind == "uniform":
        return [stage * (count // stages) + min(stage, count % stages) for stage in range(stages + 1)]
    if kind == "parameters":
        return _balanced([_size(spec) for spec in specs], stages)
    if kind.startswith("type:"):
        pattern = str(method)[len("type:") :]
        try:
            weights = [int(re.search(pattern, _name(spec), re.IGNORECASE) is not None) for spec in specs]
        except re.error as error:
            raise UserError(f'partition_method is "{method}", whose pattern cannot be read: {error}.') from None
        if not any(weights):
            raise UserError(
                f'partition_method is "{method}", and no layer is of such a class; expected one of '
                f"{', '.join(sorted({name for spec in specs if (name := _name(spec))}))}."
            )
        return _balanced(weights, stages)
    raise UserError(f'partition_method is "{method!s:.60}"; expected "uniform", "parameters" or "type:" and a pattern.')


def _name(spec: Any) -> str:
    """Of a layer's class, or of a function."""
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", "")


def _size(spec: Any) -> int:
    """Elements that are trained in a layer. One that is not built yet is built without memory."""
    module = spec
    if isinstance(spec, LayerSpec):
        outside = RandomState.save()
        with torch.device("meta"):
            module = spec.build()
        outside.restore()
    if not isinstance(module, nn.Module):
        return 0
    return sum(one.numel() for one in module.parameters() if one.requires_grad)


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """Bounds of stages whose greatest weight is as small as can be, earlier stages being filled first."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(weights, stages, middle)) == stages + 1 else (middle + 1, high)
    return _filled(weights, stages, low)


def _filled(weights: Sequence[int], stages: int, most: int) -> list[int]:
    """Bounds of runs that each weigh `most` at most; at least so many runs as there are stages."""
    bounds, total = [0], 0
    for number, weight in enumerate(weights):
        must_begin = len(weights) - number == stages - len(bounds)
        if number > bounds[-1] and (must_begin or total + weight > most):
            bounds.append(number)
            total = 0
        total += weight
    return [*bounds, len(weights)]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise module_lacks(f"pipe.{name}")
