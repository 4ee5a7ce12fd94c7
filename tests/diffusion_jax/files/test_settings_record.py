"""The settings that identify the work in a folder."""

import json

import pytest

from diffusion_jax.files import settings_record


def test_claim_records_settings_and_rejects_different_ones(tmp_path):
    path, identity = tmp_path / "out" / "what.json", {"size": 8, "net": {"width": (1, 2)}}
    assert settings_record.record(path, identity, write=False) == {"size": 8, "net": {"width": [1, 2]}}
    assert not path.parent.exists()
    settings_record.record(path, identity)
    assert json.loads(path.read_text()) == {"size": 8, "net": {"width": [1, 2]}}
    assert settings_record.record(path, identity | {"size": 9}, free=("size",))["size"] == 8
    with pytest.raises(ValueError, match=r"out was started .*\(net\.width: \[1, 2\] stored, \[3\] "):
        settings_record.record(path, {"size": 8, "net": {"width": (3,)}})
    with pytest.raises(ValueError, match=r"depth: None stored, 1 requested; size: 8 stored, 9 r"):
        settings_record.record(path, identity | {"depth": 1, "size": 9})
