"""In twenty rounds of the campaign, disturbed commands end with the same results."""

import pytest

from tests.campaign import __main__ as command


@pytest.mark.slow
def test_disturbed_commands_end_with_the_results_of_undisturbed_ones(tmp_path):
    outcomes = command.campaign(tmp_path, 20, seed=1)
    assert len(outcomes) == 20
    assert not [str(outcome) for outcome in outcomes if outcome.different]
    assert sum(outcome.hit for outcome in outcomes) > 10
    assert command.table(outcomes).count("\n") > 10
