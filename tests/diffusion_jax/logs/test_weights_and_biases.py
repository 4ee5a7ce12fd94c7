"""Logging to Weights & Biases, tested with an offline run."""

import importlib.util
import json
import struct

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.logs import run_log, weights_and_biases


def write(workdir, steps):
    """Write metrics for some steps like a started run, and return the run's id."""
    config = {"log": {"wandb": "emoji"}, "steps": 7, "unet": {"patch": 4}}
    writer = run_log.MetricWriter(workdir, config, steps[0] - 1)
    for step in steps:
        writer.write_scalars(step, {"loss": step / 4})
    writer.write_images(steps[-1], {"samples": np.full((1, 8, 8, 3), 200, np.uint8)})
    writer.close()
    return (workdir / weights_and_biases.ID).read_text()


def records(path, parse):
    """Yield the records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    content, position = path.read_bytes(), 7
    while position < len(content):
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        assert kind == 1, "a record across two blocks of 32 kB; this run is smaller"
        yield parse(content[position + 7 : position + 7 + length])
        position += 7 + length


@pytest.mark.filterwarnings("default")  # wandb triggers warnings in its dependencies.
def test_an_offline_wandb_run_holds_metrics_pictures_and_the_config(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    identifier = write(tmp_path, [1, 2])
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history, config = [], {}
    for record in records(path, Record.FromString):
        items = {i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
        history += [items] if items else []
        if record.HasField("run"):
            assert (record.run.project, record.run.run_id) == ("emoji", identifier)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert [(row["_step"], row["loss"]) for row in history] == [(1, 0.25), (2, 0.5)]
    assert config["steps"] == 7 and config["unet"] == {"patch": 4}
    (picture,) = path.parent.rglob("*.png")
    assert (np.asarray(Image.open(picture)) == 200).all()
    assert write(tmp_path, [3]) == identifier  # A resumed run continues its charts.


def test_log_wandb_without_the_package_is_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    weights_and_biases.check("")
    with pytest.raises(ValueError, match=r"log\.wandb is 'a', but wandb is not installed: pip ins"):
        weights_and_biases.check("a")
