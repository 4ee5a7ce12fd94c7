"""Packed parameters: 8-bit rounding with one scale per channel."""

import jax
import numpy as np
import pytest

from diffusion_jax.weights import packed, torch_weights


def params():
    """Return two kernels and a bias. The channels of a kernel differ in size, and the last is 0."""
    rng = np.random.default_rng(0)
    sizes = np.array([0.01, 0.1, 1, 10, 0], np.float32)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "conv": {"kernel": normal(3, 3, 4, 5) * sizes, "bias": normal(5)},
        "dense": {"kernel": normal(4, 5) * sizes},
    }


def test_kernels_are_rounded_to_8_bits_with_one_scale_per_channel(tmp_path):
    before = params()
    packed.write(tmp_path / packed.FILE, before)
    stored = torch_weights.read(tmp_path / packed.FILE)
    after = packed.read(tmp_path / packed.FILE, jax.eval_shape(lambda: before))
    for layer in ("conv", "dense"):
        kernel, axes = before[layer]["kernel"], tuple(range(before[layer]["kernel"].ndim - 1))
        integers, scales = (stored[f"{layer}/kernel{suffix}"] for suffix in ("", ":scales"))
        assert (integers.dtype, scales.shape) == (np.int8, (5,))
        assert np.abs(integers.astype(int)).max(axes).tolist() == [127] * 4 + [0]
        rounded = np.asarray(after[layer]["kernel"])
        assert (np.abs(rounded - kernel) <= 1.001 * np.abs(kernel).max(axes) / 254).all()
    np.testing.assert_array_equal(after["conv"]["bias"], before["conv"]["bias"])


def test_the_shapes_of_a_packed_file_are_those_of_its_parameters(tmp_path):
    packed.write(tmp_path / packed.FILE, params())
    shapes = packed.shapes(tmp_path / packed.FILE)
    assert shapes == jax.eval_shape(lambda: jax.tree.map(np.float32, params()))


def test_packing_parameters_that_are_not_finite_is_an_error(tmp_path):
    broken = params()
    broken["conv"]["bias"][0] = np.nan
    with pytest.raises(ValueError, match="the weights conv/bias are not finite"):
        packed.write(tmp_path / packed.FILE, broken)
    assert not list(tmp_path.iterdir())
