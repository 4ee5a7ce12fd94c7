"""The notebooks are what their texts make of them, and run from the first cell to the last."""

import pathlib
import shlex

import jupytext
import nbclient
import pytest

from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

ROOT = pathlib.Path(__file__).parents[2]
SHORT = (
    "--config.steps=3", "--config.batch_size=8", "--config.log_every=1", "--config.sample_every=0",
    "--config.optimizer.warmup=2",
)  # fmt: skip
VAE = ("--config.vae.channel_mult=(1,)", "--config.vae.num_res_blocks=1")
UNET = (
    "--config.unet.width=32",
    "--config.unet.attention_levels=()",
    "--config.text.width=32",
    "--config.sampler.steps=2",
)
NOTEBOOKS = {
    "imagen_quickstart": {
        "CONFIG": shlex.join([*TINY, "--config.steps=3"]),
        "SCALES": "--guidance=2 --num_heldout=1",
    },
    "sd_quickstart": {
        "VAE_CONFIG": shlex.join(["--config=configs/sd_quickstart_vae.py", *VAE, *SHORT]),
        "CONFIG": shlex.join(["--config=configs/sd_quickstart.py", *VAE, *SHORT, *UNET]),
    },
}
PICTURES = {"imagen_quickstart": 3, "sd_quickstart": 2}


def test_each_text_is_a_notebook_and_each_notebook_a_text():
    names = [{path.stem for path in ROOT.glob(f"notebooks/*.{end}")} for end in ("py", "ipynb")]
    assert names[0] == names[1] == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_made_from_its_text(name):
    made = jupytext.read(ROOT / "notebooks" / f"{name}.py")
    kept = jupytext.read(ROOT / "notebooks" / f"{name}.ipynb")
    hint = f"jupytext --to ipynb notebooks/{name}.py"
    cells = [[(cell.cell_type, cell.source) for cell in book.cells] for book in (made, kept)]
    assert cells[0] == cells[1], hint
    assert not any(cell.get("outputs") for cell in kept.cells), "clear the outputs"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    """As in a fresh kernel, tiny, in the project's folder."""
    workdir = tmp_path / "run"
    settings = NOTEBOOKS[name] | {
        "WORKDIR": str(workdir), "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "XLA_FLAGS": f"{commands.XLA_FLAGS} --xla_force_host_platform_device_count=1",
    }  # fmt: skip
    monkeypatch.delenv("MPLBACKEND", raising=False)
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    book = jupytext.read(ROOT / "notebooks" / f"{name}.ipynb")
    where = {"metadata": {"path": str(ROOT)}}
    ran = nbclient.NotebookClient(book, timeout=300, allow_errors=True, resources=where).execute()
    outputs = [out for cell in ran.cells for out in cell.get("outputs", ())]
    said = "".join(out.get("text", "") for out in outputs)
    assert not [out["evalue"] for out in outputs if out["output_type"] == "error"], said
    assert (workdir / "metrics.jsonl").read_text().count("\n") == 3, said
    assert sum("tensorboard-frame" in str(out.get("data")) for out in outputs) == 1, said
    assert sum("image/png" in out.get("data", ()) for out in outputs) == PICTURES[name], said
