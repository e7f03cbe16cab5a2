"""`walkaway calibrate`: a machine for simulations, from runs."""

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.app import Force, result_flag
from harness.store.output import check_output, is_stdout, write_output


def calibrate(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", hidden=True)],
    output: Annotated[
        Path | None,
        result_flag("-o", "--output", metavar="FILE", help="Default: RUN/machine.toml."),
    ] = None,
    force: Force = False,
) -> None:
    """Measure a machine for `walkaway simulate` from finished runs.

    Fits the terms of a step to the runs' step logs, and takes the lags between processes from what
    clients and server stamped. The bundled engine gives both logs. Several runs cover more: other
    numbers of users, other lengths.

    Example: walkaway calibrate results/before -o desk.toml
    """
    from harness.formatting import quantity
    from harness.simulate.calibrate import as_toml, read_runs
    from harness.simulate.calibrate import calibrate as measure

    path = output or runs[0] / "machine.toml"
    check_output(path, ours=None, may_overwrite=force)
    machine = measure(read_runs(runs), name="machine" if is_stdout(path) else path.stem)
    write_output(path, as_toml(machine).encode(), ours=None, may_overwrite=force)
    fit = machine.error
    assert fit is not None
    said = "printed" if is_stdout(path) else f"wrote {path}"
    typer.echo(
        f"{said}: {fit.n} steps, error of a step's length by cross-validation "
        f"{quantity(fit.mape, 'ratio')} on average, {quantity(fit.p99, 'ratio')} at p99, "
        f"bias {quantity(fit.bias, 'ratio')}",
        err=is_stdout(path),
    )
