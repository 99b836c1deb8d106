"""A program that serves a model without weights as `hexlm serve` would; for the shutdown tests.

Arguments: the configuration's flags as JSON, seconds per step, seconds to load (below 0: fail).
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from server.cli.errors import translate
from server.cli.serve import configure_logging, listen, run_service
from server.config import load_config
from server.engine_process import SpawnLauncher
from tests.server.engine_scripts import failing_engine
from tests.server.tiny_models import letters_launcher, loadable


def main() -> int:
    settings = load_config(flags=json.loads(sys.argv[1]))
    step_s, load_s = float(sys.argv[2]), float(sys.argv[3])
    configure_logging(settings.server.log_level)
    launcher = (
        SpawnLauncher(failing_engine, "bad") if load_s < 0 else letters_launcher(step_s, load_s)
    )
    try:
        run_service(settings, [loadable("letters", launcher)], listen(settings), Console())
    except Exception as error:
        failure = translate(error)
        sys.stderr.write(f"hexlm: {failure.message}\n")
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
