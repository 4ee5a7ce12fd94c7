"""Pictures to batches: the order of the data, threads that read ahead, and the exact position.

Sample n of a run (n = step * batch + row) is a function of (seed, n): every epoch is a permutation
of its own, and neither the number of processes nor a restart changes which picture is where.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Int, UInt64

from diffusion_jax.config.settings import CROPS, Data, Run
from diffusion_jax.data.pictures import Mixture, Pictures, Rows
from diffusion_jax.data.split import hashed, split
from diffusion_jax.machine.sharding import batch_sharding

Batch = dict[str, np.ndarray]
COUNTS = "counts"
"""How much each row counts in the loss, in batches whose rows do not all count the same."""
Tokenize = Callable[[Sequence[Any]], dict[str, np.ndarray]]


class Apart(NamedTuple):
    """Pictures that are held out of training."""

    pictures: Pictures
    make: Callable[[Rows, Sequence[Any]], Batch]
    """Pictures and texts to a batch."""

    def read(self, count: int) -> tuple[UInt64[np.ndarray, "R"], Batch]:
        """The keys of those that can be used of at most `count`, and a batch of them.

        They are chosen by a hash of their keys too: records that come move few out of it.
        """
        rows = np.arange(len(self.pictures))
        first = np.argsort(hashed(self.pictures.keys(rows)), kind="stable")[:count]
        kept, images, texts = self.pictures.usable(np.sort(first))
        return self.pictures.keys(kept), self.make(images, texts)


class Batches:
    """An endless iterator over this process's rows of each batch; made by make_batches.

    It owns the threads that read ahead: call `close`, or use it as a context manager.
    """

    def __init__(
        self,
        batches: grain.MapDataset[Batch],
        pictures: Pictures,
        *,
        batch_size: int,
        seed: int,
        num_threads: int,
        make: Callable[[Int[np.ndarray, "B"]], Batch],
    ):
        """`batches[step]` is the local batch of a step; `batch_size` the global number of rows.

        `make` makes a batch of pictures whichever.
        """
        self.pictures, self._make = pictures, make
        self.apart: Apart | None = None
        self._batch_size = batch_size
        self._identity: dict[str, Any] = {"seed": seed, "pictures": len(pictures)}
        if isinstance(pictures, Mixture):
            self._identity |= {"parts": pictures.lengths, "weights": pictures.weights}
        # One batch more than there are threads, so that one is ready while all are at work.
        ahead = num_threads + 1 if num_threads else 0
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=ahead)
        self._iterator = iter(batches.to_iter_dataset(options))

    def __iter__(self) -> "Batches":
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; raises what went wrong in a reading thread."""
        return next(self._iterator)

    def __enter__(self) -> "Batches":
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes it."""
        self.close()

    def example(self) -> Batch:
        """A row of each source, which takes nothing from the order of the batches."""
        firsts = [0]
        if isinstance(self.pictures, Mixture):
            firsts = np.cumsum([0, *self.pictures.lengths[:-1]])
        return self._make(np.array(firsts))

    def get_state(self) -> bytes:
        """The position after the last batch given out, as JSON, the same in every process."""
        samples = self._iterator.get_state()["next_index"] * self._batch_size
        return json.dumps({"samples": samples, **self._identity}).encode()

    def set_state(self, state: bytes) -> None:
        """Goes to a position; ValueError if it is of other data, another seed or batch size.

        The start, {"samples": 0} alone, is that of any data.
        """
        saved = json.loads(state)
        samples = saved.pop("samples")
        if saved != self._identity and (samples or saved):
            raise ValueError(
                f"the saved position is of {saved} and the data now are {self._identity}: the "
                "order cannot be continued. Restore the data and the seed, or start another run"
            )
        if samples % self._batch_size:
            raise ValueError(
                f"the saved position, sample {samples}, is no multiple of the batch size "
                f"{self._batch_size}: take a batch size that divides it"
            )
        self._iterator.set_state({"next_index": samples // self._batch_size})

    def names(self, rows: Sequence[int], back: int = 0) -> list[str]:
        """The names of the pictures in some rows, of all processes, of a batch given out.

        `back` counts batches: 0 is the last one.
        """
        first = (self._iterator.get_state()["next_index"] - 1 - back) * self._batch_size
        order = _order(self.pictures, self._identity["seed"])
        return self.pictures.names(np.array([order[first + row] for row in rows]))

    def skipped(self) -> dict[str, int]:
        """The number of unusable pictures that this process has met since it started, by reason."""
        return self.pictures.skipped()

    def close(self) -> None:
        """Stops the threads; may be called twice."""
        self._iterator.close()


def training_batches(
    pictures: Pictures, tokenize: Tokenize, run: Run, data: Data, mesh: Mesh, name: str = "image"
) -> Batches:
    """The batches of a config, this process's rows of them; the rest is as of make_batches."""
    process_index, process_count = local_rows(batch_sharding(mesh), run.batch_size)
    pictures, apart = split(pictures, data.heldout)
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
    )
    make = lambda images, texts: {name: images, **tokenize(texts)}
    batches.apart = Apart(apart, make) if len(apart) else None
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
) -> Batches:
    """Batches {`name`: the pictures [B, H, W, C], COUNTS, and what `tokenize` makes of the texts}.

    `batch_size` counts the rows of all processes together; process p gets rows p*b to (p+1)*b of
    each batch, where b = batch_size / process_count (local_rows gives the two numbers for a
    sharding). Each thread makes whole batches; 0 threads read only when asked. `crop` "random"
    cuts larger pictures anywhere, "center" in the middle; `flip` mirrors every second or so.
    """
    if crop not in CROPS:
        raise ValueError(f"crop is {crop!r}: choose from {', '.join(CROPS)}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size {batch_size} does not divide over {process_count} processes: "
            f"take a multiple of {process_count}"
        )
    rows = batch_size // process_count

    def load(step: int, indices: Int[np.ndarray, "B"]) -> Batch:
        first = step * batch_size + process_index * rows
        samples = range(first, first + rows)
        places = _places(seed, samples) if crop == "random" else None
        images, texts = pictures.read(indices, places)
        if flip:
            images = _flip(images, seed, samples)
        return batch_of(images, texts, indices)

    def make(indices: Int[np.ndarray, "B"]) -> Batch:
        return batch_of(*pictures.read(indices), indices)

    def batch_of(images: Rows, texts: Any, indices: Int[np.ndarray, "B"]) -> Batch:
        counts = pictures.counts(indices)
        return {name: images, **({} if counts is None else {COUNTS: counts}), **tokenize(texts)}

    # Only numbers go through grain one by one: a record costs it 12 us, and the pictures of a
    # whole batch can be computed together.
    local = _order(pictures, seed).batch(rows, batch_fn=np.asarray)[process_index::process_count]
    batches = local.map_with_index(load)
    return Batches(
        batches, pictures, batch_size=batch_size, seed=seed, num_threads=num_threads, make=make
    )


def _order(pictures: Pictures, seed: int) -> grain.MapDataset[int]:
    """The picture of sample n: each epoch is a permutation; of a mixture, each epoch of a part.

    Sample n's part is a function of n alone, and the parts' shares of any stretch are the weights.
    """
    if not isinstance(pictures, Mixture):
        return grain.MapDataset.range(len(pictures)).seed(seed).shuffle().repeat()
    firsts = np.cumsum([0, *pictures.lengths]).tolist()
    parts = [
        grain.MapDataset.range(first, last).seed(seed + part).shuffle().repeat()
        for part, (first, last) in enumerate(itertools.pairwise(firsts))
    ]
    return grain.MapDataset.mix(parts, pictures.weights)


def to_global(batch: Mapping[str, np.ndarray], sharding: Sharding) -> dict[str, Array]:
    """The local rows of every process as one array each, split as `sharding` says."""
    place = jax.make_array_from_process_local_data
    return {name: place(sharding, rows) for name, rows in batch.items()}


def local_rows(sharding: Sharding, batch_size: int) -> tuple[int, int]:
    """(process_index, process_count) for make_batches: the rows that this process's devices hold.

    They differ from jax.process_index() and jax.process_count() where a mesh orders processes in
    its own way, or where several processes hold the same rows (tensor parallelism between hosts).
    """
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    return share([index[0].indices(batch_size)[:2] for index in held if index], batch_size)


def share(spans: Sequence[tuple[int, int]], batch_size: int) -> tuple[int, int]:
    """(which, of how many) equal parts of a batch the spans [first, last) cover together.

    ValueError if they are no such part.
    """
    first, last = min(a for a, _ in spans), max(b for _, b in spans)
    size = last - first
    covered = len({row for a, b in spans for row in range(a, b)})
    if covered != size or batch_size % size or first % size:
        raise ValueError(
            f"this process's devices hold rows {sorted(set(spans))} of a batch of {batch_size}: "
            "they must be one equal part of it, so let the mesh keep a process's devices together"
        )
    return first // size, batch_size // size


def _places(seed: int, samples: range) -> np.ndarray:
    """Where each sample is cut, in [0, 1)."""
    return np.stack([np.random.default_rng((seed, n, 1)).random(2) for n in samples])


def _flip(images: np.ndarray, seed: int, samples: range) -> np.ndarray:
    mirrored = [np.random.default_rng((seed, n)).random() < 0.5 for n in samples]
    return np.where(np.array(mirrored)[:, None, None, None], images[:, :, ::-1], images)
