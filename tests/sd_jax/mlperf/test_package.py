"""MLCommons' package checker accepts our submissions."""

import json
import logging

import pytest
from mlperf_logging.package_checker import package_checker

from sd_jax import rcp
from sd_jax.mlperf import mllog, package, rules
from tests.imagen_jax import commands

BATCH = 512
EVALUATIONS = [(512_000, 240.0, 0.06), (1_024_000, 120.0, 0.12), (2_560_000, 89.0, 0.16)]
HYPERPARAMETERS = {
    "global_batch_size": BATCH, "gradient_accumulation_steps": 1, "eval_samples": 30_000,
    "opt_name": "adamw", "opt_adamw_beta_1": 0.9, "opt_adamw_beta_2": 0.999,
    "opt_adamw_epsilon": 1e-8, "opt_adamw_weight_decay": 0.01,
    "opt_base_learning_rate": 1.25e-7 * BATCH, "opt_learning_rate_warmup_steps": 1_000,
}  # fmt: skip


def write_run(workdir, seed, cleared=True, org="us"):
    """Write the log and the manifest of a complete run in the closed division."""
    log = mllog.open_log(workdir)
    log.event("cache_clear", cleared)
    log.event("submission_benchmark", rules.NAME)
    header = {"division": "closed", "org": org, "platform": "eight_h100", "status": "onprem"}
    for key, value in header.items():
        log.event(f"submission_{key}", value)
    log.start("init_start")
    log.event("seed", seed)
    for key, value in HYPERPARAMETERS.items():
        log.event(key, value)
    log.end("init_stop")
    log.start("run_start")
    log.event("train_samples", 6_100_000)
    at = {}
    for samples, fid, clip in EVALUATIONS:
        at = {"samples_count": samples}
        log.start("block_start", metadata=at)
        log.end("block_stop", metadata=at)
        log.start("eval_start", metadata=at)
        for metric, value in (("FID", fid), ("CLIP", clip)):
            log.event("eval_accuracy", value, metadata={**at, "metric": metric})
        log.end("eval_stop", metadata=at)
    log.end("run_stop", metadata={"status": "success", **at})
    for handler in log.logger.handlers:
        handler.close()
    devices = {"platform": "gpu", "kind": "NVIDIA H100", "count": 16, "processes": 2}
    run = {"devices": devices, "versions": {"python": "3.12", "jax": "0.10.2"}}
    (workdir / "manifest.json").write_text(json.dumps({"runs": [run]}))
    return workdir / mllog.RESULT


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / str(i), seed=100 + i) for i in range(10)]


def test_mlcommons_checker_accepts_a_packed_submission(runs, tmp_path, caplog):
    (tmp_path / "system.json").write_text('{"host_processor_core_count": "96", "sw_notes": "hi"}')
    arguments = [str(path) for path in runs] + ["--package", str(tmp_path / "packed")]
    ended = commands.run("sd_jax.rcp", *arguments, "--system", str(tmp_path / "system.json"))
    assert ended.code == 0, ended.err
    folder = tmp_path / "packed" / "us"
    assert f"python -m mlperf_logging.package_checker {folder} training 5.0.0" in ended.out
    assert "empty: host_processors_per_node, host_processor_model_name" in ended.out
    with caplog.at_level(logging.INFO):
        package_checker.check_training_package(
            str(folder), "training", "5.0.0", True, False, False, False, False, "none"
        )
    assert "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" in caplog.text
    assert "RCP Test Passed" in caplog.text
    system = json.loads((folder / "systems" / "eight_h100.json").read_text())
    assert (system["number_of_nodes"], system["accelerators_per_node"]) == ("2", "8")
    assert (system["accelerator_model_name"], system["framework"]) == ("NVIDIA H100", "JAX 0.10.2")
    assert (system["host_processor_core_count"], system["sw_notes"]) == ("96", "hi")
    code = folder / "benchmarks" / rules.NAME / "implementations" / "eight_h100"
    assert (code / "sd_jax" / "mlperf" / "run.py").is_file()
    assert not list(code.rglob("__pycache__"))


def test_packing_warns_about_runs_with_uncleared_caches(runs, tmp_path, capsys):
    other = write_run(tmp_path / "9", seed=7, cleared=False)
    rcp.pack(tmp_path / "packed", [*runs[:9], other], None)
    printed = capsys.readouterr().out
    assert f"{other} does not state that the system's caches were cleared" in printed
    assert printed.count("caches were cleared") == 1
    system = json.loads((tmp_path / "packed/us/systems/eight_h100.json").read_text())
    assert system["sw_notes"].startswith("code sha256 ")


def test_runs_that_are_not_a_valid_submission_are_errors_and_write_nothing(runs, tmp_path):
    def refused(paths):
        with pytest.raises(ValueError) as error:
            package.write(tmp_path / "packed", paths, {})
        assert not (tmp_path / "packed").exists()
        return str(error.value)

    assert "needs the logs of 10 runs, not of 9" in refused(runs[:9])
    twin = write_run(tmp_path / "twin", seed=103)
    assert "two of the runs have the seed 103, but MLPerf's" in refused([*runs[:9], twin])
    them = write_run(tmp_path / "them", seed=1, org="them")
    assert "submission_org is us in" in refused([*runs[:9], them])
    nobody = [write_run(tmp_path / f"n{i}", seed=i, org="none") for i in range(10)]
    assert "--org=NAME and --platform=NAME" in refused(nobody)
