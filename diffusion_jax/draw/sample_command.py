"""The sampling command of every system: draw prompts, and write the images and their metadata.

The command writes a PNG file for each image, a contact sheet and metadata.jsonl. Before that, it
moves an earlier drawing out of the folder, so that no picture is overwritten. A system reads the
flags that only it has. This module handles models, prompts, seeds, progress and files, in the same
way for all systems.
"""

import contextlib
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import Float, UInt8

from diffusion_jax import cli, files
from diffusion_jax.config import picture_fields, ranges
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.data import rows as table_rows
from diffusion_jax.devices import programs
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw import input_pictures, layouts, option_flags, png_text, seeds
from diffusion_jax.draw.input_pictures import InputPictures
from diffusion_jax.draw.kind import Kind
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.program import Images
from diffusion_jax.draw.stage import Stage
from diffusion_jax.files import sheets, untrusted
from diffusion_jax.logs import progress

flags.disclaim_key_flags()  # --help lists these flags with those of the module that runs `command`.


_INDEX = "metadata.jsonl"
_SHOWN = 5  # The log shows the ignored parts of at most this many texts.


class Inputs(NamedTuple):
    """What to draw: the texts and pictures that the flags of a sampling command name."""

    captions: Sequence[str]
    """The texts, or the names of the files that hold their embeddings."""
    prompts: Sequence[Any]
    """The texts, or their embeddings."""
    pictures: InputPictures | None = None
    """Pictures to draw over."""
    low_res: Sequence[UInt8[np.ndarray, "h w 3"]] = ()
    """Pictures to enlarge, one per text."""
    batch_sizes: Sequence[int | None] = ()
    """The batch size of each stage; None for a default."""
    paths: Mapping[str, Sequence[str]] = {}
    """Paths of input files, keyed by their names in metadata.jsonl, such as "image" and "mask".

    A key has one path for all texts, or one per text.
    """
    all_sizes: bool = False
    """Whether to write the images of a cascade's earlier stages as well."""
    numbers: Sequence[Mapping[str, Float[np.ndarray, "_"]]] = ()
    """For each stage, the numbers of fields of each text, from the table of the prompts."""
    preview: Preview | None = None
    """Called on the host at each evaluation of the network (see Model.changed)."""
    opening: Mapping[str, Any] = {}
    """Further arguments of Kind.open."""

    def batches(self, model: Model, rows: Sequence[int], seeds: Sequence[int]) -> Iterator[list[Images]]:
        """Draw image n from text rows[n] and seed seeds[n]. Yield batches: an array per stage."""
        return model.batches(
            self.prompts,
            rows,
            seeds,
            pictures=self.pictures,
            low_res=self.low_res,
            batch_sizes=self.batch_sizes,
            numbers=self.numbers,
        )


Read = Callable[[list[str], pathlib.Path], Inputs]
"""A function (prompts, output folder) -> the inputs that a system's own flags name."""


def command(kind: Kind, read: Read) -> None:
    """Run `python -m PACKAGE.sample --out=FOLDER`. Its --help shows the calling module's docstring.

    Args:
        kind: The system.
        read: Reads the flags that only this system has. Its list of prompts may be empty. A
            ValueError or OSError becomes a one-line message and exit code 2.
    """
    f, open_model = _define_flags(), _define_model(kind, read)

    def main() -> None:
        cli.start()
        out = files.path(f["out"].value)
        with cli.bad_input(), contextlib.ExitStack() as held:
            if not f["out"].value:
                raise ValueError("--out is empty: name the folder to write to")
            files.check_writable(out, "--out")
            folder = out
            if f["rehearse"].value:
                folder = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory()))
            file = f["prompts"].value
            prompts = [*f["prompt"].value, *(prompt_files.read(file) if file is not None else ())]
            layout = _layout(f, prompts, out)
            model, inputs = open_model(prompts, folder)
            if layout:
                _check_layout(layout, inputs, *model.shapes[-1])
            settings = [stage.settings for stage in model.stages]
            columns = [prompt_numbers(s.fields, s.sampler.fields, len(inputs.captions)) for s in settings]
            inputs = inputs._replace(numbers=columns)
            rows = [i for i in range(len(inputs.captions)) for _ in range(f["num_images"].value)]
            numbers = range(f["seed"].value, f["seed"].value + len(rows))
            seeds.halves(numbers[-1:])
            if f["rehearse"].value:
                print(_rehearse(model, inputs, out, len(rows), folder))
                return
            batches = inputs.batches(model, rows, numbers)
            out.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                _move_earlier(out)
        reported = progress.reported(batches, len(rows), "images", size=lambda batch: len(batch[-1]))
        _write(model, inputs, out, rows, numbers, reported, layout)
        logging.info("wrote %d images, %s and %s to %s", len(rows), sheets.NAME, _INDEX, out)

    cli.run(main, "write --prompt={!r}")


def prompt_numbers(fields: Sequence[str], given: str, num_prompts: int) -> dict[str, Float[np.ndarray, "N"]]:
    """Return the columns of `fields` in the table --prompts, with one row for each prompt.

    The prompts of --prompt come first. They and empty cells get the number that `given` names, or
    NaN if it names none. `fields` is data.fields of a run's config, and `given` its sampler.fields.
    """
    file, named = flags.FLAGS.prompts, picture_fields.read(fields)
    columns = prompt_files.numbers(file, named) if file else {}
    defaults = picture_fields.arrays(named, picture_fields.values(named, given), num_prompts)
    found = {}
    for key, column in columns.items():
        padded = np.pad(column, (num_prompts - len(column), 0), constant_values=np.nan)
        found[key] = np.where(np.isnan(padded), defaults[key], padded).astype(np.float32)
    return found


def _warn_of_cuts(stage: Stage, prompts: Sequence[str]) -> None:
    """Log the number of texts that the encoder does not read in full, and what it ignores.

    The ignored parts are logged for at most five texts.
    """
    encoder, s = stage.encoder, stage.settings.sampler
    if getattr(s, "prompt_weights", False):  # Then the encoder reads texts of any length.
        return
    texts = [*prompts, *([s.negative_prompt] if s.negative_prompt else ())]
    lost = [(text, part) for text, part in zip(texts, encoder.cut_off(texts), strict=True) if part]
    for text, part in lost[:_SHOWN]:
        logging.warning(
            "the text encoder ignores %r in the text %r, because it does not know these characters "
            "or reads only the first %d tokens",
            part,
            text,
            encoder.max_tokens,
        )
    if lost:
        logging.warning("%d of %d texts are not read in full", len(lost), len(texts))


def _define_flags() -> dict[str, flags.FlagHolder]:
    integer = flags.DEFINE_integer
    holders = [
        flags.DEFINE_string("out", None, "The folder to write to.", required=True),
        flags.DEFINE_multi_string("prompt", [], "A text to draw; may be repeated."),
        flags.DEFINE_string("prompts", None, "A .txt file with one text per line, a table, or FILE::COLUMN."),
        flags.DEFINE_enum(
            "layout",
            None,
            [*layouts.LAYOUTS],
            "Write --out as the benchmark's own programs read it; --prompts is its file (or folder) of prompts.",
        ),
        integer("num_images", 1, "Images for each text.", lower_bound=1, upper_bound=10**6),
        flags.DEFINE_bool("rehearse", False, "Print what would be drawn, and exit."),
        integer("seed", 0, "The seed of the first image.", lower_bound=0, upper_bound=seeds.MOST),
    ]
    return {holder.name: holder for holder in holders}


def _define_model(kind: Kind, read: Read) -> Callable[..., tuple[Model, Inputs]]:
    """Define the flags of models, their options, and pictures to draw over.

    Return a function of the prompts and the output folder. It opens the model and the pictures, and
    returns the model and what to draw. For `read`, see `command`.
    """
    read_paths, read_pictures = kind.define_paths(several=False), input_pictures.define()
    batch: flags.FlagHolder
    strength: flags.FlagHolder
    if cascades := kind.file_options is None:
        holders = option_flags.define_by_stage(kind.options)
        batch = flags.DEFINE_list("batch_size", [], "Images per batch: one value, or one per stage.")
        strength = flags.DEFINE_list(
            "strength",
            ["0.8"],
            "Share of the steps that draw over --image: one value for the first stage, or one per stage.",
        )
    else:
        holders = option_flags.define(kind.options)
        batch = flags.DEFINE_integer("batch_size", None, "Number of images to draw at once.", lower_bound=1)
        strength = flags.DEFINE_float("strength", 0.8, "Share of the sampling steps that draw over --image, in (0, 1].")

    def opened(prompts: list[str], out: pathlib.Path) -> tuple[Model, Inputs]:
        workdirs, models = read_paths()
        if bool(workdirs) == bool(models):
            raise ValueError("give exactly one of --workdir=FOLDER (a training run) and --model=PATH")
        inputs = read(prompts, out)
        pictures = read_pictures(len(inputs.captions))
        paths, share = workdirs or models, strength.value
        if cascades:
            sizes = option_flags.each("batch_size", batch.value, ranges.Count, len(paths))
            values = option_flags.by_stage(kind.options, holders, len(paths))
            each = [ranges.read_value("--strength", text, ranges.Share) for text in share]
            share = each[0] if len(each) == 1 else each
        else:
            sizes, values = [batch.value], [option_flags.values(kind.options, holders)]
            if pictures and not 0 < strength.value <= 1:
                raise ValueError(f"strength is {share}: it must be above 0 and at most 1")
        model = kind.open(paths, values, **inputs.opening)
        model = model.over(pictures, share, {}, inputs.preview)
        if isinstance(inputs.prompts[0], str):  # It is no embedding.
            _warn_of_cuts(model.stages[0], inputs.prompts)
            model.warn_of_words(inputs.prompts)
        named = {**inputs.paths, "image": flags.FLAGS.image, "mask": flags.FLAGS.mask}
        return model, inputs._replace(pictures=pictures, batch_sizes=sizes, paths=named)

    return opened


def _layout(f: Mapping[str, flags.FlagHolder], prompts: Sequence[str], out: pathlib.Path) -> layouts.Layout | None:
    """Return the layout that --layout names. Raises ValueError if other flags do not fit it."""
    name, file = f["layout"].value, f["prompts"].value
    if name is None:
        return None
    if file is None or f["prompt"].value:
        raise ValueError(f"--layout={name} needs --prompts=FILE, and no --prompt")
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out={out} is not empty: give --layout={name} a new folder, because the benchmark "
            "scores every picture in it"
        )
    return layouts.LAYOUTS[name](file, prompts, f["num_images"].value)


def _check_layout(layout: layouts.Layout, inputs: Inputs, height: int, width: int) -> None:
    """Raise ValueError if pictures of this size, or of all stages, do not fit the layout."""
    if inputs.all_sizes:
        raise ValueError("--layout and --all_sizes exclude each other: leave one out")
    if layout.square and height != width:
        raise ValueError(
            f"--layout={flags.FLAGS.layout} needs square pictures, but the model draws "
            f"{width}x{height}: set --height and --width to one value"
        )


def _rehearse(model: Model, inputs: Inputs, out: pathlib.Path, total: int, folder: pathlib.Path) -> str:
    """Trace the drawing of the first text without compiling anything, and return a report.

    The report names the devices, the number and size of the images, and the models. The files of
    the first text are written to `folder`, which is temporary.
    """
    start = time.time()
    with programs.rehearsal():
        ((images, *larger),) = inputs.batches(model, [0], [0])
    _write(model, inputs, folder, [0], [0], [(images, *larger)])
    sizes = " to ".join(f"{image.shape[2]}x{image.shape[1]}" for image in (images, *larger))
    device, card = jax.devices()[0], model.card()
    rows = [
        ("device", f"{jax.device_count()} x {device.device_kind}"),
        ("draws", f"{total:,} images of {sizes}, for {len(inputs.captions):,} texts, into {out}"),
        *((name, str(value)) for name, value in card.items() if name != "stages"),
        *(("stage", ", ".join(f"{k} {v}" for k, v in s.items())) for s in card.get("stages", ())),
        ("rehearsed", f"in {time.time() - start:.1f} s; nothing was compiled"),
    ]
    return progress.block(rows)


def _move_earlier(out: pathlib.Path) -> None:
    """Move the drawing that a folder holds, if any, into the first of the folders OUT_1, OUT_2, ...

    Raises ValueError if the folder holds a metadata.jsonl of other pictures.
    """
    index = out / _INDEX
    if not index.is_file():
        return
    lines = [line for _, line in table_rows.read(index)]
    if not all("seed" in line and "file_name" in line for line in lines):
        raise ValueError(f"--out={out} holds a {_INDEX} of other pictures: name another folder")
    names = [name for line in lines for name in (line["file_name"], *line.get("smaller", ()))]
    numbered = (files.path(f"{out.absolute()}_{n}") for n in itertools.count(1))
    earlier = next(folder for folder in numbered if not folder.exists())
    for name in names:
        untrusted.check_inside(name, index)
    for name in (*names, sheets.NAME, _INDEX):
        if (out / name).is_file():
            (earlier / name).parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(earlier / name, (out / name).read_bytes())
            (out / name).unlink()
    logging.info("moved the %d earlier images in %s to %s", len(lines), out, earlier)


def _write(
    model: Model,
    inputs: Inputs,
    out: pathlib.Path,
    rows: Sequence[int],
    seeds: Sequence[int],
    batches: Iterable[Sequence[Images]],
    layout: layouts.Layout | None = None,
) -> None:
    """Write each image of the batches, then metadata.jsonl and the contact sheet.

    Image n draws text rows[n] with seed seeds[n]. Only process 0 writes. By default, the names of
    files contain seeds.
    """
    lines, images, card = [], [], model.card()
    layout = layout or layouts.Layout([f"seed_{seed:06}.png" for seed in seeds])
    for batch in batches:
        with cli.bad_input():
            pixels = [sheets.to_uint8(images) for images in batch]
        if jax.process_index():
            continue
        for sizes in zip(*pixels, strict=True):
            n = len(lines)
            images.append(sizes[-1])
            lines.append(_line(inputs, out, rows[n], seeds[n], layout.names[n], sizes[:-1]) | card)
            if len(images) % layout.parts == 0:
                (out / layout.names[n]).parent.mkdir(parents=True, exist_ok=True)
                joined = layouts.joined(images[-layout.parts :])
                text = png_text.parameters(lines[n], *images[n].shape[:2])
                sheets.write_png(out / layout.names[n], joined, text if layout.parts == 1 else "")
    if jax.process_index() == 0:
        for name, text in layout.texts.items():
            files.write_whole(out / name, text)
        index = "".join(json.dumps(line) + "\n" for line in lines)
        files.write_whole(out / _INDEX, index)
        sheet = sheets.contact_sheet(np.stack(images), sheets.labels([line["text"] for line in lines]))
        sheets.write_png(out / sheets.NAME, sheet)


def _line(
    inputs: Inputs, out: pathlib.Path, text: int, seed: int, name: str, smaller: Sequence[UInt8[np.ndarray, "_ _ 3"]]
) -> dict[str, Any]:
    """Return the first part of an image's line of metadata.jsonl.

    With inputs.all_sizes, write the images `smaller` of the cascade's earlier stages. `text` is the
    index of the image's text, and `name` its file.
    """
    line: dict[str, Any] = {"file_name": name, "text": inputs.captions[text]}
    line |= {kind: paths[text % len(paths)] for kind, paths in inputs.paths.items() if paths}
    numbers = {key: float(x[text]) for of_stage in inputs.numbers for key, x in of_stage.items()}
    line |= {key: number for key, number in numbers.items() if not np.isnan(number)}
    line |= {"seed": seed}
    if inputs.all_sizes:
        stem = name.removesuffix(".png")
        line["smaller"] = [f"{stem}_{image.shape[0]}.png" for image in smaller]
        for path, image in zip(line["smaller"], smaller, strict=True):
            sheets.write_png(out / path, image)
    return line
