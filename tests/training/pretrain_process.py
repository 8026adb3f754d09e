"""scripts/pretrain.py as it is, but that the steps of process 1 take NAP_SECS longer.

Usage: python -m tests.training.pretrain_process ARGUMENTS, with the variables of training.distributed.join.
"""

import runpy

from tests.training.rounds_process import slowed
from tests.training.runs_for_tests import PRETRAIN
from training import outer

if __name__ == "__main__":
    plain = outer.local_step
    outer.local_step = lambda *arguments: slowed(plain(*arguments))
    runpy.run_path(str(PRETRAIN), run_name="__main__")
