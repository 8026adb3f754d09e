"""XLA's GPU compiler without a GPU: the plugin's own compiler, told what an H100 is.

    make gpu-compile
    python -m tests.gpu_compile.compile_kernels

The compiler is used in a process of its own, which has the folders of the plugin and of Triton on its path (`run`).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[2]

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Fails the compilation of a kernel that does not fit into its registers.
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
_PTXAS_LINES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "stack": r"(\d+) bytes stack frame",
}


def folder() -> Path:
    """Where `make gpu-compile` puts the compiler for the JAX that runs here."""
    return Path(os.environ.get("GPU_COMPILE_DIR") or ROOT / ".gpu-compile").absolute() / jax.__version__


def triton_folder() -> Path:
    """Where it puts Triton and jax-triton: beside the compiler, because a process that sees that has a GPU plugin."""
    return folder().with_name(f"{jax.__version__}-triton")


def missing() -> list[str]:
    """What is not there of both."""
    parts = [
        folder() / part
        for part in ("jax_plugins/xla_cuda13", "nvidia/cu13/bin/ptxas", "nvidia/cu13/nvvm/libdevice")
    ]
    parts += [triton_folder() / part for part in ("triton", "jax_triton")]
    return [str(part) for part in parts if not part.exists()]


def run(module: str) -> list[dict[str, Any]]:
    """Runs `module`.main() in a process that has the compiler, and returns the lines of JSON that it prints."""
    at = folder()
    with tempfile.TemporaryDirectory() as dump:
        flags = [
            f"--xla_gpu_cuda_data_dir={at / 'nvidia' / 'cu13'}",
            "--xla_gpu_enable_triton_gemm=false",
            "--xla_gpu_autotune_level=0",
            f"--xla_dump_to={dump}",
            "--xla_dump_emitter_re=ptx",
        ]
        environment = os.environ | {
            "PYTHONPATH": f"{at}{os.pathsep}{triton_folder()}",
            "GPU_COMPILE_PTX": dump,
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "XLA_FLAGS": " ".join(flags),
        }
        environment.pop("TRITON_INTERPRET", None)
        code = f"import {module}; {module}.main()"
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=540,
        )
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


# Inside that process ---------------------------------------------------------------------------------------------


def devices(count: int) -> list[Any]:
    """H100s that can be compiled for and nothing else."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{count}").devices


def compile_on(mesh: Any, jitted: Callable[..., Any], *arrays: Any, spills: bool = False) -> Any:
    """The compiled program of a jitted function on a mesh of `devices`; raises where a kernel spills, unless it may."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jitted.lower(*arrays).compile(compiler_options={} if spills else NO_SPILLS)


def record_jax_triton() -> None:
    """From now on the PTX of what jax-triton calls is put where XLA dumps its own, for `ptxas_reports`."""
    from jax._src.lib import gpu_triton

    make_kernel, make_call = gpu_triton.TritonKernel, gpu_triton.TritonKernelCall
    made = []  # jax-triton keeps them too, and calls one more than once

    def kernel(name: str, num_warps: int, num_ctas: int, shared_bytes: int, ptx: str, *rest: Any) -> Any:
        made.append((make_kernel(name, num_warps, num_ctas, shared_bytes, ptx, *rest), name, ptx))
        return made[-1][0]

    def call(called: Any, *rest: Any) -> Any:
        for one, name, ptx in made:
            if one is called:
                (Path(os.environ["GPU_COMPILE_PTX"]) / f"jax_triton_{name}.ptx").write_text(ptx)
        return make_call(called, *rest)

    gpu_triton.TritonKernel, gpu_triton.TritonKernelCall = kernel, call


def ptxas_reports() -> dict[str, dict[str, int]]:
    """Of each kernel compiled since the last call: registers of a thread, bytes of spills and stack, by `ptxas -v`."""
    reports = {}
    for file in sorted(Path(os.environ["GPU_COMPILE_PTX"]).glob("*.ptx")):
        target = re.search(r"^\.target (\w+)", file.read_text(), re.MULTILINE)
        if target:
            reports |= _ptxas_report(file, target[1])
        file.unlink()
    return reports


def _ptxas_report(file: Path, target: str) -> dict[str, dict[str, int]]:
    ptxas = folder() / "nvidia" / "cu13" / "bin" / "ptxas"
    command: Sequence[str | Path] = [ptxas, "-v", f"--gpu-name={target}", file, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    kernels = re.findall(
        r"Compiling entry function '(\S+)'(.*?)(?=Compiling entry|\Z)", done.stderr, re.DOTALL
    )
    return {
        name: {key: int(re.search(line, text)[1]) for key, line in _PTXAS_LINES.items()}
        for name, text in kernels
    }
