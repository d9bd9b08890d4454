"""A small GPT on bytes in two stages of a pipeline: torch's 1F1B schedule in cells of Shoal.

Each process of a cell has a stage of the model, and a lane goes through both in micro-batches. Run it on two cells of
two processes (`shoal run --workers 4 examples/pipeline.py`), kill any of them, and scale it (`shoal scale JOB 2`): the
fingerprint stays. docs/cells.md explains it.
"""

import inspect

import shoal
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

block_size, n_layer, n_head, n_embd = 32, 4, 4, 64
config = {
    "train_micro_batch_size_per_gpu": 2,  # four of them are a lane, which a schedule trains at once
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "shoal": {"lanes": 4, "micro_batches_per_lane": 4, "max_steps": 60, "cell": {"pipeline": 2}},
}


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.data = torch.tensor(list(inspect.getsource(inspect).encode()[:60000]))

    def __len__(self):
        return len(self.data) - block_size

    def __getitem__(self, i):
        return {"idx": self.data[i : i + block_size], "targets": self.data[i + 1 : i + 1 + block_size]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (n_head, -1)).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)

    def forward(self, idx):
        return self.wte(idx) + self.wpe.weight[: idx.size(1)]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


cell = shoal.cell(config)


def build(number):  # of this process, and for the shapes alone of the others
    count = cell.size("pipeline")
    layers = [Block() for _ in range(n_layer // count)]
    if number == 0:
        layers.insert(0, Embedding())
    if number == count - 1:
        layers += [nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)]
    return nn.Sequential(*layers)


torch.manual_seed(0)
model = cell.stages(build)
engine = shoal.initialize(model=model, config=config, dataset=Text())
number, place = cell.index("pipeline"), cell.group("pipeline")
stage = PipelineStage(model[str(number)], number, cell.size("pipeline"), torch.device("cpu"), group=place)
schedule = Schedule1F1B(stage, engine.micro_batches, loss_fn=engine.loss_fn(loss_of), scale_grads=False)

for batch in engine:  # a lane: all its micro-batches, the same in all processes of a cell
    inputs = (batch["idx"],) if cell.is_first_stage else ()
    target = batch["targets"] if cell.is_last_stage else None
    engine.run(schedule.step, *inputs, target=target)
    if engine.step() and engine.global_step % 20 == 0 and cell.coordinate == 0:
        print(f"step {engine.global_step}: loss {engine.loss:.4f}")
