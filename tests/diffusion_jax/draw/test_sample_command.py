"""The sample command writes metadata, and no pictures that are not finite."""

import json

import numpy as np
import pytest

from diffusion_jax.draw import sample_command


def session(images):
    return sample_command.Session(["a", "b"], lambda rows, seeds: iter([[images]]), {})


def test_seeds_of_64_bits_are_written_in_full(tmp_path):
    seeds = [2**32 + 5, 2**64 - 1]
    sample_command._write(session(None), tmp_path, [0, 1], seeds, [[np.zeros((2, 4, 4, 3))]])
    lines = (tmp_path / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == seeds
    assert (tmp_path / "seed_18446744073709551615.png").is_file()


def test_a_batch_with_nan_is_an_error_and_writes_no_picture(tmp_path, capsys):
    images = np.zeros((2, 4, 4, 3), np.float32)
    images[1, 0, 0, 0] = np.nan
    with pytest.raises(SystemExit, match="2"):
        sample_command._draw(session(images), tmp_path, 1, 0)
    assert capsys.readouterr().err.startswith("error: 1 of 2 pictures are not finite: the sampler")
    assert not any(tmp_path.iterdir())
