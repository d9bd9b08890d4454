"""What forked processes run: a small training script with everything that makes a model hard, and the controller.

`train` is written as a user would write it. The model has an embedding tied with its head, dropout, batch
normalization (buffers), a frozen parameter and an unused one; AdamW has two groups, and a scheduler. About 20 blocks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 256, 64, 16
SHARED = 4 << 10
"""Messages from so many bytes on pass through shared memory: some of each step, as with a model that is not small."""
SLOW = 0.5
"""Seconds per micro-batch of the last steps while a test is at work."""


class Count:
    """A state that a script registers."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that a small model can learn; the same ones everywhere."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = torch.arange(LENGTH + 1) * (index % 7 + 1) + index
        noise = torch.randint(0, 3, (LENGTH + 1,))  # under the lane's seed
        tokens = (start + noise) % VOCABULARY
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


class Model(nn.Module):
    """Tokens to the mean cross entropy of the next ones."""

    def __init__(self, dropout: float, buffers: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH) if buffers else nn.LayerNorm(4 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.frozen
        rows = self.norm(torch.relu(self.up(hidden)).flatten(0, 1))
        hidden = hidden + self.down(self.dropout(rows)).view_as(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Adapter(nn.Module):
    """A frozen layer, with two small matrices beside it that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


class Adapted(Model):
    """In units, most of it frozen; every tensor can be made without its constructor."""

    def __init__(self, dropout: float, buffers: bool) -> None:
        super().__init__(dropout, buffers)
        self.adapters = nn.ModuleList(Adapter() for _ in range(4))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.frozen)
        nn.init.normal_(self.unused)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for adapter in self.adapters:
            hidden = adapter(hidden)
        return super().forward(tokens, targets) + 0.1 * hidden.square().mean()


def config(options: dict[str, Any]) -> dict[str, Any]:
    """The training config that the options ask for."""
    lanes, micro_batches = options.get("lanes", 8), options.get("micro_batches_per_lane", 1)
    return {
        "train_micro_batch_size_per_gpu": options.get("micro_batch", 2),
        "gradient_clipping": options.get("gradient_clipping", 1.0),
        "zero_optimization": {"stage": options.get("stage", 1), **_offload(options)},
        **options.get("precision", {}),
        "shoal": {
            "lanes": lanes,
            "micro_batches_per_lane": micro_batches,
            "mirrors": options.get("mirrors", 1),
            "seed": 11,
            "max_steps": options.get("max_steps", 20),
            "on_slow": "name",  # on a busy machine worlds would change by themselves
            **options.get("shoal", {}),
        },
    }


def _offload(options: dict[str, Any]) -> dict[str, Any]:
    """`offload`: the folder of the files that keep optimizer state; or "cpu"."""
    folder = options.get("offload")
    if not folder:
        return {}
    parameters = {"offload_param": {"device": "cpu"}} if options.get("offload_param") else {}
    state = {"device": "cpu"} if folder == "cpu" else {"device": "nvme", "nvme_path": str(folder)}
    return {"offload_optimizer": state, **parameters}


def optimizer_of(
    model: nn.Module, name: str = "AdamW", apart: dict[str, Any] | None = None, **arguments: Any
) -> torch.optim.Optimizer:
    """Two groups, as usual: matrices, and all else with three times the rate. `apart`: more of the second group's."""
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    decays = {"weight_decay": 0.1} if kind in (torch.optim.AdamW, torch.optim.SGD) else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], **decays},
        {"params": [parameter for parameter in trained if parameter.ndim == 1], "lr": 3e-3, **(apart or {})},
    ]
    return kind(groups, lr=1e-3, **arguments)


def scheduler_of(optimizer: torch.optim.Optimizer, name: str) -> Any:
    """A scheduler by its class's name, with what it needs; for some the rate depends on the loss, or on momentum."""
    arguments: dict[str, dict[str, Any]] = {
        "CosineAnnealingLR": {"T_max": 50},
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "OneCycleLR": {"max_lr": [1e-2, 2e-2], "total_steps": 30},
        "ReduceLROnPlateau": {"patience": 0, "threshold": 0.5},
    }
    return getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments[name])


class Brake:
    """`pace`: seconds that each micro-batch takes longer; with `until`, only as long as that file is not there.

    Then the last steps take long: a test that is still at work does not find the job done. `linger`: when all is
    done, the script waits for that file before it ends.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._pace, self._last = options.get("pace", 0.0), options.get("max_steps", 20) - 3
        self._until = Path(options["until"]) if "until" in options else None
        self._linger = Path(options["linger"]) if "linger" in options else None
        self._pause = threading.Event()

    def hold(self, step: int) -> None:
        if self._until is None:
            self._pause.wait(self._pace)
        elif not self._until.exists():
            self._pause.wait(SLOW if step >= self._last else self._pace)

    def linger(self) -> None:
        while self._linger is not None and not self._linger.exists():
            self._pause.wait(0.02)


def model_of(options: dict[str, Any]) -> Model:
    torch.manual_seed(options.get("weights_seed", 0))
    given = options.get("dropout", 0.1), options.get("buffers", True)
    if options.get("deferred"):
        import shoal

        with shoal.deferred():
            return Adapted(*given)
    model = Model(*given)
    model = model.double() if options.get("double") else model
    return model.to(options.get("device", "cpu"))


def data_of(options: dict[str, Any]) -> Any:
    """The samples; with `data_workers`, in a DataLoader of so many."""
    samples = Samples(options.get("samples", 100))
    if "data_workers" not in options:
        return samples
    return torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True, num_workers=options["data_workers"])


def train(result: str, **options: Any) -> None:
    """Options: max_steps, lanes, stage, mirrors, dropout, buffers, samples, optimizer, scheduler, pace, until, …

    `children`: so many are forked after the first step, as a data loader's workers are, and sleep. `keeps_sockets`: a
    child has them open when this process is killed. `compile`: the backend of torch.compile; then the number of graphs
    is printed whenever it has grown. `evaluate`: after every step, on rank 0. `bare`: the script ends with its loop,
    and writes no result. `deferred`: a model with a frozen base that is built without memory.
    """
    import shoal
    from shoal.group import host_peers

    host_peers.LEAST_BYTES = SHARED
    model = model_of(options)
    if options.get("prints"):
        print(f"{os.environ.get('SHOAL_WORKER_ID', 'alone')} prints", flush=True)
    optimizer = optimizer_of(model, **options.get("optimizer", {}))
    scheduler = scheduler_of(optimizer, options.get("scheduler", "CosineAnnealingLR"))
    engine = shoal.initialize(
        model=model, config=config(options), dataset=data_of(options), optimizer=optimizer, scheduler=scheduler
    )
    module = torch.compile(engine.module, backend=options["compile"]) if "compile" in options else engine.module
    brake, graphs = Brake(options), 0
    losses: list[float | None] = []
    engine.on_step(lambda engine: losses.append(engine.loss))
    if options.get("evaluate"):
        engine.on_step(evaluate)
    for batch in engine:
        brake.hold(engine.global_step)
        if engine.global_step:
            have_children(options.pop("children", 0))
            if options.pop("keeps_sockets", False):
                keep_sockets_open()
        loss = module(**batch)
        engine.backward(loss)
        engine.step()
        if "compile" in options:
            graphs = say_graphs(graphs)
    if options.get("bare"):
        return
    fingerprint = engine.fingerprint()
    brake.linger()
    if "export" in options:
        engine.export(options["export"])
    _write(result, {"fingerprint": fingerprint, "step": engine.global_step, "loss": engine.loss, "losses": losses})


def evaluate(engine: Any) -> None:
    """On rank 0 alone."""
    with engine.evaluating(), engine.gathered():
        tokens = torch.arange(2 * LENGTH, device=engine.device).view(2, LENGTH)
        assert engine.module(tokens, tokens).isfinite()


def train_and_die_writing(result: str, **options: Any) -> None:
    """`train`; w1 is killed in the middle of a write of its file of optimizer state, in its fourth update or so."""
    from shoal.offload.state_file import StateFile

    if os.environ.get("SHOAL_WORKER_ID") == "w1":
        write, calls = StateFile.write, iter(range(1, 1 << 20))

        def half(file: StateFile, at: int, source: memoryview) -> None:
            if next(calls) > 12:
                write(file, at, source[: len(source) // 2 // 4096 * 4096])
                os.kill(os.getpid(), signal.SIGKILL)
            write(file, at, source)

        StateFile.write = half  # type: ignore[method-assign]
    train(result, **options)


def train_beside_a_slow_one(result: str, slow: str, well: str, **options: Any) -> None:
    """`train`; a lane takes worker `slow` twelve times as long while the file `well` is not there. Who has no lanes
    rehearses one soon, and prints it.
    """
    from shoal.training import telemetry

    telemetry.REHEARSAL_STEPS = 10
    if os.environ.get("SHOAL_WORKER_ID") == slow:
        hold = Brake.hold

        def slowly(brake: Brake, step: int) -> None:
            for _ in range(1 if Path(well).exists() else 12):
                hold(brake, step)

        Brake.hold = slowly  # type: ignore[method-assign]
        end_rehearsal = telemetry.LaneClock.end_rehearsal

        def end(clock: Any, micro_batches: int) -> None:
            end_rehearsal(clock, micro_batches)
            print("a lane is rehearsed", flush=True)

        telemetry.LaneClock.end_rehearsal = end  # type: ignore[method-assign]
    train(result, **options)


def train_on_shown_gpus(result: str, mute: str = "", hung: str = "", **options: Any) -> None:
    """`train`, where each worker's GPU is a fake NVML's, at a place of its own in the recorded figures.

    `mute`: this worker's GPU does not tell its temperature. `hung`: this one's driver never answers.
    """
    from fake_nvml import UUID, FakeNvml
    from shoal.session import link_choice

    worker = os.environ.get("SHOAL_WORKER_ID", "w0")
    number = int(worker.removeprefix("w"))
    nvml = FakeNvml(number, {"nvmlDeviceGetTemperature"} if worker == mute else (), ahead=3 * number)
    if worker == hung:
        nvml.answers.clear()

    class Shown(link_choice.GpuWatch):
        @classmethod
        def of(cls, device: Any) -> Shown:
            return cls(UUID, lambda: nvml, 0.5)

    link_choice.GpuWatch = Shown  # type: ignore[misc]
    train(result, **options)


def say_graphs(before: int) -> int:
    """How many torch.compile has made in this process."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if count > before:
        print(f"graphs {count}", flush=True)
    return count


def have_children(count: int) -> None:
    for _ in range(count):
        if os.fork() == 0:
            while True:
                signal.pause()


def keep_sockets_open() -> None:
    """In a child that Python knows nothing of: they are not closed when this process dies."""
    if ctypes.PyDLL(None).fork() == 0:
        while True:
            signal.pause()


def _write(result: str, ended: dict[str, Any]) -> None:
    file = Path(result)
    beside = file.with_suffix(f".{os.getpid()}")  # workers that the launcher starts share the file
    beside.write_text(json.dumps(ended))
    beside.replace(file)


def controller(**flags: str) -> None:
    """`shoal controller` with these flags."""
    from shoal_controller.cli.controller import controller as command
    from shoal_controller.cli.endings import ending

    sys.exit(ending(command, flags))


def train_plainly(result: str, **options: Any) -> None:
    """The job of `train` as a plain PyTorch loop in one process, with the same samples and seeds; no engine.

    Gradients are summed by autograd as ever, clipped by `clip_grad_norm_`; the optimizer runs on the parameters.
    """
    from safetensors.torch import save_model
    from shoal.core.sampler import Sampler
    from shoal.data.fetch import Fetcher
    from shoal.data.seeds import seed_everything
    from shoal.data.source import NumberedSamples

    model = model_of(options)
    optimizer = optimizer_of(model, **options.get("optimizer", {}))
    scheduler = scheduler_of(optimizer, options.get("scheduler", "CosineAnnealingLR"))
    samples = Samples(options.get("samples", 100))
    lanes, micro_batches = options.get("lanes", 8), options.get("micro_batches_per_lane", 1)
    sampler = Sampler(len(samples), lanes, 2, micro_batches, seed=11)
    fetcher = Fetcher(NumberedSamples(samples, None, sampler, 11), None, 11, "cpu")
    losses = []
    for step in range(options.get("max_steps", 20)):
        places = [(lane, micro) for lane in range(lanes) for micro in range(micro_batches)]
        optimizer.zero_grad()
        total = 0.0
        for lane, micro in places:
            batch = fetcher.micro_batch(step, lane, micro)
            seed_everything(11, step, lane, micro, purpose="forward")
            loss = model(**batch) / len(places)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.get("gradient_clipping", 1.0))
        optimizer.step()
        scheduler.step()
        losses.append(total)
    save_model(model, options["export"])
    _write(result, {"losses": losses})
