"""A small GPT on bytes in three dimensions: layers over two processes, sequences over two, and data over cells.

A cell is four processes of plain PyTorch: `parallelize_module` divides each layer over `tensor`, an all-to-all
(`ulysses`) trades tokens for heads over `context`, and Shoal trains the lanes by as many cells as there are. Run it on
two cells (`shoal run --workers 8 examples/three_dimensional.py`), kill any process, and scale it (`shoal scale JOB
--cells 1`): the fingerprint stays. docs/cells.md explains it.
"""

import inspect

import shoal
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

block_size, n_layer, n_head, n_embd = 32, 2, 4, 64
config = {
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "shoal": {"lanes": 4, "max_steps": 60, "cell": {"tensor": 2, "context": 2}},
}


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.data = torch.tensor(list(inspect.getsource(inspect).encode()[:60000]))

    def __len__(self):
        return len(self.data) - block_size

    def __getitem__(self, i):
        return {"idx": self.data[i : i + block_size], "targets": self.data[i + 1 : i + 1 + block_size]}


class AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to process i; gradients take the same way back."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        found = parts.new_empty(parts.shape)
        dist.all_to_all_single(found, parts.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.group), None


def ulysses(q, k, v, group):  # each (batch, heads here, tokens here, width)
    def exchanged(x, cut, join):
        parts = torch.stack(x.chunk(group.size(), dim=cut))
        return torch.cat(AllToAll.apply(parts, group).unbind(), dim=join)

    q, k, v = (exchanged(x, cut=1, join=2) for x in (q, k, v))  # all tokens, some of the heads
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return exchanged(y, cut=2, join=1)


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(n_embd, n_embd) for _ in range(3))
        self.proj = nn.Linear(n_embd, n_embd)
        self.group = group

    def forward(self, x):  # a place of `tensor` has some of the heads
        q, k, v = (f(x).unflatten(-1, (-1, n_embd // n_head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(ulysses(q, k, v, self.group).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention(group)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(group) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.place, self.size = group.rank(), group.size()

    def forward(self, idx, targets):
        at = torch.arange(idx.size(1), device=idx.device)
        idx, targets, at = (x.chunk(self.size, dim=-1)[self.place] for x in (idx, targets, at))  # the tokens here
        x = self.wte(idx) + self.wpe(at)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


PLAN = {
    "attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(),
    "attn.proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


def divided(cell):
    torch.manual_seed(0)  # every process makes the whole model, and keeps its part
    model = GPT(cell.group("context"))
    for block in model.h:
        parallelize_module(block, cell.mesh["tensor"], PLAN, src_data_rank=None)
    return model


cell = shoal.cell(config)
engine = shoal.initialize(model=divided(cell), config=config, dataset=Text())
for batch in engine:  # the same batch in all processes of a cell
    loss = engine.module(**batch)  # the mean over the tokens here
    engine.backward(loss)
    if engine.step() and engine.global_step % 20 == 0 and cell.coordinate == 0:
        print(f"step {engine.global_step}: loss {engine.loss:.4f}")
