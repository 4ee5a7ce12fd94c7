"""Locks of folders: one process writes, others get an error, and stale locks are replaced."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from diffusion_jax import files
from diffusion_jax.files import folder_lock

HOLD = """
import sys, time
from diffusion_jax.files.folder_lock import FolderLock
with FolderLock(sys.argv[1], beat=0.1):
    print("held", flush=True)
    time.sleep(600)
"""


TRY = """
import sys
from diffusion_jax.files import folder_lock
input()
try:
    with folder_lock.FolderLock(sys.argv[1]):
        print("held", flush=True)
        input()
except folder_lock.Busy as error:
    print("refused", flush=True)
"""


def hold(folder):
    """Start another process that holds the lock of the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def stop(process, number, state):
    """Send a signal, and wait until the process has reached the state."""
    os.kill(process.pid, number)
    os.waitid(os.P_PID, process.pid, state | os.WNOWAIT)


def end(process):
    process.kill()
    return process.communicate()


def test_a_writer_creates_updates_and_removes_its_lock(tmp_path):
    folder = tmp_path / "new" / "run"
    with folder_lock.FolderLock(folder, beat=0.02):
        lock = json.loads((folder / "writer-1.json").read_text())
        assert (lock["host"], lock["pid"]) == (socket.gethostname(), os.getpid())
        deadline = time.monotonic() + 120
        while "beats" not in lock and time.monotonic() < deadline:
            lock = json.loads((folder / "writer-1.json").read_text())
        assert lock["beats"] >= 1
    assert list(folder.iterdir()) == []


def test_a_heartbeat_under_way_does_not_bring_a_released_lock_back(tmp_path, monkeypatch):
    begun, released = threading.Event(), threading.Event()
    write = files.write_whole

    def write_late(path, content):
        begun.set()
        released.wait(0.3)
        write(path, content)

    monkeypatch.setattr(files, "write_whole", write_late)
    with folder_lock.FolderLock(tmp_path, beat=0.01):
        assert begun.wait(60)
        folder_lock.release(tmp_path)
        released.set()
        time.sleep(0.3)
        assert list(tmp_path.iterdir()) == []


def test_a_second_writer_gets_an_error_that_names_the_first(tmp_path):
    process = hold(tmp_path)
    message = rf"{tmp_path} is being written by process {process.pid} on {socket.gethostname()} since 2.*: wait .*"
    with pytest.raises(folder_lock.Busy, match=message), folder_lock.FolderLock(tmp_path):
        pass
    assert re.fullmatch(message, str(folder_lock.refusal(tmp_path)))
    stop(process, signal.SIGSTOP, os.WSTOPPED)  # A stopped process may continue at any time.
    with pytest.raises(folder_lock.Busy, match=message), folder_lock.FolderLock(tmp_path):
        pass
    end(process)


def test_the_lock_of_a_dead_local_process_is_stale_immediately(tmp_path):
    process = hold(tmp_path)
    stop(process, signal.SIGKILL, os.WEXITED)  # Its exit code has not been read, so it is a zombie.
    assert folder_lock.refusal(tmp_path) is None is folder_lock.refusal(tmp_path / "nothing")
    started = time.monotonic()
    with folder_lock.FolderLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["writer-2.json"]
    assert time.monotonic() - started < folder_lock.STALE / 2
    end(process)


@pytest.mark.parametrize("change", [{"started": "1"}, {"pid": os.getpid(), "started": "1"}])
def test_a_lock_whose_process_id_was_reused_is_stale(tmp_path, change):
    process = hold(tmp_path)
    lock = json.loads((tmp_path / "writer-1.json").read_text())
    end(process)
    (tmp_path / "writer-1.json").write_text(json.dumps(lock | {"pid": os.getppid()} | change))
    with folder_lock.FolderLock(tmp_path):
        pass


def test_a_lock_of_another_machine_is_valid_while_its_beats_increase(tmp_path):
    lock = {"host": "far", "pid": os.getpid(), "machine": "another", "nonce": "n", "started": "1"}
    path, ended = tmp_path / "writer-7.json", threading.Event()

    def beat():
        beats = 0
        while not ended.wait(0.05):
            beats += 1
            path.with_suffix(".new").write_text(json.dumps(lock | {"beats": beats}))
            path.with_suffix(".new").replace(path)

    path.write_text(json.dumps(lock))
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(folder_lock.Busy, match="on far since"), folder_lock.FolderLock(tmp_path):
            pass
    finally:
        ended.set()
        thread.join()
    started = time.monotonic()
    with folder_lock.FolderLock(tmp_path, stale=0.4):
        assert [path.name for path in tmp_path.iterdir()] == ["writer-8.json"]
    assert 0.4 <= time.monotonic() - started < folder_lock.STALE / 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_lock_is_stale_if_it_does_not_change(tmp_path, content):
    (tmp_path / "writer-1.json").write_bytes(content)
    with folder_lock.FolderLock(tmp_path, stale=0.1):
        assert [path.name for path in tmp_path.iterdir()] == ["writer-2.json"]


def test_a_writer_that_was_replaced_while_suspended_exits(tmp_path):
    process = hold(tmp_path)
    stop(process, signal.SIGSTOP, os.WSTOPPED)
    lock = json.loads((tmp_path / "writer-1.json").read_text())
    (tmp_path / "writer-1.json").write_text(json.dumps(lock | {"machine": "another"}))
    with folder_lock.FolderLock(tmp_path, stale=0.2):
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"written by process {os.getpid()} on" in err and "so this process ends" in err


def test_a_writer_whose_lock_was_removed_while_suspended_exits(tmp_path):
    process = hold(tmp_path)
    stop(process, signal.SIGSTOP, os.WSTOPPED)
    (tmp_path / "writer-1.json").unlink()  # Its successor removed this lock, and later its own.
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"{tmp_path}/writer-1.json is gone: another process took over" in err
    assert list(tmp_path.iterdir()) == []


def test_one_of_six_concurrent_writers_gets_the_lock(tmp_path):
    (tmp_path / "writer-3.json").write_text(json.dumps({"machine": folder_lock._machine(), "pid": -1}))
    command = [sys.executable, "-c", TRY, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(6)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate("end\n", timeout=300)
    assert sorted(outcomes) == ["held"] + ["refused"] * 5
    assert list(tmp_path.iterdir()) == []
