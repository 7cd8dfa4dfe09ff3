"""Hashes and signatures of source text: what changes them, what does not, and that every Python takes the same."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_dllm_plugin import compat
from mlx_dllm_plugin.compat import fingerprint
from mlx_dllm_plugin.compat.fingerprint import Source, misfit

TEXT = '''
"""A module."""
import argparse
from os import path, sep as separator
from functools import (
    partial,
)

LIMIT: int = 3
first, second = 1, 2

if LIMIT > 2:
    def under_if(x): return x
else:
    def under_if(x, y): return y

try:
    import numpy
except ImportError:
    numpy = None

@partial(print, 1)
def plain(a, /, b, c=2, *rest, d, e=3, **more):
    """Adds."""
    # a comment
    text = f"{a!r:>{b}} and {'x'}"
    return text + """
    # no comment
    """

def numbers():
    yield 1

def makes_a_generator():
    def inner():
        yield 1
    return inner

async def wait(): pass

class Thing:
    """A thing."""

    size: int
    name: str = "x"

    def method(self, y):
        return y

class Made(Thing):
    def __init__(self, x, *, y=1):
        self.x = x
'''


def symbol(text: str, name: str) -> fingerprint.Symbol | None:
    return Source(text.encode()).symbol(name)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("plain", "def (a, /, b, c=, *rest, d, e=, **more)"),
        ("numbers", "generator ()"),
        ("makes_a_generator", "def ()"),
        ("wait", "async ()"),
        ("under_if", "def (x, y)"),
        ("Thing", "class (size, name=)"),
        ("Thing.method", "def (self, y)"),
        ("Thing.name", "value"),
        ("Made", "class (x, *, y=)"),
        ("LIMIT", "value"),
        ("second", "value"),
        ("argparse", "import"),
        ("separator", "import"),
        ("partial", "import"),
        ("numpy", "value"),
        ("partial.method", "import"),
        ("*", "file"),
    ],
)
def test_signatures(name, signature):
    found = symbol(TEXT, name)
    assert found is not None and found.signature == signature
    assert len(found.hash) == 16 and int(found.hash, 16) >= 0


@pytest.mark.parametrize("name", ["gone", "sep", "Thing.gone", "plain.inner", "Gone.method", "inner", "text"])
def test_what_is_not_there(name):
    assert symbol(TEXT, name) is None


NAMES = ["plain", "numbers", "Thing", "Thing.method", "Made", "LIMIT", "argparse", "partial", "*"]
SAME = {
    "comments": [("    # a comment\n", ""), ("numbers():\n", "numbers():  # why\n  # because\n")],
    "docstrings": [('    """Adds."""\n', ""), ('"""A thing."""', "'''Another\n\n    thing.'''"), ("A module", "Mine")],
    "white space": [("c=2, *rest", "c = 2,\n  *rest"), ("LIMIT: int", "LIMIT : int")],
    "indentation": [("        return y\n", "          return y\n"), ("    yield 1\n\ndef", "  yield 1\n\ndef")],
    "line ends": [("\n", "\r\n")],
    "old line ends": [("\n", "\r")],
    "a mark at the start": [('\n"""A', '\ufeff\n"""A')],
}


@pytest.mark.parametrize("what", SAME)
def test_what_leaves_every_hash_as_it_is(what):
    text = TEXT
    for old, new in SAME[what]:
        assert old in text
        text = text.replace(old, new)
    assert text != TEXT
    for name in NAMES:
        assert symbol(text, name) == symbol(TEXT, name), name


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("c=2", "c=3", {"plain"}),
        ("# no comment", "# other", {"plain"}),
        ("'x'}", "'y'}", {"plain"}),
        ("{a!r:>{b}}", "{a!r:<{b}}", {"plain"}),
        ('f"{a', 'rf"{a', {"plain"}),
        ("@partial(print, 1)\n", "", {"plain"}),
        ("@partial(print, 1)", "@partial(print, 2)", {"plain"}),
        ("    yield 1\n\ndef makes", "    yield 2\n\ndef makes", {"numbers"}),
        ("        return y\n", "        return -y\n", {"Thing", "Thing.method"}),
        ("self, y):\n", "self, y: int):\n", {"Thing", "Thing.method"}),
        ("self.x = x", "pass", {"Made"}),
        ("LIMIT: int = 3", "LIMIT: int = 4", {"LIMIT"}),
        ("import argparse", "import argparse as other, sys as argparse", {"argparse"}),
        ("from functools import", "from mine import", {"partial"}),
        ("    partial,\n", "    partial, reduce\n", set()),
        ("first, second = 1, 2", "", set()),
    ],
)
def test_what_changes_which_hash(old, new, changed):
    assert old in TEXT
    text = TEXT.replace(old, new)
    assert {name for name in NAMES if symbol(text, name) != symbol(TEXT, name)} == {*changed, "*"}


def test_indentation_that_says_something_counts():
    assert symbol("def f():\n  if a:\n    b\n    c", "f") != symbol("def f():\n  if a:\n    b\n  c", "f")


def test_every_definition_of_a_name_counts():
    first = TEXT.replace("return x\n", "return -x\n")
    assert first != TEXT and symbol(first, "under_if") != symbol(TEXT, "under_if")


def test_a_missing_end_of_the_last_line_does_not_count():
    assert TEXT.endswith("self.x = x\n") and symbol(TEXT.rstrip(), "Made") == symbol(TEXT, "Made")


def test_what_may_come_by_a_star_import_is_an_import():
    text = "from ._core import *\ndef here(): pass"
    for name in ("f", "Thing.method"):
        found = symbol(text, name)
        assert found is not None and found.signature == "import"
        assert found != symbol("from .other import *", name)
    assert symbol(text, "here") == symbol("def here(): pass", "here")


def test_what_stands_before_does_not_count():
    alone = symbol("class A:\n  def f(self): return 1", "A.f")
    assert alone == symbol("class A:\n  def e(self):\n    if x:\n      return 2\n  def f(self): return 1", "A.f")


def test_names_like_our_marks_are_told_from_indentation():
    assert symbol("def f():\n  return indent", "f") != symbol("def f():\n  return dedent", "f")


@pytest.mark.parametrize(
    ("known", "now", "wanted", "called", "why"),
    [
        (["def (a, b=)"], "def (a, c, b=)", ("a", "b"), False, ""),
        (["def (a, b=)"], "def (b=, a)", ("a", "b"), False, "f has no parameter 'b' where expected (b, a)"),
        (["def (a)"], "def (x)", ("a",), False, "f has no parameter 'a' where expected (x)"),
        (["def (a, **kwargs)"], "def (a)", ("a", "kwargs"), False, "f has no parameter 'kwargs' where expected (a)"),
        (["def (a, **kwargs)"], "def (a, *kwargs)", ("a", "kwargs"), False, ""),
        (["def (a)"], "def (a, b)", ("a",), False, ""),
        (["def (a)"], "def (a, b)", ("a",), True, "f needs another argument, 'b'"),
        (["def (a)"], "def (a, *, b)", ("a",), True, "f needs another argument, 'b'"),
        (["def (a)"], "def (a, b=, *args, c=, **kwargs)", ("a",), True, ""),
        (["def (a)", "def (a, b)"], "def (a, b)", ("a",), True, ""),
        (["class (a)"], "class (a, b)", (), True, "f needs another argument, 'b'"),
        (["def (a)"], "generator (a)", ("a",), False, "f is a generator, not a def"),
        (["def (a)", "generator (a)"], "generator (a)", ("a",), False, ""),
        (["class (a)"], "def (a)", (), False, "f is a def, not a class"),
        (["value"], "def ()", (), False, "f is a def, not a value"),
        (["def (a)"], "value", ("a",), False, ""),
        (["def (a)"], "def (*, a)", ("a",), False, ""),
        (["def (a)"], "def (*, a)", ("a",), True, "f takes 'a' by name alone"),
        (["def (a, b=)"], "def (a, *rest, b=)", ("a", "b"), True, "f takes 'b' by name alone"),
        (["def (a, b=)"], "def (a, *, b=)", ("a",), True, ""),
        (["def (a)"], "import", ("a",), False, ""),
        (["import"], "class (a)", (), False, ""),
        (["file"], "file", (), False, ""),
        ([], "def (a)", ("a",), True, "f needs another argument, 'a'"),
    ],
)
def test_misfit(known, now, wanted, called, why):
    assert misfit("f", known, now, wanted, called) == why


def other_pythons() -> list[str]:
    """Interpreters of other versions than this one, on the PATH or of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    found += [str(path) for path in sorted(versions.glob("3.1[1-9]*/bin/python3"))]
    by_version = {}
    for python in found:
        if python is not None:
            command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
            by_version[subprocess.run(command, capture_output=True, text=True).stdout.strip()] = python
    here = f"{sys.version_info[0]} {sys.version_info[1]}"
    return [python for version, python in sorted(by_version.items()) if version not in ("", here)]


TAKE = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("fingerprint", sys.argv[1])
fingerprint = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fingerprint)
taken = {}
for file, names in json.load(sys.stdin).items():
    source = fingerprint.Source(Path(file).read_bytes())
    taken[file] = {name: source.symbol(name) for name in names}
print(json.dumps(taken))
"""


def test_another_python_takes_the_same_hashes(tmp_path):
    """Of everything that is leaned on in the installed hosts, and of the text above."""
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python from 3.11 on is installed here")
    (tmp_path / "text.py").write_text(TEXT)
    (tmp_path / "mark.py").write_bytes(b"\xef\xbb\xbfx = f'{1!r} {y}'; z = 1\n")
    wanted = {str(tmp_path / "text.py"): NAMES, str(tmp_path / "mark.py"): ["x", "*"]}
    for host in ("mlx_lm", "mlx_vlm"):
        spec = importlib.util.find_spec(host)
        if spec is not None and spec.origin is not None:
            package = host.replace("_", "-")
            record = compat.record_of(package, compat.releases(package)[-1]) or {}
            for name, entry in record.items():
                file = Path(spec.origin).parents[1] / name
                if file.is_file():
                    wanted[str(file)] = list(entry["symbols"])
    assert len(wanted) > 30
    taken = []
    for python in (sys.executable, *pythons):
        command = [python, "-c", TAKE, fingerprint.__file__]
        done = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True)
        assert done.returncode == 0, (python, done.stderr)
        taken.append(json.loads(done.stdout))
    assert all(other == taken[0] for other in taken[1:])
    assert all(None not in names.values() for file, names in taken[0].items() if file.endswith("text.py"))
