"""What training reads of data sets, compared with what earlier versions read of the same sets."""

import json
import pathlib

import pytest

from tests import golden_sets

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures/golden"
_SAMPLES = 100  # The files hold 2,000.


@pytest.mark.parametrize("name", golden_sets.SMALL)
def test_rows_texts_bytes_and_samples_are_those_of_earlier_versions(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (root := tmp_path / "set").mkdir()
    found = json.loads(json.dumps(golden_sets.read(name, root, samples=_SAMPLES)))
    saved = json.loads((FIXTURES / f"{name}.json").read_text())
    saved["samples"] = saved["samples"][: len(found["samples"])]
    assert len(found["samples"]) == 5 and found == saved
