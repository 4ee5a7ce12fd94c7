"""Which captions are encoded, by whom, and that nothing is lost or doubled."""

import hashlib
import os

import numpy as np
import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.files import sorted_tables
from diffusion_jax.precache import index, plan, store

IDENTITY = {"encoder": "x"}


def keys(*names):
    return np.array(names, store.KEY)


def open_plan(path, texts, size=2, held=()):
    """A plan whose chunks are of 4 captions, up to its counts."""
    folder = plan.open_plan(path, {}, IDENTITY)
    p = plan.Plan(folder, len(texts), size)
    for chunk in p.chunks:
        items = p.chunk(chunk)
        plan.write_keys(p, items * plan._SLOTS, keys(*(texts[i] for i in items)), chunk)
    rows = np.zeros(len(held), index.ROW)
    rows["key"] = keys(*held)
    before = index.listed(path, folder, ["shard", "gone"])
    sorted_tables.write(before.tables[0], rows)
    for part in p.ranges:
        plan.write_new_captions(p, before, part)
    return p, plan.write_counts(p)


@pytest.mark.parametrize("rows", [3, 100])
def test_of_each_key_the_first_caption_is_encoded_unless_it_is_there(tmp_path, monkeypatch, rows):
    """As sorting all keys in one place says, whatever the ranges and however they are cut."""
    monkeypatch.setattr(plan, "_CHUNK", 4)
    monkeypatch.setattr(sorted_tables, "_ROWS", rows)
    hashes = [hashlib.blake2b(bytes([i]), digest_size=16).digest() for i in range(9)]
    texts = [hashes[i] for i in np.random.default_rng(0).integers(9, size=30)]
    held = sorted(hashes[:2])
    expected = [i for i, t in enumerate(texts) if t not in held and t not in texts[:i]]
    p, total = open_plan(tmp_path, texts, held=held)
    assert len(p.ranges) == -(-30 // rows) and total == len(expected) == 7
    found = [(plan.to_encode(p, shard) // plan._SLOTS).tolist() for shard in range(4)]
    assert found == [expected[:2], expected[2:4], expected[4:6], expected[6:]]


def test_a_plan_may_be_empty(tmp_path):
    assert open_plan(tmp_path, [b"b", b"b"], held=[b"b"])[1] == 0


def test_given_captions_come_before_those_of_the_data():
    digits = open_pictures(Data("diffusion_jax.examples.digits"), 16)
    captions = plan.CaptionList(["one", "two"], digits, len(digits), 2)
    numbers, texts = captions.of_items(np.arange(1, 600))
    assert texts == ["two", *digits.texts(np.arange(598))]
    assert captions.read(numbers[[2, 0]]) == [texts[2], "two"]
    assert len(captions) == len(digits) + 2


def test_plans_of_other_data_are_other_plans(tmp_path):
    folders = {plan.open_plan(tmp_path, {"path": p}, i) for p in "ab" for i in (IDENTITY, {})}
    assert len(folders) == 4
    (tmp_path / ".shard-1.safetensors.2.tmp").write_bytes(b"")
    plan.remove(tmp_path)
    assert os.listdir(tmp_path) == []
