"""The EfficientUNet's initialisation, precision, memory, sizes of image, and what it refuses.

Its numbers are compared with the reference's and with numpy's in tests/parity/test_imagen.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from imagen_jax.conditioning import example_inputs
from imagen_jax.efficient_unet import EfficientUNet, check
from imagen_jax.weights import nemo

SMALL = dict(
    image_size=8,
    embed_dim=32,
    channel_mult=(1, 2),
    num_res_blocks=(1, 1),
    attention_levels=(1,),
    head_dim=16,
)

# Tiny programs compile longer than they run.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


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


def test_a_fresh_one_is_zero_only_at_the_end_of_each_block():
    unet = EfficientUNet(**SMALL, attention="stacked")
    init = lambda key: unet.init(key, **example_inputs(unet, 32))
    leaves = jax.tree.leaves_with_path(jit(init)(jax.random.key(0))["params"])
    flat = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(a) for p, a in leaves}
    zero = {p for p, a in flat.items() if not p.endswith(("norm", "scale")) and (a == 0).all()}
    zero = {p.rpartition("/")[0] for p in zero if "norm" not in p}
    res = {f"{side}_{level}_0_res/conv2" for side in ("down", "up") for level in (0, 1)}
    attention = {
        f"{side}_1_attn/{p}out" for side in ("down", "up") for p in ("", "self/", "cross/")
    }
    assert zero == res | attention  # Not out_conv, unlike the other UNet's.
    for path in ("out_conv", "down_0_0_res/skip", "down_0_resample", "up_0_resample"):
        kernel = flat[f"{path}/kernel"]
        limit = (kernel.size / kernel.shape[-1]) ** -0.5  # U(-1, 1) / sqrt(fan in).
        assert 0.95 * limit < np.abs(kernel).max() <= limit, path


@pytest.mark.slow
def test_remat_gives_the_same_gradient_from_less_memory():
    params, given = random_params(EfficientUNet(**SMALL)), inputs()

    def loss(x, remat):
        unet = EfficientUNet(**SMALL, remat=remat)
        return (unet.apply(params, **given | {"x": x}) ** 2).sum()

    kept, again = (jit(jax.grad(loss), static_argnums=1)(given["x"], r) for r in (False, True))
    assert np.abs(kept).max() > 0.1
    np.testing.assert_allclose(again, kept, rtol=1e-4, atol=1e-4)
    jaxprs = [str(jax.make_jaxpr(loss, static_argnums=1)(given["x"], r)) for r in (False, True)]
    remats = [len(re.findall(r"\b(?:remat2?|checkpoint)\[", jaxpr)) for jaxpr in jaxprs]
    assert remats == [0, 4 + 2]  # Four residual blocks, two of attention.


def test_bfloat16_computes_near_float32_on_images_of_another_size():
    unet = EfficientUNet(**SMALL, attention="cross")
    params, given = random_params(unet), inputs(size=16, low=4)
    low = jit(unet.copy(dtype=jnp.bfloat16).apply)(params, **given)
    exact = jit(unet.apply)(params, **given)
    assert low.dtype == jnp.float32 and low.shape == (2, 16, 16, 3)
    error = np.sqrt(np.mean((low - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < 0.03, error


def test_what_is_not_given_is_an_error():
    unet, given = EfficientUNet(**SMALL, noise_aug=True), inputs()
    init = functools.partial(jax.eval_shape, unet.init, jax.random.key(0))
    with pytest.raises(ValueError, match="must be called with the argument low_res_time"):
        init(**given)
    del given["low_res"]
    with pytest.raises(ValueError, match="low_res=True must be called with the argument"):
        init(**given, low_res_time=given["time"])


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
def test_fields_that_do_not_go_together_say_why(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(EfficientUNet(**SMALL | changes), 32)


def test_attention_to_text_needs_one_that_32_groups_divide():
    with pytest.raises(ValueError, match=r"text\.width is 40, but with unet\.attention='fused' an"):
        check(EfficientUNet(**SMALL), 40)
    check(EfficientUNet(**SMALL, attention="self"), 40)
    check(EfficientUNet(**SMALL | dict(attention_levels=())), 40)
    check(EfficientUNet(**SMALL, num_heads=2), 32)
    check(EfficientUNet(image_size=256, attention_impl="cudnn", dtype="bfloat16"), 1024)
