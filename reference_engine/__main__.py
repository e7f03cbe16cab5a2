"""`python -m reference_engine`: the bundled engine's command line."""

import os
import sys

import msgspec

from reference_engine.config import EngineConfigError
from reference_engine.faults import FaultError
from reference_engine.flags import read_settings
from reference_engine.serve.http import ListenError
from reference_engine.serve.launcher import LAUNCHED, launch, serve_worker_alone
from reference_engine.serve.process import run
from reference_engine.serve.settings import ServeSettings
from reference_engine.serve.supervisor import WORKER_MODULE, EngineStoppedError


def main(worker_module: str = WORKER_MODULE) -> int:
    """`worker_module` is what a single engine runs as its worker."""
    try:
        if sys.argv[1:] == [LAUNCHED]:
            return run(msgspec.json.decode(sys.stdin.buffer.readline(), type=ServeSettings))
        settings = read_settings(sys.argv[1:], os.environ)
        if settings.tiers.worker_listen is not None:
            return serve_worker_alone(settings)
        return launch(settings) if settings.tiers.is_launched else run(settings, worker_module)
    except (EngineConfigError, FaultError) as error:
        print(f"walkaway engine: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except (ListenError, EngineStoppedError) as error:
        print(f"walkaway engine: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
