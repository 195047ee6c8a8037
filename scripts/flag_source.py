"""What an argparse parser of a package accepts, read from its source by `ast`; nothing of it is imported.

Names, types, choices and constant defaults only: help texts are read for the words "deprecated" and "use --x"
and not kept.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SCALARS = {"int": "int", "float": "float", "str": "str", "Path": "str"}
UNKNOWN = object()


class Found(NamedTuple):
    """A definition and the module that it stands in."""

    node: ast.AST
    module: str


class Tree:
    """The modules of one unpacked package, by dotted name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parsed = cache(self._parsed)

    def path(self, module: str) -> Path | None:
        """The file of a module, if the package has it."""
        stem = self.root / module.replace(".", "/")
        return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)

    def _parsed(self, module: str) -> ast.Module:
        path = self.path(module)
        return ast.Module(body=[], type_ignores=[]) if path is None else ast.parse(path.read_text())

    def statements(self, module: str) -> Iterator[ast.stmt]:
        """Top-level statements; those under `if TYPE_CHECKING` first, for they name the real types."""
        body = self.parsed(module).body
        for node in body:
            if isinstance(node, ast.If | ast.Try):
                yield from node.body
        yield from body

    def find(self, name: str, module: str, depth: int = 0) -> Found | None:
        """The class or value that a name stands for in a module, through its imports."""
        if depth > 8:
            return None
        for node in self.statements(module):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Found(node, module)
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == name for t in node.targets
            ):
                return Found(node.value, module)
            if isinstance(node, ast.AnnAssign) and node.value is not None and _name(node.target) == name:
                return Found(node.value, module)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = _absolute(node, module, self.path(module))
                        return self.find(alias.name, source, depth + 1)
        return None

    def value(self, node: ast.AST | None, module: str) -> Any:
        """A constant expression's value, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._items(node.elts, module)
        if isinstance(node, ast.Dict):
            keys = [self.value(key, module) for key in node.keys]
            return UNKNOWN if UNKNOWN in keys else keys
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, module)
            return -value if isinstance(value, int | float) else UNKNOWN
        if isinstance(node, ast.BinOp):
            return self._sum(node, module)
        if isinstance(node, ast.Subscript) and _name(node.value) == "Literal":
            return self._items(_elements(node.slice), module)
        if isinstance(node, ast.Call):
            return self._call(node, module)
        if isinstance(node, ast.Name):
            found = self.find(node.id, module)
            return UNKNOWN if found is None else self._named(found)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = self.find(node.value.id, module)
            if found is not None and isinstance(found.node, ast.ClassDef):
                return self.field_default(found, node.attr)
        return UNKNOWN

    def _named(self, found: Found) -> Any:
        if not isinstance(found.node, ast.ClassDef):
            return self.value(found.node, found.module)
        names = [n for n, _, _ in self.members(found)]
        return [name.lower() for name in names] if names else UNKNOWN

    def _items(self, nodes: list[ast.expr], module: str) -> Any:
        items: list[Any] = []
        for node in nodes:
            inner = node.value if isinstance(node, ast.Starred) else node
            value = self.value(inner, module)
            if value is UNKNOWN:
                return UNKNOWN
            items += value if isinstance(value, list) else [value]
        return items

    def _sum(self, node: ast.BinOp, module: str) -> Any:
        if isinstance(node.op, ast.BitOr):
            return self._items([node.left, node.right], module)
        left, right = self.value(node.left, module), self.value(node.right, module)
        if UNKNOWN in (left, right):
            return UNKNOWN
        operations = {ast.Add: lambda: left + right, ast.Mult: lambda: left * right}
        done = operations.get(type(node.op))
        return UNKNOWN if done is None else done()

    def _call(self, node: ast.Call, module: str) -> Any:
        name = _name(node.func)
        if name in ("list", "get_args", "sorted", "tuple", "set") and len(node.args) == 1:
            return self.value(node.args[0], module)
        if name == "keys" and isinstance(node.func, ast.Attribute):
            return self.value(node.func.value, module)
        if name in ("Field", "field", "FieldInfo"):
            given = {k.arg: k.value for k in node.keywords}
            factory = given.get("default_factory")
            if factory is not None:
                return [] if _name(factory) == "list" else UNKNOWN
            return self.value(given.get("default", node.args[0] if node.args else None), module)
        return UNKNOWN

    def members(self, found: Found) -> Iterator[tuple[str, ast.expr | None, str]]:
        """(name, annotation, module) of a class's fields, bases first; plain assignments have none."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            parent = self.find(_name(base), found.module)
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                yield from self.members(parent)
        for node in found.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id, node.annotation, found.module
            elif isinstance(node, ast.Assign) and not _name(node.targets[0]).startswith("_"):
                yield _name(node.targets[0]), None, found.module

    def field_default(self, found: Found, name: str) -> Any:
        """A class field's constant default, or UNKNOWN."""
        assert isinstance(found.node, ast.ClassDef)
        for node in found.node.body:
            target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
            if isinstance(target, ast.Name) and target.id == name:
                return self.value(getattr(node, "value", None), found.module)
        for base in found.node.bases:
            parent = self.find(_name(base), found.module)
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                value = self.field_default(parent, name)
                if value is not UNKNOWN:
                    return value
        return UNKNOWN

    # --- types

    def kind(self, annotation: ast.expr, module: str) -> dict[str, Any]:
        """`type`, `choices`, `many` and `keys` of an annotation, as the packages' own parsers map them."""
        parts = list(self._parts(annotation, module))
        names = {name for name, _ in parts}
        literals = [c for name, c in parts if name == "literal" and c is not UNKNOWN]
        if "record" in names:
            return {"type": "json", "keys": next(keys for name, keys in parts if name == "record")}
        if "bool" in names:
            return {"type": "value_or_bool"} if names == {"bool", "str"} else {"type": "bool"}
        if literals:
            choices = sorted({c for group in literals for c in group}, key=str)
            first = type(choices[0]).__name__
            # Beside a plain str the list is open: plugins register more.
            return {"type": SCALARS.get(first, "str"), "known" if "str" in names else "choices": choices}
        members = next((inner for name, inner in parts if name == "enum"), None)
        if members:
            return {"type": "str", "choices": members, "folds": True}
        for name, inner in parts:
            if name == "many":
                return {"type": inner, "many": True}
        for name in ("int", "float", "dict"):
            if name in names:
                return {"type": {"dict": "json"}.get(name, name)}
        return {"type": "str"}

    def _parts(self, node: ast.expr, module: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            yield from self._parts(node.left, module)
            yield from self._parts(node.right, module)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(node, module)
        elif isinstance(node, ast.Constant) and node.value is None:
            return
        else:
            yield from self._plain(_name(node), module)

    def _subscript(self, node: ast.Subscript, module: str) -> Iterator[tuple[str, Any]]:
        head, inner = _name(node.value), _elements(node.slice)
        if head in ("Annotated", "A", "SkipValidation"):
            yield from self._parts(inner[0], module)
        elif head in ("Optional", "Union"):
            for part in inner:
                yield from self._parts(part, module)
        elif head == "Literal":
            yield "literal", self._items(inner, module)
        elif head.lower() in ("list", "tuple", "set", "sequence"):
            kinds = {name for name, _ in self._parts(inner[0], module)}
            yield "many", next((k for k in ("int", "float") if kinds == {k}), "str")
        elif head.lower() in ("dict", "mapping"):
            yield "dict", None
        else:
            yield from self._plain(head, module)

    def _plain(self, name: str, module: str) -> Iterator[tuple[str, Any]]:
        if name in SCALARS or name in ("bool", "dict", "Any"):
            yield SCALARS.get(name, name), None
        elif name in ("list", "List"):
            yield "many", "str"
        elif name not in ("None", "NoneType"):
            found = self.find(name, module)
            if found is None:
                yield "other", None
            elif not isinstance(found.node, ast.ClassDef):
                yield from self._parts(found.node, found.module)  # type: ignore[arg-type]
            elif _is_record(found.node):
                yield "record", [n for n, a, _ in self.members(found) if a is not None and n[0] != "_"]
            elif "dict" in {_name(base) for base in found.node.bases}:
                yield "dict", None
            elif "Enum" in {_name(base) for base in found.node.bases}:
                yield "enum", sorted(n for n, hint, _ in self.members(found) if hint is None and n.isupper())
            else:
                yield "other", None


def _is_record(node: ast.ClassDef) -> bool:
    decorators = {_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    return bool(decorators & {"config", "dataclass"})


def _absolute(node: ast.ImportFrom, module: str, path: Path | None) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (path is not None and path.name == "__init__.py")
    return ".".join(parts[:keep] + ([node.module] if node.module else []))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


# --- add_argument


def argument_calls(tree: Tree, module: str, function: str, owner: str | None = None) -> list[ast.Call]:
    """Every `add_argument` call in functions of a name, of one class or of the whole module."""
    top: ast.AST = tree.parsed(module)
    if owner is not None:
        top = next(n for n in ast.walk(top) if isinstance(n, ast.ClassDef) and n.name == owner)
    wanted = [n for n in ast.walk(top) if isinstance(n, ast.FunctionDef) and n.name == function]
    return [
        node
        for one in wanted
        for node in ast.walk(one)
        if isinstance(node, ast.Call) and _name(node.func) == "add_argument"
    ]


def read_call(tree: Tree, call: ast.Call, module: str) -> dict[str, Any] | None:
    """One flag of an `add_argument` call with literal names; None for a positional or computed name."""
    names = [tree.value(arg, module) for arg in call.args]
    if not names or not all(isinstance(n, str) and n.startswith("-") for n in names):
        return None
    given = {k.arg: k.value for k in call.keywords if k.arg}
    flag = {**named(names), **_call_type(tree, given, module)}
    choices = tree.value(given.get("choices"), module)
    if isinstance(choices, list) and choices:
        flag["choices"] = sorted({c for c in choices if c is not None}, key=str)
    _add_default(flag, tree.value(given.get("default"), module))
    return {**flag, **deprecation(tree, given, module)}


def named(names: list[str]) -> dict[str, Any]:
    """The longest name first of those with two dashes as written, the others as aliases."""
    long = [n for n in names if n.startswith("--")] or names
    rest = [n for n in names if n != long[0]]
    return {"name": long[0], **({"aliases": rest} if rest else {})}


def _call_type(tree: Tree, given: dict[str, ast.expr], module: str) -> dict[str, Any]:
    action = given.get("action")
    text = action.value if isinstance(action, ast.Constant) else _name(action) if action else ""
    nargs = tree.value(given.get("nargs"), module) if "nargs" in given else None
    if text in ("store_true", "store_false", "store_const", "count") or "StoreTrue" in str(text):
        return {"type": "bool"}
    if text == "DeprecatedAction" and nargs in (0, None):
        return {"type": "bool"}
    if text == "BooleanOptionalAction":
        return {"type": "bool", "negatable": True}
    kind = given.get("type")
    name = _name(kind) if kind is not None and not isinstance(kind, ast.Call) else ""
    scalar = {"loads": "json"}.get(name, SCALARS.get(name, "str"))
    if nargs == "?":
        return {"type": scalar, "optional": True}
    return {"type": scalar, **({"many": True} if nargs in ("+", "*") or text == "append" else {})}


def _add_default(flag: dict[str, Any], default: Any) -> None:
    if default is not UNKNOWN and default is not None and not isinstance(default, bytes):
        flag["default"] = default


def deprecation(tree: Tree, given: dict[str, ast.expr], module: str) -> dict[str, Any]:
    """Whether a flag is deprecated, and what its parser says to write instead."""
    text = " ".join(
        n.value
        for n in ast.walk(given.get("help", ast.Constant("")))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )
    new = tree.value(given.get("new_flag"), module)
    head = re.match(r"\W*(?:this argument is |note: )?deprecated", text, re.IGNORECASE)
    action = _name(given["action"]) if "action" in given else ""
    if not (head or isinstance(new, str) or "Deprecated" in action or "deprecated" in given):
        return {}
    found: dict[str, Any] = {"deprecated": True}
    use = re.search(r"[Uu]se [`'\"]?(--[a-z0-9-]+)", text)
    if isinstance(new, str):
        found["renamed_to"] = new
    elif use:
        found["renamed_to"] = use.group(1)
    return found


def read_field(tree: Tree, owner: Found, name: str, annotation: ast.expr, module: str) -> dict[str, Any]:
    """Type, choices and default of one config field, without a name."""
    flag = tree.kind(annotation, module)
    if flag["type"] == "bool":
        flag["negatable"] = True
    _add_default(flag, tree.field_default(owner, name))
    return flag
