"""Named things (families, unmasking rules) from this package and from others, through entry points.

Ours are listed here and imported by name, without a scan; other packages' are read through importlib-metadata the first
time a name is unknown or all names are asked for. A faulty entry point is named and left out; asking for it raises.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from .errors import DiffusionError, note

T = TypeVar("T")


class Registry(Generic[T]):
    """
    Args:
        group: the entry-point group, such as ``mlx_dllm.families``.
        what: the singular word for error messages, such as ``family``.
        kind: the class every entry must be an instance of; it has a ``name``.
        builtin: name -> ``module:attribute`` of the entries of this package.
    """

    def __init__(self, group: str, what: str, kind: type[T], builtin: Mapping[str, str]):
        self.group = group
        self.what = what
        self.kind = kind
        self._builtin = dict(builtin)
        self._entries: dict[str, T] = {}
        self._packages: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        self._scanned = False
        self._lock = threading.RLock()

    def register(self, entry: T, *, package: str = "registered by hand") -> T:
        """Add an entry. Raises DiffusionError when it is of the wrong class or its name is taken."""
        with self._lock:
            if not isinstance(entry, self.kind):
                raise DiffusionError(
                    f"{package}: an entry of {self.group} must be a {self.kind.__name__}, got {type(entry).__name__}."
                )
            name = entry.name  # type: ignore[attr-defined]
            if name in self._entries or name in self._builtin:
                owner = self._packages.get(name, "mlx-dllm-plugin")
                raise DiffusionError(f"{package}: the {self.what} {name!r} is taken by {owner}; choose another name.")
            self._entries[name] = entry
            self._packages[name] = package
            return entry

    def unregister(self, name: str) -> None:
        """Remove an entry that was added with :meth:`register` or came from another package."""
        with self._lock:
            if name not in self._entries or name in self._builtin:
                raise DiffusionError(f"The {self.what} {name!r} was not registered, so it cannot be unregistered.")
            del self._entries[name], self._packages[name]

    def get(self, name: str) -> T:
        """The entry of that name. Raises DiffusionError that lists the known names."""
        with self._lock:
            if name not in self._entries and name in self._builtin:
                self._entries[name] = self._load_builtin(name)
            if name not in self._entries:
                self._scan()
            if name in self._entries:
                return self._entries[name]
            if name in self._faults:
                raise DiffusionError(self._faults[name])
            raise DiffusionError(f"Unknown {self.what} {name!r}; known are: {', '.join(self.names())}.")

    def names(self) -> list[str]:
        """All names, sorted, those of other packages included."""
        with self._lock:
            self._scan()
            return sorted({*self._builtin, *self._entries})

    def builtin(self) -> list[T]:
        """The entries of this package, without a scan."""
        return [self.get(name) for name in self._builtin]

    def others(self) -> list[T]:
        """The entries of other packages and those registered by hand."""
        with self._lock:
            self._scan()
            return [entry for name, entry in self._entries.items() if name not in self._builtin]

    def package(self, name: str) -> str:
        """Which package an entry comes from."""
        return self._packages.get(name, "mlx-dllm-plugin")

    def faults(self) -> dict[str, str]:
        """Name -> what is wrong with it, of the entry points of other packages that were left out."""
        with self._lock:
            self._scan()
            return dict(self._faults)

    def _load_builtin(self, name: str) -> T:
        module, _, attribute = self._builtin[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        try:
            from importlib_metadata import entry_points
        except ImportError:  # missing or broken; the host must go on
            from importlib.metadata import entry_points  # type: ignore[assignment]

        for point in entry_points(group=self.group):
            if self._builtin.get(point.name) == point.value:
                continue
            package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
            try:
                entry: Any = point.load()
                if isinstance(entry, self.kind) and entry.name != point.name:  # type: ignore[attr-defined]
                    raise DiffusionError(
                        f"{package}: the entry point is called {point.name!r} but its {self.what} "
                        f"{entry.name!r}; give both one name."  # type: ignore[attr-defined]
                    )
                self.register(entry, package=package)
            except (Exception, SystemExit) as error:  # a stranger's package may raise anything; the host must go on
                text = str(error) if isinstance(error, DiffusionError) else f"{package}: {point.value} cannot be loaded"
                if not isinstance(error, DiffusionError):
                    text += f" ({type(error).__name__}: {' '.join(str(error).split())})."
                self._faults[point.name] = f"The {self.what} {point.name!r} is left out. {text}"
                note(self._faults[point.name])
