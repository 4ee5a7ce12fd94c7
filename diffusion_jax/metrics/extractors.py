"""Compute features of images or token ids in batches that are sharded over the mesh.

An extractor consists of two pure functions and weights. `program` makes the function that runs an
extractor on the devices. `extract` calls this function with images from a source, `on_host` with
arrays on the host, and the MLPerf benchmark with images that stay on the devices. The batch size
and the number of devices and processes change the features by no more than float32 rounding.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num, UInt8

from diffusion_jax.devices import sharding
from diffusion_jax.devices.programs import announced
from diffusion_jax.devices.sharding import batch_sharding, place, replicated
from diffusion_jax.metrics import inception, preprocess, weights
from diffusion_jax.metrics.features import FeatureRows, Stream
from diffusion_jax.metrics.weights import InceptionWeights


class Extractor(NamedTuple):
    """A network that maps images to features [B, D].

    Images are [B, H, W, 3], uint8 or float32, in 0..255. A text extractor maps token ids [B, L].
    """

    name: str
    """Name used in score tables, such as "inception", "inception_768" or "clip_vit_l_14"."""
    width: int
    """The number of features D."""
    preprocessing: str
    """Name of the preprocessing, for the card."""
    weights: str
    """A hash of the weights."""
    official: bool
    """Whether the weights are the public Inception weights that define FID."""
    params: Any
    """The weights: a pytree of numpy arrays, the first argument of `apply`."""
    prepare: Callable[[Num[Array, "B ..."]], Array]
    """Maps images of any size to the network's input. It is compiled for each image size."""
    apply: Callable[[Any, Array], Float[Array, "B D"]]
    """Maps (params, prepared images) to features in float32. It is compiled once for all image
    sizes."""
    parts: Mapping[str, int] = {}
    """Maps each kind of features to its number of columns, in the order of the columns.

    An extractor with a single kind of features has {}."""


@runtime_checkable
class Source(Protocol):
    """A source of images of equal size, or of rows of token ids, in host memory."""

    shape: tuple[int, ...]
    """The shape of one image, or of one row of token ids."""
    dtype: Any

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, UInt8[np.ndarray, "B"]]:
        """Return the rows [B, ...] at `indices`, and a status for each row.

        Status 0 means that the row is usable. `reason` explains any other status.
        """
        ...

    def reason(self, status: int) -> str:
        """Return why a row with this nonzero status is skipped.

        Raises ValueError if such a row must not be skipped.
        """
        ...


class Extracted(NamedTuple):
    """The features of a source's images, and the counts of skipped images."""

    stream: Stream
    skipped: dict[str, int]
    """Number of skipped images, keyed by "not_finite" or by the text from Source.reason."""


def inception_extractor(weights: InceptionWeights, mode: str = "pytorch", level: str = "2048") -> Extractor:
    """Return the FID Inception as a feature extractor.

    Args:
        weights: the weights.
        mode: name of the preprocessing, a key of preprocess.INCEPTION.
        level: name of the feature level, a key of inception.LEVELS, or several joined by "+". The
            extractor then returns the features of all levels side by side.

    Raises:
        ValueError: `mode` or `level` is unknown.
    """
    levels = level.split("+")
    for argument, value, names in (
        ("preprocessing", mode, preprocess.INCEPTION),
        *(("level", name, inception.LEVELS) for name in levels),
    ):
        if value not in names:
            raise ValueError(f"Inception has no {argument} {value!r}: choose from {', '.join(names)}")

    def apply(params, x):
        outputs = inception.apply(params, x)
        return jnp.concatenate([inception.level(outputs, name) for name in levels], -1)

    names = ["inception" if name == "2048" else f"inception_{name}" for name in levels]
    widths = [inception.LEVELS[name] for name in levels]
    return Extractor(
        name=names[0],
        width=sum(widths),
        preprocessing=mode,
        weights=weights.digest,
        official=weights.official and levels[0] == "2048",
        params=weights.params,
        prepare=preprocess.INCEPTION[mode],
        apply=apply,
        parts={name: width for name, width in zip(names, widths, strict=True) if len(names) > 1},
    )


def load_inception(path: str = "", mode: str = "pytorch", level: str = "2048") -> Extractor:
    """Load the FID Inception from a weight file and return it as a feature extractor.

    If `path` is "", the public weights are downloaded. Raises FileNotFoundError if the file is
    missing or the download fails, and ValueError if it holds other weights, or `mode` or `level` is
    unknown.
    """
    return inception_extractor(weights.load(path), mode, level)


def split(extractor: Extractor, rows: FeatureRows) -> dict[str, FeatureRows]:
    """Split an extractor's features [N, D] into kinds of features. Return {kind: features}.

    The kinds are the keys of extractor.parts. If extractor.parts is empty, the result has a single
    entry, whose key is the extractor's name.
    """
    if not extractor.parts:
        return {extractor.name: rows}
    ends = np.cumsum([*extractor.parts.values()])[:-1]
    return dict(zip(extractor.parts, np.split(rows, ends, axis=1), strict=True))


def extract(
    extractor: Extractor,
    source: Source,
    mesh: Mesh,
    *,
    batch_size: int = 64,
    progress: Callable[[int], None] = lambda done: None,
) -> Extracted:
    """Compute the features of all usable rows of a source, on the devices of a mesh.

    Every process receives all features, in the order of the rows. `progress` is called with the
    number of rows done so far.
    """
    run = make_extract(extractor, mesh, batch_size=batch_size)
    return run(source, range(len(source)), progress)


def make_extract(
    extractor: Extractor, mesh: Mesh, *, batch_size: int = 64, keep: bool = True
) -> Callable[..., Extracted]:
    """Return a function extract(source, rows, progress) that computes the features of some rows.

    `rows` is a range of row indices of the source. `keep`, `progress` and the result are those of
    `extract`. The programs are compiled only once, even if the returned function is called several
    times. Each process reads only the rows that its local devices need. It reads the next batch
    while the devices compute.
    """
    run, params = program(extractor, mesh), _replicated_params(extractor, mesh)
    rows_sharding = batch_sharding(mesh)
    share = jax.jit(lambda status: status, out_shardings=replicated(mesh))
    size = _padded_size(batch_size, mesh)  # All batches have this size and share a program.

    def batches(source: Source, rows: range) -> Iterator[tuple[FeatureRows, np.ndarray]]:
        """Yield the features and statuses of each global batch, the same in every process."""
        pending = None
        for start in range(rows.start, rows.stop, batch_size):
            end = min(start + batch_size, rows.stop)
            images, status = _read(source, np.minimum(np.arange(start, start + size), end - 1), rows_sharding)
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

    The caller passes the extractor's params, placed on the devices. The features of an image with
    non-finite pixels are NaN.
    """
    rows_sharding = batch_sharding(mesh)

    def prepare(images):
        # Check the input, because the network's maximum operations might hide a NaN.
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


def on_host(extractor: Extractor, batch_size: int | None = None) -> Callable[[np.ndarray], FeatureRows]:
    """Return a function that maps images or token ids [B, ...] on the host to features [B, D].

    The devices process `batch_size` rows at a time; None stands for all rows at once. Every process
    must call the returned function with the same array.
    """
    mesh = sharding.make_mesh()
    run, params = program(extractor, mesh), _replicated_params(extractor, mesh)

    def run_rows(rows: np.ndarray) -> FeatureRows:
        size = _padded_size(batch_size or len(rows), mesh)
        batches = (rows[np.arange(i, i + size) % len(rows)] for i in range(0, len(rows), size))
        parts = [np.asarray(run(params, place(b, batch_sharding(mesh)))) for b in batches]
        return np.concatenate(parts)[: len(rows)]

    return run_rows


def _replicated_params(extractor: Extractor, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: place(leaf, replicated(mesh)), extractor.params)


def _padded_size(size: int, mesh: Mesh) -> int:
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    return -(-size // ways) * ways


def _read(source: Source, indices: np.ndarray, rows_sharding: Any) -> tuple[jax.Array, jax.Array]:
    """Return a global batch and its statuses. Each process reads only its local devices' rows."""
    read = functools.cache(lambda start, stop: source.read(indices[start:stop]))

    def part(number: int) -> Callable[[Any], np.ndarray]:
        return lambda index: read(*index[0].indices(len(indices))[:2])[number]

    shape = (len(indices), *source.shape)
    images = jax.make_array_from_callback(shape, rows_sharding, part(0), dtype=source.dtype)
    return images, jax.make_array_from_callback(shape[:1], rows_sharding, part(1), dtype=np.uint8)


def _fetch(arrays: tuple[jax.Array, jax.Array], count: int) -> tuple[FeatureRows, np.ndarray]:
    rows, status = (np.asarray(array)[:count] for array in arrays)
    return rows, status
