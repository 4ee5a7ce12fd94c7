"""The memory model, against programs counted by hand and XLA's memory analysis."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart, sr256_600m
from diffusion_jax.devices import sharding, traced_memory
from diffusion_jax.nn import layers
from diffusion_jax.train import memory, optimizer
from diffusion_jax.train.state import init_state
from imagen_jax.layers import ResBlock
from launch import accelerators
from launch.planner import compiling, estimate, tasks, traffic

SAMPLES = 1009
ROW = 4 * 16  # Bytes of one sample: 16 numbers.


def peak(function, *shapes, batch, parts=(), results=()):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = traced_memory.flatten(jax.make_jaxpr(function)(*arguments).jaxpr)
    parts = {program.inputs[i] for i in parts}
    results = dict(zip(program.outputs, results, strict=False))
    return traced_memory.peak(traced_memory.lifetimes(program, SAMPLES, parts, results), batch)


def test_a_chain_of_products_holds_two_arrays_at_a_time():
    chain = lambda x, w: x @ w @ w @ w @ w
    assert peak(chain, (SAMPLES, 16), (16, 16), batch=5) == 2 * 5 * ROW


def test_elementwise_results_take_memory_only_if_a_product_reads_them_or_they_are_costly():
    cheap = lambda x, w: ((2 * x + 1) ** 2 - x).sum()
    needed = lambda x, w: ((2 * x + 1) @ w).sum()

    def dear(x, w):
        e = jnp.exp(x)
        return (e * e[::-1]).sum() + e.max()

    shapes = (SAMPLES, 16), (16, 16)
    assert peak(cheap, *shapes, batch=1) <= 8  # Only the sum.
    assert peak(needed, *shapes, batch=1) == 2 * ROW
    assert peak(dear, *shapes, batch=1) == pytest.approx(ROW, abs=8)


def test_sharded_parameters_are_gathered_where_they_are_used():
    product = lambda x, w: (x @ w).sum()
    shapes, whole = ((SAMPLES, 16), (16, 16)), 4 * 16 * 16
    assert peak(product, *shapes, batch=1) == ROW
    assert peak(product, *shapes, batch=1, parts=(1,)) == ROW + whole


def test_tensor_parallelism_divides_hidden_activations_but_not_partial_sums():
    def layers(x, first, second):
        return x @ first @ second

    shapes = (SAMPLES, 16), (16, 64), (64, 16)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    gradient = jax.make_jaxpr(lambda *a: jax.vjp(layers, *a)[1](a[0]))(*arguments)
    program = traced_memory.flatten(gradient.jaxpr)
    _, first, second = program.inputs
    sharded, summed = traced_memory.split(program, {first, second})
    name = {v: equation.name for equation in program.equations for v in equation.outputs}
    # Four results are sharded: x @ first, its gradient, and the gradients of both kernels. The
    # gradient of x is a sum over devices.
    assert sorted(name[v] for v in sharded - {first, second}).count("dot_general") == 4
    assert [traced_memory.size(program, v) for v in summed] == [SAMPLES * ROW]
    alive = lambda ways: traced_memory.lifetimes(program, SAMPLES, set(), {}, dict.fromkeys(sharded, ways))
    assert traced_memory.peak(alive(1), 5) - traced_memory.peak(alive(4), 5) >= 3 * 5 * ROW


def test_results_count_until_the_end_with_the_bytes_given_for_them():
    two = lambda x, w: (x.T @ x, x.T @ (x @ w))
    both = 2 * 4 * 16 * 16
    assert peak(two, (SAMPLES, 16), (16, 16), batch=1, results=(128, 128)) < both + 256


def tiny(kind):
    c = quickstart.get_config()
    c.text.width = 32
    c.unet.update(embed_dim=64, cond_dim=32, head_dim=32, image_size=32, patch=1)
    c.unet.update(channel_mult=(1, 2), attention_resolutions=(16,))
    if kind == "efficient":
        c.unet = sr256_600m.get_config().unet
        c.unet.update(image_size=32, embed_dim=32, channel_mult=(1, 2), num_res_blocks=(1, 2))
        c.unet.update(attention_levels=(1,), head_dim=32, dtype="float32")
        c.super_resolution.factor = 4
    c.unet.attention_impl = "xla"  # This implementation stores all scores.
    c.batch_size = 64 if kind == "blocks" else 16
    return c


class Blocks(nn.Module):
    """A part of a UNet that compiles in seconds."""

    @nn.compact
    def __call__(self, x):
        emb = layers.dense(x.mean((1, 2)), 32, "emb", dtype=x.dtype)
        x = layers.conv(x, 64, "in", kernel=3, dtype=x.dtype)
        for n in range(3):
            x = ResBlock(64, name=f"res_{n}")(x, emb)
        return layers.conv(x, 3, "out", kernel=3, dtype=x.dtype)


def blocks(c):
    """Return the model of a config, with these blocks in place of its UNet."""
    model, net = tasks.read(c.to_dict()), Blocks()
    image = np.zeros((1, 32, 32, 3), np.uint8)

    def loss(params, frozen, batch, keys):
        x = jnp.float32(batch["image"]) / 255
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
        return ((net.apply(params, x + noise) - x) ** 2).mean(), {}

    init = lambda key: net.init(key, jnp.float32(image))
    task = model.task._replace(init=init, loss=loss)
    tx = optimizer.make_optimizer(model.optimizer, model.run.steps)
    create = lambda key: init_state(task.init(key), tx, model.optimizer.ema_decays)
    state = jax.eval_shape(create, memory.abstract_key())
    return model._replace(task=task, example={"image": image}, state=state)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("blocks", (1, 2, 4)),
        pytest.param("unet", (1, 8, 1), marks=pytest.mark.slow),
        pytest.param("unet", (1, 4, 2), marks=pytest.mark.slow),
        pytest.param("efficient", (1, 2, 4), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_estimated_bytes_and_communication_match_the_compiled_step(kind, sizes):
    c = tiny(kind)
    c.mesh.update(dict(zip(sharding.AXES, sizes, strict=True)))
    model = blocks(c) if kind == "blocks" else tasks.read(c.to_dict())
    traced, mesh = estimate.trace(model), accelerators.mesh_over(model.mesh, 8)
    passes = optimizer.num_passes(model.optimizer, model.run.batch_size, mesh)
    plan = memory.plan(traced, mesh, model.run.batch_size, passes, np.inf)
    need = plan.need
    compiled = compiling.lower_step(model, sharding.make_mesh(*sizes)).compile()
    actual = compiled.memory_analysis()
    # The state and the batch match exactly, except for a few bytes of the step and the key.
    assert need.total - need.temporary == pytest.approx(actual.argument_size_in_bytes, abs=64)
    total = actual.argument_size_in_bytes + actual.temp_size_in_bytes
    assert need.total == pytest.approx(total, rel=0.1)

    sent = traffic.bytes_by_kind(traffic.of_hlo(compiled.as_text()))
    model_sent = traffic.bytes_by_kind(estimate.collectives(model, plan, mesh))
    # XLA's CPU backend replaces reduce-scatter by all-reduce, which costs twice as much.
    summed = model_sent.get("all-reduce", 0) + 2 * model_sent.get("reduce-scatter", 0)
    # Gradients of kernels that are not tensor-parallel are sharded and then gathered.
    assert summed == pytest.approx(sent["all-reduce"], rel=0.02 if sizes[2] == 1 else 0.06)
    if sizes[2] == 1:
        assert model_sent["all-gather"] == pytest.approx(sent["all-gather"], rel=0.05)


@pytest.mark.parametrize(("limit", "expected"), [(21, 0), (22, 1), (25, 2), (27, 3), (28, 12)])
def test_the_largest_micro_batch_divides_the_share_of_a_device_and_fits(limit, expected):
    """A device's share is 12 pictures of 2 bytes. Several passes take 16 bytes for gradients."""
    need = lambda samples, passes: memory.Bytes(
        parameters=4, optimizer=0, ema=0, frozen=0, batch=0, temporary=2 * samples + 16 * (passes > 1)
    )
    assert memory.largest(need, 12, float(limit)) == expected
