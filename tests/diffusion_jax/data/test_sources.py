"""Data sources: modules named in the table or by the config, imported when opened."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from diffusion_jax.config import own_modules
from diffusion_jax.config.settings import Data
from diffusion_jax.data.sources import SOURCES, open_pictures, own_prompts

ROOT = pathlib.Path(__file__).parents[3]


def test_importing_the_pipeline_does_not_import_data_sources():
    modules = {place.partition(":")[0] for name, place in SOURCES.items() if name != "mixture"}
    heavy = {"pyarrow", "sklearn", "tensorflow_datasets"}
    imports = "import sys, diffusion_jax.data.pipeline, diffusion_jax.data.sources"
    program = f"{imports}\nprint({modules | heavy} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


BLACK = """
import numpy as np
from diffusion_jax.data.pictures import Pictures

class Black(Pictures):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return 3
    def read(self, indices, places=None):
        images = np.zeros((len(indices), self.size, self.size, 3), np.uint8)
        return images, [f"black {i}" for i in indices]

def open_source(data, shapes):
    return Black(shapes.size)

def prompts():
    return ["black 7"]
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A user's package with a data source with prompts, and an empty module."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "black.py").write_text(BLACK)
    (folder / "empty.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    own_modules.trust("own_package.black", "own_package.empty", "own_package.gone")


def test_a_config_can_name_a_users_module_as_data_source(own_package):
    pictures = open_pictures(Data("own_package.black"), 4)
    images, texts = pictures.read(np.array([2]))
    assert (len(pictures), images.shape, texts) == (3, (1, 4, 4, 3), ["black 2"])
    assert own_prompts("own_package.black") == ["black 7"]
    assert own_prompts("folder") == own_prompts("mixture") == []
    parts = ((1, "own_package.black", "", ""), (1, "synthetic", "", "txt"))
    assert open_pictures(Data("mixture", mixture=parts), 4).texts(np.array([1])) == ["black 1"]


def test_a_missing_module_or_one_without_open_source_is_an_error(own_package):
    with pytest.raises(ValueError, match=r"'own_package\.gone', which cannot be imported: No module"):
        open_pictures(Data("own_package.gone"), 4)
    with pytest.raises(ValueError, match=r"'own_package\.empty', a module without open_source"):
        open_pictures(Data("own_package.empty"), 4)
    with pytest.raises(ValueError, match=r"'digits' is unknown: choose from folder, .* or name a m"):
        open_pictures(Data("digits"), 4)


def test_the_digits_source_rejects_embeddings():
    data = Data("diffusion_jax.examples.digits", text="npy")
    with pytest.raises(ValueError, match=r"embeddings \(data\.text=npy\) or VAE moments: set"):
        open_pictures(data, 16, embeddings=(6, 32))
