"""Raw DeepSpeed: several ways to feed and to step an engine; the loop itself is in a module beside this one."""

import sys

import loops

BATCH: int = 8
if __name__ == "__main__":
    ACCUM = 4
    loops.train(sys.argv[1], BATCH, ACCUM, sys.argv[2:])
