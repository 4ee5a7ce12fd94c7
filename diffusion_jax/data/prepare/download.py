"""Download images with img2dataset, which runs as a separate program."""

import argparse
import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence

_INSTALL = """img2dataset is not installed. Install it in an environment of its own, because it
requires old versions of other packages:
  python -m venv img2dataset-env && img2dataset-env/bin/pip install img2dataset
  PATH=$PWD/img2dataset-env/bin:$PATH python -m diffusion_jax.data.prepare download ..."""


def command(args: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """Return the img2dataset command that downloads tables of URLs into tars of images and texts.

    The same command continues an interrupted download.

    Args:
        args: The parsed arguments of `prepare download`. If args.size is 0, images stay unchanged,
            as in NeMo. Otherwise, args.size is the largest length of the shorter side in pixels,
            and larger images are shrunk.
        more: Further arguments, which are passed to img2dataset unchanged.
    """
    resize = ["--resize_mode=keep_ratio", f"--image_size={args.size}", "--resize_only_if_bigger=True"]
    return [
        "img2dataset",
        f"--url_list={args.urls}",
        "--input_format=parquet",
        f"--url_col={args.url_column}",
        f"--caption_col={args.caption_column}",
        f"--output_folder={args.out}",
        "--output_format=webdataset",
        f"--number_sample_per_shard={args.num}",
        f"--processes_count={args.processes}",
        f"--thread_count={args.threads}",
        f"--distributor={args.distributor}",
        "--incremental_mode=incremental",
        "--encode_quality=95",
        *(resize if args.size else ["--resize_mode=no"]),
        *more,
    ]


def download(call: Sequence[str], dry_run: bool = False) -> int:
    """Print an img2dataset command, run it, and return its exit code. A dry run only prints it.

    Raises:
        FileNotFoundError: The table of URLs or img2dataset is missing. The message says how to
            install img2dataset.
    """
    print(shlex.join(call), flush=True)
    if dry_run:
        return 0
    urls = next(word for word in call if word.startswith("--url_list=")).partition("=")[2]
    if "://" not in urls and not pathlib.Path(urls).exists():
        raise FileNotFoundError(f"--urls={urls}: there is no such file or folder; check the path")
    program = shutil.which(call[0])
    if program is None:
        raise FileNotFoundError(_INSTALL)
    return subprocess.run([program, *call[1:]], check=False).returncode
