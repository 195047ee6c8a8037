import pytest

from moesaic.cost.host import OPERATORS, interference_on, profile_on
from moesaic.cost.profile import LAUNCHES
from moesaic.planner.demand import Demand
from moesaic.planner.load_file import skewed
from moesaic.planner.question import format_choices
from moesaic.planner.search import Question, search
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate


@pytest.mark.parametrize("name", ["paper", "calibrated"])
def test_a_processor_calls_operators_and_launches_no_kernels(name):
    gpu, socket = cluster("h200"), cluster("epyc-9654")
    own = profile_on(name, socket)
    assert own.launch_s == {launch: OPERATORS[launch] * 4e-6 for launch in LAUNCHES}
    assert (own.launch_power, own.full_rate_rows <= 16) == (1.0, True)
    assert profile_on(name, gpu).launch_s != own.launch_s
    assert interference_on(socket).eager == 0.0 < interference_on(gpu).eager


def test_the_machines_file_says_how_long_a_call_takes(tmp_path):
    text = """
    name = "mine"
    description = "a test"
    memory_bytes = { value = 64e9, source = "a test" }
    memory_bytes_per_s = { value = 50e9, source = "SOURCE" }
    flops_per_s.bfloat16 = { value = 1e12, source = "a test" }
    """
    for idx, (source, line, expected) in enumerate(
        [
            ("a test", "", None),  # no word of a processor: a GPU
            ("measured: by moesaic calibrate", "", 4e-6),  # which measures processors alone
            ("a test", 'operator_s = { value = 1e-6, source = "a test" }', 1e-6),
        ]
    ):
        path = tmp_path / f"{idx}.toml"
        path.write_text(text.replace("SOURCE", source) + line, encoding="utf-8")
        found = cluster("mine", path)
        assert found.machine.operator_s == expected
        if expected is not None:
            assert profile_on("paper", found).launch_s["dense_ffn"] == 4 * expected


def test_a_published_service_on_processors_is_met():
    """DeepSeek-R1 in int8, SGLang, two Xeon 6980P; a request of 1,024 in and out: 68.0 ms a token, 1.9 s."""
    spec = read_config(locate("deepseek-r1").config, name="deepseek-r1")
    asked = Question(
        model=spec, clusters=(cluster("xeon-6980px2"),), profile="calibrated", shares=skewed(spec),
        demand=Demand(isl=1024, osl=1024, concurrency=1, objective="latency"),
        choices=format_choices(spec, "int8", "bfloat16", None),
    )  # fmt: skip
    best = search(asked).best
    assert best.token_s == pytest.approx(0.068, rel=0.15)
    assert float(best.ttft.low) < 1.885 < float(best.ttft.high)
