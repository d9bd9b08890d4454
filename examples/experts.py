"""A small GPT on bytes whose experts two processes share: expert parallelism in cells of Shoal.

Each process of a cell has half of the experts and the whole of the rest, and trains batches of its own. A token goes to
its two experts by an all-to-all, within DeepSpeed's `MoE`. Run it on two cells of two processes (`shoal run --workers 4
examples/experts.py`), kill any of them, and scale it (`shoal scale JOB 2`): the fingerprint stays. docs/cells.md
explains it.
"""

import inspect

import shoal
import torch
import torch.nn as nn
import torch.nn.functional as F
from shoal.deepspeed.moe.layer import MoE

block_size, n_layer, n_head, n_embd, n_expert = 32, 2, 4, 64, 4
config = {
    "train_batch_size": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "shoal": {"lanes": 4, "max_steps": 60, "cell": {"expert": 2}},
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
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (n_head, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, places):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention()
        expert = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.moe = MoE(n_embd, expert, num_experts=n_expert, ep_size=places, k=2, capacity_factor=1.25)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        y, imbalance, _ = self.moe(self.ln_2(x))
        return x + y, imbalance


class GPT(nn.Module):
    def __init__(self, places):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(places) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        x, imbalance = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)), 0.0
        for block in self.h:
            x, more = block(x)
            imbalance = imbalance + more
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten()) + 0.01 * imbalance


def divided(cell):
    torch.manual_seed(0)  # every process makes the same values
    return GPT(cell.size("expert"))


cell = shoal.cell(config)
engine = shoal.initialize(model=divided(cell), config=config, dataset=Text())
for batch in engine:  # another batch in each process of a cell
    loss = engine.module(**batch)  # the mean over the batch here
    engine.backward(loss)
    if engine.step() and engine.global_step % 20 == 0 and cell.coordinate == 0:
        print(f"step {engine.global_step}: loss {engine.loss:.4f}")
