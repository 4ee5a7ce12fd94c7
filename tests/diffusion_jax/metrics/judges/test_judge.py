"""A judge trained on the data: loss, held-out captions, files, and reaction to damaged pictures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import sources
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.evaluate import scorers
from diffusion_jax.metrics import __main__ as command
from diffusion_jax.metrics.judges import judge
from diffusion_jax.metrics.judges import train as train_judge
from diffusion_jax.metrics.judges.judge import Pair

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "white": (255,) * 3}


class Stripes(Pictures):
    """Pictures whose upper and lower halves have the colours that their captions name."""

    def __init__(self, number=640):
        self._names = [f"{a} over {b} {n}" for n in range(number // 16) for a in COLOURS for b in COLOURS]

    def __len__(self):
        return len(self._names)

    def read(self, indices, places=None):
        texts = self.texts(indices)
        images = np.zeros((len(texts), 32, 32, 3), np.uint8)
        for image, text in zip(images, texts, strict=True):
            upper, _, lower, _ = text.split()
            image[:16], image[16:] = COLOURS[upper], COLOURS[lower]
        return images, texts

    def texts(self, indices):
        return [self._names[i] for i in indices]


def pair(rows):
    images, texts = Stripes().read(np.asarray(rows))
    return Pair(images, texts)


@pytest.fixture(scope="module")
def untrained():
    """A judge with random weights and 16 candidate captions."""
    keys = jax.random.split(jax.random.key(0))
    params = jax.jit(  # Without jit, this takes seconds.
        lambda: {
            "image": judge.IMAGE.init(keys[0], jnp.zeros((1, 32, 32, 3)))["params"],
            "text": judge.TEXT.init(keys[1], jnp.zeros((1, 8), jnp.uint32))["params"],
        }
    )()
    pairs = (pair(range(16, 48)), pair(range(48, 80)))
    card = {"data": "stripes", "size": 32, "scores": {}}
    return judge.of_params(params, 32, 8, pair(range(16)).captions, pairs, card)


def test_the_loss_is_infonce_with_equal_captions_as_positives(monkeypatch):
    ids = jnp.array([[1, 2], [1, 2], [3, 0]], jnp.uint32)
    images = np.array([[1.0, 0], [0.6, 0.8], [0, 1]])
    texts = np.array([[1.0, 0], [1, 0], [0, 2]])  # The loss normalizes the last vector.
    apply = lambda rows: lambda variables, x: jnp.asarray(rows)
    monkeypatch.setattr(judge, "IMAGE", type("", (), {"apply": staticmethod(apply(images))}))
    monkeypatch.setattr(judge, "TEXT", type("", (), {"apply": staticmethod(apply(texts))}))
    params = {"image": {}, "text": {}, "scale": jnp.log(2.0)}
    loss = float(train_judge.contrast(params, jnp.zeros((3, 32, 32, 3)), ids))
    logits = 2 * images @ np.array([[1, 0], [1, 0], [0, 1.0]]).T
    target = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
    log = lambda axis: logits - np.log(np.exp(logits).sum(axis, keepdims=True))
    expected = -((target * log(1)).sum() + (target * log(0)).sum()) / 6
    assert loss == pytest.approx(expected, rel=1e-5)


def test_nearest_counts_the_closest_caption_but_not_a_tie():
    texts = np.array([[1.0, 0], [0, 1], [0, 1]])
    images = np.array([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]])
    assert judge.nearest(images, texts, np.array([0, 1, 2])).tolist() == [True, False, False]


def test_the_split_by_captions_does_not_change_when_pictures_are_added():
    small, large = train_judge.split(Stripes(640)), train_judge.split(Stripes(960))
    assert [len(part) for part in small[:3]] == [578, 30, 32]
    for part, more in zip(small[:3], large[:3], strict=True):
        assert part.tolist() == [row for row in more.tolist() if row < 640]
    with pytest.raises(ValueError, match="too few"):
        train_judge.split(Stripes(32))


def test_half_of_a_batch_consists_of_captions_that_differ_in_one_word():
    cats = ["a red cat", "a blue cat", "a cat"]
    assert train_judge.similar([*cats[:2], "a dog", cats[2]]) == [cats, ["a dog", "a cat"]]
    texts = [*cats, *(f"{i} {i} {i}" for i in range(93))]
    batches = train_judge.batches(texts, seed=0)
    grouped, random = np.split(np.concatenate([next(batches)[None] for _ in range(12)]), [48], 1)
    assert set(grouped.ravel().tolist()) == {0, 1, 2}  # 16 groups of the three cats.
    assert (np.bincount(random.ravel()[: 96 * 10]) == 10).all()  # Whole epochs.
    # Without similar captions, all rows are random.
    batches = train_judge.batches(texts[3:], seed=0)
    assert np.bincount(next(batches), minlength=93).tolist().count(1) == 2 * 93 - 128


def test_a_saved_judge_is_read_back_and_a_damaged_file_is_an_error(untrained, tmp_path):
    judge.save(untrained, tmp_path / "judge")
    again = judge.load(tmp_path / "judge")
    assert (again.image.weights, again.candidates) == (untrained.image.weights, untrained.candidates)
    assert again.test.captions == untrained.test.captions
    ours, theirs = (judge.reader(j, pair([20]).captions) for j in (untrained, again))
    shown = pair([20, 3])
    for mine, read in zip(ours(*shown), theirs(*shown), strict=True):
        np.testing.assert_array_equal(mine, read)
    path = tmp_path / "judge/judge.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"judge\.safetensors is damaged"):
        judge.load(tmp_path / "judge")
    path.write_bytes(content[:50])
    with pytest.raises(ValueError, match="holds a damaged judge"):
        judge.load(tmp_path / "judge")
    with pytest.raises(FileNotFoundError, match="metrics train_judge"):
        judge.load(tmp_path)


def test_captions_that_differ_only_in_case_or_line_breaks_are_equal(untrained):
    """Two spellings of the caption of a picture are both counted as right."""
    images, read = pair([20]).images, judge.reader(untrained)
    (own,) = [caption for caption in untrained.candidates if read(images, [caption])[1]]
    other = own.upper().replace(" ", "\n")
    assert judge.reader(untrained, [own, other])(images, [other])[1] == 1


def test_a_scorer_reports_both_scores_of_a_judge_and_their_card(untrained, tmp_path):
    judge.save(untrained, tmp_path)
    prompts = [*pair([0, 1]).captions, "red over red and new"]
    scorer = scorers.open_scorer("folder", 16, prompts, Evaluation(judge=str(tmp_path)))
    card = scorer.cards["judge"]
    assert card["captions_told_from"] == 17 + 32 and card["weights"] == untrained.image.weights
    assert card["reference"] == "held-out pictures of stripes, n 32" and not card["official"]
    images = np.random.RandomState(0).randint(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    scores = scorer.score(scorer.features(images, prompts))["judge"]
    assert {"fd_judge", "fd_judge_low", "r1_judge", "r1_judge_high"} <= scores.keys()
    assert card["fd_judge_of_real"] < scores["fd_judge"]


def test_a_judge_shows_its_real_picture_of_each_prompt_if_it_has_one(untrained, tmp_path):
    own = untrained.test.captions[3]
    pairs = (untrained.reference, untrained.test)
    images, captions = judge.real_pictures(untrained, 16)(["never shown", own, "nor this"])
    assert captions[1] == own and len({*captions}) == 3
    among = {caption: image for one in pairs for caption, image in zip(one.captions, one.images, strict=True)}
    among = {caption: judge.seen_at(image[None], 16)[0] for caption, image in among.items()}
    for image, caption in zip(images, captions, strict=True):
        assert (image == among[caption]).all()
    judge.save(untrained, tmp_path)
    scorer = scorers.open_scorer("folder", 16, [own] * 3, Evaluation(judge=str(tmp_path)))
    sheet = scorer.real_sheet()
    # A row of three pictures, each enlarged eight times.
    enlarged = Image.fromarray(among[own]).resize((128, 128), Image.Resampling.LANCZOS)
    assert (sheet[4:132, 4:132] == np.asarray(enlarged)).all()


def test_real_pictures_are_reduced_to_the_size_of_drawn_ones():
    images = pair([1]).images
    assert judge.seen_at(images, 32) is images
    small = judge.seen_at(images, 16)
    pillow = np.asarray(Image.fromarray(images[0]).resize((16, 16), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(small[0].astype(int), pillow, atol=1)


def test_blurred_and_noisy_have_the_requested_strength():
    images = np.full((1, 32, 32, 3), 128, np.uint8)
    images[0, :, 16:] = 0
    soft = train_judge.blurred(images, 1 / 32)[0, 5, :, 0].astype(int)
    # A step, smoothed by the normal distribution.
    assert soft[[2, 15, 16, 30]].tolist() == [128, 89, 38, 0]
    rough = train_judge.noisy(images, 0.1)[0, :, :16].astype(float)
    assert rough.std() == pytest.approx(25.5, rel=0.05) and rough.mean() == pytest.approx(128, abs=3)


def test_own_words_leaves_out_the_words_that_all_captions_share():
    among = ["a fox, noto style", "a dog, noto style"]
    assert train_judge._own_words(["a fox, noto style"], among) == [("fox,",)]


def test_a_second_data_set_with_the_same_captions_is_tested_on_the_same_records(untrained, monkeypatch):
    """Both data sets have the same captions in the same order, and show them in two styles."""
    monkeypatch.setattr(train_judge, "MAX_RECORDS", 8)
    monkeypatch.setattr(train_judge.sources, "open_pictures", lambda *_: Stripes())
    test = pair(np.arange(8) * 640 // 8)
    trained = untrained._replace(test=test, candidates=test.captions)
    images, captions = train_judge._same_captions("diffusion_jax.examples.digits", trained)
    np.testing.assert_array_equal(images, test.images)
    assert captions == test.captions


def test_a_damaged_picture_of_the_other_style_is_left_out_with_its_caption(untrained, monkeypatch):
    class Damaged(Stripes):
        def usable(self, indices):
            whole = indices[indices != 33]
            return whole, *self.read(whole)

    monkeypatch.setattr(train_judge.sources, "open_pictures", lambda *_: Damaged())
    trained = untrained._replace(test=pair([32, 33, 34]), candidates=Stripes().texts(range(640)))
    images, captions = train_judge._same_captions("diffusion_jax.examples.digits", trained)
    assert captions == pair([32, 34]).captions
    np.testing.assert_array_equal(images, pair([32, 34]).images)


@pytest.mark.slow
def test_a_trained_judge_scores_damaged_pictures_and_shuffled_captions_lower(tmp_path, capsys):
    """The real command on the digits: real pictures first, damaged ones far below."""
    arguments = ("--data=diffusion_jax.examples.digits", "--size=32", "--seen=12800", f"--out={tmp_path}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["metrics", "train_judge", *arguments])
        command.flags.FLAGS(["metrics", *arguments])
        command.main(["metrics", "train_judge"])
    assert "captions shuffled" in capsys.readouterr().out
    scores = judge.load(tmp_path).card["scores"]
    right, far = ({name: row[k] for name, row in scores.items()} for k in ("r1_judge", "fd_judge"))
    assert right["real"] > 0.9 and right["captions shuffled"] < 0.2
    # Glyphs of 8x8 pixels are blurred already, so half a pixel more changes little.
    assert right["blurred by 1/16"] < right["real"] and far["blurred by 1/16"] > far["real"]


def test_one_string_names_the_source_path_and_text_of_a_data_set():
    assert sources.named("folder:photos::jsonl:text")[:3] == ("folder", "photos", "jsonl:text")
    digits = "diffusion_jax.examples.digits"
    assert sources.named(digits)[:3] == (digits, "", "txt")
    with pytest.raises(ValueError, match="data source is 'photos'"):
        sources.named("photos")
