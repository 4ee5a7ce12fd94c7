"""A block with remat stores the configured values in its forward pass, and recomputes others."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices.flops import subjaxprs
from diffusion_jax.nn.attention import attend
from diffusion_jax.nn.layers import KEEPS, GroupNorm, conv, with_remat


class Block(nn.Module):
    """A convolution, a norm, and self-attention over pixels in blocks of keys."""

    @nn.compact
    def __call__(self, x):
        h = GroupNorm(groups=2, silu=True)(conv(x, 8, "conv", kernel=3, dtype=jnp.float32))
        tokens = h.reshape(len(h), -1, 2, 4)
        return x + attend(tokens, tokens, tokens, implementation="blockwise").reshape(h.shape)


def counts(jaxpr, kinds):
    total = collections.Counter()
    for equation in jaxpr.eqns:
        total[equation.primitive.name] += 1
        for inner in subjaxprs(equation):
            total += counts(inner, kinds)
    return collections.Counter({kind: total[kind] for kind in kinds})


@pytest.mark.parametrize(
    ("keeps", "again"),
    [
        ("nothing", {"conv_general_dilated": 1, "scan": 1}),
        ("attention", {"conv_general_dilated": 1}),
        ("products", {}),
        ("offloaded", {}),
    ],
)
def test_a_block_with_remat_recomputes_only_what_its_policy_does_not_store(keeps, again):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 8)), jnp.float32)
    params = Block().init(jax.random.key(0), x)

    def loss(remat):
        block = with_remat(Block, remat, keeps)()
        return lambda params: (block.apply(params, x) ** 2).sum()

    plain, other = (jax.make_jaxpr(jax.grad(loss(remat)))(params).jaxpr for remat in (False, True))
    kinds = ("conv_general_dilated", "scan")
    assert counts(other, kinds) - counts(plain, kinds) == again
    expected, actual = (jax.jit(jax.grad(loss(remat)))(params) for remat in (False, True))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, actual, expected)


def test_every_policy_is_tested():
    assert list(KEEPS) == ["nothing", "attention", "products", "offloaded"]
