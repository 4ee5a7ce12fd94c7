"""A save that hangs or fails ends the run with a one-line error."""

import functools
import os
import resource
import time

import pytest

from diffusion_jax import cli
from diffusion_jax.train import checkpoint, save_limit
from diffusion_jax.weights import restore
from tests.diffusion_jax.train.test_checkpoint import Position, random_state
from tests.imagen_jax import commands


def save_twice(folder, before_second):
    """Save steps 1 and 2, with stderr in a file, and call `before_second` between them."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    checkpointer = checkpoint.Checkpointer(folder / "run", keep_last=3)
    checkpointer.save(1, random_state(1), Position(b"1"))
    checkpointer.wait()
    before_second(checkpointer)
    with cli.bad_input(checkpoint.NotSaved, code=1):
        checkpointer.save(2, random_state(2), Position(b"2"))
        checkpointer.close()


def hang(checkpointer):
    """Make saves wait forever, as Orbax does without memory."""
    save_limit.FLOOR, checkpointer._limit._longest = 0.2, 0.03
    checkpointer._manager.save = lambda *_, **__: time.sleep(1000)


def fail(error, checkpointer):
    """Raise this error in the next save."""

    def save(*_, **__):
        raise error

    checkpointer._manager.save = save


@pytest.mark.parametrize(
    ("before_second", "message"),
    [
        (hang, "the checkpoint of step 2 under RUN was not written within 0 s (is there enough memory, and does the"),
        (functools.partial(fail, OSError(24, "Too many open files")), "files (is the limit of FILES open files too"),
        (functools.partial(fail, RuntimeError("can't start new thread")), "new thread (is there enough memory?). "),
    ],
)
def test_a_hanging_or_failing_save_is_a_one_line_error(tmp_path, before_second, message):
    process = commands.fork(save_twice, tmp_path, before_second)
    process.join()
    lines = (tmp_path / "stderr").read_text().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert process.exitcode == 1 and len(errors) == 1, lines
    allowed = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert message.replace("RUN", str(tmp_path / "run")).replace("FILES", allowed) in errors[0]
    assert errors[0].endswith("The newest complete checkpoint is from step 1.")
    assert not any("Traceback" in line for line in lines), lines
    assert restore.newest_sound(tmp_path / "run") == 1


def test_the_time_limit_of_a_save_depends_on_its_size_and_earlier_saves(monkeypatch):
    limits, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = save_limit.SaveLimit()
    limit.close()
    for seconds in (30.0, 2.0, 0.0):
        limit.start(3 * 10**9, "it", "last")
        limits.append(limit.seconds)
        now[0] += seconds
        limit.stop()
    assert limits == [120 + 300] * 3
    limit._longest = 2.0
    limit.start(3 * 10**9, "it", "last")
    assert limit.seconds == 140


@pytest.mark.parametrize(
    ("reason", "question"),
    [
        ("The AWS Access Key Id you provided does not exist in our records.", "have the cred"),
        ("The request signature we calculated does not match the signature", "have the cred"),
        ("403 Forbidden", "have the cred"),
        ("No space left on device", "is the disk full?"),
        ("[Errno 24] Too many open files", "is the limit of"),
        ("can't start new thread", "is there enough memory?"),
    ],
)
def test_a_failed_save_names_the_likely_cause(reason, question):
    assert save_limit.advice(reason).startswith(question)
