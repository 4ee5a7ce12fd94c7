"""Twenty rounds of the campaign: whatever befalls a command, it ends where it would have."""

import pytest

from tests.campaign import __main__ as command


@pytest.mark.slow
def test_what_is_disturbed_ends_as_if_it_were_not(tmp_path):
    outcomes = command.campaign(tmp_path, 20, seed=1)
    assert len(outcomes) == 20
    assert not [str(outcome) for outcome in outcomes if outcome.different]
    assert sum(outcome.hit for outcome in outcomes) > 10
    assert command.table(outcomes).count("\n") > 10
