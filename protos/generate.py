"""Makes the protobuf code from the `.proto` files, ours and etcd's: `python protos/generate.py [--check]`.

With `--check` nothing is written; the exit status is 1 where the files in the repository are not what would be made.
Needs the development dependencies grpcio-tools 1.76 (code of a later one refuses protobuf 6) and mypy-protobuf.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"protos": "shoal_protos", "controller": "shoal_controller/etcd"}
"""Where `.proto` files lie: the folder that is on Python's path, and the package below it."""
SUFFIXES = ("_pb2.py", "_pb2.pyi")


def generate(into: Path) -> None:
    """Write the generated files of every `.proto` below `into`, at the same relative paths."""
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    for root, room in ROOMS.items():
        protos = [str(path.relative_to(ROOT / root)) for path in sorted((ROOT / root / room).glob("*.proto"))]
        (out := into / root).mkdir(exist_ok=True)
        options = [f"-I{ROOT / root}", f"--plugin={plugin}", f"--python_out={out}", f"--mypy_out=quiet:{out}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *protos], check=True)


def stale() -> list[str]:
    """The generated files in the repository that differ from what would be made, or are missing, or should not be."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made, here = _generated(Path(folder)), _generated(ROOT)
    return sorted(name for name in made.keys() | here.keys() if made.get(name) != here.get(name))


def _generated(root: Path) -> dict[str, str]:
    folders = (root / folder / room for folder, room in ROOMS.items())
    paths = (path for folder in folders for path in folder.glob("*_pb2*") if path.name.endswith(SUFFIXES))
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for name in (names := stale()):
            print(f"{name} is not what its .proto says; run: python protos/generate.py", file=sys.stderr)  # noqa: T201
        return 1 if names else 0
    if arguments:
        print("usage: python protos/generate.py [--check]", file=sys.stderr)  # noqa: T201
        return 2
    generate(ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
