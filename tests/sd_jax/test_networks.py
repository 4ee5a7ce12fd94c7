"""UNet and VAE: initial values, memory, precision and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sd_jax import unet, vae
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import names
from tests.sd_jax.cases import TEXT_WIDTH, unet_weights, vae_weights

TINY = UNet(width=32, channel_mult=(1,), num_res_blocks=1, attention_levels=(), head_dim=16)
TINY_VAE = VAE(width=32, channel_mult=(1, 2), num_res_blocks=1)
X, TEXT = (jax.random.normal(jax.random.key(i), s) for i, s in ((0, (2, 4, 4, 4)), (1, (2, 3, 24))))
T = jnp.array([3.0, 981.0])


def params_of(network):
    if isinstance(network, UNet):
        params = names.unet_from_torch(unet_weights(network), network, TEXT_WIDTH)
    else:
        params = names.vae_from_torch(vae_weights(network), network)
    return jax.tree.map(jnp.asarray, params)


def test_a_new_unet_returns_0_and_its_layers_are_initialized_like_torch():
    params = jax.jit(lambda: TINY.init(jax.random.key(0), X, T, TEXT))()
    np.testing.assert_array_equal(jax.jit(TINY.apply)(params, X, T, TEXT), 0)
    flat = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in jax.tree.leaves_with_path(params)}
    zeros = {name for name, leaf in flat.items() if not leaf.any()}
    # The second convolution of 5 residual blocks, the transformer's output, and the last one.
    ends = [n for n in zeros if re.search(r"(conv2|attn/out|out_conv)/(kernel|bias)$", n)]
    assert len(ends) == 2 * (5 + 1 + 1)
    kernels = [name for name in flat if name.endswith("kernel") and name not in zeros]
    assert len(kernels) == 26
    for name in kernels:  # U(-1, 1) / sqrt(fan_in), torch's default.
        kernel, limit = flat[name], np.prod(flat[name].shape[:-1]) ** -0.5
        assert np.abs(kernel).max() <= limit, name
        # The standard error of a uniform draw's variance is a few times 1 / sqrt(size).
        assert kernel.std() * 3**0.5 / limit == pytest.approx(1, abs=2 / kernel.size**0.5), name


def test_remat_does_not_change_the_output():
    params = params_of(TINY)
    plain, remat = (jax.jit(u.apply)(params, X, T, TEXT) for u in (TINY, TINY.clone(remat=True)))
    np.testing.assert_allclose(remat, plain, atol=1e-6)


def test_bfloat16_is_within_5_percent_of_float32():
    params = params_of(TINY)
    exact = jax.jit(TINY.apply)(params, X, T, TEXT)
    half = jax.jit(TINY.clone(dtype=jnp.bfloat16).apply)(params, X, T, TEXT)
    assert half.dtype == jnp.float32
    # bfloat16 rounds to 0.4 %, and about twenty layers add up.
    assert 1e-4 < np.abs(half - exact).max() / np.abs(exact).max() < 0.05


def test_attention_in_slices_equals_whole_attention():
    x = jax.random.normal(jax.random.key(2), (3, 4, 5, 32))
    shapes = jax.eval_shape(vae.Attention().init, jax.random.key(0), x)
    normal = lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape) / 4
    params = jax.tree.map(normal, shapes)
    whole = vae.Attention().apply(params, x)
    # 20 queries in slices of 8: the last slice is padded.
    sliced = vae.Attention(query_chunk=8).apply(params, x)
    np.testing.assert_allclose(sliced, whole, atol=1e-5 * np.abs(whole).max())


def test_images_decoded_one_by_one_equal_a_batch():
    params = params_of(TINY_VAE)
    z = jax.random.normal(jax.random.key(2), (3, 4, 5, 4))
    decode = lambda z: TINY_VAE.apply(params, z, method="decode")
    whole = jax.jit(decode)(z)
    by_one = jax.jit(lambda z: vae.decode_in_slices(decode, z, 2))(z)
    np.testing.assert_allclose(by_one, whole, atol=2e-5)
    assert whole.shape == (3, 8, 10, 3)


def test_decoding_slices_takes_equally_many_images_from_each_device_in_order():
    z, seen = jnp.arange(40 * 4.0).reshape(40, 1, 1, 4), []

    def decode(part):
        seen.append(part[:, 0, 0, 0].tolist())
        return 2 * part

    with jax.disable_jit():
        np.testing.assert_array_equal(vae.decode_in_slices(decode, z, 2), 2 * z)
    # Five images on each of eight devices cannot be split in two.
    assert [len(rows) for rows in seen] == [8] * 5
    assert seen[1] == [4.0 * row for row in range(1, 40, 5)]


def test_the_log_variance_of_the_posterior_is_clamped():
    moments = jnp.zeros((1, 1, 2, 8)).at[..., :4].set(3.0).at[0, 0, :, 4:].set(100.0)
    moments = moments.at[0, 0, 1, 4:].set(-100.0)
    mean, std = vae.mean_and_std(moments)
    np.testing.assert_array_equal(mean, 3)
    np.testing.assert_allclose(std[0, 0, :, 0], np.exp([10.0, -15.0]), rtol=1e-6)
    np.testing.assert_allclose(vae.sample(moments, 2 * jnp.ones_like(mean)), mean + 2 * std)


def test_sizes_that_cannot_be_halved_are_errors():
    deep = UNet(width=32, channel_mult=(1, 1, 1, 1), num_res_blocks=1)
    with pytest.raises(ValueError, match="latents of height 64 and width 60 cannot be halved 3"):
        jax.eval_shape(deep.init, jax.random.key(0), jnp.zeros((1, 64, 60, 4)), T[:1], TEXT[:1])
    shapes = names.abstract_vae(VAE())
    encode = lambda params: VAE().apply(params, jnp.zeros((1, 512, 500, 3)), method="encode")
    with pytest.raises(ValueError, match="images of 512 x 500 pixels cannot be encoded: resize"):
        jax.eval_shape(encode, shapes)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (UNet(num_res_blocks=(1, 2)), "(1, 2) has 2 entries, but unet.channel_mult has 4 levels"),
        (UNet(attention_levels=(4,)), "unet.attention_levels holds 4, but unet.channel_mult has"),
        (UNet(width=336), "unet.norm_groups 32 does not divide the width 336 of a level"),
        (UNet(head_dim=48), "unet.head_dim 48 does not divide the width"),
        (UNet(width=48, norm_groups=16), "is 48: it must be a multiple of 32, the number of groups"),
        (UNet(attention_impl="flash"), "unet.attention_impl is 'flash': did you mean 'splash'?"),
        (UNet(attention_impl="cudnn"), "needs a 16-bit dtype, but unet.dtype is float32"),
        (
            UNet(attention_impl="cudnn", dtype=jnp.bfloat16, head_dim=4),
            "unet.head_dim 4 gives width 4: change unet.head",
        ),
        (VAE(width=48), "vae.width * 1 is 48: it must be a multiple of 32"),
        (VAE(num_res_blocks=0), "vae.num_res_blocks is 0 and vae.latent_channels is 4: both"),
    ],
)
def test_invalid_fields_of_networks_are_errors(network, message):
    check = unet.check if isinstance(network, UNet) else vae.check
    with pytest.raises(ValueError, match=re.escape(message)):
        check(network)
