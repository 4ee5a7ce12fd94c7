"""Training learns the vectors of a new word; everything else is frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from diffusion_jax import pack, runs
from diffusion_jax.devices import sharding
from diffusion_jax.evaluate import evaluate_command
from diffusion_jax.files import sheets
from diffusion_jax.text.encoder import LEARNED_WORD
from diffusion_jax.train import loop
from diffusion_jax.weights import torch_weights
from launch.planner import tasks
from sd_jax import drawing, textual_inversion, train
from sd_jax.settings import read_settings
from sd_jax.weights import names, opened, trained
from tests.changes import change
from tests.sd_jax import tiny

WORD = "<cat>=d*3"
SIDE = 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return a folder of four pictures, whose captions contain the word."""
    path, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(4):
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(path / f"{i}.png")
        (path / f"{i}.txt").write_text(f"a <Cat> {'xyzw'[i]}")
    return path


def config(published, pictures, **changes):
    """Return a config that trains WORD on the published model."""
    c = tiny.config(published / "d", unet__weights=str(published / "d"), text__learned_tokens=WORD)
    c.unet.update(width=64, channel_mult=(1,), attention_levels=(0,), head_dim=64)
    c.unet.linear_projections = True
    c.vae.update(width=32, channel_mult=(1, 2), num_res_blocks=1)
    folder = str(published / "d" / "text_encoder")
    c.text.update(encoder="clip", weights=folder, max_tokens=16, dtype="float32", drop_prob=0.2)
    c.latents.update(image_size=SIDE, scale=0.18215)
    c.diffusion.update(predicts="v")
    c.optimizer.update(lr=0.1, warmup=0, weight_decay=0.0, ema_decays=(0.5,))
    c.data.update(source="folder", path=str(pictures))
    c.update(steps=4, batch_size=4, save_every=2)
    return change(c, changes).to_dict()


def run(workdir, config):
    s, mesh = read_settings(config), sharding.make_mesh(devices=jax.devices()[:1])
    inputs = train.prepare(s, mesh)
    with inputs.batches:
        runs.claim(workdir, config)
        train.finetune.keep_base(workdir, inputs.base)
        return loop.train(inputs, s.run, s.optimizer, mesh, workdir, config)


@pytest.fixture(scope="module")
def workdir(published, pictures, tmp_path_factory):
    """Return a run of four steps."""
    path = tmp_path_factory.mktemp("run")
    run(path, config(published, pictures))
    return path


@pytest.mark.slow
@pytest.mark.gate
def test_the_gradient_is_that_of_the_same_vectors_as_rows_of_clips_table(published, pictures):
    s = read_settings(config(published, pictures, text__learned_tokens="<cat>=d*1"))
    encoder = train.lookup.open_encoder(s.text)
    vae = opened.read_vae(s.vae_weights, s.vae)
    task = train.make_task(s, encoder, vae)
    task = task._replace(frozen=jax.tree.map(jnp.asarray, task.frozen))
    base = jax.tree.map(jnp.asarray, opened.read_unet(s.unet_weights, s.unet, s.text.width))
    learning = textual_inversion.adapt(task, base)
    keys = jax.random.split(jax.random.key(3), 2)
    image = np.random.default_rng(1).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    batch = lambda texts: {"image": image, **encoder.tokenize(texts)}
    words = {LEARNED_WORD: jnp.asarray(encoder.frozen["params"][LEARNED_WORD])}

    def of_table(table):
        text = {"params": {**task.frozen["text"]["params"], "token_embedding": table}}
        return task.loss(base, {**task.frozen, "text": text}, batch(["a d", "d d c"]), keys)[0]

    rows = jax.jit(jax.grad(of_table))(task.frozen["text"]["params"]["token_embedding"])
    loss = lambda p: learning.loss(p, learning.frozen, batch(["a <cat>", "<cat> <cat> c"]), keys)[0]
    ours = jax.jit(jax.grad(loss))(words)[LEARNED_WORD]
    assert np.abs(ours).max() > 1e-4
    np.testing.assert_allclose(ours[0], rows[3], rtol=1e-4, atol=1e-7)  # "d" has id 3.


@pytest.mark.slow
@pytest.mark.gate
def test_only_the_vectors_are_trained_and_a_resumed_run_equals_an_uninterrupted_one(
    workdir, published, pictures, tmp_path
):
    c = config(published, pictures)
    run(tmp_path, {**c, "steps": 2})
    state = run(tmp_path, c)
    assert {x.shape for x in jax.tree.leaves(state.params)} == {(3, 24)}
    whole = run(workdir, c)  # At its last step already.
    jax.tree.map(np.testing.assert_array_equal, state._asdict(), whole._asdict())
    vectors = np.asarray(state.params[LEARNED_WORD])
    assert np.abs(np.diff(vectors, axis=0)).max() > 1e-3  # The three equal initial vectors differ.


@pytest.mark.slow
@pytest.mark.gate
def test_a_run_draws_the_same_as_its_exported_embedding_with_the_base_model(workdir, published, tmp_path):
    path = tmp_path / "cat.safetensors"
    trained.write_lora(workdir, path, "diffusers")
    assert {n: (x.shape, x.dtype) for n, x in load_file(path).items()} == {"<cat>": ((3, 24), np.float32)}
    values = {"sampler": "ddim", "steps": 2, "guidance": 3.0, "height": SIDE, "width": SIDE}
    ours = drawing.load(workdir, **values)
    assert {*ours.card()} >= {"base"} and "lora_scale" not in ours.card()
    with_file = drawing.load(published / "d", embedding=str(path), **values)
    plain = drawing.load(published / "d", **values)
    drawn = [m.draw("a <CAT> b").images for m in (ours, with_file, plain)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0].astype(int) - drawn[2]).max() > 1


@pytest.mark.slow
@pytest.mark.gate
def test_a_run_that_learned_a_word_can_be_combined_with_an_embedding_file(workdir, published, tmp_path):
    cat, fox = tmp_path / "cat.safetensors", tmp_path / "fox.safetensors"
    trained.write_lora(workdir, cat, "diffusers")
    torch_weights.write(fox, {"<fox>": np.random.default_rng(4).normal(size=(2, 24)).astype("f4")})
    values = {"sampler": "ddim", "steps": 2, "guidance": 3.0, "height": SIDE, "width": SIDE}
    ours = drawing.load(workdir, embedding=str(fox), **values)
    with_files = drawing.load(published / "d", embedding=f"{cat},{fox}", **values)
    prompts = ["a <cat> b <fox>", "<FOX>", "<cat>"]
    drawn = [m.draw(prompts, seeds=[0, 0, 0]).images for m in (ours, with_files)]
    np.testing.assert_array_equal(*drawn)
    assert all(np.abs(drawn[0][i].astype(int) - drawn[0][i - 1]).max() > 1 for i in range(3))
    assert ours.card()["embedding"] == [str(fox)]
    pack.pack(workdir, "ema", None, tmp_path / "packed")  # It holds the learned word alone.
    packed = drawing.load(tmp_path / "packed", embedding=str(fox), **values)
    np.testing.assert_array_equal(packed.draw("<FOX>", seeds=0).images[0], drawn[0][1])
    options = {**values, "embedding": str(fox)}
    point = evaluate_command.open_subject(drawing.KIND, [str(workdir)], [[options]]).points[0]()
    assert point.card["models"][0]["embedding"] == [str(fox)]
    scored = sheets.to_uint8(point.draw(prompts, [0, 0, 0], 3.0))
    np.testing.assert_array_equal(scored, drawn[0])
    with pytest.raises(ValueError, match="the word '<cat>' is in the model already: keep one"):
        drawing.load(workdir, embedding=str(cat), **values)


@pytest.mark.slow
@pytest.mark.gate
def test_a_run_of_a_learned_word_cannot_be_converted_and_rejects_another_base_model(workdir):
    with pytest.raises(ValueError, match="which trains no UNet: name its base"):
        opened.open_checkpoint(workdir)
    (workdir / train.finetune.BASE).write_text('{"fingerprint": "of another model"}')
    with pytest.raises(ValueError, match="adapts weights that differ from those in unet"):
        drawing.load(workdir)


def test_the_planner_counts_only_the_vectors_and_their_optimizer(published, pictures):
    model = tasks.read(config(published, pictures))
    assert tasks.parameters(model) == 3 * 24
    unet = names.abstract_unet(read_settings(config(published, pictures)).unet, 24)
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert count(model.task.frozen["base"]) == count(unet)
    with pytest.raises((OSError, ValueError)):
        tasks.read(config(published, pictures, text__weights="gone", text__width=768))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text__learned_tokens": "cat toy"}, "is 'cat toy': write WORD=INITIAL\\*N with up to 99"),
        ({"text__learned_tokens": "<cat>=d*0"}, "write WORD=INITIAL\\*N"),
        ({"text__encoder": "hashed"}, "text.encoder is 'hashed': only CLIP can learn a word"),
        ({"text__store": "store"}, "leave text.store empty, set lora.rank=0, and name the model"),
        ({"lora": {"rank": 4}}, "leave text.store empty, set lora.rank=0, and name the model"),
        ({"unet__weights": ""}, "leave text.store empty, set lora.rank=0, and name the model"),
    ],
)
def test_a_word_that_cannot_be_learned_is_an_error(published, pictures, changes, message):
    with pytest.raises(ValueError, match=message):
        read_settings(config(published, pictures, **changes))


def test_an_initial_word_of_several_tokens_and_captions_without_the_word_are_errors(published, pictures, tmp_path):
    several = read_settings(config(published, pictures, text__learned_tokens="<cat>=ab"))
    with pytest.raises(ValueError, match="'ab' has 2 tokens: choose an initial word that is a"):
        train.prepare(several, sharding.make_mesh())
    for word in ("<dog>", "ca"):  # The second is a part of a word.
        absent = read_settings(config(published, pictures, text__learned_tokens=f"{word}=d"))
        with pytest.raises(ValueError, match=f"no caption of the data contains {word}, the word"):
            train.prepare(absent, sharding.make_mesh())
