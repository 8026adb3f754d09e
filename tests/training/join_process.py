"""One process that joins a group, looks at its devices and ends: the start of scripts/pretrain.py without a model.

Usage: python -m tests.training.join_process [--coordinator ...] [NAME VALUE ...], the latter as settings
"""

import sys

import jax

from training.distributed import join, require_same_devices, take_flags


def main() -> int:
    flags, start_secs, rest = take_flags(sys.argv[1:])
    try:
        count = join(
            flags=flags, settings=dict(zip(rest[::2], rest[1::2], strict=True)), timeout_secs=start_secs
        )
        require_same_devices()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"process {jax.process_index()} of {count} = {jax.process_count()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
