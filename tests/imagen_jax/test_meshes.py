"""The UNet on every mesh has the same losses, parameters and pictures as on one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import quickstart, quickstart_mp
from diffusion_jax.devices import sharding
from diffusion_jax.draw import program
from diffusion_jax.precache import lookup
from diffusion_jax.train import loop
from diffusion_jax.train.optimizer import make_optimizer, num_passes
from diffusion_jax.train.state import init_state
from imagen_jax import task
from imagen_jax.settings import read_settings
from tests.diffusion_jax import training_noise

MESHES = [(1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 4, 2), (1, 2, 4)]
# The micro batch per device. Each step has four passes.
MICRO_BATCHES = [((1, 1, 1), 2), ((1, 2, 1), 1)]


@functools.cache
def system(config=quickstart):
    c = config.get_config()
    c.unet.update(embed_dim=32, head_dim=32, cond_dim=32)
    c.text.update(encoder="t5", width=32)
    c.sampler.update(name="ddim", eta=0.0, steps=2)
    # With Adam's default epsilon, a step would not depend on the size of a gradient, but on the
    # sign of its rounding error.
    c.optimizer.update(schedule="constant", warmup=0, lr=1e-2, eps=0.1, clip=1.0)
    settings = read_settings({**c.to_dict(), "prompts": ("a",)})
    rng = np.random.default_rng(0)
    texts = list(rng.normal(size=(8, 6, 32)).astype(np.float32))
    encoder = lookup.open_encoder(settings.text, embedded=True)
    batch = {"image": rng.integers(0, 256, (8, 16, 16, 3), np.uint8), **encoder.tokenize(texts)}
    return settings, task.make_task(settings, encoder), batch


def test_the_loss_on_a_2x2x2_mesh_matches_one_device():
    """Only the forward pass, which compiles in seconds."""
    _, imagen, batch = system()
    keys, losses = training_noise.keys_of(8), []
    for sizes in [(1, 1, 1), (2, 2, 2)]:
        mesh = sharding.make_mesh(*sizes)
        where = sharding.shardings(initial(), mesh, imagen.rules, fsdp_min_size=32)
        params = jax.device_put(initial(), where)
        placed = jax.device_put(batch, sharding.batch_sharding(mesh))
        losses.append(jax.jit(imagen.loss)(params, {"text": ()}, placed, keys)[0])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_the_mean_loss_of_micro_batches_equals_the_loss_of_the_batch():
    _, imagen, batch = system()
    keys, loss, frozen = training_noise.keys_of(8), jax.jit(imagen.loss), {"text": ()}
    micro = [loss(initial(), frozen, {k: v[i::2] for k, v in batch.items()}, keys[i::2])[0] for i in range(2)]
    whole = loss(initial(), frozen, batch, keys)[0]
    assert abs(micro[0] - micro[1]) > 1e-3  # They contain different pictures and noise.
    np.testing.assert_allclose(np.mean(micro), whole, rtol=1e-5)


@functools.cache
def run(sizes, micro_batch=0, config=quickstart):
    """Return the losses of three steps, the parameters after them, and pictures drawn."""
    settings, imagen, batch = system(config)
    mesh = sharding.make_mesh(*sizes)
    tx = make_optimizer(settings.optimizer, 10)
    create = lambda key: init_state(imagen.init(key), tx, (0.9,))
    key = jax.device_put(jax.random.key(3), sharding.replicated(mesh))
    # Also shard small arrays.
    where = sharding.shardings(jax.eval_shape(create, key), mesh, imagen.rules, fsdp_min_size=32)
    state = jax.device_put(init_state(initial(config), tx, (0.9,)), where)
    placed = jax.device_put(batch, sharding.batch_sharding(mesh))
    optimizer = settings.optimizer._replace(ema_decays=(0.9,), micro_batch=micro_batch)
    passes = num_passes(optimizer, len(batch["image"]), mesh)
    step = loop.make_step(imagen, optimizer, tx, where, passes)
    losses = []
    for _ in range(3):
        state, metrics = step(state, {"text": ()}, placed, key)
        losses.append(float(metrics["loss"]))
    texts = {k: v for k, v in batch.items() if k != "image"}
    draw = program.make_draw(imagen.sample, {"text": ()}, mesh)
    pictures = draw(state.params, texts, list(range(8)), np.full(8, 2.0, np.float32))
    return losses, jax.device_get(state.params), pictures


@functools.cache
def initial(config=quickstart):
    # Zeros would hide much of the network.
    noisy = lambda p: p + 0.02 * jax.random.normal(jax.random.key(5), p.shape)
    init = lambda key: jax.tree.map(noisy, system(config)[1].init(key))
    return jax.device_get(jax.jit(init)(jax.random.key(1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "micro_batch", "config"),
    [
        *((sizes, 0, quickstart) for sizes in MESHES),
        *((*micro, quickstart) for micro in MICRO_BATCHES),
        ((1, 4, 2), 0, quickstart_mp),
        ((1, 2, 1), 1, quickstart_mp),
    ],
)
def test_every_mesh_and_micro_batch_trains_and_samples_like_one_device(sizes, micro_batch, config):
    losses, params, pictures = run(sizes, micro_batch, config)
    expected = run((1, 1, 1), config=config)
    assert len(set(expected[0])) == 3  # The losses differ between steps.
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    # float32 sums in other orders: gradients of about 1 have errors of 1e-6, times lr = 0.1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, expected[1])
    np.testing.assert_allclose(pictures, expected[2], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "block", "kernel"), [(quickstart, "mid_res_0", "kernel"), (quickstart_mp, "mid_0", "unit_kernel")]
)
def test_residual_blocks_shard_outputs_then_inputs_over_tensor(config, block, kernel):
    shapes = jax.eval_shape(system(config)[1].init, jax.random.key(0))
    mesh = sharding.make_mesh(1, 2, 4)
    places = sharding.shardings(shapes, mesh, sharding.RULES, fsdp_min_size=32)["params"][block]
    assert places["conv1"][kernel].spec == P(None, None, "fsdp", "tensor")
    assert places["conv2"][kernel].spec == P(None, None, "tensor", "fsdp")
