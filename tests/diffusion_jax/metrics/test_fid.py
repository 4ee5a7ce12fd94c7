"""The Frechet distance against closed forms, scipy's matrix square root and the reference."""

import functools
import json
import pathlib

import numpy as np
import pytest
import scipy.linalg

from diffusion_jax.metrics import features, fid, inception_score, mmd, neighbours
from diffusion_jax.metrics.features import Gaussian

SHARED = pathlib.Path(__file__).parents[4] / "shared" / "oracles" / "eval"


def draw(n, d, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) / d**0.5 + shift


def test_the_distance_of_diagonal_gaussians_matches_the_closed_form():
    a = Gaussian(np.array([1.0, 2.0]), np.diag([4.0, 9.0]), 10)
    b = Gaussian(np.array([0.0, 4.0]), np.diag([1.0, 16.0]), 10)
    assert fid.frechet(a, b) == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 4) ** 2, abs=1e-12)


def test_the_distance_with_full_rank_matches_scipys_matrix_square_root():
    x, y = draw(90, 12), draw(70, 12, 1, shift=0.3)
    a, b = np.cov(x.T), np.cov(y.T)
    root = scipy.linalg.sqrtm(a @ b).real
    shift = np.square(x.mean(0) - y.mean(0)).sum()
    expected = shift + np.trace(a) + np.trace(b) - 2 * np.trace(root)
    for left in (x, features.gaussian(x)):
        for right in (y, features.gaussian(y)):
            assert fid.frechet(left, right) == pytest.approx(expected, abs=1e-11)


def test_the_distance_is_exact_with_fewer_images_than_dimensions():
    """The features span 9 of 60 dimensions, within which the covariances have full rank."""
    x, y = draw(40, 9), draw(30, 9, 1, shift=0.2)
    plane = np.linalg.qr(np.random.default_rng(2).normal(size=(60, 60)))[0][:9]
    expected = fid.frechet(x, y)
    wide, other = x @ plane, y @ plane
    assert fid.frechet(wide, other) == pytest.approx(expected, abs=1e-12)
    assert fid.frechet(wide, features.gaussian(other)) == pytest.approx(expected, abs=1e-6)
    assert fid.frechet(features.gaussian(wide), other) == pytest.approx(expected, abs=1e-6)
    assert fid.frechet(wide, wide) == pytest.approx(0, abs=1e-12)


def test_influence_is_the_derivative_with_respect_to_an_images_weight():
    x, real = draw(40, 9), fid.reference(draw(50, 9, 1, shift=0.2))

    def with_more(i, weight):
        weights = np.full(40, 1 - weight / 39)
        weights[i] = 1 + weight
        mean = weights @ x / 40
        cov = (x - mean).T * weights @ (x - mean) / 39
        return fid.distance(Gaussian(mean, cov, 40), real)

    influence = fid.influence(x, real)
    score = fid.score(x, real)
    assert score.value == pytest.approx(fid.distance(x, real), rel=1e-12)
    np.testing.assert_array_equal(score.each, influence)
    for i in (0, 17, 39):
        derivative = (with_more(i, 1e-5) - with_more(i, -1e-5)) / 2e-5
        others = np.delete(influence, i).mean()
        assert (influence[i] - others) / 40 == pytest.approx(derivative, abs=1e-7)
    plane = np.linalg.qr(np.random.default_rng(2).normal(size=(60, 60)))[0][:9]
    wide = fid.reference(draw(50, 9, 1, shift=0.2) @ plane)
    np.testing.assert_allclose(fid.influence(x @ plane, wide), influence, atol=1e-6)


@pytest.mark.parametrize(("n", "d", "near"), [(200, 8, 0.1), (30, 60, 0.4)])
def test_influences_predict_the_standard_error_of_the_distance(n, d, near):
    """The deviation over 200 sets of images has an error of 5 %, more with few images."""
    axes = np.linspace(2, 0.1, d)
    sets = np.random.default_rng(3).normal(size=(200, n, d)) * axes
    real = fid.reference(Gaussian(np.zeros(d) + 0.1, np.diag(axes**2) * 1.5, None))
    deviation = np.std([fid.distance(rows, real) for rows in sets])
    expected = [fid.influence(rows, real).std() / n**0.5 for rows in sets[:20]]
    assert np.mean(expected) == pytest.approx(deviation, rel=near)


def test_extrapolation_removes_the_bias_of_finite_samples():
    """For standard normals, FID is about c / n: 0 for infinitely many images."""
    rng = np.random.default_rng(0)
    exact = fid.reference(Gaussian(np.zeros(20), np.eye(20), None))
    x = rng.normal(size=(4000, 20))
    at_all = fid.distance(x, exact)
    value, residual = fid.extrapolated(x, exact)
    assert 0.02 < at_all < 0.06
    assert abs(value) < at_all / 4 and residual < at_all


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((1, 3), (5, 3), "needs at least 2 images, but there are 1"),
        ((5, 3), (1, 3), "needs at least 2 images, but there are 1"),
        ((5, 3), (5, 4), "features with 3 and 4 dimensions"),
    ],
)
def test_too_few_images_or_unequal_dimensions_are_errors(a, b, message):
    with pytest.raises(ValueError, match=message):
        fid.frechet(np.zeros(a), np.zeros(b))
    with pytest.raises(ValueError, match="needs at least 20 images, but there are 5"):
        fid.extrapolated(np.zeros((5, 3)), fid.reference(np.eye(3)))


@pytest.mark.parametrize("n", [300, 10])
def test_features_with_nan_are_an_error(n):
    rows = np.random.default_rng(0).normal(size=(2, n, 20))
    rows[0, : n // 2] = np.nan
    message = f"{n // 2} of {n} rows of features hold NaN or infinity"
    in_spheres = lambda a, b: neighbours.precision(a, neighbours.RealFeatures(b))
    kid = functools.partial(mmd.kid, size=2)
    for a, b in (rows, rows[::-1]):
        for distance in (fid.frechet, kid, mmd.cmmd, in_spheres, neighbours.nearest):
            with pytest.raises(ValueError, match=message):
                distance(a, b)
    with pytest.raises(ValueError, match=message):
        inception_score.score(rows[0])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the reference's numbers are not here")
def test_distances_match_the_numbers_of_the_reference():
    """Each half holds 11, 11 and 10 images of the three sizes."""
    numbers = json.loads((SHARED / "fid_numbers.json").read_text())
    with np.load(SHARED / "synthetic_64d.npz") as arrays:
        value = fid.frechet(arrays["x"], arrays["y"])
    assert value == pytest.approx(numbers["synthetic full rank"]["eigh"]["fid"], abs=1e-10)
    with np.load(SHARED / "fid_inception_oracle.npz") as arrays:
        for dims in (64, 192, 768, 2048):
            each = [arrays[f"pytorchfid_f32_{dims}_{size}"] for size in (64, 256, 512)]
            split = [np.split(rows, [len(rows) // 2]) for rows in each]
            halves = [np.concatenate(half) for half in zip(*split, strict=True)]
            expected = numbers[f"pytorchfid_f32_{dims} halves"]
            assert fid.frechet(*halves) == pytest.approx(expected["from_features"], abs=1e-6)
            if dims < 2048:  # At 2048, decompositions take seconds.
                moments = map(features.gaussian, halves)
                assert fid.frechet(*moments) == pytest.approx(expected["eigh"]["fid"], abs=1e-3)
    assert mmd.kid(*halves, subsets=1, size=32).mean == pytest.approx(0.16351, abs=1e-5)
    assert mmd.cmmd(*halves) == pytest.approx(31.0356, abs=1e-4)
