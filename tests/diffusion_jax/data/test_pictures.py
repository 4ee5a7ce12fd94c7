"""Decoded records, and what takes the place of those that cannot be decoded."""

import logging

import numpy as np
import pytest

from diffusion_jax.data import digits, pictures, sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty pictures, of which 3 and 4 are damaged."""
    path = digits.write_examples(tmp_path_factory.mktemp("data"), 40, size=16)
    (path / "00003.png").write_bytes(b"no image")
    (path / "00004.png").write_bytes((path / "00004.png").read_bytes()[:60])
    return path


def test_pictures_are_decoded_with_their_texts(folder):
    opened = pictures.open_pictures("folder", path=str(folder), size=16)
    images, texts = opened.read(np.array([0, 39]))
    expected, captions = digits.Digits(16).read(np.array([0, 39 * 617]))
    np.testing.assert_array_equal(images, expected)
    assert list(texts) == captions


def test_a_broken_image_is_always_replaced_by_the_same_one(folder):
    def read(*indices):
        opened = pictures.open_pictures("folder", path=str(folder), size=16)
        return opened.read(np.array(indices))

    images, texts = read(2, 3, 4, 5)
    again, _ = read(4, 3, 3)
    np.testing.assert_array_equal(again, images[[2, 1, 1]])
    whole, captions = read(*(i for i in range(40) if i not in (3, 4)))
    for image, text in zip(images, texts, strict=True):
        same = np.flatnonzero((whole == image).all((1, 2, 3)))
        assert captions[same[0]] == text


def test_broken_images_are_counted_once_and_named(folder, caplog):
    opened = pictures.open_pictures("folder", path=str(folder), size=16)
    with caplog.at_level(logging.WARNING):
        opened.read(np.arange(40))
        opened.read(np.arange(40))
    assert opened.skipped() == {"broken_image": 2}
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2 and named[0].startswith("skipped 00003.png: broken_image: ")


def test_counts_include_what_the_source_left_out(tmp_path):
    path = digits.write_examples(tmp_path, 5, size=16)
    (path / "00002.txt").unlink()
    opened = pictures.open_pictures("folder", path=str(path), size=16, uncaptioned="drop")
    assert opened.skipped() == {"no_caption": 1}


def test_when_nothing_can_be_used_it_ends_with_counts(folder):
    opened = pictures.Decoded(
        sources.Folder(folder), size=16, filters=pictures.Filters(min_size=17)
    )
    with pytest.raises(ValueError, match=r"unusable, of 40: \{.*'too_small': .*min_size=17"):
        opened.read(np.array([0]))


def test_webdatasets_give_the_pictures_of_folders(tmp_path):
    digits.write_examples(tmp_path / "a.tar", 4, size=16, format="webdataset")
    images, texts = pictures.open_pictures("webdataset", path=f"{tmp_path}/a.tar", size=16).read(
        np.array([3, 1])
    )
    expected, captions = digits.Digits(16).read(np.array([3, 1]) * 617)
    np.testing.assert_array_equal(images, expected)
    assert list(texts) == captions


def test_synthetic_pictures_have_the_shapes_of_real_ones():
    synthetic = pictures.open_pictures("synthetic", size=24, embeddings=(7, 5))
    images, texts = synthetic.read(np.arange(4))
    assert (images.shape, images.dtype) == ((4, 24, 24, 3), np.uint8)
    assert [t.shape for t in texts] == [(7, 5)] * 4
    assert synthetic.read(np.arange(4, 8))[0] is images
    assert isinstance(pictures.open_pictures("synthetic", size=8).read(np.arange(1))[1][0], str)


def test_an_unknown_source_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'imagenet': the sources are digits, folder, webdataset"):
        pictures.open_pictures("imagenet", size=64)
    with pytest.raises(ValueError, match=r"'folder' needs data\.path"):
        pictures.open_pictures("folder", size=64)


@pytest.mark.parametrize("kind", ["digits", "folder", "webdataset"])
def test_texts_are_read_without_images(tmp_path, kind):
    if kind == "folder":
        path = digits.write_examples(tmp_path, 5, size=16)
        for image in path.glob("*.png"):
            image.write_bytes(b"")
    else:
        path = digits.write_examples(tmp_path / "a.tar", 5, size=16, format="webdataset")
    opened = pictures.open_pictures(kind, path=str(path), size=16)
    expected = digits.Digits(16).texts(np.array([3, 1]) * (1 if kind == "digits" else 617))
    assert list(pictures.read_texts(opened, np.array([3, 1]))) == expected


def test_texts_of_any_source_can_be_read():
    synthetic = pictures.open_pictures("synthetic", size=8)
    assert pictures.read_texts(synthetic, np.arange(2)) == ["a picture of random noise"] * 2
