"""The process that asks the QNN provider about the NPU: one line of JSON on stdout."""

from __future__ import annotations

import json
import sys

from engine.errors import EngineError
from engine.npu.qnn_session import driver_problem, find_npu


def main() -> None:
    found, finding = find_npu()
    try:
        problem = driver_problem() if found else None
    except EngineError as error:
        problem = str(error)
    answer = {"npu_found": found, "finding": finding, "driver_problem": problem}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
