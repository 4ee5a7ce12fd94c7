"""Files from the web, each whole and with the right hash under its name, or not there at all.

What has arrived before a kill stays in a hidden `.part` file and is not asked for again; of what
goes into a bucket, whole files.
"""

import hashlib
import pathlib
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

from absl import logging

from diffusion_jax.data import storage, tars
from diffusion_jax.machine import files, progress

_ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
_CHUNK = 2**20
_ATTEMPTS = 4


def expand(urls: Sequence[str]) -> list[str]:
    """URLs with braces as in a shell, "part-{00000..00031}.parquet"; ValueError for another."""
    every = [url for pattern in urls for url in tars.expand(pattern)]
    for url in every:
        if not re.match(r"\w+://.*[^/]$", url):
            raise ValueError(f"{url} is no URL of a file: it must be https://HOST/.../FILE")
    names = [name(url) for url in every]
    if doubled := {one for one in names if names.count(one) > 1}:
        raise ValueError(f"several URLs end in {min(doubled)}: fetch them into different folders")
    return every


def read_sums(text: str) -> dict[str, str]:
    """{file name: hash} of lines as sha1sum, sha256sum or sha512sum write; ValueError else."""
    sums = {}
    for line in filter(str.strip, text.splitlines()):
        match = re.fullmatch(r"([0-9a-fA-F]+) [ *](.+)", line.rstrip())
        if match is None or len(match[1]) not in _ALGORITHMS:
            raise ValueError(f"{line!r} is no line of sha1sum, sha256sum or sha512sum")
        sums[match[2].rpartition("/")[2]] = match[1].lower()
    return sums


def fetch(
    urls: Sequence[str],
    out: pathlib.Path,
    sums: Mapping[str, str] | None = None,
    *,
    threads: int = 4,
    verify: bool = False,
    timeout: float = 60.0,
    finished: Callable[[pathlib.Path], None] = lambda path: None,
) -> list[pathlib.Path]:
    """Downloads what is not in `out`; the paths of all.

    `sums` are hashes by file name; a file without one is taken as it comes, and the log says so,
    unless none at all are given. `verify` also hashes the files that are there, and `finished` is
    told each that was fetched. OSError or ValueError names what failed.
    """
    known, sums = sums is not None, sums or {}
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name(url) for url in urls]
    there = files.present(paths)
    for path in sorted(there) if verify else ():
        check(path, sums.get(path.name))
    missing = [(u, p) for u, p in zip(urls, paths, strict=True) if p not in there]
    logging.info("%d of %d files are there", len(there), len(paths))
    if known and (unknown := [path.name for _, path in missing if path.name not in sums]):
        logging.warning("no hash of %s: it is taken as it comes", ", ".join(unknown[:3]))
    with ThreadPoolExecutor(threads) as pool:
        get = lambda url, path: _fetch(url, path, sums.get(path.name), timeout)
        fetched = pool.map(lambda one: get(*one), missing)
        arrived = progress.reported(fetched, len(missing), "files")
        for (_, path), _ in zip(missing, arrived, strict=True):
            finished(path)
    return paths


def file_hash(path: pathlib.Path, algorithm: str) -> str:
    """The digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def name(url: str) -> str:
    """The name of a URL's file."""
    return url.partition("?")[0].rpartition("/")[2]


def _fetch(url: str, path: pathlib.Path, digest: str | None, timeout: float) -> None:
    if there := files.remote(path):  # Where nothing can be appended to.
        with tempfile.TemporaryDirectory() as folder:
            _fetch(url, local := pathlib.Path(folder, path.name), digest, timeout)
            return there.send(local)
    part = path.with_name(f".{path.name}.part")
    for attempt in range(_ATTEMPTS):
        try:
            _continue(url, part, timeout)
            break
        except HTTPError as error:
            raise OSError(f"{url}: {error}") from error
        except OSError as error:
            if attempt == _ATTEMPTS - 1:
                raise OSError(f"{url} after {_ATTEMPTS} attempts: {error}") from error
            time.sleep(2.0**attempt)
    try:
        check(part, digest, url)
    except ValueError:
        part.unlink()
        raise
    part.replace(path)


def _continue(url: str, part: pathlib.Path, timeout: float) -> None:
    """Appends what is missing; from the beginning where the server cannot give a range."""
    done = part.stat().st_size if part.exists() else 0
    if not re.match("(https?|ftp|file):", url):  # gs://, s3:// and others, which fsspec reads.
        with storage.open_file(url) as stored, part.open("ab") as file:
            stored.seek(done)
            return _copy(stored, file, url, stored.size)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # Nothing is left of it.
            return
        raise
    with response:
        whole = getattr(response, "status", None) != 206  # A part of it, as asked.
        total = int(response.headers.get("Content-Length") or 0) + (0 if whole else done)
        with part.open("wb" if whole else "ab") as file:
            _copy(response, file, url, total)


def _copy(response, file, url: str, total: int) -> None:
    done = file.tell() // _CHUNK
    meter = progress.Meter("MiB", total // _CHUNK or None, name=name(url), done=done)
    while chunk := response.read(_CHUNK):
        file.write(chunk)
        meter.reach(file.tell() // _CHUNK)
    if total and file.tell() < total:
        raise OSError(f"it ended after {file.tell()} of {total} bytes")


def check(path: pathlib.Path, digest: str | None, what: str = "") -> None:
    """ValueError for a file of another hash, of md5's, sha1's, sha256's or sha512's length."""
    if digest is None:
        return
    algorithm = _ALGORITHMS[len(digest)]
    actual = file_hash(path, algorithm)
    if actual != digest.lower():
        raise ValueError(f"{what or path} has the {algorithm} {actual}, and should have {digest}")
