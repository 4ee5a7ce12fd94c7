"""Masks of the loss, from the opacity of pictures and from files beside them."""

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from diffusion_jax.config.settings import Data, check_loss_mask
from diffusion_jax.data import aspect_buckets, decoding, pipeline, sources
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.metrics import images

SIDE = 8
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (4, SIDE, SIDE, 4), np.uint8)


def write(folder, pixels=PIXELS, kind="alpha", **options):
    """Write pictures; of the kind "file", their opacity is a file beside each."""
    folder.mkdir()
    for n, image in enumerate(pixels):
        if kind == "file":
            Image.fromarray(image[..., 3]).save(folder / f"{n}.mask.png")
        Image.fromarray(image if kind == "alpha" else image[..., :3]).save(folder / f"{n}.png", **options)
        (folder / f"{n}.txt").write_text(f"picture {n}")
    return folder


def opened(folder, kind, **fields):
    return sources.open_pictures(Data("folder", str(folder), loss_mask=kind, **fields), SIDE)


def test_the_opacity_of_a_picture_is_the_mask_and_its_hidden_colours_are_kept(tmp_path):
    read = opened(write(tmp_path / "a"), "alpha").columns(np.arange(4))
    np.testing.assert_array_equal(read.images, PIXELS[..., :3])
    np.testing.assert_array_equal(read.mask, PIXELS[..., 3])
    plain = opened(tmp_path / "a", "").columns(np.arange(4))
    assert plain.mask is None and np.abs(plain.images.astype(int) - read.images).max() > 50
    images, _ = opened(tmp_path / "a", "alpha").read(np.arange(4))
    np.testing.assert_array_equal(images, read.images)
    _, images, _ = opened(tmp_path / "a", "alpha").usable(np.arange(4))
    np.testing.assert_array_equal(images, read.images)


def test_a_mask_is_turned_and_cropped_with_its_picture(tmp_path):
    """The picture is twice as high as wide once its tag has turned it; the crop is at the top."""
    wide = RNG.integers(0, 256, (1, SIDE, 2 * SIDE, 4), np.uint8)
    exif, profile = Image.Exif(), ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    exif[0x0112] = 6  # Turn by 90 degrees clockwise.
    write(tmp_path / "a", wide, exif=exif, icc_profile=profile.tobytes())
    turned = np.rot90(wide[0], -1)
    read = opened(tmp_path / "a", "alpha").columns(np.array([0]), np.array([[0.0, 0.0]]))
    np.testing.assert_array_equal(read.images[0], turned[:SIDE, :, :3])
    np.testing.assert_array_equal(read.mask[0], turned[:SIDE, :, 3])


def test_every_pixel_of_an_opaque_picture_has_loss_weight_1(tmp_path):
    read = opened(write(tmp_path / "a", kind=""), "alpha").columns(np.arange(4))
    assert (read.mask == 255).all()


def test_a_file_beside_a_picture_is_its_mask_and_no_picture_itself(tmp_path):
    pictures = opened(write(tmp_path / "a", kind="file"), "file")
    read = pictures.columns(np.arange(len(pictures)))
    np.testing.assert_array_equal(read.images, PIXELS[..., :3])
    np.testing.assert_array_equal(read.mask, PIXELS[..., 3])
    Image.fromarray(PIXELS[0, :4, :, 3]).save(tmp_path / "a" / "0.mask.png")
    pictures = opened(tmp_path / "a", "file", max_broken=1.0)
    usable, *_ = pictures.usable(np.arange(4))
    assert usable.tolist() == [1, 2, 3] and pictures.skipped() == {"broken_mask": 1}
    plain = opened(tmp_path / "a", "", uncaptioned="empty")
    assert len(plain) == 4 and plain.skipped() == {"unused_mask": 4}
    assert ("left out", "4 unused_mask: 0.mask.png, 1.mask.png, 2.mask.png, ...") in (plain.inventory().rows())
    assert images.open_files(str(tmp_path / "a")).left_out() == {"unused_mask": 4}
    assert images.open_files(str(tmp_path / "a")).number == 4
    (tmp_path / "a" / "2.mask.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 4 images in .* have no file \.mask\.png beside"):
        opened(tmp_path / "a", "file")


def test_a_picture_whose_name_ends_like_that_of_a_mask_is_no_mask_without_its_picture(tmp_path):
    write(tmp_path / "a")
    for suffix in ("png", "txt"):
        (tmp_path / "a" / f"3.{suffix}").rename(tmp_path / "a" / f"iron.mask.{suffix}")
    plain = opened(tmp_path / "a", "")
    assert len(plain) == 4 and plain.skipped() == {}


def png(image, **options):
    file = io.BytesIO()
    image.save(file, "png", **options)
    return file.getvalue()


def weights(mask, image=None):
    """Return the weights of a picture's pixels under an encoded mask."""
    image = image or png(Image.fromarray(PIXELS[0, ..., :3]))
    return decoding.crop_masked(image, (SIDE, SIDE), mask=mask)[..., 3]


def test_a_mask_is_compared_with_the_upright_picture_and_turned_by_its_own_tag():
    wide = np.zeros((SIDE, 2 * SIDE), np.uint8)
    wide[:, :SIDE], wide[0] = 255, 128
    exif = Image.Exif()
    exif[0x0112] = 6  # Turn by 90 degrees clockwise.
    image = png(Image.new("RGB", (2 * SIDE, SIDE)), exif=exif)
    turned = np.rot90(wide, -1)
    middle = turned[SIDE // 2 : SIDE // 2 + SIDE]
    np.testing.assert_array_equal(weights(png(Image.fromarray(wide), exif=exif), image), middle)
    np.testing.assert_array_equal(weights(png(Image.fromarray(turned)), image), middle)
    with pytest.raises(decoding.Unusable, match="broken_mask: it is 16x8, but its image is 8x16"):
        weights(png(Image.fromarray(wide)), image)


def test_transparent_parts_of_a_mask_do_not_count():
    white = np.full((SIDE, SIDE, 4), 255, np.uint8)
    white[:, :3, 3] = 0
    np.testing.assert_array_equal(weights(png(Image.fromarray(white))), white[..., 3])
    palette = Image.fromarray((white[..., 3] > 0).astype(np.uint8)).convert("P")
    palette.putpalette([255, 255, 255] * 2)
    np.testing.assert_array_equal(weights(png(palette, transparency=0)), white[..., 3])


def test_a_mask_without_transparent_pixels_may_have_greys_in_every_mode():
    grey = PIXELS[0, ..., 3]
    for mode in ("L", "RGB", "LA", "RGBA"):
        mask = png(Image.fromarray(grey).convert(mode))
        np.testing.assert_array_equal(weights(mask), grey)


def test_a_coloured_black_damaged_or_ambiguous_mask_is_unusable():
    partly = np.full((SIDE, SIDE, 4), 120, np.uint8)
    partly[:4, :, 3] = 255
    for mask, message in (
        (png(Image.new("RGB", (SIDE, SIDE), (0, 255, 0))), "it has colours: save it in grey"),
        (png(Image.fromarray(np.eye(SIDE, dtype=np.uint8))), "its brightest pixel is 1 of 255"),
        (png(Image.new("L", (SIDE, SIDE))), "its brightest pixel is 0 of 255"),
        (b"", "the file is empty"),
        (png(Image.fromarray(PIXELS[0, ..., 3]))[:60], "OSError: "),
        (png(Image.fromarray(partly)), "ValueError: transparent parts and colours"),
    ):
        with pytest.raises(decoding.Unusable, match=f"^broken_mask: {message}"):
            weights(mask)


def test_a_batch_holds_masks_that_are_mirrored_with_their_pictures(tmp_path):
    pictures = opened(write(tmp_path / "a"), "alpha")
    tokenize = lambda texts: {"n": np.array([int(text[-1]) for text in texts])}
    with pipeline.make_batches(pictures, tokenize, batch_size=8, seed=0, flip=True) as batches:
        batch = next(batches)
    both = np.concatenate([batch["image"], batch[pipeline.LOSS_MASK][..., None]], -1)
    mirrored = [np.array_equal(x, PIXELS[n][:, ::-1]) for x, n in zip(both, batch["n"], strict=True)]
    same = [np.array_equal(x, PIXELS[n]) for x, n in zip(both, batch["n"], strict=True)]
    assert all(np.logical_xor(mirrored, same)) and any(mirrored) and any(same)


@pytest.mark.parametrize("kind", ["alpha", "file"])
def test_each_batch_of_an_aspect_bucket_has_masks_of_its_shape(tmp_path, kind):
    """The pictures are two pixels wider than their buckets; the crop keeps the middle."""
    shapes = [(8, 8), (4, 16)]
    sizes = [(height, width + 2, 4) for height, width in shapes]
    wide = [RNG.integers(0, 256, sizes[n % 2], np.uint8) for n in range(8)]
    pictures = opened(write(tmp_path / "a", wide, kind), kind)
    tokenize = lambda texts: {"n": np.array([int(text[-1]) for text in texts])}
    buckets = aspect_buckets.sort(pictures, shapes)
    batches = pipeline.make_batches(pictures, tokenize, batch_size=4, seed=0, flip=True, buckets=buckets)
    seen = set()
    with batches:
        assert {x[pipeline.LOSS_MASK].shape[1:] for x in batches.examples()} == {*shapes}
        for batch in (next(batches) for _ in range(8)):
            both = np.concatenate([batch["image"], batch[pipeline.LOSS_MASK][..., None]], -1)
            for x, n in zip(both, batch["n"], strict=True):
                turns = [np.array_equal(x, wide[n][:, 1:-1][:, ::step]) for step in (1, -1)]
                assert sum(turns) == 1
                seen.add((int(n), turns[0]))
    assert len(seen) > 12


def test_the_pictures_of_a_prior_count_in_full_beside_masked_ones(tmp_path):
    write(tmp_path / "a", kind="file")
    prior = write(tmp_path / "b", PIXELS[:1], kind="")
    (prior / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "old"}\n')
    pictures = opened(tmp_path / "a", "file", prior=str(prior))
    assert isinstance(pictures, Mixture)
    read = pictures.columns(np.array([4, 1]))
    np.testing.assert_array_equal(read.mask, [np.full((SIDE, SIDE), 255), PIXELS[1, ..., 3]])


def test_masks_are_refused_where_they_would_be_ignored():
    with pytest.raises(ValueError, match=r"'diffusion_jax.examples.digits' has no image files"):
        sources.open_pictures(Data("diffusion_jax.examples.digits", loss_mask="alpha"), 16)
    with pytest.raises(ValueError, match=r"the loss of diffusion.method=meanflow\(\) has no mask"):
        check_loss_mask(Data("folder", loss_mask="alpha"), "meanflow()")
    mixture = Data("mixture", mixture=((1, "folder", "a", "txt"), (1, "arrow", "b", "txt")))
    check_loss_mask(mixture._replace(loss_mask="alpha"))
    with pytest.raises(ValueError, match=r"but data.source is 'arrow': only a folder has files"):
        check_loss_mask(mixture._replace(loss_mask="file"))
