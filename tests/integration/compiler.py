"""Imported by a warm process whose forks compile: torch's compiler, which takes two seconds to import, is in each.

It imports its parts when it first compiles, so it compiles something, and forgets that: something without a gradient,
for tracing one starts threads of autograd's where torch is built with CUDA. What a gradient needs is imported by name.
Where tqdm is installed, which the data sets of tests bring, torch shows a bar with it, and its first bar would start a
thread.
"""

from __future__ import annotations

import torch
import torch._inductor.fx_passes.joint_graph
import tqdm

tqdm.tqdm.monitor_interval = 0

torch.compile(lambda value: value + 1, backend="aot_eager")(torch.ones(1))
torch.compiler.reset()
torch._dynamo.utils.counters.clear()
