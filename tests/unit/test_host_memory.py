"""Memory in huge pages is memory like any other."""

from __future__ import annotations

import mmap

import pytest
import torch
from shoal.process.host_memory import HUGE_PAGE_BYTES, host_memory


@pytest.mark.parametrize("elements", [0, 1, HUGE_PAGE_BYTES // 4, HUGE_PAGE_BYTES + 17])
def test_it_has_the_size_that_was_asked_for_and_keeps_what_is_put_in(elements: int) -> None:
    values = torch.arange(elements, dtype=torch.float32)
    memory = host_memory(elements, torch.float32)
    assert not memory.any()
    memory.copy_(values)
    assert memory.untyped_storage().nbytes() == 4 * elements
    assert torch.equal(memory, values)


def test_large_memory_begins_at_a_huge_page() -> None:
    assert host_memory(HUGE_PAGE_BYTES, torch.uint8).data_ptr() % HUGE_PAGE_BYTES == 0


def test_a_part_of_it_outlives_the_rest() -> None:
    part = host_memory(2 * HUGE_PAGE_BYTES, torch.uint8).fill_(7)[HUGE_PAGE_BYTES:]
    assert int(part.sum(dtype=torch.int64)) == 7 * HUGE_PAGE_BYTES


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no huge pages here")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert int(host_memory(HUGE_PAGE_BYTES, torch.uint8).fill_(1).sum(dtype=torch.int64)) == HUGE_PAGE_BYTES
