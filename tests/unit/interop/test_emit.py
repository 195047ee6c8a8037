from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from deployments import (
    HOST,
    deployment,
    every_kind,
    instance,
    model,
    with_places_of_its_own,
    with_uneven_shares,
)

from moesaic.errors import ConfigError
from moesaic.interop.emit import emit
from moesaic.interop.inventory import ENGINES, choose, versions
from moesaic.interop.launch import Emission
from moesaic.interop.lint import lint
from moesaic.interop.yaml_text import dump_yaml

V3 = model("deepseek-v3")
QWEN = model("qwen3-30b-a3b")
FP8 = "weights=fp8 kv=bfloat16 dispatch=fp8"
KINDS = list(every_kind())


def flags_of(text: str) -> Iterator[str]:
    """Every word of a line that begins a flag, without its value."""
    for word in re.sub(r"'[^']*'|\"[^\"]*\"", "x", text).split():
        if re.match(r"--?[A-Za-z]", word):
            yield word


@pytest.mark.parametrize(("name", "found", "spec"), KINDS, ids=[name for name, _, _ in KINDS])
def test_no_line_has_a_flag_that_its_release_lacks(name, found, spec):
    for engine in ENGINES:
        for version in versions(engine):
            made = emit(found, engine, model="org/model", spec=spec, version=version)
            assert made.launches
            inventory = choose(engine, version)
            for launch in made.launches:
                program = {"llamacpp": "server", "trtllm": "serve"}.get(engine, "launch_server")
                words = launch.text.split("trtllm-llmapi-launch")[-1]
                for flag in flags_of(words.replace("python3 -m ", "")):
                    assert inventory.find(flag, program) is not None, (engine, version, flag)
                for variable in launch.env:
                    assert variable in inventory.env
            if version == versions(engine)[-1] and engine != "kt":
                for launch in made.launches:
                    findings = [
                        one for report in lint(launch.text, version=version) for one in report.findings
                    ]
                    assert findings == []


def carried(engine: str, found, spec=V3, **options) -> Emission:
    made = emit(found, engine, model="org/model", spec=spec, **options)
    assert made.lacks == ()
    return made


def words(made: Emission, idx: int = 0) -> str:
    return made.launches[idx].text


def test_vllm_spreads_replicas_over_nodes():
    made = carried("vllm", deployment(V3, instance(V3, dp=16, ep=16), formats=FP8))
    first, second = words(made), words(made, 1)
    assert (
        "--tensor-parallel-size 1 --data-parallel-size 16 --data-parallel-size-local 8 "
        '--data-parallel-address "${HEAD:?address of the first node}"'
    ) in first
    assert "--enable-expert-parallel --all2all-backend deepep_low_latency" in first
    assert "--headless" not in first
    assert "--data-parallel-start-rank 8 --headless" in second
    assert "--port" not in second


def test_vllm_balances_copies_and_transfers_kv():
    pools = [
        instance(V3, dp=8, ep=8, phases="prefill", name="prefill"),
        instance(V3, dp=16, ep=16, redundant=16, phases="decode", name="decode", count=2),
    ]
    made = carried("vllm", deployment(V3, *pools, formats=FP8))
    assert [one.instance for one in made.launches] == ["prefill", "decode", "decode"]
    assert "deepep_high_throughput" in words(made)
    assert '"num_redundant_experts":16' in words(made, 1)
    for launch in made.launches:
        assert '{"kv_connector":"NixlConnector","kv_role":"kv_both"}' in launch.text
    assert any("router" in note for note in made.notes)


def test_sglang_counts_all_ranks_of_a_stage_as_tp():
    found = deployment(V3, instance(V3, dp=4, tp=4, ep=16), formats=FP8)
    text = words(carried("sglang", found), 1)
    assert "--tp-size 16 --attn-dp-size 4 --nnodes 2 --node-rank 1" in text
    assert "--ep-size 16 --moe-a2a-backend deepep --deepep-mode auto" in text
    old = words(carried("sglang", found, version="0.4.10"))
    assert "--dp-size 4 --enable-dp-attention" in old
    assert "--enable-deepep-moe" in old
    copies = deployment(V3, instance(V3, dp=16, ep=16, redundant=16), formats=FP8)
    assert "--deepep-mode normal" in words(carried("sglang", copies))  # the recorder has no counts of auto


def test_trtllm_says_the_rest_in_its_options_file():
    found = deployment(V3, instance(V3, tp=2, kvp=4, ep=8), formats=FP8.replace("kv=bfloat16", "kv=fp8"))
    made = carried("trtllm", found)
    assert "--tp_size 2 --cp_size 4 --ep_size 8 --extra_llm_api_options serve.options.yaml" in words(made)
    assert made.basis == "documented"
    yaml = pytest.importorskip("yaml")
    options = yaml.safe_load(made.files["serve.options.yaml"])
    assert options["cp_config"] == {"cp_type": "HELIX", "tokens_per_block": 32}
    assert options["kv_cache_config"] == {"tokens_per_block": 32, "dtype": "fp8"}


def test_experts_in_host_memory():
    found = deployment(V3, instance(V3, machine="rtx-4090", tiers=HOST), formats=FP8)
    text = words(carried("llamacpp", found))
    assert re.search(r"--n-cpu-moe 2\d ", text), text  # 58 sparse layers of 11.3 GB each hold 19 in 215 GB
    kt = words(carried("kt", found))
    assert "--kt-method FP8" in kt
    assert "--cpu-offload-gb 200.0 --cpu-offload-params experts" in words(carried("vllm", found))


def lack(engine: str, found, path: str, spec=V3, **options) -> str:
    made = emit(found, engine, model="org/model", spec=spec, **options)
    [one] = [one for one in made.lacks if one.path.endswith(path)]
    return str(one)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_uneven_shares_are_refused_by_name(engine):
    even = instance(V3, dp=16, ep=16, redundant=16)
    found = deployment(V3, with_uneven_shares(even), formats=FP8)
    assert "slot_share = uneven" in lack(engine, found, "plan.slot_share")
    assert not emit(deployment(V3, even, formats=FP8), engine, model="m", spec=V3).lacks


def test_uneven_slots_are_refused_with_what_would_be_even():
    one = instance(V3, dp=16, ep=16)
    ranks = tuple(row.copy() for row in one.plan.slot_rank)
    for row in ranks:
        row[0:8] = 1
    found = deployment(V3, replace(one, plan=replace(one.plan, slot_rank=ranks)), formats=FP8)
    assert "8 to 24 slots a rank" in lack("sglang", found, "plan.slot_rank")


@pytest.mark.parametrize(
    ("engine", "nearest"), [("vllm", "decode context parallel 4"), ("sglang", "parallel 4")]
)
def test_helix_is_trtllms_alone(engine, nearest):
    found = deployment(V3, instance(V3, tp=2, kvp=4, ep=8), formats=FP8)
    assert nearest in lack(engine, found, "kvp")


def test_attention_apart_from_experts_becomes_the_same_devices():
    apart = instance(V3, tp=4, dp=2, ep=8, experts_apart=8, phases="decode")
    for engine in ("vllm", "sglang"):
        made = emit(deployment(V3, apart, formats=FP8), engine, model="m", spec=V3)
        assert "on the same 16 devices" in str(made.lacks[0])
    two_kinds = instance(V3, tp=2, ep=8, experts_apart=8, phases="decode", pp=1)
    made = emit(deployment(V3, two_kinds, formats=FP8), "vllm", model="m", spec=V3)
    assert "on the same 8 devices" in str(made.lacks[0])  # ten fill no whole nodes
    assert "--tensor-parallel-size 4 --data-parallel-size 4" in emit(
        deployment(V3, apart, formats=FP8), "vllm", model="m", spec=V3
    ).launches[0].text  # fmt: skip


def test_formats_that_an_engine_lacks_are_refused():
    found = deployment(QWEN, instance(QWEN, tp=2), formats="weights=nvfp4 kv=int8 dispatch=bfloat16")
    made = emit(found, "vllm", model="m", spec=QWEN)
    assert {one.value for one in made.lacks} == {"weights=nvfp4", "kv=int8"}
    made = carried("vllm", deployment(QWEN, instance(QWEN), formats="weights=fp8 kv=fp8 dispatch=fp8"), QWEN)
    assert "--quantization fp8 --kv-cache-dtype fp8" in words(made)
    stored = deployment(V3, instance(V3, tp=8), formats=FP8)  # what the checkpoint has needs no flag
    assert "--quantization" not in words(carried("vllm", stored))


def test_a_plan_of_its_own_goes_into_the_placement_file():
    found = deployment(V3, with_places_of_its_own(instance(V3, dp=16, ep=16, redundant=16)), formats=FP8)
    assert "not told where experts are" in lack("sglang", found, "plan.slot_expert")
    assert "--enable-eplb" in lack("vllm", found, "plan.slot_expert")

    def write(plan, spec):
        return json.dumps({"physical_to_logical_map": [row.tolist() for row in plan.slot_expert]})

    made = carried("sglang", found, placement=write)
    assert "--init-expert-location serve.experts.json" in words(made)
    assert "--enable-eplb" not in words(made)
    assert len(json.loads(made.files["serve.experts.json"])["physical_to_logical_map"]) == 58
    balancer = carried("trtllm", found, placement=lambda plan, spec: "num_slots: 272\n")
    assert balancer.files["serve.balancer.yaml"] == "num_slots: 272\n"
    assert "serve.balancer.yaml" in balancer.files["serve.options.yaml"]
    assert emit(found, "vllm", model="m", spec=V3, placement=write).lacks  # vLLM reads none


def test_what_the_model_forbids_is_named():
    wide = deployment(V3, instance(V3, tp=32), formats=FP8)
    made = emit(wide, "vllm", model="m", spec=V3)
    assert any("64 wide, no multiple of the 128" in str(one) for one in made.lacks)


def test_what_no_line_can_say_is_an_error():
    spans = deployment(V3, instance(V3, dp=2, tp=16, ep=32), formats=FP8)
    with pytest.raises(ConfigError, match="a replica of 16 devices spans nodes of 8"):
        emit(spans, "vllm", model="m", spec=V3)
    odd = deployment(V3, instance(V3, dp=12, ep=12), formats=FP8)
    with pytest.raises(ConfigError, match="say how many a node has with --gpus-per-node"):
        emit(odd, "sglang", model="m", spec=V3)
    assert emit(odd, "sglang", model="m", spec=V3, devices_per_node=4).launches[2].num_nodes == 3


def test_nodes_are_those_of_the_plan():
    four = deployment(V3, instance(V3, dp=16, ep=16, machine="h200x4"), formats=FP8)
    assert emit(four, "sglang", model="m", spec=V3).launches[0].num_nodes == 4
    assert emit(four, "sglang", model="m", spec=V3, devices_per_node=8).launches[0].num_nodes == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_manifest_has_a_set_and_a_service_for_each_instance(engine):
    yaml = pytest.importorskip("yaml")
    pools = [
        instance(V3, dp=8, ep=8, phases="prefill", name="prefill", count=3),
        instance(V3, dp=16, ep=16, phases="decode", name="decode"),
    ]
    made = carried(engine, deployment(V3, *pools, formats=FP8), with_manifest=True)
    documents = list(yaml.safe_load_all(made.files["manifest.yaml"]))
    assert [one["kind"] for one in documents] == ["LeaderWorkerSet", "Service"] * 2
    for one in documents:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
    single, spread = documents[0]["spec"], documents[2]["spec"]
    assert (single["replicas"], single["leaderWorkerTemplate"]["size"]) == (3, 1)
    assert spread["leaderWorkerTemplate"]["size"] == 2
    for template, role in (("leaderTemplate", "leader"), ("workerTemplate", "worker")):
        pod = spread["leaderWorkerTemplate"][template]
        [container] = pod["spec"]["containers"]
        assert pod["metadata"]["labels"] == {"app": "decode", "role": role}
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in pod["spec"]["volumes"]}
        assert ("readinessProbe" in container) == (role == "leader")
        assert "$LWS_LEADER_ADDRESS" in container["args"][0]
        assert lint(container["args"][0].removeprefix("exec "))[0].findings == ()
    worker = spread["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["args"][0]
    assert ("$((LWS_WORKER_INDEX * 8))" if engine == "vllm" else "$LWS_WORKER_INDEX") in worker
    service = documents[3]["spec"]
    assert service["selector"] == {"app": "decode", "role": "leader"}


def test_manifest_carries_files():
    yaml = pytest.importorskip("yaml")
    found = deployment(V3, instance(V3, dp=8, ep=8), formats=FP8)
    made = carried("trtllm", found, with_manifest=True)
    config, worker_set, _ = yaml.safe_load_all(made.files["manifest.yaml"])
    assert yaml.safe_load(config["data"]["serve.options.yaml"]) == {"enable_attention_dp": True}
    [container] = worker_set["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert container["workingDir"] == "/etc/moesaic"


def test_what_has_no_manifest_is_named_beside_the_rest_that_is_left_out():
    found = deployment(V3, instance(V3, dp=16, ep=16, micro=2), formats=FP8)
    reasons = {
        "llamacpp": "a LeaderWorkerSet is for sglang, trtllm, vllm",
        "trtllm": "mpirun reaches the 2 nodes",
    }
    for engine, reason in reasons.items():
        made = emit(found, engine, model="m", spec=V3, with_manifest=True)
        assert made.launches
        assert "manifest.yaml" not in made.files
        [missing] = [one for one in made.lacks if one.value == "--kubernetes"]
        assert reason in missing.reason
        assert any(one.path.endswith("num_micro_batches") for one in made.lacks)


def test_the_note_on_the_low_latency_buffer_comes_with_its_mode_only():
    def notes(one):
        return emit(deployment(V3, one, formats=FP8), "sglang", model="m", spec=V3).notes

    assert any("low-latency buffer" in note for note in notes(instance(V3, dp=16, ep=16)))
    assert not any("low-latency" in note for note in notes(instance(V3, dp=16, ep=16, redundant=16)))


def test_yaml_is_read_back_as_it_was():
    yaml = pytest.importorskip("yaml")
    value = {
        "a": [1, {"b": [], "c": {}}, [True, None]], "yes": "no", "text": "one: two\n  three\n", "n": 1.5,
        "list": ["- x", "#", "\u00e9"],
    }  # fmt: skip
    assert yaml.safe_load(dump_yaml(value)) == value
