"""`python -m tests.simulation.mutants`: which seeds notice that a rule is switched off."""

from __future__ import annotations

import argparse
import sys

from .mutations import MUTATIONS, mutated
from .run import attempt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds for each rule")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rule", default="", help="only rules with these words")
    parser.add_argument("--until", type=int, default=3, help="stop a rule after so many seeds that notice")
    given = parser.parse_args()
    survivors = 0
    for rule in MUTATIONS:
        if given.rule in rule:
            found = []
            with mutated(rule):
                for seed in range(given.first, given.first + given.seeds):
                    _, violation, _ = attempt((seed, {}))
                    if violation:
                        found.append((seed, violation[:90]))
                    if len(found) >= given.until:
                        break
            survivors += not found
            print(f"{rule}: {found or 'NOT NOTICED'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
