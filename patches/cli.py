"""Command lines of the hosts: our options in their parsers, and errors as one sentence.

The hosts build their parsers inside `main()` and pass named arguments on, so nothing extra would travel. The module's
own `argparse` is replaced by a copy whose parser adds our options, and takes their values out of the namespace again:
the host sees what it would see without us. The values wait here until the host calls `load` and `stream_generate`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..demo import demo_path
from ..errors import PREFIX, DiffusionError, note
from ..options import LoadOptions, add_arguments, merge, split, table

_PREFIX = "_mlx_dllm_"


@dataclass
class Command:
    """A host's command that is running. A plain global, not a context variable: the server generates in a thread.

    Args:
        name: such as ``mlx_lm.generate``.
        refuses: why it cannot take diffusion checkpoints, or "" if it can.
        load: the values of `LoadOptions` given on its command line.
        decoding: those of `DecodingOptions`.
        given: names of the host's own options that were given.
        host: the namespace the host sees.
        diffusion: diffusion was asked for, or a diffusion checkpoint is loaded: then every error is one sentence.
    """

    name: str
    refuses: str = ""
    load: dict[str, Any] = field(default_factory=dict)
    decoding: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    host: argparse.Namespace = field(default_factory=argparse.Namespace)
    diffusion: bool = False


_running: Command | None = None


def running() -> Command | None:
    """The command whose `main()` is running, or None in a script."""
    return _running


def load_options() -> LoadOptions:
    """The load options of the running command."""
    return LoadOptions(**(_running.load if _running else {}))


def guarded(name: str, refuses: str = "") -> Callable[..., Any]:
    """A replacement of a command's `main()`: our errors become one line on stderr and exit status 1."""

    def main(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with _command(name, refuses):
            return original(*args, **kwargs)

    return main


@contextlib.contextmanager
def _command(name: str, refuses: str) -> Iterator[None]:
    global _running
    before, _running = _running, Command(name, refuses)
    command = _running
    try:
        yield
        if command.diffusion:
            sys.stdout.flush()
    except DiffusionError as error:
        print(f"{PREFIX} error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # the reader has gone, as in `| head`
        if not command.diffusion:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        if not command.diffusion:
            raise
        note("interrupted")
        raise SystemExit(130) from None
    except EOFError:  # input that ends, as of a chat that is read from a pipe
        if not command.diffusion:
            raise
        print()
    except Exception as error:
        if not command.diffusion or os.environ.get("MLX_DLLM_DEBUG") == "1":
            raise
        why = " ".join(str(error).split())[:300]
        print(f"{PREFIX} error: {type(error).__name__}: {why} (MLX_DLLM_DEBUG=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        _running = before


def looking_again(refuse: Callable[[Any], None]) -> Callable[..., Any]:
    """A replacement of a host's `load`, whatever its parameters are: the last place to notice a diffusion checkpoint
    when the changes to what it calls are off. `refuse` gets what was loaded, part by part."""

    def load(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        for part in loaded if isinstance(loaded, tuple) else (loaded,):
            refuse(part)
        return loaded

    return load


def directory_of(tokenizer: Any) -> Path | None:
    """Where a tokenizer, or a processor with one, was loaded from, if that is a directory."""
    for holder in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        name = getattr(holder, "name_or_path", None)
        if isinstance(name, str) and name and Path(name).is_dir():
            return Path(name)
    return None


def refuse(what: str) -> DiffusionError:
    """The refusal of an entry point that cannot decode diffusion checkpoints."""
    return DiffusionError(
        f"{what} does not work with diffusion checkpoints in this version: use mlx_lm.generate, "
        "mlx_lm.stream_generate or mlx_dllm_plugin.decode."
    )


def refuse_if_diffusion(model: Any, what: str, refuse: Callable[[str], DiffusionError] = refuse) -> None:
    """Raises DiffusionError when the model has a diffusion spec."""
    if getattr(model, "diffusion_spec", None) is not None:
        raise refuse(what)


def refusing(what: str, refuse: Callable[[str], DiffusionError] = refuse) -> Callable[..., Any]:
    """A replacement of a function of a `model` (and perhaps a `draft_model`) that cannot take diffusion models, and
    says what `refuse` makes of its name."""

    def replacement(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        except TypeError:
            given = {}  # for the host to say, with its own name
        for name in ("model", "draft_model"):
            refuse_if_diffusion(given.get(name), what, refuse)
        return original(*args, **kwargs)

    return replacement


def refuse_checkpoint(path: Path, what: str) -> None:
    """Raises DiffusionError when a local directory holds a diffusion checkpoint. Nothing is loaded."""
    from ..spec import detect_at

    if detect_at(path) is not None:
        raise refuse(what)


def with_parser(old: ModuleType, parser: type[argparse.ArgumentParser]) -> ModuleType:
    """A copy of the argparse module with another parser."""
    new = ModuleType(old.__name__, old.__doc__)
    vars(new).update(vars(old))
    new.ArgumentParser = parser  # type: ignore[attr-defined]
    return new


def with_options(old: ModuleType) -> ModuleType:
    """A copy of the argparse module whose parsers offer the option table."""
    return with_parser(old, Parser)


class _Unset:
    """Default of a host option that we must tell from the same value given by the user."""

    def __init__(self, default: Any):
        self.default = default

    def __repr__(self) -> str:
        return repr(self.default)


class Parser(argparse.ArgumentParser):
    """A host's parser with our options in a group of their own. What the host gets is unchanged."""

    not_offered: tuple[str, ...] = ()  # names of options
    _ours: dict[str, argparse.Action] | None = None

    def _extend(self) -> dict[str, argparse.Action]:
        if self._ours is None:
            taken = set(self._option_string_actions)
            group = self.add_argument_group("diffusion options (mlx-dllm-plugin)")
            self._ours = add_arguments(
                group,
                _PREFIX,
                lambda o: (
                    not (o.metadata["host"] or o.name in self.not_offered or "--" + o.name.replace("_", "-") in taken)
                ),
            )
        return self._ours

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        ours = self._extend()
        watched = [action for action in self._actions if action.dest == "max_tokens"]
        for action in watched:
            action.default = _Unset(action.default)
        try:
            namespace, rest = super().parse_known_args(args, namespace)
        finally:
            for action in watched:
                action.default = action.default.default
        given = set(vars(namespace)) - {_PREFIX + name for name in ours}
        for action in watched:
            value = getattr(namespace, action.dest)
            if isinstance(value, _Unset):
                setattr(namespace, action.dest, value.default)
                given.discard(action.dest)
        values = {}
        for name, action in ours.items():
            values[name] = getattr(namespace, action.dest)
            delattr(namespace, action.dest)
        values = {name: value for name, value in values.items() if value is not None}
        if _running is not None:
            _running.load, _running.decoding, _ = split(values)
            _running.given, _running.host = given, namespace
            if _running.load.get("mode") == "diffusion":
                _running.diffusion = True
                self.asked(namespace)
        return namespace, rest

    def asked(self, namespace: argparse.Namespace) -> None:
        """Diffusion was asked for: what is known to be wrong is said at once."""
        if getattr(namespace, "model", "") is None:
            namespace.model = str(demo_path())
            note("no --model given: using the demo checkpoint that comes with the plugin")
        check_host_options()

    def format_help(self) -> str:
        """The help, with what is registered: not looked up for anything else."""
        from ..families import FAMILIES
        from ..samplers import RULES, users

        ours = self._extend()
        for option in table():
            if option.name not in ours:
                continue
            known = {"unmasking": RULES.names, "family": FAMILIES.names}.get(option.name, list)()
            known = [f": {', '.join(known)}"] if known else []
            rules = [] if option.metadata["common"] else [f" (rules: {', '.join(users(option.name))})"]
            ours[option.name].help = "".join([option.metadata["help"], *known, *rules])
        return super().format_help()

    def format_usage(self) -> str:
        self._extend()
        return super().format_usage()

    def _get_option_tuples(self, option_string: str) -> Any:
        """Abbreviations of the host's options stay what they are without us: `--mod` is `--model`."""
        found = super()._get_option_tuples(option_string)  # type: ignore[misc]
        ours = set((self._ours or {}).values())
        return [match for match in found if match[0] not in ours] or found


# Options of mlx_lm.generate that have no meaning when a canvas is denoised.
NO_MEANING = {
    "draft_model": "speculative decoding drafts tokens from left to right",
    "prompt_cache_file": "diffusion decoding keeps no keys and values between requests",
    "prompt_cache": "diffusion decoding keeps no keys and values between requests",
    "kv_bits": "its keys and values are neither quantized nor dropped",
    "max_kv_size": "its keys and values are neither quantized nor dropped",
    "input_embeddings": "canvases are made of token ids",
}


def refuse_meaningless(
    values: Mapping[str, Any],
    spelled: Callable[[str], str] = str,
    meaningless: Mapping[str, str] = NO_MEANING,
    is_set: Callable[[str, Any], bool] = lambda name, value: value is not None,
) -> None:
    """Raises DiffusionError when an option is set that has no meaning here, of those whose reasons are given."""
    for name, why in meaningless.items():
        if is_set(name, values.get(name)):
            raise DiffusionError(f"{spelled(name)} does not work with diffusion ({why}): leave it out.")


def print_diffusion(unmasking: str, forwards: int, tokens: int, columns: int, settings: str, more: str = "") -> None:
    """What verbose output says of how a text was made."""
    count = f"{forwards} forward{'s' * (forwards != 1)}, {tokens / forwards:.2f} tokens per forward"
    print(f"Diffusion: {unmasking}, {count}, {columns} columns computed{more}")
    print(f"Profile: {settings}")


def check_host_options(vocab_size: int | None = None) -> None:
    """Raises DiffusionError when the running command was given an autoregressive option, or a host's option with a
    value that the host itself would silently ignore (top-p 1.5) or misread (temperature -1)."""
    if _running is not None:
        host = vars(_running.host)
        refuse_meaningless(host, lambda name: "--" + name.replace("_", "-"))
        options = merge({option.name: host.get(option.name) for option in table() if option.metadata["host"]})
        if vocab_size is not None and (options.top_k or 0) >= vocab_size:
            raise DiffusionError(f"top_k must be below the vocabulary of {vocab_size}, got {options.top_k}.")
