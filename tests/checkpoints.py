"""Training states and checkpoints for tests: `trained(steps)` is a state, `save(state, place, owners)` a whole save.

The model has everything that makes one hard: an embedding tied with its head, a buffer, a frozen parameter, two
optimizer groups, two dtypes. A save is made as a world would: one file by each owner, the manifest by the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal.blocks.flat import views
from shoal.checkpoint.catalogue import SaveName
from shoal.checkpoint.manifest import DataPosition, Manifest
from shoal.checkpoint.named import tied_names
from shoal.checkpoint.saver import write_frozen
from shoal.checkpoint.snapshot import Arena, take_snapshot
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.writer import Author, Origin, States, commit, draft_of, write_content
from shoal.core.manifest_parts import LayoutEntry
from shoal.exchange.vote import Record
from shoal.state.training_state import Limits, TrainingState, frozen_parameters
from shoal.training.residency import residency_of
from shoal_protos.runs import Runs, every
from torch import nn

DATA = DataPosition(seed=3, lanes=4, micro_batch_size=2, micro_batches_per_lane=1, samples=100)


def origin(state: TrainingState) -> Origin:
    return Origin("job", "run", LayoutEntry.of(state.layout, tied_names(state.modules)), DATA, {}, {})


class Model(nn.Module):
    """About 15 blocks. Nothing is ever computed with it."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(150, width)
        self.up = nn.Linear(width, 200)
        self.norm = nn.BatchNorm1d(200)
        self.wide = nn.Parameter(torch.randn(130, 50, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(7, 3), requires_grad=False)
        self.head = nn.Linear(width, 150, bias=False)
        self.head.weight = self.embedding.weight


def fresh(seed: int = 0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, width: int = 96) -> TrainingState:
    """A state at step 0 that holds every block."""
    torch.manual_seed(seed)
    model = Model(width)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wide, narrow = ([p for p in trained if (p.ndim > 1) is is_wide] for is_wide in (True, False))
    groups = [{"params": wide}, {"params": narrow, "lr": 0.1}]
    optimizer = kind(groups, lr=0.01)  # type: ignore[call-arg]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = TrainingState(model, optimizer, scheduler, Limits(lanes=4, clipping=0.0, last_step=50), residency_of(0))
    state.begin_anew(every(state.layout.blocks))
    return state


def train(state: TrainingState, steps: int) -> TrainingState:
    """Commits some steps with gradients that depend on the step alone."""
    state.optimizer._opt_called = True  # type: ignore[attr-defined]
    for _ in range(steps):
        random = torch.Generator().manual_seed(state.step)
        for bucket, flat in zip(state.layout.buckets, state.sums.live.flats, strict=True):
            flat.zero_()
            for slot in bucket.slots:
                end = slot.start + slot.parameter.elements
                flat[slot.start : end] = torch.randn(end - slot.start, dtype=flat.dtype, generator=random)
        for name, value in state.buffers.committed.items():
            state.buffers.pending[name] = (value + 1).to(value.dtype)
        state.pending = state.everything
        state.commit(record_of(state.step + 1), generation=1)
    return state


def record_of(step: int) -> Record:
    return Record(step, (1,), 1.0 / step, None, {}, {}, (), ("h",))


def trained(steps: int = 3, seed: int = 0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> TrainingState:
    return train(fresh(seed, kind), steps)


def halves(state: TrainingState) -> list[Runs]:
    """Two owners with alternating runs of three blocks."""
    blocks = state.layout.blocks
    first = Runs((at, min(at + 3, blocks)) for at in range(0, blocks, 6))
    return [first, every(blocks) - first]


def save(
    state: TrainingState,
    storage: Storage,
    owners: Sequence[Runs] | None = None,
    generation: int = 1,
    registered: States | None = None,
    run: str = "",
) -> tuple[SaveName, Manifest]:
    """A whole save by as many writers as there are owners."""
    owners = owners or halves(state)
    authors = [Author(f"w{number}", f"{generation:08x}") for number in range(len(owners))]
    name = SaveName.of(state.step, generation, state.step, authors[0].incarnation, run)
    draft, beside = draft_of(state, origin(state), generation, registered or {})
    files = []
    for number, (author, owned) in enumerate(zip(authors, owners, strict=True)):
        tensors = {} if number else beside
        snapshot = take_snapshot(state.layout, state.weights, state.held, owned, tensors, Arena())
        files.append(write_content(storage, name.folder, state.step, author, snapshot).name)
    draft = draft.model_copy(update={"frozen": write_frozen(storage, frozen_parameters(state), "f")})
    return name, commit(storage, name.folder, draft, files)


def check_last_update(state: TrainingState, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Torch's own step on the gradients of the state's last one gives its bits. `module`: as the state was before."""
    for bucket in state.layout.buckets:
        for slot, gradient in zip(bucket.slots, views(bucket, state.sums.live.flats[bucket.index]), strict=True):
            module.get_parameter(slot.parameter.name).grad = gradient
    optimizer.step()
    for name, parameter in state.module.named_parameters():
        assert torch.equal(module.get_parameter(name), parameter), name
