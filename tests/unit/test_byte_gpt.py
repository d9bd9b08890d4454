"""The demo's model and data: about a million parameters, one tied weight, windows that cover the text."""

from __future__ import annotations

import math

import torch
from shoal.demo.byte_gpt import CHANNELS, CONTEXT, ByteGPT, ByteWindows, library_text, optimizer_of


def test_the_model_has_about_a_million_parameters_and_one_tied_weight() -> None:
    model = ByteGPT()
    assert model.head.weight is model.bytes.weight
    assert 1_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_100_000


def test_the_windows_follow_each_other_and_aim_one_byte_further() -> None:
    text = bytes(range(256)) * 3
    windows = ByteWindows(text)
    assert len(windows) == (len(text) - 1) // CONTEXT
    joined = torch.cat([windows[index]["inputs"] for index in range(len(windows))])
    assert bytes(joined.tolist()) == text[: len(joined)]
    assert torch.equal(windows[2]["targets"][:-1], windows[2]["inputs"][1:])
    assert windows[2]["targets"][-1] == text[3 * CONTEXT]


def test_the_library_gives_the_same_megabytes_each_time() -> None:
    text = library_text()
    assert text == library_text()
    assert 2_000_000 < len(text) <= 4_000_000
    assert b"import " in text[:2000]


def test_it_starts_from_an_even_guess() -> None:
    torch.manual_seed(0)
    model = ByteGPT().eval()
    batch = torch.randint(256, (2, CONTEXT))
    with torch.no_grad():
        assert abs(model(batch, batch.roll(-1, 1)).item() - math.log(256)) < 0.3


def test_a_byte_sees_nothing_of_what_follows() -> None:
    block = ByteGPT().eval().blocks[0]
    x = torch.randn(1, CONTEXT, CHANNELS)
    other = x.clone()
    other[:, 64:] = 0.0
    with torch.no_grad():
        here, there = block(x), block(other)
    assert torch.equal(here[:, :64], there[:, :64])
    assert not torch.equal(here[:, 64:], there[:, 64:])


def test_matrices_lose_weight_and_the_rest_does_not() -> None:
    first, second = optimizer_of(ByteGPT()).param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert all(one.dim() >= 2 for one in first["params"]) and all(one.dim() < 2 for one in second["params"])
