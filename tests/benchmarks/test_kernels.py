"""Forms of operations: their equality, and the traffic of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import forms, group_norm_kernel
from benchmarks.profile import hlo
from diffusion_jax.nn import ops


@pytest.mark.parametrize(
    "shape, dtype, tolerance",
    [
        # Float32 sums in another order; bfloat16 rounds to 2^-8, and ops rounds one more array.
        ((2, 12, 12, 128), "float32", 1e-6),
        ((1, 6, 5, 320), "float32", 1e-6),
        ((2, 16, 16, 64), "bfloat16", 2**-7),
    ],
)
def test_the_kernels_for_gpus_compute_group_norm_with_silu_and_its_gradients(shape, dtype, tolerance):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    b, c = shape[0], shape[-1]
    x, factor, offset = (2 * normal(*shape) + 1).astype(dtype), normal(b, c), normal(b, c)
    ours = lambda *a: group_norm_kernel.group_norm(*a, groups=32, interpret=True)
    theirs = lambda *a: ops._normalize(*a, 32, 1e-5, True)
    for run in (ours, theirs):
        assert run(x, factor, offset).dtype == dtype
    cotangent = normal(*shape).astype(dtype)
    (y, back), (expected, backward) = (jax.vjp(f, x, factor, offset) for f in (ours, theirs))
    pairs = zip([y, *back(cotangent)], [expected, *backward(cotangent)], strict=True)
    for a, b in pairs:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def test_the_kernels_for_gpus_refuse_channels_that_do_not_fill_a_program():
    with pytest.raises(ValueError, match="96 channels and 16 pixels"):
        group_norm_kernel.group_norm(jnp.ones((1, 4, 4, 96)), jnp.ones((1, 96)), jnp.ones((1, 96)))


GATED, BIASED = (forms.own_gradient, forms.two_products), (forms.biased_row, ops._linear)


@pytest.mark.parametrize(
    ("form", "plain"), [*((form, forms.one_product) for form in GATED), *((form, forms.biased) for form in BIASED)]
)
def test_forms_of_the_gated_mlp_and_of_a_biased_product_have_equal_values_and_gradients(form, plain):
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 8), (8, 16), (16,))]
    value = lambda f: jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), value(form), value(plain))


def test_traffic_adds_operands_and_results_and_counts_copies():
    text = """HloModule m

%fused (p: f32[8,4]) -> f32[4,8] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %t = f32[4,8]{1,0} transpose(%p), dimensions={1,0}
}

ENTRY %main (a: f32[8,4], b: bf16[8,4]) -> f32[4,8] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = bf16[8,4]{1,0} parameter(1)
  %c = f32[8,4]{1,0} convert(%b)
  %s = f32[8,4]{1,0} add(%a, %c)
  ROOT %f = f32[4,8]{1,0} fusion(%s), kind=kLoop, calls=%fused
}
"""
    # convert: 64 + 128; add: 3 * 128; fusion: 2 * 128, which only transposes.
    assert hlo.bytes_moved(text) == (64 + 6 * 128, 1)
