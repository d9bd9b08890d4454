"""How much faster data workers make a job of pictures: examples/image_augmentation.py with two of them and without.

    python benchmarks/data_workers.py [ROUNDS]

Alternates the two, each in a process of its own, and prints the ratio of the medians. Two free cores are needed. Exit
status 1 where the two end with other bits.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "image_augmentation.py"
ENDING = re.compile(r"([\d.]+) s with (\d) data workers, fingerprint (\w+)")


def seconds(workers: int, fingerprints: set[str]) -> float:
    """Of the loop."""
    env = {**os.environ, "DATA_WORKERS": str(workers), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, stdout=subprocess.PIPE, text=True, check=True)
    found = ENDING.search(done.stdout)
    assert found is not None, done.stdout
    fingerprints.add(found[3])
    return float(found[1])


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    fingerprints: set[str] = set()
    without, with_two = [], []
    for _ in range(rounds):
        without.append(seconds(0, fingerprints))
        with_two.append(seconds(2, fingerprints))
        print(f"without {without[-1]:.2f} s, with two data workers {with_two[-1]:.2f} s", flush=True)
    ratio = statistics.median(without) / statistics.median(with_two)
    print(f"{ratio:.2f} times as fast; fingerprints {'equal' if len(fingerprints) == 1 else 'DIFFER'}")
    return 0 if len(fingerprints) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
