"""A small GPT on bytes whose sequences two processes share: context parallelism in cells of Shoal.

Each process of a cell has half of the tokens and the whole model. Only attention needs the others' tokens: `ulysses`
trades tokens for heads by an all-to-all, `ring` sends keys and values from process to process. Run it on two cells of
two processes (`shoal run --workers 4 examples/context_parallel.py`), kill any of them, and scale it
(`shoal scale JOB 2`): the fingerprint stays. docs/cells.md explains it.
"""

import inspect

import shoal
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

block_size, n_layer, n_head, n_embd = 32, 2, 4, 64
config = {
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "shoal": {"lanes": 4, "max_steps": 60, "cell": {"context": 2}},
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


def ulysses(q, k, v, group):  # each (batch, heads, tokens here, width)
    def exchanged(x, cut, join):
        parts = torch.stack(x.chunk(group.size(), dim=cut))
        return torch.cat(AllToAll.apply(parts, group).unbind(), dim=join)

    q, k, v = (exchanged(x, cut=1, join=2) for x in (q, k, v))  # all tokens, some of the heads
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return exchanged(y, cut=2, join=1)


class Passed(torch.autograd.Function):
    """What the process before this one has; gradients take the way back."""

    @staticmethod
    def forward(ctx, mine, group, by):
        ctx.group, ctx.by = group, by
        place, size, found = group.rank(), group.size(), mine.new_empty(mine.shape)
        coming = dist.irecv(found, group=group, group_src=(place - by) % size)
        going = dist.isend(mine.contiguous(), group=group, group_dst=(place + by) % size)
        coming.wait(), going.wait()
        return found

    @staticmethod
    def backward(ctx, gradient):
        return Passed.apply(gradient, ctx.group, -ctx.by), None, None


def ring(q, k, v, group):  # each (batch, heads, tokens here, width)
    place, size, tokens = group.rank(), group.size(), torch.arange(q.size(2))
    top, total, y = torch.tensor(-torch.inf), 0.0, 0.0  # of the softmax: the largest score, the sum, and the mean
    for turn in range(size):
        keys, queries = (place - turn) % size * len(tokens) + tokens, place * len(tokens) + tokens
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
        before, top = top, torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        weights, shrunk = (scores - top).exp(), (before - top).exp()
        total, y = total * shrunk + weights.sum(-1, keepdim=True), y * shrunk + weights @ v
        if turn < size - 1:
            k, v = Passed.apply(torch.stack((k, v)), group, 1)
    return y / total


class Attention(nn.Module):
    def __init__(self, by, group):
        super().__init__()
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.by, self.group = by, group

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (n_head, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(self.by(q, k, v, self.group).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, by, group):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention(by, group)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, by, group):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(by, group) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.place, self.size = group.rank(), group.size()

    def forward(self, idx, targets):
        at = torch.arange(idx.size(1), device=idx.device)
        idx, targets, at = (x.chunk(self.size, dim=-1)[self.place] for x in (idx, targets, at))  # the tokens here
        x = self.wte(idx) + self.wpe(at)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


cell = shoal.cell(config)
torch.manual_seed(0)  # every process makes the same model
model = GPT(ulysses, cell.group("context"))  # or ring

engine = shoal.initialize(model=model, config=config, dataset=Text())
for batch in engine:  # the same batch in all processes of a cell
    loss = engine.module(**batch)  # the mean over the tokens here
    engine.backward(loss)
    if engine.step() and engine.global_step % 20 == 0 and cell.coordinate == 0:
        print(f"step {engine.global_step}: loss {engine.loss:.4f}")
