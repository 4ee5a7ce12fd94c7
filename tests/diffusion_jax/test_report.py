"""The file name of a page about several runs."""

import json
import pathlib

import pytest

from diffusion_jax import report
from diffusion_jax.evaluate import sweep
from diffusion_jax.web import frozen, results
from tests import written_sweeps


def test_a_page_about_several_runs_has_their_names_in_its_file_name():
    own = pathlib.Path("runs/a/report.html")
    assert report._default_out(["runs/a"]) == own
    assert report._default_out(["runs/a", "runs/b.c", "d"]) == own.with_name("report_with_b.c_d.html")


TABLE, SCORES = "evaluation/bad/sweep.csv", "evaluation/step_00000002/scores/bad.json"
HEAD = "model,checkpoint,ema,guidance,fid\n"
DAMAGED = [
    (TABLE, HEAD.encode() + b"b\xff,1,e,1.0,2.0\n", "is not UTF-8 text (byte 0xff at offset 35, l"),
    (TABLE, f"{HEAD}b,1.5,e,1.0,2.0\n".encode(), ", line 2: checkpoint is 1.5, not a step"),
    (TABLE, f"{HEAD}b,-1,e,1.0,2.0\n".encode(), ", line 2: checkpoint is -1, not a step"),
    (TABLE, f"{HEAD}b,1,e,nan,2.0\n".encode(), ", line 2: guidance is nan"),
    (TABLE, f"{HEAD}b,1,e,1,x\n".encode(), ", line 2: fid is 'x', not a number"),
    (TABLE, f"{HEAD}b,1,e,1\n".encode(), ", line 2: it has another number of cells"),
    (TABLE, b"a,b\n1,2\n", ", line 2: the table has no column guidance"),
    (TABLE, b"guidance,checkpoint\n1,2\n", ", line 2: the table has no column ema"),
    (TABLE, f"{HEAD}b,1,e,1,2\nb,1,e,inf,2\n".encode(), ", line 3: guidance is inf"),
    (TABLE, f"{HEAD}b,1,e,1,2,3\n".encode(), ", line 2: it has another number of cells"),
    (TABLE, f"fid_low,{HEAD}x,b,1,e,1,2\n".encode(), ", line 2: fid_low is 'x', not a number"),
    (TABLE, HEAD.encode() + b"x" * 200_000, "field larger than field limit"),
    (TABLE, f"{sweep.SHARE},{HEAD}x,b,1,e,1,2\n".encode(), f"{sweep.SHARE} is 'x', not a number"),
    (SCORES, b'{"card":{},"scores":{"fid":[3.5]}}', "holds no scores with a card (KeyError('extra"),
    (SCORES, b'{"card":{"extractor":[]},"scores":{}}', "with a card (TypeError('the extractor is"),
    (SCORES, b'{"scores":{"fid":3.5}}', "holds no scores with a card (KeyError('card'))"),
    (SCORES, b"\xff", "holds no scores with a card (UnicodeDecodeError("),
    (SCORES, b"[" * 100_000, "holds no scores with a card (ValueError('the JSON is nested too deep"),
    (SCORES, b"[]", "holds no scores with a card (TypeError("),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_one_damaged_sweep_is_named_and_hides_no_other(tmp_path, name, content, message):
    runs = [written_sweeps.write_run(tmp_path / run) for run in "ab"]
    (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "a" / name).write_bytes(content)
    by_name = results.named([[str(run)] for run in runs])
    page = results.sweeps(results.drawn_by(by_name), str)
    whole = ["a", "b"] if name == TABLE else ["b"]
    assert [one["run"] for one in page["sweeps"]] == whole
    (line,) = page["damaged"]
    assert line.startswith(str(tmp_path / "a" / name)) and message in line and "\n" not in line
    with pytest.raises(ValueError) as refused:
        frozen.page(runs)
    assert str(refused.value) == line


def test_a_report_omits_unknown_columns_and_infinite_scores(tmp_path):
    run = written_sweeps.write_run(tmp_path / "run")
    table = run / "evaluation" / "step_00000002" / sweep.TABLE
    header, *rows = table.read_text().splitlines()
    rows = [row.replace("15.5", "inf") + ",my note" for row in rows]
    table.write_text("\n".join([f"{header},note", *rows]) + "\n")
    assert '"fid": 20.0' in (page := frozen.page([run])) and "15.5" not in page


@pytest.mark.parametrize(
    ("name", "content", "steps"),
    [
        ("metrics.jsonl", b"{\n", 0),
        ("manifest.json", b"\xff", 2),
        ("config.json", b"\xff", 2),
        ("config.json", json.dumps({"steps": "x"}).encode(), 2),
    ],
)
def test_one_damaged_file_of_a_run_hides_no_other_run(tmp_path, name, content, steps):
    runs = [written_sweeps.write_run(tmp_path / run) for run in "ab"]
    (tmp_path / "a" / name).write_bytes(content)
    shown = results.training(results.named([[str(run)] for run in runs]), str)["runs"]
    assert [run["step"] for run in shown] == [steps, 2]
    assert shown[0]["damage"].startswith(str(tmp_path / "a" / name)) == (steps == 0)
