"""The log of a killed run keeps complete entries and loses incomplete ones."""

import json
import sys

import pytest

from sd_jax.mlperf import convergence, mllog

HEADER = [("seed", {}), ("run_start", {}), ("train_samples", {})]


def block(first, last):
    return [("block_start", {"samples_count": first}), ("block_stop", {"samples_count": last})]


def evaluation(samples):
    metric = lambda name: ("eval_accuracy", {"samples_count": samples, "metric": name})
    return [
        ("eval_start", {"samples_count": samples}),
        metric("FID"),
        metric("CLIP"),
        ("eval_stop", {"samples_count": samples}),
    ]


def recovered(tmp_path, events, samples, end=""):
    lines = [
        f":::MLLOG {json.dumps({'key': key, 'value': i, 'metadata': metadata, 'time_ms': i})}\n"
        for i, (key, metadata) in enumerate(events)
    ]
    path = tmp_path / mllog.RESULT
    path.write_text("".join(lines) + end)
    events_left = mllog.recover(tmp_path, samples)
    assert mllog.read(path) == events_left  # The file is truncated to the same events.
    return [(event.key, dict(event.metadata)) for event in events_left]


def test_complete_blocks_and_evaluations_of_a_log_are_kept(tmp_path):
    events = [*HEADER, *block(0, 16), *evaluation(16), *block(16, 32), *evaluation(32)]
    assert recovered(tmp_path, events, 32) == events
    stopped = [*events, ("run_stop", {"status": "success", "samples_count": 32})]
    assert recovered(tmp_path, stopped, 32) == stopped


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_an_incomplete_evaluation_is_removed(tmp_path, length):
    whole = [*HEADER, *block(0, 16)]
    events_left = recovered(tmp_path, [*whole, *evaluation(16)[:length]], 16)
    assert events_left == (whole if length < 4 else [*whole, *evaluation(16)])


def test_a_block_without_a_saved_checkpoint_is_removed(tmp_path):
    whole = [*HEADER, *block(0, 16)]
    assert recovered(tmp_path, [*whole, *block(16, 32)], 16) == whole
    assert recovered(tmp_path, [*whole, *block(16, 32)[:1]], 16) == whole


def test_an_incomplete_line_is_removed(tmp_path):
    whole = [*HEADER, *block(0, 16)]
    assert recovered(tmp_path, whole, 16, end=':::MLLOG {"key": ') == whole


def test_without_a_checkpoint_or_a_started_clock_the_log_is_empty(tmp_path):
    assert recovered(tmp_path, [*HEADER, *block(0, 16)], 0) == []
    assert recovered(tmp_path, HEADER[:1], 16) == []
    assert mllog.recover(tmp_path / "new", 0) == []


def test_a_result_file_of_another_program_is_an_error(tmp_path):
    (tmp_path / mllog.RESULT).write_text("step 1\n")
    with pytest.raises(
        ValueError, match=r"holds lines that are not in mllog's format, .*: move the file to another folder"
    ):
        mllog.recover(tmp_path, 16)


def test_without_mlcommons_package_the_error_names_the_pip_command(tmp_path, monkeypatch):
    for module in ("mllog.mllog", "rcp_checker.rcp_checker"):
        monkeypatch.setitem(sys.modules, f"mlperf_logging.{module}", None)
    with pytest.raises(ModuleNotFoundError, match="pip install mlperf-logging"):
        mllog.open_log(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="pip install mlperf-logging"):
        convergence.judge(512, [1, 2, 3])


def test_a_continued_run_appends_to_its_log(tmp_path):
    for value in (1, 2):
        log = mllog.open_log(tmp_path)
        log.event("seed", value)
        log.end("block_stop", time_ms=5, metadata={"samples_count": 8})
        log.logger.handlers[0].close()
    events = mllog.read(tmp_path / mllog.RESULT)
    assert [event.value for event in events] == [1, None, 2, None]
    assert events[1].time_ms == 5 and events[1].metadata["samples_count"] == 8
    assert mllog.block_ends(events) == {8: 5}
