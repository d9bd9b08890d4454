"""The optimizer and the scheduler of a run, as the configuration's sections say: built by them, or compared with them.

`build_optimizer` and `build_scheduler` are used where the script passes none. Types are found in any case, by
DeepSpeed's or torch's names. What DeepSpeed does with its names is kept: `Adam` decouples weight decay unless
`adam_w_mode` is false, and Adam and AdamW are its fused kernel, whose weight decay is 0 by default, unless `torch_adam`
is true (deepspeed.ai/docs/config-json, "Optimizer Parameters").

`optimizer.type: "Muon"` says which parameters are matrices of hidden layers, for torch's Muon; AdamW trains all others.
Keys and their defaults are DeepSpeed's, whose numbers are others where it computes by `ns_method: "gram"`, its default.
As there, embeddings and output heads are for AdamW, and a parameter's own attribute `use_muon` decides where it is set.

Where the script gives an object beside the section, both must say the same; what the section leaves "auto" is as the
object has it. All of it is called when an engine is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from shoal_protos.config_file import whole
from shoal_protos.errors import UserError
from shoal_protos.text import shown
from shoal_protos.training_log import get_logger
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.config.deepspeed import ERROR_FEEDBACK
from shoal.config.document import Optimizer as OptimizerSection
from shoal.config.document import Scheduler as SchedulerSection
from shoal.config.sentences import all_of, sentences_of, unread_in
from shoal.core.units import plain_name
from shoal.optim.elementwise import COMPRESSING, ELEMENTWISE, NOT_ELEMENTWISE, ON_WHOLE_TENSORS, names
from shoal.optim.schedules import FORMULAS, Schedule
from shoal.optim.several import members_of, schedulers_of, several

log = get_logger("shoal.optim")

Made = TypeVar("Made")
MUON = "muon"
OPTIMIZERS = {kind.__name__.lower(): kind for kind in ELEMENTWISE}
WITHOUT_MEANING = ("fp32_optimizer_states", "set_grad_none")
TORCH_SCHEDULES: dict[str, type[LRScheduler]] = {
    kind.__name__: kind
    for kind in (
        lr_scheduler.ConstantLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.CyclicLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.LinearLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.OneCycleLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.StepLR,
    )
}
LAST_STEP = ("total_num_steps", "total_steps", "total_iters", "T_max")
"""Scheduler parameters that mean the job's last step where they are "auto"."""


def build_optimizer(section: OptimizerSection, model: nn.Module, over: Iterable[Any] | None = None) -> Optimizer:
    """The optimizer over `over`, parameters or groups of them; None: the model's trainable parameters, in one group."""
    parameters = list(over) if over is not None else [one for one in model.parameters() if one.requires_grad]
    if over is not None and not any(isinstance(one, dict) for one in parameters):
        for number, one in enumerate(parameters):
            if not isinstance(one, torch.Tensor):
                raise UserError(
                    f"model_parameters[{number}] is a {type(one).__name__}; expected parameters, as model.parameters() "
                    "gives them, or groups of them."
                )
        parameters = [one for one in parameters if one.requires_grad]
    if not parameters:
        raise UserError("the model has no parameter that requires a gradient; there is nothing to train.")
    given = {name: value for name, value in section.params.items() if value != "auto" and name not in WITHOUT_MEANING}
    if "max_grad_norm" in given:
        raise UserError("`optimizer.params.max_grad_norm` is not for the optimizer; use `gradient_clipping`.")
    if section.type.lower() == MUON:
        return _build_muon(given, model, parameters)
    kind = _optimizer_kind(section.type)
    if section.type.lower() in ("adam", "adamw"):
        kind, given = _as_deepspeed(section.type.lower(), given)
    _check_names("optimizer", kind, given)
    return _make("optimizer", kind, parameters, given)


def _optimizer_kind(name: str) -> type[Optimizer]:
    kind = OPTIMIZERS.get(name.lower())
    if kind is not None:
        return kind
    reason = NOT_ELEMENTWISE.get(name.lower(), "")
    why = f" It {reason}, and Shoal runs optimizers on blocks of parameters." if reason else ""
    if reason.startswith(ON_WHOLE_TENSORS) and name.lower() not in COMPRESSING:
        raise UserError(
            f"`optimizer.type` is {shown(name)}; expected {names()}, Muon. It {reason}, which Shoal does for an "
            "object of the class that is passed to shoal.initialize."
        )
    if name.lower() in COMPRESSING:
        why += f" It compresses gradients on their way: {ERROR_FEEDBACK}."
    raise UserError(
        f"`optimizer.type` is {shown(name)}; expected {names()}, Muon.{why} "
        "Any other elementwise optimizer can be passed to shoal.initialize as an object."
    )


def _as_deepspeed(name: str, given: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    given = dict(given)
    decoupled = given.pop("adam_w_mode", True) or name == "adamw"
    from_torch = given.pop("torch_adam", False)
    if not given.pop("bias_correction", True):
        raise UserError("`optimizer.params.bias_correction` is false; torch's Adam and AdamW always correct it.")
    if not from_torch:
        given = {"weight_decay": 0.0, **given}
        if not given.keys() & {"fused", "foreach", "capturable", "differentiable"}:
            given["fused"] = True
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), given


FOR_MUON: Mapping[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
FOR_ADAM: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
OWN_RATES = {"muon_lr": "Muon", "adam_lr": "AdamW"}
"""Rates of one of both, in the place of `lr`."""
NOT_HIDDEN = ("embed", "lm_head")
"""Parts of names."""
STANDARD = "standard"


def _build_muon(given: Mapping[str, Any], model: nn.Module, over: Sequence[Any]) -> Optimizer:
    """Return both optimizers as one, or the one that has parameters. `over`: parameters, or groups of them.

    Raises `UserError` naming a key that neither has, and for other arithmetic than torch's.
    """
    known = [*dict.fromkeys([*FOR_MUON, *FOR_ADAM, *OWN_RATES, "ns_method"])]
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"`optimizer.params.{key}` is an unknown parameter of Muon (given: {shown(value)}); expected one of "
                f"{', '.join(known)}."
            )
    if given.get("ns_method", STANDARD) != STANDARD:
        raise UserError(
            f"`optimizer.params.ns_method` is {shown(given['ns_method'])}, which is other arithmetic than "
            f'torch.optim.Muon has; leave it out, or set "{STANDARD}".'
        )
    groups = [_listed(group) for group in over] if over and isinstance(over[0], dict) else [{"params": over}]
    hidden = _hidden_matrices(model)
    for_muon = [_part(group, lambda one: id(one) in hidden) for group in groups]
    for_adam = [_part(group, lambda one: id(one) not in hidden) for group in groups]
    for_muon, for_adam = ([group for group in part if group["params"]] for part in (for_muon, for_adam))
    made: list[Optimizer] = []
    try:
        if for_muon:
            made.append(torch.optim.Muon(for_muon, **_values(given, FOR_MUON, "muon_lr")))
        if for_adam:
            made.append(torch.optim.AdamW(for_adam, fused=True, **_values(given, FOR_ADAM, "adam_lr")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"`optimizer.params` do not fit Muon: {str(error).rstrip('.')}.") from error
    matrices, others = ([one for group in part for one in group["params"]] for part in (for_muon, for_adam))
    log.info("muon", matrices=len(matrices), matrix_elements=sum(one.numel() for one in matrices),
             others=len(others), other_elements=sum(one.numel() for one in others), others_by="AdamW")  # fmt: skip
    return several(made) if len(made) > 1 else made[0]


def _values(given: Mapping[str, Any], defaults: Mapping[str, Any], own_rate: str) -> dict[str, Any]:
    found = {key: given.get(key, value) for key, value in defaults.items()}
    return {**found, "lr": given.get(own_rate, found["lr"])}


def _listed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Its parameters as a list: torch takes a generator too, which is gone through once, and one alone."""
    given = group["params"]
    return {**group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}


def _part(group: Mapping[str, Any], is_in: Any) -> dict[str, Any]:
    return {**group, "params": [one for one in group["params"] if is_in(one)]}


def _hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of parameters."""
    embeddings = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    others: Iterable[nn.Module] = [*embeddings, *([head] if isinstance(head, nn.Module) else [])]
    outside = {id(parameter) for module in others for parameter in module.parameters()}
    found = set()
    for name, parameter in model.named_parameters():
        named = any(part in plain_name(name).lower() for part in NOT_HIDDEN)
        is_matrix = parameter.dim() == 2 and not named and id(parameter) not in outside
        if getattr(parameter, "use_muon", is_matrix):
            found.add(id(parameter))
    return found


def build_scheduler(section: SchedulerSection, optimizer: Optimizer, last_step: int) -> LRScheduler:
    """The scheduler; `last_step` is what "auto" lengths mean, 0: nothing says where the job ends."""
    given = _without_auto(section.params, last_step)
    known = {name.lower(): name for name in (*FORMULAS, *TORCH_SCHEDULES)}
    name = known.get(section.type.lower())
    if name is None:
        raise UserError(f"`scheduler.type` is {shown(section.type)}; expected {', '.join(known.values())}.")
    if name in FORMULAS:
        try:
            formula = FORMULAS[name].model_validate(given)
        except ValidationError as error:
            raise UserError(all_of(sentences_of(error, FORMULAS[name], "scheduler.params"), unread_in(error))) from None
        return Schedule(optimizer, formula)
    kind = TORCH_SCHEDULES[name]
    _check_names("scheduler", kind, given)
    return _make("scheduler", kind, optimizer, _with_whole_numbers(kind, given))


def _with_whole_numbers(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """2000.0 is one for an argument that the class says is an integer."""
    types = {name: str(one.annotation) for name, one in inspect.signature(kind).parameters.items()}
    return {name: whole(value) if "int" in types[name] else value for name, value in given.items()}


def _without_auto(params: Mapping[str, Any], last_step: int) -> dict[str, Any]:
    """`warmup_max_lr` falls away only where the class then takes the optimizer's rate; so it is None."""
    meant: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": None} | dict.fromkeys(LAST_STEP, last_step)
    given: dict[str, Any] = {}
    for name, value in params.items():
        if (name, value) == ("last_batch_iteration", -1):
            continue  # DeepSpeed's own default: from the beginning
        if value != "auto":
            given[name] = value
        elif name in LAST_STEP and not last_step:
            raise UserError(
                f'`scheduler.params.{name}` is "auto", which means the job\'s last step, and nothing says where that '
                "is; give a number, or `shoal.epochs` or `shoal.max_steps`."
            )
        elif name in meant:
            given[name] = meant[name]
        else:
            raise UserError(f'`scheduler.params.{name}` is "auto", and nothing determines it; give a value.')
    return given


def _check_names(section: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    allowed = [name for name in inspect.signature(kind).parameters if name not in ("params", "optimizer", "last_epoch")]
    faults = [
        f"`{section}.params.{name}` is an unknown parameter of {kind.__name__} (given: {shown(value)}). "
        f"Expected one of {', '.join(allowed)}."
        for name, value in given.items()
        if name not in allowed
    ]
    if faults:
        raise UserError(all_of(faults))


def _make(section: str, kind: Callable[..., Made], over: Any, given: Mapping[str, Any]) -> Made:
    """An instance; what the class itself says about a bad value becomes the end of the sentence."""
    try:
        return kind(over, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"`{section}.params` do not fit {kind.__name__}: {str(error).rstrip('.')}.") from error


OTHER_NAMES = {"adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw"}
"""What DeepSpeed's Adam is: it decouples weight decay."""

TOTALS = ("total_steps", "T_max", "total_iters", "num_training_steps")
"""Attributes of torch's schedulers, and arguments of the functions of a LambdaLR (transformers' schedules), with the
number of their steps.
"""


def check_scheduled(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Raises `UserError` where a schedule is another optimizer's: no rate that trains would ever change."""
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserError(
            f"the scheduler, a {type(scheduler).__name__}, sets the rates of another optimizer than the one that "
            f"trains ({type(optimizer).__name__}). Build it over the optimizer that is given (optimizer=), or name "
            "both in the config."
        )


def check_total(scheduler: LRScheduler, micro_batches: int, steps_per_epoch: int, last_step: int) -> None:
    """Raises `UserError` if a scheduler counts a DataLoader's micro-batches over the job's epochs instead of steps: the
    job would end before most of the schedule.
    """
    functions = [given.keywords for given in getattr(scheduler, "lr_lambdas", ()) if isinstance(given, partial)]
    for name in TOTALS:
        total = next((given[name] for given in functions if name in given), getattr(scheduler, name, None))
        if not isinstance(total, int) or not total or total % micro_batches or total == last_step:
            continue
        epochs = total // micro_batches
        if epochs * steps_per_epoch == last_step:
            raise UserError(
                f"the {type(scheduler).__name__}'s {name} is {total}, which is len(loader) {micro_batches} × {epochs} "
                f"{'epoch' if epochs == 1 else 'epochs'}: the loader has micro-batches, and the job makes {last_step} "
                f"steps ({steps_per_epoch} in an epoch). Give it {last_step}, or a loader with the batch of a step."
            )


def optimizer_differs(section: OptimizerSection, given: Optimizer) -> Iterator[str]:
    """A sentence for each value of the section that the object does not have, of several that any has not."""
    members = members_of(given)
    if section.type.lower() == MUON:  # what else there is, is for parameters that it does not take
        members = tuple(one for one in members if type(one).__name__.lower() == MUON) or members
    return iter(dict.fromkeys(fault for one in members for fault in _optimizer_differs(section, one)))


def _optimizer_differs(section: OptimizerSection, given: Optimizer) -> Iterator[str]:
    name, kind = section.type.lower(), type(given).__name__
    if kind.lower() not in (name, OTHER_NAMES.get(name)):
        yield _other_class("optimizer", section.type, kind)
        return
    for key, value in section.params.items():
        # a schedule that begins below its base has moved the rate already
        found = [group.get(f"initial_{key}", group[key]) for group in given.param_groups if key in group]
        odd = next((one for one in found if not _same(one, value)), None)
        if value != "auto" and odd is not None:
            yield _other_value("optimizer", key, value, odd)


def scheduler_differs(section: SchedulerSection, given: LRScheduler) -> Iterator[str]:
    """A sentence for each value of the section that the object does not have, as far as it shows; see above."""
    return iter(dict.fromkeys(fault for one in schedulers_of(given) for fault in _scheduler_differs(section, one)))


def _scheduler_differs(section: SchedulerSection, given: LRScheduler) -> Iterator[str]:
    kind = type(given).__name__
    if kind.lower() != section.type.lower():
        if any(value != "auto" for value in section.params.values()):
            yield _other_class("scheduler", section.type, kind)
        return
    for key, value in section.params.items():
        found = getattr(given, key, value)
        if value != "auto" and not _same(found, value):
            yield _other_value("scheduler", key, value, found)


def _same(found: object, value: object) -> bool:
    return found == (tuple(value) if isinstance(found, tuple) and isinstance(value, list) else value)


def _other_class(section: str, name: str, kind: str) -> str:
    return f"`{section}.type` is {shown(name)}, and the script gives a {kind}; keep one of them."


def _other_value(section: str, key: str, value: object, found: object) -> str:
    return (
        f"`{section}.params.{key}` is {shown(value)}, and the {section} that the script gives has {shown(found)}; keep "
        'one, or write "auto".'
    )
