from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_lines import RIGHT, WRONG

from moesaic.errors import ConfigError
from moesaic.interop.command import read_commands
from moesaic.interop.inventory import choose
from moesaic.interop.lint import lint


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


def test_model_facts_may_be_given():
    [report] = lint("vllm serve /mnt/weights -tp 3", model="deepseek-v3")
    assert [one.rule for one in report.findings] == ["heads-divide", "blocks-divide"]
    assert lint("vllm serve /mnt/weights -tp 3")[0].findings == ()
    with pytest.raises(ConfigError, match="nosuch"):
        lint("vllm serve m", model="nosuch")


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
