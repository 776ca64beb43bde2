"""`halfulp serve`: a page that follows runs while they are being written."""

from __future__ import annotations

from pathlib import Path

from halfulp.cli.shell import say


def serve(runs: tuple[Path, ...], /, *, port: int = 8765) -> int:
    """Show runs while they live, in a browser on this machine: halfulp serve RUNS

    Losses, measurements, alarms and which heads they are in, of folders that halfulp train,
    halfulp.watch, halfulp isolate and halfulp demo write, also of those that begin later. Nothing
    is written and nothing that a folder names is run. No other machine can read the page; other
    users of this one can. Ctrl-C ends it.

    Args:
        runs: Run folders, or folders that hold some.
        port: Where to listen on 127.0.0.1; 0 takes any that is free.
    """
    from halfulp.cli.live import Server, Site

    if not runs:
        raise ValueError("runs: none given; accepted are run folders, or folders that hold some")
    for path in runs:
        if not path.is_dir():
            raise ValueError(
                f"runs={str(path)!r} is no folder; accepted are run folders, or folders"
                " that hold some"
            )
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port}: accepted is 0 to 65535")
    try:
        server = Server(Site(runs), port)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port={port}: {error}; accepted is one that is free, and 0 takes any"
        ) from None
    with server:
        count = len(server.site.runs())
        say(f"{server.url} shows {count} run{'s' * (count != 1)}; Ctrl-C ends it")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")
    return 0
