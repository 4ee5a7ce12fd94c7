"""The random weights of the latency benchmark of Stable Diffusion."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np

# Run in a separate process, because the module defines flags that other commands also define.
SCRIPT = """
from absl import flags
from benchmarks import sd_latency
import jax
flags.FLAGS(["sd_latency", "--dtype=float32"])
shape = jax.ShapeDtypeStruct((3,), "float32")
print(sd_latency._random({"a": {"kernel": shape}})["a"]["kernel"].tolist())
"""


def test_random_weights_are_equal_in_every_process():
    """The seed is zlib.crc32(b"['a']['kernel']") % 2**31; Python's hash differs per process."""
    root = pathlib.Path(__file__).parents[2]
    run = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
    expected = 0.02 * jax.random.normal(jax.random.key(844673145), (3,))
    np.testing.assert_array_equal(np.float32(json.loads(ended.stdout)), expected)
