from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_lines import RIGHT, WRONG

from moesaic.errors import ConfigError
from moesaic.interop.command import read_commands
from moesaic.interop.inventory import choose, load, versions
from moesaic.interop.lint import lint
from moesaic.interop.lint_gone import GONE_FLAGS, GONE_VARIABLES
from moesaic.interop.lint_known import KNOWN_FLAGS
from moesaic.interop.lint_unknown import known_mistake


@pytest.mark.parametrize("line", RIGHT)
def test_ordinary_right_lines_are_clean(line):
    for report in lint(line):
        assert report.findings == ()


@pytest.mark.parametrize(("line", "flag", "rule", "suggestion"), WRONG)
def test_every_known_mistake_is_named_with_the_right_flag(line, flag, rule, suggestion):
    findings = [one for report in lint(line) for one in report.findings]
    found = next((one for one in findings if (one.flag, one.rule) == (flag, rule)), None)
    assert found is not None, findings
    if suggestion is not None:
        assert suggestion in str(found.suggestion)
    assert found.message


def test_the_release_decides():
    line = "docker run vllm/vllm-openai:v0.10.2 --model m --num-redundant-experts 8 --nnodes 2"
    [report] = lint(line)
    assert (report.version, report.asked) == ("0.10.2", "0.10.2")
    assert {(one.flag, one.rule) for one in report.findings} == {
        ("--num-redundant-experts", "deprecated-flag"), ("--nnodes", "newer-flag"),
    }  # fmt: skip
    [report] = lint("vllm serve m --swap-space 4")
    assert [one.rule for one in report.findings] == ["removed-flag"]
    assert "0.10.2 had it, 0.33.0 does not" in report.findings[0].message
    [report] = lint("vllm serve m", version="0.25.1")
    assert (report.version, report.asked) == ("0.20.2", "0.25.1")
    assert lint("vllm serve m", version="0.1")[0].version == "0.10.2"


def test_every_flag_that_a_release_dropped_has_an_entry():
    for engine in ("vllm", "sglang", "llamacpp"):
        newest = choose(engine)
        for version in versions(engine)[:-1]:
            for flag in load(engine, version).flags:
                gone = [n for n in (flag.name, *flag.aliases) if newest.find(n) is None]
                gone = [n for n in gone if len(newest.beginning_with(n)) != 1 and n != "-O"]
                for name in gone:
                    assert known_mistake(name, name, newest) is not None, (engine, version, name)


def test_what_is_offered_exists_and_what_is_gone_is_not_there():
    tables = {(e, name): instead for e, t in GONE_FLAGS.items() for name, (_, instead) in t.items()}
    tables |= {key: instead for key, (_, _, instead) in KNOWN_FLAGS.items()}
    tables |= {("vllm", name): instead for name, (_, instead) in GONE_VARIABLES.items()}
    for (engine, name), instead in tables.items():
        flag = choose(engine).find(name)
        assert flag is None or flag.removed, (engine, name)
        for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", instead or ""):
            is_there = choose(engine).find(word) or choose("kt").find(word)
            assert is_there, (engine, name, word)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--max-model-length 3", "--max-model-len"), ("--tensor-paralel-size 3", "--tensor-parallel-size"),
        ("--enforce-eagre", "--enforce-eager"), ("--gpu-mem-utilization 0.9", "--gpu-memory-utilization"),
        ("--enable-loro", "--enable-lora"),
        ("--enforce-eagre 3", None),  # takes no value
        ("--max-model-length", None),  # takes one
        ("--enable-something", None), ("--max-num-things 3", None), ("--offload-size 3", None),
    ],
)  # fmt: skip
def test_a_guess_needs_few_edits_and_the_same_kind(typed, meant):
    [finding] = [one for one in lint(f"vllm serve m {typed}")[0].findings if one.rule == "unknown-flag"]
    assert finding.suggestion == meant


def test_a_suggestion_is_of_the_release():
    [finding] = lint("sglang serve --model-path m --enable-flashinfer-moe", version="0.4.10")[0].findings
    assert (finding.rule, finding.suggestion) == ("removed-flag", "leave it out")
    [finding] = lint("vllm serve m --tp 4")[0].findings
    assert "a flag of SGLang and TensorRT-LLM" in finding.message
    assert lint("VLLM_ATTENTION_BACKEND=x vllm serve m", version="0.10.2")[0].findings == ()
    [finding] = lint("vllm serve m --quantization bitsandbytes")[0].findings
    assert "vLLM 0.20.2 took it" in finding.message


def test_model_facts_may_be_given():
    [report] = lint("vllm serve /mnt/weights -tp 3", model="deepseek-v3")
    assert [one.rule for one in report.findings] == ["heads-divide", "blocks-divide"]
    assert lint("vllm serve /mnt/weights -tp 3")[0].findings == ()
    with pytest.raises(ConfigError, match="nosuch"):
        lint("vllm serve m", model="nosuch")


@pytest.mark.parametrize(
    ("model", "flags", "rules"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", "--tensor-parallel-size 8", ["blocks-divide"]),  # 1536 / 8 = 192 columns
        ("Qwen/Qwen3-235B-A22B-FP8", "--tensor-parallel-size 4", []),
        ("Qwen/Qwen3-235B-A22B-FP8", "--tensor-parallel-size 8 --enable-expert-parallel", []),
        ("Qwen/Qwen3-235B-A22B", "--tensor-parallel-size 8", []),  # no scales
        ("Qwen/Qwen3-235B-A22B", "--tensor-parallel-size 3", ["heads-divide"]),
        ("another/Qwen3-235B-A22B-FP8", "--tensor-parallel-size 8", []),  # whose scales are not known
        ("deepseek-ai/Qwen3-235B-A22B", "--tensor-parallel-size 3", []),  # is not that model's maker
    ],
)
def test_a_makers_repository_is_checked_as_its_preset(model, flags, rules):
    (report,) = lint(f"vllm serve {model} {flags}")
    assert [one.rule for one in report.findings] == rules
    for one in report.findings:
        assert one.rule != "blocks-divide" or one.suggestion.endswith("or tensor parallel 4")


def test_copies_that_come_out_are_clean():
    assert lint("vllm serve deepseek-ai/DeepSeek-V3 -dp 16 -ep --enable-eplb")[0].findings == ()
    line = "vllm serve deepseek-ai/DeepSeek-V3 -dp 12 -ep --enable-eplb --eplb-config.num_redundant_experts 8"
    assert lint(line)[0].findings == ()


def test_several_commands_are_reported_each():
    text = "# two\nexport NCCL_DEBUG=INFO\nvllm serve a --port 1 &\nsglang serve --model-path b --tpp 2\n"
    reports = lint(text)
    assert [(one.engine, one.is_failed) for one in reports] == [("vllm", False), ("sglang", True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no launch line of a known engine, only nothing"),
        ("rm -rf /tmp/x", "only rm"),
        ("vllm serve 'm", "close every quote"),
    ],
)
def test_what_is_no_launch_line_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        lint(text)
    with pytest.raises(ConfigError, match="is no version"):
        lint("vllm serve m", version="newest")


def test_shell_text_is_read_as_a_shell_would():
    text = """
    $ A=1 vllm serve m \\
        --api-key "a # b" \\
        --port 8000   # the usual
    """
    [command] = read_commands(text)
    assert command.env == {"A": "1"}
    assert command.leading == ("m",)
    assert [(one.word, one.after) for one in command.options] == [
        ("--api-key", ("a # b",)), ("--port", ("8000",)),
    ]  # fmt: skip
    [image] = read_commands("docker run -e X=2 --rm -p 1:1 lmsysorg/sglang:v0.5.9-cu124 --model-path m")
    assert (image.engine, image.image_version, image.env) == ("sglang", "0.5.9", {"X": "2"})


STARTS = {
    "vllm": "vllm serve deepseek-ai/DeepSeek-V3", "llamacpp": "llama-server", "kt": "kt run m",
    "sglang": "sglang serve --model-path deepseek-ai/DeepSeek-V3", "trtllm": "trtllm-serve m",
}  # fmt: skip
VALUES = (
    "1",
    "0",
    "-1",
    "8",
    "9" * 20,
    "x",
    "1.5",
    "{}",
    "'[1]'",
    "'{\"num_redundant_experts\": null}'",
    "$X",
    "=",
)


@settings(max_examples=40)
@given(st.data())
def test_any_line_gets_findings_and_no_crash(data):
    engine = data.draw(st.sampled_from(sorted(STARTS)))
    sizes = ("--tensor-parallel-size", "--tp-size", "--ep-size", "--data-parallel-size", "--enable-eplb")
    names = st.one_of(st.sampled_from(sizes), st.sampled_from(sorted(choose(engine).by_name)))
    flags = data.draw(st.lists(st.tuples(names, st.sampled_from(" ="), st.sampled_from(VALUES)), max_size=6))
    line = " ".join([STARTS[engine], *("".join(flag) for flag in flags)])
    for report in lint(line):
        assert all(one.message and one.rule for one in report.findings)


def test_a_size_that_no_cluster_has_is_named():
    for size in ("0", "-8", "9" * 20):
        [finding] = lint(f"vllm serve deepseek-ai/DeepSeek-V3 -tp {size}")[0].findings
        assert (finding.flag, finding.rule) == ("-tp", "wrong-value")
