"""The UNet: blocks against numpy, initialization, precision, dropout, and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from imagen_jax import unet as unet_module
from imagen_jax.attention import FusedAttention
from imagen_jax.conditioning import example_inputs
from imagen_jax.layers import ResBlock, bicubic_upsample
from imagen_jax.unet import UNet
from tests.imagen_jax import numpy_unet

SMALL = dict(
    image_size=4,
    embed_dim=32,
    channel_mult=(1,),
    num_res_blocks=1,
    attention_resolutions=(4,),
    cond_dim=32,
    head_dim=16,
)


def random_like(tree, seed=0):
    """Return random leaves, because zeros would hide bugs. Kernels keep the variance."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        scale = 0.3 if leaf.ndim < 2 else np.prod(leaf.shape[:-1]) ** -0.5
        return jnp.asarray(rng.normal(size=leaf.shape) * scale, jnp.float32)

    return jax.tree.map(draw, tree)


def inputs(batch=2, tokens=5):
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return dict(
        x=normal(batch, 4, 4, 3),
        time=normal(batch),
        text=normal(batch, tokens, 24),
        text_mask=jnp.arange(tokens) < jnp.array([tokens, 2])[:, None],
    )


def fresh(unet):
    """Return newly initialized parameters."""
    init = lambda: unet.init(jax.random.key(0), **example_inputs(unet, 24))
    return jax.jit(init)()


@functools.cache
def params_of(**changes):
    unet = UNet(**SMALL | changes)
    shapes = jax.eval_shape(lambda: unet.init(jax.random.key(0), **example_inputs(unet, 24)))
    return random_like(shapes)


@functools.cache
def apply(**changes):
    """Return the jitted UNet of SMALL with changes, which tests share."""
    return jax.jit(UNet(**SMALL | changes).apply, static_argnames="train")


def nchw(x):
    return np.moveaxis(np.asarray(x, np.float64), -1, 1)


def group_norm(x, p, eps=1e-5):
    groups = x.reshape(len(x), -1, 32, x.shape[-1] // 32)
    groups = groups - groups.mean((1, 3), keepdims=True)
    groups = groups / np.sqrt((groups**2).mean((1, 3), keepdims=True) + eps)
    return groups.reshape(x.shape) * p["scale"] + p["bias"]


def conv3x3(x, p):
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.einsum("bhwcij,ijcd->bhwd", windows, p["kernel"]) + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def silu(x):
    return x / (1 + np.exp(-x))


def double(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


@pytest.mark.parametrize("scale_shift", [True, False])
@pytest.mark.parametrize("width_in", [32, 64])  # With and without a projection in the shortcut.
def test_res_block_matches_numpy(width_in, scale_shift):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 4, 6, width_in)), jnp.float32)
    emb = jnp.asarray(rng.normal(size=(2, 16)), jnp.float32)
    block = ResBlock(64, scale_shift=scale_shift)
    params = random_like(jax.eval_shape(lambda: block.init(jax.random.key(0), x, emb)))
    p, x64 = double(params["params"]), double(x)

    h = conv3x3(silu(group_norm(x64, p["norm1"])), p["conv1"])
    e = dense(silu(double(emb)), p["emb"])[:, None, None]
    if scale_shift:
        scale, shift = np.split(e, 2, axis=-1)
        h = group_norm(h, p["norm2"]) * (1 + scale) + shift
    else:
        h = group_norm(h + e, p["norm2"])
    h = conv3x3(silu(h), p["conv2"])
    assert ("skip" in p) == (width_in != 64)
    shortcut = dense(x64, p["skip"]) if "skip" in p else x64
    np.testing.assert_allclose(jax.jit(block.apply)(params, x, emb), shortcut + h, atol=1e-5)


def test_res_blocks_that_resize_match_numpy():
    """Down: means of 2x2 pixels. Up: a transposed convolution in each of the two paths."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 4, 6, 32)), jnp.float32)
    emb = jnp.asarray(rng.normal(size=(1, 16)), jnp.float32)
    pool = lambda a: a.reshape(1, 2, 2, 3, 2, 32).mean((2, 4))

    def transpose(a, p):
        weight = p["kernel"].transpose(2, 3, 0, 1)
        out = numpy_unet.conv_transpose({"weight": weight, "bias": p["bias"]}, nchw(a))
        return np.moveaxis(out, 1, -1)

    for how in ("down", "up"):
        block = ResBlock(32, how)
        params = random_like(jax.eval_shape(lambda b=block: b.init(jax.random.key(0), x, emb)))
        p = double(params["params"])
        h, shortcut = silu(group_norm(double(x), p["norm1"])), double(x)
        if how == "down":
            h, shortcut = pool(h), pool(shortcut)
        else:
            h, shortcut = transpose(h, p["up_h"]), transpose(shortcut, p["up_x"])
        scale, shift = np.split(dense(silu(double(emb)), p["emb"])[:, None, None], 2, axis=-1)
        h = group_norm(conv3x3(h, p["conv1"]), p["norm2"]) * (1 + scale) + shift
        expected = shortcut + conv3x3(silu(h), p["conv2"])
        np.testing.assert_allclose(jax.jit(block.apply)(params, x, emb), expected, atol=1e-5)


def test_fused_attention_matches_numpy():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 2, 3, 64)), jnp.float32)
    context = jnp.asarray(rng.normal(size=(3, 5, 32)), jnp.float32)
    mask = jnp.arange(5) < jnp.array([[5], [2], [0]])
    block = FusedAttention(head_dim=16)
    shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), x, context, mask))
    params = random_like(shapes)
    p = double(params["params"])

    pixels = double(x).reshape(3, 6, 64)
    q = dense(group_norm(pixels, p["norm"]), p["q"]).reshape(3, 6, 4, 16)
    own = dense(group_norm(pixels, p["norm_self"]), p["kv_self"])
    text = dense(group_norm(double(context), p["norm_context"]), p["kv_context"])
    k, v = np.split(np.concatenate([own, text], axis=1).reshape(3, 11, 8, 16), 2, axis=2)
    logits = np.einsum("btnk,bsnk->bnts", q, k) / 4
    weights = np.exp(logits) * np.pad(mask, ((0, 0), (6, 0)), constant_values=True)[:, None, None]
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnk->btnk", weights, v).reshape(3, 6, 64)
    expected = double(x) + dense(out, p["out"]).reshape(x.shape)
    actual = jax.jit(block.apply)(params, x, context, mask)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_a_new_unet_returns_zeros_and_only_last_layers_of_blocks_are_zero():
    fields = SMALL | dict(image_size=8, channel_mult=(1, 2), resblock_updown=True)
    unet = UNet(**fields, attention="stacked", learned_time_dim=8, null_token=True)
    params = fresh(unet)["params"]
    leaves = jax.tree.leaves_with_path(params)
    flat = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(a) for p, a in leaves}
    assert 2 * np.std(flat["null_token"]) > 1 and np.std(flat["time_embed/frequencies"]) > 0.3
    for path, array in flat.items():
        layer = path.rpartition("/")[0]
        if re.search(r"(_norm|/norm\w*)$", layer):
            assert (array == path.endswith("scale")).all(), path
        elif layer == "out_conv" or re.search(r"_res\w*/conv2$|resample/conv2$|attn(/\w+)?/out$", layer):
            assert (array == 0).all(), path
        elif array.ndim > 1 and path != "null_token":  # U(-1, 1) / sqrt(fan_in), torch's default.
            taps = np.prod(array.shape[:-2])
            limit = (taps * array.shape[-1 if "/up_" in path else -2]) ** -0.5
            assert np.abs(array).max() <= limit, path
            # The standard error of a uniform draw's variance is a few times 1 / sqrt(size).
            assert np.std(array) * 3**0.5 / limit == pytest.approx(1, abs=2 / array.size**0.5), path
    arguments = inputs() | {"x": jnp.ones((2, 8, 8, 3))}
    np.testing.assert_array_equal(jax.jit(unet.apply)({"params": params}, **arguments), 0)


def test_dropout_acts_only_with_keys_and_depends_on_them():
    params, arguments = params_of(), inputs()
    plain = apply()(params, **arguments)
    np.testing.assert_array_equal(apply(dropout=0.5)(params, **arguments), plain)
    draw = lambda seed: apply(dropout=0.5)(params, **arguments, dropout_keys=jax.random.split(jax.random.key(seed), 2))
    np.testing.assert_array_equal(draw(0), draw(0))
    assert np.abs(draw(0) - draw(1)).max() > 0.1 and np.abs(draw(0) - plain).max() > 0.1


@pytest.mark.gate
@pytest.mark.slow
def test_remat_does_not_change_the_gradient():
    params, arguments = params_of(), inputs()

    def loss(x, remat):
        return (UNet(**SMALL, remat=remat).apply(params, **arguments | {"x": x}) ** 2).sum()

    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(arguments["x"], r) for r in (False, True))
    assert np.abs(plain).max() > 0.1
    # Sums may have another order.
    np.testing.assert_allclose(again, plain, atol=1e-5)
    jaxprs = [str(jax.make_jaxpr(loss, static_argnums=1)(arguments["x"], r)) for r in (False, True)]
    blocks = 5 + 4  # Residual blocks: 1 down, 2 in the middle, 2 up. Attention blocks: 1, 1 and 2.
    # The primitive's name differs between versions of jax.
    remats = [len(re.findall(r"\b(?:remat2?|checkpoint)\[", jaxpr)) for jaxpr in jaxprs]
    assert remats == [0, blocks]


def test_bfloat16_is_within_3_percent_and_parameters_stay_float32():
    unet = UNet(**SMALL, dtype=jnp.bfloat16)
    shapes = jax.eval_shape(lambda: unet.init(jax.random.key(0), **example_inputs(unet, 24)))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}
    params, arguments = params_of(), inputs()
    exact, low = apply()(params, **arguments), apply(dtype=jnp.bfloat16)(params, **arguments)
    assert low.dtype == jnp.float32
    # bfloat16 resolves 1/256, and a dozen roundings accumulate.
    error = np.sqrt(np.mean((low - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < 0.03, error


@pytest.mark.parametrize("attention", ["fused", "self"])
def test_the_text_mask_affects_only_attention(attention):
    params, arguments = params_of(attention=attention), inputs()
    y = apply(attention=attention)(params, **arguments)
    other = apply(attention=attention)(params, **arguments | {"text_mask": ~arguments["text_mask"]})
    pooled = apply(attention=attention)(params, **arguments | {"text": jnp.roll(arguments["text"], 1, axis=2)})
    assert (np.abs(y - other).max() > 1e-3) == (attention == "fused")
    assert np.abs(y - pooled).max() > 1e-2  # The pooled text matters in both cases.


def test_the_null_token_affects_texts_without_tokens():
    params, arguments = (params_of(null_token=True), inputs() | {"text_mask": jnp.zeros((2, 5), bool)})
    y = apply(null_token=True)(params, **arguments)
    changed = jax.tree.map(lambda leaf: leaf, params)
    changed["params"]["null_token"] = -changed["params"]["null_token"]
    assert np.abs(apply(null_token=True)(changed, **arguments) - y).max() > 1e-3


def test_cudnn_attention_attends_to_valid_tokens_and_the_null_token(monkeypatch):
    params, arguments = params_of(null_token=True), inputs()
    arguments["text_mask"] = jnp.array([[False, True, False, True, False], [False] * 5])
    expected = apply(null_token=True)(params, **arguments)
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(  # XLA stands in for cuDNN.
        jax.nn,
        "dot_product_attention",
        lambda *qkv, implementation, key_value_seq_lengths: attention(
            *qkv, key_value_seq_lengths=key_value_seq_lengths
        ),
    )
    unet = UNet(**SMALL, null_token=True, attention_impl="cudnn")
    np.testing.assert_allclose(jax.jit(unet.apply)(params, **arguments), expected, atol=1e-5)


def test_with_patches_the_input_and_output_keep_their_size():
    unet = UNet(**SMALL | dict(image_size=8, attention_resolutions=(4,)), patch=2)
    unet.check()
    params = fresh(unet)["params"]
    assert params["init_conv"]["kernel"].shape == (3, 3, 12, 32)
    assert (params["down_0_0_attn"]["out"]["kernel"] == 0).all()
    params["out_conv"]["bias"] = jnp.arange(12.0)  # All other outputs are initially zero.
    arguments = inputs() | {"x": jnp.ones((2, 8, 8, 3))}
    y = jax.jit(unet.apply)({"params": params}, **arguments)
    np.testing.assert_array_equal(y, np.tile(np.arange(12.0).reshape(2, 2, 3), (2, 4, 4, 1)))


def test_a_residual_network_adds_its_output_to_the_enlarged_image():
    small = jax.random.normal(jax.random.key(1), (2, 4, 4, 3))
    arguments = inputs() | {"x": jnp.ones((2, 8, 8, 3)), "low_res": small}
    params = params_of(low_res=True)
    plain, residual = (apply(low_res=True, residual=r)(params, **arguments) for r in (False, True))
    np.testing.assert_allclose(residual, plain + bicubic_upsample(small, 8, 8), atol=1e-5)
    assert np.abs(plain).max() > 0.1


def test_a_residual_network_in_bfloat16_does_not_round_the_enlarged_image():
    small = jax.random.normal(jax.random.key(1), (2, 4, 4, 3))
    params = {
        "params": params_of(low_res=True)["params"]
        | {"out_conv": {"kernel": jnp.zeros((3, 3, 32, 3)), "bias": jnp.zeros(3)}}
    }
    arguments = inputs() | {"x": jnp.ones((2, 8, 8, 3)), "low_res": small}
    y = apply(low_res=True, residual=True, dtype=jnp.bfloat16)(params, **arguments)
    np.testing.assert_allclose(y, bicubic_upsample(small, 8, 8), atol=1e-6)  # bfloat16 resolves 1/256.


def test_a_missing_low_res_image_or_its_noise_level_is_an_error():
    unet, arguments = UNet(**SMALL, low_res=True, noise_aug=True), inputs()
    init = functools.partial(jax.eval_shape, unet.init, jax.random.key(0), **arguments)
    with pytest.raises(ValueError, match="must be called with the argument low_res_time"):
        init()
    with pytest.raises(ValueError, match="low_res=True must be called with the argument"):
        init(low_res_time=arguments["time"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(attention="flash"), "unet.attention is 'flash': choose from fused, stacked, self"),
        (dict(text_pooling="max"), "unet.text_pooling is 'max': choose from attention, mean"),
        (dict(attention_impl="triton"), "unet.attention_impl is 'triton': choose from auto, xla"),
        (dict(num_res_blocks=(1, 2)), "unet.num_res_blocks (1, 2) has 2 entries, but unet.channel_mult has 1 levels: "),
        (
            dict(image_size=6, channel_mult=(1, 2, 3)),
            "is 6, but with unet.patch=1 and 3 levels it must be a multiple of 4",
        ),
        (dict(image_size=9, patch=2), "is 9, but with unet.patch=2 and 1 levels it must be a multiple of 2"),
        (dict(image_size=8, channel_mult=(1, 2), attention_resolutions=(8, 2)), "holds 2, but no level has"),
        (dict(embed_dim=48), "unet.embed_dim * 1 is 48: it must be a multiple of 32"),
        (dict(cond_dim=40), "unet.cond_dim is 40: it must be a multiple of 32, the number"),
        (dict(head_dim=64), "unet.head_dim 64 does not divide the width 32 of a level with atten"),
        (dict(channel_mult=(3,), head_dim=64), "unet.head_dim 64 does not divide the width 96"),
        (dict(learned_time_dim=5), "unet.learned_time_dim is 5: it must be even, or 0 for fix"),
        (dict(init_kernel=4), "unet.init_kernel is 4: it must be odd"),
        (dict(noise_aug=True), "unet.noise_aug is True, but unet.low_res is False"),
        (dict(residual=True), "unet.residual is True, but unet.low_res is False"),
        (dict(attention_impl="cudnn"), "'cudnn', which needs a 16-bit unet.dtype and heads"),
        (dict(attention_impl="cudnn", dtype="bfloat16", head_dim=4), "the heads have width 4"),
    ],
)
def test_fields_of_unet_that_contradict_each_other_are_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        UNet(**SMALL | changes).check()


def test_consistent_fields_are_accepted():
    UNet(image_size=64).check()
    UNet(image_size=64, attention_impl="cudnn", dtype="bfloat16").check()
    UNet(**SMALL | dict(embed_dim=16, channel_mult=(2,))).check()
    UNet(**SMALL | dict(attention="self", cond_dim=40)).check()


def test_attention_resolutions_without_a_level_are_ignored_as_in_nemo():
    unet = UNet(image_size=16, attention_resolutions=(32, 10, 5, 4))
    unet_module.check_layers(unet)
    # 16 // 10 = 1 and 16 // 4 = 4 are the scales of levels 0 and 2. No level has scale 0 or 3.
    assert [unet_module.attends(unet, level) for level in range(4)] == [True, False, True, False]
