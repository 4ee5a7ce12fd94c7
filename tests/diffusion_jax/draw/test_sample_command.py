"""The sample command writes metadata, and no pictures that are not finite."""

import json

import numpy as np
import pytest

from diffusion_jax.draw import sample_command
from diffusion_jax.draw.layouts import Layout
from diffusion_jax.draw.model import Model

INPUTS = sample_command.Inputs(["a", "b"], ["a", "b"])


class Constant(Model):
    """A model that draws the same images for all prompts."""

    def __init__(self, images=None):
        self.images = images

    def batches(self, prompts, rows, seeds, **inputs):
        return iter([[self.images]])

    def card(self):
        return {"steps": 3}


def test_seeds_of_64_bits_are_written_in_full(tmp_path):
    seeds, images = [2**32 + 5, 2**64 - 1], [[np.zeros((2, 4, 4, 3))]]
    sample_command._write(Constant(), INPUTS, tmp_path, [0, 1], seeds, images)
    lines = (tmp_path / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == seeds
    name = "seed_18446744073709551615.png"
    assert json.loads(lines[1]) == {"file_name": name, "text": "b", "seed": seeds[1], "steps": 3}
    assert (tmp_path / name).is_file()


def test_a_batch_with_nan_is_an_error_and_writes_no_picture(tmp_path, capsys):
    images = np.zeros((2, 4, 4, 3), np.float32)
    images[1, 0, 0, 0] = np.nan
    model = Constant(images)
    batches = INPUTS.batches(model, [0, 1], [0, 1])
    with pytest.raises(SystemExit, match="2"):
        sample_command._write(model, INPUTS, tmp_path, [0, 1], [0, 1], batches)
    assert capsys.readouterr().err.startswith("error: 1 of 2 pictures are not finite: the sampler")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("unchecked")
def test_an_earlier_drawing_moves_to_a_numbered_folder_before_the_next_one(tmp_path):
    out, all_sizes = tmp_path / "out", INPUTS._replace(all_sizes=True)
    out.mkdir()
    (out / "notes.txt").touch()
    contents = lambda folder: {p.name: p.read_bytes() for p in folder.glob("[!n]*")}
    drawn = []
    for count, grey in ((2, 0.1), (2, 0.3), (1, 0.5)):
        sizes = np.full((count, 2, 2, 3), grey), np.full((count, 4, 4, 3), grey)
        sample_command._move_earlier(out)
        sample_command._write(Constant(), all_sizes, out, [0, 1], [0, 1], [sizes])
        drawn.append(contents(out))
    assert [len(one) for one in drawn] == [6, 6, 4]  # No drawing is mixed with another one.
    assert [contents(tmp_path / name) for name in ("out_1", "out_2", "out")] == drawn
    assert (out / "notes.txt").exists()


def test_earlier_pictures_in_the_folders_of_a_benchmark_move_too(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    layout = Layout(["a/0.png", "b/0.png"])
    images = np.zeros((2, 4, 4, 3))
    sample_command._write(Constant(), INPUTS, out, [0, 1], [0, 1], [[images]], layout)
    names = {path.relative_to(out) for path in out.rglob("*.*")}
    sample_command._move_earlier(out)
    assert {path.relative_to(f"{out}_1") for path in (tmp_path / "out_1").rglob("*.*")} == names
    assert len(names) == 4 and not list(out.rglob("*.*"))


def test_metadata_that_names_a_file_of_another_folder_is_an_error_and_moves_nothing(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "out").mkdir()
    line = json.dumps({"file_name": "../a.png", "seed": 1})
    (tmp_path / "out/metadata.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"names a file outside its folder, \.\./a\.png"):
        sample_command._move_earlier(tmp_path / "out")
    assert {path.name for path in tmp_path.rglob("*")} == {"a.png", "out", "metadata.jsonl"}


def test_metadata_of_other_pictures_is_an_error_and_stays(tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "a dog"}\n')
    (tmp_path / "0.png").touch()
    with pytest.raises(ValueError, match=f"^--out={tmp_path} holds a metadata.jsonl of other pict"):
        sample_command._move_earlier(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"metadata.jsonl", "0.png"}
