"""Layers in bfloat16: gradients of parameters shared by all pixels are summed in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices import flops
from diffusion_jax.nn import ops
from diffusion_jax.nn.layers import FromHeads, ToHeads, conv, dense, geglu
from imagen_jax.layers import ConvTranspose
from imagen_jax.layers import ResBlock as ImagenBlock
from sd_jax.unet import ResBlock


class Layer(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        if self.kind == "dense":
            return dense(x, 2, "layer", dtype=jnp.bfloat16)
        if self.kind == "to heads":
            return ToHeads(1, 1, 2, dtype=jnp.bfloat16, name="layer")(x.reshape(1, -1, 2))[0]
        if self.kind == "from heads":
            return FromHeads(2, dtype=jnp.bfloat16, name="layer")(x.reshape(1, -1, 1, 2))
        return conv(x, 2, "layer", kernel=3, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "layer",
    [*map(Layer, ("dense", "conv", "to heads", "from heads")), ConvTranspose(jnp.bfloat16)],
    ids=lambda layer: getattr(layer, "kind", "transposed"),
)
def test_the_gradient_of_a_bias_counts_every_pixel(layer):
    """Each pixel's cotangent is 1/2: a sum in bfloat16 would stop at 128 instead of 2,048."""
    pixels = (64 if isinstance(layer, Layer) else 128) ** 2
    x = jnp.ones((1, 64, 64, 2), jnp.bfloat16)
    params = layer.init(jax.random.key(0), x)
    loss = lambda p: (layer.apply(p, x).astype(jnp.float32) * 0.5).sum()
    gradient = jax.tree.leaves_with_path(jax.grad(loss)(params))
    (bias,) = [leaf for path, leaf in gradient if "bias" in jax.tree_util.keystr(path)]
    np.testing.assert_allclose(bias, pixels / 2, rtol=1e-6)
    assert layer.apply(params, x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("layer", "shape", "fan_in"),
    [
        (lambda x: dense(x, 64, "layer", dtype=x.dtype), (2, 9, 48), 48),
        (lambda x: geglu(x, 32, "layer", dtype=x.dtype), (2, 9, 48), 48),
        (lambda x: ToHeads(3, 4, 16, name="layer")(x), (2, 9, 48), 48),
        (lambda x: FromHeads(64, name="layer")(x), (2, 9, 4, 12), 48),
        (lambda x: conv(x, 64, "layer", kernel=3, dtype=x.dtype), (2, 7, 8, 16), 144),
        (lambda x: ConvTranspose(x.dtype, name="layer")(x), (2, 7, 8, 32), 512),
    ],
    ids=["dense", "geglu", "to heads", "from heads", "conv", "transposed conv"],
)
def test_initial_weights_have_the_range_and_deviation_of_torchs(layer, shape, fan_in):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layer(x)

    params = Model().init(jax.random.key(0), jnp.ones(shape))["params"]["layer"]
    for weight in params["kernel"], params["bias"]:
        assert 0.9 < np.abs(weight).max() * fan_in**0.5 <= 1
    np.testing.assert_allclose(jnp.std(params["kernel"]), (3 * fan_in) ** -0.5, rtol=0.05)


def test_on_a_tpu_one_product_gives_the_gradients_of_kernel_and_bias(monkeypatch):
    normal = lambda *shape: jax.random.normal(jax.random.key(len(shape)), shape)
    x, kernel, bias = normal(4, 3, 2), normal(2, 5), normal(5)
    gradients = jax.grad(lambda *a: (ops.linear(*a) ** 3).sum(), (0, 1, 2))
    expected = gradients(x, kernel, bias)
    monkeypatch.setattr(ops, "platform", lambda: "tpu")
    for one, other in zip(gradients(x, kernel, bias), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    products = [line for line in str(jax.make_jaxpr(gradients)(x, kernel, bias)).splitlines() if "dot_general" in line]
    assert len(products) == 3 and any("f32[3,5]" in line for line in products)
    many, one = jnp.ones((64 * 64, 1), jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)
    half = jax.grad(lambda b: (ops.linear(many, one, b).astype(jnp.float32) * 0.5).sum())
    np.testing.assert_array_equal(half(jnp.zeros(2)), 64 * 64 / 2)


@pytest.mark.parametrize("block", [ImagenBlock(32), ImagenBlock(32, scale_shift=False), ResBlock(32, 64)])
def test_gradients_of_a_block_are_never_summed_in_bfloat16(block):
    block = block.copy(dtype=jnp.bfloat16)
    x, emb = jnp.ones((2, 8, 8, 32), jnp.bfloat16), jnp.ones((2, 16), jnp.bfloat16)
    params = block.init(jax.random.key(0), x, emb)
    loss = lambda p, x, emb: block.apply(p, x, emb).astype(jnp.float32).sum()
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(params, x, emb)
    assert list(_sums(program.jaxpr)) != []
    assert [shape for shape, dtype in _sums(program.jaxpr) if dtype == jnp.bfloat16] == []


def _sums(jaxpr):
    """Yield the shape and dtype of each operand that is summed over more than one number."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reduce_sum":
            (variable,) = equation.invars
            if np.prod([variable.aval.shape[axis] for axis in equation.params["axes"]]) > 1:
                yield variable.aval.shape, variable.aval.dtype
        for inside in flops.subjaxprs(equation):
            yield from _sums(inside)
