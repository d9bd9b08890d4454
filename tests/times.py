"""Prints what the tests of the last run of each tier took: `make times`.

    python -m times .venv/times/test-*.xml     of `make test`
    python -m times --files .venv/times/*.xml  by file

A tier's targets leave one file of JUnit's form each. Seconds are those of a test with its fixtures, on one of two
processes: half of their sum is about what the run took.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path


def seconds_by_test(report: Path) -> dict[str, float]:
    """Seconds of each test in a report, by `file::name`."""
    cases = xml.parse(report).iter("testcase")
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in cases
    }


def by_file(tests: dict[str, float]) -> dict[str, float]:
    """Seconds of each file, the slowest first."""
    files: Counter[str] = Counter()
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    return dict(files.most_common())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("reports", nargs="*", type=Path)
    arguments.add_argument("--files", action="store_true", help="sums by file in place of tests")
    arguments.add_argument("--most", type=int, default=20, help="how many rows of each report, 20")
    given = arguments.parse_args()
    if not given.reports:
        raise SystemExit("no run has left its times yet: make test, or make check, first")
    for report in given.reports:
        tests = seconds_by_test(report)
        print(f"{report.stem}: {len(tests)} tests, {sum(tests.values()):.0f} s")
        rows = by_file(tests) if given.files else dict(sorted(tests.items(), key=lambda row: -row[1]))
        for name, seconds in list(rows.items())[: given.most]:
            print(f"{seconds:7.1f} s  {name}")


if __name__ == "__main__":
    main()
