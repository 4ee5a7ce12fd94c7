"""Drawing images from texts, batch by batch over the mesh.

An image is a function of its parameters, text, guidance and seed: neither the batch that it is
drawn in nor the number of devices changes it (beyond the order of floating-point sums).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.samplers import Begin
from diffusion_jax.machine import programs
from diffusion_jax.machine.programs import announced
from diffusion_jax.machine.sharding import ambient, batch_sharding, place, replicated
from diffusion_jax.task import Params, Sample, Texts

Images = Float[np.ndarray, "B H W 3"]  # About [-1, 1]: sheets.to_uint8 makes pixels of them.
Draw = Callable[[Params, Texts, Sequence[int], Float[np.ndarray, "B"] | None], Images]
BeginOf = Callable[[Any, Preview | None], Begin]
"""(settings, preview) to a task's `begin`; ValueError for settings that do not go together."""


class Programs(NamedTuple):
    """What draws with other settings of the same networks."""

    draw: Callable[..., Draw]
    """(settings, preview=None) to what draws with them, kept for the next time."""
    begin: Callable[[Any], tuple[Begin, Any]]
    """Settings to a task's `begin`, and its frozen weights."""


_PIXELS = 2**22  # Of all images that a device draws at once, unless said otherwise.


def make_draw(sample: Sample, frozen: Any, mesh: Mesh) -> Draw:
    """Jits a task's `sample`: draw(params, texts, seeds [B], guidance [B]) -> images [B, H, W, 3].

    `guidance` None draws without guidance, at half the cost. Compiles once for each B, and says so.
    """
    where = batch_sharding(mesh)
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]

    @functools.partial(jax.jit, out_shardings=replicated(mesh))  # Every process gets all images.
    def from_seeds(params, frozen, batch, seeds, guidance):
        keys = jax.vmap(jax.random.key)(seeds)
        return ambient(mesh, sample)(params, frozen, batch, keys, guidance)

    compiled = announced(from_seeds, "the sampler")

    def draw(params, batch, seeds, guidance):
        rows = np.arange(-(-len(seeds) // ways) * ways) % len(seeds)  # Repeated to fill the mesh.
        inputs = batch, np.asarray(seeds, np.uint32), guidance
        inputs = jax.tree.map(lambda x: place(np.asarray(x)[rows], where), inputs)
        images = compiled(params, frozen, *inputs)
        return jax.device_get(images)[: len(seeds)]

    return draw


def make_programs(begin_of: BeginOf, frozen: Any, mesh: Mesh, kept: int = 16) -> Programs:
    """What draws with which settings; of so many the compiled programs are kept."""

    @functools.lru_cache(maxsize=kept)
    def program(s: Any, preview: Preview | None) -> Draw:
        return make_draw(samplers.whole(begin_of(s, preview), s.sampler), frozen, mesh)

    def draw(s: Any, preview: Preview | None = None) -> Draw:
        scale = {"guidance": 1.0}  # An argument of what draws.
        return program(s._replace(sampler=s.sampler._replace(**scale)), preview)

    return Programs(draw, lambda s: (begin_of(s, None), frozen))


def previewed(begin: Begin, preview: Preview | None) -> Begin:
    """The same start, whose denoiser shows `preview` on the host what it finds, if there is one."""
    if preview is None:
        return begin

    def shown(*arguments: Any) -> samplers.Start:
        start = begin(*arguments)
        return start._replace(denoise=programs.watched(start.denoise, preview))

    return shown


def in_batches(
    draw: Draw,
    params: Params,
    batch: Texts,
    seeds: Sequence[int],
    guidance: Float[np.ndarray, "N"] | None,
    batch_size: int,
) -> Iterator[Images]:
    """Draws any number of images, `batch_size` at a time, the last few filled up and cut off."""
    inputs = jax.tree.map(np.asarray, (batch, np.asarray(seeds), guidance))
    for start in range(0, len(seeds), batch_size):
        rows = np.arange(start, start + batch_size) % len(seeds)
        part = jax.tree.map(lambda x, rows=rows: x[rows], inputs)
        yield draw(params, *part)[: len(seeds) - start]


def default_batch_size(height: int, width: int) -> int:
    """How many images are drawn at once unless said otherwise: fewer where they are larger."""
    return jax.device_count() * min(64, max(1, _PIXELS // (height * width)))


def even_batch_size(most: int, total: int) -> int:
    """`most` or a little less, such that the last batch of `total` is about full too."""
    return -(-total // -(-total // most))
