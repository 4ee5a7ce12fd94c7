"""The config groups that all systems share, as typed tuples, and functions that read them.

Configs hold plain values and can omit fields that have a default. Only the entry points see a
config: all other functions take these tuples or single values. The annotation of a field holds its
valid values: an interval of numbers or a table of names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from diffusion_jax.config import named, ranges
from diffusion_jax.config.ranges import DTYPES, Amount, Count, Decay, Positive, Scale, Share

CROPS = ("center", "random")
UNCAPTIONED = ("error", "drop", "empty")
CAPTIONED = ("arrow", "tfds")
"""Data sources that always yield captions. They ignore data.text."""
EMBEDDINGS = ("npy", "npz", "safetensors")
"""Suffixes of files that hold text embeddings computed before training, one text per file."""
SNAPSHOT_DTYPE = "float16"
"""The dtype of the power-function averages (`ema_widths`) in a snapshot file."""
MOMENTS = "moments"
"""The data source that yields stored outputs of an autoencoder. All others yield images."""


class Run(NamedTuple):
    """The config fields outside groups: the system, the run's length, and the intervals of logs,
    sampled images and checkpoints.
    """

    steps: Count
    """Train up to this step."""
    batch_size: Count
    """Samples per training step, summed over all devices."""
    seed: Annotated[int, "[0, 4294967295]"] = 0
    """The seed of the run's random numbers."""
    log_every: Count = 100
    """Steps between two lines of metrics."""
    sample_every: Amount = 1_000
    """Steps between two sheets of sampled images; 0 draws none."""
    save_every: Count = 1_000
    """Steps between two checkpoints."""
    keep_last: Count = 5
    """Number of newest checkpoints to keep."""
    keep_every: Amount = 0
    """Never delete the checkpoints at multiples of this step; 0 keeps only the newest ones."""
    step_timeout: Count = 1_800
    """Seconds after which a step, including its checkpoint, counts as hanging: the process ends."""
    prompts: tuple[str, ...] = ()
    """Prompts for the images that are sampled during training."""
    system: str = ""
    """The package that trains this config, such as imagen_jax. Every config names one."""


class Text(NamedTuple):
    """The text encoder, and how often training drops the text.

    Training either runs the encoder, or reads embeddings from a store or from the training data.
    Sampling and evaluation always run the encoder.
    """

    encoder: str
    """The name of the encoder, a key of text.registry.ENCODERS."""
    weights: str = ""
    """The weights of a pretrained encoder: a folder or a Hugging Face name. Training on stored
    embeddings needs no weights."""
    store: str = ""
    """A store of embeddings computed by this encoder. Training reads them instead of running the
    encoder; "" for no store."""
    width: Count = 1024
    """Number of channels of a token's embedding."""
    max_tokens: Count = 128
    """Number of tokens that the network sees."""
    read_tokens: Count = 512
    """Number of tokens that T5 reads; the first `max_tokens` are kept."""
    dtype: Annotated[str, DTYPES[:2]] = "bfloat16"
    """The dtype in which a pretrained encoder computes."""
    drop_prob: Share = 0.1
    """Share of training samples whose text is dropped, for classifier-free guidance."""


class Optimizer(NamedTuple):
    """The AdamW optimizer, its learning rate schedule, and the averages of the parameters."""

    lr: Positive
    """The learning rate after the warmup."""
    schedule: str = "constant"
    """The schedule of the learning rate, a name in train.optimizer.SCHEDULES."""
    warmup: Amount = 10_000
    """Steps over which the learning rate rises from 0."""
    decay_from: Count = 70_000
    """The step after which the schedule "inverse_sqrt" lowers the learning rate."""
    b1: Decay = 0.9
    """Adam's decay rate of the first moment."""
    b2: Decay = 0.999
    """Adam's decay rate of the second moment."""
    eps: Positive = 1e-8
    """Adam's epsilon, added to the square root of the second moment."""
    weight_decay: Annotated[float, "[0, inf)"] = 0.01
    """AdamW's decoupled weight decay. Each update multiplies it by the learning rate."""
    clip: Annotated[float, "(0, inf]"] = 1.0
    """The global norm to which gradients are clipped; inf for no clipping."""
    micro_batch: Annotated[int, "[0, 1048576]"] = 0
    """Samples per device in one forward and backward pass. The number of passes per step follows
    from batch_size and the mesh. The batch has the same noise for every value above 0. With 0,
    `accumulate` sets the number of passes."""
    accumulate: Count = 1
    """Forward and backward passes per step. Each pass draws separate noise."""
    ema_decays: Annotated[tuple[float, ...], "[0, 1)", [()]] = (0.9999,)
    """Decay rates of the exponential moving averages of the parameters."""
    ema_warmup: bool = False
    """Use the decay rate (1 + step) / (10 + step) as long as it is below the one in ema_decays."""
    ema_widths: Annotated[tuple[float, ...], "(0, 0.28]", [()]] = ()
    """Relative widths of the power-function averages of EDM2, such as 0.05 and 0.10. After
    training, diffusion_jax.averages computes other widths from their snapshots."""
    snapshot_every: Amount = 0
    """Steps between two snapshots of the power-function averages; 0 for 1/32 of the run."""
    moment_dtype: Annotated[str, DTYPES[:2]] = "float32"
    """The dtype of Adam's first moment. "bfloat16" saves 2 of at least 16 bytes per parameter."""
    max_skipped: Count = 100
    """End the run after this many consecutive steps whose loss or gradient is not finite. If no
    step of the run was finite before, end it after 10."""


class Lora(NamedTuple):
    """LoRA: training of low-rank factors, whose product is added to the frozen `unet.weights`."""

    rank: Amount = 0
    """The rank of the product of the two factors; 0 trains the weights instead of factors."""
    alpha: Positive = 8.0
    """The product of the two factors is multiplied by alpha / rank."""
    targets: str = "_attn/"
    """A regular expression for the paths of the adapted layers, such as mid_attn/q."""
    scale: Annotated[float, "[-100, 100]"] = 1.0
    """A multiplier of the learned change during sampling; 0 samples from the frozen weights."""

    @property
    def alpha_by_rank(self) -> float:
        """The multiplier of the product of the two low-rank factors."""
        return self.alpha / self.rank


class MeshShape(NamedTuple):
    """Sizes of the mesh axes; -1 means all remaining devices."""

    replica: Annotated[int, "(0, inf)", (-1,)] = 1
    """Number of device groups. Each holds all parameters and processes a part of the batch."""
    fsdp: Annotated[int, "(0, inf)", (-1,)] = -1
    """Number of devices over which both the parameters and the batch are sharded."""
    tensor: Annotated[int, "(0, inf)", (-1,)] = 1
    """Number of devices over which each layer of a residual block is sharded."""


class Evaluation(NamedTuple):
    """Evaluation during training, with prompts from a file or from the training data."""

    every: Amount = 0
    """Number of training images between two evaluations; 0 for no evaluation."""
    guidance: Annotated[tuple[float, ...], "[0, 1000]"] = (7.5,)
    """The guidance scales to evaluate."""
    prompts: str = ""
    """A file of prompts; "" for the prompts that the data source provides."""
    num_prompts: Count = 1_000
    """Number of prompts drawn from the file at random."""
    reference: str = ""
    """A file of statistics of Inception features of real images, for FID and other metrics."""
    inception: str = ""
    """The weights of Inception, for FID and other metrics."""
    clip: str = ""
    """The weights of CLIP, for the CLIP score and CMMD."""
    clip_reference: str = ""
    """A file of statistics of CLIP features of real images, for CMMD."""
    dinov2: str = ""
    """The weights of DINOv2, for metrics on its features."""
    dinov2_reference: str = ""
    """A file of statistics of DINOv2 features of real images."""
    judge: str = ""
    """The folder of a classifier that `metrics train_judge` trained."""
    metrics: tuple[str, ...] = ()
    """Names of metrics, from metrics.table. () computes all metrics whose reference statistics and
    weights are set above."""


class Heldout(NamedTuple):
    """The loss on held-out records, measured during training. `data.heldout` is their share."""

    every: Amount = 0
    """Steps between two measurements; 0 for no measurements."""
    records: Count = 256
    """The largest number of held-out records to use."""
    levels: Annotated[int, "[1, 1000]"] = 8
    """Number of noise levels at which each record is measured. They are quantiles of the noise
    distribution in training."""


class Data(NamedTuple):
    """The training images: their source, filters, resizing, crop and flip."""

    source: str
    """The kind of data, a key of data.sources.SOURCES."""
    path: str = ""
    """Where the data is: a folder, tar files, a URL or a dataset's name, depending on `source`."""
    text: str = "txt"
    """The field that holds the captions or text embeddings, such as txt, json:caption or npy."""
    uncaptioned: Annotated[str, UNCAPTIONED] = "error"
    """How to treat images without captions: "error" raises an error, "drop" skips them, and
    "empty" uses the empty text."""
    mixture: tuple[tuple[float, str, str, str], ...] = ()
    """The datasets that the source "mixture" combines, each as (weight, source, path, text)."""
    min_size: Amount = 0
    """Skip images whose shorter side has fewer pixels than this."""
    max_aspect: Annotated[float, "[1, inf)", (0,)] = 0.0
    """Skip images whose longer side exceeds the shorter by more than this factor; 0: no limit."""
    min_chars: Amount = 0
    """Skip records whose captions have fewer characters than this."""
    max_broken: Share = 0.1
    """End the run if more than this share of the records is damaged."""
    resize: Amount = 0
    """Resize the shorter side to this many pixels before the crop; 0 for the size of the crop."""
    crop: Annotated[str, CROPS] = "center"
    """Crop images at the center, or at a random position."""
    flip: bool = False
    """Mirror a random half of the images horizontally."""
    threads: Amount = 16
    """Number of batches prepared in parallel; 0 prepares each batch when it is needed."""
    heldout: Annotated[float, "[0, 1)"] = 0.0
    """The share of the records that training never uses, kept for the held-out loss."""
    prior: str = ""
    """A folder of images drawn by the base model, with the metadata.jsonl that `sample` writes.
    Every second row of a batch is one of them, for prior preservation (Ruiz et al. 2022)."""
    prior_weight: Scale = 1.0
    """The weight in the loss of the rows from `prior`. All other rows have weight 1."""

    @property
    def embedded(self) -> bool:
        """True if the field `text` holds embeddings instead of captions."""
        if self.source in CAPTIONED:
            return False
        texts = [part[-1] for part in self.mixture] if self.source == "mixture" else [self.text]
        return any(text.partition(":")[0].endswith(EMBEDDINGS) for text in texts)


def split(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into its fields outside groups and its groups."""
    groups = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    return {key: value for key, value in config.items() if key not in groups}, groups


def read(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """Build a NamedTuple or network from a config group, with defaults for omitted fields.

    Raises:
        ValueError: A field is unknown or missing, or its value is out of range.
    """
    values = {k: plain(value) for k, value in complete(ranges.defaults(kind), group, name).items()}
    ranges.check(kind, values, name)
    if dataclasses.is_dataclass(kind):
        values["dtype"] = jnp.dtype(values["dtype"])
    return kind(**values)


def complete(fields: Mapping[str, Any], group: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Add the defaults of omitted fields to a config group.

    Args:
        fields: Maps the group's fields, in order, to their defaults. A field without a default
            maps to dataclasses.MISSING.
        group: The values in the config.
        name: The group's name for error messages; "" for fields outside groups.

    Raises:
        ValueError: A field is unknown, or a field without a default is omitted.
    """
    dot = f"{name}." if name else ""
    unknown = sorted(group.keys() - fields.keys())
    if unknown:
        close = named.closest(unknown[0], fields)
        listed = named.choices(f"did you mean {dot}{close}?" if close else "", fields)
        raise ValueError(f"unknown config field {dot}{unknown[0]}: {listed}")
    missing = [f for f in sorted(fields) if fields[f] is dataclasses.MISSING and f not in group]
    if missing:
        raise ValueError(f"the config lacks {', '.join(dot + field for field in missing)}")
    values = {**fields, **group}
    for field, value in group.items():  # A config file can hold 0 instead of 0.0.
        if isinstance(fields[field], float) and type(value) is int:
            values[field] = float(value)
    return values


def check_prompts(run: Run, data: Data) -> None:
    """Raise ValueError if images are sampled during training but the config has no prompts."""
    if not data.embedded and run.sample_every and not run.prompts:
        raise ValueError(
            "prompts is empty: give texts to draw during training, such as "
            "--config.prompts=\"('a red dog',)\", or set sample_every=0"
        )


def plain(value: Any) -> Any:
    """Convert nested lists to tuples. JSON stores tuples as lists."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
