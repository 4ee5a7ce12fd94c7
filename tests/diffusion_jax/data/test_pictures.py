"""Decoded records, and the replacement of records that cannot be decoded."""

import logging

import numpy as np
import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data import pictures
from diffusion_jax.data.prepare.validate import validate
from diffusion_jax.data.sources import open_pictures, open_records
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files import sheets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty pictures, of which 3 and 4 are damaged."""
    path = digits.write_examples(tmp_path_factory.mktemp("data"), 40, size=16)
    (path / "00003.png").write_bytes(b"no image")
    (path / "00004.png").write_bytes((path / "00004.png").read_bytes()[:60])
    return path


def test_pictures_are_decoded_with_their_texts(folder):
    opened = open_pictures(Data("folder", path=str(folder)), 16)
    images, texts = opened.read(np.array([0, 39]))
    expected, captions = digits.Digits(16).read(np.array([0, 39 * 617]))
    np.testing.assert_array_equal(images, expected)
    assert list(texts) == captions


def test_a_broken_image_is_always_replaced_by_the_same_picture(folder):
    def read(*indices):
        opened = open_pictures(Data("folder", path=str(folder)), 16)
        return opened.read(np.array(indices))

    images, texts = read(2, 3, 4, 5)
    again, _ = read(4, 3, 3)
    np.testing.assert_array_equal(again, images[[2, 1, 1]])
    whole, captions = read(*(i for i in range(40) if i not in (3, 4)))
    for image, text in zip(images, texts, strict=True):
        same = np.flatnonzero((whole == image).all((1, 2, 3)))
        assert captions[same[0]] == text


def test_broken_images_are_counted_once_and_logged_by_name(folder, caplog):
    opened = open_pictures(Data("folder", path=str(folder)), 16)
    with caplog.at_level(logging.WARNING):
        opened.read(np.arange(40))
        opened.read(np.arange(40))
    assert opened.skipped() == {"broken_image": 2}
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2 and named[0].startswith("skipped 00003.png: broken_image: ")


def test_skip_counts_add_files_left_out_at_opening_and_at_reading(folder, monkeypatch):
    opened = open_pictures(Data("folder", path=str(folder)), 16)
    monkeypatch.setattr(opened._records, "left_out", lambda: {"broken_image": 5, "format": 1})
    opened.read(np.arange(40))
    assert opened.skipped() == {"broken_image": 2 + 5, "format": 1}


def test_a_data_set_without_usable_records_is_an_error_with_counts(folder):
    opened = open_pictures(Data("folder", path=str(folder), min_size=17), 16)
    with pytest.raises(ValueError, match=r"record was found among 40 records: \{.*'too_small': .*min_size=17"):
        opened.read(np.array([0]))


def test_the_error_for_broken_pictures_says_if_only_some_were_tried(folder, monkeypatch):
    monkeypatch.setattr(pictures, "_MAX_SUBSTITUTES", 5)
    opened = open_pictures(Data("folder", path=str(folder), min_size=17), 16)
    with pytest.raises(ValueError, match=r"no usable record was found in 5 tries among 40 records"):
        opened.read(np.array([0]))


def test_synthetic_pictures_and_embeddings_have_the_requested_shapes():
    synthetic = open_pictures(Data("synthetic"), 24, embeddings=(7, 5))
    images, texts = synthetic.read(np.arange(4))
    assert (images.shape, images.dtype) == ((4, 24, 24, 3), np.uint8)
    assert [t.shape for t in texts] == [(7, 5)] * 4
    assert synthetic.read(np.arange(4, 8))[0] is images
    assert synthetic.read(np.arange(2))[0].shape[0] == 2
    np.testing.assert_array_equal(synthetic.read(np.arange(4))[0], images)
    plain = open_pictures(Data("synthetic"), 8)
    assert plain.read(np.arange(2))[1] == plain.texts(np.arange(2)) == ["a picture of random noise"] * 2


def test_a_source_without_a_path_is_an_error():
    with pytest.raises(ValueError, match=r"data\.path is empty"):
        open_pictures(Data("folder"), 64)


@pytest.mark.parametrize("kind", ["diffusion_jax.examples.digits", "folder", "webdataset"])
def test_texts_can_be_read_without_reading_images(tmp_path, kind):
    if kind == "folder":
        path = digits.write_examples(tmp_path, 5, size=16)
        for image in path.glob("*.png"):
            image.write_bytes(b"")
    else:
        path = digits.write_examples(tmp_path / "a.tar", 5, size=16, format="webdataset")
    opened = open_pictures(Data(kind, path=str(path)), 16)
    expected = digits.Digits(16).texts(np.array([3, 1]) * (1 if "." in kind else 617))
    assert list(opened.texts(np.array([3, 1]))) == expected


def test_filters_count_what_they_drop_by_reason(tmp_path):
    path = digits.write_examples(tmp_path, 20, size=16)
    for name, size in (("00001", (8, 40)), ("00002", (16, 40)), ("00003", (16, 32))):
        sheets.write_png(path / f"{name}.png", np.zeros((*size, 3), np.uint8))
    (path / "00004.txt").write_text(" ab ")
    (path / "00005.txt").write_text("abc")
    opened = open_pictures(Data("folder", path=str(path), min_size=16, max_aspect=2.0, min_chars=3), 16)
    _, texts = opened.read(np.arange(20))
    assert opened.skipped() == {"too_small": 1, "too_elongated": 1, "short_caption": 1}
    assert texts[5] == "abc" and "ab" not in texts


def test_one_usable_record_in_a_hundred_is_found(tmp_path):
    path = digits.write_examples(tmp_path, 100, size=16)
    (path / "00042.txt").write_text("the only long caption that there is among them all")
    opened = open_pictures(Data("folder", path=str(path), min_chars=50), 16)
    assert set(opened.read(np.arange(8))[1]) == {"the only long caption that there is among them all"}


def test_more_damaged_records_than_max_broken_are_an_error(folder):
    """Two of forty pictures are damaged: a share of 0.05."""
    for share, fails in ((0.05, False), (0.049, True), (0.0, True)):
        opened = open_pictures(Data("folder", path=str(folder), max_broken=share), 16)
        if fails:
            with pytest.raises(ValueError, match=rf"\d of 40 records .*max_broken={share}"):
                opened.read(np.arange(40))
        else:
            opened.read(np.arange(40))
            assert opened.skipped() == {"broken_image": 2}


@pytest.mark.parametrize("text", ["txt", "json:text", "jsonl:text"])
def test_captions_that_are_not_utf8_are_skipped_in_training_and_validate(tmp_path, text):
    path = digits.write_examples(tmp_path, 4, size=16)
    table = b""
    for number, caption in enumerate((b"fine", b"caf\xe9", "cafe\u0301".encode(), b"na\xefve")):
        row = b'{"file_name": "%05d.png", "text": "%s"}\n' % (number, caption)
        (path / f"{number:05}.txt").write_bytes(caption)
        (path / f"{number:05}.json").write_bytes(row)
        table += row
    (path / "metadata.jsonl").write_bytes(table)
    data = Data("folder", path=str(path), text=text, max_broken=0.5)
    opened = open_pictures(data, 16)
    assert set(opened.read(np.arange(4))[1]) == {"fine", "cafe\u0301"}
    assert opened.skipped() == {"broken_text": 2}
    report = validate(open_records(data))
    for found, name, byte in zip(report["unusable_first"], (1, 3), ("e9", "ef"), strict=True):
        assert found.startswith(f"0000{name}.png: broken_text: ")
        assert f"the text is not UTF-8 text (byte 0x{byte}" in found
    message = r"1 of 2 records .*max_broken=0\.2: .* 00001.png \(broken_text: (.*jsonl, line 2: )?the text is not UTF-8"
    with pytest.raises(ValueError, match=message):
        open_pictures(data._replace(max_broken=0.2), 16).read(np.arange(2))


def test_damaged_embeddings_are_skipped_as_broken_text(tmp_path):
    path = digits.write_examples(tmp_path, 5, size=16)
    for text in path.glob("*.txt"):
        np.save(text.with_suffix(".npy"), np.zeros((2, 3), np.float32))
    (path / "00003.npy").write_bytes(b"no array")
    opened = open_pictures(Data("folder", path=str(path), text="npy", max_broken=0.2), 16)
    assert all(text.shape == (2, 3) for text in opened.read(np.arange(5))[1])
    assert opened.skipped() == {"broken_text": 1}
    assert [np.shape(text) for text in opened.texts(np.arange(2, 4))] == [(2, 3), ()]


@pytest.fixture
def mixture(tmp_path):
    tar = digits.write_examples(tmp_path / "a.tar", 4, size=16, format="webdataset")
    folder = digits.write_examples(tmp_path / "b", 3, size=16)
    (folder / "00001.png").write_bytes(b"")
    parts = [(3, "webdataset", str(tar), "txt"), (1, "folder", str(folder), "txt")]
    return open_pictures(Data("mixture", mixture=parts, max_broken=0.4), 16)


def test_a_mixture_concatenates_its_parts(mixture):
    images, texts = mixture.read(np.array([6, 1, 4, 0, 3]))
    expected, captions = digits.Digits(16).read(np.array([2, 1, 0, 0, 3]) * 617)
    np.testing.assert_array_equal(images, expected)
    assert texts == captions == mixture.texts(np.array([6, 1, 4, 0, 3]))
    assert (len(mixture), mixture.lengths, mixture.weights) == (7, [4, 3], [3.0, 1.0])
    mixture.read(np.arange(7))
    assert mixture.skipped() == {"broken_image": 1}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"data\.mixture is empty"),
        ([(1, "folder", "")], r"holds \(1, 'folder', ''\): each part must be \(weight, s"),
        ([(0, "folder", "", "txt")], "with a weight above 0"),
        ([(1, "mixture", "", "txt")], "contains a mixture: list its parts"),
        ([(1, "digit", "", "txt")], "the data source 'digit' is unknown"),
    ],
)
def test_invalid_mixtures_are_errors_that_name_the_mistake(parts, message):
    with pytest.raises(ValueError, match=message):
        open_pictures(Data("mixture", mixture=parts), 16)
