"""Captioned emoji: 325 subjects in several styles, skin tones and background colours.

An example of a caption is "a firefighter with dark skin, noto style, on a blue background". About
one in ten compositions (subject, tone, background), chosen by a hash, is held out of training. A
data set is a folder with one sheet of glyphs per style, which `prepare.py` writes. Pictures are
drawn from the sheets when they are read.
"""

import functools
import hashlib
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8, UInt64
from PIL import Image

from diffusion_jax import files
from diffusion_jax.config.named import one_of
from diffusion_jax.config.settings import Data
from diffusion_jax.data import records
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.pictures import Pictures, TaskShapes
from diffusion_jax.files import untrusted

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
TONES = {"light": "1F3FB", "medium light": "1F3FC", "medium": "1F3FD", "medium dark": "1F3FE", "dark": "1F3FF"}
TONED = ("hands", "people")
"""Kinds of subjects that are drawn without a skin tone and in each of TONES."""
HELD_OUT_EVERY = 10
TRAIN, NEVER_SHOWN = "train", "never_shown"
CARD = "card.json"
SUBJECTS = pathlib.Path(__file__).with_name("subjects.txt")
GLYPH, COLUMNS = 64, 32
"""Side of a glyph on a sheet in pixels, and number of glyphs in a row of the sheet."""
_VARIANTS = 4  # Number of pictures of a composition in a style. With a skin tone, half as many.


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
    for line in SUBJECTS.read_text(encoding="utf-8").splitlines():
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


def codes() -> list[str]:
    """Return the code points of all emoji, in the order of their glyphs on a sheet."""
    return list(dict.fromkeys(shown.code for shown in compositions()))


def sheet_of(folder: pathlib.Path, style: str) -> pathlib.Path:
    """Return the path of the sheet of a style: COLUMNS glyphs in a row, in the order of codes()."""
    return folder / f"{style}.webp"


def version() -> str:
    """Return a hash of subjects.txt, which determines the glyphs on a sheet and the captions."""
    return hashlib.sha256(SUBJECTS.read_bytes()).hexdigest()


def open_source(data: Data, shapes: TaskShapes) -> Pictures:
    """Return the pictures of a data set, with sides of shapes.size pixels.

    data.path is the folder that `prepare.py` wrote. FOLDER@never_shown names the pictures that are
    held out of training. Raises ValueError if the config needs text embeddings or latent moments,
    or if another version of subjects.txt made the data set.
    """
    if shapes.embeddings or shapes.moments:
        raise ValueError(
            f"data.source is {data.source!r}, which has only pictures with captions, but the "
            f"config needs text embeddings (data.text={data.text}) or VAE moments: set "
            "data.text=txt, or choose another data.source"
        )
    path, split = records.split_of(records.path_of(data))
    one_of(f"data.path={data.path}: the part after @", split or TRAIN, (TRAIN, NEVER_SHOWN))
    return Emoji(files.local(path), split or TRAIN, shapes.size)


class Emoji(Pictures):
    """The pictures of one part of a data set. Each index always gives the same picture.

    A composition has four pictures of each style, or two if it has a skin tone. In all but the
    first, the glyph is shifted at random. The texts of a picture are its `phrasings`.
    """

    def __init__(self, folder: pathlib.Path, split: str, size: int):
        """Read the sheets in `folder`. `split` is TRAIN or NEVER_SHOWN."""
        if not (folder / CARD).is_file():
            raise FileNotFoundError(
                f"{folder} holds no emoji, because it has no {CARD}: write them with python -m "
                f"diffusion_jax.data.prepare emoji --out={folder}"
            )
        card = untrusted.parse_json((folder / CARD).read_bytes())
        if card.get("subjects") != version() or "variants" in card:
            raise ValueError(
                f"another version of this program prepared {folder}: write the emoji into an empty "
                "folder with python -m diffusion_jax.data.prepare emoji"
            )
        self._size, self._paths = size, [sheet_of(folder, style) for style in card["styles"]]
        sheets = {path.stem: untrusted.open_image(path, ["WEBP"]) for path in self._paths}
        self._sheets = {style: sheet.convert("RGBa") for style, sheet in sheets.items()}
        self._place = {code: place for place, code in enumerate(codes())}
        self._rows = [
            (shown, style, variant)
            for shown in compositions()
            if held_out(shown) == (split == NEVER_SHOWN)
            for style in self._sheets
            for variant in range(_VARIANTS // 2 if shown.tone else _VARIANTS)
        ]

    def __len__(self) -> int:
        """Return the number of pictures: 12,154 in TRAIN for each style."""
        return len(self._rows)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], list[Captions]]:
        """Draw the pictures of `indices`, and return them with their phrasings.

        `places` has no effect, because the pictures are not cropped.
        """
        pictures = []
        for row in indices.tolist():
            shown, style, variant = self._rows[row]
            down, right = divmod(self._place[shown.code], COLUMNS)
            corner = GLYPH * right, GLYPH * down
            glyph = self._sheets[style].crop((*corner, corner[0] + GLYPH, corner[1] + GLYPH))
            draws = np.random.RandomState(_hash(self._name(row)) % 2**32).uniform(-1, 1, 2)
            pictures.append(draw(glyph, shown.background, self._size, draws * bool(variant)))
        return np.stack(pictures), self.texts(indices)

    def texts(self, indices: Int[np.ndarray, "B"]) -> list[Captions]:
        """Return the phrasings of each picture without drawing it. The caption is the first."""
        ways = [phrasings(*self._rows[row][:2]) for row in indices.tolist()]
        return [Captions(texts, (1 / len(texts),) * len(texts)) for texts in ways]

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        return np.array([_hash(name) for name in self.names(indices)], np.uint64)

    def groups(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return a hash of each picture's subject: a subject is held out in all of its pictures."""
        return np.array([_hash(self._rows[row][0].subject) for row in indices.tolist()], np.uint64)

    def files(self) -> list[str]:
        return list(map(str, self._paths))

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        return [self._name(row) for row in indices.tolist()]

    def _name(self, row: int) -> str:
        shown, style, variant = self._rows[row]
        return f"{shown.key}_{style}_{variant}"


def draw(
    picture: Image.Image, background: str, size: int, shift: Sequence[int | float] | np.ndarray = (0, 0)
) -> UInt8[np.ndarray, "size size 3"]:
    """Draw a picture with a transparent background on a coloured square of size x size pixels.

    `background` is a key of BACKGROUNDS. The picture fills seven eighths of the side. `shift` moves
    it right and down by this many twentieths of the side.
    """
    sides = np.array(picture.size)
    margin = sides // 7 + 1  # Room for the background and the largest shift, 9/70 of the sides.
    canvas = Image.new("RGBa", tuple((sides + 2 * margin).tolist()))
    canvas.paste(picture.convert("RGBa"), tuple(margin.tolist()))
    corner = margin - sides / 14 - np.array(shift) * sides * 8 / 7 / 20
    box = (*corner.tolist(), *(corner + sides * 8 / 7).tolist())
    shrunk = canvas.resize((size, size), Image.Resampling.BICUBIC, box)
    pixels = np.asarray(shrunk, np.float32)  # [S, S, 4], the colours multiplied by alpha
    paper = np.array(BACKGROUNDS[background], np.float32)
    mixed = pixels[..., :3] + (1 - pixels[..., 3:] / 255) * paper
    return np.rint(mixed.clip(0, 255)).astype(np.uint8)


def _person(shown: Composition) -> str:
    return f"{shown.subject} with {shown.tone} skin" if shown.tone else shown.subject


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
