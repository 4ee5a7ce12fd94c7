"""The transformer: against a torch version with diffusers' blocks, and its invariants.

tests/imagen_jax/torch_transformer.py wrote tests/fixtures/transformer.npz for NETWORKS.
"""

import functools
import pathlib
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import emoji64_transformer
from diffusion_jax.devices import sharding
from imagen_jax.conditioning import example_inputs
from imagen_jax.transformer import Transformer, positions
from launch.planner import tasks

TEXT_WIDTH = 12
SMALL = dict(image_size=16, patch=4, embed_dim=32, depth=2, bottleneck=10, head_dim=8)
NETWORKS = {"base": Transformer(**SMALL), "large": Transformer(**SMALL, low_res=True, noise_aug=True)}
FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "transformer.npz"


def flat(tree):
    """Return {"block_0/image_qkv/kernel": array, ...}."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): a for p, a in leaves}


def nested(unet, flat_params):
    """Return the network's params with these arrays."""
    shapes = jax.eval_shape(lambda key: unet.init(key, **example_inputs(unet, TEXT_WIDTH)), jax.random.key(0))
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    pick = lambda path, leaf: jnp.asarray(flat_params[name(path)])
    return {"params": jax.tree_util.tree_map_with_path(pick, shapes["params"])}


def random_params(unet):
    """Return normal random numbers for every parameter, seeded by its name."""
    shapes = jax.eval_shape(lambda key: unet.init(key, **example_inputs(unet, TEXT_WIDTH)), jax.random.key(0))

    def draw(name, shape):
        draws = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        return np.float32(draws * shape[0] ** -0.5 if len(shape) == 2 else 1 + 0.3 * draws)

    return {name: draw(name, leaf.shape) for name, leaf in flat(shapes["params"]).items()}


def example(unet):
    """Return inputs for three images, with 4, 1 and 3 of 4 valid tokens, not always the first."""
    rng = np.random.default_rng(5)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 1]], bool)
    inputs = dict(x=normal(3, 16, 16, 3), time=jnp.array([-3, 0.5, 4]))
    inputs |= dict(text=normal(3, 4, TEXT_WIDTH), text_mask=mask)
    if unet.low_res:
        inputs |= dict(low_res=normal(3, 8, 8, 3), low_res_time=jnp.array([1.0, 2.0, -1.0]))
    return inputs


def target():
    return np.float32(np.random.default_rng(6).normal(size=(3, 16, 16, 3)))


def summary(gradient):
    """Reduce a large gradient to its sum, the sum of its absolute values, and a few numbers."""
    if gradient.size <= 256:
        return gradient
    picked = gradient.ravel()[:: gradient.size // 50]
    return np.float32([gradient.sum(dtype=np.float64), np.abs(gradient).sum(), *picked])


@functools.cache
def computed(name):
    """Return (y, gradient for x, gradients for parameters) of a network in NETWORKS."""
    unet, inputs = NETWORKS[name], example(NETWORKS[name])

    def product(params, x):
        y = unet.apply(params, **{**inputs, "x": x})
        return (y * target()).sum(), y

    gradient = jax.jit(jax.grad(product, argnums=(0, 1), has_aux=True))
    (d_params, dx), y = gradient(nested(unet, random_params(unet)), inputs["x"])
    grads = {name: np.asarray(a) for name, a in flat(d_params["params"]).items()}
    return np.asarray(y), np.asarray(dx), grads


def close(ours, theirs, name):
    """Compares up to 5e-5 of the largest number: sums of many products have errors of 1e-5."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize("name", NETWORKS)
def test_output_and_gradients_match_the_saved_torch_version(name):
    with np.load(FIXTURE) as saved:
        y, dx, grads = computed(name)
        close(y, saved[f"{name}/y"], "y")
        close(dx, saved[f"{name}/dx"], "dx")
        prefix = f"{name}/grad/"
        assert {prefix + key for key in grads} == {n for n in saved.files if n.startswith(prefix)}
        for key, gradient in grads.items():
            assert np.abs(gradient).max() > 1e-3, key
            close(summary(gradient), saved[prefix + key], key)


@pytest.mark.filterwarnings("ignore")  # Warnings of diffusers.
@pytest.mark.parametrize("name", NETWORKS)
def test_output_and_gradients_match_the_installed_diffusers_blocks(name):
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from tests.imagen_jax import torch_transformer

    unet = NETWORKS[name]
    y, dx, grads = torch_transformer.reference(unet, random_params(unet), example(unet), target())
    ours = computed(name)
    close(ours[0], y, "y")
    close(ours[1], dx, "dx")
    for key, gradient in grads.items():
        close(ours[2][key], gradient, key)


@pytest.fixture(scope="module")
def large():
    """Return the super-resolution network as a function of changed inputs, and its inputs."""
    unet = NETWORKS["large"]
    params, inputs = nested(unet, random_params(unet)), example(unet)
    apply = jax.jit(lambda inputs: unet.apply(params, **inputs))
    return lambda **changes: np.asarray(apply({**inputs, **changes})), inputs


def test_the_output_depends_on_every_input_but_not_on_padding(large):
    apply, inputs = large
    y = apply()
    for name in ("x", "time", "text", "low_res", "low_res_time"):
        changed = np.abs(apply(**{name: inputs[name] + 0.3}) - y).max(axis=(1, 2, 3))
        assert (changed > 1e-3).all(), name
    text, mask = inputs["text"], inputs["text_mask"]
    same = functools.partial(np.testing.assert_allclose, y, atol=2e-5)
    same(apply(text=jnp.where(mask[:, :, None], text, 100)))
    longer = jnp.pad(text, ((0, 0), (2, 3), (0, 0)), constant_values=7)
    same(apply(text=longer, text_mask=jnp.pad(mask, ((0, 0), (2, 3)))))


def test_a_text_without_words_or_of_zeros_has_finite_gradients():
    unet = NETWORKS["base"]
    inputs = example(unet) | dict(text=jnp.zeros((3, 4, TEXT_WIDTH)))
    gradient = jax.jit(jax.grad(lambda p, mask: unet.apply(p, **inputs | {"text_mask": mask}).sum()))
    for mask in (inputs["text_mask"], jnp.zeros((3, 4), bool)):
        grads = gradient(nested(unet, random_params(unet)), mask)
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_the_pooled_text_is_the_mean_of_its_valid_tokens():
    """Repeating all tokens changes a sum but not a mean.

    After the mean comes a LayerNorm, which hides the scale of all but very small numbers.
    """
    unet = NETWORKS["base"]
    params, inputs = nested(unet, random_params(unet)), example(unet)

    def pooled(times):
        text = {
            "text": jnp.tile(1e-3 * inputs["text"], (1, times, 1)),
            "text_mask": jnp.tile(inputs["text_mask"], (1, times)),
        }
        only = lambda module, _: module.name == "text_embed"
        run = jax.jit(functools.partial(unet.apply, capture_intermediates=only))
        return run(params, **(inputs | text))[1]["intermediates"]["text_embed"]["__call__"][0]

    np.testing.assert_allclose(pooled(2), pooled(1), rtol=1e-4, atol=1e-5)


def test_the_output_does_not_depend_on_the_order_of_tokens(large):
    apply, inputs = large
    turned = dict(text=inputs["text"][:, ::-1], text_mask=inputs["text_mask"][:, ::-1])
    np.testing.assert_allclose(apply(**turned), apply(), atol=2e-5)


def test_a_new_transformer_returns_zeros_and_its_blocks_are_identities():
    inputs = example(NETWORKS["base"])
    outputs = []
    for depth in (1, 2):
        unet = Transformer(**SMALL | dict(depth=depth))
        params = jax.jit(unet.init)(jax.random.key(0), **inputs)
        apply = jax.jit(unet.apply)
        assert not np.any(apply(params, **inputs))
        params["params"]["out"] = {name: jnp.asarray(random_params(unet)[f"out/{name}"]) for name in ("kernel", "bias")}
        outputs.append(apply(params, **inputs))
    assert np.abs(outputs[0]).max() > 1
    np.testing.assert_array_equal(*outputs)


def test_positions_are_sums_of_sinusoids_of_column_and_row():
    table = np.asarray(positions(3, 5, 8))
    column, row = 4, 2
    waves = lambda n: [np.cos(n), np.cos(n / 100), np.sin(n), np.sin(n / 100)]
    np.testing.assert_allclose(table[row * 5 + column], waves(column) + waves(row), atol=1e-6)


def test_remat_and_blockwise_attention_give_the_same_gradient():
    unet, inputs = NETWORKS["base"], example(NETWORKS["base"])
    params = nested(unet, random_params(unet))
    gradient = jax.jit(jax.grad(lambda x, u: (u.apply(params, **{**inputs, "x": x}) ** 2).mean()), static_argnums=1)
    expected = gradient(inputs["x"], unet)
    assert np.abs(expected).max() > 1e-3
    for changes in (dict(remat=True, remat_keeps="products"), dict(attention_impl="blockwise")):
        other = gradient(inputs["x"], unet.copy(**changes))
        np.testing.assert_allclose(other, expected, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_is_within_5_percent_and_returns_float32():
    unet, inputs = NETWORKS["base"], example(NETWORKS["base"])
    params, (exact, *_) = nested(unet, random_params(unet)), computed("base")
    y = jax.jit(unet.copy(dtype=jnp.bfloat16).apply)(params, **inputs)
    error = np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2))
    assert y.dtype == jnp.float32 and 1e-4 < error < 0.05, error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(image_size=18), "unet.image_size 18 does not divide into patches of 4: choose"),
        (dict(head_dim=5), "unet.head_dim 5 does not divide the width 32"),
        (
            dict(embed_dim=36, head_dim=4),
            "unet.embed_dim is 36: it must be a multiple of 8, because the time is embedded",
        ),
        (dict(noise_aug=True), "unet.noise_aug is True, but unet.low_res is False"),
        (dict(attention_impl="cudnn"), "'cudnn', which needs a 16-bit unet.dtype and heads"),
        (dict(attention_impl="fast"), "unet.attention_impl is 'fast'"),
    ],
)
def test_fields_of_unet_that_contradict_each_other_are_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Transformer(**SMALL | changes).check()
    Transformer(**SMALL).check()


def tiny():
    c = emoji64_transformer.get_config()
    c.unet.update(image_size=16, patch=4, embed_dim=32, depth=2, bottleneck=8, head_dim=8)
    return c


def test_the_loss_of_a_transformer_on_a_mesh_matches_one_device():
    """The hidden axis of feed-forward layers is sharded over "tensor", the rest over fsdp."""
    model = tasks.read(tiny().to_dict())
    shapes = model.state.params
    leaves = flat(shapes)
    draws = {n: 0.1 * np.random.default_rng(zlib.crc32(n.encode())).normal(size=a.shape) for n, a in leaves.items()}
    params = jax.tree.unflatten(jax.tree.structure(shapes), [np.float32(a) for a in draws.values()])
    batch = {k: np.repeat(v, 8, 0) for k, v in model.example.items()}
    batch["image"] = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)
    losses, keys = [], jax.random.split(jax.random.key(3), 8)
    for sizes in [(1, 1, 1), (2, 2, 2)]:
        mesh = sharding.make_mesh(*sizes)
        where = sharding.shardings(params, mesh, model.task.rules, fsdp_min_size=32)
        placed = jax.device_put(batch, sharding.batch_sharding(mesh))
        loss = jax.jit(model.task.loss)
        losses.append(loss(jax.device_put(params, where), {"text": ()}, placed, keys)[0])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    specs = {name: place.spec for name, place in flat(where).items()}
    block = "params/block_0/image_"
    assert specs[f"{block}mlp1/kernel"] == jax.P("fsdp", "tensor")
    assert specs[f"{block}mlp2/kernel"] == jax.P("tensor", "fsdp")
    assert specs[f"{block}qkv/kernel"] == jax.P(None, "fsdp")
    assert not any(specs[f"{block}q_norm/scale"])
