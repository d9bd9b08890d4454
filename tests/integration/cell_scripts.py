"""Scripts whose lanes are trained by cells of two processes, as users write them: layers by hand, and by torch's plans.

Forked by test_cells.py, with the data and the brake of scripts.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integration.scripts import VOCABULARY, WIDTH, Brake, Samples, _write, config, optimizer_of
from page_code import blocks
from torch import Tensor, nn

TENSOR = 2


class Copied(torch.autograd.Function):
    """Megatron's f: gradients are summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """Megatron's g: values are."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ByHand(nn.Module):
    """A column-parallel and a row-parallel matrix."""

    def __init__(self, cell: Any) -> None:
        import shoal

        super().__init__()
        self.group, size, place = cell.group("tensor"), cell.size("tensor"), cell.index("tensor")
        up, down = torch.randn(4 * WIDTH, WIDTH) / 8, torch.randn(WIDTH, 4 * WIDTH) / 16
        self.up = shoal.sharded(nn.Parameter(up.chunk(size, 0)[place].clone()), dim=0)
        self.down = shoal.sharded(nn.Parameter(down.chunk(size, 1)[place].clone()), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(torch.relu(Copied.apply(x, self.group) @ self.up.T) @ self.down.T, self.group)


class ByPlan(nn.Module):
    """The same as plain layers, for `parallelize_module`."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens to the mean cross entropy of the next ones."""

    def __init__(self, layer: type[nn.Module], cell: Any) -> None:
        super().__init__()
        self.embedding, self.norm, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(layer(cell) for _ in range(2))
        self.unused = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.embedding(tokens)))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def divide(model: nn.Module, cell: Any) -> None:
    """By sequence parallelism: norms compute a part of the sequence, and have a part of their gradient's sum."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, cell.mesh["tensor"], plan, src_data_rank=None)  # type: ignore[arg-type]


class Llama(nn.Module):
    """One of transformers, from a folder of weights and with its own tensor plan."""

    def __init__(self, folder: str, cell: Any) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        super().__init__()
        plan = DistributedConfig(tp_size=cell.size("tensor"))
        self.model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
        return loss


def train(result: str, by: str = "hand", **options: Any) -> None:
    """`by`: "hand", "plan", or the folder of a Llama's weights. Options: `alone`, how w0's script ends where the rest
    of its cell is gone, which w1 is in its fifth step; `unequal`, a parameter has other gradients at coordinate 1;
    `compile`, a backend, and `compiler_cache`, its folder; `export`, the file of the model at the end.
    """
    import shoal

    if "compiler_cache" in options:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = options["compiler_cache"]

    torch.set_num_threads(1)
    settled = config({**options, "shoal": {"cell": {"tensor": TENSOR}, **options.get("shoal", {})}})
    cell = shoal.cell(settled)
    torch.manual_seed(0)
    model: nn.Module
    if by in ("hand", "plan"):
        model = Model(ByHand if by == "hand" else ByPlan, cell)
        if by == "plan":
            divide(model, cell)
    else:
        model = Llama(by, cell)
    engine = shoal.initialize(
        model=model, config=settled, dataset=Samples(options.get("samples", 100)), optimizer=optimizer_of(model)
    )
    module = torch.compile(engine.module, backend=options["compile"]) if "compile" in options else engine.module
    brake = Brake(options)
    for batch in engine:
        brake.hold(engine.global_step)
        loss = module(**batch)
        if "alone" in options and _is_alone(engine, cell):
            if options["alone"] == "break":
                break
            raise {"raise": ValueError("half of the model is missing"), "exit": SystemExit(7)}[options["alone"]]
        if "unequal" in options and cell.coordinate:
            loss = loss + model.norm.weight.sum()
        engine.backward(loss)
        engine.step()
    fingerprint = engine.fingerprint()
    if "export" in options:
        engine.export(options["export"])
    brake.linger()
    found = {"fingerprint": fingerprint, "step": engine.global_step, "loss": engine.loss, "place": cell.coordinate}
    if "compile" in options:
        from torch._dynamo.utils import counters

        found["graphs"] = counters["stats"]["unique_graphs"]
    _write(result, found)


class WithoutChance(Samples):
    """Samples that draw nothing from the lane's generators."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return super().__getitem__(index)


class OfTransformers(nn.Module):
    """A causal language model of transformers: tokens to its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
        return loss


def of_transformers(result: str, folder: str, by: str, page: str, **options: Any) -> None:
    """A model with experts, from a folder of weights. `by`: "expert", as the page says; "tensor", by the plans of the
    library for layers and experts; "layers", by that for layers alone, which cuts each expert. `export`: the file of
    the model at the end.
    """
    import shoal
    from shoal.cells.marks import local_of
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    dimension = "expert" if by == "expert" else "tensor"
    settled = config({**options, "shoal": {"cell": {dimension: 2}, **options.get("shoal", {})}})
    cell = shoal.cell(settled)
    torch.manual_seed(0)
    if by == "expert":
        [code] = [block.code for block in blocks(Path(page)) if "apply_expert_parallelism" in block.code]
        known = {"AutoModelForCausalLM": AutoModelForCausalLM, "folder": folder, "cell": cell}
        exec(code, known)
        model: Any = known["model"]
    else:
        plan = DistributedConfig(tp_size=2, ep_size=2 if by == "tensor" else None)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
    module, here = OfTransformers(model), 0
    for name, parameter in module.named_parameters():
        here += local_of(parameter).numel() if ".experts." in name else 0
    engine = shoal.initialize(
        model=module, config=settled, dataset=WithoutChance(40), optimizer=torch.optim.SGD(module.parameters(), lr=0.1)
    )
    brake, losses = Brake(options), list[float]()
    for batch in engine:
        brake.hold(engine.global_step)
        engine.backward(engine.module(**batch))
        if engine.step() and engine.loss is not None:
            losses.append(engine.loss)
    fingerprint = engine.fingerprint()
    if "export" in options:
        engine.export(options["export"])
    _write(result, {"fingerprint": fingerprint, "losses": losses, "of_experts": here})


def _is_alone(engine: Any, cell: Any) -> bool:
    worker, count = os.environ["SHOAL_WORKER_ID"], torch.ones(1)
    if worker == "w1" and engine.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(count)
    return worker == "w0" and not engine.warming_up and count.item() != cell.size("tensor")


def of_the_page(result: str, page: str, definitions: str, max_steps: int = 4) -> None:
    """What the page says of a first example, with all that examples/tensor_parallel.py defines before it; then the
    layer by hand that the page shows.
    """
    example, layer, dropout = [block.code for block in blocks(Path(page)) if block.language == "python"]
    known: dict[str, Any] = {}
    exec(definitions, known)
    known["config"]["shoal"]["max_steps"] = max_steps
    exec(f"{layer}\n{example}\nhidden = torch.ones(4)\n{dropout}", known)
    divided = known["MLP"](8, known["cell"])(torch.ones(1, 8))
    _write(result, {"sum": divided.sum().item(), "step": known["engine"].global_step})


def of_example(result: str, definitions: str, by: str, **options: Any) -> None:
    """The model of an example whose definitions are given: three_dimensional.py or experts.py, by "dimensions", or
    context_parallel.py with one of its kinds of attention; "torch": with that of torch's `context_parallel`.
    """
    import shoal

    torch.set_num_threads(1)
    known: dict[str, Any] = {}
    exec(definitions, known)
    config = {**known["config"], "shoal": {**known["config"]["shoal"], "max_steps": options["max_steps"]}}
    cell = shoal.cell(config)
    if by == "dimensions":
        model = known["divided"](cell)
    else:
        torch.manual_seed(0)
        model = known["GPT"](_by_torch(cell) if by == "torch" else known[by], cell.group("context"))
    engine = shoal.initialize(model=model, config=config, dataset=known["Text"]())
    brake = Brake(options)
    for batch in engine:
        brake.hold(engine.global_step)
        engine.backward(engine.module(**batch))
        engine.step()
    _write(result, {"fingerprint": engine.fingerprint(), "loss": engine.loss})


def of_stages(result: str, definitions: str, **options: Any) -> None:
    """examples/pipeline.py, in so many steps."""
    torch.set_num_threads(1)
    known: dict[str, Any] = {"__name__": "example"}
    loop = "for batch in engine:"
    before, _, body = definitions.partition(loop)
    before = before.replace('"max_steps": 60', f'"max_steps": {options["max_steps"]}')
    known["brake"] = Brake(options)
    exec(f"{before}{loop}\n    brake.hold(engine.global_step){body[body.index(chr(10)) :]}", known)
    engine = known["engine"]
    _write(result, {"fingerprint": engine.fingerprint(), "loss": engine.loss})


def of_layers(result: str, definitions: str, **options: Any) -> None:
    """examples/deepspeed_pipeline.py, in so many steps, at whose end the job ends."""
    torch.set_num_threads(1)
    known: dict[str, Any] = {"__name__": "example", "brake": Brake(options)}
    loop = "    loss = engine.train_batch("
    script = definitions.replace("steps, length", "_, length").replace(loop, f"    brake.hold(step)\n{loop}")
    known["steps"] = options["steps"]
    exec(script, known)
    engine = known["engine"]
    engine.destroy()
    found = {"fingerprint": engine.elastic.fingerprint(), "loss": known["loss"].item(), "step": engine.global_steps}
    _write(result, found)


def _by_torch(cell: Any) -> Any:
    from torch.distributed.tensor.experimental import context_parallel

    def attention(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
        with context_parallel(cell.mesh["context"], buffers=[torch.zeros(2 * q.size(2))], buffer_seq_dims=[0]):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention
