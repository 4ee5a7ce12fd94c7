"""Run the stages of a long job: in one process, in several that share a folder, or with Beam.

A stage writes numbered files by calling an engine's method `fill` with two functions, `path` and
`write`. `write(i)` writes the file `path(i)` atomically. The content of the file depends only on i
and on the other arguments of `write`, so it does not matter which worker writes the file. A stage
skips files that exist when it begins, so a job that was killed continues. `write` may return a dict
of counts. A stage returns the sums of these counts.
"""

import collections
import functools
import importlib.util
import io
import json
import pathlib
import pickle
import random
import shlex
import sys
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
from absl import flags, logging

from diffusion_jax import files
from diffusion_jax.logs import progress

flags.disclaim_key_flags()  # --help shows the flags with the command that calls `define_flags`.
NAMES = ("alone", "beam")
_ATTEMPTS = 3
_ENGINE = "Run the work in this process (alone) or with Apache Beam (beam)."
_OPTIONS = 'Options for Beam, such as "--runner=FlinkRunner --flink_master=HOST".'
_T = TypeVar("_T")
_R = TypeVar("_R")


class Worker(NamedTuple):
    """An engine without Beam: this process is one of several workers, or the only worker.

    `worker` is the index of this worker, from 0 to workers - 1. Workers share a folder, and do not
    wait for each other. Each writes its own part of the files first, and then all files that are
    missing. So workers may die, restart, join late or leave at any time.
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
        """Call `write(i)` for each item i whose file is missing. Return the sums of all counts.

        Args:
            items: The indices of the stage's files.
            path: Maps an item to its file.
            write: Writes an item's file. It may return a dict of counts.
            noun: The unit in progress lines, such as "shards".
            name: The name of the stage in progress lines.
            size: Maps an item to its number of units, for progress lines.
            read: Maps an item to a second argument for `write`. A thread calls it while the
                previous item is written.
        """
        done = files.present(map(path, items))
        missing = [item for turn in self.turns(len(items)) if path(item := items[turn]) not in done]
        total, finished = _log_start(items, missing, size, noun, name)
        meter = progress.Meter(noun, total, name=name, done=finished)
        counts = collections.Counter[str]()
        late = (i for i in missing if not path(i).exists())  # Another worker may have written it.
        for i, argument in ahead(read or (lambda item: None), late):
            if not path(i).exists():
                counts.update(write(i, argument) if read else write(i))
            meter.add(size(i))
        return counts

    def turns(self, count: int) -> Iterator[int]:
        """Yield the numbers from 0 to count - 1, this worker's part first.

        This worker's part comes in order. The parts of the other workers follow, in case these
        workers died. They follow in random order, so that two workers rarely write the same item.
        """
        part = range(count * self.worker // self.workers, count * (self.worker + 1) // self.workers)
        others = [i for i in range(count) if i not in part]
        random.Random(self.worker).shuffle(others)
        yield from part
        yield from others


class Beam(NamedTuple):
    """An engine that runs stages with Apache Beam (the extra [beam]).

    The workers of the runner must see the files under the same paths.

    `write` and `read` are pickled. They and the arguments bound to them can be module-level
    functions, plain values and values that were passed to `record_call`.
    """

    options: tuple[str, ...] = ()
    """Options for Beam, such as --runner=FlinkRunner. Without --runner, Beam runs on this machine.
    """

    def fill(self, items, path, write, *, noun="shards", name="", size=lambda item: 1, read=None):
        """Call `write(i)` with Beam for each item i whose file is missing. Return summed counts.

        Some runners stop instead of retrying the items of a dead worker. Then Beam runs again with
        the missing items, up to three times in total, unless an attempt writes nothing.

        The arguments are those of Worker.fill.

        Raises:
            OSError: If items are still missing after the last attempt.
        """
        done = files.present(map(path, items))
        missing = [i for i in items if path(i) not in done]
        _log_start(items, missing, size, noun, name)
        if not missing:
            return collections.Counter[str]()
        # The name is unique, because another command may be working in the same folder.
        counted = path(missing[0]).parent / f".beam-{uuid.uuid4().hex}.tmp"
        counted.mkdir(parents=True)
        stage = pickled((write, read))
        try:
            self._run_all(missing, functools.partial(_counted, stage, counted), counted, noun)
            total = collections.Counter[str]()
            for i in missing:
                total.update(json.loads(_counts_of(counted, i).read_text()))
        finally:
            files.remove_tree(counted)
        return total

    def _run_all(self, items: Sequence[int], run: Callable[[int], None], counted: pathlib.Path, noun: str) -> None:
        """Run Beam, and run it again for missing items if the last attempt wrote some items.

        Raises OSError if items are missing after _ATTEMPTS attempts, or if an attempt writes none.
        """
        remaining = items
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._run(remaining, run)
            except Exception as error:  # Runners raise errors of their own types.
                before = remaining
                remaining = [i for i in before if not _counts_of(counted, i).exists()]
                reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                if attempt == _ATTEMPTS or len(remaining) == len(before):
                    raise OSError(f"Beam did not finish {len(remaining)} of {len(items)} {noun}: {reason}") from error
                logging.warning(
                    "Beam stopped (%s): running it again for the remaining %d %s", reason, len(remaining), noun
                )

    def _run(self, items: Sequence[int], run: Callable[[int], None]) -> None:
        # An optional and large dependency.
        import apache_beam as beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options import pipeline_options  # pyright: ignore[reportMissingImports]

        options = pipeline_options.PipelineOptions(list(self.options))
        with beam.Pipeline(options=options) as pipeline:
            done = pipeline | beam.Create(items) | beam.Reshuffle() | "write" >> beam.Map(run)
            # The direct runner only notices a dead worker if a later stage needs its results.
            _ = done | beam.combiners.Count.Globally()


Engine = Worker | Beam
ALONE = Worker()


def record_call(value: _T, make: Callable[..., Any], *args: Any) -> _T:
    """Record that the call make(*args) created a value, such as an opened data source.

    Beam's workers repeat this call, once in each process. Returns the value. `make` must be a
    module-level function.
    """
    module = sys.modules[make.__module__]
    spec = getattr(module, "__spec__", None)  # The real name of a module that runs as __main__.
    name = spec.name if spec else make.__module__
    vars(value)["_made"] = uuid.uuid4().hex, f"{name}:{make.__qualname__}", args
    return value


def define_flags() -> None:
    """Define the flags that divide a command's work among workers.

    Also define --dry_run and its alias --rehearse.
    """
    flags.DEFINE_integer("worker", None, "Index of this worker, from 0.", lower_bound=0)
    flags.DEFINE_integer("workers", None, "The number of workers.", lower_bound=1)
    flags.DEFINE_enum("engine", NAMES[0], NAMES, _ENGINE)
    flags.DEFINE_string("beam_options", "", _OPTIONS)
    flags.DEFINE_bool("dry_run", False, "Print what would be done, and write nothing.")
    flags.DEFINE_alias("rehearse", "dry_run")


def add_arguments(arg: Callable[..., Any]) -> None:
    """Define --engine and --beam_options for a command that uses argparse.

    `arg` is the parser's method add_argument.
    """
    arg("--engine", choices=NAMES, default=NAMES[0], help=_ENGINE)
    arg("--beam_options", default="", help=_OPTIONS)


def of(args: Any) -> Engine:
    """Return the engine that a command's flags choose.

    `args` holds the flags: absl's FLAGS, or the result of argparse. Raises ValueError if they are
    invalid.
    """
    numbers = getattr(args, "worker", None), getattr(args, "workers", None)
    if args.engine == "beam":
        if numbers != (None, None):
            raise ValueError(
                "--engine=beam shares the work by itself: remove --worker and --workers, and set "
                "the number of workers in --beam_options, such as --direct_num_workers=4"
            )
        return beam(args.beam_options)
    if args.beam_options:
        raise ValueError(
            f"--beam_options={args.beam_options} is for --engine=beam: add --engine=beam, or remove --beam_options"
        )
    return share(*numbers) if hasattr(args, "worker") else Worker()


def beam(options: str) -> Beam:
    """Return a Beam engine. `options` is split into words as in a shell.

    Raises ValueError if Beam is not installed or an option is invalid.
    """
    if importlib.util.find_spec("apache_beam") is None:
        raise ValueError('--engine=beam needs Apache Beam: pip install -e ".[beam]"')
    split = tuple(shlex.split(options))
    bad = [option for option in split if not option.startswith("--")]
    if bad:
        raise ValueError(f"--beam_options has {bad[0]!r}: give options as --NAME=VALUE")
    return Beam(split)


def share(worker: int | None, workers: int | None) -> Worker:
    """Return this process's Worker.

    If None, `worker` becomes jax.process_index() and `workers` becomes jax.process_count(). Raises
    ValueError if `worker` is not below `workers`.
    """
    workers = workers or jax.process_count()
    worker = jax.process_index() if worker is None else worker
    if worker >= workers:
        raise ValueError(f"--worker={worker} of --workers={workers}: the index must be from 0 to {workers - 1}")
    return Worker(worker, workers)


def ahead(function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[tuple[_T, _R]]:
    """Yield (item, function(item)) for each item.

    A thread computes the next result while the caller uses the current one.
    """
    running = None
    with ThreadPoolExecutor(1) as executor:
        for item in items:
            submitted = item, executor.submit(function, item)
            if running is not None:
                yield running[0], running[1].result()
            running = submitted
        if running is not None:
            yield running[0], running[1].result()


class _Pickler(pickle.Pickler):
    """Pickles a value that was passed to `record_call` as the call that created it."""

    def reducer_override(self, value: Any) -> Any:
        made = getattr(value, "__dict__", {}).get("_made")
        return (_make_again, made) if made else NotImplemented


def pickled(value: Any) -> bytes:
    """Pickle a value. Values inside it that were passed to `record_call` are pickled as calls.

    The result is compressed, because a value may hold the names of many files.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return zlib.compress(buffer.getvalue())


@functools.lru_cache(maxsize=4)
def unpickled(data: bytes) -> Any:
    """Return the value that `pickled` has pickled."""
    return pickle.loads(zlib.decompress(data))


_REMADE: dict[str, Any] = {}  # Values that this process made again, by identifier.
_LOCK = threading.RLock()


def _make_again(name: str, function: str, args: tuple[Any, ...]) -> Any:
    with _LOCK:
        if name not in _REMADE:
            module, _, attribute = function.partition(":")
            make: Any = importlib.import_module(module)
            for part in attribute.split("."):
                make = getattr(make, part)
            _REMADE[name] = make(*args)
        return _REMADE[name]


def _counted(stage: bytes, folder: pathlib.Path, item: int) -> None:
    """Write the file of an item, and then a file with its counts that marks the item as done."""
    write, read = unpickled(stage)
    counts = write(item, read(item)) if read else write(item)
    files.write_whole(_counts_of(folder, item), json.dumps(counts or {}))


def _counts_of(folder: pathlib.Path, item: int) -> pathlib.Path:
    return folder / f"{item}.tmp"


def _log_start(items, missing, size, noun: str, name: str) -> tuple[int, int]:
    """Log how many units of a stage are done, if any are. Return (all units, done units)."""
    total = sum(map(size, items))
    finished = total - sum(map(size, missing))
    if finished:
        logging.info("%s%s", f"{name}: " if name else "", f"{finished:,} of {total:,} {noun} are done")
    return total, finished
