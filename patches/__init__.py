"""How the hosts are changed: patch files are declarations, this file applies and undoes them.

The patch of an upstream module stands at the same path here (`mlx_lm.tuner.trainer`: `patches/mlx_lm/tuner/trainer.py`)
and holds `PATCH`, a `Patch`. It is applied right after the module's own body ran, before anything copies names out of
the module. Functions are redirected in place, so copies made earlier are reached as well, and every change is kept
with what undoes it. A change that does not fit turns itself off with one line on stderr; the host keeps working.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .. import _active_boot, compat
from ..compat import Judgement, Lean
from . import mlx_lm, mlx_vlm

_MISSING: Any = object()


class PatchError(Exception):
    """A change does not fit the upstream module. The message says why, in a few words."""


class _Swap:
    """One change, looked up and ready: `do` and `undo` only assign."""

    before: Any
    after: Any

    def do(self) -> None: ...

    def undo(self) -> None: ...


@dataclass(frozen=True)
class Redirect:
    """Send calls of an upstream function or method to `replacement(original, *args, **kwargs)`.

    `symbol` is a name in the module ("generate", "Class.method"). `parameters` must appear in this order in the
    signature upstream, and what it `needs` in its module. `reason` says what is lost without this change, if that is
    not what `Patch.reason` says.
    """

    symbol: str
    replacement: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    reason: str = ""
    needs: tuple[Lean | str, ...] = ()

    def prepare(self, module: ModuleType) -> _Swap:
        """Look everything up.

        Raises:
            PatchError: the symbol is missing, is no plain function, or lacks a parameter.
        """
        _, _, value = _look_up(module, self.symbol)
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if not isinstance(function, FunctionType):
            raise PatchError(f"{self.symbol} is not a plain function but {type(function).__name__}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise PatchError(f"{self.symbol} is asynchronous")
        for lean in map(_as_lean, self.needs):
            _look_up(module, lean.symbol)
        names = list(inspect.signature(function).parameters)
        rest = iter(names)
        for wanted in self.parameters:
            if wanted not in rest:  # consumes up to the match, so the order counts
                raise PatchError(f"{self.symbol} has no parameter {wanted!r} where expected ({', '.join(names)})")
        return _CodeSwap(function, self.replacement)


@dataclass(frozen=True)
class Replace:
    """Bind another value to an upstream name: `make(old value)`. It does not reach names copied elsewhere."""

    symbol: str
    make: Callable[[Any], Any]
    reason: str = ""
    kind: type = object

    def prepare(self, module: ModuleType) -> _Swap:
        """Look everything up.

        Raises:
            PatchError: the symbol is missing, or not of the `kind`.
        """
        owner, name, before = _look_up(module, self.symbol)
        if not isinstance(before, self.kind):
            raise PatchError(f"{self.symbol} is not a {self.kind.__name__} but {type(before).__name__}")
        return _NameSwap(owner, name, before, self.make(before))


def _as_lean(name: Lean | str) -> Lean:
    return Lean(name) if isinstance(name, str) else name


@dataclass(frozen=True)
class Patch:
    """What is done with one upstream module: its changes, and what else is leaned on in it. `reason` says what is lost
    while they are off."""

    target: str
    reason: str
    changes: tuple[Redirect | Replace, ...] = ()
    leans: tuple[Lean, ...] = ()

    def __post_init__(self) -> None:
        symbols = [change.symbol for change in self.changes]
        if len(set(symbols)) < len(symbols):
            raise ValueError(f"the patch of {self.target} changes a symbol twice: {', '.join(symbols)}")

    def leaned_on(self) -> tuple[Lean, ...]:
        """Every symbol that the changes need, and those that are only called or built upon, each once."""
        found: dict[str, Lean] = {}
        for change in self.changes:
            lost = change.reason or self.reason
            found[change.symbol] = Lean(change.symbol, getattr(change, "parameters", ()), lost=lost)
        for change in self.changes:
            for lean in map(_as_lean, getattr(change, "needs", ())):
                found.setdefault(lean.symbol, replace(lean, called=True, lost=change.reason or self.reason))
        for lean in self.leans:
            found.setdefault(lean.symbol, replace(lean, lost=lean.lost or self.reason))
        return tuple(found.values())


@dataclass(frozen=True)
class Record:
    """The state of one change: "applied", "disabled" (`detail` says why) or "pending" (its module is not imported)."""

    target: str
    symbol: str
    state: str
    detail: str = ""


def _look_up(module: ModuleType, symbol: str) -> tuple[Any, str, Any]:
    """Owner, last name and value of "name" or "Class.name". By dict: `module.name` blames circular imports."""
    value: Any = module
    for name in symbol.split("."):
        owner = value
        value = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        if value is _MISSING:
            raise PatchError(f"there is no {symbol}")
    return owner, name, value


# Templates for a redirected function's code; "TARGET" becomes the callable itself, so upstream gets no new global.
def _call(*args, **kwargs):
    target: Any = "TARGET"
    return target(*args, **kwargs)


def _generate(*args, **kwargs):  # for generator functions: errors must surface at the first next()
    target: Any = "TARGET"
    return (yield from target(*args, **kwargs))


class _CodeSwap(_Swap):
    def __init__(self, function: FunctionType, replacement: Callable[..., Any]):
        code = function.__code__
        self.function, self.before = function, code
        self.wrapped = function.__dict__.get("__wrapped__", _MISSING)
        self.original = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(self.original, function)
        if self.wrapped is _MISSING:
            del self.original.__wrapped__  # type: ignore[attr-defined]
        else:
            self.original.__wrapped__ = self.wrapped  # type: ignore[attr-defined]
        template = (_generate if inspect.isgeneratorfunction(function) else _call).__code__
        target = functools.partial(replacement, self.original)
        self.after: CodeType = template.replace(
            co_consts=tuple(target if const == "TARGET" else const for const in template.co_consts),
            co_freevars=code.co_freevars,  # unused, but a function's closure must have the length its code says
            co_name=code.co_name,
            co_qualname=code.co_qualname,
        )

    def do(self) -> None:
        if self.function.__code__ is not self.before:
            return  # another thread was faster
        self.function.__code__ = self.after
        self.function.__wrapped__ = self.original  # type: ignore[attr-defined]

    def undo(self) -> None:
        if self.function.__code__ is not self.after:
            return  # changed again by someone else since; not ours to restore
        self.function.__code__ = self.before
        if self.wrapped is _MISSING:
            del self.function.__wrapped__  # type: ignore[attr-defined]
        else:
            self.function.__wrapped__ = self.wrapped  # type: ignore[attr-defined]


class _NameSwap(_Swap):
    def __init__(self, owner: Any, name: str, before: Any, after: Any):
        self.owner, self.name, self.before, self.after = owner, name, before, after

    def do(self) -> None:
        if vars(self.owner).get(self.name) is self.before:
            setattr(self.owner, self.name, self.after)

    def undo(self) -> None:
        if vars(self.owner).get(self.name) is self.after:
            setattr(self.owner, self.name, self.before)


_TARGETS: dict[str, ModuleType] = {}  # upstream module -> package that says what is done with it
_MET: set[str] = set()  # hosts of which a module was compared
_SAID: set[str] = set()  # the lines about changes that are off
_INCOMPARABLE: set[str] = set()  # those where that failed, which is said once
_SWAPS: dict[tuple[str, str], list[_Swap]] = {}  # (target, symbol) -> what was done, in order
_RECORDS: dict[tuple[str, str], Record] = {}
_active = False
_LOCK = threading.RLock()  # guards the tables and every assignment; nothing is imported while it is held
_TRANSITION = threading.RLock()  # one activate() or deactivate() at a time


def add_host(package: ModuleType) -> None:
    """Register a package of patch files: named like the host, with the host's patched modules in `MODULES`, and in
    `LEANS` those that stay as they are: (what is lost without them, what is leaned on)."""
    host = package.__name__.rpartition(".")[2]
    _TARGETS.update({f"{host}.{name}": package for name in (*package.MODULES, *_leans(package))})


def _leans(package: ModuleType) -> dict[str, tuple[str, tuple[str | Lean, ...]]]:
    return getattr(package, "LEANS", {})


def patch_of(target: str) -> Patch:
    """What is done with an upstream module. Raises what a broken patch file raises."""
    package = _TARGETS[target]
    name = target.partition(".")[2]
    if name in _leans(package):
        reason, leans = _leans(package)[name]
        return Patch(target, reason, leans=tuple(map(_as_lean, leans)))
    patch = importlib.import_module(f"{package.__name__}.{name}").PATCH
    if patch.target != target:
        raise PatchError(f"its file patches {patch.target!r}")
    return patch


def leaned_on(host: str) -> dict[str, tuple[Lean, ...]]:
    """Everything that is leaned on in a host."""
    found = {}
    for target in _TARGETS:
        if target.startswith(f"{host}."):
            with contextlib.suppress(Exception):  # a broken patch file: said when its module is imported
                found[target] = patch_of(target).leaned_on()
    return found


def judge(host: str) -> list[Judgement]:
    """What every symbol is that is leaned on in an installed host, without importing it; [] if it is not installed."""
    found = compat.installed(host)
    return [] if found is None else compat.judge_once(found, leaned_on(host))


def is_active() -> bool:
    """True between `activate()` and `deactivate()`."""
    return _active


def activate() -> None:
    """Patch the hosts' modules that are imported and every one that will be. Does nothing when active."""
    global _active
    with _TRANSITION:
        if _active:
            return
        with _LOCK:
            _active = True
            _RECORDS.clear()
            _MET.clear()
            _INCOMPARABLE.clear()
            stage_1 = _active_boot.FINDER
            if stage_1 in sys.meta_path:  # the same place: tools that came later stay in front
                sys.meta_path[sys.meta_path.index(stage_1)] = _HOOKS
            else:
                sys.meta_path.insert(0, _HOOKS)
            sys.meta_path.append(_MODELS)
        for target in list(_TARGETS):
            module = sys.modules.get(target)
            spec = getattr(module, "__spec__", None)
            if module is None or spec is None:
                continue
            if getattr(spec, "_initializing", False):
                importlib.import_module(target)  # another thread is in its body: wait for it
            _hook(spec)
            apply(module)


def deactivate() -> None:
    """Undo everything; modules imported from now on are not patched. Does nothing when not active."""
    global _active
    with _TRANSITION, _LOCK:
        if not _active:
            return
        _active = False
        for finder in (_HOOKS, _MODELS):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for swaps in reversed(_SWAPS.values()):
            for swap in reversed(swaps):
                swap.undo()
        _SWAPS.clear()
        _RECORDS.clear()
        for target in _TARGETS:
            spec = getattr(sys.modules.get(target), "__spec__", None)
            if spec is not None and isinstance(spec.loader, _HookedLoader):
                spec.loader = spec.loader.loader
        _MODELS.forget()


def apply(module: ModuleType, patch: Patch | None = None) -> None:
    """Apply a patch (default: the one of the module's file here) while active. Never raises; faults are one line."""
    target = module.__name__
    try:
        patch = patch or patch_of(target)
    except Exception as error:
        _disable(target, "", f"its patch cannot be read: {_active_boot.describe(error)}", "", error)
        return
    misfits = _compare(module)
    for lean in patch.leans:
        if lean.symbol in misfits:
            _disable(target, lean.symbol, misfits[lean.symbol], lean.lost or patch.reason)
    for change in patch.changes:
        try:
            for lean in map(_as_lean, ("", change.symbol, *getattr(change, "needs", ()))):
                if lean.symbol in misfits:
                    raise PatchError(misfits[lean.symbol])
            swap = change.prepare(module)
        except PatchError as error:
            _disable(target, change.symbol, str(error), change.reason or patch.reason)
        except Exception as error:
            _disable(target, change.symbol, _active_boot.describe(error), change.reason or patch.reason, error)
        else:
            with _LOCK:
                if _active:
                    _commit(target, change.symbol, swap)


def _compare(module: ModuleType) -> dict[str, str]:
    """The symbols of a module that do not fit what leans on them, and why. With the first module of a host, what is
    gone of it is off."""
    target = module.__name__
    host = target.partition(".")[0]
    leans = functools.partial(leaned_on, host)
    if host in _INCOMPARABLE:
        return {}
    try:
        if host not in _MET:
            _MET.add(host)
            for judgement in compat.gone(module, leans):
                _disable(judgement.target, "", judgement.detail, judgement.lost)
        misfits = {j.symbol: j.detail for j in compat.check(module, leans) if j.verdict == "incompatible"}
    except Exception as error:
        _INCOMPARABLE.add(host)
        why = _active_boot.describe(error)
        _active_boot.complain(f"{compat.describe_host(host)} could not be compared with known versions: {why}", error)
        return {}
    try:
        compat.warn_of_drift(host)
    except Exception as error:  # python -W error, or whatever shows warnings: a host must never fail because of us
        _active_boot.complain(str(error))
    return misfits


def _commit(target: str, symbol: str, swap: _Swap) -> None:
    done = _SWAPS.setdefault((target, symbol), [])
    if not any(swap.before is earlier.after for earlier in done):  # in force already, and so looked up in its place
        swap.do()
        done.append(swap)
    _RECORDS[target, symbol] = Record(target, symbol, "applied")


def status() -> list[Record]:
    """The state of every change, sorted. Modules whose patch was not read yet have one record with symbol ""."""
    with _LOCK:
        if not _active:
            return [Record(target, "", "disabled", "the plugin is not active") for target in sorted(_patched())]
        seen = {target for target, _ in _RECORDS}
        waiting = [Record(target, "", "pending", "not imported yet") for target in _patched() if target not in seen]
        return sorted([*_RECORDS.values(), *waiting], key=lambda record: (record.target, record.symbol))


def _patched() -> list[str]:
    """The upstream modules that have a patch file; the others are leaned on as they are."""
    return [target for target, package in _TARGETS.items() if target.partition(".")[2] in package.MODULES]


def is_applied(target: str, symbol: str) -> bool:
    """Whether a change is in force, or will be when its module is imported."""
    with _LOCK:
        record = _RECORDS.get((target, "")) or _RECORDS.get((target, symbol))
        return _active and (record.state == "applied" if record else target not in sys.modules)


def _disable(target: str, symbol: str, problem: str, lost: str, error: Exception | None = None) -> None:
    with _LOCK:
        _RECORDS[target, symbol] = Record(target, symbol, "disabled", problem)
    what = f"{target}.{symbol}" if symbol else target
    leaned = target in _TARGETS and target not in _patched()
    what = f"{what} is not as known" if leaned else f"the patch of {what} is off"
    lost = f" Without it: {lost.rstrip('.')}." if lost else ""
    line = f"{compat.describe_host(target)}: {what}, {problem}.{lost}"
    if line not in _SAID:
        _SAID.add(line)
        _active_boot.complain(line, error)


def _hook(spec: ModuleSpec) -> None:
    # Legacy loaders without exec_module, and namespace packages, have no moment "after the body".
    if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _HookedLoader):
        spec.loader = _HookedLoader(spec.loader)  # type: ignore[assignment]


class _HookedLoader:
    """Another loader, plus the patch after the module's body. A wrapper, since zip and pytest loaders are shared."""

    def __init__(self, loader: Any):
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # an instance that is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        if _active:
            apply(module)

    def get_code(self, fullname: str) -> CodeType | None:
        """For runpy, which would run a second, unpatched copy as `__main__`: only the `if __name__ == ...` part.

        The rest of the namespace comes from the patched module.
        """
        source = self.loader.get_source(fullname) if sys._getframe(1).f_globals["__name__"] == "runpy" else None
        if source is None or not _active:
            return self.loader.get_code(fullname)
        names = f"vars(__import__('importlib').import_module({fullname!r})).items()"
        tree = ast.parse(f"globals().update({{k: v for k, v in {names} if not k.startswith('__')}})")
        tree.body += [node for node in ast.parse(source).body if _is_main_guard(node)]
        return compile(tree, self.loader.get_filename(fullname), "exec")


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))


class _HookFinder:
    """Finds nothing itself: asks the finders after it, and hooks the loader they answer with."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _TARGETS:
            return None
        for finder in _after(self):
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find else None
            if spec is not None:
                _hook(spec)
                return spec
        return None


def _after(finder: Any) -> Iterable[Any]:
    # Asking all of them would recurse forever against a tool that does the same.
    finders = list(sys.meta_path)
    return finders[finders.index(finder) + 1 :] if finder in finders else []


class _ModelFinder:
    """At the end of `sys.meta_path`: `<host>.models.<type>` from `mlx_dllm_plugin.models`, if upstream has none."""

    def __init__(self) -> None:
        self.aliases: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        host, _, name = fullname.partition(".models.")
        if host not in ("mlx_lm", "mlx_vlm") or not name or "." in name:
            return None
        ours = importlib.util.find_spec(f"mlx_dllm_plugin.models.{name}")
        loader: Any = _AliasLoader(f"mlx_dllm_plugin.models.{name}")
        return None if ours is None else ModuleSpec(fullname, loader, origin=ours.origin)

    def forget(self) -> None:
        """Take the aliases out of `sys.modules` and off their parent packages again."""
        for alias, module in self.aliases.items():
            parent, _, name = alias.rpartition(".")
            for names, key in ((sys.modules, alias), (getattr(sys.modules.get(parent), "__dict__", {}), name)):
                if names.get(key) is module:
                    del names[key]
        self.aliases.clear()


class _AliasLoader:
    """Answers with a module of ours, under a second name."""

    def __init__(self, name: str):
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self.name)
        except ImportError as error:  # the hosts read every ImportError as "Model type not supported"
            raise RuntimeError(f"{self.name} cannot be imported: {error}") from error
        self.spec = module.__spec__
        _MODELS.aliases[spec.name] = module
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has just put the alias's there


_HOOKS = _HookFinder()
_MODELS: Any = _ModelFinder()
add_host(mlx_lm)
add_host(mlx_vlm)
