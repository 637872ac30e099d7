"""The command `dashboard`: serve the studies in a browser."""

import contextlib
import os
import sys
from typing import Annotated

from autotune.cli.options import Storage, option
from autotune.errors import UserError

TOKEN_VARIABLE = "AUTOTUNE_DASHBOARD_TOKEN"


def dashboard(
    storage: Storage = None,
    port: Annotated[int, option("N", "Port; 0 takes any that is free.")] = 8080,
    host: Annotated[
        str, option("ADDRESS", "Listen there; any but this machine's own loopback asks for a token.")
    ] = "127.0.0.1",
) -> None:
    """Serve the dashboard until Ctrl-C."""
    from autotune.report.dashboard import server
    from autotune.session import STUDIES, default_storage

    token = os.environ.get(TOKEN_VARIABLE) or (None if server.is_loopback(host) else server.new_token())
    if token is not None and not server.is_strong(token):
        raise UserError(
            f"{TOKEN_VARIABLE}: at least {server.LEAST_TOKEN} letters, digits, '-', '_', '.' or '~' are needed;"
            " python -c 'import secrets; print(secrets.token_urlsafe(24))' makes one"
        )
    with server.make_server(storage or default_storage(), STUDIES.absolute(), host, port, token) as served:
        print(f"dashboard at {server.address(served, host, token)}", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr)
        if not server.is_loopback(host):
            print(f"Anyone with this address can read every study. {TOKEN_VARIABLE} sets the token.", file=sys.stderr)
            print(
                "The connection is not encrypted; in an untrusted network keep to the loopback and use ssh -L.",
                file=sys.stderr,
            )
        with contextlib.suppress(KeyboardInterrupt):
            served.run()
