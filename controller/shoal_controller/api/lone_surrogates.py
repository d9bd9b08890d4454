"""Halves of surrogate pairs in a body: JSON can escape them, and they are no text that can be stored or sent.

pydantic lets many of them pass; a job that was made with one could not be shown any more. Asked by the models.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal_protos.json_bounds import DOCUMENT, JsonPlace

HALF = "is not valid text (a lone surrogate); send it as UTF-8"


def surrogate_faults(given: object) -> Iterator[str]:
    """A sentence for each value and each name that has some. However deeply they are nested: no recursion."""
    left: list[tuple[JsonPlace, object]] = [(DOCUMENT, given)]
    while left:
        place, one = left.pop()
        if isinstance(one, str) and not _is_text(one):
            yield f"{f'`{place.key}`' if place.key else 'the body'} {HALF}"
        elif isinstance(one, list):
            left += [(JsonPlace(place, index), entry) for index, entry in enumerate(one)]
        elif isinstance(one, dict):
            for name, entry in one.items():
                if _is_text(str(name)):
                    left.append((JsonPlace(place, str(name)), entry))
                else:
                    yield f"a name {f'in `{place.key}`' if place.key else 'at the top level'} {HALF}"


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
