"""Compiled programs on disk. Damaged or swapped files are compiled again."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from diffusion_jax.devices import program_cache

ROOT = pathlib.Path(__file__).parents[3]
# Prints the results of two programs, and how many of all programs were read from the disk.
CALL = """
import jax, sys
from diffusion_jax import cli
from absl import flags
flags.FLAGS(["x"])
cli.start(alone=True)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.rpartition("/")[2]))
values = [float(jax.jit(f)(1.0)) for f in (lambda x: x * 3 + 1, lambda x: x * 5 + 2)]
import json
print(json.dumps([values, hits.count("cache_hits")]))
"""


def call(folder):
    """Return ([values], number of programs read from `folder`, stderr) of a process."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-c", CALL]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return *json.loads(ended.stdout.splitlines()[-1]), ended.stderr


def test_truncated_and_swapped_programs_are_compiled_again_and_replaced(tmp_path):
    folder = tmp_path / "programs"
    values, hits, _ = call(folder)
    assert (values, hits) == ([4.0, 7.0], 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    first, second, *_ = files = sorted(folder.glob("*-sha256-cache"))
    assert call(folder)[:2] == ([4.0, 7.0], len(files))
    whole = {path: path.read_bytes() for path in files}
    second.write_bytes(whole[second][:-9])  # A kill can leave a truncated file.
    first.write_bytes(whole[files[-1]])  # The file of another program.
    values, hits, said = call(folder)
    assert (values, hits) == ([4.0, 7.0], len(files) - 2)
    assert said.count("it is damaged or not of this program") == 2
    assert call(folder)[:2] == ([4.0, 7.0], len(files))


def test_processes_that_fill_an_empty_cache_at_once_store_only_complete_programs(tmp_path):
    folder = tmp_path / "programs"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        at_once = list(pool.map(call, [folder] * 3))
    assert [values for values, *_ in at_once] == [[4.0, 7.0]] * 3
    values, hits, said = call(folder)
    assert (values, hits) == ([4.0, 7.0], len(list(folder.glob("*-sha256-cache"))))
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))
    warned = [text for *_, text in at_once if "damaged" in text or "Warning" in text]
    assert not warned and "damaged" not in said


def test_a_cached_program_starts_with_the_digest_of_its_key_and_content(tmp_path):
    """A dictionary stands in for JAX's cache of programs."""
    entries = {}
    memory = types.SimpleNamespace(eviction_enabled=True, get=entries.get, put=entries.setdefault)
    cache = program_cache.Checked(memory, str(tmp_path))
    cache.put("four", b"program")
    assert cache.get("four") == b"program" and cache.get("five") is None
    (entry,) = entries.values()
    for damaged in (entry[:-1], b"", entry[:32], b"\0" + entry[1:]):
        entries["four-sha256"] = damaged
        assert cache.get("four") is None
    entries["five-sha256"] = entry
    assert cache.get("five") is None


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_folder_writable_by_other_users_is_an_error_or_not_used(tmp_path, monkeypatch, mode, caplog):
    monkeypatch.setattr(program_cache.jax.config, "update", lambda *_: pytest.fail("used"))
    monkeypatch.setattr(program_cache, "_check_entries", lambda: None)
    folder = tmp_path / "imagen-sd-jax"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    with pytest.raises(ValueError, match="can be written by other users, who could run code"):
        program_cache.use()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program_cache.use()
    assert "no programs are kept" in caplog.text
