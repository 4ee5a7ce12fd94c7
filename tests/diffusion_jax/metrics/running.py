"""Run the metrics command in this process, with a toy extractor in place of Inception."""

import pytest
from absl import flags
from absl.testing import flagsaver

from diffusion_jax import cli
from diffusion_jax.metrics import __main__ as commands
from diffusion_jax.metrics import extractors
from tests.diffusion_jax.metrics import toy


@pytest.fixture
def run(capsys, monkeypatch):
    """run(words and flags) -> exit code, stdout, stderr."""
    monkeypatch.setattr(extractors, "load_inception", lambda *how: toy.extractor())
    monkeypatch.setattr(cli, "start", lambda: None)

    def run(*arguments):
        # Other commands' flags, some of them required, may be in the same process.
        own = flags.FlagValues()
        names = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(commands.__name__)}
        for name in {*names, *commands._SHARED}:  # engines.py defines this flag.
            own[name] = flags.FLAGS[name]
        with flagsaver.flagsaver():
            words = own(["metrics", *map(str, arguments)])
            flags.FLAGS.mark_as_parsed()
            try:
                commands.main(words)
                code = 0
            except SystemExit as ended:
                code = ended.code
        return code, *capsys.readouterr()

    return run
