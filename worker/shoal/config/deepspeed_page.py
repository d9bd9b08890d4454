"""The table of docs/deepspeed.md: every key of DeepSpeed's configuration, from the code's own tables."""

from __future__ import annotations

import json
from collections.abc import Iterator

from shoal_protos.validation import model_in

from shoal.config.deepspeed import FATES, REASONS, VALUES_REFUSED, Fate, Ignored, Renamed, Switched, Unsupported
from shoal.config.document import Document
from shoal.config.sentences import keys_of


def config_table() -> Iterator[str]:
    """Why files are refused; every key, and what becomes of it."""
    yield (
        "\n## Why a `ds_config.json` is refused\n\n"
        "All faults of a file are reported at once. Each sentence contains one of these phrases:\n\n"
        "| phrase | meaning |\n|---|---|\n"
    )
    yield from (f"| {phrase.strip(' ;')} | {meaning} |\n" for phrase, meaning in REASONS.items())
    yield (
        "\nKeys that DeepSpeed does not have (`_comment`, `logging`, …) are ignored, as in DeepSpeed; the log\n"
        "names them, and the section where such a key would be read if there is one. The section `shoal` is Shoal's\n"
        "own, and an unknown key in it is an error.\n"
        "\n## Every key of `ds_config.json`\n\n"
        "*Honoured*: see [Configuration](configuration.md). *Nothing*: accepted without effect; one log line names\n"
        "all such keys of a file. *Refused*: unless it has one of the values shown, which leave the feature off. A\n"
        "name covers all keys below it.\n\n"
        "| key | effect | reason |\n|---|---|---|\n"
    )
    rows = dict.fromkeys(_honoured(), "| honoured | |") | {key: _row(fate) for key, fate in FATES.items()}
    for key, (values, why) in VALUES_REFUSED.items():
        rows[key] = f"| honoured | refused are {_shown(values)}: {why} |"
    yield from (f"| `{key}` {row}\n" for key, row in sorted(rows.items()))


def _honoured() -> Iterator[str]:
    sections = {name for name, field in Document.model_fields.items() if model_in(field) is not None}
    for key in keys_of(Document):
        is_section = any(other.startswith(f"{key}.") for other in keys_of(Document))
        if not is_section and not key.startswith("shoal") and key not in sections:
            yield key


def _row(fate: Fate) -> str:
    match fate:
        case Ignored(why):
            return f"| nothing | {why} |"
        case Renamed(to):
            return f"| honoured | an old name of `{to}` |"
        case Unsupported(why, off):
            return f"| refused | off: {_shown(off)}. {_sentence(why)} |"
        case Switched(why, switch, off, in_parts):
            ways = [f"`{switch}` is not given, or {_shown(off)}"] if switch else []
            ways += ["no `enabled` within is true"] if in_parts else []
            return f"| refused | off: {'; '.join(ways)}. {_sentence(why)} |"


def _sentence(why: str) -> str:
    return f"{why[0].upper()}{why[1:]}."


def _shown(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)
