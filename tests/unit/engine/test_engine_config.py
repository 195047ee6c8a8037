"""Wishes become complete settings, and what contradicts itself is refused with the arithmetic."""

from dataclasses import replace

import pytest
from config_cases import CONFIGS
from fakes import tiny_spec

from moesaic.engine.config import VARIABLES, EngineConfig, Environment, read_environment
from moesaic.engine.machine import Machine
from moesaic.errors import CapacityError, ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.numerics import preset

SPEC = tiny_spec(100)  # 3 layers x 2 x 1 head x 8 values: 192 bytes a token in float32, 3072 a block of 16
NUMERICS = preset("portable", dtype="float32")
BLOCK_BYTES = 3 * 2 * 8 * 4 * 16
MACHINE = Machine(
    num_cpus=4,
    cpu_source="processor affinity",
    total_bytes=10**9,
    available_bytes=10**8,
    memory_source="test",
)


def resolve(machine: Machine = MACHINE, **options: object):
    return EngineConfig.parse("m", options).resolve(SPEC, NUMERICS, machine)


def test_the_pool_is_all_that_the_limits_can_use():
    resolved = resolve(max_num_seqs=2, max_model_len=40)
    assert resolved.num_blocks == (6,)
    assert resolved.kv_bytes == 6 * BLOCK_BYTES
    assert resolved.kv_source == "all that the limits can use"
    assert resolved.notes == ()
    assert resolved.num_threads == 4
    assert "6 blocks of 16 tokens, 3.07 kB each" in resolved.describe_kv()


def test_the_pool_is_bounded_by_free_memory_and_the_context_by_the_pool():
    machine = replace(MACHINE, available_bytes=10 * BLOCK_BYTES)
    resolved = resolve(machine)
    assert resolved.num_blocks == (7,)
    assert resolved.limits.max_model_len == 7 * 16
    assert "70% of 30.7 kB free after loading, test" in resolved.kv_source
    assert "max_model_len is 112, not the model's 4096" in resolved.notes[0]


@pytest.mark.parametrize(("original", "num_notes"), [(64, 1), (256, 0)])
def test_longrope_says_that_short_sequences_are_turned_like_long_ones(original, num_notes):
    block = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.1, "long_mscale": 1.3}
    block |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    spec = read_config(CONFIGS["phimoe"] | {"rope_scaling": block}, name="config.json")
    notes = EngineConfig.parse("m", {}).resolve(spec, NUMERICS, MACHINE).notes
    assert len(notes) == num_notes
    assert all("sequences of up to 64 tokens" in note for note in notes)


def test_kv_bytes_as_asked():
    resolved = resolve(kv_bytes=4 * BLOCK_BYTES + 5, max_model_len=64)
    assert resolved.num_blocks == (4,)
    assert resolved.kv_source == "as asked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bytes": 3 * BLOCK_BYTES, "max_model_len": 64}, "one request of 64 tokens"),
        ({"kv_bytes": 2 * 10**8}, "100 MB free after loading"),
        ({"kv_bytes": 10}, "a KV pool of 10 B is too small: one request of 16 tokens needs"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(CapacityError, match=message):
        resolve(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, "knows 4096 positions"),
        ({"num_threads": 8}, "may use 4 processors"),
        ({"preset": "quick"}, "known: fast, portable"),
        ({"numa": "interleave"}, "numa 'interleave' is unknown; known: off, spread"),
        ({"dtype": "float16"}, "did you mean bfloat16"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1, got 0"),
        ({"max_num_seqs": True}, "got True"),
        ({"kv_bytes": 1.5e9}, "whole number"),
        ({"max_tokens_per_step": 8, "max_num_seqs": 9}, r"max_tokens_per_step \(8\)"),
        ({"max_tokens": 8}, "unknown engine option 'max_tokens'; did you mean max_tokens_per_step"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**options)


def test_environment_fills_what_was_not_stated():
    environment = read_environment({"MOESAIC_NUM_THREADS": "3", "MOESAIC_KV_BYTES": "2MiB", "HOME": "/"})
    assert environment == Environment(num_threads=3, kv_bytes=2 << 20)
    config = EngineConfig(model="m", num_threads=2).with_environment(environment)
    assert (config.num_threads, config.kv_bytes) == (2, 2 << 20)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MOESAIC_NUM_THREADS", "two", "MOESAIC_NUM_THREADS: 'two' is not a whole number"),
        ("MOESAIC_NUM_THREADS", "0", "at least 1"),
        ("MOESAIC_KV_BYTES", "lots", "MOESAIC_KV_BYTES: 'lots' is not a size"),
        ("MOESAIC_LOG_LEVEL", "LOUD", "known: DEBUG"),
        ("MOESAIC_NUM_THREAD", "1", "did you mean MOESAIC_NUM_THREADS"),
    ],
)
def test_bad_variables_are_refused(name, value, message):
    with pytest.raises(ConfigError, match=message):
        read_environment({name: value})


def test_every_variable_fills_a_field():
    fields = {variable.field for variable in VARIABLES if variable.field}
    assert fields == set(Environment.__dataclass_fields__)
    assert all(variable.name.startswith("MOESAIC_") and variable.help for variable in VARIABLES)
