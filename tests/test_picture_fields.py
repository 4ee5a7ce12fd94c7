"""An aesthetic score as an input of every network, from a column of the data to sampling."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import imagen_jax.train
import sd_jax.train
from configs import quickstart
from diffusion_jax import heldout, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Lora
from diffusion_jax.devices import sharding
from diffusion_jax.draw import program
from diffusion_jax.text import registry
from diffusion_jax.train import loop, rehearse
from diffusion_jax.weights import finetune
from imagen_jax import settings as imagen_settings
from imagen_jax import task as imagen
from imagen_jax.conditioning import example_inputs
from sd_jax import task as sd
from tests import written_runs
from tests.diffusion_jax import training_noise
from tests.sd_jax import tiny

SIZE, NUM = 8, 16
KEY = "field_aesthetic"
SMALL = {"channel_mult": (1,), "num_res_blocks": 1, "attention_resolutions": (), "cond_dim": 32}
NETWORKS = {
    "unet": SMALL,
    "efficient": {"channel_mult": (1, 1), "num_res_blocks": (1, 1), "attention_levels": ()},
    "magnitude": SMALL,
    "transformer": {"patch": 4, "depth": 1, "bottleneck": 8},
}
KINDS = [*NETWORKS, "sd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write pictures whose brightness equals their score from 0 to 10, and a VAE."""
    root = tmp_path_factory.mktemp("scored")
    rows = ["file_name,text,aesthetic"]
    for n in range(NUM):
        score = 10 * n / (NUM - 1)
        Image.new("RGB", (SIZE, SIZE), (int(25 * score),) * 3).save(root / f"{n}.png")
        rows.append(f"{n}.png,a gray square,{score:.2f}")
    (root / "metadata.csv").write_text("\n".join(rows))
    tiny.write_vae(root / "vae.safetensors")
    return root


def read_settings(folder, kind, named=("aesthetic=0..10",), **sampler):
    data = {"source": "folder", "path": str(folder), "text": "csv:text", "threads": 0, "fields": named, "heldout": 0.3}
    if kind == "sd":
        c = tiny.config(folder / "vae.safetensors")
        c.unet.norm_groups = 8  # With one channel per group, the norm would remove the embedding.
    else:
        c = quickstart.get_config()
        widths = {"image_size": SIZE, "embed_dim": 32, "head_dim": 32}
        c.unet = type(c)({"kind": kind, "dtype": "float32", **widths, **NETWORKS[kind]})
        c.text.update(width=32, max_tokens=6)
        if kind == "efficient":
            c.super_resolution = {"factor": 2}
    c.optimizer.update(schedule="constant", warmup=1)
    c.update(batch_size=8, steps=2, sample_every=0, prompts=("a gray square",))
    c.data = type(c)(data)
    c.heldout = {"every": 1, "records": 4, "levels": 2}
    c.sampler.update(steps=2, guidance=3.0, **sampler)
    read = tiny.read_settings if kind == "sd" else imagen_settings.read_settings
    return read(c.to_dict())


def prepared(s, kind):
    mesh = sharding.make_mesh(1, 1, 1)
    inputs = (sd_jax if kind == "sd" else imagen_jax).train.prepare(s, mesh)
    task = inputs.task._replace(frozen=jax.tree.map(jnp.asarray, inputs.task.frozen))
    records = heldout.open_records(s.heldout, inputs.batches, task.measure)
    return inputs._replace(task=task, records=records)


@pytest.mark.parametrize("kind", KINDS)
def test_every_network_is_trained_evaluated_and_sampled_with_a_score(folder, kind, tmp_path):
    s = read_settings(folder, kind)
    mesh, inputs = sharding.make_mesh(1, 1, 1), prepared(s, kind)
    with inputs.batches as batches:
        if kind == "unet":
            assert KEY in rehearse.rehearse(inputs, s.run, s.optimizer, mesh, tmp_path)
        task, batch = inputs.task, next(batches)
    params = written_runs.random_params(task.init)
    shares = batch[KEY] / 10
    np.testing.assert_allclose(batch["image"][:, 0, 0, 0] / 250, shares, atol=0.01)

    # The score changes the loss and the held-out loss, and its embedding has a gradient.
    keys = training_noise.keys_of(8)
    loss = jax.jit(jax.value_and_grad(lambda p, b: task.loss(p, task.frozen, b, keys)[0]))
    value, gradient = loss(params, batch)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient["params"][KEY]))
    assert value != loss(params, batch | {KEY: 10 - batch[KEY]})[0]
    assert inputs.records is not None
    score = functools.partial(heldout.make_scorer, task, task.frozen, mesh, batch_size=8)
    records = inputs.records
    other = records._replace(batch={**records.batch, KEY: 10 - records.batch[KEY]})
    assert score(records=records)(params)["loss"] != score(records=other)(params)["loss"]

    # Two scores give two pictures with one program, which also draws without a score.
    texts = {k: v[:2] for k, v in batch.items() if k not in (KEY, "image")}
    if kind == "sd":
        texts |= {f"negative_{name}": x for name, x in texts.items()}
    if kind == "efficient":
        texts["low_res"] = np.zeros((2, 4, 4, 3), np.float32)
    made = []
    inputs_of = lambda *arguments: made.append(arguments) or task.sampler_inputs
    programs = program.make_programs(inputs_of, task.frozen, mesh)
    settings = s.pipeline if kind == "sd" else s
    with_score = lambda text: settings._replace(sampler=settings.sampler._replace(fields=text))
    draw = lambda text, **more: programs(with_score(text), None, 1.0)(
        params, {**texts, **more}, [0, 0], np.full(2, 3, np.float32)
    )
    low, high, unknown = draw("aesthetic=2"), draw("aesthetic=9"), draw("")
    for one, other in ((low, high), (low, unknown), (high, unknown)):
        assert np.abs(one - other).max() > 1e-3
    own = draw("aesthetic=5", **{KEY: np.array([2, 9], np.float32)})
    np.testing.assert_allclose(own, [low[0], high[1]], atol=1e-4)
    assert len(made) == 1


@pytest.mark.parametrize("kind", ["transformer", "magnitude"])  # All networks call with_fields.
def test_a_new_field_changes_neither_the_other_weights_nor_the_output(folder, kind):
    with_field, without = (prepared(read_settings(folder, kind, named), kind) for named in (("aesthetic=0..10",), ()))
    for inputs in (with_field, without):
        inputs.batches.close()
    task, plain = with_field.task, without.task
    params = jax.jit(task.init)(jax.random.key(1))
    expected = jax.jit(plain.init)(jax.random.key(1))
    others = {**params, "params": {k: x for k, x in params["params"].items() if k != KEY}}
    jax.tree.map(np.testing.assert_array_equal, others, expected)

    # A run that starts from weights without the field begins with the same outputs.
    trained = written_runs.random_params(plain.init)
    both = {**params, "params": {**trained["params"], KEY: params["params"][KEY]}}
    batch = jax.tree.map(jnp.asarray, without.batches.example())
    keys = training_noise.keys_of(1)
    sigma = jnp.ones(1)
    scored = {**batch, KEY: jnp.array([7.0])}
    of = lambda task, params, batch: task.measure.errors(params, task.frozen, batch, keys, sigma)
    np.testing.assert_array_equal(of(task, both, scored)[0], of(plain, trained, batch)[0])


def test_a_run_with_a_field_can_start_from_weights_without_it(folder, tmp_path):
    s = read_settings(folder, "unet")
    inputs = prepared(s, "unet")
    inputs.batches.close()
    _, key, create, layout = loop.set_up(inputs.task, s.run, s.optimizer, sharding.make_mesh(1, 1, 1))
    weights = written_runs.random_params(prepared(read_settings(folder, "unet", ()), "unet").task.init)
    state = loop.starting_state(tmp_path, None, create, key, layout, inputs.batches, lambda: jax.device_get(weights))
    started = dict(state.params["params"])
    assert not jnp.any(started.pop(KEY)["dense2"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, started, weights["params"])


def test_other_ranges_of_fields_are_an_error_for_a_lora_and_a_warning_for_full_finetuning(folder, tmp_path, caplog):
    config = quickstart.get_config()
    config.data.fields = ("aesthetic=0..10",)
    runs.claim(tmp_path, config.to_dict())
    (tmp_path / runs.CHECKPOINTS).mkdir()
    inputs = prepared(read_settings(folder, "unet"), "unet")
    inputs.batches.close()
    weights = written_runs.random_params(inputs.task.init)
    start = lambda *texts, rank=2: finetune.start(inputs.task, Lora(rank=rank), str(tmp_path), lambda: weights, texts)
    assert start("csv:aesthetic=0..10").base
    message = r"was trained with data\.fields aesthetic=0\.\.10, but data\.fields is aesthetic=0\.\.5"
    with pytest.raises(ValueError, match=message):
        start("aesthetic=0..5")
    start("csv:aesthetic=0..10", "year=0..1", rank=0)
    assert not caplog.records
    start("aesthetic=0..5", rank=0)
    assert re.search(message, caplog.text)
    # A folder of diffusers has a config.json that says nothing about fields.
    (tmp_path / runs.CHECKPOINTS).rmdir()
    (tmp_path / runs.CONFIG).write_text('{"_class_name": "UNet2DConditionModel"}')
    assert start("aesthetic=0..5").base
    del weights["params"][KEY]
    with pytest.raises(ValueError, match=r"has the fields none, but data\.fields names aesthetic"):
        start("aesthetic=0..10")


def test_an_unknown_argument_of_a_network_is_an_error(folder):
    s = read_settings(folder, "unet", ())
    inputs = example_inputs(s.unet, s.text.width) | {"score": jnp.zeros((1, 2))}
    with pytest.raises(TypeError, match="the network has no argument 'score'"):
        jax.eval_shape(lambda: s.unet.init(jax.random.key(0), **inputs))


@pytest.mark.parametrize("system", ["imagen", "sd"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("taste=3", r"sampler\.fields is 'taste=3', but the fields of this model are aesthetic"),
        ("aesthetic", r"write NAME=NUMBER for each"),
        ("aesthetic=11", r"the field aesthetic is '11': it must be a number from 0 to 10"),
    ],
)
def test_invalid_numbers_for_fields_in_sampling_are_errors(folder, system, text, message):
    with pytest.raises(ValueError, match=message):
        read_settings(folder, "sd" if system == "sd" else "unet", fields=text)


def test_a_number_for_a_model_without_fields_is_an_error_that_names_data_fields():
    with pytest.raises(ValueError, match=r"this model was trained without data\.fields"):
        picture_fields.values((), "aesthetic=7")


def test_year_1950_and_aesthetic_7_are_read_from_one_text():
    named = picture_fields.read(("aesthetic=0..10", "year=1900..2030", "share"))
    assert picture_fields.values(named, " year = 1950.5, aesthetic=7 ") == {"field_year": 1950.5, "field_aesthetic": 7}
    assert picture_fields.values(named, "") == {}


def test_the_planner_counts_the_parameters_of_a_named_field(folder):
    for kind, module in (("unet", imagen), ("sd", sd)):
        s = read_settings(folder, kind)
        inputs = prepared(s, kind)
        inputs.batches.close()
        task, _ = module.example(s, registry.make_encoder(s.text))
        assert KEY in jax.eval_shape(task.init, jax.random.key(0))["params"]
