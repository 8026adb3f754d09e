"""Stands for scripts._gpu_tasks.work in a process that ends, hangs or spoils its device, by the names of its tasks.

Imports nothing of the repository, so that a process of it starts at once.
"""

import os
import time

ENDS, UNUSABLE = 7, 3


def work(tasks, connection):
    for task, _ in tasks:
        if task == "ends":
            os._exit(ENDS)
        if task == "hangs":
            time.sleep(60)
        connection.send((task, {"status": "told"}))
        connection.send((task, None))
        if task == "spoils":
            os._exit(UNUSABLE)
