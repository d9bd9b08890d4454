"""What of a Trainer's arguments cannot be honoured: each with its sentence, all of them said at once.

docs/transformers.md has the same list; a test holds one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shoal_protos.errors import UserError
from transformers import TrainerCallback

from shoal.data.opened_stream import is_stream
from shoal.integrations.transformers.engine_config import deepspeed_config

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `optim` whose classes compute every element by itself."""

Refused = Callable[[Any], bool]

ARGUMENTS: Mapping[str, tuple[Refused, str]] = {
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
        f"expected {', '.join(OPTIMIZERS)}, or an elementwise optimizer as optimizers=(optimizer, scheduler)",
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
    for name, (is_refused, why) in ARGUMENTS.items():
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
