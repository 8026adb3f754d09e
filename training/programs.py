"""Programs that span processes, compiled once: by the first process, for all, and kept for the next run.

JAX can do both (`jax_compilation_cache_dir`, `jax_share_binary_between_hosts`), but the key under which it looks a program
up holds a fingerprint of the devices, and that of a CPU device holds the number of its process (JAX 0.10 and 0.12). So every
process but the first missed the cache, which only the first fills, and waited in vain for a program that was shared under
another key. Four processes on two cores took 100 s to compile SCAPE's two programs.
"""

import pathlib

import jax
from jax._src import cache_key  # there is no public way to a key

_SHARE_SECS = 300


def compile_once(folder: str | pathlib.Path) -> None:
    """From here on this process compiles as described above, if its backend is the CPU; every process calls it.

    Args:
      folder: of compiled programs, which all processes can read. It may be kept: the key holds the version of JAX, the
        program and its compiler options. JAX warns where the machine's processor is not the one that compiled.
    """
    if jax.default_backend() != "cpu":
        return
    # By the kind of the devices alone, which is what JAX does for a backend without a fingerprint.
    setattr(cache_key, "_hash_accelerator_config", cache_key._hash_devices)  # noqa: B010
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_share_binary_between_hosts", True)
    # Where processes came to different programs, or another run filled the folder at that very moment.
    jax.config.update("jax_share_binary_between_hosts_timeout_ms", _SHARE_SECS * 1000)
