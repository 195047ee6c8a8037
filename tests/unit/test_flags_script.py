"""The reader of other engines' parsers, on packages made up here: nothing is imported or downloaded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("flags")
    finally:
        sys.path.remove(str(SCRIPTS))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def by_name(found: dict) -> dict:
    return {flag["name"]: flag for flag in found["flags"]}


VLLM = {
    "vllm/config/__init__.py": "from vllm.config.parallel import ParallelConfig",
    "vllm/config/parallel.py": """
from typing import Literal
Backend = Literal["a", "b", "hidden"]
Known = Literal["own", "other"]
class Kernel(Enum):
    FAST_ONE = "x"
    SLOW = "y"
HIDDEN = "hidden"
@config
class BalanceConfig:
    window: int = 1000
    policy: str = "default"
@config
class ParallelConfig:
    tensor_parallel_size: int = Field(default=1, ge=1)
    enable_balance: bool = False
    backend: Backend = "a"
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    names: list[str] | None = None
    share: float | None = 0.5
    open: Known | str = "own"
    kernel: Kernel | None = None
    folded: Known = "own"
""",
    "vllm/engine/arg_utils.py": """
from vllm.config import ParallelConfig
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        parallel_kwargs = get_kwargs(ParallelConfig)
        parallel_kwargs["backend"]["choices"].remove(HIDDEN)
        group = parser.add_argument_group()
        group.add_argument("--tensor-parallel-size", "-tp", **parallel_kwargs["tensor_parallel_size"])
        group.add_argument("--enable-balance", **parallel_kwargs["enable_balance"])
        group.add_argument("--backend", **parallel_kwargs["backend"])
        group.add_argument("--balance-config", **parallel_kwargs["balance"])
        group.add_argument("--names", **parallel_kwargs["names"])
        group.add_argument("--share", **parallel_kwargs["share"])
        group.add_argument("--open", **parallel_kwargs["open"])
        group.add_argument("--kernel", **parallel_kwargs["kernel"])
        folded_kwargs = parallel_kwargs["folded"]
        folded_kwargs["type"] = lambda s: s.lower().replace("-", "_")
        group.add_argument("--folded", **folded_kwargs)
class AsyncEngineArgs(EngineArgs):
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--old", action="store_true", help="Deprecated. Use --new instead.")
from vllm.config.parallel import HIDDEN
""",
    "vllm/entrypoints/openai/cli_args.py": """
@config
class FrontendArgs:
    port: int = 8000
    allowed_origins: list[str] = field(default_factory=list)
    def add_cli_args(parser):
        frontend_kwargs["allowed_origins"]["type"] = json.loads
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true", default=False)
    parser.add_argument("--tool-call-parser", type=str)
""",
    "vllm/tool_parsers/__init__.py": '_TOOL_PARSERS_TO_REGISTER = {"hermes": ("a", "A"), "b": ("b", "B")}',
    "vllm/envs.py": """
if TYPE_CHECKING:
    VLLM_SIZE: int = 60
environment_variables = {}
environment_variables: dict = {"VLLM_SIZE": lambda: 1, "HOME": lambda: 2}
""",
}


def test_config_classes_become_flags(script, tmp_path):
    found = script.read_vllm(write(tmp_path, VLLM))
    flags = by_name(found)
    assert flags["--tensor-parallel-size"] == {
        "name": "--tensor-parallel-size", "aliases": ["-tp"], "type": "int", "default": 1,
    }  # fmt: skip
    assert flags["--enable-balance"]["off"] == ["--no-enable-balance"]
    assert flags["--backend"]["choices"] == ["a", "b"]
    assert (flags["--balance-config"]["type"], flags["--balance-config"]["keys"]) == (
        "json", ["window", "policy"],
    )  # fmt: skip
    assert flags["--names"] == {"name": "--names", "type": "str", "many": True}
    assert flags["--share"]["type"] == "float"
    assert (flags["--open"]["known"], "choices" in flags["--open"]) == (["other", "own"], False)
    assert (flags["--kernel"]["choices"], flags["--kernel"]["folds"]) == (["FAST_ONE", "SLOW"], True)
    assert (flags["--folded"]["choices"], flags["--folded"]["folds"]) == (["other", "own"], True)
    assert flags["--tool-call-parser"]["known"] == ["b", "hermes"]
    assert (flags["--old"]["deprecated"], flags["--old"]["renamed_to"]) == (True, "--new")
    assert (flags["--port"]["default"], flags["--allowed-origins"]["type"]) == (8000, "json")
    assert "model_tag" not in flags
    assert found["env"] == {"VLLM_SIZE": {"type": "int", "default": 60}}


def test_annotated_fields_and_calls_become_flags(script, tmp_path):
    files = {
        "sglang/srt/server_args.py": """
CHOICES = ["x", "y"]
class ServerArgs:
    size: int = 4
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--size", "--n", type=int, default=ServerArgs.size, choices=CHOICES + ["z"])
        parser.add_argument("--gone", action=DeprecatedAction, help="gone")
        parser.add_argument("--reasoning-parser", type=str, choices=["auto"] + _parsers())
""",
        "sglang/srt/parser/reasoning_parser.py": """
class ReasoningParser:
    DetectorMap: Dict[str, Type] = {"deepseek-r1": A, "qwen3": B}
""",
        "sglang/srt/arg_groups/fields/parallel.py": """
class Parallel:
    tp_size: A[int, Arg(help="h", aliases=["--tensor-parallel-size"])] = 1
    mode: A[Literal["auto", "on"], "h"] = "auto"
    hidden: A[bool, Arg(help="h", no_cli=True)] = False
    fast: A[bool, "h"] = False
    rank: A[int, NS("x")] = 0
""",
        "sglang/srt/environ.py": """
class Envs:
    SGLANG_SIZE = EnvInt(128)
""",
        "sglang/srt/other.py": 'os.getenv("SGLANG_OTHER")',
    }
    found = script.read_sglang(write(tmp_path, files))
    flags = by_name(found)
    assert flags["--size"] == {
        "name": "--size", "aliases": ["--n"], "type": "int", "choices": ["x", "y", "z"], "default": 4,
    }  # fmt: skip
    assert flags["--gone"]["deprecated"]
    assert flags["--reasoning-parser"]["choices"] == ["auto", "deepseek-r1", "qwen3"]
    assert flags["--tp-size"]["aliases"] == ["--tensor-parallel-size"]
    assert flags["--mode"]["choices"] == ["auto", "on"]
    assert flags["--fast"]["type"] == "bool"
    assert "--hidden" not in flags
    assert found["env"]["SGLANG_SIZE"] == {"type": "int", "default": 128}
    assert "SGLANG_OTHER" in found["env"]


def test_common_args_become_flags(script, tmp_path):
    text = r"""
    add_opt(common_arg(
        {"-c", "--ctx-size"}, "N",
        string_format("size (of the prompt, \"0\")"),
        [](common_params & params, int value) { params.n = value; }
    ).set_env("LLAMA_ARG_CTX_SIZE"));
    add_opt(common_arg(
        {"--jinja"}, {"--no-jinja"}, "template",
        [](common_params & params, bool value) { params.j = value; }
    ).set_examples({LLAMA_EXAMPLE_SERVER}));
    add_opt(common_arg(
        {"-fa", "--flash-attn"}, "[on|off|auto]", "set",
        [](common_params & params, const std::string & value) { char c = '('; }
    ));
    add_opt(common_arg(
        {"--fit"}, "[on|off]", "set",
        [](common_params & params, const std::string & value) {
            if (is_truthy(value)) { params.f = 1; } else if (is_falsey(value)) { params.f = 0; }
            else { throw std::runtime_error(value.c_str()); }
        }
    ));
    add_opt(common_arg(
        {"--load-mode"}, "MODE", "how",
        [](common_params & params, const std::string & value) {
            if (value == "mmap") { params.m = MMAP; } else if (value == "dio") { params.m = DIO; }
            else { throw std::invalid_argument("invalid value"); }
        }
    ));
    add_opt(common_arg(
        {"--layers"}, "N", "how many",
        [](common_params & params, const std::string & value) {
            if (value == "all") { params.n = -1; } else { params.n = std::stoi(value); }
            if (params.n < 0) { throw std::invalid_argument("invalid value"); }
        }
    ));
    add_opt(common_arg(
        {"--draft"}, "N", "the argument has been removed",
        [](common_params &, int) { arg_removed("use --other"); }
    ));
    add_opt(common_arg(
        {"--check"}, "check",
        [](common_params & params) { params.check = true; }
    ));
"""
    found = script.read_llamacpp(write(tmp_path, {"vendor/llama.cpp/common/arg.cpp": text}))
    flags = by_name(found)
    assert flags["--ctx-size"] == {"name": "--ctx-size", "aliases": ["-c"], "type": "int"}
    assert found["env"] == {"LLAMA_ARG_CTX_SIZE": {"type": "int", "flag": "--ctx-size"}}
    assert (flags["--jinja"]["off"], flags["--jinja"]["programs"]) == (["--no-jinja"], ["server"])
    assert flags["--flash-attn"]["choices"] == ["on", "off", "auto"]
    assert flags["--check"]["type"] == "bool"
    words = ["on", "off", "enabled", "true", "1", "disabled", "false", "0"]
    assert flags["--fit"]["choices"] == words
    assert flags["--load-mode"]["choices"] == ["mmap", "dio"]
    assert "choices" not in flags["--layers"]
    assert (flags["--draft"]["removed"], "removed" in flags["--check"]) == (True, False)
