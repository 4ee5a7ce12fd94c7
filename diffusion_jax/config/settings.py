"""The config groups shared by all systems, and how a config group becomes a typed tuple.

Configs hold plain values and can omit fields that have a default. Only the entry points see a
config: all other functions take these tuples or single values. The annotation of a field holds its
range, an interval of numbers or a table of names (see ranges).
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from diffusion_jax.config import ranges
from diffusion_jax.config.ranges import DTYPES, Amount, Count, Decay, Positive, Scale, Share

CROPS = ("center", "random")
UNCAPTIONED = ("error", "drop", "empty")
CAPTIONED = ("arrow", "tfds")
"""Data sources that have captions whatever data.text says."""
EMBEDDINGS = ("npy", "npz", "safetensors")
"""Suffixes of files that hold embeddings made before training, one text each."""
SNAPSHOT_DTYPE = "float16"
"""The type of the numbers in a snapshot of averages by power functions."""
MOMENTS = "moments"
"""The data source of what an autoencoder makes of images; the others give images."""


class Run(NamedTuple):
    """A config's own values, outside the groups: the system, and what is done when."""

    steps: Count
    batch_size: Count
    seed: Annotated[int, "[0, 4294967295]"] = 0
    log_every: Count = 100
    sample_every: Amount = 1_000
    save_every: Count = 1_000
    keep_last: Count = 5
    keep_every: Amount = 0
    step_timeout: Count = 1_800
    """Seconds for a step with its save, after which the process ends: it hangs."""
    prompts: tuple[str, ...] = ()
    system: str = ""
    """The system, such as imagen_jax, that every config names: see systems.find."""


class Text(NamedTuple):
    """The text encoder, and how often training drops the text.

    Training runs the encoder, or takes what it made before: from a store, or from files beside the
    images where data.text names such. New texts, of sampling and scores, always need the encoder.
    """

    encoder: str
    weights: str = ""
    """A folder or a Hugging Face name, for pretrained encoders; stored embeddings need none."""
    store: str = ""
    """A store of this encoder's embeddings, to be looked up in training."""
    width: Count = 1024
    max_tokens: Count = 128
    read_tokens: Count = 512
    """The tokens of a text that T5 reads; `max_tokens` of them are kept."""
    dtype: Annotated[str, DTYPES[:2]] = "bfloat16"
    """The arithmetic of pretrained encoders."""
    drop_prob: Share = 0.1


class Optimizer(NamedTuple):
    """AdamW, its schedule, and the averages of its parameters."""

    lr: Positive
    schedule: str = "constant"
    warmup: Amount = 10_000
    decay_from: Count = 70_000
    """The step from which the schedule "inverse_sqrt" lowers the rate."""
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Positive = 1e-8
    weight_decay: Annotated[float, "[0, inf)"] = 0.01
    clip: Annotated[float, "(0, inf]"] = 1.0
    micro_batch: Annotated[int, "[0, 1048576]"] = 0
    """Samples of a device in one pass: the passes of a step follow from batch_size and the mesh,
    and draw the noise of one. 0: `accumulate` says how many passes there are."""
    accumulate: Count = 1
    """Passes of a step, each with noise of its own."""
    ema_decays: Annotated[tuple[float, ...], "[0, 1)", [()]] = (0.9999,)
    ema_warmup: bool = False
    ema_widths: Annotated[tuple[float, ...], "(0, 0.28]", [()]] = ()
    """Relative widths of averages by power functions, such as 0.05 and 0.10: their snapshots give
    any other width after the training (see diffusion_jax.averages)."""
    snapshot_every: Amount = 0
    """Steps from one snapshot of these averages to the next; 0: a 32nd of the run."""
    moment_dtype: Annotated[str, DTYPES[:2]] = "float32"
    """The first moment's; "bfloat16" saves 2 of the 16 bytes or more of a parameter's state."""
    max_skipped: Count = 100
    """Steps in a row without a finite loss and gradient that end the run; 10 from the start on."""


class Lora(NamedTuple):
    """Training of factors of low rank beside the frozen weights of `unet.weights`: see lora."""

    rank: Amount = 0
    """Columns of a factor; 0: the weights themselves are trained."""
    alpha: Positive = 8.0
    """What the factors add is their product times alpha / rank."""
    targets: str = "_attn/"
    """A regular expression that is found in the paths of the layers, such as mid_attn/q."""
    scale: Annotated[float, "[-100, 100]"] = 1.0
    """Times what was learned, in drawing: 0 draws as the frozen weights do."""

    @property
    def alpha_by_rank(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank


class MeshShape(NamedTuple):
    """Sizes of the mesh axes; -1 takes the devices that are left."""

    replica: Annotated[int, "(0, inf)", (-1,)] = 1
    fsdp: Annotated[int, "(0, inf)", (-1,)] = -1
    tensor: Annotated[int, "(0, inf)", (-1,)] = 1


class Evaluation(NamedTuple):
    """Scores on the way, of prompts from a file or of the data's own."""

    every: Amount = 0
    """Images from one to the next; 0 for never."""
    guidance: Annotated[tuple[float, ...], "[0, 1000]"] = (7.5,)
    prompts: str = ""
    """A file of prompts; "" for the prompts that the data source itself provides."""
    num_prompts: Count = 1_000
    reference: str = ""
    """Statistics of real images; then weights of Inception and of CLIP: see evaluate."""
    inception: str = ""
    clip: str = ""
    clip_reference: str = ""
    dinov2: str = ""
    """Weights of DINOv2, and statistics of its features of real images."""
    dinov2_reference: str = ""
    judge: str = ""
    """The folder of a judge that `metrics train_judge` made."""
    metrics: tuple[str, ...] = ()
    """Names in metrics.table; none: all that the reference and the weights allow."""


class Heldout(NamedTuple):
    """The held-out loss on the way: see diffusion_jax.heldout, and `data.heldout`."""

    every: Amount = 0
    """Steps from one to the next; 0 for never."""
    records: Count = 256
    """Held-out records that it is taken of, at most."""
    levels: Annotated[int, "[1, 1000]"] = 8
    """Noise levels that each record meets: quantiles of training's."""


class Data(NamedTuple):
    """The pictures to train on: their source, filters, resize, crop and flip."""

    source: str
    path: str = ""
    text: str = "txt"
    uncaptioned: Annotated[str, UNCAPTIONED] = "error"
    mixture: tuple[tuple[float, str, str, str], ...] = ()
    """Parts (weight, source, path, text), for the source "mixture"."""
    min_size: Amount = 0
    """Filters: the pixels of the smaller side; the larger by the smaller, 0 for any; characters."""
    max_aspect: Annotated[float, "[1, inf)", (0,)] = 0.0
    min_chars: Amount = 0
    max_broken: Share = 0.1
    """The share of damaged records that does not end the run."""
    resize: Amount = 0
    """Pixels of the smaller side, before the cut; 0 stands for the size of the cut."""
    crop: Annotated[str, CROPS] = "center"
    flip: bool = False
    threads: Amount = 16
    """Batches that are made at a time; 0: when they are asked for."""
    heldout: Annotated[float, "[0, 1)"] = 0.0
    """The share of the records that training never sees: see `Heldout`."""
    prior: str = ""
    """A folder of what the model drew before (sample's, with its metadata.jsonl), which takes every
    second row: prior preservation, so that old words keep their meaning (Ruiz et al. 2022)."""
    prior_weight: Scale = 1.0
    """How much such a row counts in the loss, beside 1 of the others."""

    @property
    def embedded(self) -> bool:
        """Whether `text` names embeddings beside the images instead of captions."""
        if self.source in CAPTIONED:
            return False
        texts = [part[-1] for part in self.mixture] if self.source == "mixture" else [self.text]
        return any(text.partition(":")[0].endswith(EMBEDDINGS) for text in texts)


def split(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into the fields outside groups, and its groups."""
    groups = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    return {key: value for key, value in config.items() if key not in groups}, groups


def read(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """Return a config group as a NamedTuple or network.

    Raises:
        ValueError: For unknown or missing fields, and values out of range.
    """
    values = {k: plain(value) for k, value in complete(ranges.defaults(kind), group, name).items()}
    ranges.check(kind, values, name)
    if dataclasses.is_dataclass(kind):
        values["dtype"] = jnp.dtype(values["dtype"])
    return kind(**values)


def complete(fields: Mapping[str, Any], group: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a config group with the defaults of the fields that it omits.

    Args:
        fields: The group's fields with their defaults, in order; MISSING for none.
        group: The values of the config.
        name: The group's name for messages; "" for fields outside groups.

    Raises:
        ValueError: For unknown fields, and for omitted fields without a default.
    """
    dot = f"{name}." if name else ""
    unknown = sorted(group.keys() - fields.keys())
    if unknown:
        close = difflib.get_close_matches(unknown[0], list(fields), n=1)
        hint = f"did you mean {dot}{close[0]}?" if close else f"choose from {', '.join(fields)}"
        raise ValueError(f"unknown config field {dot}{unknown[0]}: {hint}")
    missing = [f for f in sorted(fields) if fields[f] is dataclasses.MISSING and f not in group]
    if missing:
        raise ValueError(f"the config lacks {', '.join(dot + field for field in missing)}")
    values = {**fields, **group}
    for field, value in group.items():  # A file can hold 0 for a field that takes 0.5.
        if isinstance(fields[field], float) and type(value) is int:
            values[field] = float(value)
    return values


def check_prompts(run: Run, data: Data) -> None:
    """Raise ValueError if sampling during training has no prompts."""
    if not data.embedded and run.sample_every and not run.prompts:
        raise ValueError(
            "prompts is empty: give texts to draw during training, such as "
            "--config.prompts=\"('a red dog',)\", or set sample_every=0"
        )


def plain(value: Any) -> Any:
    """Convert lists, which JSON makes of tuples, to tuples at any depth."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
