"""The stable functions of diffusion_jax.text and .metrics work as docs/library.md shows."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from diffusion_jax import metrics, text
from tests.diffusion_jax.metrics import toy
from tests.diffusion_jax.text import tiny_weights

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text()
RELATIVE = 1e-5  # Of the largest value, as in tests/parity/text.py: float32 rounding.
# Runs the page's examples with a small network in place of Inception, and prints all modules.
RUN = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from diffusion_jax import metrics
from tests.diffusion_jax.metrics import toy
metrics.load_inception = lambda path: toy.extractor()
exec({examples!r})
assert tokens["text_ids"].shape == (2, 77) and mean.shape == (2, 16)
assert outputs.pooled.shape == (2, 24) and outputs.projected.shape == (2, 20)
print("MODULES", *sys.modules)
"""
EXTRAS = "array_record clu datasets grain jinja2 matplotlib pyarrow scipy sklearn starlette "
EXTRAS += "tensorboard tensorflow tensorflow_datasets torch uvicorn"


def write_models(folder):
    """Write a T5 and a CLIP with random weights under the names of the page's examples."""
    for name in ("google-t5/t5-small", "openai/clip-vit-large-patch14"):
        path, kind = folder / name, "t5" if "t5" in name else "clip"
        path.parent.mkdir(parents=True, exist_ok=True)
        write = tiny_weights.t5_folder if kind == "t5" else tiny_weights.clip_folder
        write(path, *(["clip"] if kind == "clip" else []))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    return folder


def pictures(seed, number=60):
    return np.random.default_rng(seed).integers(0, 256, (number, 24, 24, 3), np.uint8)


def test_the_pages_examples_run_without_the_trainer_tensorflow_and_torch(tmp_path):
    write_models(tmp_path)
    np.save(tmp_path / "real.npy", pictures(0))
    np.save(tmp_path / "drawn.npy", pictures(1))
    examples = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    code = RUN.format(absent=EXTRAS.split(), examples=examples)
    command, places = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=places, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    printed, _, modules = ended.stdout.partition("MODULES ")
    values = dict(re.findall(r"(FID|KID|CLIP score) (\S+)", printed))
    assert 0 <= float(values["FID"]) < 1 and -1 <= float(values["CLIP score"]) <= 1
    assert abs(float(values["KID"])) < 1
    assert not [name for name in modules.split() if re.match("diffusion_jax.(train|draw)|orbax", name)]


def test_the_page_names_every_stable_function():
    for package in (text, metrics):
        name = package.__name__.rpartition(".")[2]
        functions = [n for n in package.__all__ if n != "TextEncoder"]
        assert [n for n in functions if f"`{name}.{n}(" not in PAGE] == []


def test_clip_through_the_stable_functions_equals_transformers_saved_outputs(tmp_path):
    """The fixture holds ids, and the outputs of transformers' CLIPModel for them."""
    folder = write_models(tmp_path) / "openai/clip-vit-large-patch14"
    encoder, case = text.load(folder), tiny_weights.case("clip")
    tokens = {"text_ids": case["ids"].astype(np.int32)}
    outputs = text.outputs(encoder, tokens)
    embeddings, mask = text.embed(encoder, tokens)
    assert mask.all() and encoder.max_tokens == 16
    for ours, name in (
        (embeddings, "last_hidden_state"),
        (outputs.last, "last_hidden_state"),
        (outputs.layers[-2], "hidden_1"),
        (outputs.pooled, "pooled"),
        (outputs.projected, "text_features"),
    ):
        expected = case[name]
        assert np.abs(ours - expected).max() < RELATIVE * np.abs(expected).max(), name


def test_t5_through_the_stable_functions_equals_transformers_saved_outputs(tmp_path):
    """The folders have the names of diffusers' FLUX.1."""
    case, folder = tiny_weights.case("t5_gated"), tmp_path / "text_encoder_2"
    config = {**tiny_weights.config(case), "model_type": "t5"}
    tiny_weights.write(folder, tiny_weights.state(case), config)
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "red": 3}
    (tmp_path / "tokenizer_2").mkdir()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer_2" / "tokenizer.json"))
    encoder, mask = text.load(folder, max_tokens=9), case["in/mask"].astype(bool)
    assert encoder.tokenize(["red"])["text_ids"][0, :3].tolist() == [3, 1, 0]
    tokens = {"text_ids": case["in/ids"].astype(np.int32), "text_mask": mask}
    embeddings, _ = text.embed(encoder, tokens)
    expected = case["out/last_hidden_state"] * mask[..., None]
    assert np.abs(embeddings - expected).max() < RELATIVE * np.abs(expected).max()


def test_embed_compiles_once_and_does_not_read_the_weights_again(tmp_path):
    encoder = text.load(write_models(tmp_path) / "google-t5/t5-small", max_tokens=8)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(encoder.frozen))
    first, _ = text.embed(encoder, ["a red seven"])
    with jax.no_tracing():
        again, _ = text.embed(encoder, ["a red seven"])
    np.testing.assert_array_equal(first, again)


def test_models_of_other_kinds_are_an_error_that_names_the_kinds(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"model_type is 'llama' in .*: text encoders of the types t5, clip"):
        text.load(tmp_path)
    encoder = text.load(write_models(tmp_path) / "google-t5/t5-small")
    assert (encoder.width, encoder.max_tokens) == (16, 512)
    with pytest.raises(ValueError, match="the encoder t5 has one embedding per token"):
        text.outputs(encoder, ["a"])


@pytest.mark.parametrize("batch_size", [None, 16, 25, 64])
def test_features_do_not_depend_on_the_batch_size(batch_size):
    images, network = pictures(0, 60), toy.extractor()
    expected = np.asarray(network.apply(network.params, network.prepare(images)))
    run = metrics.on_host(network, batch_size)
    np.testing.assert_allclose(run(images), expected, rtol=0, atol=1e-6)  # float32 rounding.


def test_pair_cosines_are_those_of_each_picture_with_its_own_text(tmp_path):
    folder = write_models(tmp_path) / "openai/clip-vit-large-patch14"
    clip, images = metrics.load_clip(folder), pictures(0, 5)
    prompts = ["a", "b c", "d", "e f g", ""]
    cosines = metrics.pair_cosines(clip, batch_size=2)(images, prompts)
    of_text = np.asarray(text.outputs(text.load(folder), prompts).projected, np.float64)
    of_image = metrics.on_host(clip.image)(images).astype(np.float64)
    products = (of_text * of_image).sum(1)
    expected = products / np.linalg.norm(of_text, axis=1) / np.linalg.norm(of_image, axis=1)
    np.testing.assert_allclose(cosines[:, 0], expected, rtol=0, atol=1e-5)  # float32 rounding.
