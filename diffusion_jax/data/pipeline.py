"""Make training batches: order the data, prefetch in threads, and resume at a saved position.

The training picture at sample n (counted from the start of the run), and the choice among its
captions, depend only on the data and on (seed, n). So a run may continue at any sample with another
batch size. Every epoch is a new permutation, and neither the number of processes nor a restart
changes the order. With aspect buckets, the order also depends on the batch size.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float, Int, UInt64

from diffusion_jax.config import named, picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import CROPS, Data, Run
from diffusion_jax.data import aspect_buckets, captions, fingerprints
from diffusion_jax.data.aspect_buckets import Buckets
from diffusion_jax.data.captions import Tags
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.pictures import Columns, PictureArray, Pictures
from diffusion_jax.data.split import hashed, split
from diffusion_jax.devices.sharding import batch_sharding

HostBatch = dict[str, np.ndarray]
_SAMPLE = 64  # Number of captions in which tags are looked for.
LOSS_MASK = "loss_mask"
"""Batch key of the weights of pixels in the loss, uint8 [B, H, W], with data.loss_mask."""
LOSS_WEIGHT = "loss_weight"
"""Batch key of the loss weights [B]. A batch has this key only if the weights differ."""
Tokenize = Callable[[Sequence[Any]], dict[str, np.ndarray]]
Order = Any
"""A grain.MapDataset. Grain is imported on use, because drawing works without it."""


class Apart(NamedTuple):
    """The pictures that are held out of training, and a function that makes batches of them."""

    pictures: Pictures
    make: Callable[[PictureArray, Sequence[Any]], HostBatch]
    """A function make(pictures, texts) that returns a batch."""
    fields: Sequence[Field] = ()
    """The numbers that belong to the batch."""

    def read(self, count: int) -> tuple[UInt64[np.ndarray, "R"], HostBatch]:
        """Read up to `count` held-out pictures; return (keys, batch) of those that are usable.

        Pictures are chosen by a hash of their keys, so adding records changes the choice little.
        If a picture has several captions, its key chooses one of them.
        """
        rows = np.arange(len(self.pictures))
        first = np.argsort(hashed(self.pictures.keys(rows)), kind="stable")[:count]
        usable, images, texts = self.pictures.usable(np.sort(first))
        keys = self.pictures.keys(usable)
        batch = self.make(images, captions.chosen(texts, 0, keys.tolist()))
        if self.fields:
            batch |= numbers_of(self.pictures.columns(usable).numbers, self.fields)
        return keys, batch


class OtherData(ValueError):
    """Error: the data or the seed changed, so the data order cannot continue.

    With aspect buckets, the order depends on the batch size, too.
    """


class Batches:
    """An endless iterator over training batches. Each process gets its own rows of a batch.

    The iterator owns prefetching threads: call `close`, or use it as a context manager.
    """

    def __init__(
        self,
        order: Callable[[int], Order],
        pictures: Pictures,
        *,
        batch_size: int,
        seed: int,
        num_threads: int,
        make: Callable[[Int[np.ndarray, "B"]], HostBatch],
        buckets: Buckets | None = None,
        tags: Tags = captions.ALL_TAGS,
    ):
        """Start the prefetching threads.

        Args:
            order: maps a sample number m to a data set. Its item i is the batch that starts at
                sample m + i * batch_size, with the rows of this process only.
            pictures: the data set that the batches are made from.
            batch_size: number of rows of all processes together.
            seed: seed of the data order.
            num_threads: number of prefetching threads.
            make: a function that maps the indices of pictures, all of one bucket, to a batch.
            buckets: the bucket of each picture; None if all pictures are squares of one size.
            tags: what happens to the tags of captions.
        """
        self.pictures, self._make, self._buckets, self._tags = pictures, make, buckets, tags
        self.apart: Apart | None = None
        self._batch_size = batch_size
        self.digests = fingerprints.digests(pictures)
        self._identity: dict[str, Any] = {"seed": seed, "pictures": len(pictures)}
        if isinstance(pictures, Mixture):
            self._identity |= {"parts": pictures.lengths, "weights": pictures.weights}
        if buckets:
            named = [[*shape, n] for shape, n in zip(buckets.shapes, buckets.counts, strict=True)]
            self._identity |= {"batch_size": batch_size, "buckets": named}
        self._order, self._num_threads = order, num_threads
        self._start_at(0)

    def _start_at(self, first: int) -> None:
        """Start the prefetching threads. The first batch starts at sample `first`."""
        import grain

        # With one batch more than threads, one batch is ready while all threads are working.
        buffer_size = self._num_threads + 1 if self._num_threads else 0
        options = grain.ReadOptions(num_threads=self._num_threads, prefetch_buffer_size=buffer_size)
        self._first, self._iterator = first, iter(self._order(first).to_iter_dataset(options))

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> HostBatch:
        """Return the next batch, or raise the exception of a prefetching thread."""
        return next(self._iterator)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def example(self) -> HostBatch:
        """Return a small batch, without advancing the iterator.

        It holds the first picture of each source or, with buckets, one picture of the bucket with
        the largest shape.
        """
        if self._buckets is not None:
            return max(self.examples(), key=lambda batch: sum(x.size for x in batch.values()))
        firsts = [0]
        if isinstance(self.pictures, Mixture):
            firsts = np.cumsum([0, *self.pictures.lengths[:-1]])
        return self._make(np.array(firsts))

    def examples(self) -> list[HostBatch]:
        """Return a small batch for each bucket, or `[example()]` if there are no buckets."""
        if self._buckets is None:
            return [self.example()]
        return [self._make(members[:1]) for members in self._buckets.members()]

    def get_state(self) -> bytes:
        """Return the position after the last batch as JSON bytes, equal in all processes."""
        samples = self._sample(0) + self._batch_size
        state = {"samples": samples, **self._identity, "digests": self.digests}
        return json.dumps(state).encode()

    def set_state(self, state: bytes) -> None:
        """Continue at a position that `get_state` returned, perhaps with another batch size.

        The state {"samples": 0} without further keys means the start of any data set. Earlier
        versions saved fewer digests. If only texts or sizes of files differ, as with an edited
        caption, this is a warning.

        Raises:
            OtherData: the saved position does not fit the seed, or the number or names of the
                pictures. With aspect buckets, it must also fit the batch size.
        """
        saved = json.loads(state)
        samples, before = saved.pop("samples"), saved.pop("digests", self.digests)
        if saved != self._identity and (samples or saved):
            raise OtherData(
                f"the saved position belongs to {saved}, but the data are now {self._identity}: "
                "the order cannot be continued. Restore the saved values, or start a new run"
            )
        changed = {n for n, value in self.digests.items() if before.get(n, value) != value}
        if fingerprints.NAMES in changed:
            raise OtherData(
                f"{fingerprints.NAMES} differs from that of the saved position: pictures were "
                "renamed or replaced, so the order cannot be continued. Restore the names, or "
                "start a new run, which keeps the weights with --continue_from"
            )
        if changed:
            logging.warning(
                "%s differs from that of the saved position: files of the data set were edited", " and ".join(changed)
            )
        index, first = divmod(samples, self._batch_size)
        if first != self._first:
            self.close()
            self._start_at(first)
        self._iterator.set_state({"next_index": index})

    def indices(self, rows: Sequence[int], back: int = 0) -> Int[np.ndarray, "R"]:
        """Return the indices of the pictures in the given rows of a recent batch.

        Args:
            rows: row numbers in the complete batch of all processes.
            back: 0 for the batch returned last, 1 for the one before it, and so on.
        """
        order = _batch_order(
            self.pictures, self._identity["seed"], self._batch_size, buckets=self._buckets, first=self._first
        )
        index = (self._sample(back) - self._first) // self._batch_size
        return order[index][np.array(rows)]

    def texts(self, rows: Sequence[int], back: int = 0) -> list[Any]:
        """Return the texts in the given rows of the batch `back` batches before the last."""
        indices = self.indices(rows, back)
        _, texts = self._view(indices).read(indices)
        first = self._sample(back)
        samples = [first + row for row in rows]
        return captions.chosen(texts, self._identity["seed"], samples, self._tags)

    def names(self, rows: Sequence[int], back: int = 0) -> list[str]:
        """Return the names of the pictures in rows of the batch `back` batches before the last."""
        indices = self.indices(rows, back)
        return self._view(indices).names(indices)

    def _view(self, indices: Int[np.ndarray, "B"]) -> Pictures:
        """Return the pictures, cropped to the bucket of these."""
        if self._buckets is None:
            return self.pictures
        shape = self._buckets.shapes[int(self._buckets.bucket[indices[0]])]
        return self.pictures.cropped_to(shape)

    def _sample(self, back: int) -> int:
        """Return the number of the first sample of the batch `back` batches before the last."""
        index: Any = self._iterator.get_state()["next_index"] - 1 - back
        return self._first + index * self._batch_size

    def skipped(self) -> dict[str, int]:
        """Return the number of unusable pictures that this process has found so far, by reason."""
        return self.pictures.skipped()

    def close(self) -> None:
        """Stop the prefetching threads. May be called more than once."""
        self._iterator.close()


def training_batches(
    pictures: Pictures, tokenize: Tokenize, run: Run, data: Data, mesh: Mesh, name: str = "image"
) -> Batches:
    """Return an iterator over a config's training batches. `name` is the key of the pictures."""
    process_index, process_count = local_rows(batch_sharding(mesh), run.batch_size)
    pictures, apart = split(pictures, data.heldout)
    buckets = aspect_buckets.sort(pictures, data.aspect_buckets) if data.aspect_buckets else None
    for warning in repetitions(pictures, buckets, run.batch_size):
        logging.warning("%s", warning)
    # Settings without effect are not read, so that training warns about them (config/unread.py).
    keep_tags = data.keep_tags if data.shuffle_tags or data.tag_drop_prob else 0
    tags = Tags(data.shuffle_tags, keep_tags, data.tag_drop_prob)
    if tags.shuffle or tags.drop_prob:
        rows = np.unique(np.linspace(0, len(pictures) - 1, _SAMPLE).astype(np.int64))
        if not tags.change(pictures.texts(rows)):
            logging.warning(
                "data.shuffle_tags and data.tag_drop_prob change none of %d captions: no comma "
                "follows their first %d tags",
                len(rows),
                max(keep_tags, 1),
            )
    batches = make_batches(
        pictures,
        tokenize,
        batch_size=run.batch_size,
        seed=run.seed,
        process_index=process_index,
        process_count=process_count,
        num_threads=data.threads,
        crop=data.crop,
        flip=data.flip,
        name=name,
        buckets=buckets,
        fields=(named := picture_fields.read(data.fields)),
        tags=tags,
    )
    make = lambda images, texts: {name: images, **tokenize(texts)}
    batches.apart = Apart(apart, make, named) if len(apart) else None
    return batches


def make_batches(
    pictures: Pictures,
    tokenize: Tokenize,
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = 1,
    crop: str = "center",
    flip: bool = False,
    name: str = "image",
    buckets: Buckets | None = None,
    fields: Sequence[Field] = (),
    tags: Tags = captions.ALL_TAGS,
) -> Batches:
    """Return an iterator over batches of pictures.

    A batch holds the pictures [B, H, W, C] under `name`, loss weights under LOSS_WEIGHT if they
    differ, those of pixels under LOSS_MASK if the pictures have masks, the arrays returned by
    `tokenize`, and float32 [B] under the key of each field. With buckets, H and W are the shape of
    the step's bucket.

    Args:
        pictures: the pictures.
        tokenize: maps the batch's texts to arrays.
        batch_size: number of rows of all processes together. Process p gets rows p*b to
            (p+1)*b - 1, where b = batch_size / process_count.
        seed: seed of the order, the random crops, the flips, the choice among captions, and tags.
        process_index: p, from 0 to process_count - 1, which local_rows returns.
        process_count: the number of parts into which a batch is split, which local_rows returns.
        num_threads: number of prefetching threads; 0 makes each batch when it is needed.
        crop: "center", or "random" to crop larger pictures at a random position.
        flip: whether to mirror each picture with probability 1/2.
        name: key of the pictures.
        buckets: the bucket of each picture; None makes squares of one size.
        fields: the numbers that belong to a batch.
        tags: what happens to the tags of captions.

    Raises:
        ValueError: `crop` is unknown, or batch_size is not a multiple of process_count.
    """
    named.one_of("crop", crop, CROPS)
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size is {batch_size}: it must be a positive multiple of {process_count}, the "
            "number of processes that share a batch"
        )
    rows = batch_size // process_count
    views = [pictures.cropped_to(shape) for shape in buckets.shapes] if buckets else [pictures]

    def load(start: int, step: int, indices: Int[np.ndarray, "B"]) -> HostBatch:
        first = start + step * batch_size + process_index * rows
        samples = range(first, first + rows)
        places = None
        if crop == "random":
            places = np.stack([np.random.default_rng((seed, n, 1)).random(2) for n in samples])
        view = views[buckets.bucket[indices[0]] if buckets else 0]
        read = view.columns(indices, places)
        if flip:
            flipped = lambda x: None if x is None else _flip(x, seed, samples)
            read = read._replace(images=flipped(read.images), mask=flipped(read.mask))
        return batch_of(read, captions.chosen(read.texts, seed, samples, tags), indices)

    def make(indices: Int[np.ndarray, "B"]) -> HostBatch:
        view = views[buckets.bucket[indices[0]] if buckets else 0]
        read = view.columns(indices)
        return batch_of(read, captions.chosen(read.texts, seed, indices.tolist()), indices)

    def batch_of(read: Columns, texts: Any, indices: Int[np.ndarray, "B"]) -> HostBatch:
        loss_weights = pictures.loss_weights(indices)
        weights = {} if loss_weights is None else {LOSS_WEIGHT: loss_weights}
        weights |= {} if read.mask is None else {LOSS_MASK: read.mask}
        numbers = numbers_of(read.numbers, fields)
        return {name: read.images, **weights, **tokenize(texts), **numbers}

    # grain takes 12 us per element, so only indices pass through it one by one. The pictures of a
    # batch are read together.
    def order(start: int) -> Order:
        local = _batch_order(pictures, seed, rows, process_index, process_count, buckets, start)
        return local.map_with_index(functools.partial(load, start))

    return Batches(
        order,
        pictures,
        batch_size=batch_size,
        seed=seed,
        num_threads=num_threads,
        make=make,
        buckets=buckets,
        tags=tags,
    )


def numbers_of(numbers: Mapping[str, Float[np.ndarray, "B"]], fields: Sequence[Field]) -> HostBatch:
    """Return the part of a batch that holds the numbers: float32 [B] under Field.key."""
    return {field.key: numbers[field.name].astype(np.float32) for field in fields}


def _batch_order(
    pictures: Pictures,
    seed: int,
    rows: int,
    process_index: int = 0,
    process_count: int = 1,
    buckets: Buckets | None = None,
    first: int = 0,
) -> Order:
    """Return a data set whose item n holds the picture indices in one process's rows of batch n.

    Each process has `rows` rows. Batch 0 starts at sample `first`, which must be 0 with buckets.
    Each bucket has its own epochs. The bucket of batch n depends on n alone. In any range of
    batches, all pictures are about equally frequent or, in a mixture, as frequent as the weights
    say.
    """
    orders, weights = [], []
    for among in [None] if buckets is None else buckets.members():
        # An endless data set has no remainder. If batches of one kept it, grain would overflow.
        order = _order(pictures, seed, among)
        order = order[first:] if first else order
        order = order.batch(rows, drop_remainder=True, batch_fn=np.asarray)
        orders.append(order[process_index::process_count])
        weights.append(sum(weight for *_, weight in _parts(pictures, among)))
    return _mix(orders, weights)


def _order(pictures: Pictures, seed: int, among: Int[np.ndarray, "N"] | None = None) -> Order:
    """Return the order in which a group of pictures is drawn, as a data set of picture indices.

    Every epoch is a new permutation. In a mixture, each source has its own epochs, the source of
    item n depends on n alone, and any range of items follows the weights of the sources.

    Args:
        pictures: the complete data set.
        seed: seed of the permutations.
        among: the sorted indices of the group's pictures; None means all pictures.
    """
    import grain

    orders, weights = [], []
    for part, (indices, weight) in enumerate(_parts(pictures, among)):
        if len(indices):
            source: Any = grain.MapDataset.source(indices)
            orders.append(source.seed(seed + part).shuffle().repeat())
            weights.append(weight)
    return _mix(orders, weights)


def _mix(orders: Sequence[Order], weights: Sequence[float]) -> Order:
    import grain

    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)


def _parts(pictures: Pictures, among: Int[np.ndarray, "N"] | None) -> list[tuple[Any, float]]:
    """Split a group of pictures by source: return (indices, weight) for each source.

    `among` holds the group's sorted indices; None means all pictures. The weight says how often
    these pictures are drawn, relative to other sources and groups.
    """
    if not isinstance(pictures, Mixture):
        indices = range(len(pictures)) if among is None else among
        return [(indices, float(len(indices)))]
    ends = np.cumsum([0, *pictures.lengths]).tolist()
    parts = []
    for first, last, weight in zip(ends, ends[1:], pictures.weights, strict=False):
        if among is None:
            parts.append((range(first, last), weight))
        else:
            indices = among[np.searchsorted(among, first) : np.searchsorted(among, last)]
            parts.append((indices, weight * len(indices) / max(last - first, 1)))
    return parts


def repetitions(pictures: Pictures, buckets: Buckets | None, batch_size: int) -> list[str]:
    """Return a line for each group of pictures that is too small to fill its rows of a batch.

    A group is a bucket or the whole data set; in a mixture, each source is a group of its own.
    """
    lines = []
    groups = zip(buckets.shapes, buckets.members(), strict=True) if buckets else [((), None)]
    for shape, among in groups:
        parts = _parts(pictures, among)
        total = sum(weight for _, weight in parts)
        for number, (indices, weight) in enumerate(parts, 1):
            rows, count = batch_size * weight / total, len(indices)
            if 0 < count < rows:
                name = "the bucket {}x{}".format(*shape) if shape else "the data set"
                name = f"source {number} of {name}" if len(parts) > 1 else name
                lines.append(
                    f"{name} has {count} picture{'s' * (count > 1)} for {rows:.4g} rows of a "
                    "batch, so a batch repeats them: lower batch_size, or add pictures"
                )
    return lines


def to_global(batch: Mapping[str, np.ndarray], sharding: Sharding) -> dict[str, Array]:
    """Join the batch rows of all processes into global arrays with the given sharding."""
    place = jax.make_array_from_process_local_data
    return {name: place(sharding, rows) for name, rows in batch.items()}


def local_rows(sharding: Sharding, batch_size: int) -> tuple[int, int]:
    """Return (process_index, process_count), the arguments of `make_batches`, for this process.

    These numbers differ from jax.process_index() and jax.process_count() if the mesh reorders
    processes, or if several processes hold the same rows (tensor parallelism across hosts).
    """
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return share([index[0].indices(batch_size)[:2] for index in indices if index], batch_size)


def share(spans: Sequence[tuple[int, int]], batch_size: int) -> tuple[int, int]:
    """Return (i, n) if the row ranges `spans` form part i of a batch split into n equal parts.

    Raises:
        ValueError: the ranges do not cover exactly one of n equal parts.
    """
    first, last = min(a for a, _ in spans), max(b for _, b in spans)
    size = last - first
    covered = sum(b - a for a, b in set(spans))  # A sharding's ranges are equal or disjoint.
    if covered != size or batch_size % size or first % size:
        raise ValueError(
            f"this process's devices hold rows {sorted(set(spans))} of a batch of {batch_size}: "
            "each process must hold one contiguous range of rows, and all ranges must be equally "
            "long. Change the mesh, so that the devices of a process are next to each other"
        )
    return first // size, batch_size // size


def _flip(images: np.ndarray, seed: int, samples: range) -> np.ndarray:
    """Return copies of the images, each mirrored with probability 1/2, seeded by (seed, sample)."""
    reverse, out = np.arange(images.shape[2])[::-1], np.empty_like(images)
    for n, image, row in zip(samples, images, out, strict=True):
        if np.random.default_rng((seed, n)).random() < 0.5:
            # Four times as fast as copying image[:, ::-1].
            np.take(image, reverse, axis=1, out=row, mode="clip")
        else:
            row[:] = image
    return out
