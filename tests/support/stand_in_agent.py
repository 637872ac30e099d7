#!/usr/bin/env python3
"""In the place of an agent where only the engine is tried: takes one order up, and stays until it is ended."""

import json
import os
import signal
import sys
import time
from pathlib import Path

spool = Path(sys.argv[sys.argv.index("autotune.executors.node_agent") + 1])
node = os.environ.get("SLURM_PROCID", "0")


def write(path: Path, data: object) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(data))
    draft.replace(path)


def ended(*_: object) -> None:
    for run in taken:
        nodes = len(list(run.glob("node-*.json")))
        write(run / (f"exit-{node}.json" if nodes > 1 else "exit.json"), {"codes": {node: -9}, "killed": "cancel"})
    sys.exit(143)


taken: list[Path] = []
signal.signal(signal.SIGTERM, ended)
write(spool / f"node-{node}.json", {"host": f"n{node}"})
while True:
    orders = spool / "orders.json"
    for order in json.loads(orders.read_text()) if orders.exists() else ():
        run = Path(order.get("run", "/"))
        if "run" in order and run not in taken and (run / "job.json").exists():
            taken.append(run)
            write(run / f"node-{node}.json", {"host": f"n{node}", "since": time.time()})
    time.sleep(0.1)
