"""Draw images from texts in batches, on all devices of a mesh.

An image depends only on the parameters, the settings, its text, its guidance scale and its seed.
The batch size and the number of devices change only the order of floating-point sums.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from diffusion_jax.config import picture_fields
from diffusion_jax.devices import hardware, programs
from diffusion_jax.devices.programs import announced
from diffusion_jax.devices.sharding import ambient, batch_sharding, place, replicated
from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.samplers import InputsFunction
from diffusion_jax.draw.seeds import halves, keys_of
from diffusion_jax.task import Params, Sample, Texts

Images = Float[np.ndarray, "B H W 3"]  # In about [-1, 1]; sheets.to_uint8 returns pixels.
Draw = Callable[[Params, Texts, Sequence[int], Float[np.ndarray, "B"] | None], Images]
"""A function (params, texts, seeds [B], guidance [B] or None) -> images (see `make_draw`)."""
_PIXELS = 2**22  # Default limit on the pixels that a device draws at once.


def make_draw(sample: Sample, frozen: Any, mesh: Mesh) -> Draw:
    """Return a function draw(params, texts, seeds [B], guidance [B]) -> images [B, H, W, 3].

    It calls `sample`, the function of a task, on all devices of the mesh. If guidance is None, the
    network is evaluated with the prompt alone, at half the cost. The function is compiled once for
    each batch size B, and each compilation is logged. `frozen` is the task's frozen weights.
    """
    where = batch_sharding(mesh)
    num_shards = mesh.shape["replica"] * mesh.shape["fsdp"]

    @functools.partial(jax.jit, out_shardings=replicated(mesh))  # Every process gets all images.
    def from_seeds(params, frozen, batch, seeds, guidance):
        return ambient(mesh, sample)(params, frozen, batch, keys_of(seeds), guidance)

    compiled = announced(from_seeds, "the sampler")

    def draw(params, batch, seeds, guidance):
        # Rows are repeated until the batch size is a multiple of num_shards.
        rows = np.arange(-(-len(seeds) // num_shards) * num_shards) % len(seeds)
        inputs = batch, halves(seeds), guidance
        inputs = jax.tree.map(lambda x: place(np.asarray(x)[rows], where), inputs)
        images = compiled(params, frozen, *inputs)
        return jax.device_get(images)[: len(seeds)]

    return draw


def make_programs(
    inputs_of: Callable[[Any, Preview | None, float], InputsFunction], frozen: Any, mesh: Mesh, max_programs: int = 16
) -> Callable[[Any, Preview | None, float], Draw]:
    """Return a function (settings, preview, strength) -> Draw, which compiles each choice once.

    `inputs_of` maps the same arguments to the `sampler_inputs` of a Task (see Stage.inputs_of).
    `frozen` is the task's frozen weights, already on the devices, which every program gets as an
    argument.

    The `max_programs` most recently used programs stay compiled. Settings that differ only in
    sampler.guidance or sampler.fields share a program, because these are arguments of the program.
    """
    draws: collections.OrderedDict[Any, Draw] = collections.OrderedDict()

    def draw_with(s: Any, preview: Preview | None, strength: float) -> Draw:
        inputs = ("guidance", "fields")
        compiled_in = {k: v for k, v in s.sampler._asdict().items() if k not in inputs}
        key = s._replace(sampler=tuple(compiled_in.items())), preview, strength
        if key not in draws:
            sample = samplers.make_sample(inputs_of(s, preview, strength), s.sampler)
            draws[key] = make_draw(sample, frozen, mesh)
        draws.move_to_end(key)
        if len(draws) > max_programs:
            draws.popitem(last=False)
        compiled, named = draws[key], picture_fields.read(s.fields)
        if not named:
            return compiled
        arrays = functools.partial(picture_fields.arrays, named, picture_fields.values(named, s.sampler.fields))
        return lambda params, texts, seeds, guidance: compiled(params, {**arrays(len(seeds)), **texts}, seeds, guidance)

    return draw_with


def previewed(sampler_inputs: InputsFunction, preview: Preview | None) -> InputsFunction:
    """Make the denoiser of `sampler_inputs` also call `preview` on the host with its predictions.

    `preview` gets the predicted images and their noise level. If it is None, `sampler_inputs` is
    returned unchanged.
    """
    if preview is None:
        return sampler_inputs

    def shown(*arguments: Any) -> samplers.SamplerInputs:
        inputs = sampler_inputs(*arguments)
        return inputs._replace(denoise=programs.watched(inputs.denoise, preview))

    return shown


def in_batches(
    draw: Draw,
    params: Params,
    batch: Texts,
    seeds: Sequence[int],
    guidance: Float[np.ndarray, "N"] | None,
    batch_size: int,
) -> Iterator[Images]:
    """Draw N images, `batch_size` at a time, and yield the images of each batch.

    `batch` holds the texts, `seeds` the seeds and `guidance` the guidance scales of the N images.
    The last batch is padded to `batch_size`, and the images of the padding are dropped.
    """
    inputs = jax.tree.map(np.asarray, (batch, guidance))
    for start in range(0, len(seeds), batch_size):
        rows = np.arange(start, start + batch_size) % len(seeds)
        texts, scales = jax.tree.map(lambda x, rows=rows: x[rows], inputs)
        yield draw(params, texts, [seeds[i] for i in rows.tolist()], scales)[: len(seeds) - start]


def default_batch_size(height: int, width: int) -> int:
    """Return the default batch size over all devices. Larger images use smaller batches."""
    return jax.device_count() * min(64, max(1, _PIXELS // (height * width)))


def check_fits(height: int, width: int, channels: int, num_images: int = 1) -> None:
    """Raise ValueError if images of this size certainly do not fit in a device's memory.

    Args:
        height: Height in pixels.
        width: Width in pixels.
        channels: The number of channels of the network's arrays at full size.
        num_images: The number of images that are drawn at once.
    """
    rows = -(-num_images // jax.device_count())
    # A layer's input and output are in memory together, mostly as float32.
    need, limit = 2 * 4 * rows * height * width * channels, hardware.limit(jax.local_devices()[0])
    if need > limit:
        raise ValueError(
            f"{num_images} images of {width}x{height} need more than {need / 1e9:,.0f} GB of "
            f"memory per device, but a device has {limit / 1e9:.1f} GB: choose a smaller size or "
            "batch"
        )


def even_batch_size(most: int, total: int) -> int:
    """Return a batch size up to `most` that splits `total` into batches of almost equal size."""
    return -(-total // -(-total // most))
