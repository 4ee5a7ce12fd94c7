"""Cards and tables of scores. Only an official FID is named fid, and scores must be comparable."""

from contextlib import nullcontext

import pytest

from diffusion_jax.metrics import cards, table
from diffusion_jax.metrics.cards import Scored
from tests.diffusion_jax.metrics import toy


def card(official=False, n=100, **fields):
    extractor = toy.extractor(official=official)
    return cards.make_card(extractor, image_size=(10, 14), n=n, **fields)


def test_only_scores_with_the_public_weights_are_named_fid():
    assert table.column("fid", card(official=True)) == "fid"
    assert table.column("fid", card()) == "fd_toy"
    assert table.column("fid_infinity", card()) == "fd_toy_infinity"
    assert table.column("kid", card(official=True)) == "kid"
    assert table.column("kid", card()) == "kid_toy"
    # CLIP has no single public file of weights.
    assert table.column("clip_score", card()) == "clip_score"


def test_a_card_records_extractor_images_sampler_and_versions():
    guided = card(guidance=3.0)
    unset = dict.fromkeys(("prompts", "seed", "sampler", "steps", "checkpoint", "ema", "precision"))
    of_toy = {"extractor": "toy", "weights": "abc", "preprocessing": "means", "official": False}
    of_images = {"image_size": "14x10", "n": 100, "guidance": 3.0}
    assert guided.items() >= (unset | of_toy | of_images).items()
    assert guided["versions"].keys() >= {"jax", "numpy", "python"}
    with pytest.raises(ValueError, match="a card has no field 'guidence': the fields are extrac"):
        card(guidence=3.0)


def test_a_table_shows_only_the_card_fields_that_differ():
    scored = {
        "one": Scored({"fd_toy": 1.0, "kid_toy": 0.1}, card(guidance=1.0, seed=0)),
        "two": Scored({"fd_toy": 2.0}, card(guidance=2.0, seed=0)),
    }
    assert cards.table(scored) == [
        {"name": "one", "guidance": 1.0, "fd_toy": 1.0},
        {"name": "two", "guidance": 2.0, "fd_toy": 2.0},
    ]


@pytest.mark.parametrize("field", cards.ALIKE)
def test_a_table_with_scores_of_different_settings_is_an_error_that_names_the_field(field):
    one, two = card(), card() | {field: "other"}
    scored = {"one": Scored({"fd_toy": 1.0}, one), "two": Scored({"fd_toy": 2.0}, two)}
    message = rf"their {field} differs \(one: {one[field]}, two: other\).*--allow={field}"
    with pytest.raises(ValueError, match=message):
        cards.table(scored)
    assert cards.table(scored, allow=[field])[1] == {"name": "two", field: "other", "fd_toy": 2.0}


def test_hpsv2_is_never_compared_for_other_prompts():
    two = Scored({"hpsv2": 28.0, "fd_toy": 2.0}, card() | {"prompts": "other"})
    for scores, refused in (({"hpsv2": 27.0}, True), ({"fd_toy": 1.0}, False)):
        scored = {"one": Scored(scores, card()), "two": two}
        with pytest.raises(ValueError, match="HPSv2 ranks") if refused else nullcontext():
            assert len(cards.table(scored, allow=["prompts"])) == 2


def test_a_table_of_scores_without_a_common_name_is_an_error():
    scored = {"one": Scored({"fid": 1.0}, card()), "two": Scored({"kid": 2.0}, card())}
    with pytest.raises(ValueError, match="one, two have no score in common"):
        cards.table(scored)
