"""Write the flag inventories of `src/moesaic/interop/flags` from released packages.

    python scripts/flags.py vllm 0.33.0        # pip download into a temporary folder, read, delete
    python scripts/flags.py sglang 0.5.23 --wheel PATH

The packages are unpacked and read, never imported or installed. What is kept of a flag is its name, aliases,
type, choices, constant default, and whether it is deprecated and for what.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from flag_source import UNKNOWN, Tree, argument_calls, deprecation, named, read_call, read_field

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "src/moesaic/interop/flags"
PACKAGE = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-cpp-python", "kt": "sglang-kt",
    "nccl": "nvidia-nccl-cu12",
}  # fmt: skip
KEPT = (".py", "common/arg.cpp", "libnccl.so.2")
Flag = dict[str, Any]


def main() -> int:
    """Read one package and write its inventory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=sorted(PACKAGE))
    parser.add_argument("version")
    parser.add_argument("--wheel", type=Path, help="a file that is there already")
    parser.add_argument("--beside", type=Path, help="kt: the kt-kernel wheel, whose command is `kt`")
    given = parser.parse_args()
    package = PACKAGE[given.engine]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        unpack(given.wheel or download(package, given.version, root), root / "a")
        if given.engine == "kt":
            unpack(given.beside or download("kt-kernel", given.version, root), root / "b")
        found = READERS[given.engine](root)
    inventory = {"engine": given.engine, "version": given.version, "source": f"{package}=={given.version}"}
    write(OUTPUT / f"{given.engine}-{given.version}.json", {**inventory, **found})
    return 0


def download(package: str, version: str, folder: Path) -> Path:
    """The wheel of a release; the source archive where the sources are not in the wheel."""
    kind = "--no-binary" if package == "llama-cpp-python" else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", kind, ":all:", "-d", str(folder)]
    subprocess.run([*command, f"{package}=={version}"], check=True)
    return next(p for p in folder.iterdir() if p.name.lower().startswith(package.replace("-", "_")))


def unpack(archive: Path, folder: Path) -> None:
    """The source files of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            files.extractall(folder, [n for n in files.namelist() if n.endswith(KEPT)])
    else:
        with tarfile.open(archive) as files:
            chosen = [m for m in files.getmembers() if m.isfile() and m.name.endswith("common/arg.cpp")]
            files.extractall(folder, chosen, filter="data")


def write(path: Path, found: dict[str, Any]) -> None:
    """One flag and one variable a line, so that versions can be compared by diff."""
    flags = sorted(found.pop("flags", []), key=lambda flag: (flag["name"], flag.get("programs", [])))
    env = found.pop("env", {})
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}," for k, v in found.items()]
    lines += ['  "flags": [', ",\n".join(f"    {json.dumps(flag)}" for flag in flags), "  ],"]
    lines += [
        '  "env": {',
        ",\n".join(f"    {json.dumps(k)}: {json.dumps(env[k])}" for k in sorted(env)),
        "  }",
    ]
    path.write_text("{\n" + "\n".join(lines) + "\n}\n")
    print(f"{path.name}: {len(flags)} flags, {len(env)} variables", file=sys.stderr)


def unique(flags: list[Flag | None]) -> list[Flag]:
    """The first flag of each name."""
    found: dict[str, Flag] = {}
    for flag in flags:
        if flag is not None:
            found.setdefault(flag["name"], flag)
    return list(found.values())


# --- vLLM

VLLM_REGISTRIES = {
    "--tool-call-parser": ("_TOOL_PARSERS_TO_REGISTER", ["vllm.tool_parsers"]),
    "--reasoning-parser": ("_REASONING_PARSERS_TO_REGISTER", ["vllm.reasoning"]),
}
FRONT = [f"vllm.entrypoints.{room}.cli_args" for room in ("common", "launchers", "openai")]


def read_vllm(root: Path) -> dict[str, Any]:
    """`vllm serve`: engine flags from config classes, front-end flags from theirs."""
    tree = Tree(root / "a")
    engine = "vllm.engine.arg_utils"
    front = next(m for m in FRONT if tree.path(m) and "class FrontendArgs" in ast.unparse(tree.parsed(m)))
    flags: list[Flag | None] = []
    for owner in ("EngineArgs", "AsyncEngineArgs"):
        flags += _config_flags(tree, engine, owner)
    flags += [read_call(tree, call, front) for call in argument_calls(tree, front, "make_arg_parser")]
    flags += _front_flags(tree, front)
    serve = "vllm.entrypoints.cli.serve"
    flags += [read_call(tree, call, serve) for call in argument_calls(tree, serve, "subparser_init")]
    actions = next(
        (m for m in ("vllm.utils.argparse_utils", "vllm.utils.__init__") if tree.path(m)), "vllm.utils"
    )
    pairs = any(
        isinstance(n, ast.ClassDef) and n.name == "EnableDisableAction"
        for n in ast.walk(tree.parsed(actions))
    )
    for flag in flags:
        _negate(flag, pairs)
        if flag is not None and flag["name"] == "--attention-backend" and "choices" in flag:
            flag["choices"] = ["auto", *flag["choices"]]  # read before the names of the enumeration
    _registered(tree, flags, VLLM_REGISTRIES, "known")
    files = [engine, front, "vllm.envs"]
    return {"basis": "parser", "files": files, "flags": unique(flags), "env": _vllm_env(tree)}


def _config_flags(tree: Tree, module: str, owner: str) -> list[Flag | None]:
    """`group.add_argument("--x", **model_kwargs["x"])`, where model_kwargs = get_kwargs(ModelConfig)."""
    top = next(n for n in ast.walk(tree.parsed(module)) if isinstance(n, ast.ClassDef) and n.name == owner)
    add = next(n for n in top.body if isinstance(n, ast.FunctionDef) and n.name == "add_cli_args")
    configs, removed, types, renamed = {}, {}, {}, {}
    for node in ast.walk(add):
        is_call = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if is_call and ast.unparse(node.value.func) == "get_kwargs":
            configs[ast.unparse(node.targets[0])] = ast.unparse(node.value.args[0])
        match ast.unparse(node) if isinstance(node, ast.Expr | ast.Assign) else "":
            case text if found := re.match(r"(\w+) = (\w+_kwargs\['\w+'\])$", text):
                renamed[found[1]] = found[2]
            case text if found := re.match(r"(\w+)\['(\w+)'\]\['choices'\]\.remove\((.*)\)$", text):
                removed[found[1], found[2]] = tree.value(ast.parse(found[3], mode="eval").body, module)
            case text if found := re.match(
                r"(\w+)\['(\w+)'\]\['type'\] = (.*)$", _unnamed(text, renamed), re.DOTALL
            ):
                folds = "lower().replace('-', '_')" in found[3]
                types[found[1], found[2]] = (
                    "json" if "json.loads" in found[3] else "folds" if folds else "str"
                )
    flags = []
    for call in argument_calls(tree, module, "add_cli_args", owner):
        spread = next((k.value for k in call.keywords if k.arg is None), None)
        text = "" if spread is None else _unnamed(ast.unparse(spread), renamed)
        found = re.search(r"(\w+_kwargs)\['(\w+)'\]", text)
        if found is None or found[1] not in configs:
            flags.append(read_call(tree, call, module))
            continue
        names = [tree.value(arg, module) for arg in call.args]
        flag = {**named(names), **_of_config(tree, configs[found[1]], found[2], module)}
        key = found[1], found[2]
        if types.get(key) == "folds":  # the value is folded before it is looked up
            flag["folds"] = True
        elif key in types:
            flag = {k: v for k, v in flag.items() if k not in ("keys", "choices")} | {"type": types[key]}
        if key in removed:
            flag["choices"] = [c for c in flag["choices"] if c != removed[key]]
        flags.append(flag | deprecation(tree, {k.arg: k.value for k in call.keywords if k.arg}, module))
    return flags


def _unnamed(text: str, renamed: dict[str, str]) -> str:
    """`moe_backend_kwargs`, assigned from `kernel_kwargs['moe_backend']`, as what it was assigned from."""
    return re.sub(r"^\w+", lambda name: renamed.get(name[0], name[0]), text)


def _of_config(tree: Tree, class_name: str, field: str, module: str) -> Flag:
    owner = tree.find(class_name, module)
    assert owner is not None, class_name
    annotations = {name: (hint, where) for name, hint, where in tree.members(owner) if hint is not None}
    hint, where = annotations[field]
    flag = read_field(tree, owner, field, hint, where)
    return {k: v for k, v in flag.items() if v is not UNKNOWN}


def _registered(
    tree: Tree, flags: list[Flag | None], registries: dict[str, tuple[str, list[str]]], key: str
) -> None:
    """Values of flags whose parser asks a registry: the keys of a dict literal somewhere else."""
    for flag in flags:
        expression, modules = registries.get(flag["name"] if flag else "", ("", []))
        for module in modules:
            found = tree.value(ast.parse(expression, mode="eval").body, module)
            if flag is not None and isinstance(found, list) and found:
                flag.setdefault(key, sorted(found))


def _front_flags(tree: Tree, module: str) -> list[Flag | None]:
    owner = tree.find("FrontendArgs", module)
    assert owner is not None
    source = ast.unparse(tree.parsed(module))
    flags: list[Flag | None] = []
    for name, hint, where in tree.members(owner):
        if hint is None:
            continue
        flag = {"name": f"--{name.replace('_', '-')}", **read_field(tree, owner, name, hint, where)}
        if re.search(rf"\['{name}'\]\['type'\] = json\.loads", source):
            flag = {"name": flag["name"], "type": "json"}
        flags.append(flag)
    return flags


def _negate(flag: Flag | None, pairs: bool) -> None:
    """Write out the names that switch a flag off, by the rules of BooleanOptionalAction."""
    if flag is None or not flag.pop("negatable", False):
        return
    names = [n for n in (flag["name"], *flag.get("aliases", [])) if n.startswith("--")]
    off = [f"--no-{n[2:]}" for n in names]
    if pairs:
        swap = {"--enable-": "--disable-", "--disable-": "--enable-"}
        off += [new + n[len(old) :] for n in names for old, new in swap.items() if n.startswith(old)]
    flag["off"] = off


def _vllm_env(tree: Tree) -> dict[str, Any]:
    module = "vllm.envs"
    declared: dict[str, Any] = {}
    names: list[str] = []
    for node in tree.statements(module):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id == "environment_variables":
                assert isinstance(node.value, ast.Dict)
                names = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            else:
                declared[node.target.id] = {"type": tree.kind(node.annotation, module)["type"]}
                default = tree.value(node.value, module)
                if default is not UNKNOWN and default is not None:
                    declared[node.target.id]["default"] = default
    return {name: declared.get(name, {"type": "str"}) for name in names if name.startswith("VLLM_")}


# --- SGLang and KTransformers' fork of it


SGLANG_REGISTRIES = {
    "--tool-call-parser": (
        "FunctionCallParser.ToolCallParserEnum", ["sglang.srt.function_call.function_call_parser"],
    ),
    "--reasoning-parser": (
        "ReasoningParser.DetectorMap", ["sglang.srt.parser.reasoning_parser"],
    ),
}  # fmt: skip


def read_sglang(root: Path) -> dict[str, Any]:
    """`sglang.launch_server`: a list of add_argument calls, or of annotated fields in newer releases."""
    tree = Tree(root / "a")
    module = "sglang.srt.server_args"
    flags = [
        read_call(tree, call, module) for call in argument_calls(tree, module, "add_cli_args", "ServerArgs")
    ]
    fields = root / "a/sglang/srt/arg_groups/fields"
    for path in sorted(fields.glob("*.py")):
        flags += _annotated(tree, f"sglang.srt.arg_groups.fields.{path.stem}")
    for flag in flags:
        _negate(flag, pairs=False)
    _registered(tree, flags, SGLANG_REGISTRIES, "choices")
    takes_auto = "choices=['auto'] +" in ast.unparse(tree.parsed(module))
    for flag in flags:
        if takes_auto and flag is not None and flag["name"] in SGLANG_REGISTRIES and "choices" in flag:
            flag["choices"] = ["auto", *flag["choices"]]
    files = [module] + (["sglang.srt.arg_groups.fields"] if fields.is_dir() else [])
    files.append("sglang.srt.environ")
    return {"basis": "parser", "files": files, "flags": unique(flags), "env": _sglang_env(tree)}


def _annotated(tree: Tree, module: str) -> list[Flag | None]:
    flags: list[Flag | None] = []
    for node in ast.walk(tree.parsed(module)):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.annotation, ast.Subscript):
            continue
        if ast.unparse(node.annotation.value) != "A" or not isinstance(node.target, ast.Name):
            continue
        hint, *rest = node.annotation.slice.elts  # type: ignore[attr-defined]
        meta = next(
            (r for r in rest if isinstance(r, ast.Call | ast.Constant | ast.JoinedStr | ast.BinOp)), None
        )
        given: dict[str, ast.expr] = {}
        if isinstance(meta, ast.Call):
            if ast.unparse(meta.func) != "Arg":
                continue
            given = {k.arg: k.value for k in meta.keywords if k.arg}
        if tree.value(given.get("no_cli"), module) is True:
            continue
        flags.append(_annotated_flag(tree, node, hint, given, module))
    return flags


def _annotated_flag(
    tree: Tree, node: ast.AnnAssign, hint: ast.expr, given: dict[str, ast.expr], module: str
) -> Flag:
    assert isinstance(node.target, ast.Name)
    name = tree.value(given.get("cli_name"), module)
    name = name if isinstance(name, str) else f"--{node.target.id.replace('_', '-')}"
    aliases = tree.value(given.get("aliases"), module)
    flag = {
        "name": name,
        **({"aliases": aliases} if isinstance(aliases, list) else {}),
        **tree.kind(hint, module),
    }
    flag.pop("keys", None)
    if "type_parser" in given:
        parser = ast.unparse(given["type_parser"])
        flag.pop("many", None)
        flag["type"] = "json" if "json" in parser else "str"
    choices = tree.value(given.get("choices"), module)
    if isinstance(choices, list) and choices:
        flag["choices"] = sorted({c for c in choices if c is not None}, key=str)
    nargs = tree.value(given.get("nargs"), module)
    if nargs in ("+", "*"):
        flag["many"] = True
    elif nargs == "?":
        flag["optional"] = True
    if "action" in given and "StoreTrue" in ast.unparse(given["action"]):
        flag["type"] = "bool"
    elif "action" in given and "BooleanOptionalAction" in ast.unparse(given["action"]):
        flag["negatable"] = True
    default = tree.value(node.value, module)
    if default is not UNKNOWN and default is not None:
        flag["default"] = default
    return flag | deprecation(tree, given, module)


def _sglang_env(tree: Tree) -> dict[str, Any]:
    """Fields of `class Envs` with type and default, and every other name that the package mentions."""
    env: dict[str, Any] = {}
    for path in tree.root.glob("sglang/**/*.py"):
        for name in re.findall(r"[\"'](SGL(?:ANG)?_[A-Z0-9_]*[A-Z0-9])[\"']", path.read_text()):
            env.setdefault(name, {"type": "str"})
    found = tree.find("Envs", "sglang.srt.environ")
    for node in getattr(found.node, "body", []) if found else []:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = ast.unparse(node.value.func).removeprefix("Env").lower()
            name = node.targets[0].id  # type: ignore[attr-defined]
            if kind in ("int", "float", "bool", "str") and name.startswith("SGL"):
                env[name] = {"type": kind}
                default = tree.value(node.value.args[0] if node.value.args else None, "sglang.srt.environ")
                if default is not UNKNOWN and default is not None:
                    env[name]["default"] = default
    return env


def read_kt(root: Path) -> dict[str, Any]:
    """The fork's launch_server, and `kt run`, which passes on what it does not know."""
    found = read_sglang(root)
    tree = Tree(root / "b")
    module = "kt_kernel.cli.commands.run"
    for node in ast.walk(tree.parsed(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.option":
            found["flags"].append({**_click_option(tree, node, module), "programs": ["run"]})
    found["files"].append(f"{module} of kt-kernel")
    return found


def _click_option(tree: Tree, call: ast.Call, module: str) -> Flag:
    names = [n for arg in call.args if (n := tree.value(arg, module)).startswith("-")]
    given = {k.arg: k.value for k in call.keywords if k.arg}
    if tree.value(given.get("is_flag"), module) is True:
        return {**named(names), "type": "bool"}
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    many = {"many": True} if "multiple" in given else {}
    return {**named(names), "type": kind if kind in ("int", "float") else "str", **many}


# --- llama.cpp

_STRING = r'"((?:[^"\\]|\\.)*)"'
PROGRAMS = {"SERVER": "server", "CLI": "cli", "MAIN": "cli", "COMPLETION": "completion"}


def read_llamacpp(root: Path) -> dict[str, Any]:
    """Every `add_opt(common_arg(...))` of common/arg.cpp."""
    path = next(root.glob("a/**/common/arg.cpp"))
    text = path.read_text()
    flags, env = [], {}
    for start in re.finditer(r"add_opt\(common_arg\(", text):
        body = _balanced(text, start.end() - 1)
        rest = text[
            start.end() - 1 + len(body) : text.index("add_opt", start.end())
            if "add_opt" in text[start.end() :]
            else None
        ]
        chain = rest[: rest.find("));") + 1] if "));" in rest else rest[: rest.find(";")]
        flag, variable = _llama_flag(body, chain)
        if flag is not None:
            flags.append(flag)
            if variable:
                env[variable] = {"type": flag["type"], "flag": flag["name"]}
    return {"basis": "parser", "files": ["vendor/llama.cpp/common/arg.cpp"], "flags": flags, "env": env}


def _balanced(text: str, start: int) -> str:
    """From an opening parenthesis to the one that closes it, strings skipped."""
    depth, position, is_text = 0, start, False
    while position < len(text):
        char = text[position]
        if is_text:
            position += char == "\\"
            is_text = char != '"'
        elif char == '"':
            is_text = True
        elif char == "'" and text[position + 2 : position + 3] == "'":
            position += 2
        else:
            depth += (char in "({[") - (char in ")}]")
            if depth == 0:
                return text[start : position + 1]
        position += 1
    raise ValueError(text[start : start + 80])


BOOLEAN_WORDS = {
    "is_truthy": ("on", "enabled", "true", "1"), "is_falsey": ("off", "disabled", "false", "0"),
    "is_autoy": ("auto", "-1"),
}  # fmt: skip
_ELSEWHERE = re.compile(r"throw[^;]*;|is_\w+\(value\)|\((?=value ==)")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _accepted(code: str) -> list[str]:
    """The words of a handler that compares its value with words and throws at any other."""
    if "kv_cache_type_from_str(value)" in code:
        return list(CACHE_TYPES)
    if "throw" not in code or re.search(r"[(=] ?value\b(?! ==)", _ELSEWHERE.sub("", code)):
        return []
    words = [word for word in re.findall(r'value == "([^"]*)"', code) if word]
    for name, meant in BOOLEAN_WORDS.items():
        words += meant if f"{name}(value)" in code else ()
    return words


def _llama_flag(body: str, chain: str) -> tuple[Flag | None, str | None]:
    head, _, code = body.partition("](")
    groups = re.match(r"\(\s*(\{[^{}]*\})\s*,\s*(\{[^{}]*\})?\s*,?\s*(.*)", head, re.DOTALL)
    if groups is None:
        return None, None
    names = re.findall(_STRING, groups[1])
    flag = named(names)
    if groups[2]:
        flag["off"] = re.findall(_STRING, groups[2])
    signature = code[: code.find(")")]
    hint = re.match(rf"\s*{_STRING}\s*,", groups[3])
    if groups[2] or ("value" not in code[:200] and "," not in signature):
        flag["type"] = "bool"
    else:
        flag["type"] = "int" if re.search(r",\s*int\s", signature) else "str"
        if signature.count("std::string") == 2:
            flag["values"] = 2
        options = re.fullmatch(r"[\[{<]([a-z0-9_+|,-]+)[\]}>]", hint[1]) if hint else None
        if options and re.search(r"[|,]", options[1]):
            flag["choices"] = re.split(r"[|,]", options[1])
        if accepted := _accepted(code):
            flag["choices"] = list(dict.fromkeys([*flag.get("choices", []), *accepted]))
    if flag["type"] == "bool" and hint and not groups[2] and "value" in signature:
        flag["type"] = "str"
    if "arg_removed" in code:  # still parsed, to say so
        flag["removed"] = True
    if re.search(r"deprecated", groups[3], re.IGNORECASE):
        flag["deprecated"] = True
    examples = re.search(r"set_examples\(\{([^}]*)\}", chain)
    if examples and "COMMON" not in examples[1]:
        used = re.findall(r"LLAMA_EXAMPLE_(\w+)", examples[1])
        flag["programs"] = sorted({PROGRAMS.get(u, u.lower()) for u in used})
    variable = re.search(r'set_env\("(\w+)"\)', chain)
    return flag, variable[1] if variable else None


# --- NCCL


def read_nccl(root: Path) -> dict[str, Any]:
    """The variables that the library names: it has no list of them, so the binary's strings are read."""
    binary = next(root.glob("a/**/libnccl.so.2")).read_bytes()
    names = {m.decode() for m in re.findall(rb"\x00(NCCL_[A-Z0-9_]{2,60})(?=\x00)", binary)}
    return {"basis": "binary", "files": ["nvidia/nccl/lib/libnccl.so.2"], "env": {name: {} for name in names}}


READERS = {
    "vllm": read_vllm, "sglang": read_sglang, "kt": read_kt, "llamacpp": read_llamacpp, "nccl": read_nccl,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
