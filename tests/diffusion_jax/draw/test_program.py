"""An image depends only on its seed, text and guidance, not on its batch or the devices."""

import jax
import numpy as np
import pytest

from diffusion_jax.devices import sharding
from diffusion_jax.draw import program
from diffusion_jax.draw.seeds import halves, keys_of
from diffusion_jax.examples.digits import rendering as digits
from tests.diffusion_jax import toy

TASK = toy.task()
CAPTIONS = digits.seen_prompts()[:5]
SEEDS = [3, 1, 4, 1, 2**32 - 1]  # Two are equal, and one is the largest.
SCALES = np.array([1.0, 2.0, 3.0, 2.0, 0.5], np.float32)


@pytest.fixture(scope="module")
def params():
    return toy.init(jax.random.key(0))


@pytest.fixture(scope="module")
def draw():
    """Return the program that samples on one device."""
    return program.make_draw(TASK.sample, TASK.frozen, sharding.make_mesh(1, 1, 1))


@pytest.fixture(scope="module")
def images(draw, params):
    """Return the images that one batch of the five captions gives."""
    return draw(params, toy.ENCODER.tokenize(CAPTIONS), SEEDS, SCALES)


def pick(rows):
    texts = toy.ENCODER.tokenize([CAPTIONS[i] for i in rows])
    return texts, [SEEDS[i] for i in rows], SCALES[rows]


def assert_same(actual, expected):
    """Compares up to 1e-4, because batches of other sizes have other orders of sums."""
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_sampled_images_differ_and_are_mostly_not_clipped(images):
    assert images.shape == (5, 8, 8, 3) and images.dtype == np.float32
    assert (np.abs(images) < 1).mean() > 0.5  # Clipped images could be equal by chance.
    apart = np.abs(images[:, None] - images[None]).mean((2, 3, 4))
    assert apart[~np.eye(5, dtype=bool)].min() > 0.04


def test_the_sampling_program_is_traced_with_its_mesh(params):
    """Attention kernels need the mesh to be partitioned and to know their devices."""
    seen = []

    def sample(*arguments):
        seen.append(jax.sharding.get_abstract_mesh())
        return TASK.sample(*arguments)

    mesh = sharding.make_mesh(1, 2, 1)
    program.make_draw(sample, TASK.frozen, mesh)(params, *pick([0, 1]))
    assert seen and set(seen) == {mesh.abstract_mesh}
    assert seen[0].abstract_device.platform == "cpu"


@pytest.mark.parametrize("rows", [[2], [4, 2, 0], [3, 1, 2]])
def test_an_image_does_not_depend_on_its_batch(draw, params, images, rows):
    assert_same(draw(params, *pick(rows)), images[rows])


def test_seeds_have_64_bits_and_seeds_below_2_to_the_32_give_jax_random_key():
    seeds = [5, 2**32 - 1, 2**32 + 5, 2**63 + 5, 2**64 - 1]
    data = np.asarray(jax.random.key_data(keys_of(halves(seeds))))
    assert data[:2].tolist() == [[0, 5], [0, 2**32 - 1]]  # Equal to jax.random.key(seed).
    assert len({tuple(row) for row in data.tolist()}) == 5
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match=rf"^the seed is {wrong}: it must be a whole number"):
            halves([5, wrong])


def test_seeds_that_differ_only_above_bit_31_give_different_images(draw, params, images):
    texts, seeds, scales = pick([0, 0, 0])
    seeds[1:] = [seeds[0] + 2**32, seeds[0] + 2**63]
    (drawn,) = program.in_batches(draw, params, texts, seeds, scales, 3)
    assert_same(drawn[:1], images[:1])
    assert (np.abs(drawn[[1, 2, 2]] - drawn[[0, 0, 1]]).mean((1, 2, 3)) > 0.04).all()


def test_an_image_depends_on_its_seed_its_text_and_its_guidance(draw, params, images):
    texts, seeds, scales = pick([0] * 5)
    texts = {name: array.copy() for name, array in texts.items()}
    seeds[1] = 5
    texts["text_ids"][2, 1] ^= 2**30
    scales = np.array([1, 1, 1, 2, 1], np.float32)
    drawn = draw(params, texts, seeds, scales)
    assert_same(drawn[:1], images[:1])
    assert (np.abs(drawn - drawn[:1]).mean((1, 2, 3)) > 0.01).tolist() == [0, 1, 1, 1, 0]


def test_images_sampled_on_eight_devices_match_one_device(params, images):
    mesh = sharding.make_mesh(2, 4, 1)
    placed = jax.device_put(params, sharding.shardings(params, mesh, toy.RULES))
    assert not placed["pixels"]["kernel"].sharding.is_fully_replicated
    draw = program.make_draw(TASK.sample, TASK.frozen, mesh)
    rows = list(range(5))  # Five images cannot be divided equally over eight devices.
    assert_same(draw(placed, *pick(rows)), images)


def test_sampling_without_guidance_equals_guidance_1(draw, params):
    texts, seeds, _ = pick([0, 1, 2, 3, 4])
    ones = np.ones(5, np.float32)
    assert_same(draw(params, texts, seeds, None), draw(params, texts, seeds, ones))


def test_sampling_in_batches_gives_the_same_images_and_a_shorter_last_batch(draw, params, images):
    texts = toy.ENCODER.tokenize(CAPTIONS)
    parts = list(program.in_batches(draw, params, texts, SEEDS, SCALES, 3))
    assert [len(part) for part in parts] == [3, 2]
    assert_same(np.concatenate(parts), images)


def test_a_batch_size_above_the_number_of_images_gives_the_same_images(draw, params):
    texts, seeds, _ = pick([4, 2, 0])
    (only,) = program.in_batches(draw, params, texts, seeds, None, 5)
    whole = draw(params, toy.ENCODER.tokenize(CAPTIONS), SEEDS, None)
    assert_same(only, whole[[4, 2, 0]])
