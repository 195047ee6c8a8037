from __future__ import annotations

import json
import re

import pytest

from moesaic.errors import ConfigError
from moesaic.interop.inventory import ENGINES, FOLDER, choose, history, load, owners, versions

ALL = [tuple(path.stem.split("-", 1)) for path in sorted(FOLDER.glob("*.json"))]


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_an_inventory_holds_facts_only(engine, version):
    found = load(engine, version)
    assert (found.engine, found.version) == (engine, version)
    assert found.basis in ("parser", "documented", "binary")
    for flag in found.flags:
        assert flag.type in ("bool", "int", "float", "str", "json", "value_or_bool")
        assert all(re.fullmatch(r"--?[A-Za-z0-9][\w.-]*", name) for name in flag.names), flag.names
        assert flag.off == () or flag.type == "bool"
    text = (FOLDER / f"{engine}-{version}.json").read_text()
    assert "help" not in {key for flag in json.loads(text)["flags"] for key in flag}
    assert max(map(len, re.findall(r'"([^"]*)"', text))) < 120  # names and choices, no sentences


@pytest.mark.parametrize(
    ("engine", "version", "name", "type_", "default"),
    [
        ("vllm", "0.33.0", "-tp", "int", 1),
        ("vllm", "0.33.0", "--data-parallel-rpc-port", "int", None),
        ("vllm", "0.33.0", "--enable-eplb", "bool", False),
        ("vllm", "0.33.0", "--eplb-config", "json", None),
        ("vllm", "0.33.0", "--served-model-name", "str", None),
        ("vllm", "0.33.0", "--headless", "bool", False),
        ("vllm", "0.10.2", "--swap-space", "float", 4),
        ("sglang", "0.5.23", "--expert-parallel-size", "int", 1),
        ("sglang", "0.5.23", "--attn-dp-size", "int", 1),
        ("sglang", "0.4.10", "--enable-deepep-moe", "bool", None),
        ("llamacpp", "0.3.36", "-ncmoe", "int", None),
        ("llamacpp", "0.3.36", "--load-mode", "str", None),
        ("kt", "0.7.2", "--kt-gpu-experts-ratio", "float", None),
        ("trtllm", "1.2", "--ep_size", "int", None),
    ],
)
def test_flags_that_are_known_from_the_packages(engine, version, name, type_, default):
    flag = load(engine, version).find(name)
    assert flag is not None
    assert (flag.type, flag.default) == (type_, default)


def test_flags_that_are_gone_are_absent():
    assert [version for version, _ in history("vllm", "--num-redundant-experts")] == ["0.10.2"]
    assert choose("vllm").find("--expert-parallel-size") is None
    assert choose("sglang").find("--enable-ep-moe") is None
    assert choose("llamacpp").find("--no-mmap") is None
    assert load("llamacpp", "0.3.16").find("--no-mmap") is not None
    assert choose("kt").find("--kt-gpu-experts-ratio") is not None
    assert choose("sglang").find("--kt-gpu-experts-ratio") is None
    assert owners("--kt-gpu-experts-ratio") == ("kt",)


def test_two_releases_of_the_engines_that_rename():
    for engine in ("vllm", "sglang", "llamacpp"):
        assert len(versions(engine)) >= 2
    assert "pplx" in choose("vllm").check("--all2all-backend").choices
    assert "window_size" in choose("vllm").check("--eplb-config").keys
    assert choose("vllm").check("--enable-eplb").off == ("--no-enable-eplb", "--disable-eplb")
    assert load("vllm", "0.20.2").check("--enable-eplb").off == ("--no-enable-eplb",)
    assert choose("sglang").env["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"]["default"] == 128
    assert choose("nccl").env.keys() >= {"NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_ALGO"}
    assert "NCCL_BUFF_SIZE" not in choose("nccl").env


def test_names_are_found_by_the_rules_of_the_parser():
    vllm, trtllm = choose("vllm"), choose("trtllm")
    assert vllm.find("--tensor_parallel_size") == vllm.find("--tensor-parallel-size")
    assert trtllm.find("--tp-size") is None
    assert [flag.name for flag in vllm.beginning_with("--tensor-par")] == ["--tensor-parallel-size"]
    assert choose("llamacpp").beginning_with("--ctx-si") == ()
    assert choose("llamacpp").find("--port", "server") is not None
    with pytest.raises(ConfigError, match="did you mean --tensor-parallel-size"):
        vllm.check("--tensor-parallel-sizes")


def test_unknown_engines_and_versions_are_refused():
    with pytest.raises(ConfigError, match="did you mean vllm"):
        choose("vlm")
    with pytest.raises(ConfigError, match="there are 0"):
        choose("vllm", "latest")
    assert set(ENGINES) < {engine for engine, _ in ALL}
