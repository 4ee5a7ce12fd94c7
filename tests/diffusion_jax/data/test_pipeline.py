"""The order of the data does not depend on the number of processes, threads or restarts."""

import functools
import json
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from diffusion_jax.config.settings import Data
from diffusion_jax.data import pipeline
from diffusion_jax.data.aspect_buckets import Buckets
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files import sheets
from diffusion_jax.text import hashed

ROOT = pathlib.Path(__file__).parents[3]
TOKENIZE = hashed.encoder(32, 6).tokenize


class Numbers(Pictures):
    """Pictures of one pixel whose value is their number."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def read(self, indices, places=None):
        self.places = places
        pixels = np.stack([indices % 256, indices // 256, indices * 0], -1).astype(np.uint8)
        return np.stack([pixels, pixels * 0], 1)[:, None], [str(self.first + i) for i in indices]


def batches(length=10, batch_size=4, seed=0, tokenize=lambda texts: {"n": np.array(texts, int)}, **kw):
    return pipeline.make_batches(Numbers(length), tokenize, batch_size=batch_size, seed=seed, **kw)


def numbers(iterator, steps):
    with iterator:
        return np.stack([next(iterator)["n"] for _ in range(steps)])


def batches_of(path, format="folder", **kw):
    """Return batches of four pictures of a data set."""
    return pipeline.make_batches(open_pictures(Data(format, str(path)), 8), TOKENIZE, batch_size=4, seed=3, **kw)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    path = digits.write_examples(tmp_path_factory.mktemp("data"), 11, size=8)
    (path / "00007.png").write_bytes(b"")
    return str(path)


def test_batches_of_one_row_have_the_same_order_as_larger_batches():
    order = numbers(batches(batch_size=2), 12).ravel()
    np.testing.assert_array_equal(numbers(batches(batch_size=1), 24).ravel(), order)
    # Two processes share the batch, so each has one row.
    of = lambda p: numbers(batches(batch_size=2, process_index=p, process_count=2), 12).ravel()
    np.testing.assert_array_equal(np.stack([of(0), of(1)], 1).ravel(), order)


def test_batches_of_one_row_can_be_resumed_and_have_names():
    with batches(batch_size=1) as first, batches(batch_size=1) as second:
        rows = [int(next(first)["n"][0]) for _ in range(5)]
        assert first.names([0]) == [f"picture {rows[-1]}"]
        second.set_state(first.get_state())
        assert int(next(first)["n"][0]) == int(next(second)["n"][0])


def test_data_smaller_than_its_share_of_a_batch_is_reported_as_repeated():
    buckets = Buckets([(16, 16), (48, 16)], np.array([0] * 8 + [1] * 3))
    (line,) = pipeline.repetitions(Numbers(11), buckets, 8)
    assert line.startswith("the bucket 48x16 has 3 pictures for 8 rows of a batch, so a batch repeats them: lower")
    assert pipeline.repetitions(Numbers(8), None, 8) == []
    (line,) = pipeline.repetitions(Numbers(7), None, 8)
    assert line.startswith("the data set has 7 pictures for 8 rows of a batch")
    mixture = Mixture([Numbers(100), Numbers(1)], [3, 1])
    (line,) = pipeline.repetitions(mixture, None, 8)
    assert line.startswith("source 2 of the data set has 1 picture for 2 rows of a batch")


def test_each_epoch_has_a_different_permutation():
    epochs = numbers(batches(10, 5), 6).reshape(3, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(10), (3, 1)))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert (epochs[0] != numbers(batches(10, 5, seed=1), 2).ravel()).any()


def test_the_order_of_a_seed_matches_the_first_release():
    """Runs started with any release can be resumed."""
    assert numbers(batches(7, 4, seed=2023), 4).ravel().tolist() == [6, 1, 3, 2, 4, 5, 0, 2, 6, 1, 4, 3, 0, 5, 0, 3]
    mixed = Mixture([Numbers(5), Numbers(3, first=100)], [3, 1])
    tokenize = lambda texts: {"n": np.array(texts, int)}
    iterator = pipeline.make_batches(mixed, tokenize, batch_size=4, seed=2023)
    assert numbers(iterator, 4).ravel().tolist() == [0, 1, 3, 100, 2, 4, 2, 102, 0, 1, 4, 101, 3, 0, 3, 102]
    with batches(7, 16, seed=2023, crop="random", flip=True, num_threads=0) as iterator:
        second = next(iterator)["image"][:, 0, 1]  # Nonzero if mirrored, except for picture 0.
        places = iterator.pictures.places
    assert second.any(-1).astype(int).tolist() == [1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(places[:2], [[0.832637, 0.496046], [0.397971, 0.64301]], atol=1e-6)


def test_the_order_does_not_depend_on_batch_size_or_threads():
    expected = numbers(batches(100, 4), 12).ravel()
    np.testing.assert_array_equal(numbers(batches(100, 24), 2).ravel(), expected)
    np.testing.assert_array_equal(numbers(batches(100, 4, num_threads=3), 12).ravel(), expected)
    np.testing.assert_array_equal(numbers(batches(100, 4, num_threads=0), 12).ravel(), expected)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_read_consecutive_parts_of_the_global_batch(count):
    whole = numbers(batches(33, 8), 9)  # More than two epochs.
    parts = [numbers(batches(33, 8, process_index=p, process_count=count), 9) for p in range(count)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_a_batch_may_be_larger_than_the_data():
    batch = numbers(batches(3, 8), 1)[0]
    np.testing.assert_array_equal(np.sort(batch[:3]), np.arange(3))
    np.testing.assert_array_equal(np.sort(batch[3:6]), np.arange(3))


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_restored_iterator_continues_exactly_also_with_broken_images(damaged, num_threads):
    make = functools.partial(batches_of, damaged, num_threads=num_threads)
    with make() as iterator:
        expected = [next(iterator) for _ in range(9)]
        assert iterator.skipped() == {"broken_image": 1}
    with make() as iterator:
        for _ in range(4):
            next(iterator)
        state = iterator.get_state()
    with make() as iterator:
        next(iterator)  # set_state below also works after further steps.
        iterator.set_state(state)
        assert iterator.get_state() == state
        jax.tree.map(np.testing.assert_array_equal, [next(iterator) for _ in range(5)], expected[4:])
    with make(process_index=1, process_count=2) as iterator:  # Two processes can restore the state of a single one.
        iterator.set_state(state)
        np.testing.assert_array_equal(next(iterator)["image"], expected[4]["image"][2:])


def test_the_state_is_json_and_is_rejected_with_other_data():
    with batches(10, 4, seed=7) as iterator:
        next(iterator)
        state = iterator.get_state()
    saved = json.loads(state)
    assert saved.pop("digests")["the number of pictures"] == 10
    assert saved == {"samples": 4, "seed": 7, "pictures": 10}
    with batches(10, 2, seed=7) as iterator:
        iterator.set_state(state)
        np.testing.assert_array_equal(next(iterator)["n"], numbers(batches(10, 2, seed=7), 3)[2])
    message = r"'pictures': 10}, but the data are now .*'pictures': 11}"
    with batches(11, 4, seed=7) as iterator, pytest.raises(ValueError, match=message):
        iterator.set_state(state)


@pytest.mark.parametrize("format", ["folder", "webdataset"])
def test_a_position_is_rejected_if_pictures_of_the_same_number_were_renamed(tmp_path, format):
    digits.write_examples(tmp_path, 6, size=8, format=format)
    opened = functools.partial(batches_of, tmp_path, format)
    with opened() as iterator:
        expected = [next(iterator) for _ in range(2)]
        earlier = json.loads(iterator.get_state()) | {"samples": 4}
        iterator.set_state(state := json.dumps(earlier).encode())
    del earlier["digests"]
    for file in list(tmp_path.glob("00001.*" if format == "folder" else "*.tar")):
        file.rename(file.with_name(f"9{file.name}"))
    with opened() as iterator:
        with pytest.raises(pipeline.OtherData, match=r"names differs .* order cannot be continued"):
            iterator.set_state(state)
        iterator.set_state(json.dumps(earlier).encode())  # Earlier versions saved no digests.
        same = np.array_equal(next(iterator)["image"], expected[1]["image"])
        assert same == (format == "webdataset")  # A folder has another order now.


def test_a_position_is_continued_with_a_warning_if_a_caption_was_edited(tmp_path, caplog):
    path = digits.write_examples(tmp_path, 6, size=8)
    opened = functools.partial(batches_of, path)
    with opened() as iterator:
        state = [next(iterator) and iterator.get_state() for _ in range(2)][-1]
        expected = [next(iterator)["image"] for _ in range(2)]
    (path / "00001.txt").write_text("an edited caption")
    for images in expected:
        with opened() as iterator:
            iterator.set_state(state)
            np.testing.assert_array_equal(next(iterator)["image"], images)
            state = iterator.get_state()
        message = "texts and of the files' sizes differs from that of the saved position"
        assert caplog.text.count(message) == 1  # The second start has the edited caption already.
    earlier = json.loads(state)
    earlier["digests"].popitem()
    earlier["digests"]["the digest of the files' sizes"] = "of an earlier version"
    with opened() as iterator:
        iterator.set_state(json.dumps(earlier).encode())
    assert caplog.text.count("differs from") == 1


def test_a_position_between_two_batches_of_another_size_continues_at_its_sample():
    order = [int(n) for batch in numbers(batches(10, 4, seed=7), 8) for n in batch]
    with batches(10, 4, seed=7) as iterator:
        state = [next(iterator) and iterator.get_state() for _ in range(3)][-1]
    for processes in (1, 2):
        parts = []
        for p in range(processes):
            with batches(10, 10, seed=7, process_index=p, process_count=processes, num_threads=2) as part:
                next(part)
                part.set_state(state)
                assert part.get_state() == state
                parts.append([next(part)["n"] for _ in range(2)])
                assert json.loads(part.get_state())["samples"] == 32
                names = part.names(range(10), back=1)
                assert names == [f"picture {n}" for n in order[12:22]]
                final = part.get_state()
        whole = [np.concatenate(rows).tolist() for rows in zip(*parts, strict=True)]
        assert whole == [order[12:22], order[22:32]]
    with batches(10, 4, seed=7) as iterator:  # And back to the first size.
        iterator.set_state(final)
        assert next(iterator)["n"].tolist() == numbers(batches(10, 4, seed=7), 9)[8].tolist()


def test_random_crops_and_captions_belong_to_the_sample_at_any_batch_size():
    make = lambda size: pipeline.make_batches(digits.Digits(16), TOKENIZE, batch_size=size, seed=3, flip=True)
    with make(4) as small, make(6) as large:
        pictures = np.concatenate([next(small)["image"] for _ in range(4)])
        large.set_state(json.dumps(json.loads(small.get_state()) | {"samples": 4}).encode())
        continued = np.concatenate([next(large)["image"] for _ in range(2)])
        texts = small.texts(range(4))
        assert large.texts(range(6))[2:] == texts
    np.testing.assert_array_equal(continued, pictures[4:16])


def test_flip_mirrors_half_of_the_samples_chosen_by_their_number():
    def images(**kw):
        with batches(1000, 64, **kw) as iterator:
            return np.concatenate([next(iterator)["image"] for _ in range(4)])

    plain, flipped = images(), images(flip=True)
    mirrored = (flipped != plain).any((1, 2, 3))
    np.testing.assert_array_equal(flipped[mirrored], plain[mirrored][:, :, ::-1])
    assert abs(mirrored.mean() - 0.5) < 4 * 0.5 / 256**0.5  # Four standard errors.
    halves = [images(flip=True, process_index=p, process_count=2) for p in range(2)]
    halves = [h.reshape(4, 32, 1, 2, 3) for h in halves]
    np.testing.assert_array_equal(np.concatenate(halves, 1).reshape(flipped.shape), flipped)


def test_a_batch_of_digits_is_uint8_with_token_ids():
    with pipeline.make_batches(digits.Digits(16), TOKENIZE, batch_size=8, seed=0) as iterator:
        batch = next(iterator)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "image": ((8, 16, 16, 3), "uint8"),
        "text_ids": ((8, 6), "uint32"),
        "text_mask": ((8, 6), "bool"),
    }


def test_a_batch_size_not_divisible_by_the_process_count_is_an_error():
    with pytest.raises(ValueError, match="batch_size is 6: it must be a positive multiple of 4"):
        batches(10, 6, process_count=4)


def test_an_error_in_a_reading_thread_is_raised_by_next():
    def fail(texts):
        raise ValueError("no such words")

    with batches(tokenize=fail, num_threads=2) as it, pytest.raises(ValueError, match="no such words"):
        next(it)


def test_close_stops_the_reading_threads_and_can_be_called_twice():
    def readers():
        return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]

    for thread in readers():  # Threads of earlier tests.
        thread.join(timeout=60)
    iterator = batches(num_threads=2)
    next(iterator)
    assert readers()
    iterator.close()
    iterator.close()
    for thread in readers():
        thread.join(timeout=60)
    assert not readers()


FAILING = """
from diffusion_jax.data import pipeline
from diffusion_jax.examples.digits import rendering as digits
batches = pipeline.make_batches(digits.Digits(16), lambda texts: {}, batch_size=8, seed=0, num_threads=4)
next(batches)
raise RuntimeError("the step failed")
"""


@pytest.mark.gate
@pytest.mark.slow
def test_a_process_that_raises_an_error_exits_although_its_batches_are_open():
    ended = subprocess.run([sys.executable, "-c", FAILING], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("RuntimeError: the step failed")


def test_global_arrays_hold_the_rows_in_order_on_every_device():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    batch = {"image": np.arange(8 * 3).reshape(8, 3).astype(np.uint8), "mask": np.eye(8, dtype=bool)}
    placed = pipeline.to_global(batch, sharding)
    jax.tree.map(np.testing.assert_array_equal, placed, batch)
    assert placed["image"].addressable_shards[7].data.shape == (2, 3)
    assert pipeline.local_rows(sharding, 8) == (0, 1)
    assert pipeline.local_rows(NamedSharding(mesh, PartitionSpec()), 8) == (0, 1)


def test_share_computes_a_processs_part_from_the_rows_of_its_devices():
    assert pipeline.share([(4, 6), (6, 8)], 8) == (1, 2)
    # Two devices hold the same rows.
    assert pipeline.share([(6, 8), (4, 6), (4, 6), (6, 8)], 16) == (1, 4)
    with pytest.raises(ValueError, match=r"hold rows \[\(0, 2\), \(6, 8\)\] of a batch of 8"):
        pipeline.share([(6, 8), (0, 2)], 8)


def test_random_crops_depend_on_the_sample_number_and_center_crops_do_not(tmp_path):
    """Pixels encode their position: red increases to the right, green downwards."""
    ramp = np.arange(64, dtype=np.uint8)
    picture = np.stack([*np.meshgrid(ramp, ramp), np.zeros((64, 64), np.uint8)], -1)
    for i in range(8):
        sheets.write_png(tmp_path / f"{i}.png", picture)
        (tmp_path / f"{i}.txt").write_text("a ramp")
    pictures = open_pictures(Data("folder", path=str(tmp_path), resize=64), 16)

    def corners(crop, batch_size):
        made = pipeline.make_batches(pictures, TOKENIZE, batch_size=batch_size, seed=3, crop=crop)
        with made:
            steps = [next(made)["image"] for _ in range(32 // batch_size)]
        return np.concatenate(steps)[:, 0, 0, :2]

    assert corners("center", 8).tolist() == [[24, 24]] * 32
    random = corners("random", 8)
    assert random.min() < 8 and random.max() > 40
    assert abs(np.corrcoef(random.T)[0, 1]) < 0.5
    np.testing.assert_array_equal(random, corners("random", 16))


def mixed(batch_size, seed=0, weights=(3, 1), lengths=(10, 7), **kw):
    pictures = Mixture([Numbers(length) for length in lengths], weights)
    columns = pictures.columns
    # Return the requested indices in place of texts.
    pictures.columns = lambda indices, places=None: columns(indices)._replace(texts=indices)
    return pipeline.make_batches(pictures, lambda texts: {"n": texts}, batch_size=batch_size, seed=seed, **kw)


def test_a_mixture_keeps_its_weights_and_the_epochs_of_each_part():
    order = numbers(mixed(4), 70).ravel()
    first, second = order[order < 10], order[order >= 10]
    assert (len(first), len(second)) == (210, 70)
    for part, size, start in ((first, 10, 0), (second, 7, 10)):
        epochs = part.reshape(-1, size)
        np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(size) + start, (len(epochs), 1)))
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > len(epochs) // 2
    # Every prefix keeps the weights, up to one sample.
    running = np.cumsum(order >= 10) - np.arange(1, len(order) + 1) / 4
    assert np.abs(running).max() <= 1


def test_the_order_of_a_mixture_is_equal_for_all_batch_sizes_and_restarts():
    order = numbers(mixed(4, seed=5), 18).ravel()
    np.testing.assert_array_equal(numbers(mixed(24, seed=5, num_threads=2), 3).ravel(), order)
    parts = [numbers(mixed(8, 5, process_index=p, process_count=2), 9) for p in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, 1).ravel(), order)
    assert (numbers(mixed(4, seed=6), 18).ravel() != order).any()
    with mixed(4, seed=5) as iterator:
        for _ in range(7):
            next(iterator)
        state = iterator.get_state()
    restored = mixed(2, seed=5)
    restored.set_state(state)
    np.testing.assert_array_equal(numbers(restored, 10).ravel(), order[28:48])
    for changed in (mixed(4, 5, weights=(1, 1)), mixed(4, 5, lengths=(7, 10))):
        with changed, pytest.raises(ValueError, match="order cannot be continued"):
            changed.set_state(state)
