"""The result file of a benchmark run: lines of mllog that go on, one valid log, after a kill.

Process 0 alone writes. What a kill left half said (a block without its end, an evaluation without
its scores, steps after the last checkpoint) is taken out when the run goes on, and said anew.
"""

import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from diffusion_jax.machine import files
from sd_jax.mlperf import results
from sd_jax.mlperf.results import Event

_INSTALL = "the benchmark's log needs a package of MLCommons: pip install mlperf-logging"


class ResultLog:
    """Writes `WORKDIR/result.txt` as things happen; each line is in the file when it is said."""

    def __init__(self, workdir: pathlib.Path):
        """Opens the file behind what it holds; see `recover`. ModuleNotFoundError with a remedy."""
        self.path = workdir / results.RESULT
        self._logger: Any = None
        if jax.process_index() == 0:
            self._logger = _mllogger(self.path)

    def event(self, key: str, value: Any, **metadata: Any) -> None:
        """A point in time: now."""
        if self._logger:
            self._logger.event(key, value, metadata=metadata, stack_offset=2)

    def start(self, key: str, time_ms: int | None = None, **metadata: Any) -> None:
        """The begin of an interval."""
        if self._logger:
            self._logger.start(key, metadata=metadata, time_ms=time_ms, stack_offset=2)

    def stop(self, key: str, time_ms: int | None = None, **metadata: Any) -> None:
        """Its end; both are now, unless `time_ms` says another time."""
        if self._logger:
            self._logger.end(key, metadata=metadata, time_ms=time_ms, stack_offset=2)

    def close(self) -> None:
        """Lets the file go."""
        if self._logger:
            for handler in self._logger.logger.handlers[:]:
                self._logger.logger.removeHandler(handler)
                handler.close()


def recover(workdir: pathlib.Path, samples: int) -> list[Event]:
    """Cuts a run's file down to what is whole and of at most `samples` images; the events left.

    To be called before the file is opened. Empty for a run without a checkpoint: it starts anew,
    its clock too. ValueError for a file that is not all lines of mllog.
    """
    path = workdir / results.RESULT
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()  # The last one may be half a line.
    events = results.parse(lines, str(path))
    if len(events) < len(lines):
        raise ValueError(f"{path} holds lines that are none of mllog: move it elsewhere")
    whole = _whole(events, samples)
    if jax.process_index() == 0:
        files.write_whole(path, "".join(f"{line}\n" for line in lines[:whole]))
    return events[:whole]


def block_ends(events: Sequence[Event]) -> Mapping[int, int]:
    """{samples: milliseconds} at which training had seen so many."""
    return {e.metadata["samples_count"]: e.time_ms for e in events if e.key == "block_stop"}


def _whole(events: Sequence[Event], samples: int) -> int:
    """How many events come before what is half said, or said of more images."""
    whole = 0
    for i, event in enumerate(events, 1):
        if not samples or event.metadata.get("samples_count", 0) > samples:
            break
        if event.key not in ("block_start", "eval_start", "eval_accuracy"):
            whole = i
    return whole if "run_start" in [event.key for event in events[:whole]] else 0


def _mllogger(path: pathlib.Path) -> Any:
    try:
        from mlperf_logging.mllog import mllog
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_INSTALL) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.Logger(f"mllog {path}", logging.INFO)  # In no tree: it says nothing elsewhere.
    logger.addHandler(logging.FileHandler(path, encoding="utf-8"))
    return mllog.MLLogger(logger, root_dir=str(pathlib.Path(__file__).parents[2]))
