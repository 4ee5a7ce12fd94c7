"""Twenty rounds of the campaign: whatever befalls a command, it ends where it would have."""

import json

import pytest

from tests.campaign import __main__ as command
from tests.campaign import rounds


@pytest.mark.slow
def test_what_is_disturbed_ends_as_if_it_were_not(tmp_path):
    outcomes = command.campaign(tmp_path, 20, seed=1)
    assert len(outcomes) == 20
    assert not [str(outcome) for outcome in outcomes if outcome.different]
    assert sum(outcome.hit for outcome in outcomes) > 10
    assert command.table(outcomes).count("\n") > 10


def test_rounds_that_a_record_holds_are_read_and_not_run_again(tmp_path):
    path = tmp_path / "record.jsonl"
    ended = rounds.Outcome("a sweep", "SIGKILL", True, (-9, 0), ("lock",), (), 3.5)
    lines = [json.dumps({"seed": 4, **ended._asdict()})] * 2
    path.write_text("\n".join(lines) + "\n")
    first, second = command.read(path, seed=4)
    assert first == second and str(first) == str(ended)
    assert command.table([first, second]) == command.table([ended, ended])
    with pytest.raises(ValueError, match="is of another seed than 5"):
        command.read(path, seed=5)
    assert command.read(tmp_path / "none", seed=5) == command.read(None, seed=5) == []
