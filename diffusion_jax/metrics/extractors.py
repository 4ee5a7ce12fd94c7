"""Extractors: images (or token ids) to features, batch by batch over the mesh.

An extractor is two pure functions and its weights. `program` runs it on the devices, and everything
that wants features calls that: folders of images (`extract`), arrays of the host (`on_host`) and
samplers, whose images need not leave the devices. The batch that an image lies in and the number of
devices and processes change its features by float32's rounding at most.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num, UInt8

from diffusion_jax.machine import sharding
from diffusion_jax.machine.programs import announced
from diffusion_jax.machine.sharding import batch_sharding, place, replicated
from diffusion_jax.metrics import inception, preprocess, weights
from diffusion_jax.metrics.features import Rows, Stream
from diffusion_jax.metrics.weights import Weights


class Extractor(NamedTuple):
    """A network from images [B, H, W, 3] on 0..255, uint8 or float32, to features [B, D]."""

    name: str
    """Stands in the names of scores: "inception", "inception_768", "clip_vit_l_14" ..."""
    width: int
    """D."""
    preprocessing: str
    weights: str
    """The weights' hash."""
    official: bool
    """Whether these are the very weights that FID is defined with."""
    params: Any
    """A pytree of arrays in numpy; give them to `apply` as an argument."""
    prepare: Callable[[Num[Array, "B ..."]], Array]
    """Any size of image to the network's input; small, compiled for each size."""
    apply: Callable[[Any, Array], Float[Array, "B D"]]
    """The network; one program whatever the images' size. Float32 throughout."""


@runtime_checkable
class Source(Protocol):
    """Images of one size, or rows of token ids, read on the host."""

    shape: tuple[int, ...]
    """The shape of one image or row."""
    dtype: Any

    def __len__(self) -> int:
        """The number of images or rows."""
        ...

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, UInt8[np.ndarray, "B"]]:
        """Rows, and 0 for each that is usable or an entry of `reasons` by its number; see below."""
        ...

    def reason(self, status: int) -> str:
        """The name under which a status other than 0 is counted; ValueError if it must not be."""
        ...


class Extracted(NamedTuple):
    """The features of a source's images."""

    stream: Stream
    skipped: dict[str, int]
    """Numbers of images without features, by reason: "not_finite" and the source's own."""


def inception_extractor(weights: Weights, mode: str = "pytorch", level: str = "2048") -> Extractor:
    """The FID Inception; `mode` is a key of preprocess.INCEPTION, `level` one of inception.LEVELS.

    ValueError that names what there is.
    """
    for what, value, known in (
        ("preprocessing", mode, preprocess.INCEPTION),
        ("level", level, inception.LEVELS),
    ):
        if value not in known:
            raise ValueError(f"there is no {what} {value!r}: there are {', '.join(known)}")

    def apply(params, x):
        return inception.level(inception.apply(params, x), level)

    return Extractor(
        name="inception" if level == "2048" else f"inception_{level}",
        width=inception.LEVELS[level],
        preprocessing=mode,
        weights=weights.digest,
        official=weights.official and level == "2048",
        params=weights.params,
        prepare=preprocess.INCEPTION[mode],
        apply=apply,
    )


def load_inception(path: str, mode: str = "pytorch", level: str = "2048") -> Extractor:
    """`inception_extractor` with the weights of a file, of `weights.load`."""
    return inception_extractor(weights.load(path), mode, level)


def extract(
    extractor: Extractor,
    source: Source,
    mesh: Mesh,
    *,
    batch_size: int = 64,
    keep: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> Extracted:
    """The features of all usable rows of a source, in its order, the same in every process."""
    run = make_extract(extractor, mesh, batch_size=batch_size, keep=keep)
    return run(source, range(len(source)), progress)


def make_extract(
    extractor: Extractor, mesh: Mesh, *, batch_size: int = 64, keep: bool = True
) -> Callable[..., Extracted]:
    """Returns extract(source, rows, progress) -> the features of a range of a source's rows.

    Programs are compiled once. A process reads the rows of its own devices alone, the next ones
    while the devices compute.
    """
    run, params = program(extractor, mesh), _everywhere(extractor, mesh)
    where = batch_sharding(mesh)
    share = jax.jit(lambda status: status, out_shardings=replicated(mesh))
    size = _filled(batch_size, mesh)  # One program does for all batches.

    def batches(source: Source, rows: range) -> Iterator[tuple[Rows, np.ndarray]]:
        """Features and statuses, of all processes' images in each process."""
        pending = None
        for start in range(rows.start, rows.stop, batch_size):
            end = min(start + batch_size, rows.stop)
            images, status = _read(
                source, np.minimum(np.arange(start, start + size), end - 1), where
            )
            arrays = run(params, images), share(status)
            if pending is not None:
                yield _fetch(*pending)
            pending = arrays, end - start
        if pending is not None:
            yield _fetch(*pending)

    def extract(source, rows, progress=lambda done: None):
        stream, skipped, done = Stream(extractor.width, keep=keep), {}, 0
        for features, status in batches(source, rows):
            for value in status[status != 0].tolist():
                reason = source.reason(value)
                skipped[reason] = skipped.get(reason, 0) + 1
            stream.add(features[status == 0])
            progress(done := done + len(status))
        if stream.not_finite:
            skipped["not_finite"] = stream.not_finite
        return Extracted(stream, skipped)

    return extract


def program(extractor: Extractor, mesh: Mesh) -> Callable[[Any, jax.Array], jax.Array]:
    """run(params, images) -> features [B, D] in every process, of images over all devices.

    `params` are the extractor's, where the caller placed them. An image with a value that is not
    finite has features that are not.
    """
    where = batch_sharding(mesh)

    def prepare(images):
        # Marked here, since maxima in a network might hide a NaN.
        return extractor.prepare(images), jnp.isfinite(images.reshape(len(images), -1)).all(1)

    prepare = announced(jax.jit(prepare, out_shardings=(where, where)))
    what = f"the extractor {extractor.name}"
    apply = announced(jax.jit(extractor.apply, out_shardings=where), what)
    mark = lambda rows, fine: jnp.where(fine[:, None], rows, jnp.nan)
    gather = announced(jax.jit(mark, out_shardings=replicated(mesh)))

    def run(params: Any, images: jax.Array) -> jax.Array:
        prepared, fine = prepare(images)
        return gather(apply(params, prepared), fine)

    return run


def on_host(extractor: Extractor) -> Callable[[np.ndarray], Rows]:
    """run(images or ids [B, ...]) -> features [B, D], of arrays that every process has."""
    mesh = sharding.make_mesh()
    run, params = program(extractor, mesh), _everywhere(extractor, mesh)

    def run_rows(rows: np.ndarray) -> Rows:
        filled = rows[np.arange(_filled(len(rows), mesh)) % len(rows)]
        return np.asarray(run(params, place(filled, batch_sharding(mesh))))[: len(rows)]

    return run_rows


def _everywhere(extractor: Extractor, mesh: Mesh) -> Any:
    """Copies the weights to every device."""
    return jax.tree.map(lambda leaf: place(leaf, replicated(mesh)), extractor.params)


def _filled(number: int, mesh: Mesh) -> int:
    """So many rows or a few more, such that all devices get as many."""
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    return -(-number // ways) * ways


def _read(source: Source, indices: np.ndarray, where: Any) -> tuple[jax.Array, jax.Array]:
    """A batch and its statuses; the parts of other processes' devices are not read here."""
    read = functools.cache(lambda start, stop: source.read(indices[start:stop]))

    def part(which: int) -> Callable[[Any], np.ndarray]:
        return lambda index: read(*index[0].indices(len(indices))[:2])[which]

    shape = (len(indices), *source.shape)
    images = jax.make_array_from_callback(shape, where, part(0), dtype=source.dtype)
    return images, jax.make_array_from_callback(shape[:1], where, part(1), dtype=np.uint8)


def _fetch(arrays: tuple[jax.Array, jax.Array], count: int) -> tuple[Rows, np.ndarray]:
    rows, status = (np.asarray(array)[:count] for array in arrays)
    return rows, status
