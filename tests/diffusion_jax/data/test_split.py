"""Held-out records: chosen by a hash, stable when data are added, never trained on."""

import numpy as np
import pytest

from diffusion_jax.config.settings import Data, Run
from diffusion_jax.data import pipeline, sources, split
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.devices import sharding
from tests import written_tars


class Numbered(Pictures):
    """Pictures whose pixels equal their number plus `first`."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def read(self, indices, places=None):
        images = np.float32(indices + self.first)[:, None, None, None]
        return images, [f"text {i + self.first}" for i in indices]

    def usable(self, indices):
        usable = indices[indices % 7 != 0]
        return usable, *self.read(usable)


def numbers(pictures):
    return pictures.read(np.arange(len(pictures)))[0].ravel().astype(int)


def test_split_partitions_the_records_into_training_and_held_out():
    training, apart = split.split(Numbered(10_000), 0.1)
    assert sorted([*numbers(training), *numbers(apart)]) == list(range(10_000))
    assert abs(len(apart) - 1000) < 4 * np.sqrt(900)  # 4 standard deviations of a binomial.
    np.testing.assert_array_equal(np.diff(numbers(training)) > 0, True)
    assert training.texts(np.array([3]))[0] == f"text {numbers(training)[3]}"


def test_a_record_is_held_out_independently_of_other_records():
    """Added records do not move others. A larger share holds out a superset."""
    few, many = (set(numbers(split.split(Numbered(n), 0.05)[1])) for n in (3000, 9000))
    assert few == {n for n in many if n < 3000}
    assert few < set(numbers(split.split(Numbered(3000), 0.1)[1]))
    # The published first outputs of splitmix64: 0xe220a839..., 0x6e789e6a..., 0x06c45d18...
    hashed = split.hashed(np.arange(3, dtype=np.uint64)) * 2.0**32
    np.testing.assert_array_equal(np.floor(hashed), [0xE220A839, 0x6E789E6A, 0x06C45D18])
    assert min(few) == 2


def test_each_part_of_a_mixture_is_split():
    mixture = Mixture([Numbered(1000), Numbered(3000, first=10_000)], [1, 2])
    training, apart = split.split(mixture, 0.1)
    assert training.weights == [1, 2] and training.lengths[0] + apart.lengths[0] == 1000
    whole = [*range(1000), *range(10_000, 13_000)]
    assert sorted([*numbers(training), *numbers(apart)]) == whole
    usable, images, _ = apart.usable(np.arange(len(apart)))
    np.testing.assert_array_equal(images.ravel(), numbers(apart)[usable])
    assert not any(n % 10_000 % 7 == 0 for n in images.ravel()) and len(usable) < len(apart)


def test_a_held_out_share_of_0_returns_the_same_pictures():
    pictures = Numbered(10)
    training, apart = split.split(pictures, 0.0)
    assert training is pictures and len(apart) == 0


def test_with_a_held_out_share_of_1_all_pictures_are_measured():
    pictures = Numbered(10)
    assert split.split(pictures, 1.0) == (pictures, pictures)


def test_usable_skips_unusable_held_out_records():
    _, apart = split.split(Numbered(1000), 0.2)
    rows = np.arange(len(apart))
    usable, images, texts = apart.usable(rows)
    np.testing.assert_array_equal(images.ravel(), [n for n in numbers(apart) if n % 7])
    np.testing.assert_array_equal(numbers(apart)[usable], images.ravel())
    assert len(texts) == len(images) < len(apart)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_training_batches_never_contain_held_out_records(share):
    run, data = (Run(steps=1, batch_size=8), Data("diffusion_jax.examples.digits", threads=0, heldout=share))
    tokenize = lambda texts: {"length": np.array([len(text) for text in texts])}
    mesh = sharding.make_mesh()
    with pipeline.training_batches(Numbered(64), tokenize, run, data, mesh) as batches:
        seen = {int(n) for _ in range(16) for n in next(batches)["image"].ravel()}
        if not share:
            assert batches.apart is None and len(seen) == 64
            return
        apart = batches.apart
        assert apart is not None and seen.isdisjoint(numbers(apart.pictures))
        assert len(seen) + len(apart.pictures) == 64
        keys, batch = apart.read(1000)
        np.testing.assert_array_equal(batch["image"].ravel(), keys)
        fewer, _ = apart.read(8)
        assert 0 < len(fewer) < len(keys) == len(batch["length"]) and set(fewer) < set(keys)


def test_added_files_do_not_move_others_between_training_and_held_out(tmp_path):
    """The choice depends on names in a folder, and on positions in a tar."""

    def held(source, place):
        records = sources.open_records(Data(source, path=str(place)))
        rows = np.arange(len(records))
        apart = split.hashed(records.keys(rows)) < 0.3
        return {records.texts([int(row)])[0] for row in rows[apart]}

    def add(names):
        for name in names:
            (tmp_path / f"{name}.png").write_bytes(b"")
            (tmp_path / f"{name}.txt").write_text(name)

    add(f"b{i}" for i in range(60))
    before = held("folder", tmp_path)
    add(f"a{i}" for i in range(60))  # These names sort before the others.
    after = held("folder", tmp_path)
    assert 8 < len(before) < 28 and before == {name for name in after if name.startswith("b")}
    for path, letter in (("here/b.tar", "b"), ("there/b.tar", "b"), ("there/a.tar", "a")):
        members = {f"{letter}{i}.{s}": f"{letter}{i}".encode() for i in range(60) for s in ("png", "txt")}
        written_tars.write(tmp_path / path, members)
    alone, both = (held("webdataset", tmp_path / folder) for folder in ("here", "there"))
    assert 8 < len(alone) < 28 and alone == {name for name in both if name.startswith("b")}
