"""Engines give equal results: one process, several workers, Beam, and killed workers."""

import collections
import functools
import os
import pathlib
import signal

import pytest

from configs import quickstart
from diffusion_jax.config.settings import Data
from diffusion_jax.data import engines, sources
from diffusion_jax.data.prepare import reshard, validate
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.precache import fill as precache

TWO = "--direct_num_workers=2 --direct_running_mode=multi_processing"


def path(folder, item):
    return folder / f"{item}.txt"


def write(folder, item):
    path(folder, item).write_text(f"{item}")
    return {"odd": item % 2, "all": 1}


def dying(folder, item):
    """Write an item. Item 3 kills its process the first time."""
    if item == 3 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return write(folder, item)


def refusing(folder, item):
    raise ValueError(f"no {item}")


def fill(engine, folder, write=write, items=range(2, 12)):
    folder.mkdir(exist_ok=True)
    return engine.fill(items, functools.partial(path, folder), functools.partial(write, folder))


def contents(folder):
    return {file.name: file.read_text() for file in folder.glob("*")}


@pytest.mark.parametrize(("count", "workers"), [(10, 1), (10, 3), (2, 5), (0, 2)])
def test_each_worker_starts_with_its_own_part_and_then_takes_the_rest(count, workers):
    turns = [list(engines.Worker(w, workers).turns(count)) for w in range(workers)]
    assert all(sorted(order) == list(range(count)) for order in turns)
    own = [order[: count * (w + 1) // workers - count * w // workers] for w, order in enumerate(turns)]
    assert [i for part in own for i in part] == list(range(count))


def test_fill_does_not_rewrite_existing_files(tmp_path):
    path(tmp_path, 4).write_text("before")
    assert fill(engines.Worker(1, 2), tmp_path) == {"odd": 5, "all": 9}
    assert contents(tmp_path) == {f"{i}.txt": f"{i}" for i in range(2, 12)} | {"4.txt": "before"}
    assert fill(engines.Worker(), tmp_path) == {}


def test_fill_skips_items_that_another_worker_has_written_meanwhile(tmp_path):
    def both(folder, item):
        write(folder, 5)  # In place of another worker.
        return write(folder, item)

    assert fill(engines.Worker(), tmp_path, both)["all"] == 9


def test_the_next_item_is_read_while_one_is_written(tmp_path):
    read = []
    function = lambda item: read.append(item) or -item

    def write_item(item, value):
        path(tmp_path, item).write_text(f"{value}")

    engines.ALONE.fill(range(3), functools.partial(path, tmp_path), write_item, read=function)
    assert read == [0, 1, 2] and contents(tmp_path)["2.txt"] == "-2"
    assert list(engines.ahead(abs, iter([]))) == []


def test_pickled_data_sources_are_opened_again_once_per_process(tmp_path):
    digits.write_examples(tmp_path, 3, size=8)
    opened = sources.open_records(Data("folder", path=str(tmp_path)))
    sent = lambda value: engines.unpickled(engines.pickled(value))
    read = functools.partial(opened.texts, [0, 2])
    again = sent(opened)
    assert again is not opened and again.texts([0, 2]) == opened.texts([0, 2]) == sent(read)()
    assert sent(opened) is again  # Opened once per process.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": "beam", "workers": 2}, r"remove --worker and --workers, and set"),
        ({"beam_options": "--runner=X"}, r"--beam_options=--runner=X is for --engine=beam"),
        ({"worker": 2, "workers": 2}, r"--worker=2 of --workers=2: the index must be from 0 to 1"),
    ],
)
def test_invalid_engine_flags_are_errors(flags, message):
    names = {"engine": "alone", "beam_options": "", "worker": None, "workers": None}
    args = collections.namedtuple("Args", names)(**names | flags)
    with pytest.raises(ValueError, match=message):
        engines.of(args)


def test_workers_are_counted_from_0():
    assert [engines.share(*of) for of in ((0, 2), (1, 2), (None, None))] == [(0, 2), (1, 2), (0, 1)]


def test_a_missing_beam_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs Apache Beam: pip install -e "\.\[beam\]"'):
        engines.beam("")


def here(items, run):
    """Run all items in this process, in place of a Beam runner."""
    for item in items:
        run(item)


def test_two_beam_jobs_can_fill_one_folder(tmp_path, monkeypatch):
    folder, counted = tmp_path / "both", []

    def both(self, items, run):
        monkeypatch.setattr(engines.Beam, "_run", lambda self, *given: here(*given))
        counted.append(fill(engines.Beam(), folder))  # Another job fills the folder first.
        here(items, run)

    monkeypatch.setattr(engines.Beam, "_run", both)
    counted.append(fill(engines.Beam(), folder))
    assert counted == [{"odd": 5, "all": 10}] * 2
    assert contents(folder) == {f"{i}.txt": f"{i}" for i in range(2, 12)}
    monkeypatch.setattr(engines.Beam, "_run", lambda self, *given: here(*given))
    with pytest.raises(OSError, match="Beam did not finish 10 of 10 shards: no 2"):
        fill(engines.Beam(), tmp_path / "none", refusing)
    assert contents(tmp_path / "none") == {}


def test_beam_runs_at_most_three_times_for_items_of_dead_workers(tmp_path, monkeypatch):
    runs = []

    def first_only(self, items, run):
        runs.append(list(items))
        run(items[0])
        raise RuntimeError("a worker died")

    monkeypatch.setattr(engines.Beam, "_run", first_only)
    with pytest.raises(OSError, match="Beam did not finish 2 of 5 shards: a worker died"):
        fill(engines.Beam(), tmp_path / "out", items=range(5))
    assert runs == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4]]


@pytest.fixture
def beam(monkeypatch):
    """Return a function that builds a Beam engine, whose worker processes import this file."""
    pytest.importorskip("apache_beam")
    root = str(pathlib.Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    return engines.beam


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", TWO])
def test_beam_writes_and_counts_the_same_items_as_one_process(tmp_path, beam, options):
    path(tmp_path, 4).write_text("before")
    assert fill(beam(options), tmp_path) == {"odd": 5, "all": 9}
    assert contents(tmp_path) == {f"{i}.txt": f"{i}" for i in range(2, 12)} | {"4.txt": "before"}


@pytest.mark.slow
# Raised by Beam itself.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_beam_repeats_the_items_of_a_killed_worker(tmp_path, beam):
    assert fill(beam(TWO), tmp_path, dying) == {"odd": 5, "all": 10}
    expected = {f"{i}.txt": f"{i}" for i in range(2, 12)}
    assert contents(tmp_path) == {**expected, "died": ""}


@pytest.mark.slow
def test_a_failed_beam_job_is_a_one_line_error(tmp_path, beam):
    with pytest.raises(OSError, match=r"Beam did not finish 10 of 10 shards: no \d+ \[while running"):
        fill(beam(""), tmp_path, refusing)


@pytest.mark.slow
def test_reshard_and_precache_write_the_same_bytes_on_beam(tmp_path, beam):
    """The workers open the data, the captions and the text encoder again."""
    digits.write_examples(tmp_path / "data", 30, size=8)
    opened = sources.open_records(Data("folder", path=str(tmp_path / "data")))
    config = quickstart.get_config().to_dict() | {"prompts": ("one", "two"), "evaluation": {}}
    config["data"] |= {"source": "folder", "path": str(tmp_path / "data")}
    written = []
    for name, engine in {"alone": engines.ALONE, "beam": beam(TWO)}.items():
        out = tmp_path / name
        counts = reshard.reshard(opened, out / "tars", num=8, format="webdataset", identity={}, engine=engine)
        assert counts == {"written": 30}
        config["text"]["store"] = str(out / "store")
        work = precache.EncodingOptions(shard_captions=8, engine=engine)
        precache.run(precache.open_job(config), work)
        (parts := out / "parts").mkdir()
        report = validate.validate(opened, threads=1, folder=parts, engine=engine)
        assert report["usable"] == 30
        files = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        assert not [path for path in files if path.suffix == ".tmp"]
        written.append(files | {"report": report})
    assert written[0] == written[1] and len(written[0]) > 10
