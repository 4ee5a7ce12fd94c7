"""The folder source: images with texts, and its errors."""

import itertools
import os

import numpy as np
import pytest

from diffusion_jax.data import guess, reading
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.records import suffix_of
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.examples.digits import rendering as digits


@pytest.fixture
def folder(tmp_path):
    return digits.write_examples(tmp_path / "images", 6, size=8)


def test_images_of_all_subfolders_are_read_in_order_of_their_names(tmp_path):
    for name in ("b/2.PNG", "a/9.jpeg", "a/10.webp", "c.d.jpg", ".hidden.jpg", "note.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
        path.with_suffix(".txt").write_text(f"text of {name}\n")
    records = open_folder(tmp_path)
    assert [r.name for r in records.read(range(len(records)))] == ["a/10.webp", "a/9.jpeg", "b/2.PNG", "c.d.jpg"]
    assert records.read([3])[0][:3] == (b"c.d.jpg", "text of c.d.jpg", "c.d.jpg")


def test_text_files_with_the_suffix_npy_are_read_as_embeddings(folder):
    for image in folder.glob("*.png"):
        np.save(image.with_suffix(".t5.npy"), np.full((3, 4), int(image.stem), np.float16))
    text = open_folder(folder, text="t5.npy").read([5])[0].text
    np.testing.assert_array_equal(text, np.full((3, 4), 5, np.float32), strict=True)


def test_the_error_for_a_missing_path_suggests_a_command_for_examples(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*/nowhere: check the path") as error:
        open_folder(tmp_path / "nowhere")
    command = str(error.value).split("diffusion_jax.data.digits ")[1].split()
    digits.main(command)
    assert len(open_folder(tmp_path / "nowhere")) == 100


def test_the_error_for_a_folder_without_images_lists_its_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"no images in .* and found no files at all"):
        open_folder(tmp_path)
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(ValueError, match=r"found tar\.gz; check the path, or decompress the tars$"):
        open_folder(tmp_path)
    (tmp_path / "a.tar").touch()
    with pytest.raises(ValueError, match=r"found tar, tar\.gz; .*, or read the tars with data\.source=we"):
        open_folder(tmp_path)
    (tmp_path / "a-train.tfrecord-00000-of-00002").touch()
    with pytest.raises(ValueError, match=r"tfrecord-00000-of-00002; .*, or name a TFDS folder as tfds:FOLDER@SPLIT,"):
        open_folder(tmp_path)


def test_images_without_captions_are_an_error_that_names_some(folder):
    for i in range(4):
        (folder / f"0000{i}.txt").unlink()
    message = r"4 of 6 images have no text .*: 00000.png, 00001.png, 00002.png and 1 more.* png, txt\), or leave"
    with pytest.raises(ValueError, match=message):
        open_folder(folder)


def test_images_without_captions_can_be_dropped(folder):
    assert open_folder(folder).left_out() == {}
    (folder / "00004.txt").unlink()
    records = open_folder(folder, uncaptioned="drop")
    assert (len(records), records.read([4])[0].name) == (5, "00005.png")
    assert records.left_out() == {"no_caption": 1}
    with pytest.raises(ValueError, match=r"6 of 6 images have no text .*=npy"):
        open_folder(folder, text="npy", uncaptioned="drop")  # All images would be dropped.


def test_invalid_uncaptioned_and_text_settings_are_errors(folder):
    with pytest.raises(ValueError, match="uncaptioned is 'ignore': it must be 'error' or 'drop'"):
        open_folder(folder, uncaptioned="ignore")
    with pytest.raises(ValueError, match=r"files with suffix 'pickle' are pickles.*docs/data\.md"):
        open_folder(folder, text="pickle")
    with pytest.raises(ValueError, match=r"data\.text is 'json': add the field's name, such as json:c"):
        open_folder(folder, text="json")
    with pytest.raises(ValueError, match=r"'txt:caption': .* follow json or csv or"):
        open_folder(folder, text="txt:caption")
    with pytest.raises(ValueError, match="the suffix of text files is 'doc': it must end in txt"):
        open_folder(folder, text="doc")


def test_suffix_of_returns_everything_after_the_first_dot():
    assert suffix_of("a.b/0001.T5.npy") == "t5.npy"
    assert suffix_of("a.b/0001") == ""


def test_linked_folders_and_files_are_followed_once(tmp_path):
    for name in ("elsewhere/deep/1.png", "data/sub/2.png", "one/3.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        path.with_suffix(".txt").write_text(name)
    data = tmp_path / "data"
    (data / "0_linked").symlink_to(tmp_path / "elsewhere")
    (data / "again").symlink_to(tmp_path / "elsewhere")
    (data / "a_loop").symlink_to(data)
    (data / "sub/b_loop").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(data)
    (data / "itself.png").symlink_to(data / "itself.png")
    (data / "nothing.png").symlink_to(tmp_path / "missing.png")
    for suffix in ("png", "txt"):
        (data / f"3.{suffix}").symlink_to(tmp_path / f"one/3.{suffix}")
    records = open_folder(data)
    assert [(r.name, r.text) for r in records.read(range(len(records)))] == [
        ("0_linked/deep/1.png", "elsewhere/deep/1.png"),
        ("3.png", "one/3.png"),
        ("sub/2.png", "data/sub/2.png"),
    ]
    # Three loops, a second link to the same folder, and two broken links.
    assert records.left_out() == {"link": 6}


def test_every_file_of_a_folder_is_used_or_skipped_for_a_reason(tmp_path):
    names = {
        "pictures": ["1.JPG", "2.tiff", "3.avif", "4.a.gif"],
        "texts": ["1.txt", "2.txt"],
        "companions": ["1.json", "meta.csv", "5.TXT.npy"],
        "format": ["a.svg", "b.heic", "no_suffix", "c.zip"],
        "no_picture": ["d.txt", "e.TXT"],
        "hidden": [".git/1.png", "__MACOSX/1.jpg", "._1.jpg", "sub/.DS_Store", "Thumbs.db"],
    }
    for name in itertools.chain(*names.values()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.png")  # Reading a pipe would block.
    rows = dict.fromkeys(open_folder(tmp_path, uncaptioned="drop").inventory().rows())
    assert list(rows) == [
        ("files", "2 pictures, 2 texts, 3 companions"),
        ("left out", "5 hidden: ._1.jpg, .git, Thumbs.db, ..."),
        ("left out", "1 special: pipe.png"),
        ("left out", "4 format: a.svg, b.heic, c.zip, ..."),
        ("left out", "2 no_picture: d.txt, e.TXT"),
        ("left out", "2 no_caption: 3.avif, 4.a.gif"),
    ]


def test_files_without_read_permission_are_skipped_as_unreadable(folder, monkeypatch):
    def refuse(path, mode):
        if os.path.basename(path) in ("00001.png", "00002.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(reading, "open", refuse, raising=False)
    texts = [record.text for record in open_folder(folder).read(range(4))]
    assert isinstance(open_folder(folder).texts([2])[0], Unusable)
    assert [isinstance(t, Unusable) and t.reason for t in texts] == [False, *["unreadable"] * 2, False]
    with monkeypatch.context() as patched:
        patched.delattr(reading, "open")  # Another import finds that the text may be read now.
        assert isinstance(open_folder(folder).texts([2])[0], str)
    scandir = os.scandir

    def refuse_folder(path):
        if os.path.basename(path) == "closed":
            raise PermissionError(path)
        return scandir(path)

    (folder / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", refuse_folder)
    assert open_folder(folder).left_out() == {"unreadable": 1}


def test_a_text_file_can_be_named_after_the_complete_image_name(tmp_path):
    for name in ("1.jpg", "2.png", "2.jpg"):
        (tmp_path / name).touch()
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    (tmp_path / "1.en.txt").touch()
    records = open_folder(tmp_path)
    assert records.texts([0, 1, 2]) == ["text of 1.jpg", "text of 2.jpg", "text of 2.png"]
    assert records.left_out() == {"no_picture": 1}
    assert guess.guess(str(tmp_path)).text == "txt"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # The text of z.jpg is not that of z.jpg.webp.
        (["z.jpg", "z.jpg.txt", "z.jpg.webp"], {"z.jpg": "z.jpg.txt"}),
        (["z.jpg", "z.txt", "z.jpg.webp", "z.jpg.webp.txt"], {"z.jpg": "z.txt", "z.jpg.webp": "z.jpg.webp.txt"}),
        (["0.jpg", "0.png", "0.txt", "0.png.txt"], {"0.jpg": "0.txt", "0.png": "0.png.txt"}),
        (["Z.JPG", "z.jpg.txt", "z.jpg.webp"], {"Z.JPG": "z.jpg.txt"}),
        (["caf\u00e9.png", "cafe\u0301.txt"], {"caf\u00e9.png": "cafe\u0301.txt"}),
        (["A.png", "a.TXT"], {"A.png": "a.TXT"}),
        (["A.png", "a.png.txt"], {"A.png": "a.png.txt"}),
        (["s/A.png", "S/a.txt", "s/b.png", "s/b.txt"], {"s/b.png": "s/b.txt"}),  # Two folders.
        (["A.png", "a.png", "a.txt"], {"a.png": "a.txt"}),  # A.png has none.
        (["A.png", "a.jpg", "A.Txt"], {"A.png": "A.Txt"}),
        (["A.png", "B.png", "b.txt", "B.txt"], {"B.png": "B.txt"}),  # b.txt is left over.
        (["Ab.png", "ab.txt", "aB.txt", "b.png", "b.txt"], {"b.png": "b.txt"}),  # Which of two?
        (["\u00e9.png", "\u00c9.png", "e\u0301.txt", "z.png", "z.txt"], {"z.png": "z.txt"}),
    ],
)
def test_a_picture_has_the_text_of_its_own_name(tmp_path, texts, expected):
    for name in texts:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    records = open_folder(tmp_path, uncaptioned="drop")
    assert {record.name: record.text for record in records.read(range(len(records)))} == expected


def test_the_error_for_heic_images_names_the_package_to_install(tmp_path):
    (tmp_path / "1.HEIC").touch()
    with pytest.raises(ValueError, match=r"found heic; check the path, or install pillow-heif, whi"):
        open_folder(tmp_path)


def test_file_names_that_are_not_utf8_can_be_read_and_printed(tmp_path, capsys):
    root = os.fsencode(tmp_path)
    for name in (b"caf\xe9.png", b"caf\xe9.txt", b"\xe9t\xe9.svg"):
        with open(os.path.join(root, name), "wb") as file:
            file.write(b"a cafe")
    records = open_folder(tmp_path)
    assert records.texts([0]) == ["a cafe"] and records.keys(np.arange(1)) > 0
    print(records.inventory().rows()[1][1])
    assert capsys.readouterr().out == "1 format: \\xe9t\\xe9.svg\n"
