"""The command imagen_jax.weights: exit codes and messages."""

import pytest

from tests.imagen_jax import commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m imagen_jax.weights convert --from=FILE"),
        (("verify", "case.npz"), "usage: "),
        (("convert", "--from=a.npz", "--to=b"), "usage: "),
        (("convert", "--form=a.npz"), "error: Unknown command line flag 'form'"),
        (("export", "--from=nowhere", "--to=a.npz"), "error: nowhere holds no config.json"),
        (
            ("convert", "--from=no.ckpt", "--to=b", "--config=configs/base64_500m.py"),
            "error: there is no file no.ckpt",
        ),
    ],
)
def test_invalid_weights_arguments_exit_with_2(arguments, message):
    ended = commands.run("weights", *arguments, devices=1)
    assert ended.code == 2 and message in ended.err, ended.err
