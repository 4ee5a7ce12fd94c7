"""The command benchmarks.accelerator, which runs all measurements on an accelerator."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import accelerator
from benchmarks.accelerator import Part
from tests.imagen_jax.commands import ROOT


def run(part, out, seconds=100.0):
    options = argparse.Namespace(out=out, rehearse=False, compilation_cache=None)
    return accelerator._run(part, options, time.monotonic() + seconds, threading.Lock())


def test_a_hanging_part_is_killed_and_its_output_stored(tmp_path):
    code = "import time; print('{\"a\": 1}', flush=True); time.sleep(60)"
    row = run(Part("hanging", "", ("timeit", "-n1", "-r1", code), 3), tmp_path)
    assert row["status"] == "stopped after 3 s" and row["results"] == [{"a": 1}]
    stored = json.loads((tmp_path / "results.jsonl").read_text())
    assert stored["part"] == "hanging" and stored["results"] == [{"a": 1}]


def test_if_a_part_fails_its_status_is_failed_and_the_log_holds_its_error(tmp_path):
    row = run(Part("failing", "", ("no_such_module",), 30), tmp_path)
    assert row["status"] == "failed"
    assert "No module named no_such_module" in (tmp_path / "log.txt").read_text()


def test_a_part_that_does_not_fit_into_the_time_left_is_skipped(tmp_path):
    row = run(Part("late", "", ("timeit", "pass"), 30), tmp_path, seconds=20)
    assert row["status"] == "left out"
    assert "20 s are left, and a part needs at least 40 s" in (tmp_path / "log.txt").read_text()


def test_the_log_does_not_grow_beyond_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "_LIMIT_BYTES", 10)
    accelerator._append(tmp_path / "log.txt", "123456")
    accelerator._append(tmp_path / "log.txt", "789012")
    assert (tmp_path / "log.txt").read_text() == "123456"


def test_the_table_shows_measured_planned_and_published_rates():
    measured = {"samples_per_second": 210.04, "first_samples_per_second": 230.0, "seconds": 60.2, "deterministic": True}
    measured |= {"batch": 64, "watts": 698.0, "tflops": 210.7, "mfu": 0.2129, "peak_memory_gib": 30.0}
    measured |= {"compile_s": 61.0, "planned": {"samples_per_second": 394.0, "memory_gib": 25.46}}
    row = {"part": "base64", "about": "", "status": "done", "seconds": 80.0, "results": [measured]}
    lines = accelerator._rates([row | {"published": 202.4, "source": "NeMo, H100"}])
    rates = "230.0 | 210.0 | 698 | 394.0 | 202.4 (NeMo, H100)"
    assert lines[-1] == f"| base64 | 64 | yes | 60 | {rates} | 210.7 | 21.3 % | 30.0 | 25.5 | 61.0 | done |"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_continue_leaves_out_completed_parts_and_names_those_left_out(tmp_path, capsys, monkeypatch):
    parts = [Part(name, "", ("json.tool", "--help"), 30) for name in ("first", "second", "third")]
    monkeypatch.setattr(accelerator, "PARTS", parts)
    first = {"part": "first", "about": "", "status": "done", "results": [{"kept": 1}]}
    rows = [first, first | {"part": "second", "status": "failed", "results": []}]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    accelerator.main([f"--out={tmp_path}", "--continue", "--minutes=0"])
    out = capsys.readouterr().out
    assert "left out: second, third; to run them, add --continue" in out
    assert '`{"kept": 1}`' in out and "first: " not in out
    written = [json.loads(line)["part"] for line in file.read_text().splitlines()]
    assert written == ["first", "second", "second", "third"]


@pytest.mark.slow
def test_rehearse_runs_every_part_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.accelerator", "--rehearse", "--minutes=15"]
    command += [f"--out={tmp_path}", f"--compilation_cache={ROOT / '.jax_cache'}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + (tmp_path / "log.txt").read_text()[-5000:]
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {part.name for part in accelerator.PARTS}
    assert {row["status"] for row in rows} == {"done"}
    assert all(row["results"] for row in rows)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["emoji64.png", "emoji64.tar", "log.txt", "results.jsonl", "table.md"]
