"""Silent corruption with real processes: what a flipped bit would have spoilt is found in time, and all go back."""

from __future__ import annotations

from pathlib import Path

from integration.cluster import Cluster, undisturbed

FLIPPED, IN_A_FRACTION, IN_AN_EXPONENT = 8, 12, 30
"""After this step; bits of a float32."""
PLAIN = {"max_steps": 20}


def job(place: Path, bit: int) -> Cluster:
    """Slow enough for the save of step 7 to be known; at that of step 14 all copies are compared again."""
    shoal = {"corruption_steps": 1000, "checkpoint": {"path": str(place), "every_steps": 7}}
    options = {**PLAIN, "worker": "w0", "step": FLIPPED, "bit": bit, "shoal": shoal}
    return Cluster(workers=2, options=options, script="integration.flipped:train", pace=0.1)


def check_went_back(cluster: Cluster) -> None:
    cluster.wait_done()
    assert cluster.messages("restoring")[0].startswith(
        "all members go back to the checkpoint of step 7: the copies of "
    )
    assert cluster.fingerprint == undisturbed(PLAIN), "other bits than the undisturbed run"


def test_a_drain_of_the_copy_beside_a_flipped_one_costs_no_bit(tmp_path: Path) -> None:
    with job(tmp_path, IN_A_FRACTION) as cluster:
        cluster.wait_step(FLIPPED)
        cluster.drain("w1")
        cluster.wait_exit("w1")
        check_went_back(cluster)


def test_a_flip_that_makes_the_loss_infinite_costs_no_bit(tmp_path: Path) -> None:
    with job(tmp_path, IN_AN_EXPONENT) as cluster:
        cluster.wait_step(FLIPPED)
        check_went_back(cluster)
