"""The questions of start, answered in a terminal, by a flag or by their default."""

from types import SimpleNamespace

import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.start import questions
from diffusion_jax.start.questions import ASK
from diffusion_jax.start.training_pictures import PictureSet

TRAINED = "models/emoji32"


def photos(count=60, side=3_000.0, p95=2.0, words=("fox",), speed=14.5):
    report = {"words": dict.fromkeys(words, 1), "aspect": {"p95": p95}}
    report["smaller_side"] = {"median": side}
    return PictureSet(Data("folder"), range(count), report, speed)


@pytest.fixture
def typed(monkeypatch):
    """Make stdin a terminal in which the user types the given lines."""

    def terminal(*lines):
        replies = iter(lines)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("builtins.input", lambda prompt: next(replies))

    return terminal


def test_outside_a_terminal_the_default_is_chosen_and_the_flags_are_shown(capsys):
    assert questions.method(ASK, photos(), TRAINED) == "no"
    printed = capsys.readouterr().out
    assert "of 60 pictures is small" in printed and "--finetune=lora: add a LoRA" in printed
    assert questions.tall(ASK, photos()) == "crop"
    assert "at least 2 times the shorter one" in capsys.readouterr().out


def test_in_a_terminal_an_invalid_answer_is_asked_again_and_enter_selects_the_default(typed, capsys):
    typed("lorry", "lora")
    assert questions.answer("finetune", ASK, True, "Few.") == "lora"
    assert "Type one of no, lora, full." in capsys.readouterr().out
    typed("")
    assert questions.answer("finetune", ASK, True, "Few.") == "no"


def test_a_flag_answers_without_a_question(capsys):
    assert questions.method("full", photos(5_000), TRAINED) == "full"
    assert questions.tall("pad", photos(p95=1.0)) == "pad" and capsys.readouterr().out == ""


def test_questions_are_asked_only_if_their_answer_matters(capsys):
    assert questions.method(ASK, photos(1_000), TRAINED) == "no"
    assert questions.method(ASK, photos(), "") == "no"
    assert questions.tall(ASK, photos(p95=1.5)) == "crop"
    for count, speed, side in ((60, 60.0, 3_000.0), (60, 14.5, 64.0), (12, 14.5, 3_000.0)):
        assert not questions.shrink(ASK, photos(count, speed=speed, side=side), 64)
    assert capsys.readouterr().out == ""
    assert not questions.shrink(ASK, photos(), 64)
    assert "Reading is slow: 14 pictures per second" in capsys.readouterr().out


def test_fine_tuning_without_a_model_or_captions_is_an_error():
    for one, trained in ((photos(), ""), (photos(words=()), TRAINED)):
        with pytest.raises(ValueError, match=r"--finetune=lora needs captions"):
            questions.method("lora", one, trained)


def test_doubts_about_the_data_are_a_question_in_a_terminal_and_a_warning_elsewhere(typed, caplog):
    questions.go_on(["all 3 captions are equal"])
    assert [record.getMessage() for record in caplog.records] == ["all 3 captions are equal"]
    typed("yes")
    questions.go_on(["all 3 captions are equal"])
    for reply in ("", "n"):
        typed(reply)
        with pytest.raises(ValueError, match="you did not continue: mend the data"):
            questions.go_on(["all 3 captions are equal"])
    typed()
    questions.go_on([])
