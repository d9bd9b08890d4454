"""Measure the scripts of docs/scripts.md, and write what was found to measured.json beside this file.

    make scripts                            all of them
    make scripts ARGS="recommender"         some

Exit status 1 where a loss or a fingerprint is not as it should be, or where a script fails; its figures are not kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from scripts.measuring import RunFailed, measure
from scripts.table import SCRIPTS, Script

MEASURED = Path(__file__).with_name("measured.json")


def measured_now(chosen: Script) -> list[str]:
    """Measure one, keep it if all is well; what is wrong."""
    began = time.monotonic()
    try:
        found = measure(chosen)
    except RunFailed as error:
        return [str(error)]
    wrong = found.wrong()
    if not wrong:
        kept = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
        kept[chosen.name] = {**asdict(found), "torch": torch.__version__}
        MEASURED.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")
    print(
        f"{chosen.name}: loss {found.loss:.6f}, original {found.original_loss}, {found.steps} steps, "
        f"fingerprints {'equal' if len(set(found.fingerprints.values())) == 1 else found.fingerprints}, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    return wrong


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [script.name for script in SCRIPTS]
    arguments.add_argument("names", nargs="*", choices=[*names, []], help="which; all where none is named")
    given = arguments.parse_args()
    failed = False
    for chosen in SCRIPTS:
        if not given.names or chosen.name in given.names:
            wrong = measured_now(chosen)
            for sentence in wrong:
                print(f"{chosen.name}: {sentence}", flush=True)
            failed |= bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
