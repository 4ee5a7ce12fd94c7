"""Decoding pictures: every mode becomes RGB, every shape a square, damage raises Unusable."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, PngImagePlugin

from diffusion_jax.data.decoding import Unusable, crop, size_of
from diffusion_jax.files import rgb, untrusted


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def square(data, size, **options):
    return crop(data, (size, size), **options)


def smooth(width, height):
    """Return a smooth picture: random colours on a coarse grid, enlarged."""
    grid = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def test_reducing_an_image_antialiases():
    checkers = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    image = square(encode(Image.fromarray(checkers)), 8)
    np.testing.assert_allclose(image.astype(int), 127.5, atol=1)


def test_transparency_becomes_white():
    black = Image.new("RGBA", (8, 8), (0, 0, 0, 64))
    np.testing.assert_array_equal(square(encode(black), 8), np.full((8, 8, 3), 191))
    palette = black.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    np.testing.assert_array_equal(square(encode(palette), 8), np.full((8, 8, 3), 255))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "RGB"])
def test_opaque_modes_become_rgb(mode):
    image = Image.new("RGB", (8, 8), "white").convert(mode)
    format = "JPEG" if mode == "CMYK" else "PNG"
    np.testing.assert_array_equal(square(encode(image, format), 8), np.full((8, 8, 3), 255))


def test_decoding_a_jpeg_at_reduced_scale_stays_close_to_full_decoding():
    noise = np.random.default_rng(0).normal(0, 40, (512, 512, 3)) + np.asarray(smooth(512, 512))
    data = encode(Image.fromarray(noise.clip(0, 255).astype(np.uint8)), "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data)).resize((64, 64), Image.Resampling.BICUBIC)
    error = square(data, 64) - np.asarray(whole).astype(float)
    # The error is 1.5 of 255. It would be 2.5 if decoding did not keep some extra resolution.
    assert 0 < np.sqrt(np.mean(error**2)) < 2


def test_an_image_below_min_size_is_unusable():
    assert square(encode(smooth(50, 32)), 16, min_size=32).shape == (16, 16, 3)
    with pytest.raises(Unusable, match=r"^too_small: 50x31, data\.min_size is 32"):
        square(encode(smooth(50, 31)), 16, min_size=32)


JPEG = encode(smooth(64, 48), "JPEG")
PNG = encode(smooth(64, 48))


@pytest.mark.parametrize("data", [b"", b"<html>", JPEG[:-200], PNG[:-200], PNG[:60]])
def test_damaged_images_are_unusable(data):
    with pytest.raises(Unusable, match=r"^broken_image: "):
        square(data, 16)


@pytest.mark.parametrize("size", [(97, 64), (64, 97), (31, 50), (333, 200)])
def test_a_crop_matches_a_crop_of_the_whole_resized_image(size):
    """Pillow may resize rows and columns in another order, which changes values by up to 1."""
    image = smooth(*size)
    data = io.BytesIO()
    image.save(data, "png")
    scale = 48 / min(image.size)
    whole = image.resize([max(48, round(s * scale)) for s in image.size], Image.Resampling.BICUBIC)
    for place in ((0.5, 0.5), (0.0, 0.99), (0.99, 0.3)):
        left, top = (int(at * (side - 32)) for at, side in zip(place, whole.size, strict=True))
        expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).astype(int)
        actual = square(data.getvalue(), 32, resize=48, place=place)
        assert np.abs(actual - expected).max() <= 1


@pytest.mark.parametrize(
    "format", ["AVIF", "BMP", "DIB", "JPEG2000", "MPO", "PCX", "PPM", "PSD", "QOI", "SGI", "TGA", "TIFF", "GIF"]
)
def test_every_format_that_pillow_decodes_is_read(format):
    colours = Image.new("RGB", (24, 16), (40, 120, 200))
    if format == "PSD":  # Pillow cannot write PSD. Version 1, 3 channels, 16 rows, 24 columns.
        header = struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, 16, 24, 8, 3)
        planes = b"".join(bytes([value]) * 24 * 16 for value in (40, 120, 200))
        data = header + bytes(12) + bytes(2) + planes
    else:
        data = encode(colours, format)
    assert size_of(data) == (16, 24)
    assert np.abs(square(data, 16).astype(int) - (40, 120, 200)).max() <= 3  # Lossy formats.
    with pytest.raises(Unusable, match="broken_image"):
        square(data[: len(data) // 2], 16)


def test_image_suffixes_follow_from_pillows_decoders_and_plugins(tmp_path, monkeypatch):
    suffixes = set(untrusted.image_suffixes())
    assert suffixes >= {"jpg", "jpeg", "jfif", "png", "webp", "avif", "gif", "tif", "tiff"}
    assert suffixes >= {"bmp", "ppm", "pgm", "tga", "jp2", "ico", "psd"}
    assert not suffixes & {"eps", "ps", "mpg", "pdf", "h5", "emf", "jxl", "txt", "json"}
    (tmp_path / "pillow_jxl.py").write_text(
        "from PIL import Image, PpmImagePlugin\n"
        "Image.register_open('JXL', PpmImagePlugin.PpmImageFile, lambda head: head[:2] == b'P6')\n"
        "Image.register_extension('JXL', '.jxl')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for table in (Image.OPEN, Image.EXTENSION):
        monkeypatch.setattr(Image, "OPEN" if table is Image.OPEN else "EXTENSION", dict(table))
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    monkeypatch.setattr(untrusted, "image_formats", untrusted.image_formats.__wrapped__)
    assert "jxl" in untrusted.image_suffixes.__wrapped__()


def test_an_animation_is_read_as_its_first_frame():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime")]
    for format in ("GIF", "WEBP", "PNG", "TIFF", "AVIF"):
        data = encode(frames[0], format, save_all=True, append_images=frames[1:])
        assert np.abs(square(data, 8).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize(
    ("format", "dtype"), [("PNG", "<u2"), ("TIFF", "<u2"), ("PPM", "<i4"), ("JPEG2000", "<u2"), ("PPM", "<f4")]
)
def test_deep_grey_images_are_scaled_to_8_bits(format, dtype):
    ramp = np.arange(256).reshape(16, 16).repeat(2, 0).repeat(2, 1)
    deep = ramp * (1 / 255 if dtype == "<f4" else 257)
    image = square(encode(Image.fromarray(deep.astype(dtype)), format), 32)
    np.testing.assert_array_equal(image, np.repeat(ramp[..., None], 3, -1))
    half = np.full((8, 8), 0.5 if dtype == "<f4" else 32768, dtype)
    assert (square(encode(Image.fromarray(half), format), 8) == 128).all()


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
@pytest.mark.parametrize(("white_is_zero", "expected"), [(True, 117), (False, 138)])
def test_a_16_bit_tiff_with_white_as_zero_is_inverted(compression, white_is_zero, expected):
    image = Image.fromarray(np.full((8, 8), 65535 - 30000, np.uint16))
    tags = {262: 0 if white_is_zero else 1}  # PhotometricInterpretation.
    data = encode(image, "TIFF", compression=compression, tiffinfo=tags)
    assert (square(data, 8) == expected).all()


def test_pixels_without_a_known_white_level_are_unusable():
    for value, dtype in ((300, np.float32), (-0.5, np.float32), (np.nan, np.float32), (9, np.int32)):
        for orientation in (1, 6):
            tags = {ExifTags.Base.Orientation: orientation}
            data = encode(Image.fromarray(np.full((8, 8), value, dtype)), "TIFF", tiffinfo=tags)
            message = r"pixels of mode .*: save the image with 8 or 16 bits"
            with pytest.raises(Unusable, match=message):
                square(data, 8)


def test_a_transparent_colour_of_an_rgb_png_becomes_white():
    image = Image.new("RGB", (8, 8), (1, 2, 3))
    image.paste((200, 0, 0), (0, 0, 4, 8))
    pixels = square(encode(image, transparency=(1, 2, 3)), 8)
    assert (pixels[:, :4] == (200, 0, 0)).all() and (pixels[:, 4:] == 255).all()


def chunk(name, content):
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(depth, kind, row, transparent):
    """Return a PNG of this bit depth and colour type: four equal rows, one transparent colour."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, depth, kind, 0, 0, 0))
    colour = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + row) * 4))
    return b"\x89PNG\r\n\x1a\n" + head + colour + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("depth", "kind", "row", "transparent", "opaque"),
    [
        (1, 0, b"\x10", (1,), (0, 0, 0)),
        (2, 0, b"\xa9", (1,), (170, 170, 170)),
        (4, 0, b"\xaa\xa5", (5,), (170, 170, 170)),
        (8, 0, b"\xaa\xaa\xaa\5", (5,), (170, 170, 170)),
        (16, 0, b"\xaa\xaa" * 3 + b"\0\5", (5,), (170, 170, 170)),
        (8, 2, b"\3\2\1" * 3 + b"\1\2\3", (1, 2, 3), (3, 2, 1)),
        (16, 2, struct.pack(">12H", *(3000, 1000, 9000) * 3, 9000, 1000, 3000), (9000, 1000, 3000), (11, 3, 35)),
    ],
)
def test_the_transparent_colour_of_a_png_of_any_depth_becomes_white(depth, kind, row, transparent, opaque):
    pixels = square(png(depth, kind, row, transparent), 4)
    assert (pixels[:, :3] == opaque).all() and (pixels[:, 3] == 255).all()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_size_and_pixels_follow_the_exif_orientation(format, orientation):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, :16] = 255  # The left half is white in the file.
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(pixels), format, exif=exif)
    size = (16, 32) if orientation < 5 else (32, 16)
    assert size_of(data) == size
    upright = crop(data, size)
    first = {1: upright[:, :12], 3: upright[:, -12:], 6: upright[:12], 8: upright[-12:]}
    assert first[orientation].min() > 245


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_size_and_pixels_follow_an_orientation_given_in_xmp_alone(format):
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    picture, notes = Image.new("RGB", (32, 16)), PngImagePlugin.PngInfo()
    notes.add_itxt("XML:com.adobe.xmp", xmp)
    tags = {"pnginfo": notes} if format == "PNG" else {"xmp": xmp.encode()}
    data = encode(picture, format, **tags)
    assert size_of(data) == (32, 16)
    assert rgb.to_rgb(Image.open(io.BytesIO(data))).size == (16, 32)


def test_size_and_pixels_follow_exif_tags_after_the_pixels_of_a_png():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.new("RGB", (32, 16)), exif=exif)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    assert size_of(moved) == (32, 16)
    assert rgb.to_rgb(Image.open(io.BytesIO(moved))).size == (16, 32)


def test_white_of_a_12_bit_tiff_is_4095():
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 122, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags.items())
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)
    pixels = crop(header + bytes([0x80, 0x0F, 0xFF]), (1, 2))  # 0x800, 0xFFF
    assert len(header) == 122 and pixels[0, :, 0].tolist() == [128, 255]


def test_a_jpeg_2000_with_deep_colours_is_unusable_because_its_white_would_be_black():
    data = bytearray(encode(Image.new("RGB", (8, 8), "white"), "JPEG2000", no_jp2=True))
    assert (square(bytes(data), 8) == 255).all()
    data[42] = 11  # The bits of the first colour in the marker SIZ, less 1.
    with pytest.raises(Unusable, match="broken_image: OSError: a JPEG 2000 with 12 bits per col"):
        square(bytes(data), 8)


def wide_gamut():
    """Return an ICC profile with Display P3's primaries (adapted to D50) and sRGB's curve."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    xyz = {b"rXYZ": (0.5151, 0.2412, -0.0011), b"gXYZ": (0.2919, 0.6922, 0.0419), b"bXYZ": (0.1572, 0.0666, 0.7841)}
    for entry in range(132, 132 + 12 * int.from_bytes(profile[128:132], "big"), 12):
        name, offset, _ = struct.unpack(">4sII", profile[entry : entry + 12])
        if name in xyz:
            values = [round(65536 * value) for value in xyz[name]]
            profile[offset + 8 : offset + 20] = struct.pack(">iii", *values)
    return bytes(profile)


P3, SRGB = (220, 180, 150), (228, 178, 145)
"""A colour in Display P3, and the same colour in sRGB."""


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_with_an_icc_profile_are_converted_to_srgb(mode):
    image = Image.new("RGB", (8, 8), P3)
    image = image.quantize() if mode == "P" else image.convert(mode)
    pixels = square(encode(image, icc_profile=wide_gamut()), 8)
    assert np.abs(pixels.astype(int) - SRGB).max() <= 1
    if mode == "RGBA":
        image.putalpha(0)
        assert (square(encode(image, icc_profile=wide_gamut()), 8) == 255).all()


def png_with(colour, **chunks):
    """Return a PNG of one colour with these chunks before its pixels."""
    content = encode(Image.new("RGB" if isinstance(colour, tuple) else "L", (8, 8), colour))
    return content[:33] + b"".join(chunk(name.encode(), of) for name, of in chunks.items()) + content[33:]


LINEAR = struct.pack(">I", 100_000)
OF_P3 = struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)


@pytest.mark.parametrize(
    ("colour", "chunks", "expected"),
    [
        (P3, {"cICP": bytes([12, 13, 0, 1])}, SRGB),  # Display P3.
        (P3, {"cICP": bytes([12, 13, 0, 1]), "sRGB": b"\0", "gAMA": LINEAR}, SRGB),  # cICP comes first.
        (P3, {"cICP": bytes([1, 13, 0, 1])}, P3),  # sRGB.
        (P3, {"cICP": bytes([2, 2, 0, 1])}, P3),  # Unspecified.
        ((128, 64, 0), {"gAMA": LINEAR}, (188, 137, 0)),  # 255 (1.055 (v / 255)^(1 / 2.4) - 0.055).
        (128, {"gAMA": LINEAR}, (188, 188, 188)),
        ((128, 64, 0), {"gAMA": LINEAR, "sRGB": b"\0"}, (128, 64, 0)),
        ((128, 64, 0), {"gAMA": struct.pack(">I", 45_455)}, (128, 64, 0)),  # About sRGB's curve.
        ((128, 64, 0), {"gAMA": LINEAR, "cHRM": bytes(32)}, (188, 137, 0)),
        ((128, 64, 0), {"gAMA": bytes(4), "cHRM": OF_P3}, (128, 64, 0)),
        # Display P3 to the power 1 / 0.4248, by its matrix to sRGB in CSS Color 4.
        (P3, {"cHRM": OF_P3, "gAMA": struct.pack(">I", 42_480)}, (227, 175, 141)),
    ],
)
def test_the_colours_that_chunks_of_a_png_describe_are_converted_to_srgb(colour, chunks, expected):
    assert np.abs(square(png_with(colour, **chunks), 8).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("transfer", [16, 18])
def test_a_png_of_high_dynamic_range_is_unusable(transfer):
    with pytest.raises(Unusable, match="high dynamic range"):
        square(png_with(P3, cICP=bytes([9, transfer, 0, 1])), 8)


def test_an_srgb_profile_needs_no_conversion():
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = smooth(32, 32)
    np.testing.assert_array_equal(square(encode(image, icc_profile=srgb), 32), np.asarray(image))
    assert rgb._transform(srgb, "RGB") is None and rgb._transform(wide_gamut(), "RGB") is not None


def test_a_colour_profile_that_does_not_fit_is_ignored_with_a_warning(caplog):
    image = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    for profile in (b"no profile", wide_gamut()):
        assert (square(encode(image, "JPEG", icc_profile=profile), 8) == 255).all()
    assert caplog.text.count("ignored the colour profile of an image of mode CMYK") == 2


def test_lab_images_are_converted_to_rgb():
    lab = Image.new("LAB", (32, 32), (255, 128, 128))  # L = 100, a = b = 0: white.
    assert square(encode(lab, "TIFF"), 8).min() >= 254
