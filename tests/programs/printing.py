"""Prints lines in pieces, some without Python, then ends with the code it was given."""

from __future__ import annotations

import os
import sys
import time

import dtensor

rank = dtensor.get_rank()
for piece in (f"first of {rank}\nsec", "ond of ", f"{rank}\n", f"last of {rank}"):
    os.write(1, piece.encode())
    time.sleep(0.05)
os.write(2, f"error of {rank}\n".encode())
print(os.environ.get("OMP_NUM_THREADS"), *sys.argv[1:], file=sys.stderr)
sys.exit(int(sys.argv[1]))
