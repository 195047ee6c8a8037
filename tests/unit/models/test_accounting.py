"""Every tensor of a checkpoint is accounted for, from names and shapes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import (
    CONFIGS,
    Config,
    deepseek_v3_config,
    llama_config,
    mixtral_config,
    qwen3_moe_config,
    random_tensors,
    tensor_shapes,
    write_checkpoint,
    write_tensors,
)
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.accounting import Accounting, account
from moesaic.models.build import read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.families import FAMILIES


def account_of(folder: Path) -> Accounting:
    spec = read_spec(folder)
    return account(Checkpoint.open(folder), spec, FAMILIES[spec.family])


def rewrite(folder: Path, config: Config, *, drop: str = "", add: dict[str, Tensor] | None = None) -> Path:
    tensors = {k: v for k, v in random_tensors(config).items() if not drop or drop not in k}
    return write_checkpoint(folder, config, tensors=tensors | (add or {}))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
def test_every_tensor_is_consumed_once(tmp_path: Path, family: str, layout: str) -> None:
    config = CONFIGS[family]()
    folder = write_checkpoint(tmp_path, config, layout=layout)  # type: ignore[arg-type]
    found = account_of(folder)
    keys = [filling.key for filling in found.fillings]
    assert len(keys) == len(set(keys))
    assert set(keys) == Checkpoint.open(folder).names
    assert not found.unused
    sizes = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(config).items()}
    assert sum(filling.num_elements for filling in found.fillings) == sum(sizes.values())


@pytest.mark.parametrize("family", CONFIGS)
def test_each_missing_tensor_is_named(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]()
    folder = write_checkpoint(tmp_path, config)
    spec, whole = read_spec(folder), Checkpoint.open(folder)
    for name in whole.names:
        part = Checkpoint(folder, {k: v for k, v in whole.tensors.items() if k != name})
        with pytest.raises(CheckpointError) as caught:
            account(part, spec, FAMILIES[spec.family])
        assert name in str(caught.value)


def test_an_unknown_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    extra = {f"model.layers.0.self_attn.extra_{i}.weight": torch.ones(1) for i in range(7)}
    folder = rewrite(tmp_path, llama_config(), add=extra)
    with pytest.raises(CheckpointError, match=r"7 tensors fill no parameter: .*extra_0\.weight.* and 2 more"):
        account_of(folder)


@pytest.mark.parametrize(
    ("key", "taken"), [("num_experts", "num_experts = 64"), ("intermediate_size", "intermediate_size = 2048")]
)
def test_sizes_that_the_config_leaves_out_are_named(tmp_path: Path, key: str, taken: str) -> None:
    config = CONFIGS["olmoe"]()
    folder = write_checkpoint(tmp_path, config)
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config.json leaves out sizes.*\({taken}\)"):
        account_of(folder)


def test_missing_and_unknown_are_told_together(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors["transformer.wte.weight"] = tensors.pop("model.embed_tokens.weight")
    folder = write_checkpoint(tmp_path, llama_config(), tensors=tensors)
    with pytest.raises(CheckpointError, match=r"1 parameters .*embed_tokens.*; 1 tensors .*transformer\.wte"):
        account_of(folder)


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "llama"])
def test_a_moe_config_needs_experts_in_the_checkpoint(tmp_path: Path, family: str) -> None:
    folder = rewrite(tmp_path, CONFIGS[family](), drop="linear" if family == "granitemoe" else ".experts.")
    with pytest.raises(CheckpointError, match=r"gives layer \d experts, but .* has none there"):
        account_of(folder)


def test_a_checkpoint_with_experts_never_loads_as_dense(tmp_path: Path) -> None:
    config = mixtral_config(sliding_window=None)
    dense = llama_config(num_hidden_layers=2, intermediate_size=48, rope_scaling=None)
    tensors = random_tensors(dense) | random_tensors(config)
    folder = write_checkpoint(tmp_path, dense, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"^\S+ has experts, but its config.json describes a dense"):
        account_of(folder)


def test_a_dense_layer_among_sparse_ones_is_expected_where_the_config_says(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config(mlp_only_layers=[1]))
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"mlp_only_layers": [0]}))
    with pytest.raises(CheckpointError, match=r"gives layer 1 experts"):
        account_of(folder)


def test_a_wrong_shape_names_key_and_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    folder = rewrite(tmp_path, deepseek_v3_config(), drop=name, add={name: torch.ones(32, 64)})
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight in .*\[32, 64\].*\[64, 32\]"):
        account_of(folder)


def test_a_quantised_weight_is_refused(tmp_path: Path) -> None:
    config = llama_config()
    tensors = random_tensors(config)
    name = "model.layers.0.mlp.up_proj.weight"
    folder = write_checkpoint(tmp_path, config)
    write_tensors(folder, tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight in .* has dtype I8"):
        account_of(folder)


def test_rotary_buffers_are_known_and_unused(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    found = account_of(rewrite(tmp_path, llama_config(), add=buffer))
    assert [tensor.key for tensor in found.unused] == list(buffer)
    assert found.unused_bytes == 32
    assert "follow from the config" in found.unused[0].reason


def mtp_layer(config: Config, layer_idx: int) -> dict[str, Tensor]:
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = {
        name.replace(last, f"model.layers.{layer_idx}."): value
        for name, value in random_tensors(config).items()
        if name.startswith(last)
    }
    return layer | {f"model.layers.{layer_idx}.eh_proj.weight": torch.ones(64, 128)}


def test_a_multi_token_prediction_layer_is_known_and_unused(tmp_path: Path) -> None:
    config = deepseek_v3_config(num_nextn_predict_layers=1)
    layer = mtp_layer(config, 3)
    found = account_of(rewrite(tmp_path, config, add=layer))
    assert {tensor.key for tensor in found.unused} == set(layer)
    assert found.unused_bytes == sum(4 * value.numel() for value in layer.values())


def test_the_extra_layers_of_ernie_are_known_and_unused(tmp_path: Path) -> None:
    extra = {f"model.mtp_{part}.0.weight": torch.ones(4) for part in ("emb_norm", "hidden_norm", "block")}
    found = account_of(rewrite(tmp_path, CONFIGS["ernie4_5_moe"](), add=extra))
    assert {tensor.key for tensor in found.unused} == set(extra)


def test_a_vector_that_is_due_as_one_row_is_refused_as_a_vector(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    folder = rewrite(tmp_path, CONFIGS["ernie4_5_moe"](), drop=name, add={name: torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"correction_bias in .* shape \[8\], .* implies \[1, 8\]"):
        account_of(folder)


def test_a_config_with_too_few_layers_is_no_multi_token_prediction(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, deepseek_v3_config())
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"^\S+ has more layers than the 2 of its config.json"):
        account_of(folder)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = rewrite(tmp_path, llama_config(), drop="lm_head")
    with pytest.raises(CheckpointError, match=r"1 parameters are filled by no tensor: lm_head\.weight"):
        account_of(folder)


def test_a_stored_tied_head_is_known(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    head = random_tensors(config)["model.embed_tokens.weight"].clone()
    found = account_of(rewrite(tmp_path, config, add={"lm_head.weight": head}))
    assert found.tied_head == "lm_head.weight"
    assert found.unused[0].num_bytes == 4 * head.numel()
