"""Counted FLOPs against closed forms and known numbers of published models."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from diffusion_jax.devices import flops
from diffusion_jax.train import memory
from launch.planner import tasks
from sd_jax.unet import UNet

NHWC = ("NHWC", "HWIO", "NHWC")
# TFLOP per training sample: three times the matrix products and convolutions of a forward pass,
# counted independently in the reference implementations.
KNOWN = {"base64_500m": 1.003, "base64_2b": 3.947, "sr256_400m": 4.287, "sr1024_600m": 1.477}
KNOWN |= {"sr256_600m": 1.490, "sr256_600m_stacked": 1.574}


def count(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return flops.count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_counted_flops_match_the_known_cost_of_published_models(name):
    model = tasks.read(importlib.import_module(f"configs.{name}").get_config().to_dict())
    loss = jax.make_jaxpr(lambda p, b, k: model.task.loss(p, {"text": ()}, b, k))
    forward = loss(model.state.params, memory.batch_of(model.example, 1), memory.abstract_keys(1))
    assert 3 * flops.count(forward.jaxpr) / 1e12 == pytest.approx(KNOWN[name], rel=0.006)


@pytest.mark.slow
def test_counted_flops_match_the_known_cost_of_stable_diffusion_2():
    unet, x, text = UNet(), jnp.zeros((1, 64, 64, 4)), jnp.zeros((1, 77, 1024))
    params = jax.eval_shape(unet.init, jax.random.key(0), x, jnp.zeros(1), text)
    forward = jax.make_jaxpr(unet.apply)(params, x, jnp.zeros(1), text)
    assert 3 * flops.count(forward.jaxpr) / 1e12 == pytest.approx(2.413, rel=0.006)


def test_a_gradient_costs_twice_its_forward_pass_also_with_strides():
    def strided(x, kernel):
        padding = ((1, 1), (1, 1))
        out = jax.lax.conv_general_dilated(x, kernel, (2, 2), padding, dimension_numbers=NHWC)
        return (out**2).sum()

    x, kernel = (5, 8, 8, 3), (3, 3, 3, 7)
    forward = 2 * 5 * 4 * 4 * 7 * 9 * 3
    assert count(strided, x, kernel) == forward
    assert count(jax.grad(strided, 1), x, kernel) == 2 * forward
    # The gradient for x is a convolution over 8x8 pixels in which 3 of 4 inputs are zero.
    assert count(jax.grad(strided, (0, 1)), x, kernel) == 3 * forward


def test_flops_of_loops_are_multiplied_and_the_costliest_branch_counts():
    def looped(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)[0]

    def branched(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert count(looped, (4, 4)) == 5 * 2 * 4**3
    assert count(branched, (4, 4)) == 2 * 2 * 4**3
    assert count(jax.checkpoint(lambda x: jnp.einsum("bij,bkj->bik", x, x)), (3, 4, 5)) == (2 * 3 * 4 * 4 * 5)


def test_cudnn_attention_is_counted_like_plain_attention():
    """JAX can only trace cuDNN's attention if cuDNN is installed, so two stand-ins are used."""
    q = jax.ShapeDtypeStruct((2, 24, 4, 8), jnp.float32)
    k = v = jax.ShapeDtypeStruct((2, 40, 4, 8), jnp.float32)
    forward = core.Primitive("dot_product_attention_fwd_wrapper")
    forward.def_abstract_eval(lambda q, k, v: q)
    backward = core.Primitive("dot_product_attention_bwd_wrapper")
    backward.multiple_results = True
    backward.def_abstract_eval(lambda q, k, v: [q, k, v])
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla")
    total = lambda *qkv: attend(*qkv).sum()
    of = lambda function: flops.count(jax.make_jaxpr(function)(q, k, v).jaxpr)
    assert of(forward.bind) == of(attend) == 2 * 2 * 2 * 4 * 24 * 40 * 8
    both = of(forward.bind) + of(backward.bind)
    assert both == of(jax.grad(total, (0, 1, 2))) == 3 * of(attend)
