"""The Trainer whose training is elastic: transformers' own, with another loop under it.

Around the loop (elastic_run.py) all stays the library's: arguments, callbacks, evaluation, metrics, saving a model.
What is here says where it goes another way.

`resume_point`: which elastic checkpoint `resume_from_checkpoint` means. Scripts give the newest folder `checkpoint-N`
whenever they start: also where they replace a worker of a job under way, and where the save of step N was skipped or
cut short.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from shoal.checkpoint.catalogue import Found, SaveName, checkpoints, latest, saves
from shoal.checkpoint.storage import Storage, open_storage
from shoal.config.load import Beside, load_config
from shoal.core.checkpoint_errors import NoneReadable
from shoal.core.manifest_parts import Lineage
from shoal.data.data_workers import Reading
from shoal.data.given_data import reading_of
from shoal.guards.arguments import check_given, refuse_cells
from shoal.integrations.transformers.elastic_run import ElasticRun, exported
from shoal.integrations.transformers.engine_config import (
    FOLDER,
    TrainerJob,
    TrainerSizes,
    check_callbacks,
    check_honourable,
    check_loader,
    config_of,
    deepspeed_config,
    mixes_halves,
    section_shoal,
    sizes_of,
    upcast,
)
from shoal.integrations.transformers.step_reader import BatchFacts, BatchOrder, StepReader
from shoal.session.error_hook import tell_errors_in_a_sentence
from shoal.session.link_choice import is_worker
from shoal.training.engine import Engine
from shoal.training.start import Given, assemble

log = get_logger("shoal")
Scheduler = LRScheduler | Callable[[Any], LRScheduler]
BY_POSITION = tuple(inspect.signature(transformers.Trainer.__init__).parameters)[3:]
"""Arguments of the library's Trainer after model and args, which scripts may give by position."""


class ElasticTraining:
    """What both Trainers have of Shoal; stands before the library's class."""

    args: Any
    model: Any
    state: Any
    control: Any
    accelerator: Any
    callback_handler: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, model: Any = None, args: Any = None, *more: Any, shoal: Mapping[str, Any] | None = None, **named: Any
    ) -> None:
        """As the library's, with one argument more: `shoal`, keys of the configuration's section of that name."""
        tell_errors_in_a_sentence()
        self.engine: Engine | None = None
        """Of the training at hand, or of the last one."""
        self.fingerprint: str | None = None
        """Of the last training's end."""
        self._run: ElasticRun | None = None
        self._shoal = dict(shoal or {})
        self._resume: int | str | bool | None = None
        if args is None:
            args = transformers.TrainingArguments(output_dir="tmp_trainer")
        check_honourable(args, {**dict(zip(BY_POSITION, more, strict=False)), **named})
        args._n_gpu = min(1, args.n_gpu)  # a worker has one device
        super().__init__(model, args, *more, **named)  # type: ignore[call-arg]

    def add_callback(self, callback: Any) -> None:
        """As the library's. Raises `UserError` for what `callbacks=` does not take either."""
        check_callbacks([callback])
        super().add_callback(callback)  # type: ignore[misc]

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **named: Any) -> Any:
        """As the library's; `resume_from_checkpoint` is a folder that this Trainer has saved, or True: the newest."""
        if trial is not None:
            self.hyperparameter_search()
        check_callbacks(self.callback_handler.callbacks)
        self._resume = resume_from_checkpoint or None
        return super().train(None, None, **named)  # type: ignore[misc]

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:  # fmt: skip
        del batch_size, resume_from_checkpoint, trial
        sizes = sizes_of(args, section_shoal(args, self._shoal))
        with self._steps_of(sizes):
            loader = self.get_train_dataloader()  # type: ignore[attr-defined]
            check_loader(loader)
            found = self.set_initial_training_values(args, loader)  # type: ignore[attr-defined]
            epochs, steps_per_epoch, examples, samples, batch, _, max_steps = found
            self._init_training_state(max_steps, steps_per_epoch, epochs, None, None)  # type: ignore[attr-defined]
            trainable = get_model_param_count(self.model, trainable_only=True)
            run = self._run = self._elastic_run(loader, sizes, max_steps, ignore_keys_for_eval)
            run.prepare(
                {
                    "Num examples": examples,
                    "Num Epochs": epochs,
                    "Num update steps per epoch": steps_per_epoch,
                    "Instantaneous batch size per device": sizes.micro_batch_size,
                    "Total train batch size (w. parallel, distributed & accumulation)": batch,
                    "Gradient Accumulation steps": sizes.accumulation,
                    "Total optimization steps": max_steps,
                    "Number of trainable parameters": trainable,
                }
            )
            with self._backwards_to(run), closing(run.reader):
                run.train()
            return self._finish(run, samples)

    @contextmanager
    def _steps_of(self, sizes: TrainerSizes) -> Iterator[None]:
        """The library counts steps by its accumulation: here the lanes are part of it."""
        before = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = sizes.batches
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = before

    def _elastic_run(
        self, loader: Any, sizes: TrainerSizes, max_steps: int, ignored_keys: list[str] | None
    ) -> ElasticRun:
        """The engine, and what trains by it."""
        order = BatchOrder(loader, sizes.lanes, sizes.micro_batches, self.args.seed)
        optimizer, scheduler = self._optimizer_and_scheduler(max_steps)
        point = resume_point(self._resume, self.args.output_dir, is_worker())
        job = TrainerJob(max_steps, self._save_every(order), point.resume, mixes_halves(self.model))
        beside = Beside(optimizer=optimizer is not None, scheduler=scheduler is not None)
        config = load_config(config_of(self.args, self._shoal, sizes, job, beside), beside)
        refuse_cells("the Trainer", config.cell)
        if config.precision.parameters is None:
            upcast(self.model)
        reading = reading_of(loader)
        reader = StepReader(loader, order, config.seed, self._look_at, reading)
        moves = Reading(pinned=reading.pinned and self.args.device.type != "cpu")
        given = Given(
            self.model, config, loader.dataset, optimizer, scheduler, loader.collate_fn, reading=moves, source=reader,
            beside={
                "order of samples": order.digest(),
                "evaluations": f"{self.args.eval_strategy.value} {self.state.eval_steps}",
            },
        )  # fmt: skip
        engine = self.engine = self._engine_of(given)
        self.on_engine(engine)
        point.on_welcome(is_under_way=bool(engine.context.link.job.opened_generations))
        state = engine.context.state
        self.optimizer, self.lr_scheduler, self.model_wrapped = state.optimizer, state.scheduler, self.model
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        self._tell_of(sizes)
        return ElasticRun(self, engine, reader, ignored_keys)

    def _engine_of(self, given: Given) -> Engine:
        return assemble(given)

    def on_engine(self, engine: Engine) -> None:
        """Does nothing; a script's own Trainer may declare buffers here (`engine.buffer`), before the loop begins."""

    def _tell_of(self, sizes: TrainerSizes) -> None:
        if sizes.lanes == 1:
            log.warning("one_lane", means="only one worker can train: a step has one micro-batch. Raise "
                        'gradient_accumulation_steps, or give the Trainer shoal={"lanes": n}')  # fmt: skip
        if self.args.train_sampling_strategy == "group_by_length":
            log.info("batches_are_grouped_by_length", means="in an order that is drawn from seed and epoch, the same "
                     "in every world, and not the original's")  # fmt: skip

    def _optimizer_and_scheduler(self, max_steps: int) -> tuple[Any, Scheduler | None]:
        """Those that the script gives, which the engine compares with the DeepSpeed configuration; those of the
        arguments where neither names one. None: the configuration's. A scheduler may be made once its optimizer is.
        """
        document = deepspeed_config(self.args) or {}
        if self.engine is not None:
            self.optimizer = None  # of the training before
        if self._created_lr_scheduler:  # type: ignore[has-type]
            self.lr_scheduler, self._created_lr_scheduler = None, False
        is_given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None  # type: ignore[attr-defined]
        if is_given or document.get("optimizer") is None:
            self.create_optimizer()  # type: ignore[attr-defined]
        check_given(self.model, self.optimizer, self.lr_scheduler)
        if self.lr_scheduler is not None or document.get("scheduler") is not None:
            return self.optimizer, self.lr_scheduler
        return self.optimizer, partial(self._scheduler_over, max_steps)

    def _scheduler_over(self, max_steps: int, optimizer: Any) -> Any:
        """That of the arguments, over the optimizer that trains."""
        self.optimizer = optimizer
        return self.create_scheduler(num_training_steps=max_steps)  # type: ignore[attr-defined]

    def _save_every(self, order: BatchOrder) -> int | None:
        """Steps between two elastic checkpoints: whenever a model may be saved."""
        args, by = self.args, self.args.save_strategy
        if by == SaveStrategy.NO or args.save_only_model:
            return None
        if by == SaveStrategy.BEST:
            by = args.eval_strategy
            return int(self.state.eval_steps) if by == "steps" else order.steps_per_epoch
        return int(self.state.save_steps) if by == SaveStrategy.STEPS else order.steps_per_epoch

    def _look_at(self, batch: Any) -> BatchFacts:
        """What the library counts of a batch."""
        items = self._get_num_items_in_batch([batch], self.args.device)  # type: ignore[attr-defined]
        before = self.state.num_input_tokens_seen
        self._track_num_input_tokens(batch)  # type: ignore[attr-defined]
        tokens, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen - before, before
        return BatchFacts(items, float(self.floating_point_ops(batch)), tokens)  # type: ignore[attr-defined]

    @contextmanager
    def _backwards_to(self, run: ElasticRun) -> Iterator[None]:
        """`training_step`, the library's or an override, calls the accelerator's backward."""
        self.accelerator.backward = run.backward
        try:
            yield
        finally:
            del self.accelerator.backward

    def _finish(self, run: ElasticRun, samples: float) -> Any:
        """After the last step, on every worker: what is saved is safe, then the library's own end."""
        engine = run.engine
        run.look_who_is_first()
        if engine.context.config.checkpoint.path is not None and engine.global_step in run.kept.saved:
            engine.save_checkpoint()
        self.fingerprint = engine.fingerprint()
        limit = self.args.save_total_limit
        if not self.is_world_process_zero():
            self.args.save_total_limit = None  # rank 0 deletes what is too many
        try:
            return self._finalize_training(None, samples, run.kept.start_time)  # type: ignore[attr-defined]
        finally:
            self.args.save_total_limit = limit

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("Trainer.hyperparameter_search cannot be honoured; start one job for each trial.")

    # ---- the world

    def is_world_process_zero(self) -> bool:
        """Whether this worker is rank 0 now."""
        return self.engine is None or self.engine.rank == 0

    is_local_process_zero = is_world_process_zero

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """As the library's; rank 0 shows and writes."""
        if self._run is not None:
            self._run.look_who_is_first()
        super().log(logs, *more, **named)  # type: ignore[misc]

    # ---- precision: the engine's

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**named)  # type: ignore[misc]
        return {**found, "mixed_precision": "no", "deepspeed_plugin": None}

    def _evaluate(self, *more: Any, **named: Any) -> Any:
        """The library's; what all workers evaluate at the same boundary they compute together."""
        assert self._run is not None, "called in training"
        with self._run.evaluations.sharing():
            return super()._evaluate(*more, **named)  # type: ignore[misc]

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """The library's, over the whole set: all workers come to the same numbers."""
        if self.model not in self.accelerator._models:
            self.accelerator._models.append(self.model)  # else it would be prepared, which changes its forward
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        with self._evaluating(), self._predicting(dataloader, metric_key_prefix, loss_only, ignore_keys) as loader:
            found = super().evaluation_loop(loader, description, loss_only, ignore_keys, metric_key_prefix)  # type: ignore[misc]
        self.callback_handler.eval_dataloader = dataloader
        return found

    def _take_counts(self) -> dict[str, float]:
        """What the last prediction has counted beside its outputs, once: another worker may go over them."""
        return {}

    def _add_counts(self, counts: Mapping[str, float]) -> None:
        """As if the prediction that has counted this were made here and now."""

    def _predicting(self, loader: Any, *more: Any) -> AbstractContextManager[Any]:
        return nullcontext(loader) if self._run is None else self._run.evaluations.predicting(loader, *more)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self.engine is not None:
            with self.engine.evaluating():
                yield
            return
        half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        with torch.autocast(self.args.device.type, half) if half is not None else nullcontext():
            yield

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """All parameters here."""
        with self.engine.gathered() if self.engine is not None else nullcontext():
            yield

    # ---- saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As the library's, on rank 0."""
        if self.is_world_process_zero():
            with self._whole_model():
                super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The model in a folder that `from_pretrained` reads, whole or not at all. What training goes on from is the
        elastic checkpoint of the same step.
        """
        del model, trial
        assert self._run is not None
        self.store_flos()  # type: ignore[attr-defined]
        step, saved = self.state.global_step, self._run.kept.saved
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        if step not in saved:
            saved.append(step)
        if self.state.best_global_step in saved:
            self.state.best_model_checkpoint = str(folder.with_name(f"checkpoint-{self.state.best_global_step}"))
        self.state.stateful_callbacks = exported(self)
        if self.is_world_process_zero():
            draft = folder.with_name(f".{folder.name}-{os.getpid()}")
            shutil.rmtree(draft, ignore_errors=True)
            self.save_model(str(draft), _internal_call=True)  # type: ignore[attr-defined]
            self.state.save_to_json(str(draft / "trainer_state.json"))
            context = self._run.engine.context
            mark_runs(draft, context.link.job.run, context.state.lineage)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
            transformers.trainer.rotate_checkpoints(
                output_dir=self.args.output_dir, save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint, use_mtime=True,
            )  # fmt: skip


class Trainer(ElasticTraining, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, elastic."""


class Seq2SeqTrainer(ElasticTraining, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer`, elastic."""


RUNS = "shoal_runs.json"
"""In each folder `checkpoint-N`."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where training is to begin, and a sentence about it."""

    resume: str | bool
    """For `shoal.checkpoint.resume`."""
    warning: str = ""
    refusal: UserError | None = None

    def on_welcome(self, is_under_way: bool) -> None:
        """It is known now whether the job is under way: it goes on where it is then, and the argument means nothing.
        Else this warns, or raises `UserError`.
        """
        if is_under_way:
            return
        if self.refusal is not None:
            raise self.refusal
        if self.warning:
            log.warning("older_checkpoint", means=self.warning)


def resume_point(asked: object, output_folder: str, has_controller: bool) -> ResumePoint:
    """`asked`: as `train` was given it. Raises `UserError` for a script alone, which no job can take along."""
    usual = "latest" if has_controller else False
    if asked is None or asked is False:
        return ResumePoint(usual)
    try:
        path, warning = _checkpoint_of(asked, output_folder)
    except UserError as error:
        if not has_controller:
            raise
        return ResumePoint(usual, refusal=error)
    return ResumePoint(path or usual, warning)


def _checkpoint_of(asked: object, output_folder: str) -> tuple[str, str]:
    """Its path, empty for step 0, and a warning where it is not the one of that step. Raises `UserError`.

    `asked`: True, the newest in the Trainer's output folder, or a folder that it has saved. Where the elastic part of
    that step is not there, the newest one of the same run before it is meant.
    """
    opening = f"resume_from_checkpoint is {asked}"
    if asked is not True:
        return _of_folder(Path(str(asked)), opening)
    storage = _saves_in(Path(output_folder), opening)
    newest = _latest(storage, opening)
    if newest is not None:
        return newest.path, ""
    folder = get_last_checkpoint(output_folder)
    if folder is None:
        raise UserError(f"{opening}, and there is no complete checkpoint in {storage.url}.")
    return _of_folder(Path(folder), opening)


def _of_folder(folder: Path, opening: str) -> tuple[str, str]:
    step, runs = _step_of(folder, opening), _runs_of(folder)
    storage = _saves_in(folder.parent, opening)
    for one in checkpoints(storage, _skipped):
        if one.name.step == step and _is_of(one.name, runs):
            return one.path, ""
    before = _latest(storage, opening, lambda one: one.name.step < step and _is_of(one.name, runs))
    missing = f"{opening}, and {storage.url} has no complete checkpoint of step {step}"
    if before is not None:
        return before.path, f"{missing}; training goes on from step {before.name.step}"
    steps = sorted({name.step for name in saves(storage) if _is_of(name, runs)})
    if not steps or steps[-1] > step or len(runs or ()) != 1:
        raise UserError(f"{missing} or before; there are {steps or 'none'}. Name another folder, or begin without one.")
    return "", f"{missing}: the first save of its run was cut short; training begins at step 0"


def _saves_in(folder: Path, opening: str) -> Storage:
    place = folder / FOLDER
    if not place.is_dir():
        raise UserError(
            f"{opening}, and there is no {place}: nothing was saved there by Shoal's Trainer, or with save_only_model. "
            "Load a model that was saved by from_pretrained, and train from there."
        )
    return open_storage(str(place))


def _latest(storage: Storage, opening: str, is_meant: Callable[[Found], bool] = lambda _: True) -> Found | None:
    try:
        return latest(storage, _skipped, is_meant=is_meant)
    except NoneReadable as error:
        raise UserError(f"{opening}: {error}") from None


def mark_runs(folder: Path, run: str, lineage: Lineage) -> None:
    """Leaves in a folder `checkpoint-N` which run has saved it, and which ones that run has continued: a Trainer that
    began anew in an output folder that was used before does not go on from the checkpoints of another one there.
    """
    runs = {run, *(branch.run for branch in lineage)}
    (folder / RUNS).write_text(json.dumps({"runs": sorted(runs)}), encoding="utf-8")


def _is_of(name: SaveName, runs: Collection[str] | None) -> bool:
    return runs is None or name.is_of(runs)


def _runs_of(folder: Path) -> list[str] | None:
    """None where the folder does not tell."""
    try:
        return [str(run) for run in json.loads((folder / RUNS).read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _step_of(folder: Path, opening: str) -> int:
    path = folder / "trainer_state.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{opening}, and {path} cannot be read; name a folder that a Trainer has saved.") from None


def _skipped(sentence: str) -> None:
    log.warning("checkpoint_skipped", reason=sentence)
