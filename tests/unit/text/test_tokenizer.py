"""Tokenizer files, exact decoding, and pieces of a stream that join to the whole."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from fakes import train_tokenizer, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from moesaic.errors import CheckpointError, RequestError, UnsupportedModelError
from moesaic.text.tokenizer import Tokenizer

CONFIG = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@cache
def byte_level() -> tuple[Library, Tokenizer]:
    library = train_tokenizer()
    library.add_tokens(
        [AddedToken("\uff5cx\uff5c", normalized=False), AddedToken("two words", normalized=False)]
    )
    return library, Tokenizer(library.to_str(), config=CONFIG)


def sentencepiece_like(decoder: decoders.Decoder) -> tuple[Library, Tokenizer]:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        "\u2581\u2581",
        "a",
        "\u2581a",
    ]
    pieces += ["b", "\u2581the", "\u4e2d", "\u2581\u4e2d", "x\u2581y"]
    library = Library(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    library.decoder = decoder
    library.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    return library, Tokenizer(library.to_str(), config={"eos_token": "</s>"})


DECODERS = {
    "llama": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "strip-two": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "none": None,
}


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    decoder = tokenizer.stream_decoder(skip_special_tokens=skip)
    pieces = [decoder.feed(i) for i in ids]
    return "".join(pieces) + decoder.finish()


@given(ids=st.lists(st.integers(0, 381), max_size=40), skip=st.booleans())
@settings(max_examples=300)
def test_byte_level_decoding_equals_the_library_and_the_stream(ids: list[int], skip: bool) -> None:
    library, tokenizer = byte_level()
    expected = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert streamed(tokenizer, ids, skip=skip) == expected


@given(data=st.binary(max_size=60))
def test_random_bytes_stream_exactly(data: bytes) -> None:
    library, tokenizer = byte_level()
    ids = [library.token_to_id(pre) for pre in byte_names(data)]
    assert streamed(tokenizer, ids) == data.decode("utf-8", "replace")


def byte_names(data: bytes) -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in data]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_round_trips_and_never_shows_half_a_character(text: str) -> None:
    _, tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = tokenizer.stream_decoder(skip_special_tokens=False)
    shown = ""
    for token_id in ids:
        shown += decoder.feed(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert decoder.finish() == ""


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
@settings(max_examples=60)
def test_sentencepiece_decoding_equals_the_library_and_the_stream(name: str, data: st.DataObject) -> None:
    library, tokenizer = sentencepiece_like(DECODERS[name])
    no_bytes = st.sampled_from([0, 1, 2, *range(259, library.get_vocab_size())])
    whole = st.sampled_from(["\u00e9", "\u4e2d", "\U0001f600", "\n"]).map(
        lambda char: [3 + byte for byte in char.encode()]
    )
    groups = data.draw(st.lists(st.one_of(no_bytes.map(lambda i: [i]), whole), max_size=12))
    ids = [i for group in groups for i in group]
    skip = data.draw(st.booleans())
    expected = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert streamed(tokenizer, ids, skip=skip) == expected


@given(ids=st.lists(st.integers(0, 266), max_size=30))
def test_stray_bytes_give_one_replacement_each_and_keep_what_is_whole(ids: list[int]) -> None:
    _, tokenizer = sentencepiece_like(DECODERS["llama"])
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_a_continuation_keeps_its_leading_space_and_completes_the_prompts_character() -> None:
    library, tokenizer = sentencepiece_like(DECODERS["llama"])
    the = library.token_to_id("\u2581the")
    assert tokenizer.decode([the]) == "the"
    assert tokenizer.stream_decoder(prompt_ids=[the]).feed(the) == " the"
    first, *rest = [3 + byte for byte in "\u4e2d".encode()]
    decoder = tokenizer.stream_decoder(prompt_ids=[the, first])
    assert [decoder.feed(i) for i in rest] == ["", "\u4e2d"]


def test_token_bytes_join_to_the_text() -> None:
    _, tokenizer = byte_level()
    text = "caf\u00e9 \U0001f600!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.token_bytes(1) == b"<|eos|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_load_reads_end_tokens_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert tokenizer.encode("the")[0] == 0
    assert 0 not in tokenizer.encode("the", add_special_tokens=False)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert Tokenizer.load(tmp_path).eos_token_ids == (1, 2, 3)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 4}}')
    assert Tokenizer.load(tmp_path).eos_token_ids == (1, 4)


def test_digest_changes_with_the_vocabulary_only(tmp_path: Path) -> None:
    first = Tokenizer.load(write_tokenizer(tmp_path / "a"))
    assert Tokenizer.load(write_tokenizer(tmp_path / "b", chat_template=None)).digest == first.digest
    other = Tokenizer(train_tokenizer(370).to_str(), config={})
    assert other.digest != first.digest
    assert other.vocab_size == 370


def test_stored_truncation_and_padding_are_not_applied() -> None:
    library = train_tokenizer()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    tokenizer = Tokenizer(library.to_str(), config={})
    assert len(tokenizer.encode("the cat sat on the mat and the dog sat")) not in (4, 64)


def test_tokens_declared_in_the_config_are_added(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    plain = Tokenizer.load(tmp_path)
    entry = {"content": "<|think|>", "special": True}
    path.write_text(json.dumps({**config, "added_tokens_decoder": {str(plain.vocab_size): entry}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<|think|>", add_special_tokens=False) == [plain.vocab_size]
    assert tokenizer.digest != plain.digest
    path.write_text(json.dumps({**config, "added_tokens_decoder": {"7": entry}}))
    with pytest.raises(CheckpointError, match=r"gives '<\|think\|>' the id 7, tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json \(it has none at all\)"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save_pretrained converts it"):
        Tokenizer.load(tmp_path)
    whole = write_tokenizer(tmp_path / "whole") / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_text(whole.read_text()[:-500])
    with pytest.raises(CheckpointError, match=r"/tokenizer.json is no tokenizer that .* copy the model's"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for value, message in (
        ('"1"', "must be an integer"),
        ("true", "must be an integer"),
        ("9999", r"/generation_config.json: eos_token_id \[9999\] names no token of .*: correct it"),
    ):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(tmp_path)


def test_half_a_surrogate_is_refused() -> None:
    _, tokenizer = byte_level()
    with pytest.raises(RequestError, match="position 1"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder: decoders.Decoder) -> None:
    library = train_tokenizer()
    library.decoder = decoder
    with pytest.raises(UnsupportedModelError, match="decoder"):
        Tokenizer(library.to_str(), config={})


def test_prefix_spaces_of_the_pre_tokenizer_do_not_matter_to_decoding() -> None:
    library = train_tokenizer()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = Tokenizer(library.to_str(), config={})
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode(ids) == library.decode(ids) == " the cat"
