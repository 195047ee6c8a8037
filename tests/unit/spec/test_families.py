from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from config_cases import CONFIGS, DROP, read
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.spec.families import FAMILIES, RUNNABLE, read_config
from moesaic.spec.model import DenseSpec, GqaSpec, LinearSpec, MambaSpec, MlaSpec, ModelSpec, MoeSpec

QWEN3 = CONFIGS["qwen3_moe"]
MIXTRAL = CONFIGS["mixtral"]
V3 = CONFIGS["deepseek_v3"]


def sparse(spec: ModelSpec) -> list[int]:
    return [layer_idx for layer_idx, _ in spec.moe_layers]


# --- every family
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_known_families_are_read_exactly(name: str) -> None:
    spec = read(CONFIGS[name])
    assert spec.reader == "exact"
    assert spec.family == name.split()[0]
    assert spec.is_runnable == (spec.family in RUNNABLE and name != "gemma4")
    assert hash(spec) == hash(read(CONFIGS[name]))


def test_families_without_a_lack_are_the_runnable_ones() -> None:
    names = {
        "llama", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe",
        "glm4_moe_lite", "kimi_k25", "dots1", "minimax_m2", "ernie4_5_moe", "granitemoe", "phimoe", "gpt_oss",
        "llama4", "gemma4", "qwen3_next", "qwen3_5_moe",
    }  # fmt: skip
    assert names == RUNNABLE
    for row in FAMILIES.values():
        assert row.lacks is None or row.lacks.strip()


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("deepseek_v32", "a sparse-attention index is not run yet"),
        ("glm_moe_dsa", "a sparse-attention index is not run yet"),
        ("nemotron_h", "Mamba-2 mixers are not run yet"),
        ("dbrx", "fused projections and experts of DBRX are not run yet"),
    ],
)
def test_what_does_not_run_names_one_feature(name: str, feature: str) -> None:
    assert read(CONFIGS[name]).runnable_reasons == (feature,)


def test_cases_cover_the_table() -> None:
    covered = {name.split()[0] for name in CONFIGS} | {"kimi_k2", "kimi_k25", "qwen3_vl_moe"}
    assert covered == set(FAMILIES)


def test_mixtral_in_detail() -> None:
    spec = read(MIXTRAL, sliding_window=64, torch_dtype="float16", eos_token_id=[2, 7])
    mixer, moe = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(mixer, GqaSpec)
    assert isinstance(moe, MoeSpec)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window) == (4, 2, 16, 64)
    assert mixer.rope is not None
    assert mixer.rope.theta == 1_000_000.0  # the class's default, not rope's usual 10,000
    assert mixer.softmax_scale == 16**-0.5
    assert moe.gate.is_renormalised
    assert spec.eos_token_ids == (2, 7)
    assert spec.bos_token_id == 1
    # float16 is computed in float32, which holds it exactly, and counted as the 16 bits it is stored in.
    assert (spec.dtype, spec.weight_format, spec.stored_format("norms").bits) == ("float32", "float16", 16.0)
    assert spec.is_runnable


def test_deepseek_gate_shared_experts_and_scale() -> None:
    yarn = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 64,
    }
    spec = read(V3, rope_scaling=yarn, routed_scaling_factor=2.5)
    mixer, moe = spec.layers[1].mixer, spec.layers[1].ffn
    assert isinstance(mixer, MlaSpec)
    assert isinstance(moe, MoeSpec)
    assert isinstance(spec.layers[0].ffn, DenseSpec)
    assert mixer.softmax_scale == pytest.approx(24**-0.5 * (0.1 * 0.8 * math.log(40) + 1) ** 2, rel=1e-12)
    assert moe.gate.has_selection_bias
    assert (moe.gate.score, moe.gate.scale, moe.gate.num_groups, moe.gate.groups_per_token) == (
        "sigmoid",
        2.5,
        2,
        1,
    )
    assert moe.shared is not None
    assert moe.shared.width == 2 * 24
    assert mixer.rope.is_interleaved
    assert not read(V3, rope_interleave=False).layers[0].mixer.rope.is_interleaved  # type: ignore[union-attr]


def test_a_null_is_none_and_an_absent_key_the_default() -> None:
    assert read(V3, q_lora_rank=None).layers[0].mixer.q_lora_rank is None  # type: ignore[union-attr]
    assert read(V3, q_lora_rank=DROP).layers[0].mixer.q_lora_rank == 1536  # type: ignore[union-attr]


# --- which layers are sparse
# --------------------------------------------------------------------------------------


def test_mlp_only_layers_come_before_decoder_sparse_step() -> None:
    spec = read(QWEN3, num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2)
    assert sparse(spec) == [1, 5]
    assert isinstance(spec.layers[3].ffn, DenseSpec)
    assert spec.layers[3].ffn.width == 96


def test_first_k_dense_and_its_frequency() -> None:
    assert sparse(read(V3, num_hidden_layers=7, first_k_dense_replace=2, moe_layer_freq=2)) == [2, 4, 6]


def test_mlp_layer_types_that_contradict_first_k_dense_are_refused() -> None:
    types = ["dense", "sparse", "sparse", "sparse"]
    assert sparse(read(V3, mlp_layer_types=types)) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"mlp_layer_types\[1\] is sparse, but first_k_dense_replace \(2\)"):
        read(V3, mlp_layer_types=types, first_k_dense_replace=2)


def test_moe_layers_come_before_the_interleave_step() -> None:
    llama4 = CONFIGS["llama4"]
    assert sparse(read(llama4)) == [1, 3]
    assert sparse(read(llama4, moe_layers=[0, 2])) == [0, 2]
    assert read(llama4, attn_temperature_tuning=4) == read(llama4, attn_temperature_tuning=True)
    for off in (False, 0, None):
        spec = read(llama4, attn_temperature_tuning=off)
        assert all(layer.mixer.temperature is None for layer in spec.layers)  # type: ignore[union-attr]
    ropes = [layer.mixer.rope is not None for layer in read(llama4).layers]  # type: ignore[union-attr]
    assert ropes == [True, True, True, False]


def test_nemotron_layers_by_letters_or_by_names() -> None:
    nemotron = CONFIGS["nemotron_h"]
    by_letters = read(nemotron)
    assert isinstance(by_letters.layers[0].mixer, MambaSpec)
    assert by_letters.layers[0].ffn is None
    assert by_letters.layers[2].mixer.rope is None  # type: ignore[union-attr]
    names = ["mamba", "moe", "attention", "mlp"]
    assert read(nemotron, hybrid_override_pattern=DROP, layers_block_type=names) == by_letters
    with pytest.raises(ConfigError, match="num_hidden_layers is 5 but the pattern names 4 layers"):
        read(nemotron, num_hidden_layers=5)
    with pytest.raises(ConfigError, match="hybrid_override_pattern must be made of"):
        read(nemotron, hybrid_override_pattern="MEX-")


def test_full_attention_interval_and_layer_types_say_the_same() -> None:
    config = CONFIGS["qwen3_next"]
    by_interval = read(config, full_attention_interval=2)
    types = ["linear_attention", "full_attention"] * 2
    assert read(config, layer_types=types) == by_interval
    assert isinstance(by_interval.layers[0].mixer, LinearSpec)
    with pytest.raises(ConfigError, match="layer_types has 2 entries for 4 layers"):
        read(config, layer_types=types[:2])


def test_what_sets_the_linear_families_apart() -> None:
    next_spec = read(CONFIGS["qwen3_next"])
    later = read_config(
        {"model_type": "qwen3_5_moe", "text_config": CONFIGS["qwen3_5_moe"], "vision_config": {"depth": 1}},
        name="wrapped",
    )
    assert (next_spec.layers[0].mixer.is_fused, later.layers[0].mixer.is_fused) == (True, False)
    assert later.layers[0].mixer.conv_channels == 2 * 2 * 8 + 4 * 12
    for spec in (next_spec, later):
        assert spec.is_runnable
        assert spec.norm_offset == 1.0
        assert spec.layers[3].mixer.has_output_gate
        assert spec.layers[3].mixer.rope.dim == 4
        assert spec.layers[0].ffn.shared.has_output_gate
    assert later.other_params == (("vision tower", None),)


def test_shared_index_layers_name_the_layer_they_reuse() -> None:
    spec = read(CONFIGS["glm_moe_dsa"])
    assert [layer.index_from for layer in spec.layers] == [None, 0, None, 2]
    by_pattern = read(CONFIGS["glm_moe_dsa"], indexer_types=DROP, index_topk_pattern="FSFS")
    assert by_pattern == spec
    with pytest.raises(ConfigError, match="full on the first layer"):
        read(CONFIGS["glm_moe_dsa"], indexer_types=["shared", "full", "full", "full"])


def test_gpt_oss_windows_alternate() -> None:
    windows = [layer.mixer.window for layer in read(CONFIGS["gpt_oss"]).layers]  # type: ignore[union-attr]
    assert windows == [16, None, 16, None]


def test_gemma_shared_keys_point_at_the_last_layer_of_their_kind() -> None:
    layers = read(CONFIGS["gemma4"]).layers
    assert [layer.mixer.kv_from for layer in layers] == [None] * 7 + [6, 6, 6, 6, 5]  # type: ignore[union-attr]
    assert [layer.mixer.head_dim for layer in layers[4:7]] == [16, 32, 16]  # type: ignore[union-attr]


# --- nesting and other names
# --------------------------------------------------------------------------------------


def test_nested_text_config_is_never_read_as_dense() -> None:
    wrapped = {"model_type": "qwen3_vl_moe", "text_config": dict(QWEN3, model_type="qwen3_vl_moe_text")}
    spec = read(wrapped, vision_config={"depth": 27})
    assert len(spec.moe_layers) == 4
    assert spec.model_type == "qwen3_vl_moe"
    assert spec.other_params == (("vision tower", None),)
    assert "vision tower" in spec.runnable_reasons[0]


def test_unknown_wrapper_of_a_known_text_model_reads_the_text_model() -> None:
    spec = read({"model_type": "somebody_vl", "llm_config": QWEN3})
    assert (spec.reader, spec.family, spec.model_type) == ("exact", "qwen3_moe", "somebody_vl")
    assert any("somebody_vl around qwen3_moe" in reason for reason in spec.runnable_reasons)


def test_tied_head_of_a_wrapped_model_is_the_wrappers() -> None:
    nested = {"model_type": "kimi_k25", "text_config": dict(V3, tie_word_embeddings=True)}
    assert read(nested).has_tied_head
    assert not read(nested, tie_word_embeddings=False).has_tied_head


def test_kimi_k2_is_deepseek_v3_under_another_name() -> None:
    spec = read(V3, model_type="kimi_k2")
    assert (spec.model_type, spec.family, spec.is_runnable) == ("kimi_k2", "deepseek_v3", True)
    assert spec.layers == read(V3).layers


@pytest.mark.parametrize("name", ["num_local_experts", "n_routed_experts"])
def test_expert_count_under_another_name(name: str) -> None:
    assert read(QWEN3, num_experts=DROP, **{name: 6}).moe_layers[0][1].num_experts == 6
    with pytest.raises(ConfigError, match="another name for it"):
        read(QWEN3, **{name: 6})


# --- quantised checkpoints
# ----------------------------------------------------------------------------------------


def stored(spec: ModelSpec) -> dict[str, tuple[str, float]]:
    return {one.component: (one.format, round(one.bits, 4)) for one in spec.stored}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", 8.002)),
        ({"quant_method": "fp8"}, ("fp8", 8.0)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("nvfp4", 4.5)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ("int4", 4.1562)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, ("int4", 4.3125)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ("int8", 8.0)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
            },
            ("int4", 4.5),
        ),
    ],
)
def test_bits_with_scales(quantisation: dict[str, Any], expected: tuple[str, float]) -> None:
    spec = read(MIXTRAL, quantization_config=quantisation)
    assert stored(spec)["routed_experts"] == expected
    assert spec.weight_format == expected[0]
    assert f"weights stored as {expected[0]}" in spec.runnable_reasons[0]
    assert "router" not in stored(spec)


def test_ignored_modules_keep_the_models_dtype() -> None:
    quantisation = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.0*", "model.layers.2.mlp.shared_experts*", "re:.*self_attn.*"],
    }
    found = stored(read(V3, quantization_config=quantisation))
    # Layer 0 is the only dense one; of the three shared experts one is left as it is: (16 + 2 * 4.5) / 3.
    assert found == {"routed_experts": ("nvfp4", 4.5), "shared_experts": ("nvfp4", 8.3333)}


def test_another_models_layers_are_not_ours() -> None:
    quantisation = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["mtp.layers.0*", "mtp*"]}
    assert stored(read(V3, quantization_config=quantisation))["routed_experts"] == ("nvfp4", 4.5)


def test_mxfp4_is_of_the_experts_only() -> None:
    spec = read(CONFIGS["gpt_oss"], quantization_config={"quant_method": "mxfp4"})
    assert stored(spec) == {"routed_experts": ("mxfp4", 4.25)}
    assert spec.is_runnable  # decoded while it is read


def test_mxfp4_of_other_families_and_methods_does_not_run() -> None:
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}
    method = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    for spec in (
        read(MIXTRAL, quantization_config={"quant_method": "mxfp4"}),
        read(CONFIGS["gpt_oss"], quantization_config=method),
    ):
        assert "mxfp4" in {format for format, _ in stored(spec).values()}
        assert "weights stored as mxfp4" in spec.runnable_reasons[0]


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "fp9"}, "unknown; did you mean fp8"),
        ({"bits": 4}, "quantization_config.quant_method is missing"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two whole numbers above 0"),
        ({"quant_method": "fp8", "ignore": "lm_head"}, "a list of module names"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, "not a regex"),
        ("fp8", "must be a JSON object"),
    ],
)
def test_quantisation_that_cannot_be_told_is_refused(quantisation: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(MIXTRAL, quantization_config=quantisation)


# --- errors
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ("qwen3_moe", {"hidden_size": DROP}, "hidden_size is missing"),
        ("qwen3_moe", {"num_hidden_layers": "four"}, "num_hidden_layers must be a whole number, got 'four'"),
        (
            "qwen3_moe",
            {"num_hidden_layers": 10**30},
            "must be between 0 and 1000000000, got a whole number of about",
        ),
        ("qwen3_moe", {"num_hidden_layers": 100_000}, "between 1 and 10000"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok must be at most num_experts \(8\), got 9",
        ),
        ("qwen3_moe", {"num_key_value_heads": 3}, r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
        ("qwen3_moe", {"moe_intermediate_size": -24}, "moe_intermediate_size must be between"),
        ("qwen3_moe", {"intermediate_size": -1}, "intermediate_size must be between"),
        ("qwen3_moe", {"num_experts": True}, "num_experts must be a whole number, got True"),
        ("qwen3_moe", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ("qwen3_moe", {"rope_theta": 0}, "rope_theta must be above 0"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        (
            "qwen3_moe",
            {"hidden_act": "xielu"},
            "'xielu', which this version does not compute; it computes gelu",
        ),
        (
            "qwen3_moe",
            {"num_experts_per_tok": None},
            "num_experts_per_tok is missing; .*write the model's",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [4]},
            r"mlp_only_layers\[0\] must be a layer number between 0 and 3",
        ),
        ("qwen3_moe", {"eos_token_id": "</s>"}, "a token id"),
        ("qwen3_moe", {"torch_dtype": "bfloat17"}, "did you mean bfloat16"),
        ("mixtral", {"hidden_size": 66}, "66 mod 4 = 2"),
        ("deepseek_v3", {"n_group": 3}, "8 mod 3 = 2"),
        ("deepseek_v3", {"topk_group": 3}, r"topk_group must be at most n_group \(2\)"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "1 groups of 4 experts hold fewer than the 5"),
        ("deepseek_v3", {"n_group": 8}, "at most half of 8"),
        ("minimax_m2", {"rotary_dim": 64}, r"at most head_dim \(16\)"),
        ("dbrx", {"ffn_config": [1]}, "ffn_config must be a JSON object"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "a multiple of 2 key heads"),
        ("llama4", {"no_rope_layers": [2]}, "zeros and ones"),
        ("llama4", {"attn_temperature_tuning": "on"}, "true, false, or a whole number"),
    ],
)
def test_wrong_values_name_key_value_and_rule(base: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(CONFIGS[base], **changes)
    assert str(caught.value).startswith("config.json: ")
    assert len(str(caught.value)) < 300


def test_nested_keys_are_named_with_their_path() -> None:
    nested = {"model_type": "qwen3_vl_moe", "text_config": dict(QWEN3, num_experts=-1)}
    with pytest.raises(ConfigError, match=r"text_config\.num_experts must be between"):
        read(nested)


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen3_moe"}, {"model_type": "new_thing"}, {"a": 1}])
def test_a_config_without_sizes_names_the_missing_key(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        read(config)


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="a config must be a JSON object"):
        read_config([1], name="config.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="text_config must be a JSON object"):
        read({"model_type": "x", "text_config": 3})


# --- unknown families
# ---------------------------------------------------------------------------------------------


def test_unknown_family_is_read_by_the_usual_keys_and_says_so() -> None:
    config = {
        "model_type": "brand_new",
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 100,
        "ffn_hidden_size": 96,
        "n_experts": 8,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "num_shared_expert": 1,
        "first_k_dense_replace": 1,
    }
    spec = read(config)
    assert spec.reader == "generic"
    assert sparse(spec) == [1, 2, 3]
    moe = spec.moe_layers[0][1]
    assert (moe.num_experts, moe.experts_per_token, moe.expert_width) == (8, 2, 24)
    assert moe.shared is not None
    assert "brand_new" in spec.runnable_reasons[0]
    assert not spec.is_runnable


def test_unknown_family_with_experts_and_no_choice_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="num_experts_per_tok is missing; num_experts says that there are experts"
    ):
        read(QWEN3, model_type="brand_new", num_experts_per_tok=DROP)


def test_unknown_family_with_a_latent() -> None:
    spec = read(V3, model_type="brand_new")
    assert isinstance(spec.layers[0].mixer, MlaSpec)
    assert sparse(spec) == [1, 2, 3]


# --- fuzz
# ---------------------------------------------------------------------------------------------------------

DAMAGE: list[Any] = [
    None, -1, 0, 1, "x", True, 1.5, float("nan"), float("inf"), 10**30, 10**400, [], {}, [1], ["x"], {"a": 1},
    [None], "8", {"rope_type": "yarn"},
]  # fmt: skip


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_a_damaged_config_is_read_or_refused_but_never_crashes(name: str, data: st.DataObject) -> None:
    config = copy.deepcopy(CONFIGS[name])
    extra = (
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "quantization_config",
        "mlp_layer_types",
        "dtype",
    )
    for key in data.draw(st.lists(st.sampled_from([*sorted(config), *extra]), min_size=1, max_size=3)):
        if key != "model_type":
            config[key] = data.draw(st.sampled_from(DAMAGE))
    message = ""
    try:
        assert read_config(config, name="config.json").layers
    except ConfigError as error:
        message = str(error)
    assert len(message) < 400


# --- real configs
# -------------------------------------------------------------------------------------------------


def test_every_shared_config_is_read(shared_data: Path) -> None:
    runnable = set()
    paths = sorted((shared_data / "configs").glob("*.json"))
    assert len(paths) >= 55
    for path in paths:
        spec = read_config(json.loads(path.read_text()), name=path.name)
        assert spec.reader == "exact", path.name
        assert spec.moe_layers, path.name
        assert spec.is_runnable or spec.runnable_reasons
        if spec.is_runnable:
            runnable.add(spec.model_type)
    assert runnable == {
        "qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "dots1",
        "granitemoe", "gpt_oss", "llama4", "qwen3_5_moe",
    }  # fmt: skip


def test_every_class_default_is_read(shared_data: Path) -> None:
    readers = {}
    for path in sorted((shared_data / "configs" / "defaults").glob("*.json")):
        readers[path.stem] = read_config(json.loads(path.read_text()), name=path.name).reader
    assert readers.pop("step3p5") == "generic"
    assert set(readers.values()) == {"exact"}
