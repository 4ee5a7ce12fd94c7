"""Resharding: no record is lost or duplicated, also after a kill."""

import contextlib
import io
import json

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import decoding, sources, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.prepare import reshard
from diffusion_jax.data.sources.arrayrecord import open_files
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.examples.digits import rendering as digits

YEAR = picture_fields.read(("year=1900..2000",))
READERS = {"webdataset": open_tars, "arrayrecord": open_files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten pictures: the image of 3 is broken, and 7 has no text."""
    path = digits.write_examples(tmp_path_factory.mktemp("data"), 10, size=8)
    (path / "00003.png").write_bytes(b"GIF89a")
    (path / "00007.txt").unlink()
    return path


def contents(records):
    return [(record.image, record.text) for record in records.read(range(len(records)))]


def write(folder, out, format="webdataset", **kw):
    records = open_folder(folder, uncaptioned="drop")
    kw = {"identity": {"path": str(folder)}, "num": 4, **kw}
    return reshard.reshard(records, out, format=format, **kw)


@pytest.mark.parametrize("format", ["webdataset", "arrayrecord"])
def test_shards_hold_the_usable_records_in_order(folder, tmp_path, format):
    counts = write(folder, tmp_path, format)
    assert counts == {"written": 8, "broken_image": 1, "no_caption": 1}
    expected = [pair for pair in contents(open_folder(folder, uncaptioned="drop")) if pair[0] != b"GIF89a"]
    assert contents(READERS[format](tmp_path)) == expected
    suffix = {"webdataset": "tar", "arrayrecord": "array_record"}[format]
    # Nine records with texts, in shards of 4, 4 and 1.
    assert len(list(tmp_path.glob(f"*.{suffix}"))) == 3


def test_parallel_processes_and_restarts_write_the_same_files(folder, tmp_path):
    write(folder, tmp_path / "once")
    for process in (1, 0):
        write(folder, tmp_path / "parts", process=process, processes=2)
    tars = {path.name: path.read_bytes() for path in (tmp_path / "once").glob("*.tar")}
    assert {p.name: p.read_bytes() for p in (tmp_path / "parts").glob("*.tar")} == tars
    (tmp_path / "once/000001.tar").unlink()  # A kill can leave such a file.
    modified = (tmp_path / "once/000000.tar").stat().st_mtime_ns
    assert write(folder, tmp_path / "once")["written"] == 4
    assert {p.name: p.read_bytes() for p in (tmp_path / "once").glob("*.tar")} == tars
    assert (tmp_path / "once/000000.tar").stat().st_mtime_ns == modified


def test_shards_of_files_that_have_changed_are_not_kept_silently(tmp_path):
    path, out = digits.write_examples(tmp_path / "data", 5, size=8), tmp_path / "out"
    assert write(path, out)["written"] == 5
    assert write(path, out)["written"] == 0
    caption = path / "00001.txt"
    caption.write_text(f"{caption.read_text()} corrected")
    with pytest.raises(ValueError, match=r"files of the data set have changed since .*/out: write"):
        write(path, out)
    record = json.loads((out / reshard.MANIFEST).read_text())
    del record["files"]  # As in folders of earlier versions.
    (out / reshard.MANIFEST).write_text(json.dumps(record))
    assert write(path, out)["written"] == 0


def test_a_failing_shard_leaves_no_file(folder, tmp_path, monkeypatch):
    def fail(row, record, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(reshard, "_encode", fail)
    with pytest.raises(KeyboardInterrupt):
        write(folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [reshard.MANIFEST]


def test_reshard_keeps_embeddings(tmp_path):
    path = digits.write_examples(tmp_path / "a", 3, size=8)
    for i, text in enumerate(sorted(path.glob("*.txt"))):
        np.save(text.with_suffix(".npy"), np.full((2, 4), i, np.float16))
    reshard.reshard(open_folder(path, "npy"), tmp_path / "b", num=9, format="webdataset", identity={})
    texts = open_tars(tmp_path / "b", "npy").texts([0, 1, 2])
    np.testing.assert_array_equal(texts, np.arange(3)[:, None, None] * np.ones((3, 2, 4)))


def test_reshard_with_other_or_invalid_settings_is_an_error(folder, tmp_path):
    write(folder, tmp_path)
    with pytest.raises(ValueError, match=r"started with other settings \(num: 4 stored, 5 requested\)"):
        write(folder, tmp_path, num=5)
    with pytest.raises(ValueError, match="format is 'zip': choose from webdataset, arrayrecord"):
        write(folder, tmp_path, format="zip")
    with pytest.raises(ValueError, match="process is 2: it must be from 0 to 1"):
        write(folder, tmp_path, process=2, processes=2)
    with pytest.raises(ValueError, match="checksums is set, but arrayrecord files have their own"):
        write(folder, tmp_path, format="arrayrecord", checksums=True)
    with pytest.raises(ValueError, match=r"\(checksums: None stored, True requested\)"):
        write(folder, tmp_path, checksums=True)
    with pytest.raises(ValueError, match="num is 0: a shard must hold at least 1 record"):
        write(folder, tmp_path, num=0)


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    """Three JPEG pictures with captions and a number, as JPEG has no checksum of its own."""
    path = digits.write_examples(tmp_path_factory.mktemp("jpegs"), 3, size=16)
    for i, image in enumerate(sorted(path.glob("*.png"))):
        Image.open(image).save(image.with_suffix(".jpg"))
        image.with_suffix(".json").write_text(json.dumps({"year": 1990 + i}))
        image.unlink()
    return open_folder(path, fields=YEAR)


def flipped(jpegs, out, **options):
    """Write a tar of the pictures, and flip one bit of a file in it, 200 times.

    Yield each time the row of the damaged record, whether its text or number is damaged, and the
    records, which are imported again.
    """
    reshard.reshard(jpegs, out, num=9, format="webdataset", identity={}, fields=YEAR, **options)
    tar, rng = out / "000000.tar", np.random.default_rng(0)
    whole, index = tar.read_bytes(), tars.scan(str(tar))
    assert contents(open_tars(out, fields=YEAR)) == contents(jpegs)
    files = zip(index.record, index.suffix, index.span.tolist(), strict=True)
    places = [(row, kind, first + n) for row, kind, (first, size) in files for n in range(size)]
    for row, kind, place in (places[i] for i in rng.choice(len(places), 200)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        tar.write_bytes(damaged)
        yield int(row), kind != "jpg", open_tars(out, fields=YEAR)


def test_checksums_find_every_flipped_bit_of_pictures_texts_and_numbers(jpegs, tmp_path):
    good = contents(jpegs)
    for row, in_text, opened in flipped(jpegs, tmp_path, checksums=True):
        read, texts = contents(opened), opened.texts(range(3))
        assert read[row][1].reason == "wrong_checksum"
        if in_text:
            assert texts[row].reason == "wrong_checksum"
            texts[row] = good[row][1]
        assert texts == [text for _, text in good]
        read[row] = good[row]
        assert read == good


def test_without_checksums_many_flipped_bits_give_another_picture(jpegs, tmp_path):
    decode = lambda record: decoding.crop(record.image, (16, 16))
    good, silent = [decode(record) for record in jpegs.read(range(3))], 0
    for row, _, opened in flipped(jpegs, tmp_path):
        with contextlib.suppress(Unusable):
            silent += not np.array_equal(decode(opened.read([row])[0]), good[row])
    assert silent > 40


def test_training_counts_and_names_records_with_a_wrong_checksum(jpegs, tmp_path, caplog):
    data = Data("webdataset", fields=("year=1900..2000",), max_broken=0.5)
    row, *_ = next(flipped(jpegs, tmp_path, checksums=True))
    pictures = sources.open_pictures(data._replace(path=str(tmp_path)), 16)
    pictures.read(np.arange(3))
    assert pictures.skipped() == {"wrong_checksum": 1}
    assert f"skipped {tmp_path}/000000.tar/{row:09}" in caplog.text
    assert "wrong_checksum: a file of it has changed since it was written" in caplog.text


def test_image_kind_recognizes_formats_by_their_first_bytes():
    assert reshard.image_kind(b"\xff\xd8\xff\xe0") == "jpg"
    assert reshard.image_kind(b"RIFF1234WEBPVP8") == "webp"
    assert reshard.image_kind(b"RIFF1234WAVE") is None
    assert reshard.image_kind(b"") is None
    bitmap = io.BytesIO()
    Image.new("RGB", (2, 2)).save(bitmap, "BMP")
    assert reshard.image_kind(bitmap.getvalue()) == "bmp"


def test_resized_images_are_padded_to_squares_or_keep_their_aspect_ratio(tmp_path):
    (tmp_path / "set").mkdir()
    for name, size in {"tall": (200, 400), "small": (30, 20)}.items():
        Image.new("RGBA", size, (255, 0, 0, 255)).save(tmp_path / f"set/{name}.png")
        (tmp_path / f"set/{name}.txt").write_text(name)

    def images(out, pad):
        assert write(tmp_path / "set", tmp_path / out, size=64, pad=pad) == {"written": 2}
        tars = open_tars(tmp_path / out).read([0, 1])
        return {one.text: np.asarray(Image.open(io.BytesIO(one.image))) for one in tars}

    unpadded, padded = images("kept", False), images("padded", True)
    assert unpadded["tall"].shape == (128, 64, 3) and unpadded["small"].shape == (20, 30, 3)
    assert padded["tall"].shape == (64, 64, 3) and padded["small"].shape == (30, 30, 3)
    red, white = [255, 0, 0], [255, 255, 255]
    assert (unpadded["tall"] == red).all() and (padded["tall"][:, 16:48] == red).all()
    assert (padded["tall"][:, :16] == white).all() and (padded["tall"][:, 48:] == white).all()
    with pytest.raises(ValueError, match="other settings"):
        images("kept", True)


def test_broken_images_are_counted_while_resizing(folder, tmp_path):
    counts = write(folder, tmp_path, size=4)
    assert counts == {"written": 8, "broken_image": 1, "no_caption": 1}
    with pytest.raises(ValueError, match="pad is set, but size is 0: set size to"):
        write(folder, tmp_path / "other", pad=True)
