"""Training with a T5 that encodes captions: frozen, sharded, and not in checkpoints."""

import jax
import numpy as np
import pytest

from configs import base64_500m_online, quickstart
from diffusion_jax.config.settings import Text
from diffusion_jax.devices import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.train import loop
from imagen_jax import task, train
from imagen_jax.settings import read_settings
from tests.diffusion_jax import toy
from tests.diffusion_jax.text import tiny_weights


def settings(**text):
    c = quickstart.get_config()
    c.unet.update(image_size=toy.SIZE, patch=2, embed_dim=32, head_dim=32)
    c.text.update({"encoder": "t5", "width": 16, "max_tokens": 6, "read_tokens": 6} | text)
    c.optimizer.update(schedule="constant")
    c.update(steps=2, batch_size=8, sample_every=0, save_every=2, log_every=1)
    return read_settings(c.to_dict())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_weights.t5_folder(tmp_path_factory.mktemp("weights") / "t5")


def test_a_frozen_t5_is_sharded_by_the_rules_and_not_trained(folder, tmp_path, monkeypatch):
    """Runs Imagen's config, data, sharding rules and loop with a toy network."""
    s = settings(weights=str(folder), dtype="float32")
    encoder, placed = lookup.open_encoder(s.text), []
    tiny = toy.task(encoder)._replace(rules=sharding.RULES)
    place_all = lambda *arguments: placed.append(sharding.place_all(*arguments)) or placed[-1]
    monkeypatch.setattr(loop, "place_all", place_all)
    examples = loop.Examples(encoder.tokenize(s.run.prompts), s.run.prompts, 2.0)
    mesh = sharding.make_mesh(1, 8, 1)
    with train.open_batches(s, encoder, mesh) as batches:
        inputs = loop.RunInputs(tiny, batches, examples)
        state = loop.train(inputs, s.run, s.optimizer, mesh, tmp_path, {})
    assert (int(state.step), int(state.skipped)) == (2, 0)
    assert state.params.keys() == {"pixels", "text", "time", "out"}
    (frozen,) = placed
    table = frozen["text"]["params"]["token_embedding"]
    assert [shard.data.size for shard in table.addressable_shards] == [table.size // 8] * 8
    jax.tree.map(np.testing.assert_array_equal, frozen["text"], jax.tree.map(np.asarray, encoder.frozen))


def test_the_weights_of_t5_are_arguments_of_the_loss_and_not_constants(folder):
    """The loss is traced but not computed. The weights would be large constants of the program."""
    s = settings(weights=str(folder))
    encoder = lookup.open_encoder(s.text)
    imagen = task.make_task(s, encoder)
    assert imagen.frozen["text"] is encoder.frozen
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    frozen = jax.tree.map(shape, imagen.frozen)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    batch = encoder.tokenize(["a red seven"] * 8) | {"image": np.zeros((8, 8, 8, 3), np.uint8)}
    params = jax.eval_shape(imagen.init, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 8)
    program, (loss, _) = jax.make_jaxpr(imagen.loss, return_shape=True)(params, frozen, batch, keys)
    largest = max(np.size(constant) for constant in program.consts)
    assert largest < 1000 < encoder.frozen["params"]["token_embedding"].size
    assert (loss.shape, loss.dtype) == ((), np.float32)


def test_the_text_settings_of_base64_500m_online_match_nemo():
    c = base64_500m_online.get_config()
    s = read_settings(c.to_dict())
    assert s.text == Text(
        encoder="t5",
        weights="weights/t5-11b-encoder",
        store="",
        width=1024,
        max_tokens=128,
        read_tokens=512,
        dtype="bfloat16",
        drop_prob=0.1,
    )
    assert len(s.run.prompts) == 4
    with pytest.raises(FileNotFoundError, match="weights/t5-11b-encoder"):
        lookup.open_encoder(s.text)


@pytest.mark.parametrize(("encoder", "layer"), [("clip", 1), ("clip_penultimate", 0)])
def test_text_encoder_clip_and_clip_penultimate_select_the_layer(tmp_path, encoder, layer):
    folder = tiny_weights.clip_folder(tmp_path / "clip", "open_clip")
    text = settings(encoder=encoder, weights=str(folder), width=24, max_tokens=16).text
    names = lookup.open_encoder(text).frozen["params"].keys()
    assert max(int(n.split("_")[1]) for n in names if n.startswith("layer_")) == layer
