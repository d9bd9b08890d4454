"""What `shoal doctor` says of devices for cells, by the matrix that `nvidia-smi topo -m` prints."""

from __future__ import annotations

import pytest
from shoal.doctor.training_checks import fitting, links_of
from shoal_protos.finding import Verdict
from shoal_protos.shape import ONE, Shape

SWITCHED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tPXB\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tNODE\t0-47\t0\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tNODE\t0-47\t0\t\tN/A
NIC0\tPXB\tPXB\tNODE\tNODE\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
BRIDGED = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tPHB\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0
GPU2\tPHB\tSYS\t X \tNV4\t16-31\t1
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1
"""
TIGHT = Shape(tensor=2, tight=("tensor",))


def test_the_matrix_says_how_each_pair_of_devices_is_connected() -> None:
    assert links_of(SWITCHED) == dict.fromkeys(((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)), "NV18")
    assert links_of(BRIDGED)[0, 2] == "PHB"
    assert links_of("") == links_of("No devices were found") == {}


@pytest.mark.parametrize(
    ("shape", "devices", "topology", "verdict", "words"),
    [
        (ONE, 8, "", Verdict.OK, "a cell is one process"),
        (TIGHT, 0, "", Verdict.OK, "no CUDA device"),
        (TIGHT, 4, SWITCHED, Verdict.OK, "4 CUDA devices here, all connected by NVLink"),
        (TIGHT, 4, "", Verdict.OK, "not known"),
        (TIGHT, 4, BRIDGED, Verdict.WARNING, "GPU0 and GPU2 are connected by PHB, not by NVLink"),
        (TIGHT, 2, BRIDGED, Verdict.OK, "all connected by NVLink"),
        (Shape(tensor=3, tight=("tensor",)), 4, SWITCHED, Verdict.WARNING, "1 of the devices are in no cell"),
        (Shape(tensor=2), 4, SWITCHED, Verdict.WARNING, "may be on different hosts"),
    ],
)
def test_devices_that_make_no_whole_cells_or_are_not_connected_by_nvlink_are_named(
    shape: Shape, devices: int, topology: str, verdict: Verdict, words: str
) -> None:
    finding = fitting(shape, devices, topology)
    assert finding.verdict is verdict and words in f"{finding.found} {finding.todo}"
