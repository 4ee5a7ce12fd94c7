"""Write, lock and read workdirs. A workdir is the folder of one run.

In a workdir, config.json holds the whole config with all defaults, and the version number of the
config format. When it is read back, fields that were added later get their defaults, and renamed or
removed fields are upgraded (see config.versions).
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import logging

from diffusion_jax import files, systems
from diffusion_jax.config import named, settings, versions
from diffusion_jax.config.settings import Data
from diffusion_jax.devices import distributed
from diffusion_jax.exits import Busy
from diffusion_jax.files import folder_lock, settings_record, untrusted, url_secrets

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
EVALUATION = "evaluation"
# Fields that a continued run may change: they do not affect what is learned, or only from then on.
FREE = (
    "steps",
    "log_every",
    "sample_every",
    "save_every",
    "keep_last",
    "keep_every",
    "step_timeout",
    "prompts",
    "mesh.",
    "optimizer.micro_batch",
    "optimizer.max_skipped",
    "optimizer.snapshot_every",
    "optimizer.restart",
    "optimizer.ema_warmup",
    "sampler.",
    "evaluation.",
    "heldout.",
    "data.threads",
    "data.path",
    "data.max_broken",
    "text.store",
    "unet.attention_impl",
    "unet.remat",
)


def claim(workdir: str | os.PathLike[str], config: Mapping[str, Any], *, write: bool = True) -> bool:
    """Write the config into a workdir, after checking it against the config that is there, if any.

    Fields that do not affect what the model learns may differ, such as the number of steps or the
    mesh. Without a checkpoint, as after a start that failed, all fields may differ. If `write` is
    False, the configs are only compared.

    Returns:
        Whether the config replaces another one that differs in what the model learns.

    Raises:
        ValueError: If another field differs, or the workdir is not a folder.
    """
    _check_folder(workdir)
    path = files.path(workdir) / CONFIG
    config = url_secrets.hide(systems.complete(config))
    config = json.loads(json.dumps({"version": versions.VERSION, **config}))
    text, data = config.get("text", {}), settings.read(Data, config["data"], "data")
    # With stored embeddings, these weights only encode new texts.
    unread = ("text.weights",) if data.embedded or text.get("store") else ()
    # The base weights of a LoRA may have moved. base.json holds their fingerprint.
    adapts = config.get("lora", {}).get("rank") or text.get("learned_tokens")
    moved = ("unet.weights",) if adapts else ()
    free = ("version", *FREE, *unread, *unread_text(config), *moved)
    different = path.exists() and settings_record.differences(load(workdir), config, free)
    if different and has_checkpoint(workdir):
        raise ValueError(
            f"{workdir} was made with another config ({different}): "
            "choose another --workdir, or use the config of this workdir. To keep the state of "
            f"this run, choose another --workdir with --continue_from={workdir}"
        )
    if write and different:
        logging.warning(
            "%s holds no checkpoint, so this config replaces that of an earlier start (%s)", workdir, different
        )
    elif write and path.exists():
        written = untrusted.parse_json(path.read_text())
        version, old = written.get("version", 0), versions.upgrade(written)
        later = settings_record.flat(load(workdir)).keys() - settings_record.flat(old).keys()
        if later:
            logging.info("%s was written by an earlier version: using defaults for %s", path, ", ".join(sorted(later)))
        if version < versions.IMAGE_KEYS:
            logging.warning(
                "%s was begun by an earlier version. From here on, the noise of each image comes "
                "from its own key, so it is not what that version would have drawn",
                workdir,
            )
    if write and jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(config, indent=1))
    return bool(different)


def is_workdir(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the workdir of a run, and no file or folder of other weights."""
    return (files.path(path) / CHECKPOINTS).is_dir()


def unread_text(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a config's text group that its encoder ignores; these may differ."""
    return () if config.get("text", {}).get("encoder") == "t5" else ("text.read_tokens",)


def has_checkpoint(workdir: str | os.PathLike[str]) -> bool:
    """Return whether a workdir holds a checkpoint, be it damaged. Unfinished ones do not count."""
    folder = files.path(workdir) / CHECKPOINTS
    return folder.is_dir() and any(".orbax-checkpoint-tmp" not in p.name for p in folder.iterdir())


@contextlib.contextmanager
def writing(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a workdir inside this context. Create the workdir if it does not exist.

    All processes of a run must enter this context.

    Raises:
        Busy: If another run holds the lock, or the disk is full.
        ValueError: If the workdir is not a folder or cannot be written to.
    """
    _check_folder(workdir)
    lock, errors = folder_lock.FolderLock(workdir), {Busy: "", ValueError: ""}
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            try:
                stack.enter_context(lock)
            except (ValueError, OSError) as refused:
                passing = isinstance(refused, Busy) or files.is_full(refused)
                errors[Busy if passing else ValueError] = str(refused)
        for kind, error in errors.items():
            if error := distributed.gather_text(error)[0]:
                raise kind(error)
        yield


def release(workdir: str | os.PathLike[str]) -> None:
    """Release this process's lock of a workdir. Call it before os._exit, which runs no cleanup."""
    folder_lock.release(workdir)


def _check_folder(workdir: str | os.PathLike[str]) -> None:
    """Raise ValueError if a workdir cannot be a folder.

    This is the case for a file, a path inside a file, a broken link, a read-only bucket, and a path
    with a character of glob patterns: Orbax would write checkpoints there that it cannot read.
    """
    if found := sorted({*"*?["} & {*str(files.path(workdir).absolute())}):
        raise ValueError(
            f"workdir {workdir}: its path contains {' and '.join(found)}, so its checkpoints could "
            "not be read: name another folder"
        )
    if files.store_path(workdir):
        if jax.process_index() == 0:  # If the check fails, the other processes end too.
            files.check_writable(workdir, "--workdir")
        return
    for path in (pathlib.Path(workdir), *pathlib.Path(workdir).parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"workdir {workdir}: {path} is a link to {os.readlink(path)}, which does not exist")
    if any(path.is_file() for path in (pathlib.Path(workdir), *pathlib.Path(workdir).parents)):
        raise ValueError(f"workdir {workdir} is a file, or inside one: name a folder")


def load(workdir: str | os.PathLike[str], system: str | None = None) -> dict[str, Any]:
    """Return the config of a workdir, upgraded to the current fields.

    Raises:
        FileNotFoundError: If the workdir has no config.
        ValueError: If this code cannot run the config, or if its system is not `system` (None
            accepts every system).
    """
    path = files.path(workdir) / CONFIG
    if not path.exists():
        is_known = files.store_path(workdir) or path.parent.exists()
        others = () if is_known else path.parent.parent.glob(f"*/{CONFIG}")
        if close := named.closest(path.parent.name, [other.parent.name for other in others]):
            close = path.parent.with_name(close)
            raise FileNotFoundError(f"{workdir} holds no {CONFIG}: did you mean {close}?")
        raise FileNotFoundError(
            f"{workdir} holds no {CONFIG}: it is not the workdir of a run. Train a run with\n"
            f"  python -m imagen_jax.train --config=configs/quickstart.py --workdir={workdir}"
        )
    with untrusted.naming(str(path)):
        written = untrusted.parse_json(path.read_text())
        if not isinstance(written, dict):
            raise ValueError(f"it holds a {type(written).__name__}, not a config")
        old = url_secrets.hide(versions.upgrade(written))  # Earlier versions wrote secrets.
        config = json.loads(json.dumps(systems.complete(old)))
    if config["system"] != (system or config["system"]):
        raise ValueError(
            f"{workdir} is a run of {config['system']}, not of {system}: give it to the commands "
            f"of {config['system'].partition('.')[0]}"
        )
    return config
