"""The metrics and the manifest of a run."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.logs import run_log


def write(workdir, steps, resumed_from=0):
    writer = run_log.MetricWriter(workdir, {}, resumed_from)
    for step in steps:
        writer.write_scalars(step, {"loss": jnp.float32(step / 4), "lr": 0.5})
    writer.close()


def test_metrics_are_written_as_one_json_object_per_line(tmp_path):
    writer = run_log.MetricWriter(tmp_path, {})
    writer.write_scalars(3, {"loss": np.float32(0.25), "grad_norm": jnp.array(2)})
    writer.write_scalars(4, {"loss": float("nan"), "grad_norm": float("inf")})
    # Before close, because a killed run never closes its files.
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    writer.close()
    assert first == {"step": 3, "loss": 0.25, "grad_norm": 2.0}
    assert second == {"step": 4, "loss": None, "grad_norm": None}


def test_metrics_of_a_resumed_run_hold_each_step_once_and_no_partial_line(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "lo')  # The run was killed while writing.
    assert [line["step"] for line in run_log.read_metrics(tmp_path / "metrics.jsonl")] == [10, 20, 30, 40]
    write(tmp_path, [30, 40, 50], resumed_from=20)
    metrics = run_log.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [10, 20, 30, 40, 50]
    assert [line["loss"] for line in metrics] == [2.5, 5.0, 7.5, 10.0, 12.5]


def test_read_more_metrics_parses_only_new_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    parsed = []
    parse = run_log.untrusted.parse_json
    monkeypatch.setattr(run_log.untrusted, "parse_json", lambda x: parsed.append(x) or parse(x))
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    content_and_rows = run_log.read_more_metrics(path, b"", [])
    assert content_and_rows == (b'{"step": 1}\n{"step": 2}\n', [{"step": 1}, {"step": 2}])
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    content_and_rows = run_log.read_more_metrics(path, *content_and_rows)
    assert [row["step"] for row in content_and_rows[1]] == [1, 2, 3] and len(parsed) == 3
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\nno\n')
    with pytest.raises(ValueError, match="line 4 is damaged: 'no'"):
        run_log.read_more_metrics(path, *content_and_rows)
    # A run that was resumed from step 1.
    path.write_bytes(b'{"step": 1}\n{"step": 5}\n{"step": 6}\n')
    assert [row["step"] for row in run_log.read_more_metrics(path, *content_and_rows)[1]] == [1, 5, 6]


BROKEN = (b'{"step": 2', b"\xff\x00\x1b", b"[2]", b'{"loss": 2}', b'{"step": "2"}', b"[" * 10**5)
BROKEN += (b'{"step": 2, "images_per_second": "fast"}',)


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_damaged_line_is_an_error_but_a_resumed_run_drops_it(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"^{path}, line 2 is damaged: '.*'$") as error:
        run_log.read_metrics(path)
    assert str(error.value).isprintable() and len(str(error.value)) < len(str(path)) + 150
    write(tmp_path, [4], resumed_from=3)
    assert [line["step"] for line in run_log.read_metrics(path)] == [1, 3, 4]
    assert f"{path}, line 2 is damaged: " in caplog.text
    assert caplog.text.count("; 1 damaged lines are ignored") == 1


def test_a_new_run_in_an_old_workdir_removes_the_old_metrics(tmp_path):
    write(tmp_path, [10, 20])
    write(tmp_path, [10])
    assert [line["step"] for line in run_log.read_metrics(tmp_path / "metrics.jsonl")] == [10]


def test_only_process_0_writes_metrics_and_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path, [10])
    run_log.write_manifest(tmp_path, {}, seed=0, step=0)
    assert list(tmp_path.iterdir()) == []


def test_importing_run_log_and_curve_does_not_import_tensorflow_or_matplotlib():
    heavy = "{'clu', 'tensorflow', 'matplotlib'}"
    code = "import sys, diffusion_jax.logs.run_log, diffusion_jax.evaluate.curve; "
    code += f"print({heavy} & set(sys.modules))"
    root = pathlib.Path(run_log.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr


def test_the_manifest_lists_each_start_with_config_versions_and_devices(tmp_path):
    config = {"sizes": (1, 2), "lr": np.float32(0.5), "path": pathlib.Path("data"), "nested": {"a": 1}}
    run_log.write_manifest(tmp_path, config, seed=7, step=0)
    run_log.write_manifest(tmp_path, config, seed=7, step=300)
    first, second = json.loads((tmp_path / "manifest.json").read_text())["runs"]
    assert [first["first_step"], second["first_step"]] == [0, 300]
    assert first["config"] == {"sizes": [1, 2], "lr": 0.5, "path": "data", "nested": {"a": 1}}
    assert first["seed"] == 7 and first["command"] == sys.orig_argv
    assert first["versions"]["jax"] == jax.__version__
    assert first["versions"].keys() >= {"python", "jaxlib", "flax", "optax", "orbax-checkpoint"}
    assert first["devices"] == {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}
    assert first["start"] <= second["start"] and first["start"].endswith("+00:00")


TEXT_STEP = b'{"runs": [], "continued_from": {"run": "a", "step": 1, "averages_from": "b"}}'
DAMAGED = {"empty": b"", "binary": b"\xff\x00\x80", "a list": b"[1]", "no runs": b"{}", "deep": b"[" * 10**5}
DAMAGED |= {"a number": b'{"runs": 3}', "a step that is text": TEXT_STEP}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_manifest_is_replaced_with_a_warning(tmp_path, caplog, content):
    (tmp_path / "manifest.json").write_bytes(content)
    run_log.write_manifest(tmp_path, {}, seed=7, step=300)
    (run,) = json.loads((tmp_path / "manifest.json").read_text())["runs"]
    assert run["first_step"] == 300
    assert f"{tmp_path}/manifest.json is damaged (" in caplog.text
    assert "): ignoring its entries" in caplog.text


def test_git_commit_names_the_commit_only_for_a_tracked_file(tmp_path):
    def git(*args):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    tracked, untracked = tmp_path / "tracked.py", tmp_path / "untracked.py"
    tracked.write_text("a"), untracked.write_text("b")
    assert run_log.git_commit(tracked) is None
    git("init"), git("add", "tracked.py"), git("commit", "-m", "one")
    assert run_log.git_commit(tracked) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    tracked.write_text("changed")
    assert run_log.git_commit(tracked) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    assert run_log.git_commit(untracked) is None


def test_nan_and_inf_written_by_other_programs_are_missing_values(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN, "lr": Infinity, "a": 1e999, "b": 2.0}\n')
    assert run_log.read_metrics(path) == [{"step": 1, "loss": None, "lr": None, "a": None, "b": 2}]
