"""The config groups that all systems share, as NamedTuples, and functions that read configs.

Configs hold plain values and can omit fields that have a default. Only the entry points see a
config: all other functions take these NamedTuples or single values. The annotation of a field holds
its type and its valid values (see ranges.py).
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from diffusion_jax.config import named, ranges, versions
from diffusion_jax.config.ranges import DTYPES, Count, Decay, Interval, Positive, Scale, Share, WholeNumber

CROPS = ("center", "random")
LOSS_MASKS = ("", "alpha", "file")
INCEPTION_MODES = ("", "pytorch", "tf", "clean", "nemo")
"""Values of evaluation.inception_mode: "", and the keys of metrics.preprocess.INCEPTION."""
UNCAPTIONED = ("error", "drop", "empty")
CAPTIONED = ("arrow", "tfds")
"""Data sources that always yield captions. They ignore data.text."""
TEXTS = ("txt", "caption")
"""Suffixes of files that hold a caption."""
EMBEDDINGS = ("npy", "npz", "safetensors")
"""Suffixes of files that hold text embeddings computed before training, one text per file."""
SNAPSHOT_DTYPE = "float16"
"""The dtype of the power-function averages (`ema_widths`) in a snapshot file."""
MOMENTS = "moments"
"""The data source that yields stored outputs of an autoencoder. All others yield images."""


class Run(NamedTuple):
    """The config fields outside groups, such as the number of steps and the seed of a run.

    Read by diffusion_jax/train/loop.py.
    """

    steps: Count
    """The step at which training ends. To train a finished run for longer, raise this number and
    run the same command again. If optimizer.schedule is "cosine" or "wsd", also set
    optimizer.restart to the step that the run has reached."""
    batch_size: Count
    """The number of training images in a step, over all devices together."""
    seed: Annotated[int, Interval("[0, 18446744073709551616)")] = 0
    """The seed of all random numbers of a run: initial weights, order of the data, and noise."""
    log_every: Count = 100
    """Number of steps between two lines in metrics.jsonl."""
    sample_every: WholeNumber = 1_000
    """Number of steps between two sheets of pictures, which are drawn from `prompts` and saved in
    samples/; 0 draws none."""
    save_every: Count = 1_000
    """Number of steps between two checkpoints. A run that is killed loses at most the steps since
    its last checkpoint."""
    keep_last: Count = 5
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: WholeNumber = 0
    """Also keep the checkpoints of steps that are multiples of this number; 0 for none."""
    step_timeout: Count = 1_800
    """The longest time in seconds that a step and its checkpoint may take. If they take longer, the
    process prints the stacks of its threads and ends, so that a launcher can start it again."""
    deterministic: bool = True
    """Whether a training step on GPUs uses only kernels that return the same bits in every call.
    Exact resume needs this. On CPUs and TPUs, the field has no effect."""
    prompts: tuple[str, ...] = ()
    """Prompts of the pictures that are drawn every `sample_every` steps, one picture per prompt.
    Models that cannot draw from prompts alone, such as super-resolution models, use the texts of
    training pictures instead."""
    system: str = ""
    """The system that trains this config: imagen_jax, sd_jax, or sd_jax.vae for an autoencoder.
    Every config must name one."""


class Text(NamedTuple):
    """The text encoder, and how often training drops the text.

    Training either runs the encoder, or reads embeddings from a store or from the training data.
    The evaluation commands always run the encoder; so does sampling, unless it is given embeddings.

    Read by diffusion_jax/text/registry.py and diffusion_jax/precache/lookup.py.
    """

    encoder: str
    """The text encoder: "t5", "clip" (CLIP's last layer, as in Stable Diffusion 1),
    "clip_penultimate" (the layer before the last, as in Stable Diffusion 2), "minilm" (small; a
    Python package provides its weights), or "hashed" (a fixed random vector for each word, without
    any weights)."""
    weights: str = ""
    """The weights of the encoder: a folder or a Hugging Face name. "hashed" has none, and training
    on stored embeddings needs none."""
    store: str = ""
    """A folder of embeddings that `python -m diffusion_jax.precache` computed with this encoder.
    Training looks embeddings up there instead of running the encoder; "" for none."""
    width: Count = 1024
    """Number of values in the embedding of a token. A pretrained encoder must have this width."""
    max_tokens: Count = 128
    """Number of tokens of a text that the network sees. Longer texts are cut off."""
    read_tokens: Count = 512
    """Number of tokens that T5 encodes. The network sees the first `max_tokens` of them. Other
    encoders ignore this field."""
    dtype: Annotated[str, DTYPES[:2]] = "bfloat16"
    """The dtype in which a pretrained encoder computes."""
    learned_tokens: str = ""
    """A new word that training learns while all networks are frozen (textual inversion), as
    WORD=INITIAL*N, such as "<cat-toy>=toy*4": N vectors, which start as that of the word INITIAL.
    Only for Stable Diffusion with CLIP; "" for none."""
    drop_prob: Share = 0.1
    """The share of training images whose text is dropped. Guidance needs a model that has also
    learned to draw without a text."""


class Optimizer(NamedTuple):
    """The optimizer, its learning rate schedule, and the averages of the weights.

    Read by diffusion_jax/train/optimizer.py and diffusion_jax/train/state.py.
    """

    lr: Positive
    """The learning rate at the end of the warm-up."""
    name: str = "adamw"
    """The optimizer: "adamw"; "muon" orthogonalises the updates of kernels, and uses AdamW for the
    rest; "lion" needs a learning rate 3 to 10 times smaller; "adafactor" takes little memory;
    "sgd". Parameters are set in brackets, as in "muon(beta=0.9)". All have `weight_decay`."""
    schedule: str = "constant"
    """The learning rate after the warm-up: "constant"; "cosine" falls to 0 at the last step; "wsd"
    is constant, then falls to 0 over the last fifth of the steps; "inverse_sqrt" falls after
    `decay_from`; "ldm" is constant, after a warm-up that starts closer to 0, as in LDM."""
    restart: WholeNumber = 0
    """The step at which the schedule begins anew, with its warm-up. Set it to the last step of a
    finished run that trains for longer: by themselves, "cosine" and "wsd" stretch to the new number
    of steps, and the learning rate jumps up."""
    warmup: WholeNumber = 10_000
    """Number of steps over which the learning rate rises from about 0 to `lr`."""
    decay_from: Count = 70_000
    """The step after which the schedule "inverse_sqrt" divides the learning rate by
    sqrt(step / decay_from). Other schedules ignore it."""
    b1: Decay = 0.9
    """Adam's decay rate of the mean gradient (the first moment), also for Lion."""
    b2: Decay = 0.999
    """Adam's decay rate of the mean squared gradient (the second moment). Lion uses it as its own
    second rate, for which its authors recommend 0.99: "lion(b2=0.99)"."""
    eps: Positive = 1e-8
    """Adam's epsilon, which is added to the square root of the second moment."""
    weight_decay: Annotated[float, Interval("[0, inf)")] = 0.01
    """AdamW's weight decay: each update subtracts lr * weight_decay * weight from each weight."""
    lr_factors: str = ""
    """Factors of the learning rate of some weights, as REGEX=FACTOR separated by commas, such as
    "out_conv=0.1,^params/init_conv/=0"; 0 freezes weights. A regular expression selects weights by
    their paths, such as params/out_conv/bias. Of several that match, the last counts."""
    decay_factors: str = ""
    """Factors of the weight decay of some weights, written like `lr_factors`: "bias$=0" leaves
    biases out."""
    clip: Annotated[float, Interval("(0, inf]")] = 1.0
    """The largest norm of the gradient, over all weights together. A larger gradient is scaled down
    to this norm; inf for no limit."""
    micro_batch: Annotated[int, Interval("[0, 1048576]")] = 0
    """Number of images per device in one pass of a step, to save memory. The number of passes
    follows from batch_size and the mesh. With 0, a step makes one pass."""
    ema_decays: Annotated[tuple[float, ...], Interval("[0, 1)"), [()]] = (0.9999,)
    """Decay rates of the exponential moving averages of the weights. By default, images are drawn
    with the average that has the largest rate."""
    ema_warmup: bool = True
    """Whether the decay rates of ema_decays are limited to (1 + step) / (10 + step), so that the
    averages soon forget the initial weights. This changes a rate of 0.9999 before step 90,000.
    False keeps the rates constant, as NeMo does."""
    ema_widths: Annotated[tuple[float, ...], Interval("(0, 0.28]"), [()]] = ()
    """Relative widths of power-function averages of the weights (EDM2), such as (0.05, 0.10). After
    training, `python -m diffusion_jax.averages` computes averages of other widths from
    snapshots of these averages."""
    snapshot_every: WholeNumber = 0
    """Number of steps between two snapshots of the power-function averages; 0 for 1/32 of `steps`.
    """
    moment_dtype: Annotated[str, DTYPES[:2]] = "float32"
    """The dtype of Adam's first moment. "bfloat16" saves 2 of the at least 16 bytes of memory that
    training takes for each weight."""
    max_skipped: Count = 100
    """The run ends after this many steps in a row whose loss or gradient is not finite. If no step
    of the run was finite so far, it ends after at most 10 such steps."""


class Lora(NamedTuple):
    """LoRA: training of low-rank factors, whose product is added to the frozen `unet.weights`.

    Read by diffusion_jax/weights/lora.py.
    """

    rank: WholeNumber = 0
    """The rank of the factors. Factors of a higher rank can learn more, and take more space. 0
    trains all weights."""
    alpha: Positive = 8.0
    """The strength of the factors: their product is multiplied by alpha / rank, in training and
    when images are drawn."""
    targets: str = "_attn/"
    """A regular expression that selects the layers to adapt by their paths, such as mid_attn/q."""
    scale: Annotated[float, Interval("[-100, 100]")] = 1.0
    """A number that also multiplies the factors' product when images are drawn: 1 draws as in
    training, and 0 as without LoRA."""

    @property
    def alpha_by_rank(self) -> float:
        """The factor alpha / rank, which scales the product of the two low-rank matrices."""
        return self.alpha / self.rank


class MeshShape(NamedTuple):
    """The sizes of the three axes of the device mesh.

    One size can be -1. This axis then takes all devices that the other axes leave over.

    Read by diffusion_jax/devices/sharding.py.
    """

    replica: Annotated[int, Interval("(0, inf)"), (-1,)] = 1
    """Number of groups of devices. Each group holds all weights, and processes its part of the
    batch."""
    fsdp: Annotated[int, Interval("(0, inf)"), (-1,)] = -1
    """Number of devices in a group. The weights and the group's part of the batch are split over
    them."""
    tensor: Annotated[int, Interval("(0, inf)"), (-1,)] = 1
    """Number of devices that share the convolutions of each residual block."""


class Evaluation(NamedTuple):
    """Scoring during training: at intervals, pictures are drawn from prompts and scored.

    Read by diffusion_jax/train/scoring.py.
    """

    every: WholeNumber = 0
    """Number of training images (not steps) between two evaluations; 0 for no evaluation."""
    guidance: Annotated[tuple[float, ...], Interval("[0, 1000]")] = (7.5,)
    """The guidance scales. A picture is drawn and scored for every prompt at each scale."""
    prompts: str = ""
    """A file of prompts: .txt with one per line, a table (.csv, .tsv, .jsonl, .json), COCO's .json,
    or FILE::COLUMN to choose the column of a table. SOURCE:PATH::TEXT names the captions of a data
    source instead. "" for the prompts that the training data's source provides."""
    num_prompts: Count = 1_000
    """Number of prompts that are chosen from the file at random, the same ones in every run."""
    reference: str = ""
    """A file with the Inception statistics of real pictures, for FID, KID, precision, recall,
    density and coverage."""
    inception: str = ""
    """The weights of Inception, for sFID, the Inception Score and the metrics that use `reference`.
    """
    inception_mode: Annotated[str, INCEPTION_MODES] = ""
    """The preprocessing of pictures for Inception: pytorch (pytorch-fid, MLPerf), tf (ADM,
    torch-fidelity), clean (clean-fid) or nemo. Set it only if another program wrote `reference`,
    and the file does not record its preprocessing."""
    clip: str = ""
    """The weights of CLIP, for the CLIP score and CMMD."""
    clip_reference: str = ""
    """A file with the CLIP statistics of real pictures, for CMMD."""
    dinov2: str = ""
    """The weights of DINOv2, for the metrics that use its features."""
    dinov2_reference: str = ""
    """A file with the DINOv2 statistics of real pictures."""
    judge: str = ""
    """The folder of a judge: a classifier that `python -m diffusion_jax.metrics train_judge`
    trained on your own captions."""
    pickscore: str = ""
    """The weights of PickScore, a CLIP, such as yuvalkirstain/PickScore_v1."""
    hpsv2: str = ""
    """A folder with OpenCLIP's ViT-H/14 and HPS_v2.1_compressed.pt, for HPSv2."""
    aesthetic: str = ""
    """A folder with OpenAI's ViT-L/14 and sac+logos+ava1-l14-linearMSE.pth, for LAION's aesthetic
    score."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics to compute, such as fid and clip_score; () for all metrics whose
    references and weights are set. docs/evaluation.md lists the names."""


class Heldout(NamedTuple):
    """The loss on records that training never uses. `data.heldout` sets their share of the data.

    Read by diffusion_jax/heldout.py.
    """

    every: WholeNumber = 0
    """Number of steps between two measurements; 0 for none."""
    records: Count = 256
    """The largest number of held-out records to measure."""
    levels: Annotated[int, Interval("[1, 1000]")] = 8
    """Number of noise levels at which each record is measured. They are quantiles of the noise
    levels in training."""


class Log(NamedTuple):
    """Where a run writes its metrics, in addition to metrics.jsonl and TensorBoard's files.

    Read by diffusion_jax/logs/run_log.py.
    """

    wandb: str = ""
    """The project at Weights & Biases to which the metrics and the sheets of pictures are also
    written; "" for none. This needs the extra [wandb]."""


class Data(NamedTuple):
    """The training images: their source, filters, resizing, crop and flip.

    Read by diffusion_jax/data/sources/__init__.py and diffusion_jax/data/pipeline.py.
    """

    source: str
    """The format of the data: "folder", "webdataset" (tars), "arrayrecord", "arrow" or
    "huggingface" (data sets of Hugging Face), "tfds", "moments" (stored outputs of an autoencoder),
    "mixture", "synthetic" (random, for benchmarks), or the name of a module of your own."""
    path: str = ""
    """The location of the data: a folder, tar files, a URL or the name of a data set, depending on
    `source`, or the folder that `python -m diffusion_jax.data import --out` wrote."""
    text: str = "txt"
    """Where the captions or text embeddings are, such as txt or npy (files beside the images),
    json:caption (the field `caption` of a JSON file beside each image) or csv:text (the column
    `text` of tables). Several places give an image several captions: txt,json:long*0.5."""
    uncaptioned: Annotated[str, UNCAPTIONED] = "error"
    """What to do with images without captions: "error" refuses the data, "drop" leaves the images
    out, and "empty" gives them the empty text."""
    mixture: tuple[tuple[float, str, str, str], ...] = ()
    """The data sets that the source "mixture" combines, each as (weight, source, path, text)."""
    min_size: WholeNumber = 0
    """Leave out images whose shorter side has fewer pixels than this."""
    max_aspect: Annotated[float, Interval("[1, inf)"), (0,)] = 0.0
    """Leave out images whose longer side is more than this many times as long as the shorter side;
    0 for no limit."""
    min_chars: WholeNumber = 0
    """Leave out images whose captions have fewer characters than this."""
    shuffle_tags: bool = False
    """Whether to shuffle the tags of a caption, the texts between its commas, for each sample."""
    keep_tags: WholeNumber = 0
    """The number of tags at the beginning of a caption that keep their place and are never dropped,
    such as the name of a subject."""
    tag_drop_prob: Share = 0.0
    """The probability with which each other tag of a caption is left out of a sample."""
    max_broken: Share = 0.1
    """The largest share of images that may be damaged. If more are damaged, the run ends."""
    resize: WholeNumber = 0
    """The length in pixels to which the shorter side of an image is resized before the crop; 0 for
    the size of the crop."""
    aspect_buckets: tuple[tuple[int, int], ...] = ()
    """Aspect buckets: the shapes that images are cropped to, each as (height, width) in pixels.
    Every batch has one shape, and an image goes to the shape of the nearest aspect ratio. () crops
    all images to a square."""
    crop: Annotated[str, CROPS] = "center"
    """Whether the crop is at the center of an image, or at a random position."""
    flip: bool = False
    """Whether to mirror a random half of the images horizontally. Leave it off for images that
    mirroring would spoil, such as images of text."""
    threads: WholeNumber = 16
    """Number of threads that prepare batches ahead of training. Each thread prepares one batch at a
    time. With 0, each batch is prepared when it is needed."""
    heldout: Annotated[float, Interval("[0, 1)")] = 0.0
    """The share of the images that training never uses. They are kept for the held-out loss."""
    prior: str = ""
    """A folder of pictures that `sample` drew with the base model. They fill every second row of a
    batch, so that fine-tuning forgets less (prior preservation, Ruiz et al. 2022); "" for none."""
    prior_weight: Scale = 1.0
    """The weight in the loss of the pictures from `prior`. All other pictures have weight 1."""
    loss_mask: Annotated[str, LOSS_MASKS] = ""
    """What multiplies the loss of each pixel: "alpha", the opacity of the image; "file", the
    brightness of NAME.mask.png beside the image in a folder, which is grey, and 0 where it is
    transparent; or "" for nothing."""
    fields: tuple[str, ...] = ()
    """Named numbers of each image that the network also sees, each as NAME=LOW..HIGH with its
    smallest and its largest value, such as aesthetic=0..10 (docs/data.md)."""
    fields_drop_prob: Share = 0.1
    """The share of training images for which a field is dropped, so that the network also learns to
    draw without it. A dropped text drops all fields, too."""

    @property
    def embedded(self) -> bool:
        """True if the data set holds text embeddings instead of captions."""
        if self.source in CAPTIONED:
            return False
        texts = [part[-1] for part in self.mixture] if self.source == "mixture" else [self.text]
        places = [place.partition("*")[0] for text in texts for place in text.split(",")]
        return any(place.partition(":")[0].endswith(EMBEDDINGS) for place in places)


def split(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into two dicts: the fields outside groups, and the groups."""
    groups = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    return {key: value for key, value in config.items() if key not in groups}, groups


def read(kind: type, group: Mapping[str, Any], name: str) -> Any:
    """Return a NamedTuple or network of the class `kind` with the values of a config group.

    Omitted fields get their defaults. `name` is the group's name for error messages.

    Raises:
        ValueError: A field is unknown or missing, or its value is out of range.
    """
    values = {k: plain(value) for k, value in complete(ranges.defaults(kind), group, name).items()}
    ranges.check(kind, values, name)
    if dataclasses.is_dataclass(kind):
        values["dtype"] = jnp.dtype(values["dtype"])
    return kind(**values)


def complete(fields: Mapping[str, Any], group: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a config group with the defaults of its omitted fields.

    Args:
        fields: Maps the group's fields, in order, to their defaults. A field without a default maps
            to dataclasses.MISSING.
        group: The values in the config.
        name: The group's name for error messages; "" for fields outside groups.

    Raises:
        ValueError: A field is unknown, or a field without a default is omitted.
    """
    dot = f"{name}." if name else ""
    unknown = sorted(group.keys() - fields.keys())
    if unknown:
        if renamed := versions.renamed(dot + unknown[0]):
            raise ValueError(f"unknown config field {dot}{unknown[0]}: its name is now {renamed}")
        close = named.closest(unknown[0], fields)
        listed = named.choices(f"did you mean {dot}{close}?" if close else "", fields)
        raise ValueError(f"unknown config field {dot}{unknown[0]}: {listed}")
    missing = [f for f in sorted(fields) if fields[f] is dataclasses.MISSING and f not in group]
    if missing:
        lacks = ", ".join(dot + field for field in missing)
        raise ValueError(f"the config lacks {lacks}: set every field that has no default")
    values = {**fields, **group}
    for field, value in group.items():  # A config file can hold 0 instead of 0.0.
        if isinstance(fields[field], float) and type(value) is int:
            values[field] = float(value)
    return values


def check_prompts(run: Run, data: Data) -> None:
    """Raise ValueError if a run draws images during training but its config has no prompts.

    Data with stored embeddings need no prompts.
    """
    if not data.embedded and run.sample_every and not run.prompts:
        raise ValueError(
            "prompts is empty: give texts to draw during training, such as "
            "--config.prompts=\"('a red dog',)\", or set sample_every=0"
        )


def check_tags(data: Data, text: Text) -> None:
    """Raise ValueError if tags are to be shuffled or dropped, but embeddings are stored."""
    if (data.shuffle_tags or data.tag_drop_prob) and (data.embedded or text.store):
        raise ValueError(
            "data.shuffle_tags and data.tag_drop_prob change the captions for each sample, but "
            "their embeddings are stored: leave text.store empty and name captions in data.text"
        )


def check_loss_mask(data: Data, maskless: str = "") -> None:
    """Raise ValueError if data.loss_mask does not suit the data source or the training method.

    `maskless` is the value of diffusion.method if its loss cannot have a mask.
    """
    kinds = [part[1] for part in data.mixture] if data.source == "mixture" else [data.source]
    for kind in kinds:
        if data.loss_mask and kind == MOMENTS:
            raise ValueError(
                f"data.loss_mask is {data.loss_mask!r}, but stored moments have no masks: set it "
                "to '', or name a source of images"
            )
        if data.loss_mask == "file" and kind != "folder":
            raise ValueError(
                f"data.loss_mask is 'file', but data.source is {kind!r}: only a folder has files "
                "beside its images, so set data.loss_mask='alpha'"
            )
    if data.loss_mask and maskless:
        raise ValueError(
            f"data.loss_mask is {data.loss_mask!r}, but the loss of diffusion.method={maskless} "
            "has no mask: set data.loss_mask=''"
        )


def plain(value: Any) -> Any:
    """Convert a list, and all lists nested in it, to tuples. JSON turns tuples into lists.

    Other values are returned unchanged.
    """
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
