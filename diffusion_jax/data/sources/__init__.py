"""Open data sources by their names in configs, and import a source's module on first use.

A source is a module with a function open_source(data, shapes). The function returns either Records
(encoded images, which this module decodes) or Pictures (decoded images). A config names a source by
its name in SOURCES, or by its module, such as data.source="my_package.my_source"
(config.own_modules decides which modules are imported). Such a module may also define

    prompts() -> list[str]                                        prompts to evaluate models with
    open_scorer(size, num_seen, num_heldout, metrics) -> Scorer   an evaluate.scorers.Scorer

A run that uses such a source is scored without a file of prompts. diffusion_jax/examples/digits is
an example.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from diffusion_jax.config import own_modules, picture_fields
from diffusion_jax.config.named import one_of
from diffusion_jax.config.settings import Data
from diffusion_jax.data import decoding, engines, home, storage
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.pictures import DecodedPictures, Pictures, TaskShapes
from diffusion_jax.data.records import Records
from diffusion_jax.files import url_secrets

SOURCES = {
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
    data: Data, size: int, *, embeddings: tuple[int, int] | None = None, moments: tuple[int, int, int] | None = None
) -> Pictures:
    """Open the data set of a config's data group, as decoded pictures with texts.

    Args:
        data: the data group.
        size: height and width of the pictures in pixels.
        embeddings: (tokens, width) if the texts are embeddings; None if they are captions.
        moments: (h, w, 2 Z) if the pictures are an autoencoder's moments with Z latent channels;
            None if they are pixels.

    Raises:
        ValueError: the source is unknown or cannot read the data.
        OSError: the data are missing.
    """
    data, shapes = _urls(url_secrets.hide, data), TaskShapes(size, embeddings, moments)
    pictures = _open_whole(data, shapes)
    pictures.data = data
    again = _urls(url_secrets.reveal, data)
    return engines.record_call(pictures, _open_again, _open_whole, again, shapes)


def open_records(data: Data) -> Records:
    """Open a config's data source as encoded records, without decoding any image.

    Raises:
        ValueError: the source is unknown, cannot read the data, or has no image files.
        OSError: the data are missing.
    """
    data = _urls(url_secrets.hide, data)
    source = _open(data, TaskShapes(size=64))  # The size does not matter: nothing is decoded.
    if not isinstance(source, Records):
        raise ValueError(
            f"the data source {data.source!r} has no image files, but this command reads image "
            "files: choose another source"
        )
    again = _urls(url_secrets.reveal, data)
    return engines.record_call(source, _open_again, open_records, again)


def open_named(name: str) -> Records | None:
    """Open the encoded records of a data source named "SOURCE:PATH" or "SOURCE:PATH::TEXT".

    An example is "tfds:coco_captions@val::captions/text". The result is None if `name` has another
    form or SOURCE is not in SOURCES.
    """
    source, _, location = name.partition(":")
    return open_records(named(name)) if source in SOURCES and location else None


def named(name: str) -> Data:
    """Convert a flag's "SOURCE:PATH::TEXT" to data settings: data.source, data.path and data.text.

    "::TEXT" is optional. Damaged and uncaptioned records are left out.

    Raises:
        ValueError: the source is unknown, or is a module that cannot be imported or defines no
            `open_source`.
    """
    source, _, location = name.partition(":")
    own_modules.trust(source)
    if own_module(source) is None:
        one_of("data source", source, SOURCES)
    path, _, text = location.partition("::")
    data = Data(source, path, uncaptioned="drop", max_broken=1.0)
    return data._replace(text=text) if text else data


def own_module(source: str) -> ModuleType | None:
    """Import and return the user's module `source`, or return None for a built-in source.

    A user's module has a dot in its name, such as "my_package.my_source".

    Raises:
        ValueError: the module cannot be imported, defines no `open_source`, or configs may not name
            it (see `own_modules`).
    """
    if "." not in source:
        return None
    try:
        module = own_modules.find("data.source", source, source)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data.source is {source!r}, which cannot be imported: {error}; check the name, and "
            "add the module's folder to PYTHONPATH"
        ) from error
    if not hasattr(module, "open_source"):
        raise ValueError(
            f"data.source is {source!r}, a module without open_source: define the function "
            "open_source(data, shapes) in it"
        )
    return module


def own_prompts(source: str) -> list[str]:
    """Return the evaluation prompts that a source's module defines, or [] if it defines none."""
    return getattr(own_module(source), "prompts", list)()


def _open_again(open_data: Callable[..., Any], data: Data, *shapes: TaskShapes) -> Any:
    """Open data in another process, after the command has opened them."""
    own_modules.trust_data(data._asdict())
    return open_data(_urls(url_secrets.hide, data), *shapes)


def _urls(function: Callable[[Any], Any], data: Data) -> Data:
    """Return `data` with `function` applied to the fields that can hold URLs.

    Other fields are not read, so that the rehearsal can name those without effect.
    """
    old = {"path": data.path, "prior": data.prior, "mixture": data.mixture}
    new = {name: function(value) for name, value in old.items()}
    return data if new == old else data._replace(**new)


def _open_whole(data: Data, shapes: TaskShapes) -> Pictures:
    pictures = _open_pictures(data, shapes)
    return _with_prior(pictures, data, shapes) if data.prior else pictures


def _open_pictures(data: Data, shapes: TaskShapes) -> Pictures:
    source = _open(data, shapes)
    if isinstance(source, Pictures):
        if data.fields and data.source != "mixture" and type(source).columns is Pictures.columns:
            raise ValueError(
                f"data.fields is {data.fields}, but the data source {data.source!r} gives no "
                "numbers: leave data.fields empty, or define `columns` in the source"
            )
        if data.loss_mask and data.source != "mixture":
            raise ValueError(
                f"data.loss_mask is {data.loss_mask!r}, but the data source {data.source!r} has no "
                "image files: set data.loss_mask=''"
            )
        return source
    crop = functools.partial(
        decoding.crop_masked if data.loss_mask else decoding.crop,
        shape=(shapes.size, shapes.size),
        resize=data.resize,
        min_size=data.min_size,
        max_aspect=data.max_aspect,
    )
    return DecodedPictures(source, crop, data)


def _open(data: Data, shapes: TaskShapes) -> Records | Pictures:
    if data.source in ("arrow", "huggingface", "arrayrecord", "tfds"):
        rule = home.rule(data.source, data.text, picture_fields.read(data.fields))
        if (table := home.saved(data.path, rule)) is not None:
            return table
    return _opener(data.source)(data, shapes)


def _opener(source: str) -> Callable[[Data, TaskShapes], Records | Pictures]:
    if module := own_module(source):
        return module.open_source
    if source not in SOURCES:
        raise ValueError(
            f"the data source {source!r} is unknown: choose from {', '.join(SOURCES)}, or name a "
            "module of your own that defines open_source, such as my_package.my_source"
        )
    module, _, function = SOURCES[source].partition(":")
    return getattr(importlib.import_module(module), function)


def _with_prior(pictures: Pictures, data: Data, shapes: TaskShapes) -> Pictures:
    """Return a mixture that draws equally often from `pictures` and from the folder data.prior.

    The pictures in data.prior have the loss weight data.prior_weight. All others have weight 1.
    """
    if data.source == "mixture" or shapes.embeddings or shapes.moments:
        raise ValueError(
            f"data.prior is {data.prior!r}, but it cannot be combined with a mixture, moments or "
            "text embeddings: set data.prior to '', or use one source of pictures with captions"
        )
    names = storage.walk(data.prior, Inventory()) if storage.is_folder(data.prior) else ["x.jsonl"]
    if not any(name.lower().endswith(".jsonl") for name in names):
        raise ValueError(
            f"data.prior is {data.prior!r}, a folder without a .jsonl with the prompts of its "
            "pictures: name a folder that the command `sample` wrote"
        )
    # "drop" leaves out sheet.png, the overview that sampling writes. All fields are unknown.
    # Drawn pictures are opaque, so all of their pixels count.
    data = data._replace(loss_mask=data.loss_mask and "alpha")
    changes = {"path": data.prior, "text": "jsonl:text", "uncaptioned": "drop", "fields": ()}
    prior = _open_pictures(data._replace(source="folder", min_chars=0, min_size=0, **changes), shapes)
    return Mixture([pictures, prior], (1, 1), (1, data.prior_weight))


def _open_mixture(data: Data, shapes: TaskShapes) -> Pictures:
    """Open all parts of data.mixture as one mixture. Other fields of `data` apply to every part."""
    _check_mixture(data.mixture)
    parts = [
        _open_pictures(data._replace(source=source, path=path, text=text), shapes)
        for _, source, path, text in data.mixture
    ]
    return Mixture(parts, [weight for weight, *_ in data.mixture])


def _check_mixture(mixture: Sequence[Any]) -> None:
    for part in mixture:
        complete = isinstance(part, tuple | list) and len(part) == 4
        if not complete or not isinstance(part[0], int | float) or part[0] <= 0:
            raise ValueError(
                f"data.mixture holds {part!r}: each part must be (weight, source, path, text), "
                "such as (0.5, 'webdataset', 'shards', 'txt'), with a weight above 0"
            )
        if part[1] == "mixture":
            raise ValueError("data.mixture contains a mixture: list its parts directly")
    if not mixture:
        raise ValueError("data.mixture is empty: the data source 'mixture' needs at least one part")
