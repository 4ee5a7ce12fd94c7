"""Import a data set and look at it: where its captions come from, and what was left out.

    python -m diffusion_jax.data show photos --sheet=photos.png

The commands import, show, attach and edit read foreign files once, into a table, which training
then opens. docs/data.md shows their output.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags, logging

from diffusion_jax import cli, files
from diffusion_jax.config.settings import MOMENTS, Data
from diffusion_jax.data import attach, guess, home, show, sources
from diffusion_jax.data.records import Records
from diffusion_jax.data.sources import moments
from diffusion_jax.data.table import CARD, Table
from diffusion_jax.files import sheets
from diffusion_jax.logs import progress

_EXAMPLES = """examples:
  python -m diffusion_jax.data import photos
  python -m diffusion_jax.data import photos --text=csv:caption --out=tables/photos --strict
  python -m diffusion_jax.data show photos --sheet=photos.png
  python -m diffusion_jax.data show photos --by=origin
  python -m diffusion_jax.data show photos --left_out
  python -m diffusion_jax.data show tables/photos --row=cats/0042.jpg
  python -m diffusion_jax.data attach shards --column=t5 --from=precached --out=tables/shards
  python -m diffusion_jax.data edit tables/photos --leave_out=names.txt"""
_SECTIONS = {"origin": ("origin", "unreadable"), "reason": ("left out",)}
_SIZE, _LINES = 192, 6  # Of the sheet: the side of a picture in pixels, the lines of a caption.


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments`. Bad input ends it with a one-line message and exit code 2."""
    cli.start(alone=True)
    args = _parser().parse_args(arguments)
    with cli.bad_input():
        data = _data(args)
        needs_pictures = args.command != "show" or args.sheet or data.source != MOMENTS
        records = sources.open_records(data) if needs_pictures else moments.open_table(data)
        args.run(args, data, records)
        doubts = show.doubts(records)
        for line in doubts:
            logging.warning("%s", line)
        if doubts and args.strict:
            raise ValueError(
                f"--strict: the warnings name what looks wrong in {args.path}: mend the data, or leave out --strict"
            )


def _data(args: argparse.Namespace) -> Data:
    """Return the data settings of the flags. What they do not say is guessed from the files."""
    if args.source:
        data = sources.named(f"{args.source}:{args.path}" + f"::{args.text}" * bool(args.text))
    else:
        data = guess.guess(args.path, args.text)
    return data._replace(fields=tuple(args.fields)) if args.fields else data


def _import(args: argparse.Namespace, data: Data, records: Records) -> None:
    if args.out:
        data, records = _copied(args, data, records)
    _print(show.overview(records), data)


def _attach(args: argparse.Namespace, data: Data, records: Records) -> None:
    if args.out:
        data, records = _copied(args, data, records)
    if not home.is_home(data.path) or not isinstance(records, Table):
        raise ValueError(f"{args.path} is no table that `import --out` wrote: add --out=FOLDER")
    column = f"{args.column}.npy"
    rows = attach.attach(records.whole(), column, args.stored, args.key)
    _print(rows, data._replace(text=column))


def _edit(args: argparse.Namespace, data: Data, records: Records) -> None:
    if not home.is_home(args.path):
        raise ValueError(f"{args.path} is no table: write one with import --out")
    lines = files.path(args.leave_out).read_bytes().splitlines()
    names = {os.fsdecode(line).strip() for line in lines if line.strip()}
    tables = {card: Table(args.path, card=card) for card in home.cards(args.path)}
    known = {card: np.array(of.names(range(len(of))), object) for card, of in tables.items()}
    if unknown := sorted(names.difference(known[CARD])):
        raise ValueError(
            f"{len(unknown):,} of the {len(names):,} names in {args.leave_out} are names of no "
            f"picture: {', '.join(unknown[:3])}. `data show {args.path} --row=NAME` finds names"
        )
    for card, of in tables.items():
        are_named = [name in names for name in known[card]]
        of.leave_out(card, np.flatnonzero(are_named))
    number = sum(name in names for name in known[CARD])
    print(progress.block([("left out", f"{number:,} of {len(known[CARD]):,} pictures")]))


def _copied(args: argparse.Namespace, data: Data, records: Records) -> tuple[Data, Records]:
    """Write the table into the folder --out, and open it there."""
    if not isinstance(records, Table):
        raise ValueError(f"--out={args.out}: the data source {data.source!r} has no table")
    out = files.folder(args.out, "--out")
    root = os.path.join(os.path.realpath(records.card["root"]), "")
    inside = data.source == "folder" and os.path.realpath(args.out).startswith(root)
    if inside or (not home.is_home(out) and out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--out={args.out} is in the data set or holds other files: name a new folder")
    records.copy(out)
    data = data._replace(path=args.out, source=records.card["rule"]["source"])
    return data, sources.open_records(data)


def _print(rows: Sequence[tuple[str, str]], data: Data) -> None:
    names = ("source", "path", "text", "uncaptioned", *["fields"] * bool(data.fields))
    settings = [(name, shlex.quote(str(getattr(data, name)))) for name in names]
    flags = " ".join(f"--config.data.{name}={value}" for name, value in settings)
    print(progress.block([*rows, ("to train", flags)]))


def _show(args: argparse.Namespace, data: Data, records: Records) -> None:
    table = records if isinstance(records, Table) else None
    if (args.left_out or args.row) and table is None:
        raise ValueError(f"{args.path}: the data source {data.source!r} does not list its files")
    if args.sheet:
        files.folder(files.path(args.sheet).parent, "--sheet").mkdir(parents=True, exist_ok=True)
    if table and args.left_out:
        for name, reason in table.left():
            print(f"{reason}\t{show.line(name)}")
    if table and args.row:
        print(progress.block(show.about(table, args.row)))
    if not (args.left_out or args.row):
        labels = _SECTIONS.get(args.by)
        rows = [row for row in show.overview(records) if labels is None or row[0] in labels]
        print(progress.block(rows or [(labels[0] if labels else "", "none")]))
    if args.sheet:
        sheets.write_png(args.sheet, show.sample_sheet(records, _SIZE, _LINES))


def _parser() -> argparse.ArgumentParser:
    layout: Any = {"epilog": _EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    about = (__doc__ or "").partition("\n")[0]
    parser = cli.OneLine("python -m diffusion_jax.data", description=about, **layout)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, run, help):
        command = commands.add_parser(name, help=help, description=help, **layout)
        command.set_defaults(run=run)
        arg = command.add_argument
        arg(
            "path",
            metavar="PATH",
            help="the data set: a folder, tars, parquet files, what import --out wrote, or SOURCE:PATH::TEXT",
        )
        arg(
            "--source",
            default="",
            help=f"{', '.join(sources.SOURCES)}, or a module of yours; default: guessed from the files",
        )
        arg(
            "--text",
            default="",
            help="where the captions are (data.text); default: guessed, or txt if --source is given",
        )
        arg(
            "--fields",
            action="append",
            default=[],
            metavar="NAME=LOW..HIGH",
            help="an entry of data.fields in a config; may be repeated",
        )
        arg(
            "--strict",
            action="store_true",
            help="end with exit code 2 if something looks wrong: "
            "all captions equal, most of them ids or missing, pointers of Git LFS, a table that is "
            "not read, captions found by the file name alone; default: warn",
        )
        return arg

    arg = add("import", _import, "Write the table of a data set, which training opens.")
    arg(
        "--out",
        default="",
        help="new folder for the table, which data.path may name; training "
        "then does not check whether the data have changed; default: beside the data",
    )
    arg = add(
        "attach", _attach, "Join text embeddings in tars with the pictures of a table, by their names, without copying."
    )
    arg("--column", required=True, help="name of the column: --column=t5 is read with data.text=t5.npy")
    arg(
        "--from",
        required=True,
        dest="stored",
        metavar="TARS",
        help="tars of embeddings: .npy, "
        ".npz, .safetensors or NeMo's .pickle files; a tar, a folder, a pattern or a "
        "wdinfo.pkl",
    )
    arg("--key", default="", help="array in .pickle files, such as embeddings_t5_xxl/encodings")
    arg("--out", default="", help="new folder for the table, if PATH is not a table")
    arg = add("edit", _edit, "Leave out pictures of a table. The others keep their order, so a run may go on.")
    arg(
        "--leave_out",
        required=True,
        metavar="FILE",
        help="a text file with the name of a picture "
        "in each line; it replaces the earlier one, so an empty file leaves out none",
    )
    arg = add(
        "show", _show, "Show where the captions of a data set come from, how many are different, and what was left out."
    )
    arg(
        "--by",
        choices=[*_SECTIONS],
        help="print only how many pictures have their caption from "
        "each origin, or how many files were left out for each reason",
    )
    arg("--left_out", action="store_true", help="print each left-out file with its reason")
    arg("--row", default="", metavar="NAME", help="print all that is known of a picture, or why a file was left out")
    arg("--sheet", default="", metavar="FILE.png", help="write a sheet of 32 random pictures with their captions")
    return parser


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()  # argparse did it; absl's log needs this call.
    with cli.interruptible():
        main()
