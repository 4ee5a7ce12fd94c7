"""Check XLA_FLAGS before XLA reads it, because XLA aborts the process if a flag is unknown."""

import os
import re
import subprocess
import sys

# Every jaxlib from 0.10 to 0.12 knows these flags. Other flags are tried in a child process.
KNOWN = (
    "xla_backend_optimization_level",
    "xla_dump_hlo_as_text",
    "xla_dump_to",
    "xla_force_host_platform_device_count",
    "xla_gpu_autotune_level",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_triton_gemm",
    "xla_gpu_exclude_nondeterministic_ops",
    "xla_gpu_nccl_termination_timeout_seconds",
)
TRIAL = "from jaxlib import xla_client; xla_client.make_cpu_client()"


def check() -> None:
    """Raise ValueError if the installed jaxlib does not know a flag in XLA_FLAGS."""
    flags = os.environ.get("XLA_FLAGS", "")
    names = re.findall(r"--(\w+)", flags)
    if all(name in KNOWN for name in names):
        return
    trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, text=True)
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", trial.stderr):
        raise ValueError(
            f"XLA_FLAGS holds {unknown[1].strip()}, which this jaxlib does not know: remove it "
            f"from XLA_FLAGS={flags!r}, or install a jaxlib that knows it"
        )
