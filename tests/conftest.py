"""Every test sees eight CPU devices; compiled programs are kept between runs."""

import os
import pathlib

import jax

ROOT = pathlib.Path(__file__).parent.parent

# Unoptimised programs compile in half the time, and the tests' shapes are tiny.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
