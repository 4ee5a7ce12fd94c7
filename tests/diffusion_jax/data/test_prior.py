"""Prior preservation: every second row is a picture drawn by the model, with its own weight."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import pipeline
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.data.split import split
from diffusion_jax.diffusion import groups
from diffusion_jax.examples.digits import rendering as digits

TOKENIZE = lambda texts: {"text": np.array(texts)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three pictures with texts, and five written by the sampling command, with their sheet."""
    root = tmp_path_factory.mktemp("prior")
    digits.write_examples(root / "own", 3, size=8)
    (root / "drawn").mkdir()
    names = [f"seed_{n:06}.png" for n in range(5)]
    for n, name in enumerate([*names, "sheet.png"]):
        Image.new("RGB", (8, 8), (n, 0, 0)).save(root / "drawn" / name)
    lines = [{"file_name": name, "text": f"drawn {n}", "seed": n} for n, name in enumerate(names)]
    (root / "drawn" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def data(folders, **fields):
    defaults = {"path": str(folders / "own"), "prior": str(folders / "drawn"), "prior_weight": 0.25}
    return Data("folder", **(defaults | fields))


def test_every_second_row_is_from_the_prior_and_has_its_weight(folders):
    pictures = open_pictures(data(folders), 8)
    seen = []
    with pipeline.make_batches(pictures, TOKENIZE, batch_size=4, seed=0) as batches:
        assert batches.example()["loss_weight"].tolist() == [1.0, 0.25]
        for _ in range(15):
            batch = next(batches)
            drawn = np.char.startswith(batch["text"], "drawn")
            assert drawn.sum() == 2
            np.testing.assert_array_equal(batch["loss_weight"], np.where(drawn, 0.25, 1))
            assert batch["loss_weight"].dtype == np.float32
            seen += batch["text"].tolist()
    assert len(set(seen)) == 3 + 5  # The sheet is never read.
    assert len({seen.count(text) for text in set(seen) if text.startswith("drawn")}) == 1


def test_batches_without_a_prior_hold_no_weights_of_rows(folders):
    pictures = open_pictures(data(folders, prior=""), 8)
    with pipeline.make_batches(pictures, TOKENIZE, batch_size=4, seed=0) as batches:
        assert next(batches).keys() == {"image", "text"}


def test_pictures_of_the_prior_are_never_held_out(folders):
    whole = open_pictures(data(folders), 8)
    training, apart = split(whole, 0.4)
    assert 0 < len(apart) < 8 and len(training) == len(whole) - len(apart)
    assert not any(str(text).startswith("drawn") for text in apart.texts(np.arange(len(apart))))
    rows = np.arange(len(training))
    drawn = [str(text).startswith("drawn") for text in training.read(rows)[1]]
    np.testing.assert_array_equal(training.loss_weights(rows), np.where(drawn, np.float32(0.25), 1))


def test_a_prior_without_prompts_is_an_error_that_says_which_folder_to_name(folders):
    with pytest.raises(ValueError, match=r"data\.prior is .*, a folder without a \.jsonl .*`sample`"):
        open_pictures(data(folders, prior=data(folders).path), 8)


@pytest.mark.parametrize("fields", [{"source": "mixture"}, {"embeddings": (2, 3)}])
def test_a_prior_with_a_mixture_or_embeddings_is_an_error(folders, fields):
    shapes = {k: v for k, v in fields.items() if k == "embeddings"}
    mixture = ((1.0, "folder", str(folders / "own"), "txt"),)
    of = data(folders)._replace(mixture=mixture, source=fields.get("source", "folder"))
    if shapes:
        (folders / "own" / "00000.npy").write_bytes(b"")
        of = of._replace(text="npy", uncaptioned="drop")
    with pytest.raises(ValueError, match="or use one source of pictures with captions"):
        open_pictures(of, 8, **shapes)


def test_the_loss_weights_each_row_by_its_count():
    goal = groups.Diffusion(predicts="eps").objective
    x0, eps = jax.random.normal(jax.random.key(0), (2, 4, 2, 2, 1))
    network = lambda x, time: jnp.zeros_like(x)
    weights, sigma = jnp.array([1.0, 0.25, 1.0, 0.25]), jnp.ones(4)
    minimised, losses = goal.loss({}, network, x0, eps, sigma, weights)
    each = np.square(np.asarray(eps)).mean((1, 2, 3))
    np.testing.assert_allclose(losses, each, rtol=1e-5)
    assert float(minimised) == pytest.approx((each * [1, 0.25, 1, 0.25]).mean(), rel=1e-5)
    assert float(goal.loss({}, network, x0, eps, sigma)[0]) == pytest.approx(each.mean(), rel=1e-5)
