"""Every test sees eight CPU devices; compiled programs are kept between runs."""

import pathlib

import jax

ROOT = pathlib.Path(__file__).parent.parent

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
