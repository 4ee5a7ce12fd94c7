"""The FID Inception and its four preprocessings against the reference programs.

fixtures/inception.npz holds two of the reference's saved images of 64 pixels with the features that
pytorch-fid 0.3.0 and torch-fidelity 0.4.0 gave, and features of two pictures by formula, one wider
than high and one to be reduced, after pytorch-fid's, torch-fidelity's, clean-fid 0.1.35's and
NeMo's resizing. The weights are the stand-in's.
"""

import pathlib
from unittest import mock

import jax
import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.devices import sharding
from diffusion_jax.evaluate import scorers
from diffusion_jax.metrics import features, fid, inception, inception_weights, preprocess, stats_files
from tests.diffusion_jax.metrics import standin, toy

ROOT = pathlib.Path(__file__).parents[3]
ORACLE = ROOT.parent / "shared" / "oracles" / "eval" / "fid_inception_oracle.npz"
RELATIVE = 1e-5  # Relative to the largest feature. Rounding in float32 over 94 layers causes 6e-7.


@pytest.fixture(scope="module")
def reference():
    with np.load(ROOT / "tests" / "fixtures" / "inception.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def run():
    """run(mode, images) -> Outputs of two images, whose sizes may differ. Compiled once."""
    state = standin.state()
    assert inception_weights.digest(state) == standin.DIGEST
    params = jax.device_put(inception_weights.to_params(state))
    apply = jax.jit(inception.apply)

    def run(mode, images):
        prepared = [jax.jit(preprocess.INCEPTION[mode])(image[None])[0] for image in images]
        return apply(params, np.stack(prepared))

    return run


def check(ours, theirs):
    ours = np.asarray(ours)
    assert np.abs(ours - theirs).max() < RELATIVE * np.abs(theirs).max()


@pytest.mark.parametrize("mode", ["pytorch", "tf"])
def test_features_of_every_level_match_the_reference(run, reference, mode):
    outputs = run(mode, reference["images_64"])
    for level in inception.LEVELS:
        if f"{mode}_{level}" in reference:  # pytorch-fid has no logits.
            check(inception.level(outputs, level), reference[f"{mode}_{level}"])


def test_spatial_features_are_the_first_seven_channels_of_mixed_6d(run, reference):
    """Numbers from a hook on pytorch-fid's block, for the first image."""
    outputs = run("pytorch", reference["images_64"])
    row = np.asarray(outputs.spatial[0])
    expected = [0, 0, 0.403796196, 0.075598374, 0, 0, 3.160056829]
    np.testing.assert_allclose(row[::289], expected, atol=1e-5)
    assert (row.size, row.mean(), row.std()) == pytest.approx((2023, 0.5223333, 0.9281151), 1e-5)
    bias = np.asarray(outputs.logits - outputs.unbiased)
    np.testing.assert_allclose(bias, np.tile(standin.state()["fc.bias"], (2, 1)), atol=1e-5)


@pytest.mark.parametrize("mode", [*preprocess.INCEPTION])
def test_features_after_every_resize_kernel_match_its_reference(run, reference, mode):
    pictures = {"wide": standin.picture(210, 330), "large": standin.picture(440, 380)}
    features = np.asarray(run(mode, list(pictures.values())).final)
    for ours, name in zip(features, pictures, strict=True):
        check(ours, reference[f"{name}_{mode}"][0])
        for other in set(preprocess.INCEPTION) - {mode}:  # Other kernels give clearly different features.
            gap = np.abs(ours - reference[f"{name}_{other}"]).max()
            assert gap > 100 * RELATIVE * ours.max()


@pytest.mark.skipif(not ORACLE.is_file(), reason="the reference's images are not here")
@pytest.mark.parametrize(("size", "mode"), [(256, "tf"), (512, "pytorch")])
def test_features_of_256_and_512_pixel_images_match_the_reference(run, size, mode):
    path = {"pytorch": "pytorchfid", "tf": "torchfidelity"}[mode]
    with np.load(ORACLE) as arrays:
        outputs = run(mode, arrays[f"images_{size}"][:2])
        for level in ("64", "192", "768", "2048"):
            check(inception.level(outputs, level), arrays[f"{path}_f32_{level}_{size}"][:2])


def test_a_scorers_fid_matches_pytorch_fids_features(reference, tmp_path):
    """Computes the score from files of weights and statistics, and compares with pytorch-fid."""
    safetensors.numpy.save_file(standin.state(), tmp_path / "inception.safetensors")
    real = np.random.default_rng(0).normal(0.8, 0.2, (3, 2048))
    card = {"extractor": "inception", "weights": standin.DIGEST, "preprocessing": "pytorch"}
    stats_files.write(tmp_path / "real.npz", stats_files.Stats(features.gaussian(real), real, card))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    paths = (str(tmp_path / name) for name in ("real.npz", "inception.safetensors"))
    with mock.patch.object(sharding, "make_mesh", lambda: mesh):
        scorer = scorers.of_prompts(64, ["a", "b"], toy.wanted(*paths))
    rows = scorer.features(reference["images_64"], ["a", "b"])
    row = scorer.score(rows)["inception"]
    theirs = reference["pytorch_2048"]
    assert row["fd_inception"] == pytest.approx(fid.frechet(theirs, real), rel=RELATIVE)
    fields = {"n": 2, "image_size": "64x64", "reference": "real.npz, n 3", "official": False}
    assert scorer.cards["inception"].items() >= (card | fields).items()


def test_weights_of_another_network_are_an_error():
    state = {"AuxLogits.fc.weight": np.zeros(3)}
    with pytest.raises(ValueError, match=r"missing keys \(472\): .*keys left over \(1\): AuxLog"):
        inception_weights.to_params(state)


def test_random_inception_kernels_have_variance_2_over_fan_in():
    state = inception_weights.random_state()
    kernels = [array for name, array in state.items() if name.endswith("conv.weight")]
    assert len(kernels) == 94
    for kernel in kernels:  # The standard error of a standard deviation is 1 / sqrt(2 n).
        ratio = kernel.std() / (2 / kernel[0].size) ** 0.5
        assert ratio == pytest.approx(1, abs=4 / (2 * kernel.size) ** 0.5)


def test_the_digest_ignores_batch_norm_counters():
    weights = {"a.weight": np.arange(3.0)}
    counted = weights | {"a.num_batches_tracked": np.array(7)}
    assert inception_weights.digest(counted) == inception_weights.digest(weights)
