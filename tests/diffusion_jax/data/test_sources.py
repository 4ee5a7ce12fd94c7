"""The table of data sources: each is a module, which is imported when it is opened."""

import pathlib
import subprocess
import sys

from diffusion_jax.data.sources import SOURCES

ROOT = pathlib.Path(__file__).parents[3]


def test_the_pipeline_and_the_table_import_no_source():
    modules = {place.partition(":")[0] for name, place in SOURCES.items() if name != "mixture"}
    heavy = {"pyarrow", "sklearn", "tensorflow_datasets"}
    program = (
        "import sys, diffusion_jax.data.pipeline, diffusion_jax.data.sources\n"
        f"print({modules | heavy} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "set()\n"
