"""Training on a store of embeddings equals training with the encoder, without its weights."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax.config.settings import Data, Text
from diffusion_jax.data import pipeline
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.precache import fill, lookup, store
from diffusion_jax.text import embed
from imagen_jax import cascade
from imagen_jax.settings import read_settings
from tests.diffusion_jax import toy
from tests.diffusion_jax.text import tiny_weights

PROMPTS = ("a red seven on gray paper", "something that no digit is")


def config(**text):
    c = quickstart.get_config()
    c.text.update({"encoder": "t5", "width": 64, "max_tokens": 16, "read_tokens": 32} | text)
    c.text.dtype = "float32"
    c.update(prompts=PROMPTS, batch_size=8)
    return c


def settings(**text):
    return read_settings(config(**text).to_dict())


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return str(tiny_weights.t5_folder(tmp_path_factory.mktemp("weights") / "t5", width=64))


@pytest.fixture(scope="module")
def path(tmp_path_factory, weights):
    path = str(tmp_path_factory.mktemp("store") / "store")
    fill.run(fill.open_job(config(weights=weights, store=path).to_dict()), fill.EncodingOptions())
    return path


def first_batch(s):
    encoder = lookup.open_encoder(s.text)
    pictures = open_pictures(Data("diffusion_jax.examples.digits"), 16)
    with pipeline.make_batches(pictures, encoder.tokenize, batch_size=8, seed=0) as batches:
        return encoder, next(batches)


def test_stored_embeddings_are_within_1_percent_of_the_encoder(path, weights):
    online, online_batch = first_batch(settings(weights=weights))
    stored, batch = first_batch(settings(store=path))
    np.testing.assert_array_equal(batch["image"], online_batch["image"])
    assert batch["text_values"].dtype == np.int8 and stored.frozen == ()
    expected, mask = online.encode(jax.tree.map(jnp.asarray, online.frozen), online_batch)
    embeddings, stored_mask = jax.jit(stored.encode)((), batch)
    np.testing.assert_array_equal(stored_mask, mask)
    error = jnp.linalg.norm(embeddings - expected) / jnp.linalg.norm(expected)
    assert 0.001 < error < 0.01
    assert stored.tokenize(PROMPTS)["text_mask"].any(1).tolist() == [True, True]


def test_gradients_with_stored_embeddings_are_equal_on_eight_devices(path):
    """Gradients of the toy network, compared with one device."""
    encoder, batch = first_batch(settings(store=path))
    batch["image"] = batch["image"][:, :: 16 // toy.SIZE, :: 16 // toy.SIZE]
    tiny = toy.task(encoder)
    params = tiny.init(jax.random.key(0))
    grad = jax.jit(jax.grad(lambda *a: tiny.loss(*a)[0]))
    keys = jax.random.split(jax.random.key(1), len(batch["image"]))
    alone = grad(params, tiny.frozen, batch, keys)
    where = sharding.batch_sharding(sharding.make_mesh())
    spread = {name: sharding.place(array, where) for name, array in batch.items()}
    assert len(spread["text_values"].addressable_shards) == 8
    together = grad(params, tiny.frozen, spread, keys)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, alone, together)


def test_embeddings_beside_images_need_the_encoder_only_for_new_prompts(weights):
    """The prompts of training are encoded once at the start."""
    beside = lookup.open_encoder(settings().text, embedded=True)
    assert (beside.name, beside.frozen, beside.width, beside.max_tokens) == ("t5", (), 64, 16)
    with pytest.raises(ValueError, match=r"of training were made by 't5'.*--text_weights=FOLDER"):
        lookup.open_prompts(settings().text, beside, True, PROMPTS)
    text = settings(weights=weights).text
    tokenize = lookup.open_prompts(text, beside, True, [*PROMPTS, *PROMPTS])
    embeddings, mask = embed(beside._replace(tokenize=tokenize), PROMPTS[::-1])
    expected, expected_mask = embed(lookup.open_online(text), PROMPTS[::-1])
    np.testing.assert_array_equal(mask, expected_mask)
    np.testing.assert_allclose(embeddings, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_prompts_of_training_that_are_not_in_the_store_are_an_error(path):
    text = settings(store=path).text
    stored = lookup.open_encoder(text)
    assert lookup.open_prompts(text, stored, False, PROMPTS) is stored.tokenize
    with pytest.raises(ValueError, match=r"1 captions are not in .*'what else': encode"):
        lookup.open_prompts(text, stored, False, ["what else"])


def test_precache_stores_the_prompts_of_scores_during_training(weights, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    c = config(weights=weights, store=str(tmp_path / "store"))
    assert set(fill.open_job(c.to_dict()).prompts) == set(PROMPTS)
    c.evaluation.update(every=8, prompts=str(tmp_path / "prompts.txt"), num_prompts=2)
    prompts = fill.open_job(c.to_dict()).prompts
    assert len(prompts) == 4 and len({"one", "two", "three"} & set(prompts)) == 2
    c.evaluation.prompts = ""
    assert set(digits.heldout_prompts()) < set(fill.open_job(c.to_dict()).prompts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"width": 32}, r"made with other settings \(width: 64 stored, 32 requested\): set the text"),
        ({"max_tokens": 8}, r"\(max_tokens: 16 stored, 8 requested\)"),
        ({"read_tokens": 16}, r"\(read_tokens: 32 stored, 16 requested\)"),
        ({"encoder": "clip"}, r"\(encoder: 't5' stored, 'clip' requested\)"),
    ],
)
def test_a_store_with_other_text_settings_is_an_error(path, text, message):
    with pytest.raises(ValueError, match=message):
        lookup.open_encoder(settings()._replace(text=Text(**{**settings(store=path).text._asdict(), **text})).text)


def test_a_store_is_checked_against_local_weights_of_the_encoder(path, weights, tmp_path):
    lookup.open_encoder(settings(store=path, weights=weights).text)
    lookup.open_encoder(settings(store=path, weights="of/another-machine").text)
    other = tiny_weights.t5_folder(tmp_path / "other", width=64, update=2.0)
    with pytest.raises(ValueError, match=r"\(weights: '\w+' stored, '\w+' requested\)"):
        lookup.open_encoder(settings(store=path, weights=str(other)).text)


def test_prompts_outside_a_store_need_the_encoder_that_made_the_store(path, weights, tmp_path):
    """The config of the run or the command names the weights of the encoder."""
    (tmp_path / "config.json").write_text(json.dumps(config(store=path).to_dict()))
    without = cascade.read_run(tmp_path)
    with pytest.raises(ValueError, match=r"made by 't5', and new texts need the same encoder.*--text_weights"):
        lookup.open_online(without.text)
    named = cascade.read_run(tmp_path, {"text.weights": weights})
    assert lookup.open_online(named.text).tokenize(["new"])["text_ids"].shape == (1, 32)
    other = tiny_weights.t5_folder(tmp_path / "other", width=64, stream=2.0)
    with pytest.raises(ValueError, match=r"\(weights: '\w+' stored, '\w+' requested\)"):
        lookup.open_online(named.text._replace(weights=str(other)))
    moved = str(tmp_path / "moved")
    shutil.copytree(path, moved)
    assert len(store.Store(moved)) == len(store.Store(path))
    assert lookup.open_encoder(named.text._replace(store=moved)).name == "t5"
