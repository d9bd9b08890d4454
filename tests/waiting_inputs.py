"""Notes the inputs of checkpointed modules that wait in host memory."""

from __future__ import annotations

import pytest
import torch
from shoal.training import activation_checkpointing


def note_waiting_inputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each tensor that is copied there from now on."""
    waited: list[int] = []

    class Counting(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: waited.append(tensor.numel()) or pack(tensor)

    monkeypatch.setattr(activation_checkpointing, "save_on_cpu", Counting)
    return waited
