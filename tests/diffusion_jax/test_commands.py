"""The lists of commands printed by `python -m imagen_jax` and `python -m sd_jax`."""

import sys

import pytest

from diffusion_jax import commands


def test_every_command_is_listed_with_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["imagen_jax"])
    commands.main("imagen_jax")
    listed = capsys.readouterr().out
    for name in ("evaluate", "sample", "start", "train", "web", "weights"):
        assert f"\n  imagen_jax.{name} " in listed
    assert "\n  diffusion_jax.data.prepare  " in listed and "sd_jax" not in listed
    all_commands = (
        commands.find("imagen_jax") | commands.find("sd_jax") | commands.find("diffusion_jax")
    )
    assert len(all_commands) > 25
    assert [
        name for name, line in all_commands.items() if not line.endswith(".") and ":" not in line
    ] == []


@pytest.mark.parametrize(
    ("word", "suggested"), [("smaple", "sd_jax.sample"), ("zzz", "sd_jax.COMMAND")]
)
def test_an_unknown_command_is_an_error_that_suggests_a_similar_one(
    word, suggested, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["sd_jax", word])
    with pytest.raises(SystemExit) as ended:
        commands.main("sd_jax")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: unknown command '{word}': write python -m {suggested}; ")
    assert "evaluate, mlperf, precache" in message
