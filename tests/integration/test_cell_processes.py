"""Processes of a cell, each with torch's own default group, meshes and DTensors over it (cell_member.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from integration.cluster import ended, fork, until
from shoal.group.rendezvous import RendezvousServer


def results(script: str, size: int, folder: Path) -> list[Any]:
    """What each member's script returns, by coordinate."""
    servers = [RendezvousServer("127.0.0.1") for _ in range(size)]
    try:
        addresses = [server.address for server in servers]
        files = [folder / f"{script}{coordinate}.json" for coordinate in range(size)]
        pids = [
            fork(
                "integration.cell_member:member",
                {"script": script, "coordinate": coordinate, "addresses": addresses, "result": str(file)},
                {},
                folder / f"{script}{coordinate}.log",
            )
            for coordinate, file in enumerate(files)
        ]
        until("all members to end", lambda: set(pids) <= set(ended()))
        words = [file.with_suffix(".log").read_text() for file in files]
        assert [ended()[pid] for pid in pids] == [0] * size, "\n".join(words)
        return [json.loads(file.read_text()) for file in files]
    finally:
        for server in servers:
            server.close()


def test_the_cell_is_the_default_group_of_torch_and_has_a_mesh_of_all_its_dimensions(tmp_path: Path) -> None:
    for coordinate, found in enumerate(results("names", 2, tmp_path)):
        assert (found["rank"], found["size"], found["environment"]) == (coordinate, 2, [str(coordinate)] * 2 + ["2"])
        assert found["place"] == [coordinate, coordinate, 2, 1] and found["stages"] == [True, True]
        assert found["group"] == [0, 1]
        assert found["mesh"] == [["pipeline", "expert", "context", "tensor"], [1, 1, 1, 2]]
        assert "no partner while a model is built" in found["refused"]
        assert "torch.distributed was initialized by the script" in found["again"]
        assert found["objects"] == [{"from": 0}, {"from": 1}] and found["sum"] == 3


def test_a_compiled_model_of_dtensors_keeps_its_one_graph_through_worlds_and_lanes_that_are_void(
    tmp_path: Path,
) -> None:
    for found in results("compiled", 2, tmp_path):
        assert found["graphs"] == 1
        assert max(found["differences"]) < 1e-6
        assert found["follow"], "parts are of the memory that they were given"


def test_random_numbers_for_shards_differ_by_coordinate_and_are_repeated_by_activation_checkpointing(
    tmp_path: Path,
) -> None:
    first, second = results("masks", 2, tmp_path)
    for found in (first, second):
        assert found["plain"] == found["reentrant"] == found["not reentrant"]
    own, common = ([found["plain"][1][place::2] for found in (first, second)] for place in (0, 1))
    assert own[0] != own[1] and common[0] == common[1]
    assert first["plain"][2] == second["plain"][2], "the common stream goes on alike"


def test_gradients_of_divided_layers_are_parts_of_the_whole_models(tmp_path: Path) -> None:
    layers = {"down.weight": 1, "up.bias": 0, "up.weight": 0}
    for found in results("gradients", 2, tmp_path):
        assert found["tensor"].pop("apart") < 1e-5 and found["sequence"].pop("apart") < 1e-5
        assert found["tensor"] == {"partial": [], "own": layers}
        assert found["sequence"] == {"partial": ["norm.bias", "norm.weight"], "own": layers}


def test_a_gradient_becomes_that_of_its_parameters_part_whatever_the_placements_of_both(tmp_path: Path) -> None:
    for found in results("placed", 2, tmp_path):
        for name, words in (
            (
                "uneven",
                'parameter "weight" of shape (5,) is a DTensor that is cut into 2 parts along dimension 0, wh',
            ),
            (
                "uneven pieces",
                "into 2 parts along dimension 0, 2 pieces a place, which are not equal; not supported",
            ),
            ("sum", 'parameter "weight" is a DTensor with placement P(sum); expected Shard'),
            ("mean", "placement P(avg); expected Shard"),
        ):
            (sentence,) = found.pop(name)
            assert words in sentence, sentence
        assert len(found) == 21 and all(is_right for is_right, _ in found.values()), found
        without_sum = sorted(pair for pair, (_, is_partial) in found.items() if not is_partial)
        assert without_sum == [
            "pieces from pieces", "pieces from replicate", "replicate from replicate", "shard 0 from replicate",
            "shard 0 from shard 0", "shard 1 from replicate", "shard 1 from shard 1",
        ]  # fmt: skip
