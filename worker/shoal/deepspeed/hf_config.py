"""`HfDeepSpeedConfig`, by which scripts tell transformers of their configuration, without DeepSpeed.

transformers' own class of that name wants DeepSpeed installed, and builds models by `deepspeed.zero.Init`. This one
answers the same questions, and while it lives with stage 3, what transformers builds from a model's configuration
(`from_config`) is built without memory (`shoal.deferred`). What `from_pretrained` reads is whole until the loop begins.
Where `shoal.deepspeed` is imported, before or after transformers, a call of transformers' class makes one of these.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from shoal_protos.config_file import parsed_config, read_config

from shoal.first_values.building import deferred

THEIRS = "transformers.integrations.deepspeed"
"""The module of transformers' own class."""
_STAGE_3: WeakSet[HfDeepSpeedConfig] = WeakSet()


class HfDeepSpeedConfig:
    """As accelerate's. Keep it alive while models are built."""

    def __init__(self, config_file_or_dict: str | Path | Mapping[str, Any]) -> None:
        given = config_file_or_dict
        self.config: dict[str, Any] = dict(given) if isinstance(given, Mapping) else _read(str(given))
        if self.is_zero3():
            _STAGE_3.add(self)
            _build_deferred()

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section of a dotted key, None where there is none, and the key's last name."""
        *sections, key = ds_key_long.split(".")
        found: Any = self.config
        for name in sections:
            found = found.get(name) if isinstance(found, dict) else None
        return (found if isinstance(found, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Of a dotted key."""
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Takes a key out. Raises `ValueError` where it must be there and is not."""
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ValueError(f"the configuration has no {ds_key_long}")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a value is given that is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a value is given that is not."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    @property
    def _stage(self) -> Any:
        return self.get_value("zero_optimization.stage", -1)

    def is_zero2(self) -> bool:
        """Whether ZeRO shards gradients."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether it shards parameters too."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether something is kept apart from the device."""
        devices = (self.get_value(f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param"))
        return any(device in ("cpu", "nvme") for device in devices)


def _read(given: str) -> dict[str, Any]:
    return dict(parsed_config(given) if given.lstrip().startswith("{") else read_config(Path(given)))


def _build_deferred() -> None:
    """From now on; once, where transformers is in use."""
    models: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    whole = getattr(models, "_from_config", None)
    if whole is None or getattr(whole, "builds_deferred", False):
        return

    def from_config(kind: Any, *given: Any, **named: Any) -> Any:
        if not _STAGE_3:
            return whole.__func__(kind, *given, **named)
        with deferred():
            return whole.__func__(kind, *given, **named)

    from_config.builds_deferred = True  # type: ignore[attr-defined]
    models._from_config = classmethod(from_config)


# ---- in the place of transformers' own


def stand_in_for_theirs() -> None:
    """From now on, or from the import of transformers' module on."""
    if THEIRS in sys.modules:
        _stand_in(sys.modules[THEIRS])
    else:
        sys.meta_path.insert(0, _AtTheirImport())


def _stand_in(module: ModuleType) -> None:
    theirs: Any = module.HfDeepSpeedConfig

    def new(kind: Any, *given: Any, **named: Any) -> Any:
        return HfDeepSpeedConfig(*given, **named) if kind is theirs else object.__new__(kind)

    theirs.__new__ = new


class _AtTheirImport(MetaPathFinder):
    """Is told when the module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != THEIRS:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            whole = found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                whole(module)
                _stand_in(module)

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found
