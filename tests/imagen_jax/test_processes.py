"""Two processes of the commands do what one does: train, stop, go on, draw, score."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from diffusion_jax import log
from tests.imagen_jax.conftest import TINY
from tests.processes import Group, last_step

PROMPTS = ("--prompt=a red seven on gray paper", "--prompt=a white two on cyan paper")
SCORES = ("--guidance=2", "--num_heldout=1", "--batch_size=160")


def train(workdir, count, steps):
    run = (f"--workdir={workdir}", f"--config.steps={steps}", "--config.save_every=100")
    return Group(workdir / "said", count, "train", *TINY, *run)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(the workdir of a run that was stopped once, and gone on with; exit codes)."""
    workdir = tmp_path_factory.mktemp("two")
    group = train(workdir, 2, 10**6)
    group.wait_for_step(workdir, 2)
    group.processes[1].terminate()
    codes = group.end()
    rest = train(workdir, 2, last_step(workdir) + 2)
    return workdir, codes + rest.end()


@pytest.fixture(scope="module")
def drawn(two):
    """{number of processes: (pictures, metadata, rows of scores)}, of the last checkpoint."""
    workdir, results = two[0], {}
    for count in (1, 2):
        out, name = workdir / f"pictures_{count}", f"scores_{count}"
        for command in (
            ("sample", f"--out={out}", *PROMPTS),
            ("evaluate", f"--name={name}", *SCORES),
        ):
            group = Group(workdir / "said", count, *command, f"--workdir={workdir}")
            assert group.end() == [0] * count, group.said()
        lines = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
        images = np.stack([np.asarray(Image.open(out / line["file_name"])) for line in lines])
        with (workdir / "evaluation" / name / "sweep.csv").open() as file:
            results[count] = images.astype(int), lines, list(csv.DictReader(file))
    return results


def test_two_that_are_stopped_and_go_on_train_as_one(two, tmp_path):
    workdir, codes = two
    assert codes == [143, 143, 0, 0]
    alone = train(tmp_path, 1, last_step(workdir))
    assert alone.end() == [0], alone.said()
    expected, actual = (log.read_metrics(path / log.METRICS) for path in (tmp_path, workdir))
    for name in ("step", "loss", "grad_norm"):
        columns = [[line[name] for line in lines] for lines in (actual, expected)]
        np.testing.assert_allclose(*columns, rtol=1e-4)  # Sums over the batch in another order.


def test_two_draw_what_one_draws(drawn):
    (images, lines, _), (expected, expected_lines, _) = drawn[2], drawn[1]
    assert images.std() > 5
    np.testing.assert_allclose(images, expected, atol=1)  # Rounding to uint8.
    assert lines == expected_lines


def test_two_score_what_one_scores(drawn):
    (row,), (expected,) = drawn[2][2], drawn[1][2]
    assert row.keys() == expected.keys()
    for name in row.keys() - {"features_share_of_time", "ema"}:
        # A picture whose pixels round the other way may be read as another digit.
        np.testing.assert_allclose(float(row[name]), float(expected[name]), rtol=0.02, atol=2 / 290)


def test_a_process_that_refuses_its_config_ends_with_2_and_so_do_all(tmp_path):
    group = Group(tmp_path, 2, "train", *TINY, "--workdir=nowhere", "--config.batch_size=3")
    assert group.end() == [2, 2]
    assert "error: batch_size 3 does not divide over" in group.said()
