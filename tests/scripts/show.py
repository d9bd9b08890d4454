"""The lines of a script that count as added or changed: `python -m scripts.show NAME`, in tests/."""

from __future__ import annotations

import sys

from scripts.changed_lines import changed_lines
from scripts.table import script


def main() -> None:
    chosen = script(sys.argv[1])
    changed = changed_lines(chosen.original.read_text(), chosen.port.read_text())
    print(*changed, f"{len(changed)} of {chosen.limit}", sep="\n")


if __name__ == "__main__":
    main()
