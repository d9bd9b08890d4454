"""Parts of a parameter in one division of it, from its parts in another: as if the whole were made and cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal.core.cuts import Cut, Divided
from torch import Tensor


def parts_of(whole: Tensor, cut: Cut, places: int) -> list[Tensor]:
    """The plain way: of each piece every place has one part."""
    pieces = [piece.chunk(places, cut.dim) for piece in whole.chunk(cut.stride, cut.dim)]
    return [torch.cat([piece[place] for piece in pieces], cut.dim).contiguous() for place in range(places)]


@given(st.data())
def test_a_part_is_made_of_parts_of_another_division(data: st.DataObject) -> None:
    places, sources = (data.draw(st.sampled_from((1, 2, 4))) for _ in range(2))
    dims = data.draw(st.integers(1, 3))
    dim, stride = data.draw(st.integers(0, dims - 1)), data.draw(st.sampled_from((1, 3)))
    shape = [data.draw(st.integers(1, 4)) for _ in range(dims)]
    shape[dim] *= 4 * stride
    whole, cut = torch.arange(float(torch.Size(shape).numel())).view(shape), Cut(dim, stride)
    there, place = parts_of(whole, cut, sources), data.draw(st.integers(0, places - 1))
    wanted = parts_of(whole, cut, places)[place].reshape(-1)
    assert cut.divides(tuple(shape), places)
    first = data.draw(st.integers(0, len(wanted) - 1))
    last = data.draw(st.integers(first + 1, len(wanted)))
    found, most = torch.empty(last - first), data.draw(st.integers(1, 40))

    def read(source: int, start: int, stop: int) -> Tensor:  # (stop - start,)
        part = there[source].reshape(-1)
        assert 0 <= start < stop <= len(part)
        assert stop - start <= max(most, len(found))
        return part[start:stop]

    cut.taken(read, tuple(shape), Divided(place, places, sources), first, found, most)
    assert torch.equal(found, wanted[first:last])
    joined = torch.empty_like(whole)
    cut.join(there, joined)
    assert torch.equal(joined, whole)


def test_a_dimension_divides_where_each_piece_of_it_does() -> None:
    assert Cut(0, 3).divides((12, 5), 4)
    assert not Cut(0, 3).divides((8, 5), 4)
    assert Cut(0, 3).divides((5, 5), 1), "a whole is no part"
    assert not Cut(2).divides((8, 5), 2)
