"""PickScore, HPSv2 and LAION's aesthetic score against the formulas of their authors' programs."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.evaluate import scorers
from diffusion_jax.metrics import clip_score, clip_towers, extractors, preferences, preprocess
from tests.diffusion_jax.metrics import toy
from tests.diffusion_jax.text import tiny_weights

PROMPTS = ["a b", "c", "d e f"]
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 24, 36, 3), np.uint8)
HPS, LAION = "HPS_v2.1_compressed.pt", "sac+logos+ava1-l14-linearMSE.pth"
WIDTHS = (20, 16, 8, 4, 2, 1)  # The width of the tiny CLIP's embedding, and LAION's five layers.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A CLIP whose folder also holds HPSv2's weights, with another projection, and LAION's."""
    path = tiny_weights.clip_folder(tmp_path_factory.mktemp("clip") / "tiny", "open_clip")
    state = tiny_weights.state(tiny_weights.case("open_clip"))
    state = {name: np.ascontiguousarray(array) for name, array in state.items()}
    state["text_projection"] = state["text_projection"] * np.linspace(1, 2, WIDTHS[0], dtype="f4")
    safetensors.numpy.save_file(state, path / HPS)
    safetensors.numpy.save_file(layers(), path / LAION)
    return path


def layers():
    rng, names = np.random.default_rng(1), (0, 2, 4, 6, 7)  # Dropouts have the other numbers.
    state = {}
    for layer, narrow, wide in zip(names, WIDTHS[1:], WIDTHS[:-1], strict=True):
        state[f"layers.{layer}.weight"] = rng.normal(size=(narrow, wide)).astype(np.float32)
        state[f"layers.{layer}.bias"] = rng.normal(size=narrow).astype(np.float32)
    return state


def test_pickscore_is_a_hundred_times_the_cosine(folder):
    model = preferences.pickscore(folder)
    cosines = clip_towers.pair_cosines(clip_towers.load(folder))(IMAGES, PROMPTS)
    np.testing.assert_allclose(model.score(IMAGES, PROMPTS), 100 * cosines, rtol=1e-6)
    assert np.ptp(cosines) > 1e-3 and model.network.name == "clip_tiny"


def test_hpsv2_has_weights_and_a_preprocessing_of_its_own(folder, tmp_path):
    """A folder that holds HPSv2's weights as the CLIP's own gives equal scores."""
    model = preferences.hpsv2(folder)
    shutil.copytree(folder, tmp_path / "own", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.move(tmp_path / "own" / HPS, tmp_path / "own" / "model.safetensors")
    own = clip_towers.load(tmp_path / "own", preprocessing="pad")
    expected = 100 * clip_towers.pair_cosines(own)(IMAGES, PROMPTS)
    np.testing.assert_allclose(model.score(IMAGES, PROMPTS), expected, rtol=1e-6)
    assert np.abs(expected - preferences.pickscore(folder).score(IMAGES, PROMPTS)).max() > 0.1
    assert (model.network.name, model.network.preprocessing) == ("clip_HPS_v2.1", "pad")
    assert model.network.weights == own.image.weights != clip_towers.load(folder).image.weights


def test_the_aesthetic_score_passes_the_normalised_embedding_through_five_layers(folder):
    model = preferences.aesthetic(folder)
    image = clip_towers.load(folder).image
    x = clip_score.normalised(extractors.on_host(image)(IMAGES))
    for layer in (0, 2, 4, 6, 7):
        x = x @ layers()[f"layers.{layer}.weight"].T + layers()[f"layers.{layer}.bias"]
    np.testing.assert_allclose(model.score(IMAGES, PROMPTS), x, rtol=1e-4)
    assert np.ptp(x) > 0.1 and model.network.weights != image.weights


@pytest.mark.parametrize(("height", "width"), [(24, 36), (36, 24), (5, 5), (8, 8), (4, 7)])
def test_the_preprocessing_of_hpsv2_matches_torch(height, width):
    """Its program resizes the longer side of a tensor with antialiasing, then pads with black."""
    torch = pytest.importorskip("torch")
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    x = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
    new = [round(side * 8 / max(height, width)) for side in (height, width)]
    x = torch.nn.functional.interpolate(x, new, mode="bicubic", antialias=True)
    (top, bottom), (left, right) = [((8 - n) // 2, 8 - n - (8 - n) // 2) for n in new]
    x = torch.nn.functional.pad(x, (left, right, top, bottom))[0].permute(1, 2, 0).numpy()
    expected = (x - preprocess._CLIP_MEAN) / preprocess._CLIP_STD
    ours = np.asarray(preprocess.pad(8)(jnp.asarray(picture[None])))[0]
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_an_evaluation_computes_all_three_with_intervals_and_cards(folder):
    names = {name: str(folder) for name in preferences.PREFERENCES}
    scorer = scorers.of_prompts(24, PROMPTS, toy.wanted(**names))
    rows = scorer.features(IMAGES, PROMPTS)
    row = scorers.columns(scorer.score(rows))
    for name in names:
        np.testing.assert_allclose(row[name], rows[name].mean(), rtol=1e-9)
        assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]
        assert scorer.cards[name]["prompts"]
    assert scorer.cards["hpsv2"]["preprocessing"] == "pad"


def write_layer(folder, name, width):
    state = {f"{name}.weight": np.ones((1, width), "f4"), f"{name}.bias": np.ones(1, "f4")}
    safetensors.numpy.save_file(state, folder / LAION)


@pytest.mark.parametrize(
    ("load", "edit", "error", "message"),
    [
        (preferences.hpsv2, lambda f: (f / HPS).unlink(), FileNotFoundError, r"holds 0 files HPS_v2\*\.pt: put one"),
        (preferences.hpsv2, lambda f: shutil.copy(f / HPS, f / "HPS_v2_a.pt"), ValueError, r"holds 2 files HPS_v2\*"),
        (preferences.aesthetic, lambda f: write_layer(f, "layers.0", 768), ValueError, "score the 20 numbers of the C"),
        (preferences.aesthetic, lambda f: write_layer(f, "mlp", 20), ValueError, "does not score"),
    ],
)
def test_files_that_are_missing_or_belong_elsewhere_are_named(folder, tmp_path, load, edit, error, message):
    edit(shutil.copytree(folder, tmp_path / "copy") and tmp_path / "copy")
    with pytest.raises(error, match=message):
        load(tmp_path / "copy")
