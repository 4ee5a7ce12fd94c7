"""Embeddings of textual inversion become words of prompts, and wrong files are errors."""

import base64
import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from diffusion_jax.text import clip, embed, hashed, tokenize
from diffusion_jax.weights import torch_weights
from sd_jax import drawing
from sd_jax.weights import checkpoints, embedding_files, lora_files
from tests.diffusion_jax.weights import torch_writer

WIDTH = 24


@pytest.fixture
def part(published):
    return checkpoints.load(published / "d").text


@pytest.fixture
def tokenizer(published):
    return tokenize.clip(published / "d" / "tokenizer")


def rows(part, tokenizer, text):
    """Return the vectors of a text's tokens."""
    table = np.asarray(part.params["params"]["token_embedding"])
    return table[tokenizer.split([text])[0]]


@pytest.fixture
def encoder(part, tokenizer):
    return clip.of_tower(part.tower, jax.tree.map(np.asarray, part.params), tokenizer, 16)


def encoded(encoder, text):
    return np.asarray(embed(encoder, [text])[0])


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_embedding_acts_like_the_tokens_whose_vectors_it_holds(encoder, part, tokenizer, tmp_path, suffix):
    path = tmp_path / f"learned_embeds.{suffix}"
    write = torch_weights.write if suffix == "safetensors" else torch_writer.save
    write(path, {"<Cat>": rows(part, tokenizer, "c d e")})
    torch_weights.write(tmp_path / "fox.safetensors", {"emb_params": rows(part, tokenizer, "f")})
    expected = [encoded(encoder, t) for t in ("a c d e b", "f f", "a firefox")]
    assert np.abs(expected[0] - encoded(encoder, "a")).max() > 0.1
    paths = f"{path},{tmp_path / 'fox.safetensors'}"
    added, params = embedding_files.apply(paths, encoder, encoder.frozen)
    added = added._replace(frozen=params)
    for text, of_tokens in zip(("a <cat> b", "fox FOX", "a firefox"), expected, strict=True):
        np.testing.assert_array_equal(encoded(added, text), of_tokens)


def test_a_file_of_the_web_ui_is_read_without_executing_its_pickle():
    """The fixture was written by torch, with the entries of the web UI."""
    word, vectors = embedding_files.read(pathlib.Path("tests/fixtures/fox-style.pt"))
    assert word == "fox-style"
    np.testing.assert_array_equal(vectors, np.arange(6, dtype=np.float32).reshape(2, 3) / 4)


def test_the_authors_parameter_dicts_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    vectors = torch.arange(48.0).reshape(2, 24)
    param = torch.nn.ParameterDict({"*": torch.nn.Parameter(vectors)})
    torch.save({"string_to_token": {"*": torch.tensor(265)}, "string_to_param": param}, tmp_path / "fox.pt")
    word, read = embedding_files.read(tmp_path / "fox.pt")
    assert word == "fox"
    np.testing.assert_array_equal(read, vectors.numpy())


def test_a_picture_of_the_web_ui_holds_an_embedding(tmp_path):
    param = {"*": {"TORCHTENSOR": [[1.5, 2.0], [3.0, -4.0]]}}
    content = {"string_to_token": {"*": 265}, "string_to_param": param, "name": "fox-style"}
    info = PngImagePlugin.PngInfo()
    info.add_text("sd-ti-embedding", base64.b64encode(json.dumps(content).encode()))
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=info)
    word, vectors = embedding_files.read(tmp_path / "a.png")
    assert (word, vectors.tolist()) == ("fox-style", [[1.5, 2.0], [3.0, -4.0]])
    Image.new("RGB", (4, 4)).save(tmp_path / "b.png")
    with pytest.raises(ValueError, match=r"embedding .*b\.png: the picture contains no embedding"):
        embedding_files.read(tmp_path / "b.png")


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_npy_files_of_diffusers_are_read_without_executing_their_pickle(tmp_path, array):
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "learned_embeds.npy", {"<cat>": array(vectors)}, allow_pickle=True)  # type: ignore
    word, read = embedding_files.read(tmp_path / "learned_embeds.npy")
    assert word == "<cat>"
    np.testing.assert_array_equal(read, vectors)
    np.save(tmp_path / "fox.npy", vectors)
    assert embedding_files.read(tmp_path / "fox.npy").word == "fox"
    command = f"touch {tmp_path}/ran"
    np.save(tmp_path / "evil.npy", {"a": Evil(command)}, allow_pickle=True)  # type: ignore
    with pytest.raises(ValueError, match="cannot read the embedding"):
        embedding_files.read(tmp_path / "evil.npy")
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_file_with_clip_l_alone_is_named_like_the_file_and_paths_may_have_commas(tmp_path):
    for name in ("a,b", "c", "d,e,f"):
        torch_weights.write(tmp_path / f"{name}.safetensors", {"clip_l": np.ones((1, WIDTH), np.float32)})
    paths = [f"{tmp_path}/{name}.safetensors" for name in ("a,b", "c", "d,e,f", "none")]
    loras = [f"{paths[0]}:0.5", paths[1], f"{paths[2]}:-1", paths[0]]
    for listed in (paths, loras):
        assert embedding_files.split(",".join(listed)) == listed
    assert embedding_files.read(pathlib.Path(paths[0])).word == "a,b"


def test_a_single_vector_may_lack_the_axis_of_tokens(tmp_path):
    torch_weights.write(tmp_path / "a.safetensors", {"<cat>": np.ones(WIDTH, np.float32)})
    assert embedding_files.read(tmp_path / "a.safetensors").vectors.shape == (1, WIDTH)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"clip_g": (1, 8), "clip_l": (1, 8)}, "is an embedding for SDXL, which is not supported"),
        ({"a": (1, WIDTH), "b": (1, WIDTH)}, "because it holds 2 arrays, such as a, b, instead"),
        ({"a": (1, 2, WIDTH)}, "is not a textual inversion embedding, because it holds 1 arrays"),
        ({"a": (0, WIDTH)}, r"a\.safetensors holds no vectors"),
        ({"a": (15, WIDTH)}, "has 15 vectors for 'a', but the text encoder reads 14 tokens"),
        ({"a": (1, 8)}, r"of the shape \[1, 8\], but the model's text encoder has width 24"),
    ],
)
def test_files_without_an_embedding_for_the_model_are_errors(encoder, tmp_path, arrays, message):
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, {name: np.ones(shape, "f4") for name, shape in arrays.items()})
    with pytest.raises(ValueError, match=message):
        embedding_files.apply(str(path), encoder, encoder.frozen)


def test_two_embeddings_of_one_word_and_infinite_vectors_are_errors(encoder, tmp_path):
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, {"<cat>": np.ones((1, WIDTH), np.float32)})
    with pytest.raises(ValueError, match="another file has the word '<cat>': keep one"):
        embedding_files.apply(f"{path},{path}", encoder, encoder.frozen)
    with pytest.raises(ValueError, match="vectors for CLIP, but the text encoder is 'hashed'"):
        embedding_files.apply(str(path), hashed.encoder(WIDTH, 8), ())
    torch_weights.write(path, {"<cat>": np.full((1, WIDTH), np.inf, np.float32)})
    with pytest.raises(ValueError, match="1 of 1 arrays hold NaN or infinite values"):
        embedding_files.read(path)


def test_a_model_draws_with_an_embedding_and_its_card_names_the_file(published, tmp_path, caplog):
    caplog.set_level("WARNING", "absl")  # Commands in other tests may have lowered it.
    vectors = np.random.default_rng(0).normal(size=(2, WIDTH)).astype("f4")
    path = str(tmp_path / "fox.safetensors")
    torch_weights.write(path, {"emb_params": vectors})
    values = {"sampler": "ddim", "steps": 2, "guidance": 3.0, "height": 6, "width": 4}
    model = drawing.load(published / "d", embedding=path, **values)
    plain = drawing.load(published / "d", **values)
    fox, cat = (m.draw("fox").images.astype(int) for m in (model, plain))
    assert np.abs(fox - cat).max() > 2 and not caplog.messages
    np.testing.assert_allclose(model.draw("a").images, plain.draw("a").images, atol=1)
    assert caplog.messages == ["no prompt contains 'fox', the word of a file of --embedding"]
    assert model.card()["embedding"] == [path] and "embedding" not in plain.card()


@pytest.mark.parametrize("name", ["string_to_param.*", "emb_params", "clip_l"])
def test_a_lora_file_adds_the_words_whose_embeddings_it_bundles(encoder, tmp_path, name):
    vectors = np.random.default_rng(0).normal(size=(2, WIDTH)).astype("f4")
    torch_weights.write(tmp_path / "fox.safetensors", {"emb_params": vectors})
    torch_weights.write(tmp_path / "lora.safetensors", {f"bundle_emb.fox.{name}": vectors})
    bundled, params = lora_files.add_words([str(tmp_path / "lora.safetensors")], encoder, encoder.frozen)
    alone, expected = embedding_files.apply(str(tmp_path / "fox.safetensors"), encoder, encoder.frozen)
    text = encoded(bundled._replace(frozen=params), "a fox")
    np.testing.assert_array_equal(text, encoded(alone._replace(frozen=expected), "a fox"))
    assert np.abs(text - encoded(encoder, "a fox")).max() > 0.1


def test_a_model_draws_with_the_words_of_its_lora_file(published, tmp_path):
    layer = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"
    vectors = np.random.default_rng(0).normal(size=(2, WIDTH)).astype("f4")
    lora = {f"{layer}.lora_down.weight": np.ones((1, 64)), f"{layer}.lora_up.weight": np.ones((64, 1))}
    lora = {name: array.astype("f4") / 8 for name, array in lora.items()}
    torch_weights.write(tmp_path / "plain.safetensors", lora)
    torch_weights.write(tmp_path / "fox.safetensors", {"emb_params": vectors})
    torch_weights.write(tmp_path / "both.safetensors", {**lora, "bundle_emb.fox.emb_params": vectors})
    values = {"sampler": "ddim", "steps": 2, "guidance": 3.0, "height": 6, "width": 4}
    draw = lambda lora, **changes: (
        drawing.load(published / "d", lora=[tmp_path / lora], **values, **changes).draw("a fox").images
    )
    bundled = draw("both.safetensors")
    embedding = str(tmp_path / "fox.safetensors")
    np.testing.assert_array_equal(bundled, draw("plain.safetensors", embedding=embedding))
    assert np.abs(bundled.astype(int) - draw("plain.safetensors")).max() > 2


SIZE = "of the shape {}, but the model's text encoder has width 24"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 8), SIZE),
        ((0, WIDTH), SIZE),
        ((1, 2, WIDTH), SIZE),
        ((15, WIDTH), "has 15 vectors for 'fox', but the text encoder reads 14 tokens"),
    ],
)
def test_an_embedding_in_a_lora_file_must_fit_the_model(encoder, tmp_path, shape, message):
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, {"bundle_emb.fox.emb_params": np.ones(shape, "f4")})
    with pytest.raises(ValueError, match=re.escape(message.format(list(shape)))):
        lora_files.add_words([str(path)], encoder, encoder.frozen)
