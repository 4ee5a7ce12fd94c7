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
    """The fields of a config outside its groups: the system, and how often things happen."""

    steps: Count
    """Train up to this step."""
    batch_size: Count
    """Samples per step on all devices together."""
    seed: Annotated[int, "[0, 4294967295]"] = 0
    """The seed of all random numbers."""
    log_every: Count = 100
    """Steps between two lines of metrics."""
    sample_every: Amount = 1_000
    """Steps between two sheets of sampled images; 0 for none."""
    save_every: Count = 1_000
    """Steps between two checkpoints."""
    keep_last: Count = 5
    """Number of newest checkpoints to keep."""
    keep_every: Amount = 0
    """Keep checkpoints of multiples of this step for good; 0 for none."""
    step_timeout: Count = 1_800
    """Seconds for one step with its save, after which the process counts as hanging and ends."""
    prompts: tuple[str, ...] = ()
    """Prompts of the images that are sampled during training."""
    system: str = ""
    """The system, such as imagen_jax, which every config names: see systems.find."""


class Text(NamedTuple):
    """The text encoder, and how often training drops the text.

    Training runs the encoder itself, or reads its embeddings from a store or from the data.
    Sampling and scores always need the encoder.
    """

    encoder: str
    """The name of an encoder in text.registry."""
    weights: str = ""
    """A folder or a Hugging Face name, for pretrained encoders; stored embeddings need none."""
    store: str = ""
    """A store of this encoder's embeddings, which training looks up."""
    width: Count = 1024
    """The width of a token's embedding."""
    max_tokens: Count = 128
    """Number of tokens that the network sees."""
    read_tokens: Count = 512
    """Number of tokens that T5 reads; the first `max_tokens` are kept."""
    dtype: Annotated[str, DTYPES[:2]] = "bfloat16"
    """The type in which a pretrained encoder computes."""
    drop_prob: Share = 0.1
    """Share of training samples whose text is dropped, for classifier-free guidance."""


class Optimizer(NamedTuple):
    """AdamW, its schedule, and the averages of its parameters."""

    lr: Positive
    """The learning rate after the warmup."""
    schedule: str = "constant"
    """The schedule of the learning rate, a name in train.optimizer.SCHEDULES."""
    warmup: Amount = 10_000
    """Steps over which the learning rate rises from 0."""
    decay_from: Count = 70_000
    """The step from which the schedule "inverse_sqrt" lowers the rate."""
    b1: Decay = 0.9
    """Adam's decay rate of the first moment."""
    b2: Decay = 0.999
    """Adam's decay rate of the second moment."""
    eps: Positive = 1e-8
    """Adam's epsilon, added to the root of the second moment."""
    weight_decay: Annotated[float, "[0, inf)"] = 0.01
    """AdamW's decoupled weight decay, before the factor lr."""
    clip: Annotated[float, "(0, inf]"] = 1.0
    """The global norm to which gradients are clipped; inf for no clipping."""
    micro_batch: Annotated[int, "[0, 1048576]"] = 0
    """Samples per device and pass; batch_size and the mesh then give the number of passes, which
    share the noise of a single pass. With 0, `accumulate` is the number of passes."""
    accumulate: Count = 1
    """Passes per step, each with its own noise."""
    ema_decays: Annotated[tuple[float, ...], "[0, 1)", [()]] = (0.9999,)
    """Decay rates of the exponential moving averages of the parameters."""
    ema_warmup: bool = False
    """Use the decay rate (1 + step) / (10 + step) while it is below an average's own."""
    ema_widths: Annotated[tuple[float, ...], "(0, 0.28]", [()]] = ()
    """Relative widths of power-function averages, such as 0.05 and 0.10. From their snapshots any
    other width can be computed after training (see diffusion_jax.averages)."""
    snapshot_every: Amount = 0
    """Steps between two snapshots of these averages; 0 for a 32nd of the run."""
    moment_dtype: Annotated[str, DTYPES[:2]] = "float32"
    """The type of the first moment. "bfloat16" saves 2 of at least 16 bytes per parameter."""
    max_skipped: Count = 100
    """End the run after this many steps in a row without a finite loss and gradient, or after 10 if
    no step was finite before."""


class Lora(NamedTuple):
    """Training of low-rank factors beside the frozen weights `unet.weights`: see lora."""

    rank: Amount = 0
    """Columns of a factor; 0 trains the weights themselves."""
    alpha: Positive = 8.0
    """The product of the factors is scaled by alpha / rank."""
    targets: str = "_attn/"
    """A regular expression for the paths of the adapted layers, such as mid_attn/q."""
    scale: Annotated[float, "[-100, 100]"] = 1.0
    """A factor on the learned change in sampling; 0 samples from the frozen weights."""

    @property
    def alpha_by_rank(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank


class MeshShape(NamedTuple):
    """Sizes of the mesh axes; -1 means all remaining devices."""

    replica: Annotated[int, "(0, inf)", (-1,)] = 1
    """Groups of devices that hold a copy of the parameters each, and split the batch."""
    fsdp: Annotated[int, "(0, inf)", (-1,)] = -1
    """Devices that split the parameters and the batch."""
    tensor: Annotated[int, "(0, inf)", (-1,)] = 1
    """Devices that split the layers of residual blocks."""


class Evaluation(NamedTuple):
    """Scores during training, for prompts from a file or from the data."""

    every: Amount = 0
    """Training images between two evaluations; 0 for none."""
    guidance: Annotated[tuple[float, ...], "[0, 1000]"] = (7.5,)
    """The guidance scales to score."""
    prompts: str = ""
    """A file of prompts; "" for the prompts that the data source itself provides."""
    num_prompts: Count = 1_000
    """Number of prompts drawn from the file at random."""
    reference: str = ""
    """Statistics of Inception features of real images, for FID and other metrics."""
    inception: str = ""
    """Weights of Inception."""
    clip: str = ""
    """Weights of CLIP, for the CLIP score and CMMD."""
    clip_reference: str = ""
    """Statistics of CLIP features of real images, for CMMD."""
    dinov2: str = ""
    """Weights of DINOv2."""
    dinov2_reference: str = ""
    """Statistics of DINOv2 features of real images."""
    judge: str = ""
    """The folder of a judge made by `metrics train_judge`."""
    metrics: tuple[str, ...] = ()
    """Names in metrics.table; () for all metrics that the references and weights allow."""


class Heldout(NamedTuple):
    """The held-out loss during training: see diffusion_jax.heldout, and `data.heldout`."""

    every: Amount = 0
    """Steps between two measurements; 0 for none."""
    records: Count = 256
    """The largest number of held-out records to use."""
    levels: Annotated[int, "[1, 1000]"] = 8
    """Noise levels per record: quantiles of the training distribution."""


class Data(NamedTuple):
    """The pictures to train on: their source, filters, resize, crop and flip."""

    source: str
    """The kind of data, a name in data.sources.SOURCES."""
    path: str = ""
    """The folder, tars, URL or data set of the source."""
    text: str = "txt"
    """Where the captions or embeddings are, such as txt, json:caption or npy."""
    uncaptioned: Annotated[str, UNCAPTIONED] = "error"
    """What to do with images without captions: raise an error, drop them, or use the text ""."""
    mixture: tuple[tuple[float, str, str, str], ...] = ()
    """Parts (weight, source, path, text) of the source "mixture"."""
    min_size: Amount = 0
    """Skip images whose shorter side has fewer pixels."""
    max_aspect: Annotated[float, "[1, inf)", (0,)] = 0.0
    """Skip images whose longer side is more than this many times the shorter; 0 for no limit."""
    min_chars: Amount = 0
    """Skip records whose captions are shorter."""
    max_broken: Share = 0.1
    """The share of damaged records up to which the run continues."""
    resize: Amount = 0
    """Pixels of the shorter side before the crop; 0 for the size of the crop."""
    crop: Annotated[str, CROPS] = "center"
    """Where images are cropped: in the center, or at a random place."""
    flip: bool = False
    """Mirror half of the images, at random."""
    threads: Amount = 16
    """Batches prepared in parallel; 0 prepares each batch on demand."""
    heldout: Annotated[float, "[0, 1)"] = 0.0
    """The share of the records that training never sees: see `Heldout`."""
    prior: str = ""
    """A folder of images that the base model drew (sample's output with its metadata.jsonl). They
    replace every second row, for prior preservation (Ruiz et al. 2022)."""
    prior_weight: Scale = 1.0
    """The weight of such a row in the loss; other rows have 1."""

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
