"""What training has come to on this worker: parameters, held blocks, buffers, hyper-parameters, the committed step.

Only `commit` moves the step on; a roll-forward calls it too. Knows no group and no controller. Training thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
from shoal_protos.errors import PeerError, UserError
from shoal_protos.messages import Inventory
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.blocks.flat import give_memory, lay_out_model, plain_parts, trainable
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.originals import Originals
from shoal.blocks.segments import HeldWeights, Segments
from shoal.blocks.shard_sums import ShardSums
from shoal.blocks.sharded_memory import ShardedMemory, WholeMemory
from shoal.blocks.state_home import OnUpdated, unheard
from shoal.blocks.values import WholeValues
from shoal.cells.marks import local_of
from shoal.cells.stages import places_of
from shoal.config.training import TrainingConfig
from shoal.core.average_rule import AverageRule
from shoal.core.cell_part import WHOLE, CellPart
from shoal.core.layout import Layout, Slot, Trainable
from shoal.core.loss_scale import LossScaleRule, after, first_loss_scale
from shoal.core.manifest_parts import Branch, Lineage
from shoal.core.misses import Misses, every_one
from shoal.core.stream_position import StreamPositions
from shoal.core.units import named_parameters, unit_numbers
from shoal.exchange.module_buffers import ModuleBuffers, persistent_buffers
from shoal.exchange.traffic import Traffic
from shoal.exchange.vote import Record
from shoal.first_values.building import meant_device
from shoal.first_values.deferred_values import DeferredValues, deferred_values
from shoal.guards.agreed_values import ModuleModes, SetInTime
from shoal.guards.step_guard import Comparisons, Guards, StepGuard
from shoal.guards.write_guards import ModuleGuard
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.optim.hyper import advance, has_turn, hyper_parameters, load_into
from shoal.optim.several import members_of
from shoal.process.device import Device, device_of
from shoal.process.host_memory import tensor_bytes
from shoal.state.given_values import GivenHyperParameters
from shoal.state.half_floats import half_dtype, round_module
from shoal.state.small_state import pack, unpack

NO_STEP = -1
"""The step of a worker that has none yet."""
ENDS = ("stop", "halt")
"""Kinds of requests by which a step becomes the last one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the config says of all steps."""

    lanes: int
    clipping: float
    """The greatest norm of a step's gradient; 0: none."""
    last_step: int
    """0: where the script ends."""
    units: tuple[str, ...] = ()
    """Classes of the modules that are units of the layout; none: by rule (core/units.py)."""
    one_micro_batch: bool = True
    """Whether a lane is one micro-batch."""
    half: torch.dtype | None = None
    """The half precision of the parameters; None: the script's own."""
    scaling: LossScaleRule | None = None
    """How losses are scaled; None: not at all."""
    state_folder: str | None = None
    """Where a file keeps optimizer state and master weights; None: memory does."""
    seed: int = 0
    state_on_host: bool = False
    """Whether host memory keeps them, wherever parameters are."""
    parameters_on_host: bool = False
    """Whether it keeps the parameters of held blocks too, where these are with the state."""
    peers_on_host: bool = True
    """Whether all other workers are on this one's host."""
    mirrors_on_host: bool = False
    """Whether host memory keeps the state of blocks that others own."""
    part: CellPart = WHOLE
    """What of the model this process has."""
    stages: tuple[tuple[Trainable, ...], ...] = ()  # the parameters of all, by place of a pipeline
    average: AverageRule | None = None
    """How weights are averaged; None: not at all."""

    @classmethod
    def of(cls, config: TrainingConfig, last_step: int, peers_on_host: bool = True) -> Limits:
        """`last_step`: where the dataset or `max_steps` ends the job."""
        precision = config.precision
        one = config.micro_batches_per_lane * config.micro_batches_per_call == 1
        return cls(
            config.lanes, config.gradient_clipping, last_step, config.units, one, half_dtype(precision),
            precision.scaling, config.state_folder, config.seed, config.state_on_host, config.parameters_on_host,
            peers_on_host, config.mirrors_on_host, average=config.average,
        )  # fmt: skip


class ByStage(Protocol):
    """What makes the parts of a state that differ by ZeRO's stage: a residency (training/residency.py)."""

    keeps_weights: bool
    """Whether parameters are with the state of the blocks that a worker holds, and nowhere else."""

    def parameters_in_blocks(
        self, module: nn.Module, units: Collection[str], /
    ) -> list[tuple[Trainable, nn.Parameter]]:
        """Return those that are in blocks besides the trained ones."""
        ...

    def memory(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        can_be_seen: bool,
        is_empty: bool,
        /,
    ) -> WholeMemory | ShardedMemory:
        """Make the parameters views of flats. `can_be_seen`, `is_empty`: as for `ShardedMemory`."""
        ...

    def gradients(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        limits: Limits,
        comparisons: Comparisons,
        /,
    ) -> tuple[LaneSums | ShardSums, StepGuard]:
        """Return what adds up the gradients of trained parameters, and their guard."""
        ...

    def weights(self, segments: Segments, values: WholeValues, /) -> WholeValues | HeldWeights:
        """Return the parameters of the blocks that are held, at least. `values`: what forwards compute with."""
        ...

    def traffic(self, plan: Plan, rank: int, layout: Layout, leaves_are_narrow: bool) -> Traffic:
        """Return what a member exchanges in a world."""
        ...


class TrainingState:
    """Parameters, optimizer state, buffers and position of one worker. `followed`: the last step that the script's
    functions of `on_commit` have followed, and with them what it registers.
    """

    guards: Guards
    """What the steps of training tell: see guards/step_guard.py."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        limits: Limits,
        by_stage: ByStage,
        device: Device | None = None,
    ) -> None:
        """`device`: None: that of the module."""
        self.device = device if device is not None else device_of(_named_tensors(module))
        self._by_stage, self._one_micro_batch = by_stage, limits.one_micro_batch
        deferred = deferred_values(module, limits.seed, unit_numbers(module, limits.units), self.device.kind)
        pairs = trainable(module, optimizer, limits.units, limits.half)
        pairs, before = round_module(module, pairs, limits.half)
        self.module, self.optimizer, self.scheduler, self.clipping = module, optimizer, scheduler, limits.clipping
        self.modules = places_of(module)
        """What each place of a pipeline has; without one, the module alone."""
        self._optimizers = members_of(optimizer)
        pairs += by_stage.parameters_in_blocks(module, limits.units)
        self.held_layout: Layout
        """Of all that is in blocks; where parameters are sharded, frozen ones too."""
        self.held_layout, self.placed = lay_out_model(pairs, self.device.kind, limits.part, limits.stages)
        self.layout = self.held_layout.trained  # the same in every stage
        self.parameters = self.placed[: sum(len(bucket.slots) for bucket in self.layout.buckets)]
        """The trained ones, in the order of the slots; `placed`: all that are in blocks."""
        self.comes_later = by_stage.keeps_weights and deferred is not None
        """Whether parameters have no values before they are gathered for the first time."""
        if self.comes_later:
            before = {info.name: parameter.data for info, parameter in pairs} | before
        can_be_seen = limits.peers_on_host and self.device.on_host
        self.memory = by_stage.memory(self.held_layout, self.placed, can_be_seen, self.comes_later)
        self.flats = WholeValues(self.held_layout, self.memory.flats)
        """What forwards compute with."""
        self.originals: Originals | None = Originals(self.held_layout, self.placed, before, deferred)
        """Until something but the script has made this process's state: till then it could begin at step 0."""
        self._put_first_values(deferred)
        self.comparisons = Comparisons(at_once=self.device.on_host)
        self.sums, gradient_guard = by_stage.gradients(self.layout, self.parameters, limits, self.comparisons)
        tensors = {info.name: tensor for info, tensor in pairs}
        on_host = limits.state_on_host, self.device, limits.parameters_on_host, limits.mirrors_on_host
        place = StatePlace(limits.state_folder, *on_host)
        self.held = held_blocks(place, self.held_layout, optimizer, self.flats, tensors, by_stage.keeps_weights)
        self.held.segments.shared, self.held.segments.average_rule = self.memory.shared, limits.average
        if isinstance(self.sums, ShardSums) and limits.mirrors_on_host:
            self.sums.are_mirrored_by_host, copies = True, self.held.segments.copies
            self.sums.reduced.find_for_copies = copies.memory if copies is not None else None
        self.weights = by_stage.weights(self.held.segments, self.flats)
        """The parameters of the blocks that are held, at least."""
        self.buffers = ModuleBuffers(module, limits.lanes, [one for one in self.modules if one is not module])
        here = {name: local_of(parameter) for name, parameter in self._named().items()}
        self.module_guard = ModuleGuard(module, here, self.memory.always_here, self.comparisons)
        self.set_in_time, self._first_keys = SetInTime(optimizer), list(map(frozenset, optimizer.param_groups))
        self.given = GivenHyperParameters(optimizer, scheduler, self.held.effects.moved)
        self.modes, self.misses = ModuleModes(module), Misses(())
        self.guards = Guards(self.module_guard, self.set_in_time, self.modes, gradient_guard, self.comparisons)
        self.loss_scale = first_loss_scale(limits.scaling) if limits.scaling is not None else None
        self.step, self.last_step, self.committed_in, self.followed = NO_STEP, limits.last_step, 0, 0
        self.record: Record | None = None
        self.pending = NO_BLOCKS
        """Held blocks whose next gradient is in; set when a vote is entered with all that the commit reads."""
        self.current = NO_BLOCKS
        """Blocks whose parameters are those of `step`."""
        self.frozen_in_place = True
        """Whether this module's frozen parameters are known to be the job's."""
        self.lineage: Lineage = ()
        """The checkpoints that training has gone on from."""
        self.stream_positions = StreamPositions()
        self.registered: dict[str, Any] = {}
        """The user's own objects with `state_dict` and `load_state_dict`, by name."""

    def _put_first_values(self, deferred: DeferredValues | None) -> None:
        """Of a model that was built without memory: frozen parameters, and all that are whole on every worker."""
        if deferred is None:
            return
        assert self.originals is not None
        for name, parameter in named_parameters(self.module):
            if parameter.is_meta:
                value = deferred.part(name, 0, parameter.numel()).to(self.device.kind, parameter.dtype, copy=True)
                give_memory(parameter, value.view(parameter.shape))
        if not self.comes_later:
            self.originals.put_back()

    def _named(self) -> dict[str, nn.Parameter]:
        """The parameters that are in blocks, in the order of the flats' slots."""
        names = [slot.parameter.name for bucket in self.held_layout.buckets for slot in bucket.slots]
        return dict(zip(names, self.placed, strict=True))

    def name_of(self, parameter: nn.Parameter) -> str:
        """One that is in blocks, as it was called at `shoal.initialize`: a module may have lost it since."""
        return next(name for name, one in self._named().items() if one is parameter)

    def traffic(self, plan: Plan, rank: int) -> Traffic:
        """Return what a member exchanges in a world of this plan."""
        return self._by_stage.traffic(plan, rank, self.held_layout, self._one_micro_batch)

    @property
    def everything(self) -> Runs:
        return self.held_layout.all_blocks

    @cached_property
    def frozen_bytes(self) -> int:
        """What frozen parameters take that are whole on every worker: a sum over the whole module, and always the
        same.
        """
        return sum(one.nbytes for one in frozen_parameters(self).values())

    @property
    def scale(self) -> float:
        """What losses are multiplied by before their backward."""
        return self.loss_scale.scale if self.loss_scale is not None else 1.0

    @property
    def loss(self) -> float | None:
        """The last step's, where one was committed."""
        return self.record.loss if self.record is not None else None

    # ---- one step

    def commit(self, record: Record, generation: int, on_updated: OnUpdated = unheard) -> None:
        """Applies the step whose vote has passed to all blocks with a pending gradient, and frees every other block.

        `on_updated`: see `HeldBlocks.apply`.
        """
        self.originals = None
        self.held.keep_only(self.pending)
        if record.updates:
            self._update(record, on_updated)
        if self.loss_scale is not None and (record.updates or record.overflow):
            self.loss_scale = after(self.loss_scale, bool(record.overflow))
        self._forget_whole_tensors()
        for member in self._optimizers:
            member.state.clear()  # what the user's object brought along lives in the held blocks now
        self.buffers.commit()
        self.step, self.committed_in, self.record = record.step, generation, record
        self.current, self.pending = self.held.runs | self.memory.fetched, NO_BLOCKS
        if self.scheduler is not None and record.updates:
            advance(self.scheduler, record.loss)
        if any(request.kind in ENDS for request in record.requests):
            self.last_step = min(self.last_step or record.step, record.step)
        self.set_in_time.on_commit(record)
        self.stream_positions.learn(record.streams)

    def _update(self, record: Record, on_updated: OnUpdated) -> None:
        """Of the parameters that some lane has used."""
        unused = int(record.unused or "0", 16) & every_one(self.layout)
        self.held.optimizer_step.cuts = self.misses.cuts(self.layout, unused)
        rule = self.held.segments.average_rule
        self.held.segments.averages_now = rule is not None and rule.is_due(record.step)
        self.held.apply(self.sums.reduced, self.clip(record.norm), on_updated)
        turns = [has_turn(group) for group in self.optimizer.param_groups]
        self.misses = self.misses.after(self.layout, unused, turns)

    @cached_property
    def _numbers(self) -> dict[Slot, int]:
        """Of trained parameters, in their order."""
        slots = (slot for bucket in self.layout.buckets for slot in bucket.slots)
        numbers = self.layout.parameter_numbers[self.layout.part.coordinate]
        return dict(zip(slots, chain.from_iterable(numbers), strict=True))

    def is_new(self, slot: Slot) -> bool:
        """Whether no update of a parameter was made yet, after one of others in its bucket."""
        return self.misses.of[self._numbers[slot]].is_new

    def clip(self, norm: float | None) -> float:
        """What gradients are times where their norm is so large."""
        if norm is None or not self.clipping:
            return 1.0
        return min(1.0, self.clipping / (norm + 1e-6))

    def end_here(self) -> None:
        """The job ends with the last committed step: what the lanes have made since is void."""
        self.last_step = min(self.last_step or self.step, self.step)
        self.forget_gradients()
        self.buffers.give_up()

    def forget_gradients(self) -> None:
        """The step's sums are void: it is run again, or done."""
        self.sums.clear()
        self.buffers.clear()
        self._forget_whole_tensors()
        self.pending = NO_BLOCKS

    def _forget_whole_tensors(self) -> None:
        if self.held.optimizer_step.whole.places:
            self.held.optimizer_step.whole.forget()

    # ---- standing still

    def inventory(self, answers: int, generation: int, lane: int) -> Inventory:
        """What a stopped worker reports."""
        return Inventory(
            answers=answers,
            generation=generation,
            step=self.step,
            committed_in=self.committed_in,
            record=self.record.to_bytes() if self.record else b"",
            holds=self.held.runs,
            pending=self.pending,
            current=self.current,
            lane=lane,
        )

    def stand_at_the_start(self) -> Originals:
        """Step 0, no block held; the values with which parameters begin."""
        assert self.originals is not None, "whoever has trained cannot begin"
        self.held.keep_only(NO_BLOCKS)
        self.step, self.committed_in, self.record = 0, 0, None
        self.lineage, self.current, self.misses = (), NO_BLOCKS, self.held.loaded.misses()
        self.buffers.put_back()
        return self.originals

    def begin_anew(self, keeps: Runs) -> None:
        """The initial state: the given blocks held in the state that the user's optimizer starts with."""
        originals = self.stand_at_the_start()
        if not self.comes_later:
            originals.put_back()
        for blocks in originals.portions(keeps):
            self.held.hold(blocks, originals)
        self.current = self.everything

    def give_up(self) -> None:
        """A joiner again: nothing that it holds counts."""
        self.held.keep_only(NO_BLOCKS)
        self.forget_gradients()
        self.step, self.committed_in, self.record, self.current = NO_STEP, 0, None, NO_BLOCKS

    # ---- what a joiner gets

    def small_state(self) -> bytes:
        """All that a joiner needs besides parameters and blocks, between processes that run the same script."""
        return pack(
            {
                "step": self.step,
                "committed_in": self.committed_in,
                "record": self.record.to_bytes() if self.record else b"",
                "hyper": hyper_parameters(self.optimizer),
                "evaluating": self.modes.evaluating,
                "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
                "loss_scale": self.loss_scale.position if self.loss_scale is not None else None,
                "buffers": self.buffers.committed,
                "last_step": self.last_step,
                "lineage": [branch.model_dump() for branch in self.lineage],
                "frozen": frozen_digest(self),
                "streams": self.stream_positions.to_texts(),
                "followed": self.followed,
                "missed": self.misses.runs(),
                "registered": {name: of.state_dict() for name, of in self.registered.items()},
            }
            | ({"joins": self.buffers.joins.texts} if self.buffers.joins.declared else {})
        )

    def load_hyper_parameters(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """Takes over those of another member or a checkpoint. What has come into a group since the start, and is not
        among them, goes: a count of steps that the optimizer keeps there begins anew with the steps.
        """
        for group, first, values in zip(self.optimizer.param_groups, self._first_keys, hyper, strict=False):
            for key in group.keys() - first - values.keys():
                del group[key]
        load_into(self.optimizer, hyper)

    def load_small_state(self, content: bytes) -> None:
        """Takes over another member's small state."""
        given = unpack(content)
        self.originals = None
        self.step, self.committed_in, self.followed = given["step"], given["committed_in"], given["followed"]
        self.record = Record.from_bytes(given["record"]) if given["record"] else None
        self.load_hyper_parameters(given["hyper"])
        self.modes.take_over(given["evaluating"])
        if self.scheduler is not None and given["scheduler"] is not None:
            self.scheduler.load_state_dict(given["scheduler"])
        if self.loss_scale is not None and given["loss_scale"] is not None:
            try:
                self.loss_scale = self.loss_scale.at(given["loss_scale"])
            except ValueError as error:
                raise PeerError(f"the small state that another worker sent cannot be read: {error}") from None
        try:
            self.stream_positions.replace(given["streams"])
            self.misses = Misses.from_runs(self.layout, given["missed"])
        except (TypeError, ValueError) as error:
            raise PeerError(f"the small state that another worker sent cannot be read: {error}") from None
        self.buffers.joins.check_same(given.get("joins", {}))
        self.buffers.load(given["buffers"])
        self.last_step = given["last_step"] or self.last_step  # which this worker may know before that one
        self.lineage = tuple(Branch(**branch) for branch in given["lineage"])
        check_registered(self.registered, given["registered"], "another worker of this job")
        for name, of in self.registered.items():
            of.load_state_dict(given["registered"][name])
        self.frozen_in_place = bool(given["frozen"] == frozen_digest(self))
        self.current = self.memory.fetched


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What must lie on one device, with what it is called."""
    meant = meant_device(module)
    if meant is not None:
        yield "what was built within shoal.deferred(device=…)", torch.empty(0, device=meant)
    yield from ((f'parameter "{name}"', tensor) for name, tensor in named_parameters(module))
    yield from ((f'buffer "{name}"', tensor) for name, tensor in persistent_buffers(module).items())


def check_registered(mine: Collection[str], theirs: Collection[str], where: str) -> None:
    """Raises `UserError` naming the first state that only this script registers, or only `where` has."""
    for name in sorted(set(mine) ^ set(theirs)):
        if name in mine:
            raise UserError(f'{where} has no state "{name}", which this script registers with engine.register_state.')
        raise UserError(f'{where} has a state "{name}"; this script must register it with engine.register_state.')


def frozen_parameters(state: TrainingState) -> dict[str, Tensor]:
    """Parameters by name that no optimizer changes and that are whole on every worker: those in no block. Of one that
    wraps tensors, as quantised weights do, these.
    """
    in_blocks = frozen_in_blocks(state)
    named = [(name, one) for name, one in named_parameters(state.module) if not one.requires_grad]
    parts = (part for name, one in named if name not in in_blocks for part in plain_parts(name, one))
    return {name: part.data for name, part in parts}


def frozen_in_blocks(state: TrainingState) -> dict[str, nn.Parameter]:
    """Parameters by name that no optimizer changes and that are in blocks; their values may be elsewhere."""
    slots = [slot for bucket in state.held_layout.buckets[len(state.layout.buckets) :] for slot in bucket.slots]
    placed = state.placed[len(state.parameters) :]
    return {slot.parameter.name: parameter for slot, parameter in zip(slots, placed, strict=True)}


def frozen_digest(state: TrainingState) -> str:
    """SHA-256 over names and bytes of the frozen parameters that are whole here, hexadecimal."""
    return digest_of(list(frozen_parameters(state).items()))


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, hexadecimal."""
    total = hashlib.sha256()
    for name, tensor in named:
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor_bytes(tensor.cpu()))
    return total.hexdigest()
