"""A name in a stranger's file imports nothing, and reads nothing outside its folder."""

import functools
import json
import shutil
import sys

import numpy as np
import pytest

import imagen_jax
from configs import quickstart
from diffusion_jax import averages, pack, runs, systems
from diffusion_jax.config import own_modules
from diffusion_jax.config.settings import Data
from diffusion_jax.data import columns, sources, table
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.prepare import __main__ as prepare
from diffusion_jax.data.reading import BYTES, Place
from diffusion_jax.data.sources.arrow import open_saved
from diffusion_jax.data.sources.moments import KIND
from diffusion_jax.data.sources.tfds import open_split
from diffusion_jax.data.table import Row
from diffusion_jax.evaluate import scorers
from diffusion_jax.files import safetensors_files
from diffusion_jax.precache import moments
from diffusion_jax.start import changes
from diffusion_jax.weights import pretrained, torch_weights
from tests.imagen_jax import commands

CANARY = """
import pathlib
pathlib.Path(__file__).with_name("RAN").touch()
SYSTEMS = {}
def open_source(data, shapes):
    raise AssertionError
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A downloaded workdir in the current folder, which python -m puts on the path."""
    folder = tmp_path / "evil"
    for name in ("settings", "payload"):
        (folder / f"{name}.py").parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(CANARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_modules, "_trusted", set())
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "evil"]:
        del sys.modules[name]


def config(**changes):
    return systems.complete(quickstart.get_config().to_dict()) | changes


OPENERS = {
    "load": imagen_jax.load,
    "config": runs.load,
    "pack": lambda folder: pack.pack(folder, "ema", None, folder.parent / "packed"),
    "averages": lambda folder: averages.describe(str(folder)),
    "continue": lambda folder: runs.claim(folder, config()),
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("system", ["evil.x", "evil", "evil.settings.x", "..evil"])
def test_the_system_in_a_config_is_not_imported(stranger, opener, system):
    (stranger / "config.json").write_text(json.dumps(config() | {"system": system}))
    with pytest.raises(ValueError, match="no part of this project: if you trust the module"):
        OPENERS[opener](stranger)
    assert not (stranger / "RAN").exists()


SOURCES = {
    "pictures": lambda name: sources.open_pictures(Data(name), 8),
    "records": lambda name: sources.open_records(Data(name)),
    "mixture": lambda name: sources.open_pictures(Data("mixture", mixture=((1, name, "", ""),)), 8),
    "prompts": sources.own_prompts,
    "scorer": scorers.own_scorer,
}


@pytest.mark.parametrize("opener", SOURCES)
@pytest.mark.parametrize("name", ["evil.payload", "diffusion_jax.evil.payload", "imagen_jax..evil"])
def test_the_data_source_in_a_config_is_not_imported(stranger, opener, name):
    with pytest.raises(ValueError, match="no part of this project: if you trust the module"):
        SOURCES[opener](name)
    assert not (stranger / "RAN").exists()


def test_the_data_source_in_the_card_of_moments_is_not_imported(stranger, caplog):
    facts = {"data": {"source": "evil.payload", "path": ""}, "size": 8, "digests": {}}
    columns.start(stranger, {}, KIND)
    table.write(stranger, [], LeftOut(), facts=facts)
    moments.check_originals(stranger)
    assert "data.source is 'evil.payload', which is no part" in caplog.text
    assert not (stranger / "RAN").exists()


def test_moments_outside_their_folder_are_not_read(stranger):
    columns.start(stranger, {"flip": False}, KIND)
    row = Row("a", 0, Place(f"{stranger}/secret.npy", 0, 8, BYTES), "a")
    table.write(stranger, [row], LeftOut(), rule={"text": "txt", "ranges": []})
    with pytest.raises(ValueError, match=r"names the file '.*/secret\.npy': encode the images again"):
        sources.open_pictures(Data("moments", str(stranger)), 8, moments=(4, 4, 8))


def test_a_class_in_the_features_of_tfds_is_not_imported(stranger):
    features = {"pythonClassName": "evil.payload.Feature", "featuresDict": {"features": {}}}
    (stranger / "features.json").write_text(json.dumps(features))
    (stranger / "dataset_info.json").write_text(json.dumps({"name": "x", "version": "1.0.0"}))
    with pytest.raises(ValueError, match=r"features\.json is 'evil\.payload\.Feature', which is n"):
        open_split(f"{stranger}@train")
    assert not (stranger / "RAN").exists()


@pytest.mark.parametrize(
    "trust",
    [
        lambda: own_modules.trust("evil.payload"),
        lambda: own_modules.trust_config(config(data={"source": "evil.payload"})),
        lambda: own_modules.trust_data({"mixture": [(1, "evil.payload", "", "")]}),
        lambda: __import__("evil.payload"),
        lambda: sources.named("evil.payload:PATH"),
        lambda: prepare.main(["validate", "--source=evil.payload", "--path=x", "--out=y"]),
    ],
)
def test_a_source_that_the_user_names_is_imported(stranger, trust):
    with pytest.raises((AssertionError, SystemExit)):
        trust()
        sources.open_pictures(Data("evil.payload"), 8)
    assert (stranger / "RAN").exists()


@pytest.mark.parametrize("data", [None, "a", {"mixture": None}, {"mixture": (3, (1,), None)}])
def test_a_config_with_data_of_another_type_makes_no_source_trusted(stranger, data):
    own_modules.trust_config({"system": "imagen_jax", "data": data})
    assert own_modules._trusted <= {"imagen_jax.settings", "None"}


NEW = ["--config=configs/quickstart.py", "--workdir={}/../new", "--rehearse", "--config.data.source=evil.payload"]
COMMANDS = {
    "evaluate": (["--workdir={}"], False),
    "replay": (["--workdir={}", "--step=1"], False),
    "evaluate --trust": (["--workdir={}", "--trust=evil.payload"], True),
    "train": (NEW, True),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_only_a_flag_makes_a_command_import_a_users_source(stranger, command):
    arguments, imported = COMMANDS[command]
    shutil.copytree(commands.ROOT / "models" / "emoji32", stranger, dirs_exist_ok=True)
    changed = json.loads((stranger / "config.json").read_text())
    changed["data"]["source"] = "evil.payload"
    (stranger / "config.json").write_text(json.dumps(changed))
    path = functools.partial(sys.path.insert, 0, str(stranger.parent))
    arguments = [argument.format(stranger) for argument in arguments]
    ended = commands.run(command.partition(" ")[0], *arguments, before=path)
    assert ended.code and (stranger / "RAN").exists() == imported
    assert ("add --trust=evil.payload" in ended.err) != imported


@pytest.mark.parametrize("name", ["../secret.safetensors", "{}/secret.safetensors", "a/../../b"])
def test_the_index_of_shards_names_only_files_of_its_folder(stranger, name, tmp_path):
    safe = tmp_path / "secret.safetensors"
    torch_weights.write(safe, {"w": np.ones(2, np.float32)})
    assert safetensors_files.map_safetensors(safe)["w"].sum() == 2
    index = {"weight_map": {"w": name.format(tmp_path)}}
    (stranger / pretrained.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json names a file outside its folder, "):
        pretrained.open_weights(stranger)


def test_the_state_of_an_arrow_table_names_only_files_of_its_folder(stranger):
    (stranger / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../a.arrow"}]}))
    with pytest.raises(ValueError, match=r"state\.json names a file outside its folder, \.\./a\."):
        open_saved(stranger)


@pytest.mark.parametrize(
    "text", ['"""\nran = 1\n"""', '"\nran = 1\n"', "\\", "{ran}", "%(ran)s", "'''\nran = 1", '\\"""']
)
def test_no_text_of_the_data_becomes_code_in_a_config_that_start_writes(text):
    of_data = {"data.path": (text, ""), "prompts": ((text,), ""), "vae": ({"act": text}, "")}
    names = {}
    exec(changes.source("quickstart", of_data, text), names)
    config = names["get_config"]()
    assert (config.data.path, config.prompts, config.vae["act"]) == (text, (text,), text)
    assert "ran" not in names
