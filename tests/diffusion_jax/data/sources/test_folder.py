"""Folders of images with texts, and what is said when they are not that."""

import numpy as np
import pytest

from diffusion_jax.data.records import suffix_of
from diffusion_jax.data.sources.folder import Folder
from diffusion_jax.examples.digits import pictures as digits


@pytest.fixture
def folder(tmp_path):
    return digits.write_examples(tmp_path / "images", 6, size=8)


def test_records_come_in_the_order_of_their_names_from_all_subfolders(tmp_path):
    for name in ("b/2.PNG", "a/9.jpeg", "a/10.webp", "c.d.jpg", ".hidden.jpg", "note.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
        path.with_suffix(".txt").write_text(f"text of {name}\n")
    records = Folder(tmp_path)
    assert [r.name for r in records.read(range(len(records)))] == [
        "a/10.webp", "a/9.jpeg", "b/2.PNG", "c.d.jpg"]  # fmt: skip
    assert records.read([3])[0] == (b"c.d.jpg", "text of c.d.jpg", "c.d.jpg")


def test_embeddings_are_read_where_the_suffix_says_so(folder):
    for image in folder.glob("*.png"):
        np.save(image.with_suffix(".t5.npy"), np.full((3, 4), int(image.stem), np.float16))
    text = Folder(folder, text="t5.npy").read([5])[0].text
    np.testing.assert_array_equal(text, np.full((3, 4), 5, np.float32), strict=True)


def test_a_missing_path_comes_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*/nowhere: check the path") as error:
        Folder(tmp_path / "nowhere")
    command = str(error.value).split("diffusion_jax.data.digits ")[1].split()
    digits.main(command)
    assert len(Folder(tmp_path / "nowhere")) == 100


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    with pytest.raises(ValueError, match=r"no images in .* and found no files at all"):
        Folder(tmp_path)
    (tmp_path / "a.tar").touch()
    with pytest.raises(ValueError, match=r"found tar; .*, or read the tars with data\.source=we"):
        Folder(tmp_path)


def test_images_without_captions_are_counted_and_named(folder):
    for i in range(4):
        (folder / f"0000{i}.txt").unlink()
    message = (
        r"4 of 6 images have no text \(data\.text=txt\): 00000.png, 00001.png, 00002.png and 1 "
        r"more\. "
        r".*\(suffixes found: png, txt\), or leave these images out with data.uncaptioned=drop"
    )
    with pytest.raises(ValueError, match=message):
        Folder(folder)


def test_images_without_captions_can_be_dropped(folder):
    assert Folder(folder).left_out() == {}
    (folder / "00004.txt").unlink()
    records = Folder(folder, uncaptioned="drop")
    assert (len(records), records.read([4])[0].name) == (5, "00005.png")
    assert records.left_out() == {"no_caption": 1}
    with pytest.raises(ValueError, match=r"6 of 6 images have no text .*=npy"):
        Folder(folder, text="npy", uncaptioned="drop")  # Nothing would be left.


def test_unknown_choices_are_refused(folder):
    with pytest.raises(ValueError, match="uncaptioned is 'ignore': it must be 'error' or 'drop'"):
        Folder(folder, uncaptioned="ignore")
    with pytest.raises(ValueError, match=r"files with suffix 'pickle' are pickles.*docs/data\.md"):
        Folder(folder, text="pickle")
    with pytest.raises(
        ValueError, match=r"data\.text is 'json': add the field's name, such as json:c"
    ):
        Folder(folder, text="json")
    with pytest.raises(ValueError, match=r"'txt:caption': .* follow json or csv or"):
        Folder(folder, text="txt:caption")
    with pytest.raises(ValueError, match="the suffix of text files is 'doc': it must end in txt"):
        Folder(folder, text="doc")


def test_suffix_is_what_follows_the_first_dot():
    assert suffix_of("a.b/0001.T5.npy") == "t5.npy"
    assert suffix_of("a.b/0001") == ""
