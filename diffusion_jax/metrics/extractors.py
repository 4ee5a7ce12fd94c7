"""Extractors compute features of images (or token ids) in batches sharded over the mesh.

An extractor consists of two pure functions and weights. `program` runs it on the devices; it is
used by `extract` (images in files), `on_host` (arrays on the host) and samplers, whose images stay
on the devices. The batch and the number of devices and processes change features by no more than
float32 rounding.
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
    """A name used in scores: "inception", "inception_768", "clip_vit_l_14" ..."""
    width: int
    """D."""
    preprocessing: str
    weights: str
    """A hash of the weights."""
    official: bool
    """Whether these are the weights that define FID."""
    params: Any
    """A pytree of numpy arrays, to be passed to `apply`."""
    prepare: Callable[[Num[Array, "B ..."]], Array]
    """Maps images of any size to the network's input; compiled for each size."""
    apply: Callable[[Any, Array], Float[Array, "B D"]]
    """The network in float32, a single program for all image sizes."""


@runtime_checkable
class Source(Protocol):
    """Images of one size, or rows of token ids, read on the host."""

    shape: tuple[int, ...]
    """The shape of one image or row."""
    dtype: Any

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, UInt8[np.ndarray, "B"]]:
        """Return rows, and a status for each: 0 if it is usable, else an argument of `reason`."""
        ...

    def reason(self, status: int) -> str:
        """Return the reason for a status other than 0. Raises ValueError if it is an error."""
        ...


class Extracted(NamedTuple):
    """The features of a source's images."""

    stream: Stream
    skipped: dict[str, int]
    """Number of images without features by reason: "not_finite", or a reason of the source."""


def inception_extractor(weights: Weights, mode: str = "pytorch", level: str = "2048") -> Extractor:
    """Return the FID Inception as an extractor.

    Args:
        weights: the weights.
        mode: the preprocessing, a key of preprocess.INCEPTION.
        level: the level of features, a key of inception.LEVELS.

    Raises:
        ValueError: `mode` or `level` is unknown.
    """
    for argument, value, names in (
        ("preprocessing", mode, preprocess.INCEPTION),
        ("level", level, inception.LEVELS),
    ):
        if value not in names:
            raise ValueError(
                f"Inception has no {argument} {value!r}: choose from {', '.join(names)}"
            )

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
    """Load the FID Inception's weights from a file (see weights.load) and return its extractor."""
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
    """Return the features of all usable rows of a source, in order, in every process."""
    run = make_extract(extractor, mesh, batch_size=batch_size, keep=keep)
    return run(source, range(len(source)), progress)


def make_extract(
    extractor: Extractor, mesh: Mesh, *, batch_size: int = 64, keep: bool = True
) -> Callable[..., Extracted]:
    """Return a function extract(source, rows, progress) that computes features of a range of rows.

    Programs are compiled once. Each process reads only the rows of its own devices, and reads the
    next batch while the devices compute.
    """
    run, params = program(extractor, mesh), _replicated_params(extractor, mesh)
    rows_sharding = batch_sharding(mesh)
    share = jax.jit(lambda status: status, out_shardings=replicated(mesh))
    size = _padded_size(batch_size, mesh)  # All batches have this size and share a program.

    def batches(source: Source, rows: range) -> Iterator[tuple[Rows, np.ndarray]]:
        """Yield features and statuses of all processes' images in each process."""
        pending = None
        for start in range(rows.start, rows.stop, batch_size):
            end = min(start + batch_size, rows.stop)
            images, status = _read(
                source, np.minimum(np.arange(start, start + size), end - 1), rows_sharding
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
    """Return a function run(params, images) that maps sharded images to replicated features [B, D].

    The caller places the extractor's `params` on the devices. If an image is not finite, its
    features are NaN.
    """
    rows_sharding = batch_sharding(mesh)

    def prepare(images):
        # Checked before the network, whose maxima might hide a NaN.
        return extractor.prepare(images), jnp.isfinite(images.reshape(len(images), -1)).all(1)

    prepare = announced(jax.jit(prepare, out_shardings=(rows_sharding, rows_sharding)))
    description = f"the extractor {extractor.name}"
    apply = announced(jax.jit(extractor.apply, out_shardings=rows_sharding), description)
    mark = lambda rows, is_finite: jnp.where(is_finite[:, None], rows, jnp.nan)
    gather = announced(jax.jit(mark, out_shardings=replicated(mesh)))

    def run(params: Any, images: jax.Array) -> jax.Array:
        prepared, is_finite = prepare(images)
        return gather(apply(params, prepared), is_finite)

    return run


def on_host(extractor: Extractor) -> Callable[[np.ndarray], Rows]:
    """Return a function that maps images or ids [B, ...] on the host to features [B, D].

    Every process must call it with the same array.
    """
    mesh = sharding.make_mesh()
    run, params = program(extractor, mesh), _replicated_params(extractor, mesh)

    def run_rows(rows: np.ndarray) -> Rows:
        padded = rows[np.arange(_padded_size(len(rows), mesh)) % len(rows)]
        return np.asarray(run(params, place(padded, batch_sharding(mesh))))[: len(rows)]

    return run_rows


def _replicated_params(extractor: Extractor, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: place(leaf, replicated(mesh)), extractor.params)


def _padded_size(size: int, mesh: Mesh) -> int:
    """Round a batch size up to a multiple of the number of shards."""
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    return -(-size // ways) * ways


def _read(source: Source, indices: np.ndarray, rows_sharding: Any) -> tuple[jax.Array, jax.Array]:
    """Return a global batch and its statuses; each process reads the rows of its own devices."""
    read = functools.cache(lambda start, stop: source.read(indices[start:stop]))

    def part(number: int) -> Callable[[Any], np.ndarray]:
        return lambda index: read(*index[0].indices(len(indices))[:2])[number]

    shape = (len(indices), *source.shape)
    images = jax.make_array_from_callback(shape, rows_sharding, part(0), dtype=source.dtype)
    return images, jax.make_array_from_callback(shape[:1], rows_sharding, part(1), dtype=np.uint8)


def _fetch(arrays: tuple[jax.Array, jax.Array], count: int) -> tuple[Rows, np.ndarray]:
    rows, status = (np.asarray(array)[:count] for array in arrays)
    return rows, status
