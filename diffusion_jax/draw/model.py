"""Open training runs, with chosen settings and weights, as models that draw."""

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diffusion_jax import files, runs, systems
from diffusion_jax.config.settings import Text
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw import options
from diffusion_jax.draw.options import Overrides, Weights
from diffusion_jax.draw.program import BeginOf, Draw, Programs, make_programs
from diffusion_jax.precache import lookup
from diffusion_jax.task import Params, Task
from diffusion_jax.text import TextEncoder, registry
from diffusion_jax.weights import finetune, restore

Encoders = dict[Text, tuple[TextEncoder, Any]]
"""A cache of text encoders and their weights on the devices, keyed by the encoder's settings."""


class Model(NamedTuple):
    """A model that is ready to draw: its networks, weights and settings."""

    workdir: str
    settings: Any
    """An imagen_jax.settings.Settings or an sd_jax.settings.Pipeline."""
    encoder: TextEncoder
    draw: Draw
    params: Any
    ema: str
    """The name of the average that `params` holds, or "raw" if it holds no average."""
    step: int
    """The step of the checkpoint; 0 for a model that is not a run."""
    guide: str = ""
    """The run whose model guides this one, as WORKDIR or WORKDIR@STEP, or "" for none."""
    programs: Programs | None = None
    """The compiled sampling programs, one for each choice of settings of the same networks."""
    settle: Callable[[Overrides], Any] | None = None
    """A function overrides -> settings: this model's settings with the given fields replaced."""
    lora: Mapping[str, Any] = {}
    """For a LoRA run, two entries for the metadata of its pictures: "lora_scale", the strength of
    the LoRA, and "base", the fingerprint of the weights that it adapts. {} for other runs."""


class GuidingModel(NamedTuple):
    """A second model for autoguidance, with its settings and parameters.

    Guidance leads away from the images that this model predicts, instead of from the first model's
    predictions with the negative prompt.
    """

    settings: Any
    params: Params


def read_run(workdir: str | os.PathLike[str], overrides: Overrides, system: str) -> Any:
    """Return the settings of a run of `system`, after replacing the fields in `overrides`.

    Raises:
        FileNotFoundError: The workdir holds no run.
        ValueError: The run belongs to another system, or an override does not fit it.
    """
    config = runs.load(workdir, system)
    for field, value in overrides.items():
        group, _, name = field.partition(".")
        config[group][name] = value
    s = systems.read(config, system)
    finetune.check_wanted(overrides.get("unet.weights"), s.lora)
    if "text.weights" in overrides and not registry.ENCODERS[s.text.encoder].pretrained:
        raise ValueError(
            f"the text encoder of {workdir}, {s.text.encoder!r}, has no weights: leave out "
            f"--text_weights={s.text.weights}"
        )
    return s


def open_encoder(
    text: Text, mesh: Mesh, rules: sharding.ShardingRules, encoders: Encoders | None = None
) -> tuple[TextEncoder, Any]:
    """Open a text encoder for new texts, and place its weights on the devices.

    `text` is the `text` group of a run's config. `mesh` and `rules` determine the placement. Return
    the encoder and its weights. The dict `encoders` caches both, so that runs with the same encoder
    share the weights.
    """
    encoders = {} if encoders is None else encoders
    key = text._replace(drop_prob=0.0, store="")  # The other fields determine the encoder.
    encoder = lookup.open_online(text)  # Also checks that the encoder made the run's store.
    if key not in encoders:
        encoders[key] = encoder, sharding.place_all(encoder.frozen, mesh, rules)
    return encoders[key]


def load_guide(
    guide: str, system: str, s: Any, init_of: Callable[[Any], Any], mesh: Mesh, rules: Any
) -> GuidingModel | None:
    """Load the run `guide` with its averaged weights, or return None if `guide` is "".

    Args:
        guide: WORKDIR or WORKDIR@STEP.
        system: The system to which both models belong.
        s: The settings of the model that is guided.
        init_of: Maps a run's settings to the `init` of its Task.
        mesh: The devices for the parameters of the guide.
        rules: The sharding rules of the system.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: The two models differ in their image size or their text encoder, or the guide is
            a LoRA.
    """
    if not guide:
        return None
    workdir, step = finetune.at_step(guide)
    settings = read_run(workdir, {}, system)
    shared = lambda run: (
        run.text.encoder, run.text.width, run.text.max_tokens, run.output_size, run.data.fields
    )  # fmt: skip
    if shared(settings) != shared(s):
        raise ValueError(
            f"--guide={guide} has the text encoder, text width, number of tokens, image size and "
            f"fields {shared(settings)}, but the guided model has {shared(s)}: choose a guide with "
            "the same values"
        )
    if settings.lora.rank:
        raise ValueError(
            f"--guide={guide} is a LoRA, but a guide must be a complete model: name a run with "
            "lora.rank 0"
        )
    shapes = _placed_shapes(init_of(settings), mesh, rules)
    folder = files.path(workdir) / runs.CHECKPOINTS
    return GuidingModel(settings, restore.load_params(folder, shapes, "ema", step))


def load_model(
    workdir: str | os.PathLike[str],
    s: Any,
    encoder: TextEncoder,
    task: Task,
    mesh: Mesh,
    begin_of: BeginOf,
    weights: Weights,
    *,
    guide: str = "",
    lora_scale: float = 1.0,
) -> Model:
    """Load the chosen weights of a run, and return the run as a Model.

    Args:
        workdir: The workdir of the run.
        s: The settings to draw with.
        encoder: The run's text encoder.
        task: The run's task. Its `frozen` weights must already be on the devices.
        mesh: The devices for the parameters.
        begin_of: Maps (settings, preview, strength) to the task's `begin` (see BeginOf).
        weights: The choice of saved weights to read.
        guide: The name of the run that guides this one, for the metadata of pictures.
        lora_scale: The strength of a LoRA run, for the metadata of pictures.

    Raises:
        FileNotFoundError: The run does not have the checkpoint that `weights` names.
        ValueError: The checkpoint is damaged, or does not hold the average that `weights` names.
    """
    placed = _placed_shapes(task.init, mesh, task.rules)
    programs = make_programs(begin_of, task.frozen, mesh)
    settle, lora = functools.partial(options.override, s), finetune.describe(workdir, lora_scale)
    draw = programs.draw(s)
    model = Model(str(workdir), s, encoder, draw, placed, "", 0, guide, programs, settle, lora)
    return with_weights(model, weights)


def with_weights(model: Model, weights: Weights) -> Model:
    """Return `model` with other saved weights of the same run. Compiled programs are kept.

    Raises FileNotFoundError or ValueError if the run does not have the checkpoint or the average
    that `weights` names.
    """
    folder = restore.absolute(model.workdir) / runs.CHECKPOINTS
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        model.params,
    )
    params, step = restore.load_params_and_step(folder, shapes, weights.ema, weights.step)
    ema = restore.name_of(folder / str(step), weights.ema)
    return model._replace(params=params, ema=ema, step=step)


def with_overrides(
    model: Model,
    overrides: Overrides,
    preview: Preview | None = None,
    strength: float | None = None,
) -> Model:
    """Return `model` with changed settings. No weights are loaded, and compiled programs are kept.

    `overrides` holds the new values, keyed by config field. `preview` is called on the host at each
    evaluation of the network, with the predicted images and their noise level. `strength` is the
    share of the steps to run when the model draws over a picture; None keeps the share with which
    the model was opened.

    Raises ValueError if settings do not fit together.
    """
    assert model.programs and model.settle
    s = model.settle(overrides)
    return model._replace(settings=s, draw=model.programs.draw(s, preview, strength))


def fingerprint(models: Sequence[Params]) -> str:
    """Return 16 hexadecimal digits that identify the weights of all `models` together.

    They do not depend on how the weights are sharded.
    """
    everywhere = sharding.replicated(sharding.make_mesh())
    sums = [np.asarray(x).item() for params in models for x in _sums(params, everywhere)]
    return hashlib.sha256(str(sums).encode()).hexdigest()[:16]


def _placed_shapes(init: Callable[..., Params], mesh: Mesh, rules: Any) -> Params:
    shapes = jax.eval_shape(init, jax.random.key(0))
    return sharding.placed(shapes, sharding.shardings(shapes, mesh, rules))


@functools.partial(jax.jit, static_argnums=1)
def _sums(params: Params, everywhere: Any) -> list[jax.Array]:
    """Return, for each array, the sum of its values modulo 2^32, with their bits read as integers.

    The sums do not depend on how the arrays are sharded. Every device gets the sums.
    """
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = [
        jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]) for x in jax.tree.leaves(params)
    ]
    return [jax.lax.with_sharding_constraint(b.sum(dtype=jnp.uint32), everywhere) for b in bits]
