"""Compare textual inversion with diffusers: equal gradients, and files that each side reads.

pip install torch diffusers transformers
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.task import Task
from diffusion_jax.text import clip, outputs, registry, tokenize
from diffusion_jax.text.encoder import LEARNED_WORD
from sd_jax import textual_inversion
from sd_jax.unet import UNet
from sd_jax.weights import checkpoints, embedding_files
from tests.sd_jax import written_models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Warnings of diffusers.

UNET = UNet(32, (1, 2), 1, (0, 1), num_heads=8, linear_projections=False)
TEXTS = ["a <cat> b", "<cat> d <cat>"]


@pytest.fixture(scope="module")
def folder(published, tmp_path_factory):
    return written_models.write(tmp_path_factory.mktemp("model") / "d", UNET, None, published)


@pytest.fixture
def pipeline(folder):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.tokenizer.model_max_length = 16  # The tiny tokenizer has no config with this value.
    return pipe


@pytest.fixture
def vectors():
    return np.random.default_rng(0).normal(size=(3, 24)).astype("f4") / 5


def ours_of(folder, path):
    """Return the checkpoint, and the encoder and text part that know the word in the file."""
    opened = checkpoints.load(folder)
    tower, tokenizer = opened.text.tower, tokenize.clip(folder / "tokenizer")
    encoder, params = embedding_files.apply(str(path), clip.of_tower(tower, (), tokenizer, 16), opened.text.params)
    return opened, encoder._replace(frozen=jax.tree.map(jnp.asarray, params))


def close(ours, theirs):
    error = np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()
    print(f"relative error {error:.2e}")
    assert error < 1e-5  # Measured: 1.0e-6; torch's own float32 differs by 0.9e-6 from float64.


def test_the_gradient_of_the_loss_with_respect_to_the_vectors_is_that_of_diffusers(folder, pipeline, vectors, tmp_path):
    path, rng = tmp_path / "cat.safetensors", np.random.default_rng(1)
    embedding_files.write(path, embedding_files.Embedding("<cat>", vectors))
    pipeline.load_textual_inversion(str(path))
    x, eps = rng.standard_normal((2, 2, 4, 16, 16)).astype("f4")
    steps = np.array([100, 700])

    # As in diffusers' examples/textual_inversion/textual_inversion.py.
    prompts = [pipeline.maybe_convert_prompt(t, pipeline.tokenizer) for t in TEXTS]
    ids = pipeline.tokenizer(prompts, padding="max_length", max_length=16, return_tensors="pt")
    hidden = pipeline.text_encoder(ids.input_ids)[0]
    of = lambda array: torch.tensor(array)
    predicted = pipeline.unet(of(x), of(steps), hidden).sample
    torch.nn.functional.mse_loss(predicted, of(eps), reduction="mean").backward()
    rows = pipeline.text_encoder.get_input_embeddings().weight.grad.numpy()[-3:]

    opened, encoder = ours_of(folder, path)
    base = jax.tree.map(jnp.asarray, opened.unet.params)
    last = lambda array: jnp.asarray(array.transpose(0, 2, 3, 1))

    def loss(params, frozen, batch, keys):
        text, _ = encoder.encode(frozen["text"], batch)
        out = opened.unet.network.apply(params, last(x), jnp.asarray(steps, jnp.float32), text)
        return jnp.mean((out - last(eps)) ** 2), {}

    task = Task(lambda key: base, loss, None, {"text": encoder.frozen}, [])
    task = textual_inversion.adapt(task, base)
    batch = encoder.tokenize(TEXTS)
    close(encoder.encode(encoder.frozen, batch)[0], hidden.detach().numpy())
    value = lambda params: task.loss(params, task.frozen, batch, None)[0]
    close(jax.grad(value)({LEARNED_WORD: jnp.asarray(vectors)})[LEARNED_WORD], rows)


def test_a_model_with_an_added_word_keeps_its_pooled_text_after_conversion(folder, pipeline, tmp_path):
    pipeline.tokenizer.add_tokens(["<cat>"])
    pipeline.text_encoder.resize_token_embeddings(len(pipeline.tokenizer))
    pipeline.save_pretrained(tmp_path / "theirs")
    read = checkpoints.load(tmp_path / "theirs")
    checkpoints.save_diffusers(read, tmp_path / "ours", tokenizer=tmp_path / "theirs")
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "ours")
    encoder = registry.load(tmp_path / "ours" / "text_encoder")
    ids = encoder.tokenize(TEXTS)["text_ids"]
    assert ids.max() == len(pipeline.tokenizer) - 1 == pipeline.text_encoder.config.eos_token_id + 1
    before, after = (p.text_encoder(torch.tensor(ids)) for p in (pipeline, again))
    assert torch.equal(before.pooler_output, after.pooler_output)
    ours = outputs(encoder, TEXTS)
    close(ours.pooled, after.pooler_output.detach().numpy())
    close(ours.last, after.last_hidden_state.detach().numpy())
