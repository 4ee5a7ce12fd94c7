"""Files that can be made again go to the user's cache folder, also for a user without a home."""

import os
import pathlib
import pwd
import tempfile

import pytest

from diffusion_jax.data import tars
from diffusion_jax.devices import program_cache
from diffusion_jax.files.user_cache import user_cache
from diffusion_jax.weights import pretrained


@pytest.fixture(autouse=True)
def homeless(monkeypatch):
    """Make this process one of a user without an account, as in some containers."""

    def getpwuid(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_the_cache_folder_is_that_of_xdg_or_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_cache() == pathlib.Path("/somewhere/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == pathlib.Path("/elsewhere")


def test_a_user_without_a_home_folder_is_told_to_set_xdg_cache_home():
    with pytest.raises(ValueError, match="this user has no home folder: set XDG_CACHE_HOME to a"):
        user_cache()


def test_without_a_home_folder_indices_of_tars_go_to_the_temporary_folder():
    shared = pathlib.Path(tempfile.gettempdir()) / f"diffusion_jax-{os.geteuid()}"
    assert tars.cache_folders() == [shared]


def test_without_a_home_folder_the_cache_of_compiled_programs_is_off(monkeypatch, caplog):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(program_cache, "_check_entries", lambda: None)
    monkeypatch.setattr(program_cache.jax.config, "update", lambda *_: pytest.fail("used"))
    program_cache.use()
    assert "no programs are kept: XDG_CACHE_HOME is not set" in caplog.text


def test_weights_in_the_home_folder_of_an_unknown_user_are_named_in_the_error():
    with pytest.raises(FileNotFoundError, match="no folder ~/weights/t5: choose a folder"):
        pretrained.locate("~/weights/t5")
