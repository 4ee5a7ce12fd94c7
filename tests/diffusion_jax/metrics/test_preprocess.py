"""Resize kernels against Pillow and by hand. test_inception.py tests Inception's end to end."""

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
def test_open_clip_preprocessing_matches_pillow(height, width):
    picture = standin.picture(height, width)
    ours = np.asarray(jax.jit(preprocess.open_clip(224))(picture[None]))[0]
    scale = 224 / min(height, width)
    size = (int(width * scale + 1e-9), int(height * scale + 1e-9))
    resized = Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)
    left, top = (round((side - 224) / 2) for side in size)
    cut = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    np.testing.assert_allclose(ours, (cut / 255 - MEAN) / STD, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(225, 223), (640, 427), (427, 640), (301, 64)])
def test_dinov2_preprocessing_matches_pillow_12(height, width):
    """Two resizes force Pillow 12's order in every version: width first, then height."""
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    ours = np.asarray(jax.jit(preprocess.dgm_eval)(picture[None]))[0]
    narrow = Image.fromarray(picture).resize((224, height), Image.Resampling.BICUBIC)
    theirs = np.asarray(narrow.resize((224, 224), Image.Resampling.BICUBIC)) / 255
    np.testing.assert_allclose(ours, (theirs - IMAGENET_MEAN) / IMAGENET_STD, atol=1e-6)


def test_squash_matches_pillow_on_float_channels():
    picture = standin.picture(90, 50)
    ours = np.asarray(jax.jit(preprocess.squash(28))(picture[None]))[0]
    channels = [Image.fromarray(picture[:, :, c].astype(np.float32)) for c in range(3)]
    theirs = [np.asarray(c.resize((28, 28), Image.Resampling.BICUBIC)) for c in channels]
    np.testing.assert_allclose(ours, (np.stack(theirs, -1) / 255 - MEAN) / STD, atol=2e-6)


def test_tf_resizing_aligns_the_top_left_corner():
    """Enlarge 2 pixels: values beyond the second pixel repeat it."""
    image = jnp.asarray(np.array([0.0, 128.0]).reshape(1, 1, 2, 1).repeat(3, -1), jnp.float32)
    row = np.asarray(preprocess.tf(image))[0, 7, :, 0]
    expected = np.minimum(np.arange(299) * 2 / 299, 1) - 1
    np.testing.assert_allclose(row, expected, atol=1e-6)


def test_nemo_resizing_keeps_the_corner_pixels():
    """150 pixels become 299: the pixels, and between each two the bicubic kernel's midpoint."""
    pixels = np.random.default_rng(0).uniform(0, 255, 150).astype(np.float32)
    image = jnp.asarray(np.broadcast_to(pixels[None, None, :, None], (1, 5, 150, 3)))
    row = np.asarray(preprocess.nemo(image))[0, 0, :, 0]
    x = pixels.astype(float) / 127.5 - 1
    np.testing.assert_allclose(row[::2], x, atol=1e-6)
    near, far = x[1:-2] + x[2:-1], x[:-3] + x[3:]
    np.testing.assert_allclose(row[3:-3:2], 0.59375 * near - 0.09375 * far, atol=1e-6)


@pytest.mark.parametrize(("mode", "scale"), [("pytorch", 127.5), ("nemo", 127.5), ("tf", 128)])
def test_images_of_the_networks_size_are_only_scaled(mode, scale):
    picture = standin.picture(299, 299)[None]
    ours = np.asarray(preprocess.INCEPTION[mode](jnp.asarray(picture)))
    np.testing.assert_allclose(ours, picture / scale - 1, atol=2e-7)
    floats = preprocess.INCEPTION[mode](jnp.asarray(picture, jnp.float32))
    np.testing.assert_array_equal(ours, floats)
