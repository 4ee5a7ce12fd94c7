"""Processes with different configs or data end with a one-line error before the first step."""

import json
import pathlib
import shutil

import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data import fingerprints
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.examples.digits import rendering as digits
from tests import processes

CHANGED = ("fewer", "renamed", "edited", "copy")


def check(process, folder, out):
    """Write the errors of each check to OUT/PROCESS.json."""
    import jax

    from configs import quickstart
    from diffusion_jax.train import train_command

    def error(function, argument):
        try:
            return function(argument)
        except ValueError as raised:
            return str(raised)

    config = lambda **values: quickstart.get_config().to_dict() | values
    opened = lambda name: open_pictures(Data("folder", path=f"{folder}/{name}"), 8)
    data = lambda name: fingerprints.digests(opened(name))
    second = jax.process_index() == 1
    errors = [
        error(train_command.check_configs, config(prompts=("x" * 700 + "ab"[second],))),
        error(train_command.check_configs, config(data=config()["data"] | {"path": f"here{second}"})),
        *(error(train_command.check_data, data(name if second else "all")) for name in CHANGED),
    ]
    pathlib.Path(out, f"{process}.json").write_text(json.dumps(errors))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures, and changed copies of them."""
    folder = tmp_path_factory.mktemp("data")
    digits.write_examples(folder / "all", 4, size=8)
    for name in CHANGED:
        shutil.copytree(folder / "all", folder / name, copy_function=shutil.copy)
    (folder / "fewer/00003.png").unlink()
    for suffix in ("png", "txt"):
        (folder / f"renamed/00001.{suffix}").rename(folder / f"renamed/0000b.{suffix}")
    (folder / "edited/00002.txt").write_text("a longer caption")
    return folder


@pytest.mark.slow
@pytest.mark.gate
def test_all_processes_report_the_same_difference_between_them(folder, tmp_path):
    assert processes.run_all(2, check, folder, tmp_path, devices=1) == [0, 0]
    errors = [json.loads((tmp_path / f"{process}.json").read_text()) for process in (0, 1)]
    assert errors[0] == errors[1]
    prompts, local, fewer, renamed, edited, copy = errors[0]
    start = f"prompts is ('{'x' * 58}... (digest "
    assert prompts.startswith(start) and prompts.count(start[len("prompts is ") :]) == 2
    assert prompts.endswith(" in process 1: start all processes with the same config")
    assert fewer.startswith("the number of pictures is 4 in process 0, but 3 in process 1: give all processes the same")
    assert renamed.startswith("the digest of the pictures' names is ")
    assert edited.startswith("the digest of the texts and of the files' sizes is ")
    assert local is None and copy is None


def test_a_copy_of_the_data_has_the_same_digests_but_another_stamp(folder):
    opened = [open_pictures(Data("folder", path=f"{folder}/{name}"), 8) for name in ("all", "copy")]
    one, other = map(fingerprints.digests, opened)
    assert one == other and one["the number of pictures"] == 4
    one, other = map(fingerprints.stamp, opened)
    assert one != other


@pytest.mark.parametrize("format", ["folder", "webdataset"])
def test_the_stamp_of_a_source_changes_with_each_of_its_files(tmp_path, format):
    digits.write_examples(tmp_path / "data", 3, size=8, format=format)
    opened = open_pictures(Data(format, path=str(tmp_path / "data")), 8)
    stamps = [fingerprints.stamp(opened)]
    for file in opened.files():
        path = pathlib.Path(file)
        path.write_bytes(path.read_bytes() + bytes(2))
        stamps.append(fingerprints.stamp(opened))
    assert len(opened.files()) == (3 if format == "folder" else 1)
    assert len(set(stamps)) == len(stamps)
