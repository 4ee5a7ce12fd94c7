"""The magnitude-preserving UNet: against the authors' code, and its invariants.

tests/fixtures/edm2_unet.npz was written by NVlabs/edm2's UNet (commit 4bf8162) for CONFIG with
`random_params`. It holds outputs, gradients, and the losses of four steps of torch's Adam.
"""

import functools
import pathlib
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart_mp
from diffusion_jax import runs
from diffusion_jax.config.settings import Optimizer
from diffusion_jax.nn import magnitude
from diffusion_jax.train import optimizer, state
from diffusion_jax.weights import restore
from imagen_jax.conditioning import example_inputs
from imagen_jax.magnitude_unet import Block, MagnitudeUNet
from imagen_jax.settings import read_settings
from imagen_jax.weights import convert
from launch.planner import tasks as planned
from tests.imagen_jax import commands

TEXT_WIDTH = 7
CONFIG = dict(
    image_size=8,
    embed_dim=8,
    channel_mult=(1, 2),
    num_res_blocks=1,
    attention_resolutions=(4,),
    attention="self",
    head_dim=8,
)
FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "edm2_unet.npz"


def flat(tree):
    """Return {"params/mid_0/conv1/unit_kernel": array, ...}."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): a for p, a in leaves}


def random_params(unet):
    """Return normal random numbers for every parameter, seeded by its name, with length != 1."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return jnp.asarray(1.3 * rng.normal(size=leaf.shape), jnp.float32)

    init = lambda key: unet.init(key, **example_inputs(unet, TEXT_WIDTH))
    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init, jax.random.key(0)))


def example(size=8, tokens=3):
    rng = np.random.default_rng(5)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    mask = jnp.arange(tokens) < jnp.array([[tokens], [1]])
    text = normal(2, tokens, TEXT_WIDTH)
    return dict(x=normal(2, size, size, 3), time=normal(2), text=text, text_mask=mask)


@pytest.fixture(scope="module")
def authors():
    with np.load(FIXTURE) as saved:
        return {name: saved[name] for name in saved.files}


def text_of(authors):
    """Return one token per image. The second image's token is 0, like a dropped text."""
    text = jnp.asarray(authors["text"])
    return dict(text=text, text_mask=jnp.ones(text.shape[:2], bool))


def test_output_and_gradients_match_the_authors_code(authors):
    unet = MagnitudeUNet(**CONFIG)
    x, time, text = jnp.asarray(authors["x"]), jnp.asarray(authors["time"]), text_of(authors)

    def product(params, x):
        y = unet.apply(params, x, time, **text)
        return (y * authors["target"]).sum(), y

    gradient = jax.jit(jax.grad(product, argnums=(0, 1), has_aux=True))
    (d_params, dx), y = gradient(random_params(unet), x)
    np.testing.assert_allclose(y, authors["y"], rtol=1e-5, atol=1e-5)
    # Sums of some hundred products, with float32 errors of 1e-6 of the largest.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
    close(dx, authors["dx"], atol=1e-4)
    leaves = flat(d_params)
    assert {f"grad/{name}" for name in leaves} == {n for n in authors if n.startswith("grad/")}
    for name, ours in leaves.items():
        theirs, ours = authors[f"grad/{name}"], np.asarray(ours)
        if theirs.shape != ours.shape:  # Large gradients are stored as sums and a few numbers.
            ours = np.array([ours.sum(), np.abs(ours).sum(), *ours.ravel()[:4]])
        close(ours, theirs, atol=2e-5 * max(1, np.abs(theirs).max()), err_msg=name)


@pytest.fixture(scope="module")
def trained(authors):
    """Return the states and losses of the same four steps as in the fixture."""
    unet = MagnitudeUNet(**CONFIG)

    def loss(params, frozen, batch, key):
        y = unet.apply(params, batch["x"], batch["time"], batch["text"], batch["text_mask"])
        return ((y - batch["target"]) ** 2).mean(), {}

    settings = Optimizer(lr=0.05, schedule="inverse_sqrt", warmup=0, decay_from=2, b2=0.99, eps=1e-3, weight_decay=0.0)
    tx = optimizer.make_optimizer(settings, 4)
    step = jax.jit(state.make_train_step(loss, tx, (0.5,), clip=np.inf, constrain=magnitude.forced))
    # The authors' layers normalize weights in the first pass, ours at initialization.
    now = state.init_state(magnitude.forced(random_params(unet)), tx, (0.5,))
    batch = {**{k: jnp.asarray(authors[k]) for k in ("x", "time", "target")}, **text_of(authors)}
    states, losses = [now], []
    for _ in range(4):
        now, metrics = step(now, (), batch, jax.random.key(0))
        states.append(now)
        losses.append(float(metrics["loss"]))
    return states, losses, functools.partial(step, batch=batch, key=jax.random.key(0))


def test_losses_of_four_training_steps_match_the_authors_code(trained, authors):
    _, losses, _ = trained
    np.testing.assert_allclose(losses, authors["losses"], rtol=2e-5)


def magnitudes(params):
    """Return the magnitude of the weights of every output channel."""
    units = {k: np.asarray(a) for k, a in flat(params).items() if k.endswith(magnitude.UNIT)}
    return {k: np.sqrt((a**2).mean(axis=tuple(range(a.ndim - 1)))) for k, a in units.items()}


def test_training_keeps_weights_at_magnitude_1_and_trains_gains_freely(trained):
    states, *_ = trained
    for now in states:
        for name, lengths in magnitudes(now.params).items():
            np.testing.assert_allclose(lengths, 1, atol=2e-4, err_msg=name)
    gains = [flat(now.params)["params/out_gain"] for now in states]
    assert len({float(gain) for gain in gains}) == 5 and abs(float(gains[-1]) - 1) > 0.01
    first, last = (flat(now.params)["params/mid_0/conv1/unit_kernel"] for now in states[::4])
    assert np.abs(first - last).max() > 0.05  # The direction of weights changes.


def test_an_average_has_magnitudes_below_1_and_equal_outputs_when_normalized(trained):
    states, *_ = trained
    unet, average = MagnitudeUNet(**CONFIG), states[-1].ema["0.5"]
    lengths = np.concatenate([a.ravel() for a in magnitudes(average).values()])
    assert lengths.max() < 1.0001 and lengths.min() < 0.9995
    apply = jax.jit(lambda params: unet.apply(params, **example()))
    # The 1e-4 added to lengths has more effect on short ones.
    np.testing.assert_allclose(apply(average), apply(magnitude.forced(average)), rtol=2e-3, atol=2e-3)


def test_a_step_that_is_not_finite_does_not_change_the_weights(trained):
    states, _, step = trained
    batch = {**step.keywords["batch"], "target": jnp.nan * step.keywords["batch"]["target"]}
    after, metrics = step(states[1], (), batch=batch)
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, states[1].params)


def test_activations_keep_magnitude_1_through_every_block():
    """All gains have their initial values, except that the output gain is 1 instead of 0."""
    unet = MagnitudeUNet(**CONFIG | dict(embed_dim=64, channel_mult=(1, 1)))
    params = jax.jit(lambda key: unet.init(key, **example_inputs(unet, TEXT_WIDTH)))(jax.random.key(0))
    apply = jax.jit(lambda params: unet.apply(params, **example(), capture_intermediates=True, mutable=True))
    assert float(jnp.abs(apply(params)[0]).max()) == 0
    params["params"]["out_gain"] = jnp.ones(())
    y, seen = apply(params)
    rms = lambda a: float(jnp.sqrt((a**2).mean()))
    outputs = {
        name: rms(value["__call__"][0]) for name, value in seen["intermediates"].items() if isinstance(value, dict)
    }
    assert len(outputs) == 14
    for name, value in outputs.items():
        assert 0.75 < value < 1.15, (name, value)  # Averaging in attention reduces magnitudes.
    assert 0.75 < rms(y) < 1.15


def softmax_attention(q, k, v):
    scores = np.einsum("tnk,snk->nts", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snk->tnk", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("kind", ["fused", "cross"])
def test_text_attention_matches_numpy_with_normalized_queries_keys_and_values(kind):
    rng, unit = np.random.default_rng(0), lambda a: a / np.sqrt((a**2).mean(-1, keepdims=True))
    x, context = rng.normal(size=(1, 2, 3, 8)), rng.normal(size=(1, 5, 4))
    mask, emb = np.array([[True, False, True, True, False]]), np.zeros((1, 4))
    block = Block(8, attention=kind, head_dim=4)
    args = [jnp.asarray(a, jnp.float32) for a in (x, emb, context)] + [jnp.asarray(mask)]
    params = block.init(jax.random.key(0), *args)["params"]
    bare = Block(8).apply({"params": {k: params[k] for k in ("conv1", "conv2", "emb", "emb_gain")}}, *args)
    h = np.asarray(bare[0], np.float64).reshape(6, 8)

    def heads(tokens, name, parts):
        w = np.asarray(params[name][magnitude.UNIT], np.float64)
        w = w / np.sqrt((w**2).sum(0))
        return unit((tokens @ w).reshape(len(tokens), parts, 2, 4)).transpose(1, 0, 2, 3)

    text = heads(context[0][mask[0]], "kv_context", 2)
    if kind == "fused":
        q, *pixels = heads(h, "qkv", 3)
        k, v = (np.concatenate(pair) for pair in zip(pixels, text, strict=True))
    else:
        (q,), (k, v) = heads(h, "q", 1), text
    out = np.asarray(params["out"][magnitude.UNIT], np.float64)
    out = softmax_attention(q, k, v).reshape(6, 8) @ (out / np.sqrt((out**2).sum(0)))
    expected = (0.7 * h + 0.3 * out) / np.sqrt(0.7**2 + 0.3**2)
    actual = np.asarray(block.apply({"params": params}, *args)[0]).reshape(6, 8)
    np.testing.assert_allclose(actual, expected, atol=2e-3)  # The layer adds 1e-4 to each length.


@pytest.fixture(scope="module")
def large():
    """Return a super-resolution model with all options: (unet, params, function, inputs)."""
    unet = MagnitudeUNet(**CONFIG | dict(attention="fused", low_res=True, noise_aug=True, patch=2, image_size=16))
    params = random_params(unet)
    rest = dict(low_res=example(4)["x"], low_res_time=jnp.array([0.3, -0.2]))
    apply = jax.jit(lambda inputs: unet.apply(params, **inputs))
    return unet, params, apply, {**example(16), **rest}


def test_the_output_depends_on_every_input_but_not_on_masked_tokens(large):
    _, _, apply, inputs = large
    y = apply(inputs)
    assert y.shape == (2, 16, 16, 3)
    for name in ("x", "time", "text", "low_res", "low_res_time"):
        changed = np.abs(apply({**inputs, name: inputs[name] + 0.3}) - y).max(axis=(1, 2, 3))
        assert (changed > 1e-3).all(), name
    beyond = jnp.where(inputs["text_mask"][:, :, None], 0.0, 100.0)
    np.testing.assert_allclose(apply({**inputs, "text": inputs["text"] + beyond}), y, atol=1e-5)
    none = apply({**inputs, "text_mask": jnp.zeros((2, 3), bool)})
    assert np.isfinite(none).all()


@pytest.mark.gate
@pytest.mark.slow
def test_remat_keeps_the_gradient_and_bfloat16_keeps_the_output_within_5_percent(large):
    unet, params, apply, inputs = large
    product = lambda x, u: (u.apply(params, **{**inputs, "x": x}) ** 2).mean()
    again = unet.copy(remat=True, remat_keeps="products")
    plain, redone = (jax.jit(jax.grad(product), static_argnums=1)(inputs["x"], u) for u in (unet, again))
    np.testing.assert_allclose(redone, plain, rtol=1e-3, atol=1e-5)
    assert np.abs(plain).max() > 1e-3
    y = jax.jit(unet.copy(dtype=jnp.bfloat16).apply)(params, **inputs)
    exact = apply(inputs)
    error = np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2))
    assert y.dtype == jnp.float32 and 1e-4 < error < 0.05, error


def test_a_dropped_text_has_finite_gradients():
    """A zero vector cannot be normalized, and sqrt has no gradient at 0."""
    unet = MagnitudeUNet(**CONFIG | dict(attention="cross", channel_mult=(1,), image_size=4))
    inputs = example(4)
    inputs["text"] = jnp.zeros_like(inputs["text"])
    gradient = jax.jit(jax.grad(lambda p: unet.apply(p, **inputs).sum()))(random_params(unet))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(image_size=9), "unet.image_size is 9, but with unet.patch=1 and 2 levels it must"),
        (dict(attention_resolutions=(3,)), "holds 3, but no level has this resolution"),
        (dict(head_dim=3), "unet.head_dim 3 does not divide the width 16"),
        (dict(noise_aug=True), "unet.noise_aug is True, but unet.low_res is False"),
        (dict(attention_impl="cudnn"), "'cudnn', which needs a 16-bit unet.dtype and heads"),
    ],
)
def test_fields_of_unet_that_contradict_each_other_are_errors(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MagnitudeUNet(**CONFIG | changes).check()
    MagnitudeUNet(**CONFIG).check()


TINY = (
    "--config=configs/quickstart_mp.py",
    *commands.config_flags(
        "unet.embed_dim=32 unet.cond_dim=32 batch_size=8 log_every=1 save_every=2 sample_every=0 optimizer.warmup=0 "
        "sampler.steps=2"
    ),
)


@pytest.mark.gate
@pytest.mark.slow
def test_a_magnitude_unet_is_trained_and_sampled_but_not_exported(tmp_path):
    workdir = tmp_path / "run"
    commands.succeed("train", *TINY, f"--workdir={workdir}", "--config.steps=4", before=commands.skip_rehearsal)
    unet = read_settings(runs.load(workdir)).unet
    abstract = jax.eval_shape(lambda key: unet.init(key, **example_inputs(unet, 64)), jax.random.key(0))
    abstract = {**abstract, "uncertainty": {"kernel": jax.ShapeDtypeStruct((128,), jnp.float32)}}
    for name in ("raw", "ema"):
        params = restore.load_params(workdir / runs.CHECKPOINTS, abstract, name, 4)
        for lengths in magnitudes(params).values():
            np.testing.assert_allclose(lengths, 1, atol=2e-4 if name == "raw" else 2e-2)
    prompt = "--prompt=a red seven on gray paper"
    commands.succeed("sample", f"--workdir={workdir}", prompt, f"--out={tmp_path / 'out'}")
    assert (tmp_path / "out" / "seed_000000.png").is_file()
    with pytest.raises(ValueError, match=r"NeMo has no MagnitudeUNet: only models whose unet\.kind is 'unet'"):
        convert.from_workdir(workdir, tmp_path / "nemo.npz")


def test_the_planner_counts_the_parameters_of_a_magnitude_unet():
    model = planned.read(quickstart_mp.get_config().to_dict())
    assert planned.parameters(model) == 2_139_590
    assert set(model.state.ema) == {"0.999"}
