"""The flags of `walkaway run`: each with its help, in the order in which it shows them."""

from typing import Annotated

import typer

from harness.command_line import target_names, workload_names

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", hidden=True, autocompletion=workload_names)
]

# Which server, and how to speak to it.
Target = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The server; without it the bundled engine is started."),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What kind of server (walkaway targets) or a path.",
        autocompletion=target_names,
    ),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="The model's name on the server.")]
MetricsUrl = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Where its metrics are, if not URL/metrics. Repeatable."),
]
ApiKeyEnv = Annotated[
    str | None, typer.Option(metavar="VAR", help="Environment variable with the API key.")
]
Header = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="A header for each request. Repeatable."),
]
CaFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="CAs (PEM) to trust over https, in place of the usual."),
]

# How the load is made.
Processes = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Share the load between N processes. Default 1."),
]
CancellationRate = Annotated[
    float | None,
    typer.Option(metavar="PERCENT", help="So many of the requests are left (as in AIPerf)."),
]
CancellationDelay = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="So long after a request was fully sent. Default 0."),
]

# In the browser.
Web = Annotated[
    bool, typer.Option("--web", help="Start and stop it in a browser, and watch it there.")
]
WebPort = Annotated[int, typer.Option(metavar="PORT", min=1, help="Of that page.")]
