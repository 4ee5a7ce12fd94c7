"""The kept table of the TPU compiler's estimates: nothing in it may grow unseen."""

import importlib.util
import json

import pytest

from benchmarks import compiled
from tests.imagen_jax import commands


def test_the_kept_table_has_all_blocks_of_the_small_set():
    kept = json.loads(compiled.KEPT.read_text())["reduced"]
    assert set(kept["blocks"]) == set(compiled.reduced())
    assert all(numbers["cycles"] > 0 for numbers in kept["blocks"].values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_no_block_costs_more_than_was_kept(tmp_path):
    ended = commands.run("benchmarks.compiled", "--check")
    assert ended.code == 0, ended.out + ended.err
    assert "GREW" not in ended.out
