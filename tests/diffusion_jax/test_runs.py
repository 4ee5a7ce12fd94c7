"""The config in a workdir: written once, and read by later versions."""

import json
import pathlib

import jax
import pytest

from configs import quickstart, sd_quickstart, sd_quickstart_vae
from diffusion_jax import runs, systems
from diffusion_jax.config import versions
from diffusion_jax.config.settings import Evaluation


def config(**changes):
    c = quickstart.get_config()
    for key, value in changes.items():
        group, _, field = key.rpartition("__")
        (c[group] if group else c)[field] = value
    return c.to_dict()


def write(workdir, config, **changes):
    (workdir / "config.json").write_text(json.dumps(config | changes))


def stored(workdir):
    return json.loads((workdir / "config.json").read_text())


def test_a_config_is_read_back_from_its_workdir(tmp_path):
    runs.claim(tmp_path / "a" / "run", config())
    loaded = runs.load(tmp_path / "a" / "run")
    assert loaded["sampler"]["guidance_high"] == float("inf")
    assert (loaded["unet"]["channel_mult"], loaded["unet"]["dropout"]) == ([1], 0.0)
    assert systems.read(loaded, "imagen_jax") == systems.read(config(), "imagen_jax")
    assert (stored(tmp_path / "a" / "run")["version"], loaded["system"]) == (versions.VERSION, "imagen_jax")


def test_the_same_config_can_claim_its_workdir_again(tmp_path):
    runs.claim(tmp_path, config())
    before = (tmp_path / "config.json").read_text()
    runs.claim(tmp_path, config())  # The file holds lists in place of tuples.
    assert (tmp_path / "config.json").read_text() == before


def test_without_a_checkpoint_another_config_takes_over_and_one_line_says_so(tmp_path, caplog):
    runs.claim(tmp_path, config())
    (tmp_path / "checkpoints/5.orbax-checkpoint-tmp-1").mkdir(parents=True)  # Killed in a save.
    assert runs.claim(tmp_path, other := config(unet__cond_dim=32, steps=20), write=False)
    assert stored(tmp_path)["unet"]["cond_dim"] == 64 and not caplog.text
    assert runs.claim(tmp_path, other)
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} holds no checkpoint, so this config replaces that of an earlier start (")
    assert line.endswith(" (unet.cond_dim: 64 stored, 32 requested)")
    assert stored(tmp_path)["unet"]["cond_dim"] == 32
    assert not runs.claim(tmp_path, other)


@pytest.mark.parametrize(("encoder", "differs"), [("clip", False), ("t5", True)])
def test_the_number_of_read_tokens_may_change_unless_the_encoder_is_t5(tmp_path, encoder, differs):
    """Configs of Stable Diffusion once set it, although CLIP ignores it."""
    runs.claim(tmp_path, config(text__encoder=encoder, text__read_tokens=77))
    assert runs.claim(tmp_path, config(text__encoder=encoder), write=False) == differs


def test_another_config_is_an_error_that_names_the_differences(tmp_path):
    runs.claim(tmp_path, config())
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    before = (tmp_path / "config.json").read_text()
    other = config(unet__cond_dim=32, data__source="folder", unet__dropout=0.5, steps=20)
    with pytest.raises(ValueError) as error:
        runs.claim(tmp_path, other)
    source = "data.source: 'diffusion_jax.examples.digits' stored, 'folder' requested"
    unet = "unet.cond_dim: 64 stored, 32 requested; unet.dropout: 0.0 stored, 0.5 requested"
    assert str(error.value).startswith(f"{tmp_path} was made with another config ({source}; {unet}): choose another")
    assert str(error.value).endswith(f", choose another --workdir with --continue_from={tmp_path}")
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 20), ("prompts", ("c",)), ("sampler__steps", 8), ("data__path", "there"), ("data__threads", 4)],
)
def test_fields_that_do_not_affect_training_can_change(tmp_path, field, value):
    runs.claim(tmp_path, config())
    runs.claim(tmp_path, config(**{field: value}))
    complete = systems.complete(config(**{field: value}))
    assert stored(tmp_path) == json.loads(json.dumps({"version": versions.VERSION, **complete}))


def test_a_run_of_an_earlier_version_continues_with_a_warning_about_noise(tmp_path, caplog):
    write(tmp_path, systems.complete(config()), version=versions.IMAGE_KEYS - 1)
    for warned in (1, 1):  # At the second start, the stored version is current.
        runs.claim(tmp_path, config())
        assert caplog.text.count("the noise of each image comes from its own key") == warned


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_workdir_with_another_url_scheme_is_an_error(kind):
    with pytest.raises(ValueError, match=r"https://bucket/run cannot be written to: use a folder on disk, or gs://"):
        runs.claim(kind("https://bucket/run"), config())


def test_only_the_first_process_writes_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    runs.claim(tmp_path / "run", config())
    assert list(tmp_path.iterdir()) == []


def test_loading_a_folder_without_a_config_is_an_error(tmp_path):
    command = rf"  python -m imagen_jax\.train --config=configs/quickstart\.py --workdir={tmp_path}$"
    with pytest.raises(FileNotFoundError, match=rf"^{tmp_path} holds no config\.json: .* Train a run with\n{command}"):
        runs.load(tmp_path)


def test_the_error_about_a_misspelled_workdir_names_the_run_beside_it(tmp_path):
    for name in ("emoji32", "digits"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {})
    with pytest.raises(FileNotFoundError, match=rf"emoji33 holds no config\.json: did you mean {tmp_path}/emoji32\?"):
        runs.load(tmp_path / "emoji33")


def test_fields_missing_in_an_old_config_get_defaults_and_are_logged_once_in_training(tmp_path, caplog):
    old = systems.complete(config())
    del old["step_timeout"], old["unet"]["kind"], old["evaluation"]
    write(tmp_path, old, version=versions.VERSION)
    with caplog.at_level("INFO", logger="absl"):
        loaded = runs.load(tmp_path)  # As every command does.
        assert (loaded["step_timeout"], loaded["unet"]["kind"]) == (1800, "unet")
        assert not caplog.records
        for _ in range(2):  # Two starts of training. The first one completes the config.
            runs.claim(tmp_path, config(), write=False)
            runs.claim(tmp_path, config())
    (line,) = (record.getMessage() for record in caplog.records)
    later = ", ".join(f"evaluation.{field}" for field in sorted(Evaluation._fields))
    assert line.startswith(f"{tmp_path / 'config.json'} was written by an earlier version: ")
    assert line.endswith(f": using defaults for {later}, step_timeout, unet.kind")


@pytest.mark.parametrize("module", [quickstart, sd_quickstart, sd_quickstart_vae])
def test_the_system_of_a_config_without_a_version_follows_from_its_groups(tmp_path, module):
    c = module.get_config().to_dict()
    system = c.pop("system")
    write(tmp_path, c)
    assert runs.load(tmp_path)["system"] == system
    runs.claim(tmp_path, module.get_config().to_dict())  # An old run can be continued.
    assert stored(tmp_path)["system"] == system


def test_a_config_of_a_later_version_is_an_error(tmp_path):
    write(tmp_path, config(), version=versions.VERSION + 1)
    with pytest.raises(ValueError, match=r"config has version \d+, but this code reads up to"):
        runs.load(tmp_path)


def test_an_unknown_field_in_a_stored_config_is_an_error(tmp_path):
    write(tmp_path, config() | {"sampelr": {}})
    with pytest.raises(ValueError, match=r"config\.json: unknown config field sampelr: did you"):
        runs.load(tmp_path)


@pytest.fixture
def changes(monkeypatch):
    """Let version 2 rename two fields and remove two, one of which changes the model."""
    renamed = {"unet.residual_blocks": "unet.num_res_blocks", "timeout": "step_timeout", "data.cache": ""}
    changes = [versions.Change(2, old, new) for old, new in renamed.items()]
    monkeypatch.setattr(versions, "VERSION", 2)
    monkeypatch.setattr(versions, "CHANGES", (*changes, versions.Change(2, "unet.gain", learned=(1.0,))))


def old_config(gain):
    c = config()
    del c["unet"]["num_res_blocks"]
    c["unet"] |= {"residual_blocks": 1, "gain": gain}
    c["data"]["cache"] = "anything"
    return c | {"timeout": 60, "version": 1}


def test_renamed_and_removed_fields_of_old_configs_are_converted(tmp_path, changes):
    write(tmp_path, old_config(gain=1.0))
    loaded = runs.load(tmp_path)
    assert (loaded["unet"]["num_res_blocks"], loaded["step_timeout"]) == (1, 60)
    runs.claim(tmp_path, config())
    assert stored(tmp_path)["version"] == 2


@pytest.mark.parametrize(("accumulate", "fsdp", "micro_batch"), [(1, -1, 0), (4, -1, 2), (2, 2, 16), (8, 8, 1)])
def test_the_passes_of_a_version_5_config_become_its_micro_batch(tmp_path, caplog, accumulate, fsdp, micro_batch):
    """A mesh axis of -1 is filled with the 8 devices of the tests."""
    now = config(batch_size=64, mesh__fsdp=fsdp)
    old = {**now, "optimizer": {**now["optimizer"], "accumulate": accumulate}, "version": 5}
    write(tmp_path, old)
    assert runs.load(tmp_path)["optimizer"]["micro_batch"] == micro_batch
    message = f"optimizer.accumulate={accumulate} is now optimizer.micro_batch={micro_batch}"
    assert (message in caplog.text) == (accumulate > 1)
    runs.claim(tmp_path, now)  # The run can be continued.
    with pytest.raises(ValueError, match=r"its name is now optimizer\.micro_batch = batch_size /"):
        systems.complete({k: v for k, v in old.items() if k != "version"})


@pytest.mark.parametrize(
    "damage", [{"accumulate": 0}, {"accumulate": "2"}, {"accumulate": None}, {"mesh": [1]}, {"batch_size": None}]
)
def test_a_damaged_config_of_version_5_is_an_error(tmp_path, damage):
    old = config(batch_size=64) | {"version": 5}
    old["optimizer"] = old["optimizer"] | {"accumulate": damage.pop("accumulate", 4)}
    write(tmp_path, old | damage)
    with pytest.raises(ValueError, match=r"optimizer\.accumulate .* this config is damaged"):
        runs.load(tmp_path)


@pytest.mark.parametrize(
    ("old", "weight"),
    [
        ({"weight": "min_snr", "min_snr": 0.0}, "none"),
        ({"weight": "min_snr", "min_snr": 5.0}, "min_snr(5.0)"),
        ({"weight": "min_snr(3)", "min_snr": 5.0}, "min_snr(3)"),
        ({"weight": "min_snr(min_snr=0)", "min_snr": 5.0}, "none"),
        ({"min_snr": 5.0}, "min_snr(5.0)"),
        ({"weight": "min_snr"}, "none"),
        ({"weight": "p2(k=2)", "min_snr": 5.0}, "p2(k=2)"),
        ({}, "none"),
    ],
)
def test_the_limit_of_a_version_6_config_moves_into_its_weight(tmp_path, old, weight):
    now = config(diffusion__weight=weight)
    diffusion = {k: v for k, v in now["diffusion"].items() if k != "weight"}
    write(tmp_path, {**now, "diffusion": diffusion | old, "version": 6})
    assert systems.complete(runs.load(tmp_path))["diffusion"]["weight"] == weight
    runs.claim(tmp_path, now)  # The run can be continued.


@pytest.mark.parametrize("diffusion", [{"weight": 3, "min_snr": 5.0}, {"weight": "min_snr(", "min_snr": 5.0}])
def test_a_damaged_weight_of_a_version_6_config_is_an_error(tmp_path, diffusion):
    write(tmp_path, config() | {"diffusion": diffusion, "version": 6})
    with pytest.raises(ValueError, match=r"diffusion\.(min_snr .* is damaged|weight is 'min_snr\(')"):
        runs.load(tmp_path)


def test_a_removed_field_that_changed_the_model_is_an_error(tmp_path, changes):
    write(tmp_path, old_config(gain=2.0))
    with pytest.raises(ValueError, match=r"unet\.gain is 2\.0, which this code no longer supports"):
        runs.load(tmp_path)


def test_the_text_encoder_precomputed_of_config_version_1_is_read_as_t5(tmp_path):
    """The run can be continued, with or without the path of T5's weights."""
    now = config(text__encoder="t5", data__source="folder", data__path="a", data__text="npy")
    old = {**now, "text": {**now["text"], "encoder": "precomputed"}, "version": 1}
    write(tmp_path, old)
    assert runs.load(tmp_path)["text"]["encoder"] == "t5"
    runs.claim(tmp_path, now)
    runs.claim(tmp_path, {**now, "text": {**now["text"], "weights": "t5-11b"}})
    assert stored(tmp_path)["version"] == versions.VERSION
    assert stored(tmp_path)["text"]["weights"] == "t5-11b"
    captions = {**now, "data": {**now["data"], "text": "txt"}}
    (tmp_path / "config.json").unlink()
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    runs.claim(tmp_path, captions)
    with pytest.raises(ValueError, match=r"text\.weights: '' stored, 't5-11b' requested"):
        runs.claim(tmp_path, {**captions, "text": {**now["text"], "weights": "t5-11b"}})


@pytest.mark.parametrize("version", [0, 2])
def test_the_source_digits_of_old_configs_is_read_under_its_new_name(tmp_path, version):
    now = config(data__mixture=[(1, "diffusion_jax.examples.digits", "digits", "txt")])
    mixture = [(1, "digits", "digits", "txt")]
    old = {**now, "data": {**now["data"], "source": "digits", "mixture": mixture}}
    write(tmp_path, old, version=version)
    loaded = runs.load(tmp_path)["data"]
    assert loaded["source"] == "diffusion_jax.examples.digits"
    assert loaded["mixture"] == [[1, "diffusion_jax.examples.digits", "digits", "txt"]]
    runs.claim(tmp_path, now)  # The run can be continued.
    assert stored(tmp_path)["data"] == loaded


def test_conversions_of_old_fields_do_not_apply_to_the_current_version(tmp_path, changes):
    write(tmp_path, old_config(gain=1.0), version=2)
    with pytest.raises(ValueError, match=r"unknown config field timeout"):
        runs.load(tmp_path)


def test_loading_a_run_of_another_system_is_a_one_line_error(tmp_path):
    runs.claim(tmp_path, config())
    message = f"^{tmp_path} is a run of imagen_jax, not of sd_jax: give it to the commands of imagen_jax$"
    with pytest.raises(ValueError, match=message):
        runs.load(tmp_path, "sd_jax")


def test_the_field_precond_of_old_configs_is_read_as_predicts(tmp_path):
    earlier = systems.complete(config())
    earlier["diffusion"] = {"precond": "flow"}
    write(tmp_path, earlier, version=4)
    assert runs.load(tmp_path, "imagen_jax")["diffusion"]["predicts"] == "flow"
