"""A training step matches numpy, with accumulation, on eight devices, and if it is not finite."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diffusion_jax.devices import sharding
from diffusion_jax.nn import ops
from diffusion_jax.train import moving_average, optimizer
from diffusion_jax.train import state as train_state
from diffusion_jax.train.moving_average import constant_decay, warmup_decay
from diffusion_jax.train.state import init_state, make_train_step
from tests.diffusion_jax import training_noise

KEY = jax.random.key(7)
DECAYS = (0.5, 0.9, 0.9999)
RULES = [(r"conv\d/kernel", P(None, None, "fsdp", "tensor")), (r"out/kernel", sharding.FSDP), (r"", P())]


def make_tx(lr=0.05, warmup=1):
    schedule = optimizer.warmup_constant(lr, warmup)
    return optimizer.adamw(schedule, eps=1e-2, weight_decay=0.1)


def line_loss(params, frozen, batch, key):
    """The loss of linear regression, whose gradient is simple in numpy."""
    del key
    residual = frozen["scale"] * (batch["x"] @ params["w"]) + params["b"] - batch["y"]
    return jnp.mean(residual**2), {"residual": jnp.mean(residual)}


def line_problem(seed=0, batch=8):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=5), "b": rng.normal(size=())}
    batches = [{"x": rng.normal(size=(batch, 5)), "y": 3 * rng.normal(size=batch)} for _ in range(6)]
    to_f32 = lambda tree: jax.tree.map(jnp.float32, tree)
    return to_f32(params), {"scale": jnp.float32(1.5)}, to_f32(batches)


@functools.cache
def line_step(passes=1, clip=1.0, decay_at=constant_decay):
    step = make_train_step(line_loss, make_tx(), DECAYS, passes=passes, clip=clip, decay_at=decay_at)
    return jax.jit(step)


def run_line(step, batches, params, frozen):
    state = init_state(params, make_tx(), DECAYS)
    history = []
    for batch in batches:
        state, metrics = step(state, frozen, batch, KEY)
        history.append((state, metrics))
    return history


def test_training_steps_match_clipped_adamw_in_numpy():
    params, frozen, batches = line_problem()
    history = run_line(line_step(), batches, params, frozen)
    # The bias is appended as the last weight.
    w = np.array([*params["w"], params["b"]], np.float64)
    mu = nu = np.zeros(6)
    for step, (batch, (state, metrics)) in enumerate(zip(batches, history, strict=True)):
        x = np.concatenate([1.5 * np.asarray(batch["x"], np.float64), np.ones((8, 1))], axis=1)
        residual = x @ w - np.asarray(batch["y"], np.float64)
        grad = 2 * x.T @ residual / 8
        norm = np.linalg.norm(grad)
        assert norm > 1  # Otherwise, clipping would not be tested.
        grad = grad * min(1, 1 / (norm + 1e-6))
        mu, nu = 0.9 * mu + 0.1 * grad, 0.999 * nu + 0.001 * grad**2
        mu_hat, nu_hat = mu / (1 - 0.9 ** (step + 1)), nu / (1 - 0.999 ** (step + 1))
        lr = 0.05 * min((step + 1) / 2, 1)
        w = w - lr * (mu_hat / (np.sqrt(nu_hat) + 1e-2) + 0.1 * w)

        # Six float32 steps. In float32, 1 - 0.999^n keeps about five digits.
        np.testing.assert_allclose([*state.params["w"], state.params["b"]], w, rtol=1e-4, atol=1e-5)
        expected = dict(loss=np.mean(residual**2), grad_norm=norm, lr=lr, skipped=0)
        expected |= dict(param_norm=np.linalg.norm(w), residual=residual.mean())
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert int(state.step) == step + 1


def test_a_clip_above_the_gradient_norm_equals_no_clipping():
    params, frozen, batches = line_problem()
    loose = run_line(line_step(clip=1e6), batches, params, frozen)[-1][0]
    never = run_line(line_step(clip=float("inf")), batches, params, frozen)[-1][0]
    jax.tree.map(np.testing.assert_array_equal, loose, never)


@pytest.mark.parametrize("decay_at", [constant_decay, warmup_decay])
def test_every_average_matches_its_recurrence_in_numpy(decay_at):
    params, frozen, batches = line_problem()
    history = run_line(line_step(decay_at=decay_at), batches, params, frozen)
    assert list(history[0][0].ema) == ["0.5", "0.9", "0.9999"]
    for decay in DECAYS:
        ema = np.asarray(params["w"], np.float64)
        for step, (state, _) in enumerate(history):
            warm = decay_at is warmup_decay
            d = min(decay, (1 + step) / (10 + step)) if warm else decay
            ema = d * ema + (1 - d) * np.asarray(state.params["w"], np.float64)
            # Float32 rounding: 6e-8 per step.
            np.testing.assert_allclose(state.ema[str(decay)]["w"], ema, rtol=1e-5, atol=1e-6)


def test_an_average_starts_as_a_copy_of_the_initial_weights():
    params, frozen, batches = line_problem()
    state = init_state(params, make_tx(), DECAYS)
    jax.tree.map(np.testing.assert_array_equal, state.ema["0.9999"], params)
    step = make_train_step(line_loss, make_tx(), DECAYS)
    donated, _ = jax.jit(step, donate_argnums=0)(state, frozen, batches[0], KEY)
    assert state.params["w"].is_deleted() and not frozen["scale"].is_deleted()
    expected = run_line(line_step(), batches[:1], *line_problem()[:2])[0][0]
    jax.tree.map(np.testing.assert_array_equal, donated, expected)


def test_a_donated_state_is_updated_without_copies():
    params = {str(n): jnp.eye(48) for n in range(3)}

    def loss(params, frozen, batch, key):
        h = batch["x"]
        for kernel in params.values():
            h = jnp.tanh(h @ kernel)
        return (h**2).mean(), {}

    step = jax.jit(make_train_step(loss, make_tx(), [0.9]), donate_argnums=0)
    state = init_state(params, make_tx(), [0.9])
    program = step.lower(state, (), {"x": jnp.ones((2, 48))}, KEY).compile()
    assert not re.findall(r"f32\[48,48\]\S* copy\(", program.as_text())


@pytest.mark.parametrize("decay", [1.0, 9999.0, -0.1])
def test_an_ema_decay_outside_0_to_1_is_an_error(decay):
    with pytest.raises(ValueError, match=f"ema_decays holds {decay}: each decay must be at"):
        init_state({"w": jnp.zeros(2)}, make_tx(), [decay])


def test_the_key_of_an_image_depends_on_seed_step_and_row():
    def loss_fn(params, frozen, batch, keys):
        del frozen
        draw = jax.vmap(jax.random.normal)(keys)
        return jnp.sum(params["w"] ** 2), {"draws": jnp.sum(draw * batch["x"])}

    tx = make_tx()
    step = jax.jit(make_train_step(loss_fn, tx, [], passes=3))
    x = jnp.arange(1.0, 7.0)
    state = init_state({"w": jnp.ones(2)}, tx, [])._replace(step=jnp.int32(11))
    _, metrics = step(state, (), {"x": x}, KEY)

    key = jax.random.fold_in(KEY, 11)
    draws = [jax.random.normal(jax.random.fold_in(key, row)) for row in range(6)]
    np.testing.assert_allclose(metrics["draws"], np.dot(draws, x) / 3, rtol=1e-6)


@pytest.mark.parametrize("passes", [2, 4])
def test_micro_batches_with_noise_and_dropout_equal_the_whole_batch(passes):
    """Each row has its own noise, and some texts are dropped."""

    def loss_fn(params, frozen, batch, keys):
        x = batch["x"] + training_noise.normal(keys, 0, *batch["x"].shape[1:])
        keep = training_noise.has_text(keys, 0.5)
        return line_loss(params, frozen, {"x": x * keep[:, None], "y": batch["y"]}, keys)

    params, frozen, batches = line_problem()
    make = functools.partial(make_train_step, loss_fn, make_tx(), DECAYS)
    whole = run_line(jax.jit(make()), batches, params, frozen)
    micro = run_line(jax.jit(make(passes=passes)), batches, params, frozen)
    for (state, metrics), (state_n, metrics_n) in zip(whole, micro, strict=True):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # They sum in another order.
        jax.tree.map(close, (state_n.params, metrics_n), (state.params, metrics))


def test_a_float32_average_does_not_shrink_over_many_steps():
    """Runs 20,000 steps near 1. With float32 factors 0.9999 and 1e-4, it would lose 0.01 %."""
    weights = np.random.default_rng(0).normal(1, 0.1, (20_000, 50)).astype(np.float32)
    step = lambda ema, w: (moving_average.update_exponential({"w": ema}, {"w": w}, 0.9999)["w"], ())
    ema, _ = jax.lax.scan(step, jnp.ones(50), weights)
    exact = np.ones(50)
    for w in weights:
        exact = exact + 1e-4 * (w - exact)
    assert abs(np.mean(ema - exact)) < 3e-5


def test_a_batch_that_cannot_be_split_into_micro_batches_is_an_error():
    params, frozen, batches = line_problem()
    with pytest.raises(ValueError, match=r"a batch of 8 rows cannot be split into 3 equal micro"):
        run_line(line_step(passes=3), batches, params, frozen)


@pytest.mark.parametrize("passes", [1, 4])
def test_on_a_cpu_micro_batches_are_unrolled(passes):
    params, frozen, batches = line_problem()
    state = init_state(params, make_tx(), DECAYS)
    lowered = line_step(passes=passes).lower(state, frozen, batches[0], KEY)
    assert " while(" not in lowered.compile().as_text()


def test_on_an_accelerator_micro_batches_in_a_loop_give_the_same_gradient(monkeypatch):
    params, frozen, batches = line_problem()
    unrolled = run_line(line_step(passes=4), batches, params, frozen)[-1]
    monkeypatch.setattr(ops, "platform", lambda: "gpu")
    step = jax.jit(make_train_step(line_loss, make_tx(), DECAYS, passes=4))
    state = init_state(params, make_tx(), DECAYS)
    assert " while(" in step.lower(state, frozen, batches[0], KEY).compile().as_text()
    rolled = run_line(step, batches, params, frozen)[-1]
    # XLA fuses differently.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, rolled, unrolled)


def test_a_step_that_is_not_finite_changes_only_step_and_skipped():
    params, frozen, (good, other, *_) = line_problem()
    bad = {"x": good["x"].at[3, 2].set(jnp.nan), "y": good["y"]}
    history = run_line(line_step(), [good, bad, other], params, frozen)
    (before, _), (skipped, metrics), (after, _) = history
    assert int(skipped.step) == 2 and int(skipped.skipped) == int(metrics["skipped"]) == 1
    assert not np.isfinite(metrics["loss"]) and np.isfinite(metrics["param_norm"])
    same = skipped._replace(step=before.step, skipped=before.skipped)
    jax.tree.map(np.testing.assert_array_equal, same, before)

    without = run_line(line_step(), [good, other], params, frozen)[-1][0]
    jax.tree.map(np.testing.assert_array_equal, after.params, without.params)


def test_a_step_with_a_finite_loss_and_an_infinite_gradient_is_skipped():
    """The gradient of sqrt is infinite at 0."""
    root = lambda params: jnp.sqrt(jnp.abs(params["w"] - params["w"])).sum()
    explode = lambda params, frozen, batch, keys: (root(params) + batch["x"].sum(), {})
    tx = make_tx()
    state = init_state({"w": jnp.ones(3)}, tx, [])
    new, metrics = jax.jit(make_train_step(explode, tx, []))(state, (), {"x": jnp.ones(2)}, KEY)
    assert float(metrics["loss"]) == 2.0 and int(new.skipped) == 1
    np.testing.assert_array_equal(new.params["w"], np.ones(3))


def conv_loss(params, frozen, batch, keys):
    """Two convolutions and a dense layer, with noise in the loss and in the metrics."""
    # On a CPU, drawing in four dimensions takes six times as long to compile.
    shape = batch["image"].shape
    noise = training_noise.normal(keys, 0, *shape[1:])
    h = batch["image"] + frozen * noise
    for name in ("conv1", "conv2"):
        dimensions = ("NHWC", "HWIO", "NHWC")
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        h = jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
        h = jnp.tanh(h + bias)
    out = h @ params["out"]["kernel"] + params["out"]["bias"]
    return jnp.mean((out - noise) ** 2), {"noise": jnp.mean(noise**2)}


def init_conv():
    rng = np.random.default_rng(1)
    shapes = {"conv1": (3, 3, 8, 16), "conv2": (3, 3, 16, 8), "out": (8, 8)}
    draw = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
    params = {name: {"kernel": draw(*shape), "bias": draw(shape[-1])} for name, shape in shapes.items()}
    return init_state(params, make_tx(lr=1e-2), [0.9])


@functools.cache
def run_conv(fsdp, tensor, passes=1):
    mesh = sharding.make_mesh(1, fsdp, tensor)
    state = init_conv()
    layout = sharding.shardings(state, mesh, RULES, fsdp_min_size=32)
    state = jax.device_put(state, layout)
    image = np.random.default_rng(0).normal(size=(16, 4, 4, 8)).astype(np.float32)
    batch = jax.device_put({"image": image}, sharding.batch_sharding(mesh))
    frozen = jax.device_put(jnp.float32(0.5), sharding.replicated(mesh))
    step = make_train_step(conv_loss, make_tx(lr=1e-2), [0.9], passes=passes)
    step = jax.jit(step, donate_argnums=0, out_shardings=(layout, None))
    for _ in range(3):
        state, metrics = step(state, frozen, batch, KEY)
    return jax.device_get((state, metrics)), state.ema["0.9"]["conv2"]["kernel"].sharding


@pytest.mark.parametrize(("fsdp", "tensor", "passes"), [(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 2, 2)])
def test_a_training_step_on_eight_devices_matches_one_device(fsdp, tensor, passes):
    (state, metrics), placed = run_conv(fsdp, tensor, passes)
    (state_1, metrics_1), _ = run_conv(1, 1, passes)
    assert placed.spec == P(None, None, "fsdp", "tensor") and len(placed.device_set) == 8
    # Sums over devices have another order, and Adam divides by roots of small second moments.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (state, metrics), (state_1, metrics_1))


def test_a_profile_names_the_gradient_the_update_and_the_averages():
    params, frozen, batches = line_problem()
    state = init_state(params, make_tx(), DECAYS)
    program = line_step().lower(state, frozen, batches[0], KEY).compile().as_text()
    names = re.findall(r'op_name="jit\(train_step\)/([^"]*)"', program)
    first = {re.split(r"[/(]", name)[0] for name in names}
    assert {"update", "averages"} <= first and any("transpose(jvp" in name for name in names)


@pytest.mark.parametrize(
    ("platform", "devices", "constrained"), [("gpu", 1, True), ("gpu", 8, False), ("cpu", 1, False), ("tpu", 1, False)]
)
def test_gradients_keep_the_layout_of_the_parameters_on_one_gpu_only(platform, devices, constrained, monkeypatch):
    monkeypatch.setattr(ops, "platform", lambda: platform)
    mesh = sharding.make_mesh(1, devices, 1, jax.devices()[:devices])
    laid_out = sharding.ambient(mesh, train_state._laid_out)
    program = str(jax.make_jaxpr(laid_out)({"kernel": jnp.ones((3, 3, 2, 4)), "bias": jnp.ones(3)}))
    layouts = re.findall(r"major_to_minor=(\(.*?\))", program)
    assert layouts == ["(0,)", "(0, 1, 2, 3)"] * constrained
