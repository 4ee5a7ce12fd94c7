"""Who does the work of a stage: this process, several that share a folder, or Apache Beam.

A stage is a function from a number to a file: `write(i)` makes the file `path(i)`, whole, from the
arguments that it was made of and i alone. So the bytes are the same whoever wrote them, in whatever
order and however often, and what is there when a stage begins is left alone: a stage that was
killed goes on. `write` may return counts, of which a stage gives the sum.
"""

import collections
import functools
import importlib.util
import json
import pathlib
import random
import shlex
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
from absl import flags, logging

from diffusion_jax.machine import files, progress

flags.disclaim_key_flags()  # They belong to the command that calls `define_flags`.
NAMES = ("alone", "beam")
_ATTEMPTS = 3
_ENGINE = "Who does the work: this process, or Apache Beam."
_OPTIONS = 'Beam\'s own, such as "--runner=FlinkRunner --flink_master=HOST".'
_T = TypeVar("_T")
_R = TypeVar("_R")


class Share(NamedTuple):
    """One of several workers, counted from 0, which share a folder; or the only one.

    Nobody waits for anybody: a worker does its own part first and then what nobody has done yet, so
    that those that die, restart, come late or leave change nothing but the time.
    """

    worker: int = 0
    workers: int = 1

    def fill(
        self,
        items: Sequence[int],
        path: Callable[[int], pathlib.Path],
        write: Callable[..., Mapping[str, int] | None],
        *,
        noun: str = "shards",
        name: str = "",
        size: Callable[[int], int] = lambda item: 1,
        read: Callable[[int], Any] | None = None,
    ) -> collections.Counter[str]:
        """Has `write(i)` called for each item whose file is not there; returns the sums.

        `read`, where it is given, computes a second argument of `write`, of the next item while one
        is written. Lines of progress count `size(i)` of `noun` for each.
        """
        done = files.present(map(path, items))
        missing = [item for turn in self.turns(len(items)) if path(item := items[turn]) not in done]
        total, there = _tell(items, missing, size, noun, name)
        meter = progress.Meter(noun, total, name=name, done=there)
        counts = collections.Counter[str]()
        late = (i for i in missing if not path(i).exists())  # Another worker may have been faster.
        for i, given in ahead(read or _nothing, late):
            if not path(i).exists():
                counts.update(write(i, given) if read else write(i))
            meter.add(size(i))
        return counts

    def turns(self, count: int) -> Iterator[int]:
        """0 ... count - 1: this worker's own part in order, then the rest at random.

        The rest is for those who have died; at random, so that the others seldom do the same.
        """
        own = range(count * self.worker // self.workers, count * (self.worker + 1) // self.workers)
        rest = [i for i in range(count) if i not in own]
        random.Random(self.worker).shuffle(rest)
        yield from own
        yield from rest


class Beam(NamedTuple):
    """Apache Beam, of the extra [beam], on any of its runners; workers see the same paths.

    What `write` holds is pickled: functions of modules, plain values and what is Portable.
    """

    options: tuple[str, ...] = ()
    """Beam's own, such as --runner=FlinkRunner; by default its direct runner, in this process."""

    def fill(self, items, path, write, *, noun="shards", name="", size=lambda item: 1, read=None):
        """As of Share.

        A runner that does not retry what a dead worker held is started again with what is not done,
        as long as each time something is. OSError if Beam cannot go on.
        """
        done = files.present(map(path, items))
        missing = [i for i in items if path(i) not in done]
        _tell(items, missing, size, noun, name)
        if not missing:
            return collections.Counter[str]()
        # Another command may be at work in the same folder.
        counted = path(missing[0]).parent / f".beam-{uuid.uuid4().hex}.tmp"
        counted.mkdir(parents=True)
        try:
            self._run_all(missing, functools.partial(_counted, write, read, counted), counted, noun)
            total = collections.Counter[str]()
            for i in missing:
                total.update(json.loads(_counts_of(counted, i).read_text()))
        finally:
            files.remove_tree(counted)
        return total

    def _run_all(
        self, items: Sequence[int], run: Callable[[int], None], counted: pathlib.Path, noun: str
    ) -> None:
        """Runs as often as more gets done each time; OSError if something is left."""
        left = items
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._run(left, run)
            except Exception as error:  # Runners fail in ways of their own.
                before, left = left, [i for i in left if not _counts_of(counted, i).exists()]
                said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                if attempt == _ATTEMPTS or len(left) == len(before):
                    raise OSError(
                        f"Beam left {len(left)} of {len(items)} {noun}: {said}"
                    ) from error
                logging.warning("Beam stopped (%s): %d %s are left", said, len(left), noun)

    def _run(self, items: Sequence[int], run: Callable[[int], None]) -> None:
        # An extra, of a hundred modules.
        import apache_beam as beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options import pipeline_options  # pyright: ignore[reportMissingImports]

        options = pipeline_options.PipelineOptions(list(self.options))
        with beam.Pipeline(options=options) as pipeline:
            done = pipeline | beam.Create(items) | beam.Reshuffle() | "write" >> beam.Map(run)
            # The direct runner sees the death of a worker by what that still owes to others.
            _ = done | beam.combiners.Count.Globally()


Engine = Share | Beam
ALONE = Share()


class Portable:
    """What reaches another process as the call that made it: open data, an encoder, its weights."""

    _made: tuple[Any, ...] = ()

    def __reduce__(self):
        """TypeError unless `made_by` was called."""
        if not self._made:
            raise TypeError(f"a {type(self).__name__} of an unknown origin cannot go to workers")
        return _make_again, self._made


class Program(Portable):
    """A function that makes(*args) returns, such as a compiled one with its weights."""

    def __init__(self, make: Callable[..., Callable[..., Any]], *args: Any):
        """Calls it; `args` can be pickled."""
        self._function = make(*args)
        made_by(self, make, *args)

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        return self._function(*args)


_P = TypeVar("_P", bound=Portable)


def made_by(value: _P, make: Callable[..., Any], *args: Any) -> _P:
    """The value, which make(*args) would make again; `make` is a function of a module."""
    module = sys.modules[make.__module__]
    spec = getattr(module, "__spec__", None)  # Names a command that is run as __main__.
    name = spec.name if spec else make.__module__
    value._made = (uuid.uuid4().hex, f"{name}:{make.__qualname__}", args)
    return value


def define_flags() -> None:
    """The flags of a command whose work is shared, and --dry_run or --rehearse."""
    flags.DEFINE_integer("worker", None, "The number of this process.", lower_bound=0)
    flags.DEFINE_integer("workers", None, "How many processes do this.", lower_bound=1)
    flags.DEFINE_enum("engine", NAMES[0], NAMES, _ENGINE)
    flags.DEFINE_string("beam_options", "", _OPTIONS)
    flags.DEFINE_bool("dry_run", False, "Say what would be done, and write nothing.")
    flags.DEFINE_alias("rehearse", "dry_run")


def add_arguments(arg: Callable[..., Any]) -> None:
    """The same --engine and --beam_options of a command with argparse's flags."""
    arg("--engine", choices=NAMES, default=NAMES[0], help=_ENGINE)
    arg("--beam_options", default="", help=_OPTIONS)


def of(args: Any) -> Engine:
    """The engine that flags name, absl's or argparse's; ValueError for what cannot be."""
    numbers = getattr(args, "worker", None), getattr(args, "workers", None)
    if args.engine == "beam":
        if numbers != (None, None):
            raise ValueError(
                "--engine=beam shares the work by itself: leave --worker and --workers out, and "
                "say how many in --beam_options, such as --direct_num_workers=4"
            )
        return beam(args.beam_options)
    if args.beam_options:
        raise ValueError(f"--beam_options={args.beam_options} is for --engine=beam")
    return share(*numbers) if hasattr(args, "worker") else Share()


def beam(options: str) -> Beam:
    """Beam with its options, split as a shell does; ValueError if it is not installed."""
    if importlib.util.find_spec("apache_beam") is None:
        raise ValueError('--engine=beam needs Apache Beam: pip install "imagen-sd-jax[beam]"')
    split = tuple(shlex.split(options))
    bad = [option for option in split if not option.startswith("--")]
    if bad:
        raise ValueError(f"--beam_options has {bad[0]!r}: give options as --NAME=VALUE")
    return Beam(split)


def share(worker: int | None, workers: int | None) -> Share:
    """A process's share; None stands for what jax.distributed says. ValueError if it has none."""
    workers = workers or jax.process_count()
    worker = jax.process_index() if worker is None else worker
    if worker >= workers:
        raise ValueError(f"--worker={worker} of --workers={workers}: they are counted from 0")
    return Share(worker, workers)


def ahead(function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[tuple[_T, _R]]:
    """(item, function(item)) of each, the next being computed while one is used."""
    waiting = None
    with ThreadPoolExecutor(1) as executor:
        for item in items:
            coming = item, executor.submit(function, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


_KEPT: dict[str, Any] = {}  # What this process made again, by the original's name.
_LOCK = threading.RLock()


def _make_again(name: str, function: str, args: tuple[Any, ...]) -> Any:
    """Once in a process, whichever of a worker's threads comes first."""
    with _LOCK:
        if name not in _KEPT:
            module, _, attribute = function.partition(":")
            make: Any = importlib.import_module(module)
            for part in attribute.split("."):
                make = getattr(make, part)
            (kept := make(*args))._made = name, function, args  # Runners pass it on.
            _KEPT[name] = kept
        return _KEPT[name]


def _counted(write, read, folder: pathlib.Path, item: int) -> None:
    """Writes one file, and then what it counts, by which Beam's engine knows that it is done."""
    counts = write(item, read(item)) if read else write(item)
    files.write_whole(_counts_of(folder, item), json.dumps(counts or {}))


def _counts_of(folder: pathlib.Path, item: int) -> pathlib.Path:
    return folder / f"{item}.tmp"


def _tell(items, missing, size, noun: str, name: str) -> tuple[int, int]:
    """Says how much there is to do; returns how much it is in all, and how much is there."""
    total = sum(map(size, items))
    there = total - sum(map(size, missing))
    logging.info("%s%s", f"{name}: " if name else "", f"{there:,} of {total:,} {noun} are done")
    return total, there


def _nothing(item: int) -> None:
    del item
