"""Known answers of the counter generator, and independence of what the sampler draws from it."""

import numpy as np

from moesaic.engine.philox import philox, sibling_seed, uniforms


def test_known_answers():
    # Random123's kat_vectors for philox4x64 with 10 rounds.
    ones = 2**64 - 1
    assert philox((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )
    assert philox((ones,) * 4, (ones,) * 2) == (
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    )


def test_agrees_with_numpy():
    # numpy's generator steps its counter before it draws.
    for seed, position in ((7, 3), (2**64 - 1, 123_456)):
        key, counter = (np.array(words, dtype=np.uint64) for words in ([seed, 0], [position - 1, 5, 0, 0]))
        words = np.random.Philox(key=key, counter=counter).random_raw(4)
        assert philox((position, 5, 0, 0), (seed, 0)) == tuple(int(word) for word in words)


def test_uniforms_cover_the_unit_interval():
    numbers = np.array([uniforms(11, position, 0) for position in range(2000)]).ravel()
    assert 0.0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_negative_seeds_are_seeds():
    assert uniforms(-1, 0, 0) == uniforms(2**64 - 1, 0, 0)
    assert uniforms(-1, 0, 0) != uniforms(1, 0, 0)


def test_siblings_differ_and_the_first_keeps_the_seed():
    seeds = [sibling_seed(5, i) for i in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
