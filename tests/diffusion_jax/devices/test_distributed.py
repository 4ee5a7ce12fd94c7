"""Processes find each other with flags or variables of schedulers. These tests start none.

test_processes.py starts real ones.
"""

import types

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from diffusion_jax.devices import distributed

EXPLICIT = {"coordinator_address": "host:1234", "num_processes": 4, "process_id": 0}
EXPLICIT["cluster_detection_method"] = "deactivate"
SLURM = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
SLURM["SLURM_GPUS_ON_NODE"] = "8"


@pytest.fixture
def joined(monkeypatch):
    """Return the arguments of jax.distributed.initialize, or None if it is not called."""
    flags.FLAGS.mark_as_parsed()

    def join(environment, **given):
        asked = []
        initialize = lambda *, initialization_timeout, heartbeat_timeout_seconds, **rest: asked.append(rest)
        with monkeypatch.context() as patch, flagsaver.as_parsed(**given):
            patch.setattr(jax.distributed, "initialize", initialize)
            patch.setattr(distributed, "_check_port", lambda identity: None)
            patch.setattr(distributed.os, "environ", environment)
            distributed.join()
        return asked[0] if asked else None

    yield join
    flags.FLAGS.unparse_flags()


VARIABLES = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        VARIABLES | {"JAX_NUM_PROCESSES": "1"},
        SLURM | {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8"},  # A batch script or a shell in an allocation, without srun.
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_a_single_process_joins_no_cluster_unless_distributed_is_on(joined, environment):
    assert joined(environment) is None
    assert joined(environment, distributed="on") is not None


def test_flags_and_environment_variables_are_equivalent(joined):
    flags = {"coordinator": "host:1234", "num_processes": "4", "process_id": "0"}
    assert joined({}, **flags) == joined(VARIABLES) == EXPLICIT
    # Explicit values override those of a scheduler.
    assert joined(SLURM | VARIABLES) == EXPLICIT
    assert joined(SLURM, **flags | {"process_id": "3"}) == EXPLICIT | {"process_id": 3}
    assert joined(VARIABLES, distributed="off") is None


def test_a_single_slurm_task_per_node_uses_all_its_gpus(joined):
    asked = {"cluster_detection_method": "slurm"}
    assert joined(SLURM) == asked | {"local_device_ids": [0, 1, 2, 3, 4, 5, 6, 7]}
    a_task_a_gpu = {"SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    assert joined(SLURM | a_task_a_gpu) == asked | {"local_device_ids": None}
    assert joined(SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}) == asked | {"local_device_ids": None}
    assert joined(SLURM | {"SLURM_GPUS_ON_NODE": ""}) == asked | {"local_device_ids": None}


def test_gke_pods_of_a_tpu_slice_join(joined):
    several = {"TPU_WORKER_HOSTNAMES": "a,b"}, {"TPU_PROCESS_ADDRESSES": "a:1,b:1"}
    for environment in (*several, {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}):
        assert joined(environment) == {"cluster_detection_method": "gketpu"}


@pytest.mark.parametrize(
    ("coordinator", "number", "message"),
    [
        ("host:1", None, "--process_id is missing: set all of"),
        (None, "1", "--coordinator is missing: set all of"),
        ("host:1", "2", "process_id is 2, but with 2 processes it must be from 0 to 1"),
        ("host", "1", "coordinator is 'host': it must be HOST:PORT"),
    ],
)
def test_incomplete_or_invalid_cluster_flags_are_errors(joined, coordinator, number, message):
    values = {"coordinator": coordinator, "num_processes": "2", "process_id": number}
    with pytest.raises(ValueError, match=message):
        joined({}, **{name: value for name, value in values.items() if value})
    with pytest.raises(ValueError, match="--coordinator, --num_processes is missing: set all of"):
        joined({}, process_id="1")


def test_the_table_has_one_line_per_process():
    device = lambda id, process: types.SimpleNamespace(id=id, process_index=process, device_kind="H100")
    devices = [device(0, 0), device(1, 0), device(2, 1), device(3, 1)]
    assert distributed.table(["a", "node-17"], devices).splitlines() == [
        "process  host     devices",
        "      0  a        2 x H100 (ids 0,1)",
        "      1  node-17  2 x H100 (ids 2,3)",
    ]
