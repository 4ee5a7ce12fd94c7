"""One process writes into a folder: others are told who, and a writer that is gone is replaced."""

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

from diffusion_jax.files import folder_lock

HOLD = """
import sys, time
from diffusion_jax.files.folder_lock import Writer
with Writer(sys.argv[1], beat=0.1):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(folder, seconds=600.0):
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def stop(process, number, state):
    """Sends a signal, and returns once the process is in the state that it brings about."""
    os.kill(process.pid, number)
    os.waitid(os.P_PID, process.pid, state | os.WNOWAIT)


def end(process):
    process.kill()
    return process.communicate()


def test_a_folder_is_taken_kept_and_left(tmp_path):
    folder = tmp_path / "new" / "run"
    with folder_lock.FolderLock(folder, beat=0.02):
        said = json.loads((folder / "writer-1.json").read_text())
        assert (said["host"], said["pid"]) == (socket.gethostname(), os.getpid())
        deadline = time.monotonic() + 120
        while "beats" not in said and time.monotonic() < deadline:
            said = json.loads((folder / "writer-1.json").read_text())
        assert said["beats"] >= 1
    assert list(folder.iterdir()) == []


def test_a_second_writer_is_told_who_writes(tmp_path):
    process = hold(tmp_path)
    message = (
        rf"{tmp_path} is being written by process {process.pid} on {socket.gethostname()} since "
        r"\d{4}-.* \(.*\): wait until it ends, stop it, or choose another folder"
    )
    with pytest.raises(folder_lock.Busy, match=message), folder_lock.FolderLock(tmp_path):
        pass
    assert re.fullmatch(message, str(folder_lock.refusal(tmp_path)))
    stop(process, signal.SIGSTOP, os.WSTOPPED)  # It may go on at any time.
    with pytest.raises(folder_lock.Busy, match=message), folder_lock.FolderLock(tmp_path):
        pass
    end(process)


def test_the_lock_of_a_dead_process_of_this_machine_is_stale_at_once(tmp_path):
    process = hold(tmp_path)
    stop(process, signal.SIGKILL, os.WEXITED)  # Nobody has taken its exit code: it is a zombie.
    assert folder_lock.refusal(tmp_path) is None is folder_lock.refusal(tmp_path / "nothing")
    started = time.monotonic()
    with folder_lock.FolderLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["writer-2.json"]
    assert time.monotonic() - started < folder_lock.STALE / 2
    end(process)


@pytest.mark.parametrize("change", [{"started": "1"}, {"pid": os.getpid(), "started": "1"}])
def test_a_process_id_that_another_process_has_now_holds_nothing(tmp_path, change):
    process = hold(tmp_path)
    said = json.loads((tmp_path / "writer-1.json").read_text())
    end(process)
    (tmp_path / "writer-1.json").write_text(json.dumps(said | {"pid": os.getppid()} | change))
    with folder_lock.FolderLock(tmp_path):
        pass


def test_a_writer_of_another_machine_holds_while_its_heart_beats(tmp_path):
    said = {"host": "far", "pid": os.getpid(), "machine": "another", "nonce": "n", "started": "1"}
    path, ended = tmp_path / "writer-7.json", threading.Event()

    def beat():
        beats = 0
        while not ended.wait(0.05):
            beats += 1
            path.with_suffix(".new").write_text(json.dumps(said | {"beats": beats}))
            path.with_suffix(".new").replace(path)

    path.write_text(json.dumps(said))
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(folder_lock.Busy, match="on far since"),
            folder_lock.FolderLock(tmp_path),
        ):
            pass
    finally:
        ended.set()
        thread.join()
    started = time.monotonic()
    with folder_lock.FolderLock(tmp_path, stale=0.4):
        assert [path.name for path in tmp_path.iterdir()] == ["writer-8.json"]
    assert 0.4 <= time.monotonic() - started < folder_lock.STALE / 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_lock_is_stale_when_nobody_writes_it(tmp_path, content):
    (tmp_path / "writer-1.json").write_bytes(content)
    with folder_lock.FolderLock(tmp_path, stale=0.1):
        assert [path.name for path in tmp_path.iterdir()] == ["writer-2.json"]


def test_a_writer_that_slept_too_long_ends_when_it_wakes(tmp_path):
    process = hold(tmp_path)
    stop(process, signal.SIGSTOP, os.WSTOPPED)
    said = json.loads((tmp_path / "writer-1.json").read_text())
    (tmp_path / "writer-1.json").write_text(json.dumps(said | {"machine": "another"}))
    with folder_lock.FolderLock(tmp_path, stale=0.2):
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"written by process {os.getpid()} on" in err and "so this process ends" in err


def test_a_writer_that_slept_until_its_successor_had_ended_ends_too(tmp_path):
    process = hold(tmp_path)
    stop(process, signal.SIGSTOP, os.WSTOPPED)
    (tmp_path / "writer-1.json").unlink()  # As the successor did, which then removed its own.
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"{tmp_path}/writer-1.json is gone: another process took over" in err
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_come_at_once_one_holds(tmp_path):
    (tmp_path / "writer-3.json").write_text(
        json.dumps({"machine": folder_lock._machine(), "pid": -1})
    )
    code = (
        "import sys, time\nfrom diffusion_jax.files import folder_lock\n"
        "input()\n"
        "try:\n"
        "    with folder_lock.FolderLock(sys.argv[1]):\n"
        "        print('held', flush=True)\n"
        "        input()\n"
        "except folder_lock.Busy as error:\n"
        "    print('refused', flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, **pipes) for _ in range(6)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate("end\n", timeout=300)
    assert sorted(said) == ["held"] + ["refused"] * 5
    assert list(tmp_path.iterdir()) == []
