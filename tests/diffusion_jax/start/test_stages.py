"""Start chooses models and steps for a data set, a machine and a time, and writes a config."""

from types import SimpleNamespace

import pytest

from diffusion_jax.config.settings import Data, Run
from diffusion_jax.start import stages, start_command, written
from diffusion_jax.start.stages import Candidate, Measured, Opened, TrainingStage
from diffusion_jax.start.training_pictures import PictureSet

SMALL, LARGE, AFTER = (TrainingStage(name, "", "train", lambda s, mesh: None) for name in "abc")
MODELS = [
    Candidate(32, 0, [SMALL]),
    Candidate(64, 1_000, [SMALL._replace(share=0.75), AFTER._replace(share=0.25)]),
    Candidate(64, 9_000, [LARGE]),
]
GFLOPS = {"a": 1.0, "b": 4.0, "c": 1.0}  # Per image.


def opened(stage, fits=True, **fields):
    traced = SimpleNamespace(flops=1e9 * GFLOPS[stage.base])
    settings = SimpleNamespace(**fields)
    return Opened(stage, {}, {}, settings, traced, fits)


def chosen(side, seconds, fits=lambda stage: True):
    measured = lambda stage: Measured(opened(stage), 10.0, 0.0)  # 10 GFLOP/s.
    return stages.choose(
        MODELS, float(side), float(seconds), lambda s: opened(s, fits(s)), measured
    )


def test_the_largest_model_that_size_time_and_memory_allow_is_chosen():
    assert chosen(64, 3_600) is MODELS[2]  # 9,000 images at 2.5 per second.
    assert chosen(64, 3_599) is MODELS[1]
    # It trains for 750 ms of each second.
    assert chosen(64, 134) is MODELS[1] and chosen(64, 133) is MODELS[0]
    assert chosen(63, 10**6) is MODELS[0]
    assert chosen(8, 1) is MODELS[0]
    assert chosen(64, 3_600, lambda stage: stage is not LARGE) is MODELS[1]


def test_a_stage_shared_by_two_candidates_is_measured_once(monkeypatch):
    measured, traced = [], []

    def measure(one, workdir):
        measured.append((one.stage.base, workdir.rpartition("/")[2]))
        return Measured(one, 10.0, 0.0)

    monkeypatch.setattr(stages, "measure", measure)

    def open_stage(stage, changes):
        traced.append(stage.base)
        return opened(stage)

    monkeypatch.setattr(stages, "open_stage", open_stage)
    of_data = lambda stage: {}
    photos = PictureSet(Data("folder"), range(9), {"smaller_side": {"median": 64.0}}, 9.0)
    chosen = start_command.Trial(MODELS[:2], photos, of_data, 1.0, "mine").measure()
    assert [(one.opened.stage.base, one.opened.stage.share) for one in chosen] == [
        ("a", 0.75), ("c", 0.25)
    ]  # fmt: skip
    assert measured == [("a", "mine"), ("c", "mine")]  # Each is measured once.
    assert traced == ["a", "c"]
    short = 100 / 3_600  # Too short for the second model, so its other stages are not traced.
    start_command.Trial(MODELS[:2], photos, of_data, short, "mine").measure()
    assert traced == ["a", "c", "a"]


def small(**stage):
    """Return a stage with 64 images per step and 32 images per second."""
    run = Run(steps=1, batch_size=64, prompts=("a",) * 8)
    optimizer = SimpleNamespace(warmup=500)
    sampler = SimpleNamespace(steps=12, guidance=2.0)
    one = opened(SMALL._replace(**stage), run=run, optimizer=optimizer, sampler=sampler)
    return Measured(one, 32.0, 20.0)


def test_training_steps_fill_the_time_without_sampling_and_compiling():
    changes, seconds = stages.timed(small(), 2_060.0, 10**6)
    # A step takes 2 s. Ten sheets of 8 pictures take 12 steps x 2 evaluations, each at a third of
    # the cost of training.
    assert changes["steps"][0] == (2_060 - 40 - 10 * 8 * 12 * 2 / 3 / 32) // 2 == 1_000
    assert seconds == pytest.approx(2_060)
    assert changes["optimizer.warmup"][0] == 100


def test_a_time_that_is_too_short_gives_20_steps():
    changes, seconds = stages.timed(small(), 99.0, 10**6)
    assert changes["steps"] == (20, "--hours allows 19; fewer than 20 are not worth training.")
    assert seconds > 99
    changes, _ = stages.timed(small(), 1.0, 10**6)
    assert changes["steps"][0] == 20 and changes["save_every"][0] == 1


@pytest.mark.parametrize(("hours", "steps"), [(0.1, 15), (1, 150), (100, 150)])
def test_a_run_samples_and_saves_after_a_tenth_or_five_minutes(hours, steps):
    """A step takes 2 s."""
    changes, _ = stages.timed(small(), 3_600.0 * hours, 10**6)
    assert changes["sample_every"][0] == changes["save_every"][0] == steps
    assert changes["log_every"][0] == 10


def test_the_number_of_passes_over_few_pictures_is_limited():
    changes, seconds = stages.timed(small(max_epochs=300.0), 7_200.0, 64)
    assert changes["steps"] == (300, "300 passes over the pictures; more would only memorise them.")
    assert seconds < 1_200 and changes["sample_every"][0] == 30


def test_a_stage_without_a_measurement_has_the_flops_of_one_that_was_measured():
    """Or, if there is none, those of two CPU cores, for an image of a small model."""
    measured = Measured(opened(SMALL), 12.0, 0.0)  # 12 GFLOP/s
    assumed = stages.assume(LARGE, {}, opened(LARGE, run=Run(steps=1, batch_size=8)), [measured])
    assert (assumed.images_per_second, assumed.assumed) == (3.0, True)
    assert stages.assume(AFTER, {}, opened(LARGE), []).images_per_second == 25.0
    unopened = stages.assume(SMALL._replace(base="base32_8m"), {"steps": (5, "")}, None, [])
    assert unopened.images_per_second == pytest.approx(1e11 / 1.7e9)
    assert unopened.opened.settings.run.steps == 5


def test_a_written_config_has_comments_and_reads_back_unchanged():
    changes = {
        "steps": (12_345, "A night."),
        "prompts": (('a "red" seven', "é\\"), ""),
        "data.path": ("it's\nthere", ""),
        "unet.dtype": ("bfloat16", ""),
    }
    text = written.source("quickstart", changes, 'Of """ and \\ in it.')
    assert "    c.steps = 12_345  # A night.\n" in text
    config = written.config("quickstart", changes)
    assert (config["steps"], config["data"]["path"]) == (12_345, "it's\nthere")
    assert config["prompts"] == ('a "red" seven', "é\\") and config["unet"]["patch"] == 4
    compile(text, "mine.py", "exec")
