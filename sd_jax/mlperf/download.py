"""Download and verify the data sets and weights that MLCommons publishes for the benchmark.

For each set of files, MLCommons publishes two lists, which MLCommons' own downloader also reads.
NAME.uri holds the URL of the folder with the files, and NAME.md5 holds the hashes and names of the
files. If the benchmark's rules or a file's authors state a hash, that hash replaces the one in
NAME.md5.
"""

import json
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from diffusion_jax import files
from diffusion_jax.data.prepare import fetch

SOURCE = "https://training.mlcommons-storage.org/metadata"
MOMENTS, IMAGES, PROMPTS, STATS, VAE, INCEPTION, CLIP = (
    "laion-400m-filtered-moments-dataset",
    "laion-400m-filtered-images-dataset",
    "coco2014-validation-prompts-dataset",
    "coco2014-validation-stats-dataset",
    "sd-checkpoint",
    "inception-checkpoint",
    "clip-checkpoint",
)
SETS: Mapping[str, Mapping[str, str]] = {
    MOMENTS: {},
    IMAGES: {},
    PROMPTS: {},
    STATS: {},
    VAE: {"512-base-ema.ckpt": "d635794c1fedfdfa261e065370bea59c651fc9bfa65dc6d67ad29e11869a1824"},
    INCEPTION: {"pt_inception-2015-12-05-6726825d.pth": "bd836944fd6db519dfd8d924aa457f5b3c8357ff"},
    CLIP: {"open_clip_pytorch_model.bin": ("9a78ef8e8c73fd0df621682e7a8e8eb36c6916cb3c16b291a082ecd52ab79cc4")},
}
"""The sets of files, keyed by name. Each set maps the names of files that it must contain to their
official hashes. A run does not need IMAGES, the images that MOMENTS were computed from."""
VERIFIED = ".verified.json"
"""Name of the file that records a set's verified files, as {path: [hash, size in bytes]}."""
_FLAGS = (
    ("data.path", MOMENTS, "*.tar"),
    ("vae.weights", VAE, "*.ckpt"),
    ("text.weights", CLIP, "*.bin"),
    ("evaluation.prompts", PROMPTS, "*.tsv"),
    ("evaluation.reference", STATS, "*.npz"),
    ("evaluation.inception", INCEPTION, "*.pth"),
    ("evaluation.clip", CLIP, "*.bin"),
)
_FOLDERS = (MOMENTS, CLIP)
CLIP_ON_HUB = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
# If these files exist, the download of the tokenizer is complete, because they come last.
_LAST = ("open_clip_config.json", "tokenizer.json")
_TOKENIZER = ("config.json", "vocab.json", "merges.txt", *_LAST)


def read_list(source: str, name: str) -> tuple[str, dict[str, str]]:
    """Download the two lists of a set; return the URL of its folder and the hashes of its files.

    Args:
        source: The URL of the folder with the lists.
        name: The name of the set, a key of SETS.

    Returns:
        The URL of the folder with the set's files, and the hash of each file, keyed by the file's
        path in this folder.

    Raises:
        OSError: If a list cannot be downloaded.
        ValueError: If a list is malformed, or lacks a file that the set must contain.
    """
    stem = f"{source.rstrip('/')}/stable-diffusion-{name}"
    with tempfile.TemporaryDirectory() as folder:
        scheme = source.partition("://")[0]  # Allowed, because the user chose it.
        urls = fetch.expand([f"{stem}.uri", f"{stem}.md5"], [*fetch.SCHEMES, scheme])
        uri, md5 = (p.read_text(errors="replace") for p in fetch.fetch(urls, pathlib.Path(folder)))
    hashes = {}
    for line in filter(str.strip, md5.splitlines()):
        digest, _, path = line.strip().partition(" ")
        path = pathlib.PurePosixPath(path.lstrip(" *"))
        if len(digest) != 32 or path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError(
                f"{stem}.md5: the line {line!r} is not in the output format of md5sum, or its path "
                "leads out of the set's folder: choose another --source"
            )
        hashes[str(path)] = digest
    names = {path.rpartition("/")[2] for path in hashes}
    if missing := [file for file in SETS[name] if file not in names]:
        raise ValueError(f"{stem}.md5 lists {len(hashes)} files, but not {missing[0]}: choose another --source")
    if "://" not in uri:
        raise ValueError(
            f"{stem}.uri must hold the URL of a folder, but holds {uri.strip()[:80]!r}: choose another --source"
        )
    official_hashes = SETS[name]
    hashes = {path: official_hashes.get(path.rpartition("/")[2], digest) for path, digest in hashes.items()}
    return uri.strip().rstrip("/"), hashes


def download(name: str, out: pathlib.Path, source: str = SOURCE, *, threads: int = 4, verify: bool = False) -> int:
    """Download a set's missing files, and verify files that have not been verified yet.

    Return the number of files in the set. If a download fails, the files that are already complete
    are kept.

    Args:
        name: The name of the set, a key of SETS.
        out: The folder to write to; the set gets a subfolder with its name.
        source: The URL of the folder with the lists of files.
        threads: The number of files to download at once.
        verify: Whether to check the hashes of all existing files. By default, files that were
            verified earlier are not checked again.

    Raises:
        ValueError: If an existing file has the wrong hash.
        OSError: If a file cannot be downloaded.
    """
    base, hashes = read_list(source, name)
    folder = out / name
    record = folder / VERIFIED
    verified_files = {} if verify or not record.is_file() else json.loads(record.read_text())

    def verified(path: pathlib.Path) -> None:
        key = path.relative_to(folder).as_posix()
        verified_files[key] = [hashes[key], path.stat().st_size]
        files.write_whole(record, json.dumps(verified_files, indent=1))

    for path in missing(folder, hashes, present=True):
        key = path.relative_to(folder).as_posix()
        if verified_files.get(key) == [hashes[key], path.stat().st_size]:
            continue
        try:
            fetch.check(path, hashes[key])
        except ValueError as error:
            raise ValueError(
                f"{path} has the wrong hash, so it is damaged or another file: remove it, and run the command again"
            ) from error
        verified(path)
    for parent, paths in _by_folder(missing(folder, hashes)):
        sums = {path.name: hashes[path.relative_to(folder).as_posix()] for path in paths}
        urls = [f"{base}/{path.relative_to(folder).as_posix()}" for path in paths]
        fetch.fetch(urls, parent, sums, threads=threads, finished=verified)
    return len(hashes)


def missing(folder: pathlib.Path, hashes: Mapping[str, str], present: bool = False) -> list[pathlib.Path]:
    """Return the paths of a set's missing files, or of its existing files if `present` is True.

    Args:
        folder: The folder of the set.
        hashes: The hashes of the set's files, keyed by relative path.
        present: Whether to return the existing files instead of the missing ones.
    """
    return [folder / path for path in hashes if (folder / path).is_file() is present]


def fetch_tokenizer(out: pathlib.Path) -> None:
    """Download CLIP's config and tokenizer from the Hugging Face Hub, unless they exist.

    MLCommons' set "clip-checkpoint" lacks these files. They are written to the set's folder in
    `out`. Raises OSError if the download fails; the message names the files to copy by hand.
    """
    folder = out / CLIP
    if all((folder / name).is_file() for name in _LAST):
        return
    import huggingface_hub  # Slow to import; only a download needs it.

    try:
        with tempfile.TemporaryDirectory() as temporary:
            bucket = files.store_path(folder)
            place = temporary if bucket else folder
            huggingface_hub.snapshot_download(CLIP_ON_HUB, allow_patterns=list(_TOKENIZER), local_dir=place)
            if bucket:
                for name in _TOKENIZER:
                    (bucket / name).send(pathlib.Path(place, name))
    except Exception as error:  # Networks fail in many ways.
        raise OSError(
            f"the tokenizer of {CLIP_ON_HUB} could not be downloaded ({type(error).__name__}): "
            f"copy the files {', '.join(_TOKENIZER)} of this model into {folder}"
        ) from error


def config_flags(out: pathlib.Path) -> list[str]:
    """Return command-line flags for sd_jax.mlperf that name the downloaded files.

    `out` is the folder that holds the sets. There are no flags for missing files.
    """
    flags = []
    for flag, name, pattern in _FLAGS:
        for path in sorted((out / name).rglob(pattern))[:1]:
            flags.append(f"--config.{flag}={path.parent if name in _FOLDERS else path}")
    return flags


def _by_folder(paths: Sequence[pathlib.Path]) -> Iterator[tuple[pathlib.Path, list[pathlib.Path]]]:
    for parent in sorted({path.parent for path in paths}):
        yield parent, [path for path in paths if path.parent == parent]
