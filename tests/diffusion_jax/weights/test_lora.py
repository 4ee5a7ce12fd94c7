"""LoRA: only two factors per kernel are trained, and their product is added to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.config.settings import Lora, Optimizer, Text
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion import objective
from diffusion_jax.task import Measure, Task
from diffusion_jax.train import optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import finetune, lora

S = Lora(rank=2, alpha=3.0, targets="attn/|conv")
KEY = jax.random.key(0)


def weights(key=KEY):
    """Return nonzero weights: a linear layer, a convolution, and a layer that is not adapted."""
    zeros = {
        "mid_attn": {"q": {"kernel": jnp.zeros((6, 4)), "bias": jnp.zeros(4)}},
        "conv1": {"kernel": jnp.zeros((3, 3, 2, 5)), "bias": jnp.zeros(5)},
        "other": {"kernel": jnp.zeros((4, 4))},
    }
    return {"params": randomized(zeros, key)}


def randomized(tree, key):
    """Return random arrays of the same shapes."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten(jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))


def of_sums(params, frozen, batch, *_):
    """A loss with known gradients: the sum of products of kernels with the batch."""
    p = params["params"]
    total = (p["mid_attn"]["q"]["kernel"] * batch["a"]).sum()
    total += (p["conv1"]["kernel"] * batch["b"]).sum() + (p["other"]["kernel"] ** 2).sum()
    return total * frozen["factor"]


BATCH = {"a": jnp.arange(24.0).reshape(6, 4), "b": jnp.arange(90.0).reshape(3, 3, 2, 5) / 9}
TASK = Task(
    init=weights,
    loss=lambda *args: (of_sums(*args), {}),
    sample=of_sums,
    frozen={"factor": jnp.array(2.0)},
    rules=sharding.RULES,
    measure=Measure(lambda n: np.ones(n), lambda *args: (of_sums(*args), of_sums(*args))),
)


def factors(task, key=KEY):
    """Return random parameters of an adapted task, also for those that start at 0."""
    return randomized(jax.eval_shape(task.init, key), jax.random.fold_in(key, 1))


def test_an_adapted_model_starts_equal_to_the_base_model():
    task = lora.adapt(TASK, weights(), S)
    params = task.init(KEY)
    pairs = lora.flat(params)
    assert {path: pair["down"].shape for path, pair in pairs.items()} == {"mid_attn/q": (6, 2), "conv1": (3, 3, 2, 2)}
    assert all(float(jnp.abs(pair["up"]).max()) == 0 for pair in pairs.values())
    for pair in pairs.values():  # U(-1, 1) / sqrt(fan_in), as in torch and peft.
        limit = np.prod(pair["down"].shape[:-1]) ** -0.5
        assert 0.5 * limit < float(jnp.abs(pair["down"]).max()) <= limit
    expected = of_sums(weights(), TASK.frozen, BATCH)
    for value in (
        task.loss(params, task.frozen, BATCH, KEY)[0],
        task.sample(params, task.frozen, BATCH, KEY, None),
        task.measure.errors(params, task.frozen, BATCH, KEY, None)[0],
    ):
        assert float(value) == float(expected)


def test_merge_adds_alpha_over_rank_times_the_product_of_the_factors():
    task, base = lora.adapt(TASK, weights(), S), weights()
    params = factors(task)
    merged = lora.merge(base, params, S)["params"]
    down, up = (np.asarray(x, np.float64) for x in params["lora"]["mid_attn"]["q"].values())
    kernel = np.asarray(base["params"]["mid_attn"]["q"]["kernel"], np.float64)
    expected = kernel + 1.5 * down @ up
    np.testing.assert_allclose(merged["mid_attn"]["q"]["kernel"], expected, rtol=1e-5, atol=1e-6)
    for layer, name in (("other", "kernel"), ("conv1", "bias")):
        np.testing.assert_array_equal(merged[layer][name], base["params"][layer][name])


def test_a_convolution_is_adapted_by_a_narrow_one_and_a_1x1_convolution():
    """The form of kohya and peft gives the same result as the merged kernel."""
    task, base = lora.adapt(TASK, weights(), S), weights()
    params = factors(task)
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.random.normal(KEY, (1, 5, 5, 2))
    down, up = params["lora"]["conv1"]["down"], params["lora"]["conv1"]["up"]
    apart = conv(x, base["params"]["conv1"]["kernel"]) + 1.5 * conv(conv(x, down), up[None, None])
    merged = lora.merge(base, params, S)["params"]["conv1"]["kernel"]
    np.testing.assert_allclose(conv(x, merged), apart, rtol=2e-5, atol=2e-5)


def test_gradients_of_the_factors_match_the_chain_rule():
    task = lora.adapt(TASK, weights(), S)
    params = factors(task)
    grads = jax.grad(lambda p: task.loss(p, task.frozen, BATCH, KEY)[0])(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    pair, of_kernel = params["lora"]["mid_attn"]["q"], 2.0 * BATCH["a"]
    expected = {"down": 1.5 * of_kernel @ pair["up"].T, "up": 1.5 * pair["down"].T @ of_kernel}
    for name, value in expected.items():
        np.testing.assert_allclose(grads["lora"]["mid_attn"]["q"][name], value, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0])
def test_lora_scale_is_linear_in_samples_and_does_not_change_the_loss(scale):
    params = factors(lora.adapt(TASK, weights(), S))
    at = lambda scale: lora.adapt(TASK, weights(), S._replace(scale=scale))
    drawn = {k: float(at(k).sample(params, at(k).frozen, BATCH, KEY, None)) for k in (0, 1, scale)}
    assert drawn[scale] == pytest.approx((1 - scale) * drawn[0] + scale * drawn[1], rel=1e-5)
    assert drawn[0] == float(of_sums(weights(), TASK.frozen, BATCH))
    losses = [float(at(k).loss(params, at(k).frozen, BATCH, KEY)[0]) for k in (1, scale)]
    assert losses[0] == losses[1] != drawn[0]


def test_parameters_of_a_learned_weighting_are_trained_with_lora():
    learning = TASK._replace(init=lambda key: {**weights(key), objective.LEARNED_WEIGHTING: {"kernel": KEY}})
    params = lora.adapt(learning, weights(), S).init(KEY)
    assert params.keys() == {"lora", objective.LEARNED_WEIGHTING}


def test_the_train_state_of_lora_holds_only_factors_and_is_sharded():
    task = lora.adapt(TASK, weights(), S)
    tx = optimizer.make_optimizer(Optimizer(lr=1.0), 10)
    state = jax.eval_shape(lambda key: init_state(task.init(key), tx, (0.9,)), KEY)
    sizes = {path: leaf.size for path, leaf in jax.tree.leaves_with_path(state)}
    count = 2 * (6 + 4) + 2 * (18 + 5)
    # Parameters, average, two moments, and five scalars.
    assert sum(sizes.values()) == 4 * count + 5
    mesh = sharding.make_mesh(1, 1, 1)
    placed = sharding.shardings((state, task.frozen["base"]), mesh, task.rules)
    assert len(jax.tree.leaves(placed)) == len(sizes) + 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": "attm"}, "lora.targets is 'attm', which matches none of the 3 layers: the"),
        ({"targets": "("}, r"lora.targets is '\(', which is not a regular expression: missing \)"),
        ({"rank": 5}, r"lora.rank is 5, but the kernel of mid_attn/q has shape \(6, 4\), so its rank"),
    ],
)
def test_invalid_lora_targets_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        lora.adapt(TASK, weights(), S._replace(**change))
    with pytest.raises(ValueError, match="this network has no layers that LoRA can adapt"):
        lora.layers({"params": {"a": {"unit_kernel": np.zeros((2, 2))}}}, S)


def test_unet_weights_without_lora_or_finetuning_is_an_error():
    finetune.check_wanted("s3://bkt/base", S, Text("hashed"))
    finetune.check_wanted("s3://bkt/base", Lora(), Text("hashed", learned_tokens="<cat>=cat"))
    finetune.check_wanted(None, Lora(), Text("hashed"))
    with pytest.raises(ValueError, match=r"--unet_weights=s3://bkt/base .* remove --unet_weights"):
        finetune.check_wanted("s3://bkt/base", Lora(), Text("hashed"))
