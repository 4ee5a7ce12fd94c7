"""Two processes joined by jax.distributed share the data, and one can continue alone."""

import json

import numpy as np
import pytest

from diffusion_jax.examples.digits import rendering as digits
from tests import processes
from tests.imagen_jax import two_processes
from tests.imagen_jax.two_processes import BATCH, SAVED, STEPS


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return digits.write_examples(tmp_path_factory.mktemp("data"), 40, size=8)


@pytest.fixture(scope="module")
def two(path, tmp_path_factory):
    """Return the records written by two processes."""
    out = tmp_path_factory.mktemp("two")
    assert processes.run_all(2, two_processes.main, path, out, devices=2) == [0, 0]
    return [json.loads((out / f"{process}.json").read_text()) for process in range(2)]


def test_two_processes_together_read_every_picture_once_per_epoch(two, path):
    assert [process["devices"] for process in two] == [4, 4]
    shares = np.array([process["taken"] for process in two])  # [2, steps, rows]
    assert shares.shape == (2, STEPS, BATCH // 2)
    for epoch in np.split(shares, 2, axis=1):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(40))
    whole, _ = two_processes.read(path)  # One process with eight devices.
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), whole)


def test_one_process_can_continue_reading_the_data_after_two(two, path):
    assert two[0]["saved"] == two[1]["saved"]
    shares = np.array([process["taken"] for process in two])[:, SAVED:]
    rest, _ = two_processes.read(path, two[1]["saved"].encode(), STEPS - SAVED)
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), rest)
