"""Shoal's configuration from `TrainingArguments` and the DeepSpeed configuration that they may name.

A batch size is never changed: a step has `per_device_train_batch_size × gradient_accumulation_steps` samples, as on one
process, and its micro-batches are the lanes; or, where `shoal={"lanes": n}` says for how many processes the script was
written, n times as many. So does a DeepSpeed configuration whose `train_batch_size` is n times as much. Every "auto"
that the Trainer would fill in is filled in here; numbers that the file and the arguments give differently are faults.

`check_honourable` refuses arguments of a Trainer that cannot be honoured, all at once, each with its sentence;
docs/transformers.md has the same list, and a test compares them. The library would import DeepSpeed when arguments with
`deepspeed=…` are made: after `put_deepspeed_aside`, at the import of this package, they just keep the value.

Trained parameters of models in half precision, as `from_pretrained` gives them where the checkpoint is, become float32.
Frozen parameters stay as they are, so that a large base under adapters takes no more memory; where others of that model
are trained beside them, the forward runs under autocast. Parameters that the engine keeps in half precision itself,
with float32 masters, are left alone: the DeepSpeed configuration asks for that (`bf16`, `fp16`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from shoal_protos.config_file import parsed_config, read_config, whole
from shoal_protos.errors import UserError
from shoal_protos.old_config_keys import with_todays_names
from shoal_protos.text import shown
from shoal_protos.training_log import get_logger
from torch import Tensor, nn
from transformers import TrainerCallback

from shoal.config.load import Beside
from shoal.config.sifting import is_on
from shoal.data.opened_stream import is_stream

FOLDER = "elastic"
"""Of elastic checkpoints, in the Trainer's output folder."""
ALL = 10**15
"""Checkpoints that are kept where no limit is given."""
WARM_UP = "scheduler.params.warmup_num_steps"
NO_CLIPPING = 1e38
"""A norm that no gradient reaches: the Trainer tells the norm of a step also where it does not clip."""
HALVES = (torch.bfloat16, torch.float16)

log = get_logger("shoal")


@dataclass(frozen=True, slots=True)
class TrainerSizes:
    """What a step is made of."""

    micro_batch_size: int
    lanes: int
    micro_batches: int
    accumulation: int
    """As the arguments say it."""

    @property
    def batches(self) -> int:
        """Of the Trainer's loader, in one step."""
        return self.lanes * self.micro_batches


def sizes_of(args: Any, shoal: Mapping[str, Any]) -> TrainerSizes:
    """Raises `UserError` for lanes that are no number."""
    steps = args.gradient_accumulation_steps
    lanes = shoal.get("lanes", _processes_of(args))
    if lanes is None:
        return TrainerSizes(args.per_device_train_batch_size, steps, 1, steps)
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise UserError(f"`shoal.lanes` is {shown(lanes)}; expected a whole number of at least 1.")
    return TrainerSizes(args.per_device_train_batch_size, lanes, steps, steps)


def _processes_of(args: Any) -> int | None:
    """For how many processes the DeepSpeed configuration was written, by its batch; None: it says nothing of more."""
    batch = whole((deepspeed_config(args) or {}).get("train_batch_size"))
    of_one = args.per_device_train_batch_size * args.gradient_accumulation_steps
    is_more = isinstance(batch, int) and batch > of_one and batch % of_one == 0
    return batch // of_one if is_more else None


ARGUMENTS = {"max_steps": "max_steps", "epochs": "num_train_epochs", "seed": "seed",
             "micro_batches_per_lane": "gradient_accumulation_steps"}  # fmt: skip
"""Keys of the section `shoal` that the Trainer's arguments say."""


def section_shoal(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the DeepSpeed configuration and the script say of that section. Raises `UserError`."""
    section = (deepspeed_config(args) or {}).get("shoal") or {}
    if not isinstance(section, Mapping):
        raise UserError(f"`shoal` is {shown(section)}; expected an object {{…}}.")
    found = {**section, **given}
    faults = [f"`shoal.{key}` is {shown(found[key])}" for key in ARGUMENTS if key in found]
    if faults:
        instead = ", ".join(f"`{ARGUMENTS[key]}`" for key in ARGUMENTS if key in found)
        raise UserError(f"{'; '.join(faults)}; the Trainer's arguments say it: {instead}.")
    return found


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """What the Trainer has worked out of its job."""

    max_steps: int
    save_every: int | None
    """Steps between two elastic checkpoints; None: there are none."""
    resume: int | str | bool
    mixes_halves: bool
    """Whether the forward needs autocast, where the arguments do not ask for it."""


def config_of(
    args: Any, shoal: Mapping[str, Any], sizes: TrainerSizes, job: TrainerJob, beside: Beside
) -> dict[str, Any]:
    """Shoal's configuration. Raises `UserError` naming all that the file and the arguments say differently.

    A section whose object is given beside it is left as it is: what is "auto" there is as the object has it.
    """
    shoal = section_shoal(args, shoal)
    document, bf16 = deepspeed_config(args), args.bf16 or (job.mixes_halves and not args.fp16)
    autocast = {
        "bf16": {"enabled": bf16, "auto_cast": bf16},
        "fp16": {"enabled": args.fp16, "auto_cast": args.fp16, "loss_scale_window": 2000, "hysteresis": 1},
    }
    if document is None:
        clipping = args.max_grad_norm if args.max_grad_norm > 0 else NO_CLIPPING
        document = {**autocast, "gradient_clipping": clipping}
    else:
        if is_on(document.get("elasticity")):
            raise UserError(
                "`elasticity` is on in the DeepSpeed configuration, and the Trainer's arguments say what a batch is; "
                "switch the section off."
            )
        given = [name for name in ("optimizer", "scheduler") if getattr(beside, name)]
        meanings = {
            key: meaning
            for key, meaning in _meanings(args, sizes, job.max_steps).items()
            if key.partition(".")[0] not in given
        }
        faults = list(_differences(document, meanings))
        if faults:
            raise UserError("; ".join(faults) + '. Give each once, or write "auto" in the DeepSpeed configuration.')
        document = _resolved(document, meanings)
        if not any(is_on(document.get(name)) for name in autocast):
            document = {**autocast, **document}
        if job.mixes_halves and not any(is_on(document.get(name)) for name in ("bf16", "fp16")):
            document["bf16"] = {"enabled": True, "auto_cast": True}
        document.pop("gradient_accumulation_steps", None)
        document.pop("shoal", None)
    checkpoint: dict[str, Any] = {}
    if job.save_every is not None:
        keep = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else ALL
        checkpoint = {"path": str(Path(args.output_dir) / FOLDER), "every_steps": job.save_every, "keep": keep}
    checkpoint = {**checkpoint, "resume": job.resume, **shoal.get("checkpoint", {})}
    mine = {
        "lanes": sizes.lanes, "micro_batches_per_lane": sizes.micro_batches, "seed": args.seed,
        "max_steps": job.max_steps, "stop_on_nan": False,
    }  # fmt: skip
    return {
        **document,
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "train_batch_size": sizes.micro_batch_size * sizes.batches,
        "shoal": {**mine, **shoal, "checkpoint": checkpoint},
    }


def deepspeed_config(args: Any) -> dict[str, Any] | None:
    """The file or dict that `deepspeed=` names, with today's names; None: there is none. Raises `UserError`."""
    given = args.deepspeed
    if not given:
        return None
    faults: list[str] = []
    if isinstance(given, str | Path):
        text = str(given)
        given = parsed_config(text) if text.lstrip().startswith("{") else read_config(Path(text))
    document = with_todays_names(given, faults)
    if faults:
        raise UserError(" ".join(faults))
    return document


def _meanings(args: Any, sizes: TrainerSizes, max_steps: int) -> dict[str, Any]:
    """What "auto" means, by dotted key: as the Trainer's own integration of DeepSpeed has it."""
    return {
        "train_batch_size": sizes.micro_batch_size * sizes.batches,
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "gradient_accumulation_steps": sizes.accumulation,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        WARM_UP: max(1, args.get_warmup_steps(max_steps)),
        "scheduler.params.total_num_steps": max_steps,
        "fp16.enabled": args.fp16 or args.fp16_full_eval,
        "bf16.enabled": args.bf16 or args.bf16_full_eval,
    }


def _differences(document: Mapping[str, Any], meanings: Mapping[str, Any]) -> Iterator[str]:
    """Keys that the arguments have too, where both give a number and the numbers differ."""
    for key, meaning in meanings.items():
        value = _at(document, key)
        if value is None or value == "auto" or key == "scheduler.params.warmup_min_lr":
            continue
        if key == WARM_UP and value == 0:
            continue  # which no schedule takes: that is said where it is read
        if value != meaning:
            yield f"`{key}` is {shown(value)} in the DeepSpeed configuration and {shown(meaning)} by the arguments"


def _at(document: Mapping[str, Any], key: str) -> Any:
    found: Any = document
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _resolved(document: Mapping[str, Any], meanings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping):
            found[name] = _resolved(value, meanings, f"{key}.")
        else:
            found[name] = meanings[key] if value == "auto" and key in meanings else value
    return found


OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Values of `optim` whose classes train blocks, or whole tensors unasked."""

Refused = Callable[[Any], bool]

REFUSED: Mapping[str, tuple[Refused, str]] = {
    "auto_find_batch_size": (lambda args: args.auto_find_batch_size, "the batch is fixed for the job's life"),
    "debug": (lambda args: bool(args.debug), "its hooks look at whole gradients; look at one worker's forward instead"),
    "enable_jit_checkpoint": (
        lambda args: args.enable_jit_checkpoint, "a worker that is to leave hands on what it holds by itself"
    ),
    "fp16_full_eval": (lambda args: args.fp16_full_eval, "it would change the parameters that are being trained"),
    "bf16_full_eval": (lambda args: args.bf16_full_eval, "it would change the parameters that are being trained"),
    "fsdp": (lambda args: bool(args.fsdp), 'parameters are sharded by deepspeed={"zero_optimization": {"stage": 3}}'),
    "ignore_data_skip": (lambda args: args.ignore_data_skip, "a job goes on with the samples that come next"),
    "lr_scheduler_type": (
        lambda args: args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
        "rates that follow an evaluation's numbers are not supported; use one that follows steps",
    ),
    "parallelism_config": (lambda args: args.parallelism_config is not None, "every lane runs the whole model"),
    "push_to_hub": (lambda args: args.push_to_hub, "upload the saved folder after training (huggingface_hub)"),
    "save_on_each_node": (lambda args: args.save_on_each_node, "rank 0 writes, to a folder that all workers can read"),
    "torch_compile": (lambda args: args.torch_compile, "call model.compile() before the Trainer is made"),
    "optim": (
        lambda args: str(getattr(args.optim, "value", args.optim)) not in OPTIMIZERS,
        f"expected {', '.join(OPTIMIZERS)}, or another optimizer as optimizers=(optimizer, scheduler)",
    ),
}  # fmt: skip
"""By argument: when it is refused, and why or what to do."""


def check_honourable(args: Any, given: Mapping[str, Any]) -> None:
    """Raises `UserError` with a sentence for each thing that cannot be honoured. `given`: the Trainer's own."""
    faults = [*_arguments(args), *_objects(args, given)]
    if len(faults) == 1:
        raise UserError(faults[0])
    if faults:
        raise UserError(
            "\n  - ".join([f"the Trainer was given {len(faults)} things that cannot be honoured:", *faults])
        )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Raises `UserError` for a callback that is to act where nothing is to be acted on. For each way in which callbacks
    come: to the Trainer, to its handler, in the middle of training.
    """
    for fault in _callbacks(callbacks):
        raise UserError(fault)


def check_loader(loader: Any) -> None:
    """Raises `UserError` for a loader of the script's `get_train_dataloader` that cannot be read by number."""
    lacking = [
        f"`{name}`" for name in ("dataset", "batch_sampler", "collate_fn") if getattr(loader, name, None) is None
    ]
    if not lacking and not _is_numbered(loader.dataset):
        lacking = ["numbered samples"]
    if lacking:
        raise UserError(
            f"`get_train_dataloader` gave a {type(loader).__name__} without {', '.join(lacking)}, which cannot be "
            "honoured: which worker reads which sample changes; give a torch.utils.data.DataLoader over a dataset with "
            "__len__ and __getitem__, in any order (`sampler` or `batch_sampler`)."
        )


def _is_numbered(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not is_stream(dataset)


def _arguments(args: Any) -> Iterator[str]:
    for name, (is_refused, why) in REFUSED.items():
        if is_refused(args):
            value = getattr(args, name)
            yield f"`{name}` is {getattr(value, 'value', value)!r}, which cannot be honoured: {why}."
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            yield f"`accelerator_config.{name}` is true, which cannot be honoured: lanes share a step's batches."
    kwargs = args.activation_checkpointing_kwargs or {}
    if args.activation_checkpointing and kwargs.get("use_reentrant"):
        yield (
            "`gradient_checkpointing_kwargs.use_reentrant` is true, which cannot be honoured: gradients leave while a "
            "backward runs; leave it out."
        )


def _objects(args: Any, given: Mapping[str, Any]) -> Iterator[str]:
    dataset = given.get("train_dataset")
    if dataset is not None and not _is_numbered(dataset):
        yield (
            f"`train_dataset` is a {type(dataset).__name__} without numbered samples, which cannot be honoured: which "
            "worker reads which sample changes; give a dataset with __len__ and __getitem__."
        )
    yield from _callbacks(given.get("callbacks") or ())
    if args.load_best_model_at_end and _stage(args) == 3:
        yield (
            "`load_best_model_at_end` is true, which cannot be honoured with ZeRO stage 3: no worker has the whole "
            "model; load the folder `trainer.state.best_model_checkpoint` by from_pretrained."
        )


def _callbacks(callbacks: Iterable[Any]) -> Iterator[str]:
    for callback in callbacks:
        event = getattr(callback, "on_pre_optimizer_step", None)
        if event is not None and getattr(event, "__func__", event) is not TrainerCallback.on_pre_optimizer_step:
            name = getattr(callback, "__name__", type(callback).__name__)
            yield (
                f"callback {name} has on_pre_optimizer_step, which cannot be honoured: gradients lie in blocks on all "
                "workers then; clip by `max_grad_norm`."
            )


def _stage(args: Any) -> Any:
    section = (deepspeed_config(args) or {}).get("zero_optimization")
    return section.get("stage") if isinstance(section, Mapping) else None


def put_deepspeed_aside() -> None:
    """Once, when the door is imported."""
    kind: Any = transformers.TrainingArguments
    whole = kind.__post_init__
    if getattr(whole, "puts_deepspeed_aside", False):
        return

    def post_init(self: Any) -> None:
        given, self.deepspeed = self.deepspeed, None
        whole(self)
        assert self.device is not None, "the device is found while there is no DeepSpeed to be asked"
        self.deepspeed = given

    post_init.puts_deepspeed_aside = True  # type: ignore[attr-defined]
    kind.__post_init__ = post_init


# ---- models in half precision


def mixes_halves(model: nn.Module) -> bool:
    """Whether parameters in half precision are trained beside frozen ones."""
    return {one.requires_grad for one in model.parameters() if one.dtype in HALVES} == {True, False}


def upcast(model: nn.Module) -> None:
    """Parameters that are trained in half precision are float32 from here on."""
    mixed, dtypes = mixes_halves(model), set[str]()
    for module in model.modules():
        for tensor in _to_be_upcast(module, mixed):
            dtypes.add(str(tensor.dtype))
            tensor.grad, tensor.data = None, tensor.data.float()
    if dtypes:
        autocast = ", and the forward runs under autocast" if mixed else ""
        log.info("trained_in_float32", loaded_as=sorted(dtypes), means=f"frozen parameters stay as they are{autocast}")


def _to_be_upcast(module: nn.Module, mixed: bool) -> Iterator[Tensor]:
    """Of the module itself. Beside trained ones also frozen vectors, since a norm takes no wider input than its weight;
    and the buffers of modules with such parameters.
    """
    own = [one for one in module.parameters(recurse=False) if one.dtype in HALVES]
    found = [one for one in own if one.requires_grad or (mixed and one.dim() < 2)]
    yield from found
    if found:
        yield from (buffer for buffer in module.buffers(recurse=False) if buffer.dtype in HALVES)
