"""Prepare data sets, with the commands fetch, download, reshard, index, validate and emoji.

    python -m diffusion_jax.data.prepare validate --data=webdataset:shards --out=report

Files appear only once they are complete, so a killed command can run again. Commands that write
many files skip existing ones. docs/data.md has an example of each command.
"""

import argparse
import json
import re
import sys
import uuid
from collections.abc import Sequence

from absl import flags

from diffusion_jax import cli, files
from diffusion_jax.config import own_modules, picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import engines, guess, show, sources
from diffusion_jax.data.prepare import download, fetch, index, reshard, validate
from diffusion_jax.data.records import Records
from diffusion_jax.examples.emoji import prepare as emoji
from diffusion_jax.files import sheets
from diffusion_jax.logs import progress

_DAMAGED_EXIT = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments`. Bad input ends it with a one-line message and exit code 2."""
    cli.start(alone=True)
    args, more = _parser().parse_known_args(arguments)
    if more and args.command != "download":
        _parser().error(f"unknown arguments {' '.join(more)}")
    args.more = more
    with cli.bad_input():
        if "data" in args:
            _name_source(args)
        code = args.run(args)
    sys.exit(code)


def _fetch(args: argparse.Namespace) -> int:
    urls, sums = fetch.expand(args.url, [*fetch.SCHEMES, *args.schemes]), {}
    for path in args.sums:
        sums |= fetch.read_sums(files.path(path).read_text())
    if args.hash:
        if len(urls) > 1:
            raise ValueError(f"--hash is for one file, but --url names {len(urls)} files: use --sums")
        sums |= fetch.read_sums(f"{args.hash}  {fetch.name(urls[0])}")
    if args.dry_run:
        for url in urls:
            print(f"would fetch {url}, hash {sums.get(fetch.name(url), 'unknown')}")
        return 0
    out = files.folder(args.out, "--out")
    paths = fetch.fetch(urls, out, sums, threads=args.threads, verify=args.verify)
    print(f"{len(paths)} files are in {out}")
    return 0


def _download(args: argparse.Namespace) -> int:
    return download.download(download.command(args, args.more), args.dry_run)


def _reshard(args: argparse.Namespace) -> int:
    identity = {"source": args.source, "path": args.path, "text": args.text}
    process, processes = _part(args.part)
    counts = reshard.reshard(
        _open(args),
        files.folder(args.out, "--out"),
        num=args.num,
        format=args.format,
        identity=identity,
        process=process,
        processes=processes,
        engine=engines.of(args),
        size=args.size,
        pad=args.pad,
        checksums=args.checksums,
        fields=picture_fields.read(args.fields),
    )
    print(json.dumps(counts))
    return 0


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 0 <= part < parts:
        raise ValueError(f"--part={text}: give I/N with I from 0 to N - 1, such as 3/8")
    return part, parts


def _index(args: argparse.Namespace) -> int:
    print(json.dumps(index.index(args.path, args.text, args.threads, engines.of(args))))
    return 0


def _validate(args: argparse.Namespace) -> int:
    records, out = _open(args), files.folder(args.out, "--out")
    parts = out / f".parts-{uuid.uuid4().hex}.tmp"
    parts.mkdir(parents=True)
    try:
        report = validate.validate(
            records,
            args.num,
            args.threads,
            folder=parts,
            engine=engines.of(args),
            fields=picture_fields.read(args.fields),
        )
    finally:
        files.remove_tree(parts)
    text = json.dumps(report, indent=1)
    files.write_whole(out / "report.json", text)
    print(text)
    print(progress.block(records.inventory().rows()), file=sys.stderr)
    if report["usable"]:
        sheets.write_png(out / "samples.png", show.sample_sheet(records))
    damaged = report["read"] - report["usable"]
    if damaged > args.max_broken * report["read"]:
        print(
            f"error: {damaged} of {report['read']} records are unusable, a larger share than "
            f"--max_broken={args.max_broken}: see {out / 'report.json'}",
            file=sys.stderr,
        )
        return _DAMAGED_EXIT
    return 0


def _emoji(args: argparse.Namespace) -> int:
    out, styles = files.folder(args.out, "--out"), args.style or ["openmoji"]
    print(json.dumps(emoji.prepare(out, styles)))
    return 0


def _name_source(args: argparse.Namespace) -> None:
    """Set source, path and text from --data. Raises ValueError if no data set is named."""
    if args.data:
        data = guess.guess(args.data, args.text or "")
        args.source, args.path, args.text = data.source, data.path, data.text
    elif not (args.source and args.path):
        raise ValueError("--data is missing: give a path, or SOURCE:PATH::TEXT")
    args.text = args.text or Data._field_defaults["text"]


def _open(args: argparse.Namespace) -> Records:
    own_modules.trust(args.source)
    place = {"path": args.path, "text": args.text, "fields": tuple(args.fields)}
    data = Data(args.source, **place, uncaptioned="drop", max_broken=args.max_broken)
    return sources.open_records(data)


def _parser() -> argparse.ArgumentParser:
    command = "python -m diffusion_jax.data.prepare"
    parser = cli.OneLine(command, description="Prepare data sets; docs/data.md shows how.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, run, help):
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(run=run)
        return command.add_argument

    arg = add("fetch", _fetch, "Download files and check their hashes.")
    arg(
        "--url",
        action="append",
        required=True,
        help="a URL; may be repeated; braces expand as in https://host/part-{00000..00031}.parquet",
    )
    arg("--out", required=True, help="folder for the files")
    arg(
        "--sums",
        action="append",
        default=[],
        help="a file of hashes, written by sha1sum, sha256sum or sha512sum; may be repeated",
    )
    arg(
        "--schemes",
        nargs="+",
        default=[],
        metavar="SCHEME",
        help=f"URL schemes to allow besides {', '.join(fetch.SCHEMES)}, such as file",
    )
    arg("--hash", help="the sha1, sha256 or sha512 hash of the file, if --url names one file")
    arg("--threads", type=_count, default=4, help="number of simultaneous downloads")
    arg("--verify", action="store_true", help="also check the hashes of existing files")
    arg("--dry_run", action="store_true", help="only print the URLs and hashes")

    arg = add(
        "download",
        _download,
        "Download the images in tables of URLs into tars, with "
        "img2dataset. Arguments not listed here are passed to img2dataset.",
    )
    arg("--urls", required=True, help="a table of URLs: a parquet file, or a folder of them")
    arg("--out", required=True, help="folder for the tars")
    arg("--url_column", default="URL", help="column of the images' URLs")
    arg("--caption_column", default="TEXT", help="column of the captions")
    arg(
        "--size",
        type=int,
        default=0,
        help="shrink images to this length of the shorter side in pixels; 0 keeps all images unchanged",
    )
    arg("--num", type=int, default=10_000, help="images per tar")
    arg("--processes", type=_count, default=16)
    arg("--threads", type=_count, default=64, help="threads of each process")
    arg("--distributor", choices=("multiprocessing", "pyspark", "ray"), default="multiprocessing")
    arg("--dry_run", action="store_true", help="only print the img2dataset command")

    arg = add("reshard", _reshard, "Write the records of any data source as equal shards.")
    _add_source(arg)
    arg("--out", required=True, help="folder for the shards")
    arg("--num", type=int, default=1000, help="records per shard")
    arg("--format", choices=reshard.FORMATS, default="webdataset")
    arg(
        "--size",
        type=_count,
        default=0,
        help="shrink larger images to this length of the shorter "
        "side in pixels, so that training reads them faster; default: copy all images",
    )
    arg("--pad", action="store_true", help="with --size: add white borders to make squares")
    arg(
        "--checksums",
        action="store_true",
        help="keep a checksum of each file in a tar; pictures and texts that have changed are found when they are read",
    )
    arg("--part", default="0/1", help="I/N, such as 0/4: write only every Nth shard, from shard I")
    engines.add_arguments(arg)

    arg = add("index", _index, "Index tars for training and count their records.")
    arg(
        "--path",
        required=True,
        help="a tar, a folder, NeMo's wdinfo.pkl, a pattern such as shard-{000..099}.tar, or a URL",
    )
    arg("--text", default="txt", help="data.text of the config that reads the tars")
    arg("--threads", type=_count, default=8)
    engines.add_arguments(arg)

    arg = add("validate", _validate, "Read a data set and report counts, sizes, broken records, samples.")
    _add_source(arg, Data._field_defaults["max_broken"])
    arg("--out", required=True, help="folder for report.json and samples.png")
    arg("--num", type=int, default=0, help="number of random records to read; 0 for all")
    arg("--threads", type=_count, default=4)
    engines.add_arguments(arg)

    arg = add("emoji", _emoji, "Write sheets of emoji, from which training draws its pictures.")
    arg("--out", required=True, help="folder for the sheets and the files of prompts")
    arg(
        "--style",
        action="append",
        help="openmoji (default), noto:FILE, twemoji:FILE or fluent:FILE; may be repeated (models/emoji32/README.md)",
    )
    return parser


def _count(text: str) -> int:
    """Parse a whole number above 0. For other numbers, argparse's error names the flag."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"give 1 or more, not {number}")
    return number


def _add_source(arg, max_broken: float = 1.0) -> None:
    arg("--data", help="the data set: a path, or SOURCE:PATH::TEXT, instead of the next three")
    arg("--source", help=f"{', '.join(sources.SOURCES)}, or a module of yours")
    arg("--path", help="the value of data.path in a config")
    arg("--text", help="the value of data.text in a config")
    arg(
        "--fields",
        action="append",
        default=[],
        metavar="NAME=LOW..HIGH",
        help="an entry of data.fields in a config; may be repeated",
    )
    arg("--max_broken", type=float, default=max_broken, help="largest allowed share of damaged records, from 0 to 1")


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()  # argparse did it; absl's log needs this call.
    with cli.interruptible():
        main()
