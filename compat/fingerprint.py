"""Fingerprints of Python source that do not depend on the Python that takes them, and whether a signature still fits.

A symbol's hash is over its tokens without comments, docstrings and white space. `ast.dump` and `ast.unparse` differ
between Python versions; the lines where a symbol starts and ends do not, so `ast` says where and `tokenize` what.
"""

import ast
import codecs
import hashlib
import io
import itertools
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

WHOLE = "*"  # stands for all of a file
_IN, _OUT = "\1", "\2"  # in the place of indentation
_LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
# f-strings (3.12) and t-strings (3.14) come in parts, where earlier tokenizers have one string.
_PARTS = {"FSTRING_START": 1, "FSTRING_END": -1, "TSTRING_START": 1, "TSTRING_END": -1}


class Symbol(NamedTuple):
    """What is recorded of a symbol: 16 hexadecimal digits, and such as "def (model, *, lazy=, **kwargs)"."""

    hash: str
    signature: str


class Source:
    """The text of a file, to look symbols up in. Raises SyntaxError for what this Python cannot read."""

    def __init__(self, data: bytes):
        # Python reads any line end as this one; tokenizers differ on lone carriage returns and on the mark.
        data = data.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._body = ast.parse(data).body
        self._tokens = list(_tokens(data))

    def symbol(self, name: str) -> Symbol | None:
        """A definition, assignment or import in the module ("name"), or in a class of it ("Class.name"). What is
        imported, or a member of it, or may come by an `import *`, is an "import": its text is elsewhere."""
        if name == WHOLE:
            return Symbol(_digest(self._text(1, None)), "file")
        *path, last = name.split(".")
        body: Sequence[ast.stmt] = self._body
        for part in path:
            owners = _find(body, part) or _find(body, "*")
            if not owners:
                return None
            owner = owners[-1]
            if isinstance(owner, ast.Import | ast.ImportFrom):
                return Symbol(_digest(self._of(owner, name)), "import")
            if not isinstance(owner, ast.ClassDef):
                return None
            body = owner.body
        nodes = _find(body, last) or _find(body, "*")
        if not nodes:
            return None
        return Symbol(_digest(part for node in nodes for part in self._of(node, last)), _signature(nodes[-1]))

    def _of(self, node: ast.stmt, name: str) -> Iterable[str]:
        if isinstance(node, ast.Import | ast.ImportFrom):  # its line may name others too
            where = f"{'.' * node.level}{node.module or ''}" if isinstance(node, ast.ImportFrom) else ""
            first = name.partition(".")[0]
            return (f"{where} {a.name} as {name}" for a in node.names if _bound(a) in (first, "*"))
        decorators = getattr(node, "decorator_list", [])
        text = self._text(min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno)
        return itertools.dropwhile((_IN, _OUT).__contains__, text)  # those end what stands before it

    def _text(self, first: int, last: int | None) -> Iterable[str]:
        return (text for line, text in self._tokens if first <= line and (last is None or line <= last))


def misfit(name: str, known: Iterable[str], now: str, wanted: Sequence[str] = (), called: bool = False) -> str:
    """
    Why a signature does not fit what is done with it, in a few words; "" when it fits.

    Args:
        known: the recorded signatures.
        wanted: parameters that must be there, in this order.
        called: this package calls it, by position, so it must not need more than it ever did.
    """
    signatures = [signature.partition(" ") for signature in known]
    kind, _, parameters = now.partition(" ")
    kinds = {before for before, _, _ in signatures}
    if kind in ("import", "value", "file"):  # what that is shows when it is imported
        return ""
    if kinds and kind not in kinds and "import" not in kinds:
        return f"{name} is a {kind}, not a {' or '.join(sorted(kinds))}"
    names = [part.lstrip("*").rstrip("=") for part in _parts(parameters)]
    rest = iter(names)
    for parameter in wanted:
        if parameter not in rest:  # consumes up to the match, so the order counts
            return f"{name} has no parameter {parameter!r} where expected ({', '.join(names)})"
    if called:
        by_name = itertools.dropwhile(lambda part: not part.startswith("*"), parameters.strip("()").split(", "))
        if alone := [part.rstrip("=") for part in by_name if part.rstrip("=") in wanted]:
            return f"{name} takes {alone[0]!r} by name alone"
        had = {part.lstrip("*").rstrip("=") for _, _, before in signatures for part in _parts(before)}
        more = [part for part in _parts(parameters) if part.isidentifier() and part not in had]
        if more:
            return f"{name} needs another argument, {more[0]!r}"
    return ""


def _parts(parameters: str) -> list[str]:
    return [part for part in parameters.strip("()").split(", ") if part not in ("", "*", "/")]


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _tokens(data: bytes) -> Iterator[tuple[int, str]]:
    """Line and text of every token that counts. Indentation counts, its width does not."""
    lines = io.BytesIO(data).readline
    statement: list[tuple[int, str]] = []
    only_strings = True
    for line, kind, text in _joined(list(tokenize.tokenize(lines)), data):
        if kind in (tokenize.INDENT, tokenize.DEDENT):
            yield line, _IN if kind == tokenize.INDENT else _OUT
            continue
        statement.append((line, "\n" if kind == tokenize.NEWLINE else text))
        if kind == tokenize.NEWLINE:
            if not only_strings:  # a statement of strings alone is a docstring
                yield from statement
            statement, only_strings = [], True
        elif kind != tokenize.STRING:
            only_strings = False


def _joined(tokens: list[tokenize.TokenInfo], data: bytes) -> Iterator[tuple[int, int, str]]:
    """Line, type and text of tokens, with the parts of an f-string as the one string that they are."""
    encoding = tokens[0].string
    lines = io.TextIOWrapper(io.BytesIO(data), encoding, newline=None).readlines()
    depth, start = 0, (0, 0)
    for token in tokens:
        step = _PARTS.get(tokenize.tok_name[token.type], 0)
        if depth == 0 and step == 1:
            start = token.start
        depth += step
        if step == -1 and depth == 0:
            yield start[0], tokenize.STRING, _slice(lines, start, token.end)
        elif depth == 0 and token.type not in _LEFT_OUT:
            yield token.start[0], token.type, token.string


def _slice(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    return lines[start[0] - 1][start[1] :] + "".join(lines[start[0] : end[0] - 1]) + lines[end[0] - 1][: end[1]]


def _find(body: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements that bind a name, also under `if`, `try` and `with`."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            binds = node.name == name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            binds = any(_bound(alias) == name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            binds = any(isinstance(t, ast.Name) and t.id == name for target in targets for t in ast.walk(target))
        else:
            binds = False
            for inner in ("body", "orelse", "finalbody", "handlers"):
                for child in getattr(node, inner, []):
                    found += _find(child.body if isinstance(child, ast.ExceptHandler) else [child], name)
        if binds:
            found.append(node)
    return found


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _signature(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        kind = "async" if isinstance(node, ast.AsyncFunctionDef) else "generator" if _yields(node.body) else "def"
        return f"{kind} ({', '.join(_parameters(node.args))})"
    if isinstance(node, ast.ClassDef):
        own = [n for n in _find(node.body, "__init__") if isinstance(n, ast.FunctionDef)]
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        names = [f"{ast.unparse(n.target)}{'=' * (n.value is not None)}" for n in fields]
        return f"class ({', '.join([*_parameters(own[-1].args)][1:] if own else names)})"
    return "import" if isinstance(node, ast.Import | ast.ImportFrom) else "value"


def _parameters(args: ast.arguments) -> Iterator[str]:
    plain = [*args.posonlyargs, *args.args]
    optional = len(plain) - len(args.defaults)
    for i, argument in enumerate(plain):
        yield argument.arg + "=" * (i >= optional)
        if i == len(args.posonlyargs) - 1:
            yield "/"
    if args.vararg or args.kwonlyargs:
        yield f"*{args.vararg.arg if args.vararg else ''}"
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield argument.arg + "=" * (default is not None)
    if args.kwarg:
        yield f"**{args.kwarg.arg}"


def _yields(body: Sequence[ast.AST]) -> bool:
    """Whether a function's own body yields, not that of a function in it."""
    for node in body:
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            if _yields(list(ast.iter_child_nodes(node))):
                return True
    return False
