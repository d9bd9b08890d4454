"""Striped block numbers and units: how parameters come into blocks, and what a run of block numbers is.

The dumb twin of the numbering is a plain sort; the planner's plans are those of a real start and of what follows it.
"""

from __future__ import annotations

import string
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from planning import World
from rule import Edit, holds, rule
from shoal.core.cell_part import DIVISIONS, CellPart, Division
from shoal.core.laying_out import lay_out
from shoal.core.layout import Layout, Stretch, Trainable, overlaps
from shoal.core.units import unit_numbers
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_start
from shoal_protos.errors import UserError
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import Runs, every, union
from torch import nn

BLOCK = 4_096


def layout_of(*blocks: int) -> Layout:
    """A layout whose buckets have so many blocks: a unit each."""
    return lay_out([Trainable(f"p{n}", (k, BLOCK), torch.float32, 0, n) for n, k in enumerate(reversed(blocks))])


layouts = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(lambda blocks: layout_of(*blocks))


@rule(
    "Blocks are numbered across the buckets: by their relative place in their bucket, then by bucket; so whoever "
    "owns long runs has its share of every bucket",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.core.layout",
        "(DIVISIONS.index(bucket.division), (position + 0.5) / bucket.blocks, bucket.index, position)",
        "(DIVISIONS.index(bucket.division), 0.0, bucket.index, position)",
    ),
)
@given(layouts)
def test_blocks_are_numbered_by_their_relative_place_in_their_bucket_and_then_by_bucket(layout: Layout) -> None:
    places = [(bucket.index, position) for bucket in layout.buckets for position in range(bucket.blocks)]
    places.sort(key=lambda at: (Fraction(2 * at[1] + 1, 2 * layout.buckets[at[0]].blocks), at[0]))
    assert layout.places == places
    for number, (bucket, position) in enumerate(places):
        assert layout.numbers[bucket][position] == number


@given(layouts, st.data())
def test_a_run_of_block_numbers_is_one_slice_of_every_bucket(layout: Layout, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, layout.blocks)] * 2)))
    stretches = layout.stretches(Runs(((start, stop),)))
    assert len({stretch.bucket for stretch in stretches}) == len(stretches)
    assert sum(stretch.blocks for stretch in stretches) == stop - start


@given(layouts, st.sets(st.integers(0, 300)))
def test_stretches_are_the_blocks_of_a_set_and_no_two_of_them_touch(layout: Layout, chosen: set[int]) -> None:
    runs = Runs.of(block for block in chosen if block < layout.blocks)
    stretches = layout.stretches(runs)
    assert {block for one in stretches for block in layout.numbers_of(one)} == set(runs)
    assert layout.runs(stretches) == runs
    assert stretches == sorted(stretches)
    ends = {(one.bucket, one.stop) for one in stretches}
    assert not any((one.bucket, one.start) in ends for one in stretches)


@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.integers(0, 30))
def test_overlaps_are_what_two_sets_of_blocks_share(chosen: set[int], start: int, stop: int) -> None:
    layout = layout_of(11, 20)
    held = Stretch(1, min(start, stop, 19), min(max(start, stop), 19) + 1)
    stretches = layout.stretches(Runs.of(chosen & set(range(layout.blocks))))
    shared = overlaps(stretches, held)
    assert layout.runs(shared) == layout.runs(stretches) & layout.runs([held])
    assert all(one in stretches or one.bucket == held.bucket for one in shared)


# ---- how evenly plans spread the traffic of a bucket


def gpt(width: int, layers: int, vocabulary: int, decayed_apart: bool = False) -> Layout:
    """Unit by unit, as `unit_numbers` has them: embeddings, layers, the last norm."""
    shapes = [("wte", (vocabulary, width), 0), ("wpe", (1024, width), 0)]
    for n in range(layers):
        for name, rows, columns in (("qkv", 3, 1), ("o", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes += [
                (f"{n}.{name}.w", (rows * width, columns * width), n + 1),
                (f"{n}.{name}.b", (rows * width,), n + 1),
            ]
        shapes += [(f"{n}.{norm}.{part}", (width,), n + 1) for norm in ("ln1", "ln2") for part in ("w", "b")]
    shapes += [(f"ln.{part}", (width,), layers + 1) for part in ("w", "b")]
    group = [int(decayed_apart and len(shape) == 1) for _, shape, _ in shapes]
    return lay_out([Trainable(*one[:2], torch.float32, g, one[2]) for one, g in zip(shapes, group, strict=True)])


MODELS = {
    "10M": (320, 8, 256), "124M": (768, 12, 50257), "1.3B": (2048, 24, 50257), "7B": (4096, 32, 32000),
}  # fmt: skip


def start_of(layout: Layout, workers: int) -> Plan:
    candidates = [Candidate(Member(f"w{n}", f"i{n}", f"10.0.0.{n}:1"), f"host{n}", n) for n in range(workers)]
    return plan_start(
        PlanRequest(
            Terms(workers, layout.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=64), 1, Reason.START
        ),
        candidates,
    )


@holds("Blocks are numbered across the buckets")
@pytest.mark.parametrize("workers", [3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("model", MODELS)
def test_of_every_bucket_an_owner_has_one_slice_and_its_share_to_within_a_block(model: str, workers: int) -> None:
    layout = gpt(*MODELS[model])
    for share in start_of(layout, workers).shares:
        stretches = layout.stretches(share.owned)
        assert len({stretch.bucket for stretch in stretches}) == len(stretches)
        for stretch in stretches:
            blocks = layout.buckets[stretch.bucket].blocks
            assert abs(stretch.blocks - blocks / workers) <= 1 + blocks * (len(layout.buckets) + 1) / layout.blocks


@given(layouts, st.data())
def test_a_run_has_its_share_of_every_bucket_to_within_a_block_and_a_tie(layout: Layout, data: st.DataObject) -> None:
    """A tie: as many blocks as there are buckets may lie at one relative place, and a run may end among them."""
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, layout.blocks)] * 2)))
    sizes = {stretch.bucket: stretch.blocks for stretch in layout.stretches(Runs(((start, stop),)))}
    for bucket in layout.buckets:
        share, tie = (bucket.blocks * n / layout.blocks for n in (stop - start, len(layout.buckets)))
        assert abs(sizes.get(bucket.index, 0) - share) <= 1 + tie


def test_after_losses_and_joins_owners_still_have_their_share_of_every_bucket() -> None:
    """To within a block, and a tie, for each run that they have got in the meantime."""
    layout = gpt(*MODELS["10M"])
    world = World(
        Terms(8, layout.blocks, mirrors=1, mirror_partners=4, fill_blocks_per_step=4_096), string.ascii_lowercase[:8]
    )
    for act in (lambda: world.kill("c"), lambda: world.join("x"), lambda: world.kill("a"), lambda: world.join("y")):
        act()
        world.settle()
    for share in world.plan.shares:
        sizes = [0] * len(layout.buckets)
        for stretch in layout.stretches(share.owned):
            sizes[stretch.bucket] += stretch.blocks
        for bucket in layout.buckets:
            slack = 1 + bucket.blocks * (len(layout.buckets) + 1) / layout.blocks
            assert abs(sizes[bucket.index] - bucket.blocks / 8) <= slack * len(share.owned.spans)


# ---- units


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.tokens, self.places = nn.Embedding(10, 4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.tokens.weight


def units_of(model: nn.Module, classes: tuple[str, ...] = ()) -> list[list[str]]:
    """Names of the parameters by unit."""
    numbers = unit_numbers(model, classes)
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(numbers[id(parameter)], []).append(name)
    return list(found.values())


def starts(units: list[list[str]]) -> list[str]:
    return [names[0] for names in units]


def test_the_children_of_a_list_are_units_and_what_lies_between_them_are_others() -> None:
    units = units_of(Gpt())
    assert starts(units) == ["scale", *(f"layers.{n}.attention.heads.0.weight" for n in range(3)), "norm.weight"]
    assert units[0] == ["scale", "tokens.weight", "places.weight"]
    assert units[-1] == ["norm.weight", "norm.bias"], "a tied weight belongs to the first unit that registers it"


def test_a_list_of_one_is_looked_into() -> None:
    model = Gpt()
    model.layers = model.layers[:1]
    heads = [f"layers.0.attention.heads.{n}.weight" for n in range(2)]
    assert starts(units_of(model))[:3] == ["scale", *heads]


def test_named_classes_are_units_in_place_of_lists() -> None:
    assert starts(units_of(Gpt(), ("Attention", "Embedding"))) == [
        "scale", "tokens.weight", "places.weight", "layers.0.attention.heads.0.weight", "layers.0.mlp.0.weight",
        "layers.1.attention.heads.0.weight", "layers.1.mlp.0.weight", "layers.2.attention.heads.0.weight",
        "layers.2.mlp.0.weight",
    ]  # fmt: skip


def test_a_models_own_list_of_classes_counts_where_the_config_names_none() -> None:
    model = Gpt()
    model._no_split_modules = ["Attention", "Unknown"]
    assert units_of(model) == units_of(model, ("Attention",))
    assert units_of(model, ("Layer",)) == units_of(Gpt())


def test_a_class_that_no_module_has_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r'`shoal.units` names "Block", and no module of the model is of that class'):
        unit_numbers(Gpt(), ("Block",))


def test_a_compiled_model_has_the_units_of_the_plain_one() -> None:
    plain = units_of(Gpt())
    compiled = units_of(torch.compile(Gpt(), backend="eager"))
    assert [[name.removeprefix("_orig_mod.") for name in names] for names in compiled] == plain


@rule(
    "A bucket ends where a unit ends, in every stage; the layout's version and its buckets are in the fingerprint",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.core.laying_out",
            "parameter.group, parameter.dtype, parameter.unit)",
            "parameter.group, parameter.dtype, 0)",
        ),
        Edit("shoal.core.layout", 'lines = [f"layout {VERSION}", f"block_elements', 'lines = [f"block_elements'),
    ],
)
@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=12), st.data())
@settings(max_examples=examples(50))
def test_a_bucket_ends_where_a_unit_ends(sizes: list[int], data: st.DataObject) -> None:
    units = sorted(data.draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes))))
    layout = lay_out([Trainable(f"p{n}", (k,), torch.float32, n % 2, units[n]) for n, k in enumerate(sizes)], 8_192)
    for bucket in layout.buckets:
        assert len({slot.parameter.unit for slot in bucket.slots}) == 1


@holds("A bucket ends where a unit ends")
def test_the_layouts_version_and_its_units_are_in_its_digest() -> None:
    one, other = layout_of(1, 1), lay_out([Trainable(f"p{n}", (1, BLOCK), torch.float32, 0) for n in range(2)])
    assert one.text().startswith("layout 2\n")
    assert one.digest() != other.digest()


def test_every_block_of_a_bucket_is_its_whole_stretch() -> None:
    layout = layout_of(3, 5)
    assert layout.runs(layout.whole(bucket) for bucket in layout.buckets) == every(8)
    assert layout.elements(Stretch(1, 2, 4)) == (2 * BLOCK, 4 * BLOCK)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.lists(st.sampled_from(DIVISIONS), min_size=1))
def test_every_block_of_cells_has_one_home_where_its_parameters_are_at_all_that_have_it(
    experts: int, contexts: int, tensor: int, divisions: list[Division]
) -> None:
    shapes = [Trainable(f"p{n}", (BLOCK,), torch.float32, 0, division=one) for n, one in enumerate(divisions)]
    coordinates = range(experts * contexts * tensor)
    layout = lay_out(shapes, part=CellPart(len(coordinates), contexts=contexts, experts=experts))
    homes = [layout.home_of(one) for one in coordinates]
    assert sum(map(len, homes)) == layout.blocks and union(homes) == every(layout.blocks)
    for part in (layout.at(one).part for one in coordinates):
        one = part.coordinate
        assert homes[one] <= layout.model_at(one)
        for division in DIVISIONS:
            holders = part.holders(division)
            assert {layout.at(other).part.piece(division) for other in holders} == {part.piece(division)}
            assert len(holders) * part.pieces(division) == len(coordinates)
            assert part.share(division) == (holders.index(one), len(holders))
            contributors = part.contributors_to(division)
            assert one in contributors and set(contributors) <= set(holders)
            assert len(contributors) == contexts * (1 if division.by_expert else experts)


def test_blocks_of_experts_come_first_and_are_those_of_their_place_alone() -> None:
    one_of_each = [Trainable(f"p{n}", (BLOCK,), torch.float32, 0, division=one) for n, one in enumerate(DIVISIONS)]
    layout = lay_out(one_of_each, part=CellPart(4, experts=2))
    assert [list(layout.model_at(one)) for one in range(4)] == [[0, 4, 6, 8], [1, 4, 7, 8], [2, 5, 6, 8], [3, 5, 7, 8]]
