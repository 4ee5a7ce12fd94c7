"""Images from files: which are read, in which order, and how errors are reported."""

import re

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.data import tars
from diffusion_jax.metrics import images
from tests.diffusion_jax.metrics import standin


def write(path, height=12, width=16, value=None):
    picture = standin.picture(height, width) if value is None else value
    Image.fromarray(picture).save(path)
    return picture


@pytest.fixture
def folder(tmp_path):
    """A folder with colour, grey and transparent images, a text and a subfolder."""
    grey = standin.picture(12, 16)[..., 0]
    write(tmp_path / "b.png")
    write(tmp_path / "a.PNG", value=grey)
    write(tmp_path / "c.webp", value=np.zeros((12, 16, 3), np.uint8))
    write(tmp_path / "d.png", value=np.dstack([standin.picture(12, 16), grey]))
    (tmp_path / "a.txt").write_text("a caption")
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "e.png")
    return tmp_path


def test_a_folder_is_read_in_order_of_names_and_converted_to_rgb(folder):
    source = images.DecodedFiles(images.open_files(str(folder)))
    assert (len(source), source.shape) == (4, (12, 16, 3))
    rows, status = source.read(np.arange(4))
    grey = np.repeat(standin.picture(12, 16)[..., :1], 3, -1)
    # Transparency is dropped, as in pytorch-fid.
    expected = [grey, standin.picture(12, 16), np.zeros((12, 16, 3)), standin.picture(12, 16)]
    np.testing.assert_array_equal(rows, expected)
    assert status.tolist() == [0, 0, 0, 0]


def test_hidden_files_and_what_sample_writes_beside_its_images_are_left_out(tmp_path):
    def names():
        files = images.folder_files(tmp_path)
        return [files.read(i)[1].rpartition("/")[2] for i in range(files.number)]

    for name in ("a.png", "a_64.png", "sheet.png", "._a.png", ".b.png"):
        write(tmp_path / name)
    assert names() == ["a.png", "a_64.png", "sheet.png"]
    drawn = '{"file_name": "a.png", "text": "a fox", "seed": 0, "smaller": ["a_64.png"]}\n'
    (tmp_path / "metadata.jsonl").write_text(drawn)
    assert names() == ["a.png"]
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "sheet.png", "text": "a sheet"}\n')
    assert names() == ["a.png", "a_64.png", "sheet.png"]


def test_broken_images_are_read_as_zeros_with_status_1(folder):
    (folder / "aa.png").write_bytes((folder / "b.png").read_bytes()[:90])
    Image.fromarray(np.full((12, 16), 40000, np.uint16)).save(folder / "ab.png")
    source = images.DecodedFiles(images.folder_files(folder))
    rows, status = source.read(np.array([2, 1, 0, 3]))
    assert status.tolist() == [1, 1, 0, 0] and not rows[:2].any() and rows[2:].any()
    assert source.reason(1) == "broken_image"


def test_images_of_unequal_sizes_are_an_error_that_names_both(folder):
    write(folder / "e.png", 30, 20)
    source = images.DecodedFiles(images.folder_files(folder))
    assert source.read(np.array([4, 0]))[1].tolist() == [2, 0]
    message = f"differ in size: the first is 16x12, {folder}/e.png is 20x30. Resize"
    with pytest.raises(ValueError, match=re.escape(message)):
        source.reason(2)


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_images_are_squashed_or_cropped_to_the_given_size(folder, fit):
    write(folder / "b.png", 30, 20)
    source = images.DecodedFiles(images.folder_files(folder), 10, fit)
    rows, status = source.read(np.array([1]))
    whole = Image.fromarray(standin.picture(30, 20))
    squashed = whole.resize((10, 10), Image.Resampling.BICUBIC)
    cropped = whole.resize((10, 15), Image.Resampling.BICUBIC).crop((0, 2, 10, 12))
    np.testing.assert_array_equal(rows[0], squashed if fit == "squash" else cropped)
    assert source.shape == (10, 10, 3) and not status.any()


def test_images_in_tars_are_read_and_their_texts_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write(tmp_path / "a.png")
    png = (tmp_path / "a.png").read_bytes()
    tars.write(tmp_path / "0.tar", [{tars.KEY: b"x", "png": png, "txt": b"text"}, {tars.KEY: b"y", "png": png}])
    files = images.open_files(str(tmp_path / "{0..0}.tar"))
    rows, _ = images.DecodedFiles(files).read(np.arange(files.number))
    np.testing.assert_array_equal(rows, [standin.picture(12, 16)])
    assert files.left_out()["no_caption"] == 1


def test_missing_empty_and_broken_folders_and_invalid_fits_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        images.open_files(str(tmp_path / "nowhere"))
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"no images in .*: looked for bmp, .*it has subfolders"):
        images.open_files(str(tmp_path))
    (tmp_path / "a" / "a.png").write_bytes(b"")
    files = images.open_files(str(tmp_path / "a"))
    with pytest.raises(ValueError, match="none of the 1 images can be read"):
        images.DecodedFiles(files)
    for size, fit in ((8, "exact"), (0, "crop"), (8, "stretch")):
        with pytest.raises(ValueError, match=f"fit is '{fit}' with size {size}: choose 'squash' or"):
            images.DecodedFiles(files, size, fit)
