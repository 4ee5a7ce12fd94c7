"""DoRAs, LoHas and LoKrs change weights as in LyCORIS 4.1.3 and peft 0.21.2.

The fixture holds random factors with the names that these libraries give them, a random weight, and
the weight with the factors merged by the library.
"""

import functools
import pathlib

import numpy as np
import pytest

from diffusion_jax.weights import torch_files, torch_weights
from sd_jax.weights import lora_files, lora_kinds

FIXTURE = pathlib.Path("tests/fixtures/lora_kinds.safetensors")
CASES = [
    *(f"lycoris: {kind}, linear" for kind in ("dora", "dora of inputs", "lokr", "lokr, both")),
    *(f"lycoris: {kind}, conv" for kind in ("dora", "dora of inputs", "loha", "loha, cores")),
    *(f"lycoris: {kind}, conv" for kind in ("loha, dora", "lokr", "lokr, both", "lokr, core")),
    *(f"lycoris: {kind}, conv" for kind in ("lokr, whole", "lokr, dora")),
    *(f"peft: {kind}, linear" for kind in ("dora", "lokr", "lokr, both")),
    *(f"peft: {kind}, conv" for kind in ("dora", "dora, rslora", "loha", "loha, cores", "lokr")),
    *(f"peft: {kind}, conv" for kind in ("lokr, both", "lokr, core", "lokr, whole")),
    "peft: lokr, whole, pattern, conv",
]


@functools.cache
def fixture():
    return torch_files.read_state_dict(FIXTURE), torch_weights.read_metadata(FIXTURE)


def read(case, folder):
    """Return the only layer of a case's LoRA file, its weight, and the merged weight."""
    state, configs = fixture()
    arrays = {k.removeprefix(f"{case}/"): x for k, x in state.items() if k.startswith(f"{case}/")}
    weight, merged = arrays.pop("weight"), arrays.pop("merged")
    torch_weights.write(folder / "adapter_model.safetensors", arrays)
    if case in configs:
        (folder / "adapter_config.json").write_text(configs[case])
    (layer,) = lora_files.read(folder / "adapter_model.safetensors")["unet"].values()
    return layer, weight, merged


@pytest.mark.parametrize("case", CASES)
def test_a_merged_weight_equals_that_of_the_reference(tmp_path, case):
    layer, weight, merged = read(case, tmp_path)
    assert np.abs(merged - weight).max() > 0.1
    # Both compute in float32, in another order. Measured: up to 5e-7.
    np.testing.assert_allclose(lora_kinds.changed(layer, weight, 1.0), merged, atol=2e-6)
    np.testing.assert_allclose(lora_kinds.changed(layer, weight, -0.5), weight - 0.5 * (merged - weight), atol=2e-6)


def test_every_case_of_the_fixture_is_compared():
    assert sorted({name.partition("/")[0] for name in fixture()[0]}) == sorted(CASES)
