"""The data sources by their names in configs; a source's module is imported when it is opened.

A source is a module with open_source(data, shapes) -> Records (files of images, which are decoded
here) or Pictures (which a source makes itself), and a line of SOURCES.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from diffusion_jax import engines
from diffusion_jax.config.named import one_of
from diffusion_jax.config.settings import Data
from diffusion_jax.data import transforms
from diffusion_jax.data.pictures import Decoded, Mixture, Pictures, Shapes
from diffusion_jax.data.records import Records

SOURCES = {
    "digits": "diffusion_jax.examples.digits.pictures:open_source",
    "folder": "diffusion_jax.data.sources.folder:open_source",
    "webdataset": "diffusion_jax.data.sources.webdataset:open_source",
    "arrayrecord": "diffusion_jax.data.sources.arrayrecord:open_source",
    "arrow": "diffusion_jax.data.sources.arrow:open_source",
    "huggingface": "diffusion_jax.data.sources.arrow:open_any",
    "tfds": "diffusion_jax.data.sources.tfds:open_source",
    "synthetic": "diffusion_jax.data.sources.synthetic:open_source",
    "moments": "diffusion_jax.data.sources.moments:open_source",
    "mixture": "diffusion_jax.data.sources:_open_mixture",
}


def open_pictures(
    data: Data,
    size: int,
    *,
    embeddings: tuple[int, int] | None = None,
    moments: tuple[int, int, int] | None = None,
) -> Pictures:
    """The pictures of a config's data group, of the Shapes that a task takes.

    ValueError or OSError for a source, or data of it, that there are not.
    """
    pictures = _open_whole(data, shapes := Shapes(size, embeddings, moments))
    return engines.made_by(pictures, _open_whole, data, shapes)


def open_records(data: Data) -> Records:
    """The records of a source of files, as they lie there; ValueError for any other source."""
    source = _open(data, Shapes(size=64))  # No picture is made.
    if not isinstance(source, Records):
        raise ValueError(f"the data source {data.source!r} has no files of images")
    return engines.made_by(source, open_records, data)


def open_named(name: str) -> Records | None:
    """The records of "SOURCE:PATH" or "SOURCE:PATH::TEXT", such as prompts; None for other names.

    For example "tfds:coco_captions@val::captions/text".
    """
    source, _, rest = name.partition(":")
    return open_records(named(name)) if source in SOURCES and rest else None


def named(name: str) -> Data:
    """The data group of "SOURCE:PATH::TEXT", of which not all need be said.

    Records that are damaged or have no caption are left out. ValueError for a
    source that there is not.
    """
    source, _, rest = name.partition(":")
    one_of("data source", source, SOURCES)
    path, _, text = rest.partition("::")
    data = Data(source, path, uncaptioned="drop", max_broken=1.0)
    return data._replace(text=text) if text else data


def _open_whole(data: Data, shapes: Shapes) -> Pictures:
    pictures = _open_pictures(data, shapes)
    return _with_prior(pictures, data, shapes) if data.prior else pictures


def _open_pictures(data: Data, shapes: Shapes) -> Pictures:
    source = _open(data, shapes)
    if isinstance(source, Pictures):
        return source
    square = functools.partial(
        transforms.square,
        size=shapes.size,
        resize=data.resize,
        min_size=data.min_size,
        max_aspect=data.max_aspect,
    )
    return Decoded(source, square, data)


def _open(data: Data, shapes: Shapes) -> Records | Pictures:
    if data.source not in SOURCES:
        known = ", ".join(SOURCES)
        raise ValueError(f"there is no data source {data.source!r}: the sources are {known}")
    module, _, function = SOURCES[data.source].partition(":")
    return getattr(importlib.import_module(module), function)(data, shapes)


def _with_prior(pictures: Pictures, data: Data, shapes: Shapes) -> Pictures:
    """Row by row these and those of data.prior, which count data.prior_weight in the loss."""
    if data.source == "mixture" or shapes.embeddings or shapes.moments:
        raise ValueError(
            f"data.prior is {data.prior!r}, which joins pictures with captions: not a mixture, "
            "moments or embeddings. Name one source of pictures, or leave it empty"
        )
    drawn = {"path": data.prior, "text": "jsonl:text", "uncaptioned": "drop"}  # But for sheet.png.
    prior = _open_pictures(data._replace(source="folder", min_chars=0, min_size=0, **drawn), shapes)
    return Mixture([pictures, prior], (1, 1), (1, data.prior_weight))


def _open_mixture(data: Data, shapes: Shapes) -> Pictures:
    """Each part is opened with the fields that `data` has for all."""
    _check_mixture(data.mixture)
    parts = [
        _open_pictures(data._replace(source=source, path=path, text=text), shapes)
        for _, source, path, text in data.mixture
    ]
    return Mixture(parts, [weight for weight, *_ in data.mixture])


def _check_mixture(mixture: Sequence[Any]) -> None:
    """ValueError unless it is parts (weight, source, path, text) with weights above 0."""
    for part in mixture:
        whole = isinstance(part, tuple | list) and len(part) == 4
        if not whole or not isinstance(part[0], int | float) or part[0] <= 0:
            raise ValueError(
                f"data.mixture holds {part!r}: each part is (weight, source, path, text), "
                "such as (0.5, 'webdataset', 'shards', 'txt'), with a weight above 0"
            )
        if part[1] == "mixture":
            raise ValueError("data.mixture holds a mixture: write its parts in its place")
    if not mixture:
        raise ValueError("the data source 'mixture' needs data.mixture: its parts")
