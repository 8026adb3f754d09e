"""What srun does, on this machine: starts TASKS processes of a command, with the variables that Slurm sets for each.

Usage: python -m tests.scripts.srun_for_tests [--option=value ...] COMMAND ARGUMENTS. With TELL=FILE nothing is started:
options, command and XLA_FLAGS are written there, and the exit code is EXIT.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    first = next(i for i, word in enumerate(arguments) if not word.startswith("--"))
    options = dict(word.removeprefix("--").split("=", 1) for word in arguments[:first])
    command = arguments[first:]
    if told := os.environ.get("TELL"):
        Path(told).write_text(json.dumps([options, command, os.environ["XLA_FLAGS"]]))
        return int(os.environ["EXIT"])
    tasks = int(os.environ["TASKS"])
    step = {
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_NODEID": "0",
    }  # fmt: skip
    processes = []
    for task in map(str, range(tasks)):
        with open(options["output"].replace("%t", task), "a") as log:
            own = step | {"SLURM_PROCID": task, "SLURM_LOCALID": task}
            processes.append(
                subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
            )
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
