import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.cli.main import build_app
from moesaic.errors import ConfigError
from moesaic.spec.topology import from_json

SAMPLES = Path(__file__).parents[2] / "samples"


def run(*arguments, given=None, verb="lint"):
    return CliRunner().invoke(build_app(verb), [verb, *arguments], input=given)


def test_a_wrong_line_is_exit_3_with_the_right_flag():
    shown = run("vllm serve m --tensor-parallel-size 8 --expert-parallel-size 8")
    assert shown.exit_code == 3, shown.output
    assert "vLLM 0.33.0, model m" in shown.output
    assert "--expert-parallel-size is SGLang's" in shown.output
    assert "instead: --enable-expert-parallel" in shown.output


def test_a_right_line_and_one_with_warnings_are_exit_0():
    clean = run("vllm serve m --tensor-parallel-size 8")
    assert (clean.exit_code, "nothing is wrong" in clean.output) == (0, True)
    warned = run("sglang serve --model-path m --disable-cuda-graph")
    assert (warned.exit_code, "warning" in warned.output) == (0, True)


def test_files_and_stdin_are_read(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("#!/bin/sh\nvllm serve m \\\n  --tp 8\n")
    assert run(str(path)).exit_code == 3
    assert run("-", given="vllm serve m -tp 8\n").exit_code == 0


def test_our_own_line_is_judged_by_our_own_options():
    assert run("moesaic serve demo --port 8000 --max-num-seqs 8").exit_code == 0
    assert run("python -m moesaic plan deepseek-v3 --machine h200x8x2 --isl 4096 --osl 1024").exit_code == 0
    for line, part in (
        ("moesaic serve demo --prot 80", "instead: --port"),
        ("moesaic serve demo --max-num-seq 8", "instead: --max-num-seqs"),  # vLLM's parser completes it
        ("moesaic serve demo --port many", "--port takes a whole number, not 'many'"),
        ("moesaic serve demo --tensor-parallel-size 4", "that is a flag of vLLM and SGLang"),
        ("moesaic serve demo twice", "twice belongs to no flag"),
        ("moesaic serve --port 80", "the line names no model: moesaic refuses to start"),
        ("moesaic serv demo", "moesaic has no verb 'serv'; did you mean serve?"),
        ("moesaic simulate feet", "did you mean fleet?"),
        ("moesaic simulate fleet --polcy x", "has no flag --polcy"),
    ):
        shown = run(line)
        assert (shown.exit_code, part in shown.output) == (3, True), shown.output


def test_json_has_the_promised_keys():
    [found] = json.loads(run("trtllm-serve m --tp_sise 8", "--json").output)
    assert set(found) == {"engine", "program", "version", "asked", "basis", "model", "findings"}
    assert (found["engine"], found["basis"]) == ("trtllm", "documented")
    [finding] = found["findings"]
    assert set(finding) == {"flag", "severity", "rule", "message", "suggestion"}
    assert (finding["severity"], finding["suggestion"]) == ("warning", "--tp_size")


def test_the_release_may_be_chosen_and_is_named():
    shown = run("vllm serve m --swap-space 4", "--version", "0.10.2")
    assert (shown.exit_code, "vLLM 0.10.2" in shown.output) == (0, True)
    assert "the nearest known release to 0.12.0" in run("vllm serve m", "--version", "0.12.0").output


def test_prompts_are_judged_by_what_they_lose(tmp_path):
    path = tmp_path / "requests.jsonl"
    rules = "Be kind and brief. " * 30

    def write(day):
        system = [{"role": "system", "content": f"Today is {day(i)}. {rules}"} for i in range(4)]
        lines = [{"messages": [one, {"role": "user", "content": "hi"}]} for one in system]
        path.write_text("\n".join(map(json.dumps, lines)))

    write(lambda i: f"2026-11-0{i + 1}")
    shown = run("--prompts", str(path))
    assert shown.exit_code == 3
    assert "date in messages[0].content" in shown.output
    counted = run("--prompts", str(path), "--model", "demo", "--json")
    assert json.loads(counted.output)["unit"] == "tokens"
    assert json.loads(counted.output)["hit_rate_after"] > json.loads(counted.output)["hit_rate"]
    write(lambda i: "a day")
    assert run("--prompts", str(path)).exit_code == 0


def test_all_to_all_is_judged_by_the_machine():
    path = str(SAMPLES / "alltoall_h100x8.txt")
    assert run("--all-to-all", path, "--machine", "h100x8").exit_code == 0
    slow = run("--all-to-all", path, "--machine", "h100x8", "--at-least", "400GB")
    assert (slow.exit_code, "slow" in slow.output) == (3, True)
    found = json.loads(run("--all-to-all", path, "--machine", "h800x8", "--json").output)
    assert (found["verdict"], found["peak"]) == ("impossible", 200e9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "lint takes one thing"),
        (["vllm serve m", "--prompts", "x"], "got 2 of them"),
        (["make coffee"], "no launch line of a known engine, only make"),
        (["--prompts", "/nowhere.jsonl"], "cannot be read"),
        (["--all-to-all", str(SAMPLES / "pcie4.txt"), "--machine", "h100x8"], "no line of sizes"),
        (["--all-to-all", str(SAMPLES / "alltoall_h100x8.txt")], "judged by the links of a --machine"),
        (["nosuch.sh"], "there is no such file"),
        (["/no/such/line"], "there is no such file"),
        (["/dev/zero"], "give a part of it"),
        ([""], "the line is empty"),
        (["vllm serve m", "--version", "next"], "is no version of vllm"),
        (["vllm serve m", "--model", "nosuch"], "nosuch"),
    ],
)
def test_bad_input_is_named(arguments, message):
    refused = run(*arguments)
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)


def test_damaged_prompts_name_the_line(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    refused = run("--prompts", str(path))
    assert "line 2: not valid JSON" in str(refused.exception)


def test_inspect_shows_a_node_and_keeps_it(tmp_path):
    shown = run(str(SAMPLES / "h100x8.txt"), verb="inspect")
    assert "8 GPUs, 10 network adapters" in shown.output
    assert "GPU1        nearest adapter mlx5_3 over PXB" in shown.output
    path = tmp_path / "node.json"
    path.write_text(run(str(SAMPLES / "h100x8.txt"), "--json", verb="inspect").output)
    assert from_json(path.read_text()).is_all_to_all
    assert "every pair has NVLink" in run(str(path), verb="inspect").output
