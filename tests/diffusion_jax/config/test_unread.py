"""Fields that nothing reads are known by watching who reads what."""

import copy
import pickle
from typing import NamedTuple

import pytest

from configs import quickstart
from diffusion_jax.config import unread
from diffusion_jax.diffusion import samplers
from imagen_jax.settings import Sampler, read_settings


class Groups(NamedTuple):
    sampler: Sampler


def left(sampler, read):
    s, unread_fields = unread.watched(Groups(sampler), ("sampler", "data"))
    read(s.sampler)
    return unread_fields()


def test_what_is_not_read_and_not_at_its_default_is_named():
    sampler = Sampler(eta=0.5, churn=3.0)
    assert left(sampler, lambda s: s.churn) == {"sampler.eta": 0.5}
    assert left(sampler, lambda s: (s.churn, s.eta)) == {}


@pytest.mark.parametrize(
    "take", [lambda s: s._replace(steps=2), lambda s: [*s], lambda s: s._asdict()]
)
def test_a_group_that_is_taken_as_a_whole_counts_as_read(take):
    assert left(Sampler(eta=0.5), take) == {}


@pytest.mark.parametrize(
    ("name", "field"), [("heun", "eta"), ("ddim", "churn"), ("euler", "eta"), ("euler", "churn")]
)
def test_samplers_read_their_own_fields(name, field):
    sampler = Sampler(name=name, **{field: 0.5})
    assert left(sampler, samplers.make) == {f"sampler.{field}": 0.5}


def test_a_watched_group_is_equal_to_its_own_and_its_copies_are_not_watched():
    s, _ = unread.watched(Groups(Sampler(eta=0.5)), ("sampler",))
    assert s.sampler == Sampler(eta=0.5) and hash(s.sampler) == hash(Sampler(eta=0.5))
    assert type(pickle.loads(pickle.dumps(s.sampler))) is type(copy.copy(s.sampler)) is Sampler


def test_a_config_of_ours_sets_nothing_of_its_sampler_that_is_not_read():
    """Or its first line would be a warning."""
    s, unread_fields = unread.watched(
        read_settings(quickstart.get_config().to_dict()), ("sampler",)
    )
    samplers.make(s.sampler)
    assert "sampler.eta" not in unread_fields()
