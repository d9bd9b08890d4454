"""Kubernetes' objects in protobuf, as helm sends the secrets of its releases, kubectl a namespace, and both the options
of a deletion. Only these are read; everything else that the tests' clients send is JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
NAME, NAMESPACE, UID, VERSION, LABELS, ANNOTATIONS = 1, 3, 5, 6, 11, 12
"""Fields of `ObjectMeta`."""
TEXTS = {NAME: "name", NAMESPACE: "namespace", UID: "uid", VERSION: "resourceVersion"}
MAPS = {LABELS: "labels", ANNOTATIONS: "annotations"}

Json = dict[str, Any]


def json_of(body: bytes) -> Json:
    """A secret, or a namespace; of anything else nothing."""
    whole = dict(_fields(body.removeprefix(MAGIC)))
    kind = dict(_fields(whole[1])).get(2, b"").decode()
    if kind not in ("Secret", "Namespace"):
        return {}
    found: Json = {"apiVersion": "v1", "kind": kind, "metadata": {}, **({"data": {}} if kind == "Secret" else {})}
    for number, value in _fields(whole[2]):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2 and kind == "Secret":
            key, content = _entry(value)
            found["data"][key] = base64.b64encode(content).decode()
        elif number == 3:
            found["type"] = value.decode()
    return found


def _metadata(data: bytes) -> Json:
    found: Json = {}
    for number, value in _fields(data):
        if number in TEXTS and value:
            found[TEXTS[number]] = value.decode()
        elif number in MAPS:
            key, text = _entry(value)
            found.setdefault(MAPS[number], {})[key] = text.decode()
    return found


def _entry(data: bytes) -> tuple[str, bytes]:
    pair = dict(_fields(data))
    return pair[1].decode(), pair.get(2, b"")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """By number; numbers themselves are left out."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        size, at = _number(data, at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + size]
            at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
