"""Progress lines of long jobs and of training."""

import itertools
import logging
import time

import pytest

from diffusion_jax.devices import hardware
from diffusion_jax.logs import progress


@pytest.fixture
def seconds(monkeypatch):
    """The clock advances by ten seconds at each reading."""
    ticks = itertools.count(0, 10)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_progress_line_has_the_rate_and_the_time_left(seconds, caplog):
    with caplog.at_level(logging.INFO, "absl"):
        meter = progress.Meter("captions", 1000, name="encoding", done=100)
        meter.add(30)  # Reads the clock twice: to decide whether to log, and for the rate.
        meter.reach(1000)
    assert lines(caplog) == [
        "encoding: 130/1,000 captions | 1.5 captions/s | 0:09:40 left",
        "encoding: 1,000/1,000 captions | 22.5 captions/s | 0:00:00 left",
    ]


def test_reported_yields_all_items_and_logs_the_last(caplog):
    with caplog.at_level(logging.INFO, "absl"):
        assert list(progress.reported("abc", 3, "letters")) == ["a", "b", "c"]
    (line,) = lines(caplog)
    assert line.startswith("3/3 letters | ") and line.endswith(" letters/s | 0:00:00 left")
    caplog.clear()
    with caplog.at_level(logging.INFO, "absl"):
        list(progress.reported(["ab", "c"], 3, "letters", size=len, every=0.0))
    assert [line.partition(" ")[0] for line in lines(caplog)] == ["2/3", "3/3"]


def test_progress_without_a_known_end_shows_the_elapsed_time(seconds, caplog):
    with caplog.at_level(logging.INFO, "absl"):
        list(progress.reported("abcd", None, "letters", every=25.0))
    assert lines(caplog) == [
        "3 letters | 0.07 letters/s | 0:00:40 so far",
        "4 letters | 0.07 letters/s | 0:01:00 so far",
    ]


def test_step_line_shows_rate_loss_time_left_memory_and_utilization():
    rates = {"images_per_second": 812.34, "loss": 0.12345, "seconds_left": 3792.4, "utilization": 0.4123}
    line = progress.step_line(300, 8000, memory=hardware.Memory(used=1, peak=3 * 2**29, limit=2**36), **rates)
    assert line == "step 300/8,000 | 812 images/s | loss 0.1235 | 1:03:12 left | 1.5/64.0 GiB | MFU 41.2 %"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0:00:00"), (59.6, "0:01:00"), (100 * 3600, "100:00:00"), (float("inf"), "-:--:--")]
)
def test_step_line_formats_the_time_left_as_h_mm_ss(seconds, expected):
    line = progress.step_line(1, 2, images_per_second=9.87, loss=1.0, seconds_left=float(seconds))
    assert line == f"step 1/2 | 9.9 images/s | loss 1.0000 | {expected} left"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "pass", "1 pass"), (0, "pass", "0 passes"), (1, "word", "1 word"), (2000, "word", "2,000 words")],
)
def test_counted_chooses_the_singular_or_the_plural(count, noun, text):
    assert progress.counted(count, noun) == text
