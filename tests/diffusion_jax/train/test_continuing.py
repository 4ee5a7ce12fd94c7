"""--continue_from starts a run from the complete state of another one, with other settings."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from diffusion_jax import runs, systems
from diffusion_jax.config.settings import Lora
from diffusion_jax.data import pipeline
from diffusion_jax.devices import sharding
from diffusion_jax.logs import run_log
from diffusion_jax.train import checkpoint, continuing, loop, replay
from diffusion_jax.weights import finetune, lora, restore
from imagen_jax.settings import read_settings
from tests import written_runs
from tests.diffusion_jax import toy
from tests.diffusion_jax.train import test_loop
from tests.diffusion_jax.train.test_loop import OPTIMIZER, RUN, TASK, assert_equal, train

START = RUN._replace(log_every=1)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return the workdir of a run with three steps of eight pictures."""
    workdir = tmp_path_factory.mktemp("runs") / "begun"
    train(workdir, log_every=1, steps=3, settings=OPTIMIZER)
    return workdir


@pytest.fixture
def taken(monkeypatch):
    """Return a list that gets the names of the pictures of each batch, in order."""
    names, take = [], pipeline.Batches.__next__

    def noting(self):
        batch = take(self)
        names.append(self.names(range(len(batch["image"]))))
        return batch

    monkeypatch.setattr(pipeline.Batches, "__next__", noting)
    return names


def go_on(begun, workdir, task=TASK, settings=OPTIMIZER, sizes=(1, 1, 1), continued=(), **changes):
    """Continue `begun` at step 3 in another workdir. Return the last state and the output."""
    run, workdir = START._replace(**changes), workdir / "next"
    workdir.mkdir(exist_ok=True)
    mesh = sharding.make_mesh(*sizes)
    source = continuing.ContinuedRun(str(begun), 3, {}, False)._replace(**dict(continued))
    with toy.batches(run) as batches:
        inputs = loop.RunInputs(task, batches, test_loop.EXAMPLES)
        text = continuing.prepare(source, inputs, run, settings, mesh)
        continuing.write_first_checkpoint(source, inputs, run, settings, mesh, workdir, {})
        state = loop.train(inputs, run, settings, mesh, workdir, {})
    printed = {line[:14].strip(): line[15:] for line in text.splitlines()}
    return jax.device_get(state), printed


def test_without_changes_a_continued_run_equals_an_uninterrupted_one_bit_for_bit(begun, tmp_path, taken):
    whole = train(tmp_path / "whole", log_every=1)
    names, taken[:] = taken[3:], []
    state, printed = go_on(begun, tmp_path)
    assert_equal(state, whole)
    assert taken == names
    assert printed == {
        "continues": f"{begun}@3",
        "changes": "nothing",
        "keeps": "weights and optimizer; averages 0.5, 0.9; the position in the data (sample 24); "
        "the count of steps, for schedule and noise (step 3)",
    }


def test_after_doubling_the_batch_size_training_continues_with_the_next_pictures(begun, tmp_path, taken):
    train(tmp_path / "whole", log_every=1)
    following, taken[:] = [name for batch in taken[3:7] for name in batch], []
    go_on(begun, tmp_path, steps=5, batch_size=16, continued={"changed": {"batch_size": (8, 16)}})
    assert taken == [following[:16], following[16:]]
    assert samples(tmp_path / "next", 5) == 24 + 32


def samples(workdir, step):
    """Return how many samples were taken before a checkpoint."""
    position = checkpoint.position(restore.absolute(workdir / runs.CHECKPOINTS / str(step)))
    return json.loads(position)["samples"]


def test_the_learning_rate_changes_immediately_and_adams_moments_are_kept(begun, tmp_path):
    state, _ = go_on(begun, tmp_path, settings=OPTIMIZER._replace(lr=5e-4), steps=4)
    lines = run_log.read_metrics(tmp_path / "next" / run_log.METRICS)
    np.testing.assert_allclose([line["lr"] for line in lines], [2.5e-4, 5e-4, 7.5e-4, 5e-4])
    usual = train(tmp_path / "usual", steps=4, log_every=1)
    assert_equal(state.opt_state[0], usual.opt_state[0])  # The gradients are the same.
    with pytest.raises(AssertionError):
        assert_equal(state.params, usual.params)


def test_new_averages_start_at_the_weights_and_old_ones_are_kept_or_dropped(begun, tmp_path):
    settings = OPTIMIZER._replace(ema_decays=(0.9, 0.75), ema_widths=(0.1,))
    state, printed = go_on(begun, tmp_path, settings=settings, steps=4)
    at_3 = restore.load_params(begun / runs.CHECKPOINTS, jax.eval_shape(toy.init, jax.random.key(0)), "raw")
    usual = train(tmp_path / "usual", steps=4)
    assert_equal(state.params, usual.params)
    assert_equal(state.ema["0.9"], usual.ema["0.9"])
    mixed = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, at_3, state.params)
    jax.tree.map(lambda e, x: np.testing.assert_allclose(e, x, atol=1e-6), state.ema["0.75"], mixed)
    assert printed["starts anew"].count("from the weights of step 3") == 2
    assert (printed["drops"], set(state.ema)) == ("averages 0.5", {"0.9", "0.75", "power-0.1"})


def test_moments_of_another_dtype_and_other_devices_are_accepted(begun, tmp_path):
    settings = OPTIMIZER._replace(moment_dtype="bfloat16")
    state, _ = go_on(begun, tmp_path, settings=settings, sizes=(2, 2, 1), steps=4)
    usual = train(tmp_path / "usual", steps=4)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state[0].mu)} == {jnp.dtype("bfloat16")}
    # bfloat16 has 8 bits, so a step of 1e-3 differs by up to about 1e-3 * 2^-8.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), state.params, usual.params)


def test_training_on_other_data_starts_from_its_first_sample(begun, tmp_path, taken):
    train(tmp_path / "whole", steps=1)
    first, taken[:] = taken[0], []
    _, printed = go_on(begun, tmp_path, steps=4, continued={"changed": {"data.path": ("a", "b")}})
    assert taken[0] == first
    assert printed["starts anew"] == "the data, because data.path changed"
    _, printed = go_on(begun, tmp_path / "next", steps=4, seed=6)
    assert "seed" in printed["starts anew"] and "position" not in printed["keeps"]


def lora_on(base):
    """Return the task of a LoRA on these weights of the toy."""
    init, loss = lambda key: {"params": toy.init(key)}, lambda params, *rest: TASK.loss(params["params"], *rest)
    return lora.adapt(TASK._replace(init=init, loss=loss), {"params": base}, Lora(rank=2, targets="pixels"))


def test_an_added_lora_keeps_steps_and_data_and_starts_with_new_factors(begun, tmp_path):
    base = restore.load_params(begun / runs.CHECKPOINTS, jax.eval_shape(toy.init, jax.random.key(0)), "ema")
    state, printed = go_on(begun, tmp_path, lora_on(base), continued={"adds_lora": True}, steps=4)
    assert list(state.params["lora"]) == ["pixels"] and int(state.step) == 4
    assert int(state.opt_state[-1].updates) == 4 and int(state.opt_state[0].count) == 1
    assert state.opt_state[-1].learning_rate == np.float32(1e-3)  # The warm-up is over.
    assert samples(tmp_path / "next", 4) == 32
    assert printed["starts anew"] == "the LoRA factors, their averages and the optimizer"


def test_the_averages_of_an_added_lora_warm_up_from_the_step_at_which_it_was_added(begun, tmp_path):
    """Without it, decays of 4/13 and 5/14 would follow instead of 1/10 and 2/11."""
    settings = OPTIMIZER._replace(ema_decays=(0.9999,), ema_widths=(0.1,), ema_warmup=True)
    task = lora_on(toy.init(jax.random.key(1)))
    reach = lambda step: go_on(begun, tmp_path, task, settings, continued={"adds_lora": True}, steps=step)[0]
    first, state = reach(4), reach(5)
    up = lambda tree: np.asarray(tree["lora"]["pixels"]["up"], np.float64)
    np.testing.assert_allclose(up(first.ema["0.9999"]), 0.9 * up(first.params), rtol=1e-5)
    expected = up(first.ema["0.9999"]) * 2 / 11 + up(state.params) * 9 / 11
    np.testing.assert_allclose(up(state.ema["0.9999"]), expected, rtol=1e-4)
    np.testing.assert_array_equal(up(first.ema["power-0.1"]), up(first.params))  # Its first step.


def test_the_manifest_has_the_lineage_and_the_metrics_have_all_steps(begun, tmp_path):
    go_on(begun, tmp_path, steps=5)
    (tmp_path / "third").mkdir()
    run_log.begin_from(tmp_path / "third", str(tmp_path / "next"), 4, "f")
    lineage = run_log.read_lineage(tmp_path / "third")
    assert lineage is not None
    first = lineage.pop("continued_from")
    assert lineage == {"run": str(tmp_path / "next"), "step": 4, "fingerprint": "f"}
    assert (first["run"], first["step"]) == (str(begun), 3)
    assert re.fullmatch("[0-9a-f]{64}", first["fingerprint"])
    for name, last in (("next", 5), ("third", 4)):
        lines = run_log.read_metrics(tmp_path / name / run_log.METRICS)
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, last + 1))
    entries = run_log.read_manifest(tmp_path / "third")
    assert [entry["first_step"] for entry in entries] == [0, 3]


def test_replaying_steps_of_the_original_run_is_an_error(begun, tmp_path):
    go_on(begun, tmp_path, steps=5)
    inputs, run, mesh = loop.RunInputs(TASK, None), START._replace(steps=5), sharding.make_mesh(1, 1, 1)
    with pytest.raises(ValueError, match=r"--step=3: .* has the steps 4 to 5"):
        replay.replay(inputs, run, OPTIMIZER, mesh, tmp_path / "next", 3)


def test_a_network_of_another_shape_is_an_error_and_writes_nothing(begun, tmp_path):
    task = TASK._replace(init=lambda key: toy.init(key) | {"more": {"bias": jnp.zeros(3)}})
    with pytest.raises(ValueError, match="another architecture"):
        go_on(begun, tmp_path, task)
    assert list((tmp_path / "next").iterdir()) == []


# --- Choosing the run and the settings, without training -----------------------------------------


def config(**changes):
    c = quickstart.get_config()
    c.unet.embed_dim = c.unet.cond_dim = c.text.width = 32
    for name, value in changes.items():
        group, _, field = name.rpartition("__")
        (c[group] if group else c)[field] = value
    return c


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a run of the quick start's system with a checkpoint of step 0."""
    workdir = tmp_path_factory.mktemp("runs") / "a"
    written_runs.write(workdir, config(), read_settings, toy.init)
    return workdir


def find(workdir, named, **changes):
    return continuing.find(workdir, str(named), config(**changes).to_dict())


@pytest.mark.parametrize("form", ["{}", "{}@0", "{}:0"])
def test_the_step_of_continue_from_is_optional_and_follows_an_at_sign_or_a_colon(stored, tmp_path, form):
    source = find(tmp_path / "b", form.format(stored))
    assert source and (source.name, source.changed) == (f"{stored}@0", {})


def test_without_continue_from_no_run_is_continued(tmp_path):
    assert find(tmp_path / "b", "") is None


def test_changed_settings_are_listed_with_both_values(stored, tmp_path):
    of_optimizer = {"lr": 0.5, "schedule": "wsd", "warmup": 1, "ema_decays": (0.5,), "clip": 2.0}
    changes = {"batch_size": 7, "steps": 9, "text__drop_prob": 0.5, "data__path": "there", "data__source": "tfds"}
    changes |= {"unet__dropout": 0.5, "unet__dtype": "bfloat16", "mesh__fsdp": 1}
    changes |= {f"optimizer__{name}": value for name, value in of_optimizer.items()}
    source = find(tmp_path / "b", stored, **changes)
    assert source is not None
    names = {name.replace("__", ".") for name in changes}
    assert names - {"mesh.fsdp"} <= source.changed.keys() <= names
    old = config().batch_size
    assert source.changed["batch_size"] == (old, 7)
    assert source.changed["optimizer.ema_decays"][1] == [0.5]


@pytest.mark.parametrize(
    ("group", "field", "value"), [("unet", "cond_dim", 64), ("diffusion", "predicts", "eps"), ("text", "max_tokens", 9)]
)
def test_changing_a_fixed_setting_is_an_error_of_one_line_with_both_values(stored, tmp_path, group, field, value):
    with pytest.raises(ValueError) as error:
        find(tmp_path / "b", stored, **{f"{group}__{field}": value})
    text, before = str(error.value), config()[group][field]
    assert f"{group}.{field}: {before!r} stored, {value!r} requested" in text and "\n" not in text
    assert f"--config.unet.weights={stored}" in text


def test_an_optimizer_of_another_kind_is_an_error_and_other_parameters_are_not(stored, tmp_path):
    with pytest.raises(ValueError, match=r"cannot change optimizer\.name from adamw to muon, whose"):
        find(tmp_path / "b", stored, optimizer__name="muon")
    source = find(tmp_path / "b", stored, optimizer__name="adamw(b1=0.8)")
    assert source.changed == {"optimizer.name": ("adamw", "adamw(b1=0.8)")}


def test_other_weights_and_other_ranges_of_fields_are_errors(stored, tmp_path):
    with pytest.raises(ValueError, match=r"weights of this run, but unet\.weights is 'x'"):
        find(tmp_path / "b", stored, unet__weights="x")
    with pytest.raises(ValueError, match=r"cannot change data\.fields from \[\] to \['a=0\.\.5'\]"):
        find(tmp_path / "b", stored, data__fields=("a=0..5",))


def test_a_missing_run_or_step_and_a_reached_end_are_errors(stored, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7 in .*choose from \[0\]"):
        find(tmp_path / "b", f"{stored}@7")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        find(tmp_path / "b", tmp_path / "none")
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / runs.CONFIG).write_text((stored / runs.CONFIG).read_text())
    (tmp_path / "late" / runs.CHECKPOINTS).symlink_to(stored / runs.CHECKPOINTS)
    with pytest.raises(ValueError, match=r"steps is 0, but .*late@0 has reached step 0: raise"):
        find(tmp_path / "b", tmp_path / "late", steps=0)


def test_the_error_for_a_damaged_checkpoint_lists_the_other_ones(stored, tmp_path, monkeypatch):
    steps = {str(stored): [2, 4]}
    monkeypatch.setattr(restore, "steps", lambda root: steps.get(str(root.parent), []))
    monkeypatch.setattr(restore, "newest_sound", lambda root, until=None: 2)
    with pytest.raises(restore.Damaged, match=r"a@4 is damaged: choose another of \[2\]$"):
        find(tmp_path / "b", f"{stored}@4")


def test_a_run_that_learns_another_word_is_advised_to_start_from_its_base(stored, tmp_path):
    values = json.loads((stored / runs.CONFIG).read_text())
    values["text"]["learned_tokens"], values["unet"]["weights"] = "<cat>=d", "base"
    (run := tmp_path / "run").mkdir()
    (run / runs.CONFIG).write_text(json.dumps(values))
    (run / runs.CHECKPOINTS).symlink_to(stored / runs.CHECKPOINTS)
    with pytest.raises(ValueError, match=r"from the weights alone with --config\.unet\.weights=base$"):
        find(tmp_path / "b", run, text__learned_tokens="<dog>=d")


def test_continuing_into_the_workdir_of_an_unrelated_run_is_an_error(stored, tmp_path):
    with pytest.raises(ValueError, match="holds a run that continues no other run"):
        find(stored, stored)


def test_after_an_early_kill_the_run_continues_from_the_chosen_checkpoint(stored, tmp_path):
    workdir = tmp_path / "b"
    workdir.mkdir()
    run_log.begin_from(workdir, str(stored), 0, "")
    for named in ("", stored, f"{stored}@0"):
        source = find(workdir, named)
        assert source and source.name == f"{stored}@0"
    for named in (f"{stored}@1", tmp_path):
        with pytest.raises(ValueError, match=rf"continues {stored}@0: choose a new --workdir"):
            find(workdir, named)
    (workdir / runs.CHECKPOINTS).symlink_to(stored / runs.CHECKPOINTS)
    assert find(workdir, stored) is None and find(workdir, "") is None


def complete(rank, weights=""):
    values = systems.complete(config().to_dict())
    values["lora"]["rank"], values["unet"]["weights"] = rank, weights
    return values


def test_an_added_lora_adapts_the_weights_of_the_original_run(stored, tmp_path):
    values = complete(rank=2)
    source = continuing.find(tmp_path / "b", str(stored), values)
    assert source and source.adds_lora and source.changed["lora.rank"] == (0, 2)
    assert values["unet"]["weights"] == f"{stored}@0"
    mine = complete(rank=2, weights="mine")
    assert continuing.find(tmp_path / "b", str(stored), mine)
    assert mine["unet"]["weights"] == "mine"


def test_a_continued_lora_keeps_its_base(stored, tmp_path):
    """However often it is continued, with the config of the first command."""
    run = stored
    for name in "bcd":
        values = complete(rank=2)
        source = continuing.find(tmp_path / name, str(run), values)
        assert values["unet"]["weights"] == f"{stored}@0" and source.adds_lora is (name == "b")
        runs.claim(tmp_path / name, values)
        (tmp_path / name / runs.CHECKPOINTS).symlink_to(stored / runs.CHECKPOINTS)
        run_log.begin_from(tmp_path / name, str(run), 0, "")
        again = complete(rank=2)
        assert continuing.find(tmp_path / name, str(run), again) is None and again == values
        run = tmp_path / name
    mine = complete(rank=2, weights="mine")
    assert continuing.find(tmp_path / "e", str(run), mine) and mine["unet"]["weights"] == "mine"


def test_a_lora_that_took_the_name_of_the_run_it_continued_keeps_its_base(stored, tmp_path):
    run = tmp_path / "renamed"
    runs.claim(run, complete(rank=2, weights="base"))
    (run / runs.CHECKPOINTS).symlink_to(stored / runs.CHECKPOINTS)
    run_log.begin_from(run, str(run), 0, "")
    values = complete(rank=2)
    assert continuing.find(tmp_path / "b", str(run), values)
    assert values["unet"]["weights"] == "base"


@pytest.mark.parametrize("shares", [(0.0, 0.1), (0.05, 0.1)])
def test_held_out_pictures_that_earlier_steps_have_seen_are_mentioned(begun, stored, tmp_path, shares):
    written_runs.write(tmp_path / "a", config(data__heldout=shares[0]), read_settings, toy.init)
    assert find(tmp_path / "b", tmp_path / "a", data__heldout=shares[0]).less_heldout is None
    assert find(tmp_path / "b", tmp_path / "a", data__heldout=0.01).less_heldout == (None if shares[0] else 0.0)
    assert find(tmp_path / "b", tmp_path / "a", data__heldout=shares[1]).less_heldout == shares[0]
    _, printed = go_on(begun, tmp_path, steps=4, continued={"less_heldout": shares[0]})
    assert printed["note"] == (
        f"earlier steps, with data.heldout={shares[0]:g}, may have trained on pictures that are "
        "now held out, whose loss is then too low"
    )


def test_a_run_cannot_go_on_with_another_vae_or_text_encoder(begun, tmp_path):
    """Paths may change. The weights are compared, whatever their type."""
    text, vae = ({"params": {"a": np.linspace(x, 1, 200, dtype="f4")}} for x in (0, 0.5))
    of_type = lambda tree, dtype: jax.tree.map(lambda a: a.astype(dtype), tree)
    run = tmp_path / "begun"
    run.symlink_to(begun)
    frozen = {"text": text, "vae": vae}
    go = lambda frozen: go_on(run, tmp_path, TASK._replace(frozen=frozen), steps=4)
    finetune.keep_frozen(run, frozen)
    try:
        for part in frozen:
            with pytest.raises(ValueError, match=rf"other weights than {part}\.weights names: set"):
                go({**frozen, part: of_type(frozen[part], "f4") | {"b": np.ones(2)}})
        other = jax.tree.map(np.copy, vae)
        other["params"]["a"][-1] += 0.1
        with pytest.raises(ValueError, match=r"than vae\.weights names"):
            go({"task": frozen | {"vae": other}, "base": {}})
        finetune.check_frozen(run, {"text": (), "vae": of_type(vae, jnp.bfloat16)})
    finally:
        (begun / finetune.FROZEN).unlink()
