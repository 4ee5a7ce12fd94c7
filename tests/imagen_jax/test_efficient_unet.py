"""The EfficientUNet's initialization, precision, memory, image sizes, and errors.

tests/parity/test_imagen.py compares its outputs with the reference and with numpy.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from imagen_jax.conditioning import example_inputs
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.weights import nemo

SMALL = dict(image_size=8, embed_dim=32, channel_mult=(1, 2), num_res_blocks=(1, 1), attention_levels=(1,), head_dim=16)


def random_params(unet):
    rng = np.random.default_rng(0)

    def draw(leaf):
        scale = 0.3 if leaf.ndim < 2 else np.prod(leaf.shape[:-1]) ** -0.5
        return jnp.asarray(rng.normal(size=leaf.shape) * scale, jnp.float32)

    return jax.tree.map(draw, nemo.abstract_params(unet, 32))


def inputs(size=8, low=2):
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return dict(
        x=normal(2, size, size, 3),
        time=normal(2),
        text=normal(2, 5, 32),
        text_mask=jnp.arange(5) < jnp.array([[5], [2]]),
        low_res=normal(2, low, low, 3),
    )


def test_a_new_efficient_unet_is_zero_only_in_the_last_layer_of_each_block():
    unet = EfficientUNet(**SMALL, attention="stacked")
    init = lambda key: unet.init(key, **example_inputs(unet, 32))
    leaves = jax.tree.leaves_with_path(jax.jit(init)(jax.random.key(0))["params"])
    flat = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(a) for p, a in leaves}
    zero = {p for p, a in flat.items() if not p.endswith(("norm", "scale")) and (a == 0).all()}
    zero = {p.rpartition("/")[0] for p in zero if "norm" not in p}
    res = {f"{side}_{level}_0_res/conv2" for side in ("down", "up") for level in (0, 1)}
    attention = {f"{side}_1_attn/{p}out" for side in ("down", "up") for p in ("", "self/", "cross/")}
    assert zero == res | attention  # Without out_conv, unlike the other UNet.
    for path in ("out_conv", "down_0_0_res/skip", "down_0_resample", "up_0_resample"):
        kernel = flat[f"{path}/kernel"]
        limit = (kernel.size / kernel.shape[-1]) ** -0.5  # U(-1, 1) / sqrt(fan in).
        assert 0.95 * limit < np.abs(kernel).max() <= limit, path


@pytest.mark.slow
def test_remat_does_not_change_the_gradient():
    params, arguments = random_params(EfficientUNet(**SMALL)), inputs()

    def loss(x, remat):
        unet = EfficientUNet(**SMALL, remat=remat)
        return (unet.apply(params, **arguments | {"x": x}) ** 2).sum()

    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(arguments["x"], r) for r in (False, True))
    assert np.abs(plain).max() > 0.1
    np.testing.assert_allclose(again, plain, rtol=1e-4, atol=1e-4)
    jaxprs = [str(jax.make_jaxpr(loss, static_argnums=1)(arguments["x"], r)) for r in (False, True)]
    remats = [len(re.findall(r"\b(?:remat2?|checkpoint)\[", jaxpr)) for jaxpr in jaxprs]
    assert remats == [0, 4 + 2]  # Four residual blocks and two attention blocks.


def test_bfloat16_is_within_3_percent_of_float32_at_another_image_size():
    unet = EfficientUNet(**SMALL, attention="cross")
    params, arguments = random_params(unet), inputs(size=16, low=4)
    low = jax.jit(unet.copy(dtype=jnp.bfloat16).apply)(params, **arguments)
    exact = jax.jit(unet.apply)(params, **arguments)
    assert low.dtype == jnp.float32 and low.shape == (2, 16, 16, 3)
    error = np.sqrt(np.mean((low - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < 0.03, error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_res_blocks=(1, 0)), "num_res_blocks (1, 0) must hold a number above 0 for each"),
        (dict(num_res_blocks=(1,)), "(1,) must hold a number above 0 for each of the 2 levels"),
        (dict(attention_levels=(2,)), "attention_levels is (2,): choose from the levels 0 to 1"),
        (dict(image_size=9), "image_size 9 cannot be halved 1 times: choose a multiple of 2"),
        (dict(embed_dim=48), "unet.embed_dim * 1 is 48: it must be a multiple of 32"),
        (dict(head_dim=64), "unet.head_dim 64 does not divide the width 32 of a level"),
        (dict(num_heads=3), "unet.num_heads 3 does not divide the width 64 of a level"),
        (dict(init_kernel=2), "unet.init_kernel is 2: it must be odd"),
        (dict(attention="flash"), "unet.attention is 'flash': choose from fused, stacked"),
        (dict(attention_impl="cudnn"), "'cudnn', which needs a 16-bit unet.dtype and heads"),
        (dict(text_pooling="max"), "unet.text_pooling is 'max': choose from attention, mean"),
    ],
)
def test_fields_of_unet_that_contradict_each_other_are_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EfficientUNet(**SMALL | changes).check(32)


def test_text_attention_requires_a_text_width_divisible_by_32():
    with pytest.raises(ValueError, match=r"text\.width is 40, but with unet\.attention='fused' an"):
        EfficientUNet(**SMALL).check(40)
    EfficientUNet(**SMALL, attention="self").check(40)
    EfficientUNet(**SMALL | dict(attention_levels=())).check(40)
    EfficientUNet(**SMALL, num_heads=2).check(32)
    EfficientUNet(image_size=256, attention_impl="cudnn", dtype="bfloat16").check(1024)
