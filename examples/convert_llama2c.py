"""Convert a llama2.c model to a Hugging Face folder: `convert_llama2c.py MODEL.bin TOKENIZER.bin OUT`.

The format is that of github.com/karpathy/llama2.c (version 0 files, such as stories260K.bin with tok512.bin).
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
UNKNOWN_ID, BOS_ID, EOS_ID = 0, 1, 2


def read_model(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes and tensors of a file; weights of all layers lie in one tensor of each kind, layer first."""
    data = path.read_bytes()
    dim, width, num_layers, num_heads, num_kv_heads, vocab, num_positions = struct.unpack_from("<7i", data)
    is_tied, vocab, head = vocab > 0, abs(vocab), dim // num_heads
    sizes = {
        "embedding": (vocab, dim), "attention_norm": (num_layers, dim),
        "q": (num_layers, dim, dim), "k": (num_layers, num_kv_heads * head, dim),
        "v": (num_layers, num_kv_heads * head, dim), "o": (num_layers, dim, dim),
        "ffn_norm": (num_layers, dim),
        "gate": (num_layers, width, dim), "down": (num_layers, dim, width), "up": (num_layers, width, dim),
        "norm": (dim,), "cos": (num_positions, head // 2), "sin": (num_positions, head // 2),
    }  # fmt: skip
    if not is_tied:
        sizes["head"] = (vocab, dim)
    tensors, start = {}, 28
    for name, shape in sizes.items():
        count = torch.Size(shape).numel()
        values = torch.frombuffer(bytearray(data[start : start + 4 * count]), dtype=torch.float32)
        tensors[name] = values.view(shape)
        start += 4 * count
    if start != len(data):
        raise SystemExit(f"{path} has {len(data)} bytes, its header implies {start}: not a llama2.c file")
    config = {
        "hidden_size": dim, "intermediate_size": width, "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "vocab_size": vocab,
        "max_position_embeddings": num_positions,
    }  # fmt: skip
    return config, tensors


def halves(weight_FD: Tensor, num_heads: int) -> Tensor:
    """Rows from rotary pairs (0, 1), (2, 3), ... to pairs (0, C/2), (1, C/2 + 1), ... as HF rotates them."""
    rows, width = weight_FD.shape
    return weight_FD.view(num_heads, rows // num_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def hf_tensors(config: dict[str, int], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under Hugging Face names."""
    out = {"model.embed_tokens.weight": tensors["embedding"], "model.norm.weight": tensors["norm"]}
    if "head" in tensors:
        out["lm_head.weight"] = tensors["head"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out[f"{layer}.input_layernorm.weight"] = tensors["attention_norm"][i]
        out[f"{layer}.post_attention_layernorm.weight"] = tensors["ffn_norm"][i]
        out[f"{layer}.self_attn.q_proj.weight"] = halves(tensors["q"][i], config["num_attention_heads"])
        out[f"{layer}.self_attn.k_proj.weight"] = halves(tensors["k"][i], config["num_key_value_heads"])
        out[f"{layer}.self_attn.v_proj.weight"] = tensors["v"][i]
        out[f"{layer}.self_attn.o_proj.weight"] = tensors["o"][i]
        for part in ("gate", "up", "down"):
            out[f"{layer}.mlp.{part}_proj.weight"] = tensors[part][i]
    return {name: value.clone().contiguous() for name, value in out.items()}


def read_pieces(path: Path, vocab: int) -> list[tuple[str, float]]:
    """Pieces and scores; a piece of a single byte is written <0xNN>."""
    data, start, pieces = path.read_bytes(), 4, []
    for _ in range(vocab):
        score, num_bytes = struct.unpack_from("<fi", data, start)
        pieces.append((data[start + 8 : start + 8 + num_bytes].decode(), score))
        start += 8 + num_bytes
    return pieces


def tokenizer_of(pieces: list[tuple[str, float]]) -> Tokenizer:
    """A byte-fallback BPE that merges as the scores say: the pair whose union scores highest goes first."""
    special = {UNKNOWN_ID: UNKNOWN, BOS_ID: BOS, EOS_ID: EOS}
    names = [special.get(i, piece.replace(" ", "\u2581")) for i, (piece, _) in enumerate(pieces)]
    ids = {name: i for i, name in reversed(list(enumerate(names)))}
    pairs = [
        (-pieces[i][1], i, name[:cut], name[cut:])
        for i, name in enumerate(names)
        if i not in special and not name.startswith("<0x")
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    merges = [(left, right) for _, _, left, right in sorted(pairs)]
    bpe = models.BPE(vocab=ids, merges=merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special.values()]
    )
    return tokenizer


def convert(model: Path, tokenizer: Path, out: Path) -> None:
    """Write config, weights, tokenizer and generation defaults to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    sizes, tensors = read_model(model)
    save_file(hf_tensors(sizes, tensors), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(read_pieces(tokenizer, sizes["vocab_size"])).save(str(out / "tokenizer.json"))
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "head" not in tensors,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            **sizes,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": UNKNOWN,
            "add_bos_token": True,
            "model_max_length": sizes["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Read the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.model, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
