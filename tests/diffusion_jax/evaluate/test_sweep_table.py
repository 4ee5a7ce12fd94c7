"""A sweep's table that another program has changed: the error names the file and the line."""

import re

import pytest

from diffusion_jax.evaluate import sweep
from diffusion_jax.web import frozen
from tests import written_sweeps


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "line 2: the table has no column guidance"),
        ("guidance,checkpoint\n1,2\n", "line 2: the table has no column ema"),
        ("guidance,checkpoint,ema\n1,2,e\ninf,2,e\n", "line 3: guidance is inf"),
        ("guidance,checkpoint,ema\n1,2,e,4\n", "line 2: it has another number of cells"),
        ("guidance,checkpoint,ema,fid\n1,2,e\n", "line 2: it has another number of cells"),
        ("guidance,checkpoint,ema,fid_low\n1,2,e,x\n", "line 2: fid_low is 'x', not a number"),
    ],
)
def test_a_table_that_is_not_one_of_a_sweep_is_named_with_its_line(tmp_path, text, problem):
    folder = written_sweeps.write_run(tmp_path / "run") / "evaluation" / "step_00000002"
    (folder / sweep.TABLE).write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{folder / sweep.TABLE}, {problem}")):
        frozen.page([tmp_path / "run"])


def test_foreign_columns_and_infinite_scores_are_left_out_of_a_report(tmp_path):
    run = written_sweeps.write_run(tmp_path / "run")
    table = run / "evaluation" / "step_00000002" / sweep.TABLE
    header, *rows = table.read_text().splitlines()
    rows = [row.replace("15.5", "inf") + ",my note" for row in rows]
    table.write_text("\n".join([f"{header},note", *rows]) + "\n")
    assert '"fid": 20.0' in (page := frozen.page([run])) and "15.5" not in page
