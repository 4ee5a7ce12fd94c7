"""Resize kernels against Pillow and by hand. Inception's are held end to end in test_inception."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.metrics import preprocess
from tests.diffusion_jax.metrics import standin

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
IMAGENET_MEAN, IMAGENET_STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.mark.parametrize(("height", "width"), [(64, 301), (224, 224), (500, 333)])
def test_open_clips_images_are_pillows_to_the_bit(height, width):
    picture = standin.picture(height, width)
    ours = np.asarray(jax.jit(preprocess.open_clip(224))(picture[None]))[0]
    scale = 224 / min(height, width)
    size = (int(width * scale + 1e-9), int(height * scale + 1e-9))
    resized = Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)
    left, top = (round((side - 224) / 2) for side in size)
    cut = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    np.testing.assert_allclose(ours, (cut / 255 - MEAN) / STD, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(225, 223), (640, 427), (427, 640), (301, 64)])
def test_dinov2s_images_are_pillow_12s_to_the_bit(height, width):
    """Two resizes of one pass each force the order of Pillow 12 in any version: the width first."""
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    ours = np.asarray(jax.jit(preprocess.dgm_eval)(picture[None]))[0]
    narrow = Image.fromarray(picture).resize((224, height), Image.Resampling.BICUBIC)
    theirs = np.asarray(narrow.resize((224, 224), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(ours, (theirs - IMAGENET_MEAN) / IMAGENET_STD, atol=1e-6)


def test_squashed_images_are_pillows_of_floats():
    picture = standin.picture(90, 50)
    ours = np.asarray(jax.jit(preprocess.squash(28))(picture[None]))[0]
    channels = [Image.fromarray(picture[:, :, c].astype(np.float32)) for c in range(3)]
    theirs = [np.asarray(c.resize((28, 28), Image.Resampling.BICUBIC)) for c in channels]
    np.testing.assert_allclose(ours, (np.stack(theirs, -1) / 255 - MEAN) / STD, atol=2e-6)


def test_the_tf_grid_starts_at_the_top_left_corner():
    """Enlarged from 2 pixels, all beyond the second's corner repeat it."""
    image = jnp.asarray(np.array([0.0, 128.0]).reshape(1, 1, 2, 1).repeat(3, -1), jnp.float32)
    row = np.asarray(preprocess.tf(image))[0, 7, :, 0]
    expected = np.minimum(np.arange(299) * 2 / 299, 1) - 1
    np.testing.assert_allclose(row, expected, atol=1e-6)


def test_nemos_corners_stay_where_they_are():
    """150 pixels become 299: themselves, and between each two of them the kernel's middle."""
    pixels = np.random.default_rng(0).uniform(0, 255, 150).astype(np.float32)
    image = jnp.asarray(np.broadcast_to(pixels[None, None, :, None], (1, 5, 150, 3)))
    row = np.asarray(preprocess.nemo(image))[0, 0, :, 0]
    x = pixels.astype(float) / 127.5 - 1
    np.testing.assert_allclose(row[::2], x, atol=1e-6)
    near, far = x[1:-2] + x[2:-1], x[:-3] + x[3:]
    np.testing.assert_allclose(row[3:-3:2], 0.59375 * near - 0.09375 * far, atol=1e-6)


@pytest.mark.parametrize(("mode", "scale"), [("pytorch", 127.5), ("nemo", 127.5), ("tf", 128)])
def test_images_of_the_nets_size_are_only_scaled(mode, scale):
    picture = standin.picture(299, 299)[None]
    ours = np.asarray(preprocess.INCEPTION[mode](jnp.asarray(picture)))
    np.testing.assert_allclose(ours, picture / scale - 1, atol=2e-7)
    floats = preprocess.INCEPTION[mode](jnp.asarray(picture, jnp.float32))
    np.testing.assert_array_equal(ours, floats)
