"""Which captions are encoded, by whom, and that nothing is lost or doubled."""

import os

import numpy as np
import pytest

from diffusion_jax.data.sources import open_pictures
from diffusion_jax.precache import plan, store
from diffusion_jax.precache.workers import Share, ahead
from diffusion_jax.settings import Data

IDENTITY = {"encoder": "x"}


def keys(*names):
    return np.array(names, store.KEY)


@pytest.mark.parametrize(("count", "workers"), [(10, 1), (10, 3), (2, 5), (0, 2)])
def test_each_worker_does_its_own_part_first_and_the_rest_if_need_be(count, workers):
    turns = [list(Share(w, workers).turns(count)) for w in range(workers)]
    assert all(sorted(order) == list(range(count)) for order in turns)
    own = [order[: count * (w + 1) // workers - count * w // workers]
           for w, order in enumerate(turns)]  # fmt: skip
    assert [i for part in own for i in part] == list(range(count))


def test_of_each_key_the_first_caption_is_encoded_unless_it_is_there():
    numbers, different = plan.pending(keys("b", "a", "b", "d", "c", "a"), keys("c", "x"))
    assert (numbers.tolist(), different) == ([0, 1, 3], 4)
    numbers, different = plan.pending(keys("b", "b"), keys())
    assert (numbers.tolist(), different) == ([0], 1)


def test_given_captions_come_before_those_of_the_data():
    digits = open_pictures(Data("digits"), 16)
    captions = plan.Captions(["one", "two"], digits, len(digits), 2)
    texts = captions.read(np.arange(1, 600))
    assert texts == ["two", *digits.texts(np.arange(598))]
    assert len(captions) == len(digits) + 2


def test_keys_are_read_once_whoever_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_CHUNK", 4)
    reads = []

    class Counted(plan.Captions):
        def read(self, numbers):
            reads.extend(numbers.tolist())
            if len(reads) == 12:
                raise KeyboardInterrupt
            return super().read(numbers)

    captions = Counted([f"text {i}" for i in range(18)], None, 0, 1)
    expected = store.keys_of(captions.prompts, IDENTITY)
    report = lambda done: None
    with pytest.raises(KeyboardInterrupt):
        plan.read_keys(captions, tmp_path, IDENTITY, Share(), report)
    for worker in (1, 0):
        found = plan.read_keys(captions, tmp_path, IDENTITY, Share(worker, 2), report)
        np.testing.assert_array_equal(found, expected)
    assert sorted(reads) == sorted([*range(18), *range(8, 12)])  # The chunk that was lost.


def test_plans_of_other_data_are_other_plans(tmp_path):
    folders = {plan.folder_of(tmp_path, {"path": p}, i) for p in "ab" for i in (IDENTITY, {})}
    assert len(folders) == 4
    next(iter(folders)).mkdir(parents=True)
    (tmp_path / ".shard-1.safetensors.2.tmp").write_bytes(b"")
    plan.remove(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_next_item_is_computed_while_one_is_used():
    started = []
    work = lambda i: started.append(i) or -i
    for item, result in ahead(work, iter(range(4))):
        assert result == -item
    assert started == [0, 1, 2, 3]
    assert list(ahead(abs, iter([]))) == []
