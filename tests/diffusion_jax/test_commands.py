"""The lists of commands printed by `python -m imagen_jax` and `python -m sd_jax`."""

import logging
import re
import sys

import pytest

from diffusion_jax import cli, commands
from tests.imagen_jax import commands as processes


def test_every_command_is_listed_with_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["imagen_jax"])
    commands.main("imagen_jax")
    listed = capsys.readouterr().out
    for name in ("evaluate", "sample", "start", "train", "web", "weights"):
        assert f"\n  imagen_jax.{name} " in listed
    assert "\n  diffusion_jax.data.prepare  " in listed and "sd_jax" not in listed
    all_commands = commands.find("imagen_jax") | commands.find("sd_jax") | commands.find("diffusion_jax")
    assert len(all_commands) > 25
    assert [name for name, line in all_commands.items() if not line.endswith(".") and ":" not in line] == []


@pytest.mark.parametrize(("word", "suggested"), [("smaple", "sd_jax.sample"), ("zzz", "sd_jax.COMMAND")])
def test_an_unknown_command_is_an_error_that_suggests_a_similar_one(word, suggested, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sd_jax", word])
    with pytest.raises(SystemExit) as ended:
        commands.main("sd_jax")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: unknown command '{word}': write python -m {suggested}; ")
    assert "evaluate, mlperf, precache" in message


@pytest.mark.slow
@pytest.mark.parametrize("package", ["imagen_jax", "sd_jax", "diffusion_jax"])
def test_help_of_every_command_ends_with_exit_code_0_and_lists_its_flags(package):
    ended = {name: processes.run(name, "--help", devices=1) for name in commands.find(package)}
    assert [name for name, one in ended.items() if one.code or not one.out] == []
    flagless = [n for n, one in ended.items() if not re.search("^  +(-|{)", one.out, re.MULTILINE)]
    assert [n for n in flagless if n != "diffusion_jax.reference"] == []  # It takes no flags.
    assert [name for name, one in ended.items() if "usage: __main__.py" in one.out] == []


def test_log_lines_show_the_time_and_the_level_of_warnings():
    shown = []
    for level in ("INFO", "WARNING"):
        record = logging.LogRecord("absl", getattr(logging, level), "a.py", 1, "drew %d\x1b", (3,), None)
        shown.append(cli._Printable().format(record))
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d drew 3\\x1b", shown[0]), shown[0]
    assert shown[1][14:] == " warning: drew 3\\x1b"
