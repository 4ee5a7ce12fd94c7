"""Configs at the edge: every mistake is named with its way out, and a workdir keeps its config."""

import json
import pathlib
from typing import NamedTuple

import jax
import pytest
from ml_collections import ConfigDict

from diffusion_jax import runs, settings


class Group(NamedTuple):
    """Two fields to read."""

    width: int
    sizes: tuple[int, ...]


def config(**changes):
    c = ConfigDict(
        dict(
            seed=1,
            steps=10,
            prompts=("a", "b"),
            unet=dict(width=32, high=float("inf"), mult=(1, 2)),
            sampler=dict(steps=4),
            data=dict(path="here", source="folder", threads=1),
        )
    )
    for key, value in changes.items():
        group, _, field = key.rpartition("__")
        (c[group] if group else c)[field] = value
    return c


def test_a_group_is_read_into_its_tuple_and_lists_become_tuples():
    assert settings.read(Group, {"width": 8, "sizes": [1, 2]}, "unet") == Group(8, (1, 2))


def test_the_configs_own_values_are_read_without_its_groups():
    own = {"width": 8, "sizes": (1,), "unet": {"stray": 1}}
    assert settings.split(own) == ({"width": 8, "sizes": (1,)}, {"unet": {"stray": 1}})


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (
            {"widht": 1, "sizes": ()},
            "unet",
            "unknown config field unet.widht: did you mean unet.width?",
        ),
        ({"width": 1, "size": ()}, "", "unknown config field size: did you mean sizes?"),
        (
            {"width": 1, "sizes": (), "qqq": 0},
            "unet",
            "unknown config field unet.qqq: known are width, sizes",
        ),
        ({}, "unet", "the config lacks unet.sizes, unet.width"),
        ({"width": 1}, "", "the config lacks sizes"),
    ],
)
def test_stray_and_missing_fields_are_named(values, name, message):
    with pytest.raises(ValueError) as error:
        settings.read(Group, values, name)
    assert str(error.value) == message


def test_a_group_that_nobody_reads_is_an_error():
    with pytest.raises(ValueError, match=r"field optimiser: did you mean optimizer\?"):
        settings.check_groups({"steps": 1, "optimiser": {}}, ["optimizer", "data"])
    with pytest.raises(ValueError, match="the config lacks data"):
        settings.check_groups({"optimizer": {}}, ["optimizer", "data"])


def test_a_name_out_of_a_list_is_checked():
    settings.one_of("sampler.name", "heun", ["heun", "ddim"])
    with pytest.raises(ValueError, match=r"sampler\.name is 'huen': did you mean 'heun'\?"):
        settings.one_of("sampler.name", "huen", ["heun", "ddim"])
    with pytest.raises(ValueError, match=r"sampler\.name is 'zzz': choose from heun, ddim"):
        settings.one_of("sampler.name", "zzz", iter(["heun", "ddim"]))


def test_the_first_field_that_is_not_positive_is_named():
    settings.positive(steps=1, optimizer__lr=1e-9)
    with pytest.raises(ValueError, match=r"^optimizer\.lr is 0\.0: it must be above 0$"):
        settings.positive(steps=1, optimizer__lr=0.0, text__width=-1)
    with pytest.raises(ValueError, match=r"^optimizer\.lr is nan: it must be above 0$"):
        settings.positive(optimizer__lr=float("nan"))


def test_the_first_field_out_of_its_range_is_named():
    settings.within(0, 1, text__drop_prob=0.0, optimizer__b1=1.0)
    with pytest.raises(ValueError, match=r"^optimizer\.b1 is 1\.5: it must be from 0 to 1$"):
        settings.within(0, 1, text__drop_prob=0.1, optimizer__b1=1.5)
    with pytest.raises(ValueError, match=r"^text\.drop_prob is nan: it must be from 0 to 1$"):
        settings.within(0, 1, text__drop_prob=float("nan"))


def test_a_config_comes_back_from_its_workdir(tmp_path):
    runs.claim(tmp_path / "a" / "run", config())
    loaded = runs.load(tmp_path / "a" / "run")
    assert loaded["unet"]["high"] == float("inf")
    assert (loaded["unet"]["mult"], loaded["prompts"]) == ([1, 2], ["a", "b"])
    assert settings.read(Group, {"width": 1, "sizes": loaded["unet"]["mult"]}, "").sizes == (1, 2)


def test_the_config_may_claim_its_own_workdir_again(tmp_path):
    runs.claim(tmp_path, config())
    before = (tmp_path / "config.json").read_text()
    runs.claim(tmp_path, config())  # Tuples there are lists, which differ from tuples.
    assert (tmp_path / "config.json").read_text() == before


def test_another_config_is_refused_and_the_differences_are_named(tmp_path):
    runs.claim(tmp_path, config())
    before = (tmp_path / "config.json").read_text()
    other = config(unet__width=64, data__source="digits", steps=20)
    other.unet.new = 1
    with pytest.raises(ValueError) as error:
        runs.claim(tmp_path, other)
    assert str(error.value) == (
        f"{tmp_path} was made with another config (data.source: 'folder' there, 'digits' now; "
        "unet.new: None there, 1 now; unet.width: 32 there, 64 now): "
        "choose another --workdir, or give the config that it was made with"
    )
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 20),
        ("prompts", ("c",)),
        ("sampler__steps", 8),
        ("data__path", "there"),
        ("data__threads", 4),
    ],
)
def test_what_changes_nothing_that_is_learned_may_differ_and_is_kept(tmp_path, field, value):
    runs.claim(tmp_path, config())
    runs.claim(tmp_path, config(**{field: value}))
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept == json.loads(json.dumps(config(**{field: value}).to_dict()))


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_url_is_no_workdir(kind):
    with pytest.raises(ValueError, match="workdir gs://bucket/run is a URL: give a folder"):
        runs.claim(kind("gs://bucket/run"), config())


def test_only_the_first_process_writes_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    runs.claim(tmp_path / "run", config())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_config_is_no_workdir(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        runs.load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} holds no config.json: it is no workdir of a training run. Train one with\n"
        f"  python -m imagen_jax.train --config=configs/quickstart.py --workdir={tmp_path}"
    )
