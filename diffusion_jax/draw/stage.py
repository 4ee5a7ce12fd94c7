"""Open the networks of training runs, with chosen settings and weights, as stages that draw."""

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from diffusion_jax import files, runs, systems
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Text
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.samplers import InputsFunction
from diffusion_jax.draw import options, program
from diffusion_jax.draw.options import Values
from diffusion_jax.draw.program import Draw
from diffusion_jax.precache import lookup
from diffusion_jax.task import Params, Task
from diffusion_jax.text import TextEncoder, registry
from diffusion_jax.weights import finetune, restore

# Settings that the two models of autoguidance share, besides their fields. Predictions may differ.
_SHARED = (
    "text.encoder",
    "text.width",
    "text.max_tokens",
    "output_size",
    "latents.scale",
    "latents.pixels",
    "vae.latent_channels",
    "super_resolution.factor",
    "unet.noise_aug",
)

_Settings = TypeVar("_Settings")
Encoders = dict[Text, tuple[TextEncoder, Any]]
"""A cache of text encoders and their weights on the devices, keyed by the encoder's settings."""


class Stage(NamedTuple):
    """A network that is ready to draw, with its weights and settings. A cascade has several."""

    workdir: str
    settings: Any
    """An imagen_jax.settings.Settings or an sd_jax.settings.Pipeline."""
    encoder: TextEncoder
    params: Params
    ema: str
    """The name of the average that `params` holds, or "raw" if it holds no average."""
    step: int
    """The step of the checkpoint; 0 for a model that is not a run."""
    frozen: Any
    """The weights that are not trained, such as those of the text encoder."""
    inputs_of: Callable[[Any, Preview | None, float], InputsFunction]
    """A function (settings, preview, strength) -> the `sampler_inputs` of a Task.

    `preview` is called on the host at each evaluation of the network, with the predicted images and
    their noise level. `strength` is the share of the steps to run when drawing over a picture. The
    function raises ValueError if settings do not fit together."""
    programs: Callable[[Any, Preview | None, float], Draw]
    """The same arguments -> a function that draws. Each choice is compiled once."""
    settings_with: Callable[[Mapping[str, Any]], Any]
    """Values keyed by config field -> the settings with these values."""
    draw: Draw
    """Draws with `settings`."""
    guide: str = ""
    """The run whose model guides this one, as WORKDIR or WORKDIR@STEP, or "" for none."""
    lora: Mapping[str, Any] = {}
    """For a LoRA run, two entries for the metadata of its pictures: "lora_scale", the strength of
    the LoRA, and "base", the fingerprint of the weights that it adapts. {} for other runs."""

    def changed(self, fields: Mapping[str, Any], preview: Preview | None = None, strength: float = 1.0) -> "Stage":
        """Return the stage with other settings. Weights and compiled programs are kept.

        `fields` holds new values, keyed by config field. `preview` and `strength` are arguments of
        `inputs_of`. Raises ValueError if settings do not fit together.
        """
        s = self.settings_with(fields)
        return self._replace(settings=s, draw=self.programs(s, preview, strength))


def read_run(workdir: str | os.PathLike[str], fields: Mapping[str, Any] = {}, *, system: str) -> Any:
    """Return the settings of a run of `system`, with new values of some config fields.

    `fields` holds these values, keyed by config field, such as "sampler.steps".

    Raises:
        FileNotFoundError: The workdir holds no run.
        ValueError: The run belongs to another system, or a value does not fit it.
    """
    config = runs.load(workdir, system)
    for field, value in fields.items():
        group, _, name = field.partition(".")
        config[group][name] = value
    s = systems.read(config, system)
    finetune.check_wanted(fields.get("unet.weights"), s.lora, s.text)
    if "text.weights" in fields and not registry.ENCODERS[s.text.encoder].pretrained:
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
    guide: str,
    s: _Settings,
    read: Callable[[str], _Settings],
    init_of: Callable[[_Settings], Callable[..., Params]],
    mesh: Mesh,
    rules: sharding.ShardingRules,
) -> tuple[_Settings, Params]:
    """Return the settings and the averaged weights of the run `guide`, for autoguidance.

    Guidance then leads away from the images that this run's model predicts, instead of from the
    first model's predictions with the negative prompt.

    Args:
        guide: WORKDIR or WORKDIR@STEP.
        s: The settings of the model that is guided.
        read: Maps a workdir to the settings of its run.
        init_of: Maps a run's settings to the `init` of its Task.
        mesh: The devices for the weights of the guide.
        rules: The sharding rules of the system.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: The two models differ in their text encoder, their fields, or the images or
            latents that they denoise, or the guide is a LoRA.
    """
    workdir, step = finetune.at_step(guide)
    settings = read(workdir)
    ranges = lambda run: [tuple(field)[1:] for field in picture_fields.read(_value(run, "data.fields"))]
    shared = lambda run: {**{name: _value(run, name) for name in _SHARED}, "fields": ranges(run)}
    theirs, ours = shared(settings), shared(s)
    if differing := [name for name in ours if theirs[name] != ours[name]]:
        shown = lambda values: ", ".join(f"{name} {values[name]}" for name in differing)
        raise ValueError(
            f"--guide={guide} has {shown(theirs)}, but the guided model has {shown(ours)}: choose "
            "a guide with the same values"
        )
    if _value(settings, "lora.rank") or _value(settings, "text.learned_tokens"):
        raise ValueError(
            f"--guide={guide} is a LoRA or a learned word, but a guide must be a complete model: "
            "name a run that trains all weights"
        )
    shapes = _placed_shapes(init_of(settings), mesh, rules)
    folder = files.path(workdir) / runs.CHECKPOINTS
    return settings, restore.load_params(folder, shapes, "ema", step)


def _value(s: object, name: str) -> Any:
    """Return a setting by its name in dotted form, or None if the system has no such setting."""
    return functools.reduce(lambda group, part: getattr(group, part, None), name.split("."), s)


def load_stage(
    workdir: str | os.PathLike[str],
    s: _Settings,
    encoder: TextEncoder,
    task: Task,
    mesh: Mesh,
    inputs_of: Callable[[_Settings, Preview | None, float], InputsFunction],
    values: Values,
    lora_scale: float,
) -> Stage:
    """Load the chosen weights of a run, and return the run as a Stage.

    Args:
        workdir: The workdir of the run.
        s: The settings to draw with.
        encoder: The run's text encoder.
        task: The run's task. Its `frozen` weights must already be on the devices.
        mesh: The devices for the weights.
        inputs_of: The field `inputs_of` of the Stage.
        values: The chosen values of options; "ema", "checkpoint" and "guide" are used here.
        lora_scale: The strength of a LoRA run, for the metadata of pictures.

    Raises:
        FileNotFoundError: The run does not have the chosen checkpoint.
        ValueError: The checkpoint is damaged, or does not hold the chosen average.
    """
    programs = program.make_programs(inputs_of, task.frozen, mesh)
    stage = Stage(
        str(workdir),
        s,
        encoder,
        _placed_shapes(task.init, mesh, task.rules),
        "",
        0,
        task.frozen,
        inputs_of,
        programs,
        functools.partial(options.override, s),
        programs(s, None, 1.0),
        values.get("guide", ""),
        finetune.describe(workdir, lora_scale),
    )
    return with_weights(stage, values.get("ema", "ema"), values.get("checkpoint"))


def with_weights(stage: Stage, ema: str, step: int | None) -> Stage:
    """Return `stage` with other saved weights of the same run. Compiled programs are kept.

    `ema` is the average: a decay such as "0.9999", a width such as "0.05", "ema" (the largest
    decay) or "raw" (no average). `step` is the step of the checkpoint, or None for the newest
    undamaged one. Raises FileNotFoundError or ValueError if the run does not have them.
    """
    folder = restore.absolute(stage.workdir) / runs.CHECKPOINTS
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), stage.params
    )
    params, step = restore.load_params_and_step(folder, shapes, ema, step)
    return stage._replace(params=params, ema=restore.name_of(folder / str(step), ema), step=step)


def fingerprint(models: Sequence[Params]) -> str:
    """Return 16 hexadecimal digits that identify the weights of all `models` together.

    They do not depend on how the weights are sharded.
    """
    everywhere = sharding.replicated(sharding.make_mesh())
    sums = [np.asarray(x).item() for params in models for x in _sums(params, everywhere)]
    return hashlib.sha256(str(sums).encode()).hexdigest()[:16]


def _placed_shapes(init: Callable[..., Params], mesh: Mesh, rules: sharding.ShardingRules) -> Params:
    shapes = jax.eval_shape(init, jax.random.key(0))
    return sharding.placed(shapes, sharding.shardings(shapes, mesh, rules))


@functools.partial(jax.jit, static_argnums=1)
def _sums(params: Params, everywhere: NamedSharding) -> list[jax.Array]:
    """Return, for each array, the sum of its values modulo 2^32, with their bits read as integers.

    The sums do not depend on how the arrays are sharded. Every device gets the sums.
    """
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = [jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]) for x in jax.tree.leaves(params)]
    return [jax.lax.with_sharding_constraint(b.sum(dtype=jnp.uint32), everywhere) for b in bits]
