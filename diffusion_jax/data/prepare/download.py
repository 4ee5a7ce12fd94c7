"""Downloading images with img2dataset, which is run as a program of its own."""

import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence

_INSTALL = """img2dataset is not installed. It pins old packages, so give it an environment:
  python -m venv img2dataset-env && img2dataset-env/bin/pip install img2dataset
  PATH=$PWD/img2dataset-env/bin:$PATH python -m diffusion_jax.data.prepare download ..."""


def command(
    urls: str,
    out: str,
    *,
    url_column: str = "URL",
    caption_column: str = "TEXT",
    size: int = 0,
    num: int = 10_000,
    processes: int = 16,
    threads: int = 64,
    distributor: str = "multiprocessing",
    more: Sequence[str] = (),
) -> list[str]:
    """The call of img2dataset: tables of URLs to tars of `num` images with texts, resumable.

    `urls` is a parquet file or a folder of these. `size` 0 keeps the images as they are (NeMo's
    choice); else larger ones are shrunk until the smaller side has so many pixels. "pyspark" and
    "ray" as `distributor` spread the work over machines. `more` are arguments of img2dataset.
    """
    resize = ["--resize_mode=keep_ratio", f"--image_size={size}", "--resize_only_if_bigger=True"]
    return [
        "img2dataset",
        f"--url_list={urls}",
        "--input_format=parquet",
        f"--url_col={url_column}",
        f"--caption_col={caption_column}",
        f"--output_folder={out}",
        "--output_format=webdataset",
        f"--number_sample_per_shard={num}",
        f"--processes_count={processes}",
        f"--thread_count={threads}",
        f"--distributor={distributor}",
        "--incremental_mode=incremental",
        "--encode_quality=95",
        *(resize if size else ["--resize_mode=no"]),
        *more,
    ]


def download(call: Sequence[str], dry_run: bool = False) -> int:
    """Prints the call and runs it, unless `dry_run`; returns its exit code.

    FileNotFoundError, saying how to install it, if it is not there, or if there are no URLs.
    """
    print(shlex.join(call), flush=True)
    if dry_run:
        return 0
    urls = next(word for word in call if word.startswith("--url_list=")).partition("=")[2]
    if "://" not in urls and not pathlib.Path(urls).exists():
        raise FileNotFoundError(f"no table of URLs at {urls}")
    program = shutil.which(call[0])
    if program is None:
        raise FileNotFoundError(_INSTALL)
    return subprocess.run([program, *call[1:]], check=False).returncode
