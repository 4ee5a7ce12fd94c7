"""The page and reports do not read links, FIFOs or devices inside a run."""

import os
import pathlib
import shutil

import pytest

from diffusion_jax.data import prompts
from diffusion_jax.files import untrusted
from diffusion_jax.web import frozen, results
from tests import written_sweeps


@pytest.fixture
def run(tmp_path):
    return written_sweeps.write_run(tmp_path / "run")


def shown(run):
    """Return the paths of all pictures that the page may request."""
    paths = []
    show = lambda path: paths.append(path) or "url"
    results.training({"run": [str(run)]}, show)
    results.sweeps(results.drawn_by({"run": [str(run)]}), show)
    return paths


def test_linked_pictures_in_a_run_are_not_shown(run, tmp_path):
    before = shown(run)
    assert before and all(path.is_relative_to(run) for path in before)
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    for path in before:
        path.unlink()
        path.symlink_to(secret)
    assert shown(run) == [] and "c2VjcmV0" not in frozen.page([run])
    assert untrusted.read_plain(before[0]) is None


def test_linked_folders_in_a_run_are_ignored_but_a_run_may_be_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    assert len(shown(tmp_path / "link")) == len(shown(run)) > 0
    shutil.move(run / "evaluation", tmp_path / "elsewhere")
    (run / "evaluation").symlink_to(tmp_path / "elsewhere")
    assert not any("evaluation" in path.parts for path in shown(run))


def test_fifos_and_devices_do_not_block(run):
    for path in [*shown(run), run / "metrics.jsonl", *run.glob("evaluation/*/sweep.csv")]:
        path.unlink()
        os.mkfifo(path)
    assert shown(run) == []
    with pytest.raises(FileNotFoundError, match="holds neither metrics"):
        frozen.page([run])
    assert untrusted.read_plain(run / "metrics.jsonl") is None
    assert untrusted.read_plain(pathlib.Path("/dev/zero")) is None


def test_reading_a_pipe_is_an_error_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "prompts.txt")
    for read in (untrusted.read_text, prompts.read):
        with pytest.raises(ValueError, match=r"prompts.txt is a pipe: save its content"):
            read(tmp_path / "prompts.txt")
