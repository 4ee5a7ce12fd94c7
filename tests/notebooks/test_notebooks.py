"""The notebooks match their text files, and run from the first cell to the last."""

import pathlib
import shlex

import jupytext
import nbclient
import pytest

from notebooks import __main__ as making
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY
from tests.sd_jax import tiny

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = {
    "imagen_quickstart": {"CONFIG": shlex.join([*TINY, "--config.steps=3"]), "SCALES": "--guidance=2 --num_heldout=1"},
    "sd_quickstart": {"VAE_CONFIG": shlex.join(tiny.VAE_FLAGS), "CONFIG": shlex.join(tiny.FLAGS)},
}
PICTURES = {"imagen_quickstart": 4, "sd_quickstart": 3}


def test_every_notebook_has_a_text_file_and_vice_versa():
    names = [{path.stem for path in ROOT.glob(f"notebooks/*.{end}")} for end in ("py", "ipynb")]
    assert names[0] - {"__main__"} == names[1] == set(NOTEBOOKS)


def test_notebooks_refer_to_the_repository_in_pyproject():
    hint = "python -m notebooks"
    for name in NOTEBOOKS:
        text = (ROOT / "notebooks" / f"{name}.py").read_text()
        assert making.with_repository(text) == text, hint
        assert f"{making.COLAB}/" in text


def test_the_name_of_a_fork_is_written_into_notebooks(monkeypatch):
    monkeypatch.setattr(making, "repository", lambda: "https://github.com/some/fork")
    text = making.with_repository((ROOT / "notebooks" / "sd_quickstart.py").read_text())
    assert f"({making.COLAB}/some/fork/blob/main/notebooks/sd_quickstart.ipynb)" in text
    assert '\nREPOSITORY = "https://github.com/some/fork"\n' in text


def test_set_repository_changes_the_name_in_pyproject(monkeypatch, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.urls]\nRepository = "https://github.com/YOUR-NAME/one"\n')
    monkeypatch.setattr(making, "PROJECT", project)
    making.set_repository("some/fork")
    assert making.repository() == "https://github.com/some/fork"
    with pytest.raises(SystemExit, match="'alice' is not OWNER/NAME"):
        making.set_repository("alice")


def test_all_notebooks_have_the_same_first_code_cell():
    books = [jupytext.read(ROOT / "notebooks" / f"{name}.ipynb") for name in NOTEBOOKS]
    first = {next(c.source for c in book.cells if c.cell_type == "code") for book in books}
    assert len(first) == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_cells_of_its_text_file(name):
    from_text = jupytext.read(ROOT / "notebooks" / f"{name}.py")
    stored = jupytext.read(ROOT / "notebooks" / f"{name}.ipynb")
    hint = "python -m notebooks"
    cells = [[(cell.cell_type, cell.source) for cell in book.cells] for book in (from_text, stored)]
    assert cells[0] == cells[1], hint
    assert not any(cell.get("outputs") for cell in stored.cells), "clear the outputs"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A run of two steps, in place of a shipped model."""
    run = tmp_path_factory.mktemp("shipped") / "run"
    ended = commands.run("train", *TINY, "--config.steps=2", f"--workdir={run}", devices=1)
    assert ended.code == 0, ended.err
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_without_errors_and_shows_its_pictures(name, shipped, tmp_path, monkeypatch):
    """Run a tiny version in a fresh kernel in the project's folder."""
    workdir = tmp_path / "run"
    settings = NOTEBOOKS[name] | {
        "WORKDIR": str(workdir),
        "SHIPPED": str(shipped),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "XLA_FLAGS": f"{commands.XLA_FLAGS} --xla_force_host_platform_device_count=1",
    }
    monkeypatch.delenv("MPLBACKEND", raising=False)
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    book = jupytext.read(ROOT / "notebooks" / f"{name}.ipynb")
    where = {"metadata": {"path": str(ROOT)}}
    ran = nbclient.NotebookClient(book, timeout=900, allow_errors=True, resources=where).execute()
    outputs = [out for cell in ran.cells for out in cell.get("outputs", ())]
    printed = "".join(out.get("text", "") for out in outputs)
    assert not [out["evalue"] for out in outputs if out["output_type"] == "error"], printed
    assert (workdir / "metrics.jsonl").read_text().count("\n") == 3, printed
    assert sum("tensorboard-frame" in str(out.get("data")) for out in outputs) == 1, printed
    assert sum("image/png" in out.get("data", ()) for out in outputs) == PICTURES[name], printed
