"""DeepSpeed's engine over Shoal's: what a script for DeepSpeed calls in its loop and at its checkpoints.

Made by `initialize` (initializing.py). The loop's rules and their sentences are Shoal's (docs/loop.md). `EngineFacts`
has the questions that DeepSpeed's engine answers, and no acts. `ClientState` is what a script saves with
`engine.save_checkpoint(folder, tag, client_state)`, as a state that is registered with the engine: rank 0's is saved in
elastic checkpoints and given to joiners. `say_scale`, called once for each engine, gives the script's optimizer
DeepSpeed's names for the loss scale: its class gets those that it lacks, and the object stays the script's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeGuard
from weakref import ref

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shoal.checkpoint.catalogue import at
from shoal.core.plain import decode, encode
from shoal.deepspeed import rank_reads
from shoal.deepspeed.elastic_loader import ElasticLoader
from shoal.deepspeed.own_loader import OwnLoaders, watch
from shoal.guards.arguments import refuse_unknown
from shoal.optim.several import members_of
from shoal.state.training_state import TrainingState
from shoal.training.engine import Engine


class EngineFacts:
    """Numbers of batches, of the world and of the step. `elastic` is Shoal's engine."""

    elastic: Engine
    training_dataloader: ElasticLoader

    # ---- batches

    def train_batch_size(self) -> int:
        """Samples of a step."""
        return self.elastic.context.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self.elastic.context.config.micro_batch_size // self.elastic.micro_batches

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a lane in a step."""
        return self.elastic.context.config.micro_batches_per_lane * self.elastic.micro_batches

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the batch at hand is this worker's last one of its step."""
        return self.elastic.context.loop.at_last_backward

    # ---- progress

    @property
    def global_steps(self) -> int:
        """Steps that the job has committed; before the loop those of the checkpoint that was loaded."""
        return self.training_dataloader.asked_steps()

    @property
    def global_samples(self) -> int:
        """Samples of these steps."""
        return self.global_steps * self.train_batch_size()

    @property
    def micro_steps(self) -> int:
        """Micro-batches of these steps, of one lane."""
        return self.global_steps * self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """The rates of the optimizer's groups."""
        return [float(group["lr"]) for group in self.elastic.context.state.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """What the optimizer's groups have as momentum: of SGD, RMSprop and Muon that, of others their betas; 0 where
        a group has none.
        """
        return [
            group.get("momentum" if type(member).__name__ in ("SGD", "RMSprop", "Muon") else "betas", 0.0)
            for member in members_of(self.elastic.context.state.optimizer)
            for group in member.param_groups
        ]

    def get_global_grad_norm(self) -> float | None:
        """The last step's norm, before clipping; None where nothing is clipped."""
        record = self.elastic.context.state.record
        return record.norm if record is not None else None

    def loss_scale(self) -> float:
        """What losses are multiplied by before their backward."""
        return self.elastic.context.state.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is found while training."""
        scaling = self.elastic.context.config.precision.scaling
        return scaling is not None and scaling.is_dynamic

    @property
    def skipped_steps(self) -> int:
        """Steps of the job that updated nothing, because a gradient overflowed at the loss scale."""
        scale = self.elastic.context.state.loss_scale
        return scale.skipped_steps if scale is not None else 0

    # ---- settings

    def gradient_clipping(self) -> float:
        """The greatest norm of a step's gradient; 0: any."""
        return self.elastic.context.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """ZeRO's."""
        return self.elastic.context.config.stage

    def fp16_enabled(self) -> bool:
        """Whether the model is trained in float16."""
        return self._half() == "float16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model is trained in bfloat16."""
        return self._half() == "bfloat16"

    def _half(self) -> str | None:
        precision = self.elastic.context.config.precision
        return precision.parameters or precision.autocast

    # ---- the world

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.elastic.module

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.elastic.device

    @property
    def local_rank(self) -> int:
        """The number of this worker's device; 0 on the CPU."""
        return self.elastic.device.index or 0

    @property
    def global_rank(self) -> int:
        """This worker's number among the members; 0 before its first world."""
        rank_reads.note()
        return max(0, self.elastic.rank)

    @property
    def world_size(self) -> int:
        """Members now."""
        return self.elastic.world_size

    @property
    def dp_world_size(self) -> int:
        """The world that batch sizes are for: the lanes."""
        return self.elastic.context.config.lanes

    def __getattr__(self, name: str) -> Any:
        """The model's, as in DeepSpeed."""
        elastic = vars(self).get("elastic")
        if elastic is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(elastic.module, name)
        except AttributeError:
            from shoal.deepspeed.surface import engine_lacks

            raise engine_lacks(name) from None


WEIGHTS = "model.safetensors"
OF_A_LOADER = {"pin_memory": "pin_memory", "data_sampler": "sampler", "collate_fn": "collate_fn",
               "num_local_io_workers": "num_workers"}  # fmt: skip
"""Arguments of `deepspeed_io`, with their names in a DataLoader."""
_ENGINES: list[ref[DeepSpeedEngine]] = []
USUAL = {"retain_graph": False, "scale_wrt_gas": True, "allreduce_gradients": True, "release_loss": False}
"""What `backward` takes beside the loss, of all versions of DeepSpeed."""


class DeepSpeedEngine(EngineFacts):
    """What is not here is the model's; what neither has says so by name."""

    loader_of: ClassVar[type[ElasticLoader]] = ElasticLoader

    def __init__(self, elastic: Engine) -> None:
        self.elastic, self.training_dataloader = elastic, self.loader_of(elastic)
        self._own_loaders: OwnLoaders | None = None
        self._client_state = ClientState()
        self._applied = False
        self._handled = sys.exception()
        """What the script was at when it made the engine: `except ImportError: main()`."""
        elastic.register_state(NAME, self._client_state)
        say_scale(elastic.context.state)
        _ENGINES.append(ref(self))

    @property
    def optimizer(self) -> Optimizer:
        """Its groups are in use; its state lies in blocks on all workers. It knows the loss scale."""
        return self.elastic.context.state.optimizer

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The engine calls it once per step."""
        return self.elastic.context.state.scheduler

    # ---- data

    def take_own_loaders(self) -> None:
        """It trains on the dataset of the DataLoader that the script's loop goes over."""
        self._own_loaders = OwnLoaders(self.elastic, self.training_dataloader)
        watch(self._own_loaders)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", **more: Any
    ) -> ElasticLoader | DataLoader[Any]:
        """The loader of a training's dataset, where `initialize` got none; of any other dataset torch's own."""
        refuse_unknown("engine.deepspeed_io", [name for name in more if name not in OF_A_LOADER], OF_A_LOADER)
        own, trains = self._own_loaders, route == "train"
        given = {OF_A_LOADER[name]: value for name, value in more.items() if value is not None}
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), trains and "sampler" not in given, **given
        )
        return self.training_dataloader if trains and own is not None and own.take(loader) else loader

    # ---- the loop

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward."""
        return self.elastic.module(*inputs, **named)

    forward = __call__

    def backward(self, loss: Tensor, **options: Any) -> Tensor:
        """Accumulates the gradient of this micro-batch's mean loss. Returns the loss divided by the accumulation steps,
        as DeepSpeed does: a step's losses of one lane add up to their mean.
        """
        odd = [f"{name}={value!r}" for name, value in options.items() if value is not USUAL.get(name)]
        if odd:
            raise UserError(
                f"engine.backward got {', '.join(odd)}; expected the loss alone. Add up the losses of a micro-batch, "
                "and call it once; the engine divides by the accumulation steps."
            )
        loop = self.elastic.context.loop
        if not loop.in_flight and not loop.is_void:
            raise UserError(
                "engine.backward got the loss of a batch that is not of the loader which deepspeed.initialize "
                "returned, or a second one of the same batch; loop over that loader (engine.training_dataloader), and "
                "call it once for each batch."
            )
        self.training_dataloader.check_goes_on()
        self.elastic.backward(loss)
        return loss.detach() / self.gradient_accumulation_steps()

    def step(self, lr_kwargs: None = None) -> None:
        """Ends the micro-batch; after the last one of this worker's last lane it makes the optimizer step."""
        if lr_kwargs:
            raise UserError("engine.step got lr_kwargs; the scheduler's step takes none here. Leave them out.")
        stepped = self.elastic.step()
        record = self.elastic.context.state.record
        self._applied = stepped and record is not None and record.updates

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the model."""
        return self._applied

    def stop(self) -> None:
        """Ends the job after this step, on all workers alike."""
        self.elastic.stop()

    def destroy(self) -> None:
        """The script trains no more. Where nothing but it says at which step the job ends, this waits until all workers
        have come to the same end. Raises `UserError` where it cannot be theirs. In the way of an error that ends the
        script, `finally: engine.destroy()`, it does nothing: the error is what is to be said.
        """
        if sys.exception() is not self._handled:
            return
        self.elastic.script_end.reach()
        if self.elastic.context.left_at:
            raise UserError(self.elastic.context.left_at)

    # ---- checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: object = None, client_state: dict[str, Any] | None = None, **options: Any
    ) -> bool:
        """Saves an elastic checkpoint: in the loop beside the steps that follow, after it at once."""
        _refuse_options("save_checkpoint", options, {"save_latest": True, "exclude_frozen_parameters": False})
        self._check_folder("save_checkpoint", save_dir, self._place)
        if self.training_dataloader.is_behind:
            return True  # the others have saved it, before this worker was there or the job went on
        self._client_state.put(tag, client_state)
        self.elastic.save_checkpoint()
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: object = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """The checkpoint from which the job goes on, with what the script has saved in it; None: there is none."""
        known = {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True,
                 "load_module_only": False, "custom_load_fn": None}  # fmt: skip
        _refuse_options("load_checkpoint", options, known)
        resume = self.elastic.context.config.checkpoint.resume
        self._check_folder("load_checkpoint", load_dir, resume if _is_path(resume) else self._place)
        if self.elastic.context.world is not None:
            raise UserError("engine.load_checkpoint was called in the loop; call it before.")
        reference = self.elastic.parts.loading.known.reference
        if reference is None:
            return None, {}
        saved, is_under_way = saved_in(reference.path), bool(self.elastic.context.link.job.opened_generations)
        if tag is not None and saved.tag != str(tag) and not is_under_way:
            raise UserError(
                f'engine.load_checkpoint was to load "{tag}", and the job goes on from {reference.path}, which was '
                f'saved as "{saved.tag}"; say which by `shoal.checkpoint.resume`.'
            )
        self.training_dataloader.begin_at(reference.step)
        return reference.path, saved.content

    @property
    def _place(self) -> str | None:
        return self.elastic.context.config.checkpoint.path

    def _check_folder(self, call: str, folder: str | Path, path: str | None) -> None:
        if path is None or not is_within(str(folder), path):
            has = "has none" if path is None else f'says "{path}"'
            raise UserError(
                f'engine.{call} was called for "{folder}", and `shoal.checkpoint.path` of the config {has}; all '
                "workers must know the place before the first step. Say it there."
            )

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = WEIGHTS, **options: Any) -> bool:
        """Rank 0 writes the model's weights as safetensors."""
        _refuse_options("save_16bit_model", options, {"exclude_frozen_parameters": False})
        if not save_filename.endswith(".safetensors"):
            raise UserError(
                f'engine.save_16bit_model was to write "{save_filename}"; weights are written as safetensors, which '
                f'every library reads: leave the name out, or end it so ("{WEIGHTS}").'
            )
        self.elastic.export(Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model


def engines() -> list[DeepSpeedEngine]:
    """Those of this process, the newest first."""
    return [engine for made in reversed(_ENGINES) if (engine := made()) is not None]


def engine_with(parameter: nn.Parameter) -> DeepSpeedEngine | None:
    """The engine whose model has that parameter."""
    for engine in engines():
        if any(one is parameter for one in engine.module.parameters()):
            return engine
    return None


def _is_path(resume: int | str | bool) -> TypeGuard[str]:
    return isinstance(resume, str) and resume != "latest"


def is_within(folder: str, path: str) -> bool:
    """Whether a folder is `path`, or lies in it."""
    mine, place = (_whole(name).rstrip("/") for name in (folder, path))
    return mine == place or mine.startswith(f"{place}/")


def _whole(name: str) -> str:
    return name if "://" in name else str(Path(name).expanduser().absolute())


def _refuse_options(call: str, options: dict[str, Any], usual: dict[str, Any]) -> None:
    odd = [name for name, value in options.items() if name not in usual or value != usual[name]]
    if odd:
        raise UserError(
            f"engine.{call} got {', '.join(f'{name}={options[name]!r}' for name in odd)}, which is not supported; an "
            "elastic checkpoint is saved and loaded whole."
        )


NAME = "deepspeed"
"""Under which it is registered."""


class ClientState:
    """The last one that was to be saved."""

    def __init__(self) -> None:
        self.tag: str | None = None
        self.content: dict[str, Any] = {}

    def put(self, tag: object, content: object) -> None:
        """Raises `UserError` for what no checkpoint can keep."""
        if not isinstance(content, dict | None):
            raise UserError(f"engine.save_checkpoint got a {type(content).__name__} as client_state; expected a dict.")
        encode(content or {}, {}, "client_state")
        self.tag, self.content = None if tag is None else str(tag), dict(content or {})

    def state_dict(self) -> dict[str, Any]:
        return {"tag": self.tag, "client_state": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tag, self.content = state["tag"], state["client_state"]


def saved_in(path: str) -> ClientState:
    """What a checkpoint has of it; empty for one that was saved without."""
    found, state = at(path, _nothing), ClientState()
    tree = found.manifest.states.get(NAME)
    if tree is not None:
        state.load_state_dict(decode(tree, found.reader().tensors()))
    return state


def _nothing(_: str) -> None:
    """No other folder is looked into."""


def say_scale(state: TrainingState) -> None:
    """`cur_scale`, `loss_scale`: by what losses are multiplied; `overflow`: whether the last step overflowed."""
    says: dict[str, Callable[[Any], object]] = {
        "cur_scale": lambda _: state.scale,
        "loss_scale": lambda _: state.scale,
        "overflow": lambda _: state.record is not None and bool(state.record.overflow),
    }
    optimizer = state.optimizer
    kind, new = type(optimizer), {name: property(of) for name, of in says.items() if not hasattr(optimizer, name)}
    optimizer.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **new})
