"""Config fields that no code reads are reported."""

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


def test_unread_fields_that_differ_from_their_default_are_reported():
    sampler = Sampler(eta=0.5, churn=3.0)
    assert left(sampler, lambda s: s.churn) == {"sampler.eta": 0.5}
    assert left(sampler, lambda s: (s.churn, s.eta)) == {}


@pytest.mark.parametrize("take", [lambda s: s._replace(steps=2), lambda s: [*s], lambda s: s._asdict()])
def test_copying_a_whole_group_counts_as_reading_all_its_fields(take):
    assert left(Sampler(eta=0.5), take) == {}


@pytest.mark.parametrize(("name", "field"), [("heun", "eta"), ("ddim", "churn"), ("euler", "eta"), ("euler", "churn")])
def test_a_field_of_another_sampler_is_reported_as_unread(name, field):
    sampler = Sampler(name=name, **{field: 0.5})
    assert left(sampler, samplers.make) == {f"sampler.{field}": 0.5}


def test_a_group_that_records_reads_equals_its_plain_group_and_its_copies_record_nothing():
    s, _ = unread.watched(Groups(Sampler(eta=0.5)), ("sampler",))
    assert s.sampler == Sampler(eta=0.5) and hash(s.sampler) == hash(Sampler(eta=0.5))
    assert type(pickle.loads(pickle.dumps(s.sampler))) is type(copy.copy(s.sampler)) is Sampler


def test_the_quickstart_config_sets_no_unread_sampler_field():
    """An unread field would make the first command of the quick start print a warning."""
    s, unread_fields = unread.watched(read_settings(quickstart.get_config().to_dict()), ("sampler",))
    samplers.make(s.sampler)
    assert "sampler.eta" not in unread_fields()
