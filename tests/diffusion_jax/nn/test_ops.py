"""Operations against numpy in float64, torch's numbers and literal arrays."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from diffusion_jax.devices import sharding
from diffusion_jax.nn import ops
from launch.planner import traffic


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def group_norm(x, weight, bias, scale, shift):
    """Compute the group norm in float64, group by group."""
    x, weight, bias, scale, shift = map(np.asarray, (x, weight, bias, scale, shift))
    out = np.empty(x.shape)
    for b in range(len(x)):
        for g in np.split(np.arange(x.shape[-1]), 32):
            values = x[b, ..., g].astype(np.float64)
            out[b, ..., g] = (values - values.mean()) / np.sqrt(values.var() + 1e-5)
    out = out * weight + bias
    return out * (1 + scale[:, None, None]) + shift[:, None, None]


@pytest.mark.parametrize("mean", [0, 1000])
def test_group_norm_matches_numpy_also_with_a_large_mean(mean):
    x = normal(2, 5, 6, 64) + np.float32(mean)
    weight, bias, scale, shift = (normal(64, seed=1), normal(64), normal(2, 64), normal(2, 64, seed=2))
    expected = group_norm(x, weight, bias, scale, shift)
    # The rounding error of values below about 10. E[x^2] - E[x]^2 would be wrong by about 0.1.
    np.testing.assert_allclose(ops.group_norm(x, weight, bias, scale, shift), expected, atol=1e-5)
    plain = ops.group_norm(x, weight, bias, jnp.zeros((2, 64)), jnp.zeros((2, 64)))
    np.testing.assert_array_equal(ops.group_norm(x, weight, bias), plain)


def test_the_gradient_of_group_norm_matches_finite_differences():
    x, direction, cotangent = normal(2, 5, 6, 64) + 3, normal(2, 5, 6, 64, seed=1), normal(64)
    rest = normal(64, seed=2), normal(64), jnp.zeros((2, 64)), jnp.zeros((2, 64))
    gradient = jax.grad(lambda x: (ops.group_norm(x, *rest) * cotangent).sum())(x)
    moved = [np.asarray(x, np.float64) + h * np.asarray(direction) for h in (1e-4, -1e-4)]
    values = [(group_norm(y, *rest) * np.asarray(cotangent)).sum() for y in moved]
    assert (gradient * direction).sum() == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-4)


def test_fused_group_norm_and_silu_have_the_gradients_of_their_definition():
    x, cotangent = normal(2, 5, 6, 64) + 1000, normal(2, 5, 6, 64, seed=1)
    arguments = x, normal(64, seed=2), normal(64), normal(2, 64, seed=3), normal(2, 64, seed=4)

    def definition(x, weight, bias, scale, shift):
        groups = (x - 1000).reshape(2, 30, 32, 2)  # Exact, and without the cancellation.
        mean, variance = groups.mean((1, 3)), groups.var((1, 3))
        spread = lambda v: jnp.repeat(v, 2, axis=1)[:, None, None]
        normed = (x - 1000 - spread(mean)) / jnp.sqrt(spread(variance) + 1e-5)
        out = (normed * weight + bias) * (1 + scale[:, None, None]) + shift[:, None, None]
        return out / (1 + jnp.exp(-out))

    fused = lambda *a: ops.group_norm(*a, silu=True)
    scalar = lambda f: lambda *a: (f(*a) * cotangent).sum()
    every = tuple(range(5))
    ours = jax.grad(scalar(fused), every)(*arguments)
    theirs = jax.grad(scalar(definition), every)(*arguments)
    for gradient, expected in zip(ours, theirs, strict=True):
        # Sums of 30 to 60 products below 50 or so, each rounded to float32.
        np.testing.assert_allclose(gradient, expected, atol=2e-4)
    np.testing.assert_allclose(fused(*arguments), definition(*arguments), atol=2e-5)


def test_the_gradient_of_group_norm_stores_only_its_input():
    x, rest = normal(2, 8, 8, 64), (normal(64), normal(64), normal(2, 64), normal(2, 64))
    function = lambda x: ops.group_norm(x, *rest, silu=True)
    residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(function, x)[1], x))
    assert [leaf.shape for leaf in residuals if leaf.size >= x.size] == [x.shape]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_group_norm_of_bfloat16_has_float32_statistics(platform, monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: platform)
    x = jnp.asarray(normal(2, 8, 8, 64) + 100, jnp.bfloat16)
    ones, zeros = jnp.ones(64), jnp.zeros(64)
    expected = group_norm(x, ones, zeros, jnp.zeros((2, 64)), zeros[None])
    out = ops.group_norm(x, ones, zeros)
    assert out.dtype == jnp.bfloat16
    # Only the output is rounded, to 8 bits. Statistics in bfloat16 would be wrong by one standard
    # deviation: at 100 it resolves 0.5.
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_bfloat16_gradients_of_group_norm_differ_from_float32_only_by_rounding(platform, monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: platform)
    x, cotangent = normal(2, 16, 16, 64) + 100, normal(2, 16, 16, 64, seed=1)
    x, cotangent = (jnp.asarray(value, jnp.bfloat16) for value in (x, cotangent))
    rest = normal(64, seed=2), normal(64), normal(2, 64, seed=3), normal(2, 64, seed=4)
    normed = lambda *a: ops.group_norm(*a, silu=True).astype(jnp.float32)
    every = tuple(range(5))
    gradients = jax.grad(lambda *a: (normed(*a) * cotangent).sum(), every)
    ours = gradients(x, *rest)
    monkeypatch.setattr(ops, "platform", lambda: "cpu")
    theirs = gradients(x.astype(jnp.float32), *rest)
    assert [g.dtype for g in ours] == [jnp.bfloat16, *4 * [jnp.float32]]
    for one, exact in zip(ours, theirs, strict=True):
        error = np.abs(np.asarray(one, np.float32) - exact).max()
        assert error < 2**-7 * np.abs(exact).max()


def test_sinusoids_are_cosines_then_sines():
    t = jnp.array([-1.3, 0, 0.7])
    angles = np.asarray(t)[:, None] * np.array([1, 10000**-0.25, 0.01, 10000**-0.75])
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(ops.sinusoid(t, 8), expected, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_geglu_gates_the_first_half_of_a_product_by_the_gelu_of_the_second(platform, monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: platform)
    x, kernel, bias = normal(2, 3, 4), normal(4, 10, seed=1), normal(10, seed=2)
    value, gate = np.split(np.float64(x) @ np.float64(kernel) + np.float64(bias), 2, axis=-1)
    gelu = gate * scipy.stats.norm.cdf(gate)
    np.testing.assert_allclose(ops.geglu(x, kernel, bias), value * gelu, atol=1e-5)
    # With a cotangent of ones, the bias's gradient sums gelu(gate), and value times its slope.
    gradient = jax.grad(lambda bias: ops.geglu(x, kernel, bias).sum())(bias)
    slope = scipy.stats.norm.cdf(gate) + gate * scipy.stats.norm.pdf(gate)
    expected = np.concatenate([gelu.sum((0, 1)), (value * slope).sum((0, 1))])
    np.testing.assert_allclose(gradient, expected, atol=2e-5)


def test_on_a_gpu_geglu_stores_two_products_for_its_gradient(monkeypatch):
    x, kernel, bias = normal(16, 4), normal(4, 10, seed=1), normal(10, seed=2)
    outputs = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(ops, "platform", lambda name=platform: name)
        out, pullback = jax.vjp(ops.geglu, x, kernel, bias)
        arrays = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "ndim", 0) == 2]
        outputs[platform] = (out, *pullback(jnp.ones_like(out)))
    assert sorted(a.shape for a in arrays if len(a) == 16) == [(16, 4), (16, 5), (16, 5)]
    for theirs, ours in zip(outputs["cpu"], outputs["gpu"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_4x4_transposed_convolution_matches_numpy(platform, monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: platform)
    x, kernel, bias = normal(2, 3, 5, 4), normal(4, 4, 4, 6, seed=1), normal(6)
    out = np.zeros((2, 2 * 3 + 2, 2 * 5 + 2, 6))
    for row, column in np.ndindex(3, 5):
        spread = np.einsum("bc,ijcd->bijd", x[:, row, column], kernel)
        out[:, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4] += spread
    expected = out[:, 1:-1, 1:-1] + bias  # Padding 1.
    np.testing.assert_allclose(ops.conv_transpose_4x4(x, kernel, bias), expected, atol=1e-5)


def test_transposed_convolution_has_no_dilated_pixels_on_a_gpu(monkeypatch):
    """For dilated pixels, cuDNN's deterministic kernels can take a hundred times as long."""
    monkeypatch.setattr(ops, "platform", lambda: "gpu")
    x, kernel, bias = normal(2, 4, 6, 4), normal(4, 4, 4, 6), normal(6)
    loss = lambda *arrays: ops.conv_transpose_4x4(*arrays).sum()
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, kernel, bias))
    assert program.count("conv_general_dilated") == 12  # Four each for output, x and kernel.
    assert set(re.findall(r"lhs_dilation=(\(.*?\))", program)) == {"(1, 1)"}


def test_transposed_convolution_has_the_same_gradients_on_a_tpu(monkeypatch):
    arrays, cotangent = (normal(2, 4, 6, 4), normal(4, 4, 4, 6), normal(6)), normal(2, 8, 12, 6)
    gradients = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(ops, "platform", lambda name=platform: name)
        gradients.append(jax.vjp(ops.conv_transpose_4x4, *arrays)[1](cotangent))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("axes", [1, 2])
def test_tensordot_on_a_cpu_is_one_product_of_matrices(axes):
    x, kernel = normal(2, 3, 4, 5), normal(*(4, 5)[-axes:], 2, 3, seed=1)
    expected = np.tensordot(np.float64(x), np.float64(kernel), axes)
    out, pullback = jax.vjp(lambda kernel: ops.tensordot(x, kernel, axes), kernel)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    cotangent = normal(*expected.shape, seed=2)
    rows = tuple(range(4 - axes))
    gradient = np.tensordot(np.float64(x), np.float64(cotangent), (rows, rows))
    np.testing.assert_allclose(pullback(cotangent)[0], gradient, atol=1e-5)
    program = jax.make_jaxpr(jax.grad(lambda k: (ops.tensordot(x, k, axes) ** 2).sum()))(kernel)
    products = [e for e in program.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 2
    assert all(v.aval.ndim == 2 for e in products for v in (*e.invars, *e.outvars))


@pytest.mark.parametrize(
    ("size", "stride", "side", "im2col"), [(4, 1, 3, True), (8, 1, 3, False), (4, 2, 3, False), (6, 2, 4, False)]
)
@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), ((0, 1), (2, 0))])
def test_a_convolution_matches_numpy_and_xlas_gradients_with_and_without_im2col(size, stride, side, im2col, padding):
    x, kernel = normal(2, size, size + 1, 9), normal(side, side, 9, 32, seed=1)
    padded = np.pad(np.float64(x), ((0, 0), *padding, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2))
    windows = windows[:, ::stride, ::stride]
    expected = np.einsum("bhwcij,ijcd->bhwd", windows, np.float64(kernel))
    numbers, strides = ("NHWC", "HWIO", "NHWC"), (stride, stride)
    convolve = lambda x, kernel: ops.convolution(x, kernel, strides, padding)
    plain = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers)
    out, pullback = jax.vjp(convolve, x, kernel)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    cotangent = normal(*expected.shape, seed=2)
    gradients = pullback(cotangent), jax.vjp(plain, x, kernel)[1](cotangent)
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-5)
    assert ("conv_general" not in str(jax.make_jaxpr(convolve)(x, kernel))) == im2col


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_on_accelerators_products_and_convolutions_are_left_to_xla(platform, monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: platform)
    x, kernel = normal(1, 4, 4, 8), normal(3, 3, 8, 64)
    convolve = lambda x: ops.convolution(x, kernel, (1, 1), ((1, 1), (1, 1)))
    names = [e.primitive.name for e in jax.make_jaxpr(convolve)(x).jaxpr.eqns]
    assert names == ["conv_general_dilated"]
    program = jax.make_jaxpr(lambda x: ops.tensordot(x, kernel[0, 0]))(x)
    product = next(e for e in program.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.invars[0].aval.shape == x.shape


def test_average_pooling_returns_the_mean_of_each_2x2_window():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(ops.average_pool_2x2(x)[0, ..., 0], [[2.5, 4.5], [10.5, 12.5]])


def test_depth_to_space_inverts_space_to_depth():
    x = jnp.arange(16.0).reshape(1, 2, 4, 2)
    patches = ops.space_to_depth(x, 2)
    np.testing.assert_array_equal(patches[0, 0], [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]])
    np.testing.assert_array_equal(ops.depth_to_space(patches, 2), x)


@pytest.mark.parametrize(("rows", "split"), [(8, True), (6, False)])
def test_by_batch_shards_the_result_if_the_mesh_divides_the_batch(rows, split):
    mesh, x = sharding.make_mesh(2, 2, 2), jnp.arange(2.0 * rows).reshape(rows, 2)
    scale = ops.by_batch(lambda x, factor: factor * x)
    whole = sharding.place(x, sharding.replicated(mesh))
    out = jax.jit(sharding.ambient(mesh, scale))(whole, 2)
    assert out.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2) is split
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(scale(x, 2), 2 * x)  # Without a current mesh.


def test_devices_exchange_only_kernels_and_their_gradients():
    mesh = sharding.make_mesh(1, 8)

    def loss(kernels, x):
        for wide, narrow in zip(kernels[::2], kernels[1::2], strict=True):
            x = x + ops.linear(jax.nn.silu(ops.linear(x, wide)), narrow)
        return jnp.mean(x**2)

    kernels = [normal(128, 512), normal(512, 128)] * 2
    layout = sharding.shardings({"kernel": kernels}, mesh, [("kernel", "fsdp")])["kernel"]
    x = sharding.placed(normal(64, 128), sharding.batch_sharding(mesh))
    step = jax.jit(sharding.ambient(mesh, jax.grad(loss)), out_shardings=layout)
    program = step.lower(sharding.placed(kernels, layout), x).compile()
    size = 4 * 128 * 512
    sizes = {(c.kind, c.size) for c in traffic.of_hlo(program.as_text())}
    # One all-reduce sums the gradients of all kernels. Without by_batch, x and activations are
    # gathered and summed instead: 32,768 bytes.
    assert sizes == {("all-gather", size), ("all-reduce", 4 * size)}
