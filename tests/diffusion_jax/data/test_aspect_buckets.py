"""Aspect buckets: the shape of each batch, its pictures, and the area removed by cropping."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image

from diffusion_jax.config import shapes
from diffusion_jax.config.settings import Data
from diffusion_jax.data import aspect_buckets, pipeline, records, split
from diffusion_jax.data.decoding import crop
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.sources import open_pictures
from tests import written_tars

SHAPES = ((16, 16), (8, 24), (24, 8))
SIZES = [(20, 20), (20, 60), (60, 20), (22, 20), (18, 40), (90, 21), (16, 16)]  # height, width
WANTED = [0, 1, 2, 0, 1, 2, 0]
TOKENIZE = lambda texts: {"n": np.array(texts, int)}


def write(folder, sizes, first=0):
    """Write pictures whose caption and red value are their number."""
    folder.mkdir(parents=True)
    for number, (height, width) in enumerate(sizes, first):
        Image.new("RGB", (width, height), (number, 0, 0)).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(str(number))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "mixed", SIZES * 4)


def open_batches(path, batch_size=4, **options):
    pictures = open_pictures(Data("folder", path=path), 16)
    buckets = aspect_buckets.sort(pictures, SHAPES)
    return pipeline.make_batches(pictures, TOKENIZE, batch_size=batch_size, seed=3, buckets=buckets, **options)


def numbers(batches, steps):
    with batches:
        return [next(batches)["n"].tolist() for _ in range(steps)]


def test_a_picture_goes_to_the_nearest_aspect_ratio(folder):
    pictures = open_pictures(Data("folder", path=folder), 16)
    sizes = aspect_buckets.read_sizes(pictures)
    assert sizes.tolist() == [list(size) for size in SIZES * 4]
    assert aspect_buckets.nearest(sizes, SHAPES).tolist() == WANTED * 4
    # The border between 1:1 and 1:3 is at sqrt(3). Damaged pictures count as squares.
    near = np.array([[100, 173], [100, 174], [0, 0]])
    assert aspect_buckets.nearest(near, SHAPES).tolist() == [0, 1, 0]


@pytest.mark.parametrize("source", ["folder", "webdataset"])
def test_the_orientation_of_a_png_may_follow_more_pixels_than_its_head_holds(tmp_path, source):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    pixels = np.random.default_rng(0).integers(0, 256, (100, 600, 3), np.uint8)
    Image.fromarray(pixels).save(png := io.BytesIO(), "png")
    plain = png.getvalue()
    assert len(plain) > 2 * records.HEAD
    end = len(plain) - 12  # Before the last chunk.
    members = {"a.png": plain, "b.png": plain[:end] + chunk + plain[end:], "c.png": plain[:90]}
    members |= dict.fromkeys(("a.txt", "b.txt", "c.txt"), b"x")
    for name, content in members.items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path if source == "folder" else written_tars.write(tmp_path / "a.tar", members)
    sizes = open_pictures(Data(source, str(path)), 16).sizes(np.arange(3)).tolist()
    assert sizes == [[100, 600], [600, 100], [100, 600]]


def test_crop_resizes_to_cover_the_shape_and_cuts_the_rest():
    """The crop of a wide picture keeps its middle, or the part that `place` selects."""
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 10:50] = (0, 255, 0)  # The middle part of 20x40 is green.
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    np.testing.assert_array_equal(crop(file.getvalue(), (20, 40))[..., 1], np.full((20, 40), 255))
    np.testing.assert_array_equal(crop(file.getvalue(), (10, 30))[5, [3, 26], 1], [0, 0])
    left = crop(file.getvalue(), (20, 40), place=(0.0, 0.5))
    assert not left[:, :10].any() and (left[:, 10:, 1] == 255).all()


def test_each_batch_has_one_shape_and_each_epoch_holds_every_picture_once(folder):
    seen = []
    with open_batches(folder) as batches:
        for _ in range(7):  # 28 pictures, in buckets of 12, 8 and 8.
            batch = next(batches)
            wanted = {WANTED[n % 7] for n in batch["n"].tolist()}
            assert len(wanted) == 1
            assert batch["image"].shape[1:3] == SHAPES[wanted.pop()]
            np.testing.assert_array_equal(batch["image"][:, 4, 4, 0], batch["n"])
            seen += batch["n"].tolist()
            assert batches.indices(range(4)).tolist() == batch["n"].tolist()
    assert sorted(seen) == list(range(28))


def test_processes_threads_and_restarts_do_not_change_the_batches(folder):
    expected = numbers(open_batches(folder), 15)
    assert numbers(open_batches(folder, num_threads=3), 15) == expected
    parts = [numbers(open_batches(folder, process_index=p, process_count=2), 15) for p in (0, 1)]
    assert [a + b for a, b in zip(*parts, strict=True)] == expected
    with open_batches(folder) as batches:
        for _ in range(6):
            next(batches)
        position = batches.get_state()
    with open_batches(folder) as batches:
        batches.set_state(position)
        assert [next(batches)["n"].tolist() for _ in range(9)] == expected[6:]


def test_a_saved_position_is_rejected_with_other_buckets_or_batch_sizes(folder):
    with open_batches(folder) as batches:
        next(batches)
        position = batches.get_state()
    with (
        open_batches(folder, batch_size=2) as other,
        pytest.raises(pipeline.OtherData, match=r"'batch_size': 2.*cannot be continued"),
    ):
        other.set_state(position)
    pictures = open_pictures(Data("folder", path=folder), 16)
    with (
        pipeline.make_batches(pictures, TOKENIZE, batch_size=4, seed=3) as squares,
        pytest.raises(pipeline.OtherData, match="buckets"),
    ):
        squares.set_state(position)


def test_aspect_buckets_keep_the_weights_of_a_mixture(tmp_path):
    """Each of the two pictures of `a` is drawn three times as often as one of the four of `b`."""
    tall, square = (60, 20), (20, 20)
    paths = (write(tmp_path / "a", [tall, square]), write(tmp_path / "b", [tall, tall, square, square], first=10))
    parts = [open_pictures(Data("folder", path=path), 16) for path in paths]
    mixed = Mixture(parts, [3, 2])
    buckets = aspect_buckets.sort(mixed, SHAPES)
    assert buckets.shapes == [(16, 16), (24, 8)] and buckets.counts == [3, 3]
    batches = pipeline.make_batches(mixed, TOKENIZE, batch_size=5, seed=0, buckets=buckets)
    rows = np.array(numbers(batches, 40))
    assert np.unique(rows, return_counts=True)[1].tolist() == [60, 60, 20, 20, 20, 20]
    assert ((rows < 10).sum(1) == 3).all()


def test_a_damaged_picture_is_replaced_by_a_training_picture_of_its_bucket(tmp_path):
    path = write(tmp_path / "data", SIZES * 20)
    for number in (1, 2, 8, 9):  # Truncated after the header.
        file = tmp_path / "data" / f"{number:03}.png"
        file.write_bytes(file.read_bytes()[:50])
    training, heldout = split.split(open_pictures(Data("folder", path=path), 16), 0.3)
    out = {int(text) for text in heldout.texts(np.arange(len(heldout)))}
    assert 20 < len(out) < 60
    buckets = aspect_buckets.sort(training, SHAPES)
    with pipeline.make_batches(training, TOKENIZE, batch_size=4, seed=0, buckets=buckets) as batches:
        for _ in range(60):
            batch = next(batches)
            ratios = {WANTED[n % 7] for n in batch["n"].tolist()}
            assert len(ratios) == 1 and not out & set(batch["n"].tolist())
        assert batches.skipped()["broken_image"] == len({1, 2, 8, 9} - out)


def test_buckets_crop_less_than_a_fifth_of_the_area_that_squares_crop():
    """For pictures with log-uniform aspect ratios between 1:2 and 2:1."""
    rng = np.random.default_rng(0)
    aspect = 2 ** rng.uniform(-1, 1, 1000)
    sizes = np.stack([1000 / aspect**0.5, 1000 * aspect**0.5], 1).round().astype(int)
    allowed = shapes.up_to(512, 32)
    assert allowed[:6] == ((352, 704), (384, 640), (416, 608), (448, 576), (480, 544), (512, 512))
    chosen = np.array(allowed)[aspect_buckets.nearest(sizes, allowed)]
    squares = aspect_buckets.cropped_away(sizes, np.ones_like(sizes)).mean()
    assert squares == pytest.approx(1 - (1 - 0.5) / np.log(2), abs=0.01)  # 27.9 %
    assert aspect_buckets.cropped_away(sizes, chosen).mean() < 0.2 * squares
    assert shapes.up_to(64, 8) == ((48, 80), (56, 72), (64, 64), (72, 56), (80, 48))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (((16, 16), (8,)), "give .height, width. in pixels, such as .16, 16."),
        (((16, 12),), r"\(16, 12\): this model needs sides that are multiples of 8"),
        (((24, 16),), "more pixels than the model's pictures of 16x16"),
        (((8, 8), (8, 16), (16, 16)), "two buckets have the same aspect ratio"),
    ],
)
def test_a_bucket_shape_that_the_model_cannot_train_on_is_an_error(wrong, message):
    with pytest.raises(ValueError, match=message):
        shapes.check(wrong, 16, 8)
    with pytest.raises(ValueError, match=r"data.resize is 32"):
        shapes.check(SHAPES, 16, 8, resize=32)


def test_aspect_buckets_of_a_source_without_files_are_an_error():
    with pytest.raises(ValueError, match=r"aspect buckets have no use: set data.aspect_buckets"):
        aspect_buckets.sort(open_pictures(Data("diffusion_jax.examples.digits.rendering"), 16), SHAPES)


def test_the_report_lists_bucket_shares_and_the_cropped_area(folder):
    pictures = open_pictures(Data("folder", path=folder), 16)
    sizes, assigned = aspect_buckets.read_sizes(pictures), aspect_buckets.sort(pictures, SHAPES)
    # Cropping to the bucket removes a part of three of the seven pictures.
    away = (2 / 22 + (1 - 40 / 54) + (1 - 63 / 90)) / 7
    square = (2 / 22 + 2 * 2 / 3 + (1 - 18 / 40) + (1 - 21 / 90)) / 7
    described = aspect_buckets.described(assigned, sizes)
    assert described.startswith("pictures by height x width: 16x16 (43%), 8x24 (29%), 24x8 (29%); cropping removes ")
    assert described.endswith(f"{away:.1%} of their area (square crops: {square:.1%})")


def test_examples_have_one_batch_per_bucket_shape(folder):
    pictures = open_pictures(Data("folder", path=folder), 16)
    buckets = aspect_buckets.sort(pictures, SHAPES)
    with pipeline.make_batches(pictures, TOKENIZE, batch_size=2, seed=0, buckets=buckets) as batches:
        assert [b["image"].shape for b in batches.examples()] == [(1, *shape, 3) for shape in SHAPES]
