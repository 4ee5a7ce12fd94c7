"""The optimizers and the schedules against their formulas in numpy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.sharding import AbstractMesh

from diffusion_jax.config.settings import Optimizer
from diffusion_jax.devices import sharding
from diffusion_jax.train import optimizer


@pytest.mark.parametrize(
    ("name", "warmup", "steps", "rates"),
    [
        ("constant", 3, 7, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 0.8, 1000: 0.8}),
        ("constant", 0, 7, {0: 0.8}),
        ("cosine", 4, 14, {0: 0.16, 3: 0.64, 4: 0.8, 9: 0.4, 14: 0, 20: 0}),
        ("wsd", 3, 20, {0: 0.2, 3: 0.8, 15: 0.8, 16: 0.8, 17: 0.4, 20: 0, 30: 0}),  # 1 - sqrt over the last fifth.
        ("inverse_sqrt", 3, 7, {0: 0.2, 2: 0.6, 3: 0.8, 10: 0.8, 40: 0.4, 160: 0.2}),
    ],
)
def test_a_schedule_rises_linearly_and_then_has_its_own_form(name, warmup, steps, rates):
    schedule = optimizer.SCHEDULES[name](Optimizer(lr=0.8, schedule=name, warmup=warmup, decay_from=10), steps)
    # float32's pi has an error of 9e-8, and the zero at the end is relative to lr.
    np.testing.assert_allclose([schedule(step) for step in rates], [*rates.values()], rtol=1e-6, atol=1e-7)


def test_schedules_shorter_than_their_warmup_are_errors():
    with pytest.raises(ValueError, match=r"schedule of 10 steps has no room after 10 steps"):
        optimizer.warmup_cosine(lr=0.1, warmup=10, steps=10)
    with pytest.raises(ValueError, match=r"wsd schedule of 10 steps falls from step 8, .* of 8 steps"):
        optimizer.warmup_stable_decay(lr=0.1, warmup=8, steps=10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamw(b1=7)", "optimizer.name: b1 is 7: it must be from 0 to below 1"),
        ("muon(ns_steps=0)", "optimizer.name: ns_steps is 0: it must be above 0"),
        ("sgd(momentum='big')", "optimizer.name: momentum is 'big': it must be a number"),
        ("lion(moment_dtype='int8')", "optimizer.name: moment_dtype is 'int8': choose from"),
        ("muan", "optimizer.name is 'muan': did you mean 'muon'"),
        ("muon(decay=1)", "optimizer.name gives muon the parameter decay, but muon takes only"),
    ],
)
def test_unknown_optimizers_and_invalid_parameters_are_errors(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.check(Optimizer(0.1, name=name), 20_000)


def test_a_restarted_schedule_spans_the_remaining_steps():
    settings = Optimizer(0.8, schedule="cosine", warmup=4, restart=20)
    anew, fresh = optimizer.make_schedule(settings, 34), optimizer.warmup_cosine(0.8, 4, 14)
    steps = np.arange(14)
    np.testing.assert_array_equal(anew(20 + steps), fresh(steps))
    assert float(anew(20)) == pytest.approx(0.8 / 5) and float(anew(34)) == pytest.approx(0)
    with pytest.raises(ValueError, match=r"optimizer\.restart is 20, but the run ends at step 20"):
        optimizer.check(settings, 20)


def test_adamw_matches_the_paper_and_decays_biases_too():
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}
    grads = [{name: rng.normal(size=p.shape) for name, p in params.items()} for _ in range(4)]

    expected = dict(params)
    mu, nu = {k: 0 * p for k, p in params.items()}, {k: 0 * p for k, p in params.items()}
    for step, grad in enumerate(grads):
        lr = 0.1 * min((step + 1) / 3, 1)
        for k, g in grad.items():
            mu[k] = 0.8 * mu[k] + 0.2 * g
            nu[k] = 0.9 * nu[k] + 0.1 * g**2
            mu_hat, nu_hat = mu[k] / (1 - 0.8 ** (step + 1)), nu[k] / (1 - 0.9 ** (step + 1))
            direction = mu_hat / (np.sqrt(nu_hat) + 1e-3) + 0.05 * expected[k]
            expected[k] = expected[k] - lr * direction

    schedule = optimizer.warmup_constant(0.1, warmup=2)
    tx = optimizer.adamw(schedule, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.05)
    actual = jax.tree.map(jnp.float32, params)
    opt_state = tx.init(actual)
    rates = []
    for grad in grads:
        updates, opt_state = tx.update(jax.tree.map(jnp.float32, grad), opt_state, actual)
        actual = optax.apply_updates(actual, updates)
        rates.append(float(optimizer.learning_rate(opt_state)))

    for name, value in expected.items():  # Compare four float32 updates with float64.
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rates, [0.1 / 3, 0.2 / 3, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adamw_is_bit_for_bit_equal_to_optax(dtype):
    rng = np.random.default_rng(0)
    draw = lambda: {"kernel": jnp.float32(rng.normal(size=(64, 48)))}
    ours = optimizer.adamw(optimizer.warmup_constant(1e-3, 0), moment_dtype=dtype)
    theirs = optax.adamw(1e-3, weight_decay=0.01, mu_dtype=dtype)
    start = draw()
    runs = [(jax.jit(tx.update), start, tx.init(start)) for tx in (ours, theirs)]
    for _ in range(5):
        grads = draw()
        for n, (update, params, state) in enumerate(runs):
            updates, state = update(grads, state, params)
            runs[n] = update, optax.apply_updates(params, updates), state
    (_, params, state), (_, expected, expected_state) = runs
    assert state[0].mu["kernel"].dtype == dtype
    equal = np.testing.assert_array_equal
    jax.tree.map(equal, (params, state[0]), (expected, expected_state[0]))


def test_the_number_of_passes_follows_from_batch_size_and_mesh():
    passes = lambda batch, sizes, **values: optimizer.num_passes(
        Optimizer(1e-4, **values), batch, AbstractMesh(sizes, sharding.AXES)
    )
    # As in NeMo: global batch = micro batch x data-parallel ways x passes.
    assert passes(4096, (4, 8, 1), micro_batch=32) == 4
    assert passes(4096, (4, 4, 2), micro_batch=32) == 8  # The tensor axis does not split the batch.
    assert passes(4096, (4, 8, 1), micro_batch=128) == 1
    assert passes(4096, (4, 8, 1)) == 1


def test_a_micro_batch_that_does_not_divide_the_batch_is_an_error():
    message = r"micro_batch 24 x replica 4 x fsdp 8 = 768: .* 3840 and 4608, .* may be a divisor of 128"
    with pytest.raises(ValueError, match=message):
        optimizer.num_passes(Optimizer(1e-4, micro_batch=24), 4096, AbstractMesh((4, 8, 1), sharding.AXES))


def muon_direction(gradient, rms):
    """Return Muon's first update of a matrix: five Newton-Schulz steps (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x if gradient.shape[0] <= gradient.shape[1] else x.T
    return rms * max(gradient.shape) ** 0.5 * x


def test_muon_orthogonalises_inner_kernels_and_updates_the_rest_as_adam():
    rng = np.random.default_rng(0)
    matrices = {"dense/kernel": (12, 6), "conv/kernel": (3, 3, 4, 8)}
    matrices |= {"params/attn/out/kernel": (6, 12), "lora/mlp/down": (8, 2)}
    others = {"conv/bias": (8,), "norm/scale": (8,), "table/embedding": (5, 4)}
    others |= {"init_conv/kernel": (3, 3, 3, 4), "out_conv/kernel": (4, 3), "params/out/kernel": (4, 3)}
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)
    gradient = {tuple(name.split("/")): draw(shape) for name, shape in {**matrices, **others}.items()}
    tree = traverse_util.unflatten_dict(gradient)
    settings = Optimizer(lr=0.5, name="muon(rms=0.3)", warmup=0, weight_decay=0.1)
    tx = optimizer.make_optimizer(settings, 10)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    actual = traverse_util.flatten_dict(updates)
    for name, g in gradient.items():
        if "/".join(name) in matrices:
            direction = muon_direction(g.reshape(-1, g.shape[-1]), 0.3).reshape(g.shape)
        else:
            direction = np.sign(g)  # Adam's first update.
        # Orthogonalisation multiplies six float32 matrices.
        np.testing.assert_allclose(actual[name], -0.5 * (direction + 0.1 * g), rtol=2e-4, atol=2e-4)


def test_lion_and_adafactor_are_those_of_optax_with_our_weight_decay():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(150, 140)).astype(np.float32), "b": np.ones(3, np.float32)}
    for name, direction in (
        ("lion(b1=0.8, b2=0.97)", optax.scale_by_lion(0.8, 0.97)),
        ("adafactor", optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))),
        ("sgd(momentum=0.7)", optax.trace(0.7)),
    ):
        settings = Optimizer(lr=0.1, name=name, warmup=0, weight_decay=0.2)
        tx = optimizer.make_optimizer(settings, 10)
        state, expected_state = tx.init(tree), direction.init(tree)
        for step in range(3):
            gradient = jax.tree.map(lambda x, step=step: np.sin((step + 2) * x), tree)
            updates, state = tx.update(gradient, state, tree)
            expected, expected_state = direction.update(gradient, expected_state, tree)
            expected = jax.tree.map(lambda u, p: -0.1 * (u + 0.2 * p), expected, tree)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)


@pytest.mark.parametrize("name", sorted(optimizer.OPTIMIZERS))
def test_a_step_that_is_not_finite_leaves_the_state_of_every_optimizer_unchanged(name):
    tree = {"a": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
    tx = optimizer.make_optimizer(Optimizer(lr=0.1, name=name, warmup=0), 10)
    _, state = tx.update(tree, tx.init(tree), tree)
    bad = jax.tree.map(lambda x: np.nan * x, tree)
    _, after = jax.jit(tx.update)(bad, state, tree, finite=jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, after, state)
    _, after = jax.jit(tx.update)(tree, state, tree, finite=jnp.array(True))
    assert int(after[-1].updates) == 2


def test_factors_of_learning_rate_and_weight_decay_apply_to_the_weights_that_they_match():
    tree = {"params": {n: {"kernel": jnp.full(2, 8.0), "bias": jnp.full(2, 8.0)} for n in "abc"}}
    gradient = jax.tree.map(jnp.ones_like, tree)
    plain = Optimizer(lr=0.5, name="sgd(momentum=0.0)", warmup=0, weight_decay=0.25)
    settings = plain._replace(lr_factors="/b/=0.5, c=0, ^params/c/bias=4", decay_factors="bias$=0")
    tx, as_before = (optimizer.make_optimizer(s, 10) for s in (settings, plain))
    updates, state = jax.jit(tx.update)(gradient, tx.init(tree), tree)
    of = lambda name: [float(updates["params"][name][part][0]) for part in ("kernel", "bias")]
    # -0.5 * factor * (1 + 0.25 * factor of the decay * 8)
    assert (of("a"), of("b"), of("c")) == ([-1.5, -0.5], [-0.75, -0.25], [0, -2])
    assert jax.tree.structure(state) == jax.tree.structure(as_before.init(tree))
    assert float(optimizer.learning_rate(state)) == 0.5


@pytest.mark.parametrize("name", ["lr_factors", "decay_factors"])
def test_factors_that_match_nothing_or_cannot_be_read_are_errors(name):
    tree = {"params": {"out": {"kernel": jnp.ones(2)}}}
    tx = optimizer.make_optimizer(Optimizer(lr=0.1, **{name: "out=2,^in_conv=0.5"}), 10_000)
    message = f"optimizer.{name} has '^in_conv', which matches no parameter: choose from paths such"
    with pytest.raises(ValueError, match=re.escape(message)):
        tx.update(tree, tx.init(tree), tree)
    for text in ("out", "out=x", "=1", "out=-1", "out=inf", "[=1", "out=1,"):
        with pytest.raises(ValueError, match=re.escape(f"optimizer.{name} is {text!r}: write")):
            optimizer.check(Optimizer(lr=0.1, **{name: text}), 10_000)
