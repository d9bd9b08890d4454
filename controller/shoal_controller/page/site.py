"""The files of the page that the controller shows at `/`: read once, served to anybody, told apart by their digest.

They hold no secret: what they show they ask of REST, with the token that their reader has typed. `build_app` puts a
`Site` before the routes (`api/app.py`). Nothing here knows what the files do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

FOLDER = Path(__file__).parent / "files"

INDEX = "index.html"
"""What `/` answers. The only file that knows the digest of all."""

DIGEST_PLACE = b"SHOAL_PAGE_DIGEST"
"""What the digest of all files takes the place of, in `INDEX`: a page that is open knows by it that it is old."""

PREFIX = "/page/"

TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
"""By suffix. A file of another kind is not served."""

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every file. A browser keeps them, and asks each time whether they are still the same."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is served."""

    content: bytes
    media_type: str
    tag: str
    """Its ETag, in quotes."""


class Site:
    """The files by the paths at which they are served."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Reads all of them. Raises `OSError`."""
        found = dict(_read(folder))
        self.digest = _digest(found)
        """Of all files: another one is another page."""
        index = found.pop(INDEX).replace(DIGEST_PLACE, self.digest.encode())
        self._files = {f"{PREFIX}{name}": _file(name, content) for name, content in found.items()}
        self._files["/"] = _file(INDEX, index)

    def answer(self, path: str, headers: Headers) -> Response | None:
        """The file at this path, or that the reader has it; None: there is none."""
        found = self._files.get(path)
        if found is None:
            return None
        kept = {**HEADERS, "ETag": found.tag}
        if _names(headers.get("if-none-match", ""), found.tag):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=kept)
        return Response(found.content, headers=kept, media_type=found.media_type)


def is_of_the_page(path: str) -> bool:
    """Whether nothing but a file of the page may be there: whoever asks for it needs no token."""
    return path == "/" or path.startswith(PREFIX)


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file that is served, by its path within the folder, in order."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix in TYPES and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix(), path.read_bytes()


def _digest(files: Mapping[str, bytes]) -> str:
    """Hexadecimal."""
    whole = hashlib.sha256()
    for name, content in files.items():
        whole.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def _file(name: str, content: bytes) -> PageFile:
    return PageFile(content, TYPES[Path(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def _names(if_none_match: str, tag: str) -> bool:
    """Whether the header names this tag, weak or not (RFC 9110)."""
    named = (one.strip().removeprefix("W/") for one in if_none_match.split(","))
    return if_none_match.strip() == "*" or tag in named
