"""Fetches the page's one library, uPlot, from npm into the page's files: `make page-library`, with another version
`make page-library VERSION=1.6.33`. Needs npm; nothing else does.

The files are kept as npm has them, minified, with their licence; `version.json` beside them says which version they are
and has the hash of each, and a test compares. npm checks what it downloads against the registry's own hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "shoal_controller" / "page" / "files" / "uplot"
NAME = "uplot"
FILES = {"dist/uPlot.iife.min.js": "uPlot.iife.min.js", "dist/uPlot.min.css": "uPlot.min.css", "LICENSE": "LICENSE.txt"}
"""By their place in the package: their names here."""
NOTE = "version.json"
DOWNLOAD_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default="", help="version to fetch; default: the one that is here")
    version = parser.parse_args().version or json.loads((FOLDER / NOTE).read_text())["version"]
    if shutil.which("npm") is None:
        sys.stderr.write("fetching the page's library needs npm; install it with your system's packages\n")
        return 2
    fetch(version)
    sys.stdout.write(f"{FOLDER} has {NAME} {version}\n")
    return 0


def fetch(version: str) -> None:
    """Replace the files by those of this version."""
    with tempfile.TemporaryDirectory() as place:
        command = ["npm", "pack", f"{NAME}@{version}", "--silent", "--pack-destination", place]
        subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS, stdout=subprocess.DEVNULL)
        (archive,) = Path(place).glob("*.tgz")
        with tarfile.open(archive) as package:
            found = {name: _read(package, inside) for inside, name in FILES.items()}
            described = json.loads(_read(package, "package.json"))
    FOLDER.mkdir(exist_ok=True)
    for name, content in found.items():
        (FOLDER / name).write_bytes(content)
    (FOLDER / NOTE).write_text(json.dumps(_note(described, found), indent=2) + "\n")


def _read(package: tarfile.TarFile, inside: str) -> bytes:
    file = package.extractfile(f"package/{inside}")
    assert file is not None
    return file.read()


def _note(described: dict[str, str], found: dict[str, bytes]) -> dict[str, object]:
    return {
        "name": described["name"],
        "version": described["version"],
        "license": described["license"],
        "homepage": described["homepage"],
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(found.items())},
    }


if __name__ == "__main__":
    raise SystemExit(main())
