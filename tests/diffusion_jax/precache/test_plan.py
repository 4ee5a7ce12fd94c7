"""Plans for precaching: which captions each worker encodes."""

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
    """Open a plan with chunks of 4 captions, and count them."""
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
def test_a_plan_encodes_the_first_caption_of_each_key_not_yet_stored(tmp_path, monkeypatch, rows):
    """The result equals sorting all keys at once, for any division into ranges."""
    monkeypatch.setattr(plan, "_CHUNK", 4)
    monkeypatch.setattr(sorted_tables, "_ROWS", rows)
    hashes = [hashlib.blake2b(bytes([i]), digest_size=16).digest() for i in range(9)]
    texts = [hashes[i] for i in np.random.default_rng(0).integers(9, size=30)]
    held = sorted(hashes[:2])
    expected = [i for i, t in enumerate(texts) if t not in held and t not in texts[:i]]
    p, total = open_plan(tmp_path, texts, held=held)
    assert len(p.ranges) == -(-30 // rows) and total == len(expected) == 7
    encoded = [(plan.to_encode(p, shard) // plan._SLOTS).tolist() for shard in range(4)]
    assert encoded == [expected[:2], expected[2:4], expected[4:6], expected[6:]]


def test_a_plan_is_empty_if_everything_is_stored(tmp_path):
    assert open_plan(tmp_path, [b"b", b"b"], held=[b"b"])[1] == 0


def test_prompts_come_before_the_captions_of_the_data():
    digits = open_pictures(Data("diffusion_jax.examples.digits"), 16)
    captions = plan.CaptionList(["one", "two"], digits, len(digits), 2)
    numbers, texts = captions.of_items(np.arange(1, 600))
    assert texts == ["two", *digits.texts(np.arange(598))]
    assert captions.read(numbers[[2, 0]]) == [texts[2], "two"]
    assert len(captions) == len(digits) + 2


def test_plans_for_different_data_have_different_folders(tmp_path):
    folders = {plan.open_plan(tmp_path, {"path": p}, i) for p in "ab" for i in (IDENTITY, {})}
    assert len(folders) == 4
    (tmp_path / ".shard-1.safetensors.2.tmp").write_bytes(b"")
    plan.remove(tmp_path)
    assert os.listdir(tmp_path) == []
