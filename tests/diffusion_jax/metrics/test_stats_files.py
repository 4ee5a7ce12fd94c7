"""Files of statistics: pytorch-fid's layout with a card, and files that are rejected."""

import numpy as np
import pytest

from diffusion_jax.metrics import cards, features, fid, stats_files
from diffusion_jax.metrics.stats_files import Stats
from tests.diffusion_jax.metrics import toy


def stats(**changes):
    rows = np.random.default_rng(0).normal(size=(30, toy.WIDTH)).astype(np.float32)
    card = cards.make_card(toy.extractor(), image_size=(10, 14), n=30)
    return Stats(features.gaussian(rows), rows, card)._replace(**changes)


def test_written_statistics_are_read_back(tmp_path):
    stats_files.write(tmp_path / "a.npz", stats())
    read = stats_files.read(tmp_path / "a.npz")
    np.testing.assert_array_equal(read.gaussian.cov, stats().gaussian.cov)
    np.testing.assert_array_equal(read.features, stats().features)
    assert (read.gaussian.n, read.card) == (30, stats().card)
    with np.load(tmp_path / "a.npz") as arrays:  # The arrays that other programs read.
        assert arrays["mu"].dtype == arrays["sigma"].dtype == np.float64
        assert arrays["sigma"].shape == (toy.WIDTH, toy.WIDTH)


def test_spatial_statistics_are_stored_under_adms_names(tmp_path):
    spatial = features.gaussian(np.random.default_rng(1).normal(size=(30, 4)))
    stats_files.write(tmp_path / "a.npz", stats(spatial=spatial))
    with np.load(tmp_path / "a.npz") as arrays:
        np.testing.assert_array_equal(arrays["mu_s"], spatial.mean)
        np.testing.assert_array_equal(arrays["sigma_s"], spatial.cov)
    read = stats_files.read(tmp_path / "a.npz").spatial
    np.testing.assert_array_equal(read.cov, spatial.cov)
    assert stats().spatial is None


def test_check_mode_requires_a_mode_for_a_file_without_a_card():
    stats_files.check_mode("a.npz", stats(), "", "--mode")
    stats_files.check_mode("a.npz", stats(card=None), "tf", "--mode")
    with pytest.raises(ValueError, match=r"a.npz has no card .*: set --mode to the .* pytorch .*, tf \(AD"):
        stats_files.check_mode("a.npz", stats(card=None), "", "--mode")


def test_a_file_of_another_program_is_read_without_a_card(tmp_path):
    np.savez(tmp_path / "a.npz", mu=np.zeros(6, np.float32), sigma=np.eye(6))
    read = stats_files.read(tmp_path / "a.npz")
    assert (read.gaussian.n, read.features, read.card) == (None, None, None)
    stats_files.check("a.npz", read, toy.extractor())
    with pytest.raises(ValueError, match=r"a.npz has 6 dimensions, but the extractor toy has 7"):
        stats_files.check("a.npz", read, toy.extractor(width=7))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1)])
def test_a_mean_is_read_as_a_vector(tmp_path, shape):
    np.savez(tmp_path / "a.npz", mu=np.arange(6.0).reshape(shape), sigma=np.eye(6), n=np.array([9]))
    read = stats_files.read(tmp_path / "a.npz").gaussian
    assert fid.frechet(read, features.Gaussian(np.zeros(6), np.eye(6), None)) == 55
    assert read.n == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "inception"}, "a.npz was computed with extractor toy, but the images use inception"),
        ({"weights": "xyz"}, "a.npz was computed with weights abc, but the images use xyz"),
        ({"preprocessing": "tf"}, "a.npz was computed with preprocessing means, but the images use tf"),
    ],
)
def test_statistics_of_another_extractor_are_an_error(change, message):
    stats_files.check("a.npz", stats(), toy.extractor())
    with pytest.raises(ValueError, match=message):
        stats_files.check("a.npz", stats(), toy.extractor(**change))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mu": np.zeros(3)}, r"must hold mu \[D\] and sigma \[D, D\], but holds .*mu \(3,\)"),
        ({"mu": np.zeros(3), "sigma": np.eye(4)}, r"but holds mu \(3,\), sigma \(4, 4\)"),
        ({"mu": np.array([0, np.nan, 0]), "sigma": np.eye(3)}, "holds values that are not finite"),
        ({"mu": np.zeros(3), "sigma": np.diag([1, np.inf, 1])}, "holds values that are not finite"),
        ({"mu": np.zeros(2), "sigma": np.array([[2, 1], [0, 2]])}, "sigma in .* is not a covariance"),
        ({"mu": np.zeros(2), "sigma": np.diag([1, -1])}, "sigma in .* is not a covariance"),
        ({"mu": np.array([{}])}, "cannot read .*: ValueError: it holds Python objects"),
    ],
)
def test_files_without_valid_statistics_are_errors(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        stats_files.read(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match=r"no file .*b.npz"):
        stats_files.read(tmp_path / "b.npz")
