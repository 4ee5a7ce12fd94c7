"""Start chooses models and steps for a data set, a machine and a time, and writes a config."""

from types import SimpleNamespace

import pytest

from diffusion_jax.config.settings import Run
from diffusion_jax.start import stages
from diffusion_jax.start.stages import Candidate, Measured, TrainingStage, Trial

SMALL, LARGE, AFTER = (TrainingStage(name, gflop) for name, gflop in (("a", 1.0), ("b", 4.0), ("c", 1.0)))
MODELS = [
    Candidate(32, 0, [SMALL]),
    Candidate(64, 1_000, [SMALL._replace(share=0.75), AFTER._replace(share=0.25)]),
    Candidate(64, 9_000, [LARGE]),
]


def allowed(side, seconds):
    return stages.allowed(MODELS, float(side), float(seconds), 10.0)


def test_larger_models_are_offered_only_for_large_pictures_and_enough_time():
    assert allowed(64, 3_600) == MODELS  # 9,000 images at 2.5 per second.
    assert allowed(64, 3_599) == MODELS[:2]
    # The second model trains for 750 ms of each second.
    assert allowed(64, 134) == MODELS[:2] and allowed(64, 133) == MODELS[:1]
    assert allowed(63, 10**6) == allowed(8, 1) == MODELS[:1]


@pytest.fixture
def work(monkeypatch):
    """Replace tracing and measuring; return the lists of traced stages and of measured ones."""
    traced, measured = [], []

    def fit(stage, changes):
        traced.append(stage.base)
        return changes, stage.base not in changes

    def measure(stage, changes, workdir):
        measured.append((stage.base, workdir))
        return Measured(stage, changes, None, 10.0, 0.0)

    monkeypatch.setattr(stages, "fit", fit)
    monkeypatch.setattr(stages, "measure", measure)
    return traced, measured


def test_a_trial_measures_a_stage_shared_by_two_models_once(work):
    chosen = Trial(MODELS[:2], lambda base: {}, "mine").measure(64.0, 3_600.0)
    assert [(one.stage.base, one.stage.share) for one in chosen] == [("a", 0.75), ("c", 0.25)]
    assert work == (["a", "c"], [("a", "mine"), ("c", "mine")])
    # A time of 100 s is too short for the second model.
    Trial(MODELS[:2], lambda base: {}, "mine").measure(64.0, 100.0)
    assert work[0] == ["a", "c", "a"]


def test_a_trial_leaves_out_a_model_that_does_not_fit_in_memory(work):
    trial = Trial(MODELS, lambda base: {"b": (0, "")}, "mine")
    trial.measure(64.0, 3_600.0)
    assert trial.chosen is MODELS[1] and work[0] == ["a", "b", "c"]


def small(**stage):
    """Return a stage with 64 images per step and 32 images per second."""
    run = Run(steps=1, batch_size=64, prompts=("a",) * 8)
    optimizer = SimpleNamespace(warmup=500)
    sampler = SimpleNamespace(steps=12, guidance=2.0)
    settings = SimpleNamespace(run=run, optimizer=optimizer, sampler=sampler)
    return Measured(SMALL._replace(**stage), {}, settings, 32.0, 20.0)


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


def test_the_speed_of_an_unmeasured_stage_follows_from_the_flops_per_second_of_a_measured_one(work):
    """If no stage was measured, the speed is that of two CPU cores."""
    base, sr = TrainingStage("base32_8m", 2.0), TrainingStage("sr64_3m", 4.0)
    trial = Trial([Candidate(64, 0, [base, sr])], lambda base: {"steps": (5, "")}, "mine")
    before = trial.assumed()
    assert [(one.images_per_second, one.assumed) for one in before] == [(50.0, True), (25.0, True)]
    assert before[0].settings.run.steps == 5
    trial.measure(64.0, 3_600.0)
    assert [one.assumed for one in trial.assumed()] == [False, False]
    del trial._measured["sr64_3m"]
    assert [(one.images_per_second, one.assumed) for one in trial.assumed()] == [(10.0, False), (5.0, True)]
