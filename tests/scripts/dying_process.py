"""Stands for scripts._gpu_tasks.work in a process that ends, hangs, gets Ctrl-C or spoils its device, by its tasks' names.

Imports nothing of the repository, so that a process of it starts at once.
"""

import os
import signal
import time

ENDS, UNUSABLE = 7, 3


def work(tasks, connection):
    for task, _ in tasks:
        if task == "ends":
            os._exit(ENDS)
        if task == "gets Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        if task == "hangs":
            time.sleep(60)
        connection.send((task, {"status": "told"}))
        connection.send((task, None))
        if task == "spoils":
            os._exit(UNUSABLE)
