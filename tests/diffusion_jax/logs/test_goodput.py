"""The time of a run is divided by kind, from starts in the manifest and speeds in the metrics."""

import json

import pytest

from diffusion_jax.logs import goodput, run_log


def entry(minute, first_step, batch_size, **seconds):
    start = f"2026-01-01T00:{minute:02}:00+00:00"
    return {"start": start, "first_step": first_step, "config": {"batch_size": batch_size}, "seconds": seconds}


ENTRIES = [
    entry(0, 0, 8, starting=5.0, compiling=20.0, saving=4.0, checking=0.0),
    entry(2, 20, 16, compiling=10.0, **{"drawing and scoring": 7.0, "repeated": 6.0}),
]
LINES = [
    {"step": 10, "images_per_second": 4.0, "data/waiting": 0.25},  # 80 images: 20 s.
    {"step": 10, "evaluation/fid": 3.0},
    {"step": 20, "images_per_second": 8.0, "data/waiting": 0.0},  # 80 images: 10 s.
    {"step": 25, "images_per_second": 10.0, "data/waiting": 0.5},  # A batch of 16: 80 images in 8 s.
]


def test_the_time_of_each_start_is_divided_into_training_and_other_work():
    first, second = goodput.starts(ENTRIES, LINES)
    assert (first.first, first.last, second.first, second.last) == (0, 20, 20, 25)
    assert first.seconds == {"steps": 15 + 10, "waiting for data": 5, "starting": 5, "compiling": 20, "saving": 4}
    assert second.seconds == {"steps": 4, "waiting for data": 4} | ENTRIES[1]["seconds"]
    # The starts are 120 s apart. 59 s were counted, and 6 s were spent on lost steps.
    assert (first.idle, second.idle) == (0, 120 - 59 - 6)


def test_the_summary_has_the_share_of_each_kind_of_time_over_all_starts():
    every = goodput.starts(ENTRIES, LINES)
    whole = 59 + 31
    assert sum(goodput.total(every).values()) == whole
    assert goodput.summary(every) == (
        "0:01:30 in 2 starts: steps 32.2%, waiting for data 10.0%, starting 5.6%, "
        "compiling 33.3%, saving 4.4%, drawing and scoring 7.8%, repeated 6.7%"
    )
    assert goodput.summary(goodput.starts(ENTRIES[:1], LINES[:1])).startswith("0:00:49 in 1 start:")
    assert goodput.summary([]) == ""


def test_a_start_whose_steps_were_all_repeated_still_counts_its_compilation():
    again = [*ENTRIES, entry(5, 10, 16, **ENTRIES[1]["seconds"])]
    first, second, third = goodput.starts(again, LINES)
    assert (first.last, second.last, third.last) == (10, 20, 25)
    assert second.seconds.keys() == {"compiling", "drawing and scoring", "repeated"}


def test_a_start_after_a_kill_counts_the_logged_steps_that_it_repeats(tmp_path):
    config = {"batch_size": 8}
    run_log.write_manifest(tmp_path, config, 0, 0)
    run_log.write_seconds(tmp_path, {"compiling": 3.0})
    (tmp_path / run_log.METRICS).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    run_log.write_manifest(tmp_path, config, 0, 15)
    run_log.write_seconds(tmp_path, {"compiling": 2.0})
    first, second = run_log.read_manifest(tmp_path)
    assert first["seconds"] == {"compiling": 3.0}
    # Steps 16 to 20 at 8, and 21 to 25 at 10 images/s.
    assert second["seconds"] == {"repeated": 5 * 8 / 8 + 5 * 8 / 10, "compiling": 2.0}


def test_a_start_from_an_older_checkpoint_counts_repeated_steps_of_all_former_starts(tmp_path):
    (tmp_path / run_log.MANIFEST).write_text(json.dumps({"runs": ENTRIES}))
    (tmp_path / run_log.METRICS).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    run_log.write_manifest(tmp_path, {"batch_size": 32}, 0, 5)
    # Steps 6 to 10 at 4 and 11 to 20 at 8 images/s of batches of 8, and the second start: 8 s.
    assert run_log.read_manifest(tmp_path)[-1]["seconds"] == {"repeated": 10 + 10 + 8}


@pytest.mark.parametrize(
    "changed",
    [
        {"start": "yesterday"},
        {"first_step": "1"},
        {"seconds": {"saving": "long"}},
        *({"config": config} for config in (3, {"data": {"heldout": "few"}}, {"optimizer": [0.1]})),
        {"config": {"optimizer": {"ema_widths": ["wide"]}}},
    ],
)
def test_a_manifest_without_numbers_counts_as_damaged(tmp_path, changed):
    (tmp_path / run_log.MANIFEST).write_text(json.dumps({"runs": [ENTRIES[0] | changed]}))
    assert run_log.read_manifest(tmp_path) == []
    run_log.write_seconds(tmp_path, {"saving": 1.0})  # The manifest has no entry to write to.
