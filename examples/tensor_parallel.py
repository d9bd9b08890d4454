"""A small GPT on bytes whose layers two processes share: plain PyTorch's tensor parallelism, in cells of Shoal.

Run it on two cells of two processes (`shoal run --workers 4 examples/tensor_parallel.py`), kill any of them, and scale
it (`shoal scale JOB 2`): the fingerprint stays. docs/cells.md explains it.
"""

import inspect

import shoal
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

block_size, n_layer, n_head, n_embd = 32, 2, 4, 64
config = {
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "shoal": {"lanes": 4, "max_steps": 60, "cell": {"tensor": 2}},
}


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.data = torch.tensor(list(inspect.getsource(inspect).encode()[:60000]))

    def __len__(self):
        return len(self.data) - block_size

    def __getitem__(self, i):
        return {"idx": self.data[i : i + block_size], "targets": self.data[i + 1 : i + 1 + block_size]}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(n_embd, n_embd) for _ in range(3))
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, _ = x.shape  # this process has some of the heads
        q, k, v = (layer(x).view(B, T, -1, n_embd // n_head).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention()
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


PLAN = {
    "attn.q": ColwiseParallel(), "attn.k": ColwiseParallel(), "attn.v": ColwiseParallel(),
    "attn.proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip

cell = shoal.cell(config)
torch.manual_seed(0)  # every process makes the whole model, and keeps its part
model = GPT()
for block in model.h:
    parallelize_module(block, cell.mesh["tensor"], PLAN, src_data_rank=None)

engine = shoal.initialize(model=model, config=config, dataset=Text())
for batch in engine:
    loss = engine.module(**batch)
    engine.backward(loss)
    if engine.step() and engine.global_step % 20 == 0 and cell.coordinate == 0:
        print(f"step {engine.global_step}: loss {engine.loss:.4f}")
