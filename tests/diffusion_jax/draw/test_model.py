"""A loaded model reads other weights when needed, and checks strengths and sizes."""

import pytest
from PIL import Image

from diffusion_jax.draw import model as draw_model
from diffusion_jax.draw.input_pictures import InputPictures
from diffusion_jax.draw.stage import Stage
from imagen_jax import cascade


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a model that loaded step 9, and the list of (average, step) that it reads later."""
    for step in range(3, 10):
        for name in ("ema_0.99", "ema_0.999"):
            (tmp_path / "checkpoints" / str(step) / name).mkdir(parents=True)
    first = Stage(str(tmp_path), *[None] * 3, "ema", 9, *[None] * 5)
    model, read = cascade.Cascade([first], [{}]), []

    def with_weights(stage, ema, step):
        assert len(model._weights) < model.sets_of_weights - 1  # Old weights go first.
        read.append((ema, step))
        return stage._replace(ema=ema, step=step)

    monkeypatch.setattr(draw_model.stage_module, "with_weights", with_weights)
    return model, read


def stage_of(model, ema="ema", step=None):
    """The first stage with chosen weights."""
    return model._with_weights(0, {"ema": ema} | ({"checkpoint": step} if step else {}))


def test_weights_in_memory_are_not_read_again_if_another_name_selects_them(run):
    model, read = run
    stages = [stage_of(model, ema, step) for step in (None, 9) for ema in ("ema", "0.999")]
    assert (read, [one.ema for one in stages]) == ([], ["ema", "0.999"] * 2)
    for _ in range(2):
        raw = stage_of(model, "raw", 4)
        assert (raw.ema, raw.step) == ("raw", 4)
    assert read == [("raw", 4)]


def test_the_cache_drops_old_weights_but_never_those_the_model_was_opened_with(run):
    model, read = run
    for step in (3, 4, 5, 6, 3, 9):
        stage_of(model, step=step)
    assert read == [("ema", step) for step in (3, 4, 5, 6, 3)]


def test_weights_in_memory_can_be_used_after_training_removed_their_checkpoint(run, tmp_path):
    model, read = run
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    assert model.averages(0, 9) == ["0.99", "0.999"]
    assert stage_of(model, "0.999").step == 9 and not read


def test_one_strength_applies_to_the_first_stage_and_several_to_one_stage_each(run):
    model, _ = run
    model.stages *= 2
    assert model.each_strength(0.5) == [0.5, 1.0]
    assert model.each_strength([0.5, 0.25]) == [0.5, 0.25]
    with pytest.raises(ValueError, match="strength has 3 values for 2 stages"):
        model.each_strength([1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"strength is 1\.5: it must be"):
        model.each_strength(1.5)


def test_systems_with_variable_sizes_draw_at_the_size_of_the_input_picture(run):
    model, _ = run
    over = InputPictures([Image.new("RGB", (48, 32))], [])
    assert model._size_of(over, {}) == {}  # Imagen always samples squares of one size.
    model.any_shape = True
    assert model._size_of(over, {}) == {"height": 32, "width": 48}
    assert model._size_of(over, {"height": 64, "width": None}) == {"width": 48}
    assert model._size_of(None, {}) == {}
