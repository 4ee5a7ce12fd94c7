"""Programs log each compilation, and are only traced in a rehearsal."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices import programs


@pytest.fixture
def traced():
    return []


@pytest.fixture
def twice(traced):
    def double(x, scale):
        traced.append(x.shape)
        return {"y": 2 * x if scale is None else scale * x}

    return programs.announced(jax.jit(double), "the doubler")


def test_each_shape_is_compiled_and_logged_once(twice, caplog):
    with caplog.at_level(logging.INFO, "absl"):
        for size in (3, 3, 4):
            np.testing.assert_array_equal(twice(jnp.ones(size), None)["y"], np.full(size, 2.0))
        np.testing.assert_array_equal(twice(jnp.ones(3), jnp.float32(5))["y"], np.full(3, 5.0))
    assert caplog.text.count("compiling the doubler ...") == 3
    assert caplog.text.count("compiled the doubler in ") == 3


def test_on_host_callbacks_receive_zeros_in_a_rehearsal():
    seen = []
    twice = programs.announced(jax.jit(lambda x: programs.on_host(seen.append, 2 * x)))
    with programs.rehearsal():
        twice(jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert [x.shape for x in seen] == [(2, 3)] and not seen[0].any()
    twice(jnp.ones((2, 3)))
    jax.effects_barrier()
    assert len(seen) == 2 and (np.asarray(seen[1]) == 2).all()


def test_a_rehearsal_traces_and_returns_zeros_without_compiling(twice, traced, caplog):
    with caplog.at_level(logging.INFO, "absl"), programs.rehearsal():
        zeros = twice(jax.ShapeDtypeStruct((7,), jnp.float32), None)["y"]
        with pytest.raises(TypeError, match=r"mul got incompatible shapes"):
            twice(jnp.ones(3), jnp.ones(2))
    assert traced == [(7,), (3,)] and "compil" not in caplog.text
    assert isinstance(zeros, np.ndarray) and not zeros.any() and zeros.shape == (7,)
    assert twice(jnp.ones(7), None)["y"].sum() == 14  # After the rehearsal, programs run again.
