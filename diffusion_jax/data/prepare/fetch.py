"""Download files. A file gets its final name only once it is complete and its hash is right.

A killed download leaves a hidden `.part` file and, beside it, the server's mark of the version that
was being downloaded (the ETag, or the time of the last change). The next attempt continues only if
the server still has this version. It downloads an incomplete file from its start if the server
marks no versions, or if the files are written to a bucket.
"""

import email.message
import hashlib
import pathlib
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO
from urllib.error import HTTPError

from absl import logging

from diffusion_jax import files
from diffusion_jax.data import storage, tars
from diffusion_jax.files import remote, url_secrets
from diffusion_jax.logs import progress

_ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
SCHEMES = ("http", "https", *remote.SCHEMES)
"""Schemes of URLs that are fetched by default. file:// is not one of them, because it could copy
any file of this machine."""
_CHUNK = 2**20
_ATTEMPTS = 4


def expand(urls: Sequence[str], schemes: Sequence[str] = SCHEMES) -> list[str]:
    """Return all URLs that patterns such as "https://host/part-{00000..00031}.parquet" stand for.

    Braces are expanded as in a shell.

    Raises:
        ValueError: A URL is malformed or its scheme is not in `schemes`, or two URLs have the same
            file name.
    """
    every = [url for pattern in urls for url in tars.expand(pattern)]
    for url in every:
        if not re.match(r"\w+://.*[^/]$", url):
            raise ValueError(f"{url} is not the URL of a file: write https://HOST/.../FILE")
        if url.partition("://")[0] not in schemes:
            raise ValueError(
                f"{url} is not fetched: its scheme must be one of {', '.join(schemes)}; allow more with --schemes"
            )
    names = [name(url) for url in every]
    if doubled := {one for one in names if names.count(one) > 1}:
        raise ValueError(f"several URLs end in {min(doubled)}: fetch each with its own --out")
    return every


def read_sums(text: str) -> dict[str, str]:
    """Return {file name: hash} from the output of sha1sum, sha256sum or sha512sum.

    Raises ValueError for a line in another format.
    """
    sums = {}
    for line in filter(str.strip, text.splitlines()):
        match = re.fullmatch(r"([0-9a-fA-F]+) [ *](.+)", line.rstrip())
        if match is None or len(match[1]) not in _ALGORITHMS:
            raise ValueError(
                f"{line!r} is not in the output format of sha1sum, sha256sum or sha512sum: --sums "
                "needs lines of the form HASH  FILE, and --hash needs one hexadecimal hash"
            )
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
    """Download the files that are missing in `out`, and return the paths of all files.

    Args:
        urls: URLs with different file names.
        out: The folder, created if missing.
        sums: Hashes keyed by file name. Files without a hash are accepted with a warning. None
            accepts all files without a warning.
        threads: The number of simultaneous downloads.
        verify: Whether to check the hashes of existing files too.
        timeout: Seconds without data after which a connection fails.
        finished: A function that is called with the path of each file after its download.

    Raises:
        OSError: If a download fails.
        ValueError: If a hash differs.
    """
    checked, sums = sums is not None, sums or {}
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name(url) for url in urls]
    present = files.present(paths)
    for path in sorted(present) if verify else ():
        check(path, sums.get(path.name))
    missing = [(u, p) for u, p in zip(urls, paths, strict=True) if p not in present]
    logging.info("%d of %d files exist", len(present), len(paths))
    if checked and (unknown := [path.name for _, path in missing if path.name not in sums]):
        logging.warning("there is no hash for %s: downloading without a check", ", ".join(unknown[:3]))
    with ThreadPoolExecutor(threads) as pool:
        get = lambda url, path: _fetch(url, path, sums.get(path.name), timeout)
        fetched = pool.map(lambda one: get(*one), missing)
        arrived = progress.reported(fetched, len(missing), "files")
        for (_, path), _ in zip(missing, arrived, strict=True):
            finished(path)
    return paths


def file_hash(path: pathlib.Path, algorithm: str) -> str:
    """Return the hash of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def name(url: str) -> str:
    """Return the file name at the end of a URL, without the query after "?"."""
    return url.partition("?")[0].rpartition("/")[2]


def _fetch(url: str, path: pathlib.Path, digest: str | None, timeout: float) -> None:
    if bucket := files.store_path(path):  # Files in buckets cannot be appended to.
        with tempfile.TemporaryDirectory() as folder:
            _fetch(url, local := pathlib.Path(folder, path.name), digest, timeout)
            return bucket.send(local)
    part = path.with_name(f".{path.name}.part")
    for attempt in range(_ATTEMPTS):
        try:
            _continue(url, part, timeout)
            break
        except HTTPError as error:
            raise OSError(f"cannot download {url}: {error}") from error
        except OSError as error:
            if attempt == _ATTEMPTS - 1:
                raise OSError(f"cannot download {url} in {_ATTEMPTS} attempts; the last error is: {error}") from error
            time.sleep(2.0**attempt)
    try:
        check(part, digest, url)
    except ValueError:
        part.unlink()
        _mark(part).unlink()
        raise
    part.replace(path)
    _mark(part).unlink()


def _continue(url: str, part: pathlib.Path, timeout: float) -> None:
    """Complete the download of the file at `url`: append the missing end to the file `part`.

    If the server does not send ranges or has another version of the file, or if `part` is longer
    than the file at `url`, the whole file is downloaded again.
    """
    mark = _mark(part)
    before = mark.read_text() if mark.exists() else ""
    done = part.stat().st_size if before and part.exists() else 0
    if not re.match("(https?|ftp|file):", url):  # fsspec reads gs://, s3:// and others.
        version = storage.stamps([url])[0]
        with remote.Remote(url).open("rb") as stored:
            stored.seek(done if version == before and done <= stored.size else 0)
            with _opened(part, stored.tell(), version) as file:
                _copy(stored, file, url, stored.size)
        if storage.stamps([url])[0] != version:  # Blocks of two versions may have been joined.
            part.unlink()
            raise OSError("the file changed while it was downloaded")
        return
    # If-Range: the server sends the whole file if it is no longer the version `before`.
    headers = {"Range": f"bytes={done}-", "If-Range": before} if done else {}
    request = urllib.request.Request(url_secrets.reveal(url), headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code != 416 or not done:
            raise
        if error.headers.get("Content-Range") == f"bytes */{done}":  # The file is complete.
            return
        part.unlink()
        return _continue(url, part, timeout)
    with response:
        version, first = _version(response.headers), 0
        total = int(response.headers.get("Content-Length") or 0)
        if done and getattr(response, "status", None) == 206:  # The server sends a range.
            sent = re.match(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
            first, total = map(int, sent.groups()) if sent else (-1, 0)
            if first != done or version not in ("", before):
                part.unlink()
                return _continue(url, part, timeout)
        with _opened(part, first, version) as file:
            _copy(response, file, url, total)


def _opened(part: pathlib.Path, done: int, version: str) -> BinaryIO:
    """Open `part` to append to its `done` bytes, or, if `done` is 0, as a new file of `version`."""
    if not done:
        part.unlink(missing_ok=True)  # First, so that the mark never belongs to other bytes.
        _mark(part).write_text(version)
    return part.open("ab")


def _mark(part: pathlib.Path) -> pathlib.Path:
    return part.with_suffix(".version")


def _version(headers: email.message.Message) -> str:
    """Return the value of If-Range for a file with these headers, or "" if they mark no version.

    A weak ETag does not promise equal bytes.
    """
    tag = headers.get("ETag") or ""
    return tag if tag.startswith('"') else headers.get("Last-Modified") or ""


def _copy(response, file, url: str, total: int) -> None:
    done = file.tell() // _CHUNK
    meter = progress.Meter("MiB", total // _CHUNK or None, name=name(url), done=done)
    while chunk := response.read(_CHUNK):
        file.write(chunk)
        meter.reach(file.tell() // _CHUNK)
    if total and file.tell() < total:
        raise OSError(f"the download ended after {file.tell()} of {total} bytes")


def check(path: pathlib.Path, digest: str | None, what: str = "") -> None:
    """Raise ValueError if a file's hash differs from `digest`. A `digest` of None always passes.

    The length of `digest` determines the algorithm: md5, sha1, sha256 or sha512. The message names
    the file by `what` or, if this is empty, by its path.
    """
    if digest is None:
        return
    algorithm = _ALGORITHMS[len(digest)]
    actual = file_hash(path, algorithm)
    if actual != digest.lower():
        raise ValueError(f"{what or path} has the {algorithm} {actual}, but should have {digest}: download it again")
