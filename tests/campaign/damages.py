"""Damage files between two processes: flip bits, truncate files, delete files."""

import pathlib
import random
import shutil
from collections.abc import Callable, Mapping

from diffusion_jax.data import storage

Mend = Callable[[], object]
Damage = Callable[[pathlib.Path, random.Random], tuple[str, Mend] | None]
"""(folder of the subject, randomness) to what was damaged, and what a person does about it who is
told; None where there is nothing yet to be damaged."""


def flip(path: pathlib.Path, rng: random.Random) -> None:
    """Flip one random bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: pathlib.Path, rng: random.Random) -> None:
    """Truncate a file at a random byte."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def vanish(path: pathlib.Path, rng: random.Random) -> None:
    """Delete a file."""
    del rng
    path.unlink()


HARMS = {"flipped bit": flip, "cut file": cut, "vanished file": vanish}


def nothing() -> None:
    """Repair nothing, because running the command again is enough."""


def copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a folder with all its files."""
    shutil.copytree(source, target)


def _inside(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    paths = folder.glob(pattern) if folder.exists() else []
    return sorted(path for path in paths if path.is_file() and path.stat().st_size)


FINISHED = "when it is done"


def files(folder: str, pattern: str, finished: bool = False) -> Mapping[str, Damage]:
    """Return damages of a file that a subject wrote, before or after it finished."""

    def damage_by(harm):
        def damage(out, rng):
            paths = _inside(out / folder, pattern)
            if not paths:
                return None
            path = rng.choice(paths)
            harm(path, rng)
            return str(path.relative_to(out)), nothing

        return damage

    when = f"output {FINISHED}" if finished else "output"
    return {f"{name} in its {when}": damage_by(harm) for name, harm in HARMS.items()}


def _checkpoint(harm):
    def damage(out, rng):
        folder = out / "run" / "checkpoints"
        steps = [p for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
        if not steps:
            return None
        newest = max(steps, key=lambda path: int(path.name))
        path = rng.choice(_inside(newest, "**/*"))
        harm(path, rng)
        return str(path.relative_to(out)), lambda: shutil.rmtree(folder)

    return damage


CHECKPOINT: Mapping[str, Damage] = {
    f"{name} in the newest checkpoint": _checkpoint(harm) for name, harm in HARMS.items()
}


def of_input(tars: pathlib.Path) -> Mapping[str, Damage]:
    """Return damages of inputs: a flipped bit in the table of tars, and a missing tar."""

    def table(out, rng):
        paths = _inside(tars, f"{storage.OWN}/*/*.rows.arrow")
        if not paths:
            return None
        flip(path := rng.choice(paths), rng)
        return path.name, nothing

    def away(out, rng):
        if not _inside(out / "run" / "checkpoints", "*/checksums/*"):
            return None  # It has not stored anything yet by which it could notice.
        path = rng.choice(_inside(tars, "*.tar"))
        aside = path.with_suffix(".away")
        path.rename(aside)
        return path.name, lambda: aside.rename(path)

    return {"flipped bit in the table of its tars": table, "vanished tar": away}


def of_table(table: pathlib.Path) -> Mapping[str, Damage]:
    """Return damages of a table: a flipped bit, a truncated end, or a missing file."""

    def damage_by(harm):
        def damage(out, rng):
            if not _inside(out / "run" / "checkpoints", "*/checksums/*"):
                return None  # It has not stored anything yet by which it could notice.
            content = table.read_bytes()
            harm(table, rng)
            return table.name, lambda: table.write_bytes(content)

        return damage

    def flip_end(path, rng):
        content = bytearray(path.read_bytes())
        content[-1 - rng.randrange(8)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)

    harms = {"flipped bit at the end of its table": flip_end, "cut table": cut}
    return {name: damage_by(harm) for name, harm in {**harms, "vanished table": vanish}.items()}
