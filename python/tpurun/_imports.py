"""Changes to modules of others that take effect when a program imports them, and cost it nothing before."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Have `change` called with this module: now if it is imported, else right after that. Repeatable."""
    if (module := sys.modules.get(name)) is not None:
        change(module)
    elif (finder := _AfterImport(name, change)) not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass(frozen=True)
class _AfterImport(importlib.abc.MetaPathFinder):
    """Goes away with the first import of its module."""

    name: str
    change: Callable[[ModuleType], None]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec
